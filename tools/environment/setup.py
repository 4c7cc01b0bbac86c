"""Make the workshop's environment, where it is not ready, as `make setup` does.

    python3 tools/environment/setup.py --venv FOLDER

It is run with whatever python3 there is, so this file is for any Python 3 and uses the standard library only. Where
the environment is there, its own Python goes on: which one the caller has makes no difference. environment.py does the
work.
"""

import argparse
import os
import signal
import subprocess
import sys

STARTS = "import os, sys; sys.exit(not os.path.samefile(sys.prefix, sys.argv[1]))"


def hand_over(venv):
    """Go on as the environment's own Python, if it has one and this is another."""
    python = os.path.join(venv, "bin", "python")
    if not os.path.lexists(python) or os.path.realpath(sys.prefix) == os.path.realpath(venv):
        return
    try:
        code = subprocess.call([python, "-c", STARTS, venv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:  # a link to what is not there
        code = 1
    if code:
        sys.exit("set-up failed: {} does not start (is the Python gone that it was made from?): take another place "
                 "with VENV=..., or remove {}, if it is yours, and run make setup again".format(python, venv))
    os.execv(python, [python, os.path.abspath(__file__), "--venv", venv])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", required=True, help="the folder of the environment")
    parser.error = lambda message: parser.exit(2, "set-up failed: {}\n".format(message))  # one line, without the usage
    venv = parser.parse_args().venv
    if not venv:  # the folder one is in would become an environment
        parser.error("name the folder of the environment: VENV=...")
    venv = os.path.abspath(venv)
    hand_over(venv)
    if sys.version_info < (3, 11):
        sys.exit("set-up failed: this is Python {}.{}; the pins need 3.11 or newer: make setup PYTHON=python3.11"
                 .format(*sys.version_info))
    import environment  # only now: an older Python could not read it

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no pip that works on while others take the lock
    try:
        environment.make_ready(venv)
    except KeyboardInterrupt:
        sys.exit("set-up failed: interrupted; make setup begins again")
    except OSError as problem:  # a full disk, say
        sys.exit("set-up failed: {}".format(problem))


if __name__ == "__main__":
    main()
