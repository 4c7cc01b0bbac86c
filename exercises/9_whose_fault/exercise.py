"""Whose fault is it? Three scripts, one mistake each.

Each script in scripts/ trains to its end without an error, and is wrong. Name its mistake in place
of None: one of the names in the table of README.md, in quotes.
"""

ANSWERS = {
    "a": None,
    "b": None,
    "c": None,
}
