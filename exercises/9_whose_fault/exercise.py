"""Whose fault is it? Six scripts, one mistake each.

Each script in scripts/ trains to its end without a word, and is wrong. Name its mistake in place of
None: one of the names in the table of README.md, in quotes. Read the script, or ask, in the top
folder:

    torchrun --nproc-per-node 2 submit/agree.py --steps 1000 exercises/9_whose_fault/scripts/a.py
"""

ANSWERS = {
    "a": None,
    "b": None,
    "c": None,
    "d": None,
    "e": None,
    "f": None,
}
