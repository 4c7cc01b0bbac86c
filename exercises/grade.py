"""Grade an exercise: python exercises/grade.py 3; or all of them: python exercises/grade.py all

Prints which checks pass, stops at the first that fails, and gives one hint. Exit code 0: all pass;
1: one fails, or the file does not run. `all` prints one line of JSON, with the exercises solved.
"""

import getpass
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

from workshop.flags import Parser

EXERCISES = Path(__file__).resolve().parent
FOLDERS = {int(path.name.split("_")[0]): path for path in EXERCISES.glob("[0-9]*_*")}
PASSED, FAILED = 0, 1


def grade(folder, file):
    """Run a learner's file, print the checks, and return the exit code."""
    from runner import NotRun  # here, so that a usage error need not wait for torch
    print(f"exercise {folder.name}: {os.path.relpath(file)}")
    sys.path[:0] = [str(folder), str(file.parent)]  # for check.py and the learner's imports
    sys.path.append(str(EXERCISES.parent))  # for the package cluster
    try:
        for description, passed, hint in importlib.import_module("check").checks(file):
            print(f"  {'ok  ' if passed else 'FAIL'}  {description}")
            if not passed:
                print(f"hint: {hint}")
                return FAILED
    except NotRun as problem:
        print(f"  FAIL  the file runs to completion\nhint: {problem}")
        return FAILED
    except (AttributeError, TypeError, ValueError) as problem:  # an answer of another type
        print(f"  FAIL  the answers have the types that the file asks for\nhint: {problem}")
        return FAILED
    print("all checks passed")
    return PASSED


def grade_all():
    """Print {"user": ..., "solved": [numbers of exercises]} of this clone as one line of JSON."""
    solved = []
    for number in sorted(FOLDERS):
        print(f"exercise {number}", file=sys.stderr)
        command = [sys.executable, __file__, str(number)]
        if subprocess.run(command, capture_output=True).returncode == PASSED:
            solved.append(number)
    print(json.dumps({"user": getpass.getuser(), "solved": solved}))


def main():
    parser = Parser(__doc__)
    parser.add_argument("number", choices=[*map(str, sorted(FOLDERS)), "all"],
                        help="number of the exercise")
    parser.add_argument("--file", type=Path, help="grade this file, not the folder's exercise.py")
    args = parser.parse_args()
    if args.number == "all":
        return grade_all()
    folder = FOLDERS[int(args.number)]
    return grade(folder, (args.file or folder / "exercise.py").resolve())


if __name__ == "__main__":
    sys.exit(main())
