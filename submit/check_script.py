"""Check the headers of PBS and Slurm submit scripts for what a scheduler ignores in silence.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

`# PBS`, or a directive after the first command: the job runs, with other settings than the script
says. A misspelt option is named by the scheduler itself: `sbatch --test-only`.
"""

import os
import re
import sys
from pathlib import Path

from study import Parser


def check(path):
    """Return the problems of a submit script, each as the text "line N: ..."."""
    text = path.read_bytes().decode(errors="replace")
    problems, first_command = [], None
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"(#| +#(?=SBATCH)|# +(?=\w+ *-))(SBATCH|PBS)\b", line)
        if match and match[1] != "#":
            problems.append(f"line {number}: not read by the scheduler: it wants `#{match[2]} ` "
                            "at the start of the line")
        elif match and first_command:
            problems.append(f"line {number}: not read by the scheduler: it comes after the "
                            f"first command (line {first_command})")
        elif line.strip() and not line.lstrip().startswith("#"):
            first_command = first_command or number
    return problems


def main():
    parser = Parser(__doc__)
    parser.add_argument("scripts", nargs="+", type=Path)
    faulty = False
    for path in parser.parse_args().scripts:
        if not os.path.isfile(path):  # pathlib's raises at a name that is too long
            parser.error(f"no file {path}")
        for problem in check(path):
            print(f"{path}: {problem}")
            faulty = True
    sys.exit(faulty)


if __name__ == "__main__":
    main()
