"""Holds the lock of a place for some seconds: `python held_lock.py TOOLS FILE SECONDS`."""

import sys
import time

sys.path[0] = sys.argv[1]
import lock  # noqa: E402

with lock.alone(sys.argv[2], "the place") as waited:
    print("held", waited, flush=True)
    time.sleep(float(sys.argv[3]))
