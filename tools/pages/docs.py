"""Refresh the generated fences in the pages, and the figures.

A comment names the content of the fence after it. WORDS must occur in exactly one line or hunk:

    <!-- lesson: PATH | WORDS | WORDS -->   lines of a file; the whole file without WORDS
    <!-- code: PATH | WORDS | WORDS -->     the same without the comments at the ends of lines
    <!-- hunk: WORDS | WORDS -->            hunks of the page's diff
    <!-- output: PROGRAM RANKS FLAG... -->  a run's output, from assets/records/outputs.jsonl
    <!-- table: demo -->                    the table of `make demo`, from demo.jsonl
    <!-- table: sweep STUDY -->             what cluster.sweep prints of scaling.jsonl
    <!-- table: predictions -->             footprint's and plan's errors, of predictions_h200.jsonl

A page names the two files of its diff once: <!-- diff 01_single_node/main.py 03_ddp/main.py -->
"""

import difflib
import re
import sys
import textwrap

import pandas

from cluster import sweep
from cluster.launch import ROOT, run_job
from cluster.records import read_records
from tools.measuring import demo
from tools.pages import figures

DIFF = re.compile(r"<!-- diff (\S+) (\S+) -->")
FENCE = re.compile(
    r"<!-- (lesson|code|hunk|output|table): (.+?) -->\n(?:```\w*\n.*?^```\n)?", re.M | re.S)


def pages():
    """Return the paths of all pages, which are those of the site: git tracks them."""
    return [ROOT / name for name in run_job(["git", "ls-files", "[!.]*.md"]).splitlines()]


def find_hunks(old_path, new_path):
    """Return the hunks of the diff of two files, each as the text of its - and + lines."""
    old, new = ((ROOT / path).read_text().splitlines() for path in (old_path, new_path))
    diff = "\n".join(list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:])
    return [hunk.rstrip("\n") for hunk in re.split("^@@ .* @@\n", diff, flags=re.M)[1:]]


def dedent_hunk(hunk):
    """Return a hunk without the indentation that all its lines have."""
    lines = hunk.splitlines()
    code = textwrap.dedent("\n".join(line[1:] for line in lines)).splitlines()
    return "\n".join(line[0] + code_line for line, code_line in zip(lines, code, strict=True))


def find_index(words, texts, kind):
    """Return the index of the only text that contains these words. Raises ValueError."""
    indices = [index for index, text in enumerate(texts) if words in text]
    if len(indices) != 1:
        raise ValueError(f"{words!r} matches {len(indices)} {kind}, expected exactly 1")
    return indices[0]


def select_lines(path, *patterns):
    """Return the lines that contain the patterns, in the file's order; without any, all lines.

    Adjacent lines keep their indentation relative to each other, others lose it.
    """
    text = (ROOT / path).read_text()
    if not patterns:
        return text
    lines = text.splitlines()
    indices = {find_index(words, lines, f"lines of {path}") for words in patterns}
    blocks = []  # of adjacent lines
    for index in sorted(indices):
        if index - 1 not in indices:
            blocks.append([])
        blocks[-1].append(lines[index])
    return "\n".join(textwrap.dedent("\n".join(block)) for block in blocks)


def read_output(command_line):
    """Return the recorded output of a run. Raises ValueError if there is none."""
    for record in read_records("outputs.jsonl"):
        if record["command_line"] == command_line:
            return record["text"]
    raise ValueError(f"no recorded output of {command_line!r}; run: python -m tools.pages.outputs")


def make_table(name, selection=None):
    """Return a table of a record in assets/records, as text."""
    if name == "demo":
        return demo.table(read_records("demo.jsonl"))
    if name == "predictions":
        runs = pandas.DataFrame(read_records("predictions_h200.jsonl"))
        return pandas.DataFrame({
            "": runs.program, "ranks": runs.ranks, "peak GB": (runs.peak / 1e9).round(2),
            "counted": (runs.counted / runs.peak - 1).map("{:+.1%}".format),
            "step s": runs.step_seconds.map("{:.3f}".format),
            "planned": (runs.planned / runs.step_seconds - 1).map("{:+.0%}".format),
            }).replace(["nan", "+nan%"], "").to_string(index=False)
    records = pandas.DataFrame(read_records("scaling.jsonl"))
    return sweep.table(records.query("study == @selection"))


def render(text):
    """Return the page's text with every fence rewritten. Raises ValueError as find_index() does."""
    diff = DIFF.search(text)
    hunks = find_hunks(*diff.groups()) if diff else []

    def render_fence(match):
        kind, selection = match.groups()
        parts, language = selection.split(" | "), ""
        if kind == "hunk":
            language = "diff"
            indices = [find_index(words, hunks, "hunks") for words in parts]
            content = "\n\n".join(dedent_hunk(hunks[index]) for index in indices)
        elif kind in ("lesson", "code"):
            language = "python" if parts[0].endswith(".py") else "bash"
            content = select_lines(*parts)
            if kind == "code":
                content = re.sub("  # .*", "", content)
        elif kind == "table":
            content = make_table(*selection.split())
        else:
            content = read_output(selection)
        content = re.sub(" +$", "", content.rstrip("\n"), flags=re.M)
        return f"<!-- {kind}: {selection} -->\n```{language}\n{content}\n```\n"

    return FENCE.sub(render_fence, text)


def main():
    for path in pages():
        text = path.read_text()
        try:
            new_text = render(text)
        except ValueError as error:
            sys.exit(f"{path.relative_to(ROOT)}: {error}")
        if new_text != text:
            path.write_text(new_text)
            print("written:", path.relative_to(ROOT))
    figures.main()


if __name__ == "__main__":
    main()
