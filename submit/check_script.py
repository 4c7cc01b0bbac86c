"""Check the headers of PBS and Slurm submit scripts for what a scheduler ignores in silence.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

`# PBS`, or a directive after the first command: the job runs, with other settings than the script
says. sbatch refuses lines that end as on Windows. A misspelt option is named by the scheduler
itself: `sbatch --test-only`.
"""

import os
import re
import sys
from pathlib import Path

from study import Parser


def check(path):
    """Return the problems of a submit script, each as the text "line N: ..."."""
    text = path.read_bytes().decode(errors="replace")
    problems, directives, first_command = [], 0, None
    if "\r" in text:
        problems.append("line 1: lines end as on Windows: dos2unix")
    if not text.startswith("#!"):
        problems.append("line 1: the first line has to name the shell: #!/bin/bash")
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"(#| +#(?=SBATCH)|# +(?=\w+ *-))(SBATCH|PBS)\b(.*)", line)
        if match and match[1] != "#":
            problems.append(f"line {number}: not read by the scheduler: it wants `#{match[2]} ` "
                            "at the start of the line")
        elif match:
            directives += 1
            if not match[3].lstrip().startswith("-"):
                problems.append(f"line {number}: no option: it begins with -")
            if first_command:
                problems.append(f"line {number}: not read by the scheduler: it comes after the "
                                f"first command (line {first_command})")
        elif line.strip() and not line.lstrip().startswith("#"):
            first_command = first_command or number
            problems += [f"line {number}: no file {place}" for place in places(line)
                         if not (path.parent / place).exists()]
    return problems if directives else [*problems, "no directive: neither #PBS nor #SBATCH"]


def places(line):
    """Return the relative paths that a command changes to or sources."""
    def value(variable):  # ${WORKSHOP:-..} is .. unless the variable is set
        return os.environ.get(variable[1]) or variable[2]

    plain = re.sub(r"\$\{(\w+):-([^}]*)\}", value, line)
    return re.findall(r'(?:^|[;&] *)(?:cd|\.|source) +"?(\.{1,2}/[\w./-]+)', plain)


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
