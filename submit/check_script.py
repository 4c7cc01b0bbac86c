"""Check PBS and Slurm submit scripts for directives that a scheduler silently ignores.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

With `#Sbatch`, `# PBS`, or a directive after the first command, the job runs without that setting.
With `--output` in a folder that does not exist, the output is lost. Run this where you submit.
The scheduler itself reports misspelt options: `sbatch --test-only`.
"""

import os
import re
import sys
from pathlib import Path

from study import Parser

DIRECTIVE = re.compile(r"(\s*#\s*)(SBATCH|PBS)\b\s*(.*?)(?:\s#.*)?$", re.I)
OUTPUT = re.compile(r"""(?:^|\s)(?:--(?:output|error)[ =]\s*|-[oe]\s*)["']?([^"'\s]+)""")
# text after `#sbatch` that makes it a command: a script's name, a variable, two words in a row
COMMAND = re.compile(r"\.(sh|slurm|sbatch|pbs|job|sub|py)\b|[<`$|;]|(=\S+|\s[^-\s]\S*)\s+[^-\s]")
LOST = {"SBATCH": "Slurm before 23.02 ends the job without output",
        "PBS": "PBS cannot deliver the output"}


def check(path):
    """Return the problems of a submit script, as texts "line N: ..."."""
    lines = path.read_bytes().decode(errors="replace").splitlines()
    moves = any(re.match(r"#SBATCH .*(--chdir|-D)\b", line) for line in lines)
    bases = [] if moves else [Path(), *path.parents]
    problems = []
    first_command = None
    document = None
    for number, line in enumerate(lines, 1):
        if document:  # within `sbatch <<EOT`: another script
            if line.strip() == document:
                document = None
        elif (first_command and "#!/" in line) or re.match("[^#]+#!/", line):
            break  # as in `echo "#!/bin/bash`
        elif match := DIRECTIVE.match(line):
            problem = why_ignored(*match.groups(), first_command)
            if not problem and not first_command:
                problem = missing_folder(match[2], match[3], bases)
            if problem:
                problems.append(f"line {number}: {problem}")
        elif line.strip() and not line.lstrip().startswith("#"):
            first_command = first_command or number
            opening = re.search(r"(?<!<)<<-?\s*[\\'\"]?(\w+)", line)
            if opening and opening[1] in map(str.strip, lines[number:]):
                document = opening[1]
    return problems


def why_ignored(start, name, options, first_command):
    """Return why the scheduler ignores a directive, or None."""
    exact = (start.lstrip() if name == "PBS" else start) == "#" and name.isupper()
    if exact and first_command:
        return ("not read by the scheduler: it comes after the first command "
                f"(line {first_command})")
    if exact or first_command or not options.startswith("-") or COMMAND.search(options):
        return None  # it is read; or it is prose or a commented-out command
    return f"not read by the scheduler: write `#{name.upper()} ` at the start of the line"


def missing_folder(scheduler, options, bases):
    """Return a message if the folder of the job's output does not exist, or None."""
    slurm = scheduler == "SBATCH"
    for path in OUTPUT.findall(options):
        folder = os.path.dirname(path)
        if slurm and (path.endswith("/") or os.path.isdir(path)):
            return f"{path} is a folder, and Slurm expects a file: the job ends without output"
        if slurm and re.search(r"\$|^~|%\d*[jJA]", folder):
            return f"no folder {folder} (Slurm does not expand $ and ~): {LOST[scheduler]}"
        known = Path(re.split(r"[^/]*[%$^~<{]", folder)[0])
        if known.is_absolute():  # another machine's folders and a node's own /tmp are unknown
            top = Path(*known.parts[:2])
            places = [known] if top.exists() and top != Path("/tmp") else []
        else:
            places = [base / known for base in bases if ":" not in path]
        if places and not any(place.is_dir() for place in places):
            return f"no folder {known}: {LOST[scheduler]}; `mkdir -p {known}` where you submit"
    return None


def main():
    parser = Parser(__doc__)
    parser.add_argument("scripts", nargs="+", type=Path)
    faulty = False
    for path in parser.parse_args().scripts:
        if not os.path.isfile(path):  # Path.is_file() raises if the name is too long
            parser.error(f"no file {path}")
        for problem in check(path):
            print(f"{path}: {problem}")
            faulty = True
    sys.exit(faulty)


if __name__ == "__main__":
    main()
