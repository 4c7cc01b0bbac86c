"""Grade an exercise: python exercises/grade.py 3

Says what is right, what is not yet, and gives one hint. The exit code is 0 if all is right, 1 if
something is not yet, 2 if the file could not be run.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

EXERCISES = Path(__file__).resolve().parent
FOLDERS = {int(path.name.split("_")[0]): path for path in EXERCISES.glob("[0-9]*_*")}
RIGHT, NOT_YET, NOT_RUN = 0, 1, 2


def grade(folder, file):
    """Run a learner's file, print its grade, and return the exit code."""
    from runner import NotRun  # a mistake on the command line is answered before torch is imported
    print(f"exercise {folder.name}: {os.path.relpath(file)}")
    sys.path[:0] = [str(folder), str(file.parent)]  # check.py, and what the learner's file imports
    try:
        for what, right, hint in importlib.import_module("check").points(file):
            print(f"  {'right  ' if right else 'not yet'}  {what}")
            if not right:
                print(f"hint: {hint}")
                return NOT_YET
    except NotRun as problem:
        print(f"  not yet  it runs to its end\nhint: {problem}")
        return NOT_RUN
    print("all right")
    return RIGHT


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: parser.exit(NOT_RUN, f"{parser.prog}: {message}\n")  # one line
    parser.add_argument("number", type=int, choices=sorted(FOLDERS), help="of the exercise")
    parser.add_argument("--file", type=Path, help="grade this one, not exercise.py of its folder")
    args = parser.parse_args()
    folder = FOLDERS[args.number]
    file = (args.file or folder / "exercise.py").resolve()
    try:
        compile(file.read_text(), file, "exec")
    except (OSError, UnicodeDecodeError) as problem:
        parser.error(f"{file} cannot be read: {problem}")
    except SyntaxError as problem:
        parser.error(f"{file} line {problem.lineno}: {problem.msg}")
    return grade(folder, file)


if __name__ == "__main__":
    sys.exit(main())
