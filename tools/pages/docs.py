"""Refresh the copied files, the generated fences in the pages, and the figures.

A comment in a page names the content of the fence after it; each WORDS must match exactly one line
or hunk:

    <!-- lesson: PATH | WORDS | WORDS -->   lines of a file; the whole file without WORDS
    <!-- hunk: WORDS | WORDS -->            hunks of the page's diff
    <!-- output: PROGRAM RANKS FLAG... -->  what a run printed, from assets/records/outputs.jsonl
    <!-- sample: PROGRAM RANKS FLAG... -->  the same, depends on the machine: not tested
    <!-- table: demo -->                    what `make demo` prints, from demo.jsonl
    <!-- table: zero PRECISION -->          the bytes of chapter 5, from zero.jsonl
    <!-- table: bench SECTION -->           the results of one section of `make bench`

A page names the two files of its diff once: <!-- diff 01_single_node/main.py 03_ddp/main.py -->
"""

import difflib
import re
import sys
import textwrap

import pandas

from submit.study import RECORDS, ROOT, read
from tools.measuring import demo, zero
from tools.pages import figures

PAIR = re.compile(r"<!-- diff (\S+) (\S+) -->")
FENCE = re.compile(
    r"<!-- (lesson|hunk|output|sample|table): (.+?) -->\n(?:```\w*\n.*?^```\n)?", re.M | re.S)
FOLDERS = ("docs", "[0-9]*", "exercises", "reading_data", "submit")  # with pages, at any depth
MASTERS = ("01_single_node/ranks.py", "01_single_node/workshop.py", "01_single_node/report.py",
           "01_single_node/resnet.py", "04_deepspeed/ds_config.py", "04_deepspeed/checkpoints.py")


def pages():
    """Return the paths of all pages."""
    below = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.md")]
    return [*sorted(ROOT.glob("*.md")), *sorted(below)]


def copies():
    """Yield (master, copy) for each folder whose programs import another folder's master."""
    folders = [main.parent for main in sorted(ROOT.glob("[0-9]*/**/main.py"))]
    for master in map(ROOT.joinpath, MASTERS):
        for folder in (*folders, ROOT / "submit"):
            programs = "\n".join(path.read_text() for path in folder.rglob("*.py"))
            imported = re.search(rf"^ *(import|from) {master.stem}\b", programs, re.M)
            if imported and folder != master.parent:
                yield master, folder / master.name


def hunks(old, new):
    """Return the differing blocks of two files, each as the text of its - and + lines."""
    a, b = ((ROOT / name).read_text().splitlines() for name in (old, new))
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return ["\n".join([f"-{line}" for line in a[i:j]] + [f"+{line}" for line in b[k:m]])
            for tag, i, j, k, m in blocks if tag != "equal"]


def index(words, texts, where):
    """Return the index of the only text that contains these words, else raise ValueError."""
    indices = [number for number, text in enumerate(texts) if words in text]
    if len(indices) != 1:
        raise ValueError(f"{words!r} matches {len(indices)} {where}, expected exactly 1")
    return indices[0]


def lesson(path, *words):
    """Return the lines that contain these words, in the file's order; without words the file."""
    text = (ROOT / path).read_text()
    if not words:
        return text
    lines = text.splitlines()
    numbers = {index(part, lines, f"lines of {path}") for part in words}
    return textwrap.dedent("\n".join(lines[number] for number in sorted(numbers)))


def recorded(*words):
    """Return the recorded output of a run."""
    texts = {record["words"]: record["text"] for record in read("outputs.jsonl")}
    if " ".join(words) not in texts:
        raise ValueError(f"no recorded output of {' '.join(words)!r}; run: "
                         "python -m tools.pages.outputs")
    return texts[" ".join(words)]


def bench(section):
    """Return the results of one section of the benchmark, from its record."""
    for path in RECORDS.glob("bench*.txt"):
        for text in path.read_text().split("\n\n"):
            if text.startswith(f"{section}. "):
                lines = text.splitlines()
                return "\n".join(lines[index("A images/s", lines, "lines of a section"):])
    raise ValueError(f"no file of assets/records has section {section} of the benchmark")


def table(name, selection=None):
    """Return a table of assets/records, as text."""
    if name == "bench":
        return bench(selection)
    if name == "demo":
        return demo.table(read("demo.jsonl"))
    records = pandas.DataFrame(read(f"{name}.jsonl"))
    return zero.table(records[records["precision"] == selection])


def render(text, output=recorded):
    """Return the page's text with every fence rewritten. Raises ValueError as index() does."""
    pair = PAIR.search(text)
    blocks = hunks(*pair.groups()) if pair else []

    def fence(match):
        kind, words = match.groups()
        parts, language = words.split(" | "), ""
        if kind == "hunk":
            language = "diff"
            content = "\n".join(blocks[index(part, blocks, "hunks")] for part in parts)
        elif kind == "lesson":
            language = "python" if parts[0].endswith(".py") else "bash"
            content = lesson(*parts)
        elif kind == "table":
            content = table(*words.split())
        else:
            content = output(*words.split())
        content = "\n".join(line.rstrip() for line in content.splitlines())
        return f"<!-- {kind}: {words} -->\n```{language}\n{content}\n```\n"

    return FENCE.sub(fence, text)


def main():
    for master, copy in copies():
        copy.write_bytes(master.read_bytes())
    for path in pages():
        text = path.read_text()
        try:
            new_text = render(text)
        except ValueError as problem:
            sys.exit(f"{path.relative_to(ROOT)}: {problem}")
        if new_text != text:
            path.write_text(new_text)
            print("written:", path.relative_to(ROOT))
    figures.main()


if __name__ == "__main__":
    main()
