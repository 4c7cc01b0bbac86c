"""Check the headers of PBS and Slurm submit scripts for what a scheduler passes over in silence.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

`# PBS`, or a directive after the first command: the job runs, with other settings than are written there. (And lines
that end as on Windows, which sbatch refuses.) A misspelt option the scheduler itself names: `sbatch --test-only`.
"""

import os
import re
import sys
from pathlib import Path

from study import Parser


def check(path):
    """The problems of a submit script, each as the text "line N: ..."; an empty list where there is none."""
    text, problems, directives, command = path.read_bytes().decode(errors="replace"), [], 0, 0
    if "\r" in text:
        problems.append("line 1: lines end as on Windows: dos2unix")
    if not text.startswith("#!"):
        problems.append("line 1: the first line has to name the shell: #!/bin/bash")
    for number, line in enumerate(text.splitlines(), 1):
        found = []
        match = re.match(r"(#| +#(?=SBATCH)|# +(?=\w+ *-))(SBATCH|PBS)\b(.*)", line)
        if match and match[1] != "#":
            found.append(f"not read by the scheduler: it wants `#{match[2]} ` at the start of the line")
        elif match:
            directives += 1
            if not match[3].lstrip().startswith("-"):
                found.append("no option: it begins with -")
            if command:
                found.append(f"not read by the scheduler: it comes after the first command (line {command})")
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or number
            # ${WORKSHOP:-..} is .. unless the variable is set
            plain = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda variable: os.environ.get(variable[1]) or variable[2],
                           line)
            places = re.findall(r'(?:^|[;&] *)(?:cd|\.|source) +"?(\.{1,2}/[\w./-]+)', plain)
            found += [f"no file {place}" for place in places if not (path.parent / place).exists()]
        problems += [f"line {number}: {problem}" for problem in found]
    return problems if directives else [*problems, "no directive: neither #PBS nor #SBATCH"]


def main():
    parser = Parser(__doc__)
    parser.add_argument("scripts", nargs="+", type=Path)
    found = False
    for path in parser.parse_args().scripts:
        if not os.path.isfile(path):  # pathlib's raises at a name that is too long
            parser.error(f"no file {path}")
        for problem in check(path):
            print(f"{path}: {problem}")
            found = True
    sys.exit(found)


if __name__ == "__main__":
    main()
