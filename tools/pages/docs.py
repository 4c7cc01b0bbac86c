"""Copy the files that every chapter has, write into the READMEs what commands and files give, and draw their figures.

A comment says what belongs into the fence behind it, which this program writes:

    <!-- lesson: PATH | WORDS | WORDS -->      the lines of a file that matter, each by words that stand in it alone
    <!-- lesson: PATH -->         a file as it is
    <!-- hunk: WORDS | WORDS -->       hunks of the README's diff, each by words that stand in it and in no other
    <!-- output: CHAPTER RANKS FLAG... -->      what the chapter's main.py printed on so many ranks, as recorded
    <!-- sample: PROGRAM RANKS FLAG... -->      the same for what no test compares, because it names the machine
    <!-- table: NAME -->               the table of assets/records/NAME.jsonl, by the program that wrote it
    <!-- table: zero PRECISION -->     of those with this precision
    <!-- command: NAME -->             the command of submit/sweep.py that makes assets/records/NAME.jsonl
    <!-- findings -->                  (no fence) the table of what submit/agree.py finds
    <!-- changes: OLD NEW | OLD NEW -->     how many lines were added and removed between files
    <!-- scale: NAME -->              a table of tools/pages/at_scale.py
    <!-- slow: NAME -->               a table of tools/pages/slow_link.py
    <!-- bench: N -->                  section N of `make bench`, from assets/records/bench*.txt

A chapter's README names the two files of its diff once: <!-- diff 01_single_node/main.py 03_ddp/main.py -->
"""

import difflib
import re
import sys
import textwrap

import agree_verdicts
import pandas
import sweep
from launch import ROOT
from one_line import Parser
from records import RECORDS, published, published_text

from tools.measuring import demo, public_scripts, reading, zero
from tools.pages import at_scale, figures, notebook_seconds, slow_link

PAIR = re.compile(r"<!-- diff (\S+) (\S+) -->")
FENCE = re.compile(r"<!-- (lesson|hunk|output|sample|table|command|changes|scale|slow|bench): (.+?) -->\n"
                   r"(?:```\w*\n.*?^```\n)?", re.M | re.S)
FINDINGS = re.compile(r"<!-- findings -->\n(?:\|.*\n)*")
ROOMS = ("[0-9]*", "exercises", "reading_data", "submit")  # folders that have pages at any depth
MASTERS = ("01_single_node/ranks.py", "01_single_node/workshop.py", "01_single_node/resnet.py",
           "04_deepspeed/ds_config.py", "04_deepspeed/checkpoints.py")
TABLES = {"demo": demo, "zero": zero, "read_data": reading, "public_scripts": public_scripts,
          "notebook_seconds": notebook_seconds, "batch": sweep}


def hunks(old, new):
    """The hunks between two files of the repository, each as the text of its - and + lines."""
    a, b = ((ROOT / name).read_text().splitlines() for name in (old, new))
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return ["\n".join([f"-{line}" for line in a[i:j]] + [f"+{line}" for line in b[k:m]])
            for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]


def changes(old, new):
    """How many lines make one file the other."""
    signs = [line[0] for hunk in hunks(old, new) for line in hunk.splitlines()]
    return f"{old} -> {new}: {signs.count('+')} lines added, {signs.count('-')} removed"


def only(words, places, where):
    """The number of the one place that has these words; raises ValueError where none or several have."""
    found = [number for number, text in enumerate(places) if words in text]
    if len(found) != 1:
        raise ValueError(f"{words!r} stands in {len(found)} {where}")
    return found[0]


def lesson(path, *words):
    """The lines of a file with these words, in the file's order, without the space that all of them have in front."""
    text = (ROOT / path).read_text()
    if not words:
        return text
    lines = text.splitlines()
    chosen = {only(each, lines, f"lines of {path}") for each in words}
    return textwrap.dedent("\n".join(lines[number] for number in sorted(chosen)))


def outputs() -> list[str]:
    """The words of all fences that show what a run prints, each once, in the order of the pages."""
    found = [match[2] for path in readmes() for match in FENCE.finditer(path.read_text())
             if match[1] in ("output", "sample")]
    return list(dict.fromkeys(found))


def recorded(*words):
    """What a run printed, from assets/records/outputs.jsonl."""
    texts = {record["words"]: record["text"] for record in published("outputs.jsonl")}
    words = " ".join(words)
    if words not in texts:
        raise ValueError(f"no record of what {words!r} prints: python -m tools.pages.outputs")
    return texts[words]


def table(name, precision=None):
    """The table of the records in assets/records/NAME.jsonl, or of those with this precision."""
    records = pandas.DataFrame(published(f"{name}.jsonl"))
    return TABLES[name].table(records if precision is None else records[records["precision"] == precision])


def bench(number):
    """The machine's line and one section of the benchmark's output, from that of the files which has it."""
    for path in RECORDS.glob("bench*.txt"):
        head, *sections = published_text(path.name).strip().split("\n\n")
        for section in sections:
            if section.startswith(f"{number}. "):
                return f"{head}\n\n{section}"
    raise ValueError(f"no file of assets/records/ has section {number} of the benchmark")


def render(text, run=recorded):
    """The README's text with every fence written anew; `run` gives what recorded() does.

    Raises ValueError for words that stand in no hunk or in several, and for a hunk that is shown twice or not at all.
    """
    pair = PAIR.search(text)
    everything = hunks(*pair.groups()) if pair else []
    shown = []

    def hunk(*words):
        shown.extend(only(each, everything, "hunks") for each in words)
        return "\n".join(everything[number] for number in shown[-len(words):])

    def fence(match):
        kind, words = match.groups()
        parts = words.split(" | ")
        content = {
            "lesson": lambda: lesson(*parts),
            "hunk": lambda: hunk(*parts),
            "output": lambda: run(*words.split()),
            "sample": lambda: run(*words.split()),
            "table": lambda: table(*words.split()),
            "command": lambda: sweep.command_line(f"assets/records/{words}.jsonl"),
            "changes": lambda: "\n".join(changes(*part.split()) for part in parts),
            "scale": lambda: at_scale.TABLES[words](),
            "slow": lambda: slow_link.text(words),
            "bench": lambda: bench(words),
        }[kind]()
        content = "\n".join(line.rstrip() for line in content.splitlines())
        language = {"hunk": "diff", "lesson": "python" if parts[0].endswith(".py") else "bash"}.get(kind, "")
        return f"<!-- {kind}: {words} -->\n```{language}\n{content}\n```\n"

    text = FINDINGS.sub(lambda _: f"<!-- findings -->\n{agree_verdicts.table()}\n", FENCE.sub(fence, text))
    wrong = [lines for number, lines in enumerate(everything) if shown.count(number) != 1]
    if wrong:
        raise ValueError("hunks that are not shown, or shown twice:\n" + "\n\n".join(wrong))
    return text


def readmes():
    """The pages: those of the top folder, of docs, and of the rooms that attendees enter."""
    rooms = [path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.md")]
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(rooms)]


def copies():
    """Pairs of paths: a file that several chapters have, and its copy beside each main.py that imports it."""
    for master in map(ROOT.joinpath, MASTERS):
        for main in sorted(ROOT.glob("[0-9][0-9]_*/**/main.py")):
            imports = re.search(rf"^ *(import|from) {master.stem}\b", main.read_text(), re.M)
            if imports and main.parent != master.parent:
                yield master, main.parent / master.name


def main():
    Parser(__doc__).parse_args()
    for master, copy in copies():
        if not copy.exists() or copy.read_bytes() != master.read_bytes():
            copy.write_bytes(master.read_bytes())
            print("copied:", copy.relative_to(ROOT))
    problems = []
    for path in readmes():
        text, name = path.read_text(), path.relative_to(ROOT)
        try:
            new = render(text)
        except ValueError as problem:
            problems.append(f"{name}: {problem}")
            continue
        if new != text:
            path.write_text(new)
            print("written:", name)
    figures.main()
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
