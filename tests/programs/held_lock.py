"""Holds the lock of a place for some seconds: `python held_lock.py TOOLS FILE SECONDS`."""

import sys
import time

sys.path[0] = sys.argv[1]
import one_at_a_time  # noqa: E402

with one_at_a_time.alone(sys.argv[2], "the place") as waited:
    print("held", waited, flush=True)
    time.sleep(float(sys.argv[3]))
