"""The clinic: six records and three scripts, one cause each.

Replace each None with a name, in quotes, out of the tables of README.md.
"""

CAUSES = {
    "profile": None,
    "ranks": None,
    "trace": None,
    "memory": None,
    "loss": None,
    "dump": None,
}
NEXT_STEPS = {  # with the rank's number instead of N, as in "stack of rank 0"
    "profile": None,
    "ranks": None,
    "trace": None,
    "memory": None,
    "loss": None,
    "dump": None,
}
SCRIPTS = {
    "a": None,
    "b": None,
    "c": None,
}
