"""Whose fault is it? Three scripts, one mistake each.

Each script in scripts/ finishes without an error, and is wrong. Replace None with the name of its
mistake, in quotes: one of the names in the table of README.md.
"""

ANSWERS = {
    "a": None,
    "b": None,
    "c": None,
}
