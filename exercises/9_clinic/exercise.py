"""The clinic: six records and three trainings, one cause each.

Replace each None with a name, in quotes, out of the tables of README.md.
"""

RECORDS = {  # (cause, next step); "stack of rank 0" is a "stack of rank N"
    "profile": (None, None),
    "ranks": (None, None),
    "trace": (None, None),
    "memory": (None, None),
    "loss": (None, None),
    "dump": (None, None),
}
TRAININGS = {
    "a": None,
    "b": None,
    "c": None,
}
