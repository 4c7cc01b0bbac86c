"""Check PBS and Slurm submit scripts for directives that a scheduler silently ignores.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

With `#Sbatch`, `# PBS`, or a directive after the first command, the job runs without that setting.
If the folder of `--output` does not exist, the output is lost. Run this where you submit. The
scheduler itself reports misspelt options: `sbatch --test-only`.
"""

import argparse
import os
import re
import sys
from pathlib import Path

DIRECTIVE = re.compile(r"(\s*#\s*)(SBATCH|PBS)\b\s*(.*?)(?:\s#.*)?$", re.I)
OUTPUT = re.compile(r"""(?:^|\s)(?:--(?:output|error)[ =]\s*|-[oe]\s*)["']?([^"'\s]+)""")
# A comment `# sbatch ...` is a command if it contains a script, a variable, or two words in a row
COMMAND = re.compile(r"\.(sh|slurm|sbatch|pbs|job|sub|py)\b|[<`$|;]|(=\S+|\s[^-\s]\S*)\s+[^-\s]")
LOST = {"SBATCH": "Slurm before 23.02 ends the job without output",
        "PBS": "PBS cannot deliver the output"}


def find_problems(path):
    """Return the problems of a submit script, as texts "line N: ..."."""
    lines = path.read_bytes().decode(errors="replace").splitlines()
    changes_folder = any(re.match(r"#SBATCH .*(--chdir|-D)\b", line) for line in lines)
    bases = [] if changes_folder else [Path(), *path.parents]
    problems = []
    first_command = None
    here_document_end = None
    for number, line in enumerate(lines, 1):
        if here_document_end:  # the lines after `sbatch <<EOT` are another script
            if line.strip() == here_document_end:
                here_document_end = None
        elif (first_command and "#!/" in line) or re.match("[^#]+#!/", line):
            break  # another script follows, as after `echo "#!/bin/bash`
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
                here_document_end = opening[1]
    return problems


def why_ignored(start, name, options, first_command):
    """Return why the scheduler ignores a directive, or None."""
    prefix = start.lstrip() if name == "PBS" else start  # PBS allows blanks before #
    is_exact = prefix == "#" and name.isupper()
    if is_exact and first_command:
        return ("not read by the scheduler: it comes after the first command "
                f"(line {first_command})")
    if is_exact or first_command or not options.startswith("-") or COMMAND.search(options):
        return None  # the scheduler reads it, or it is prose or a commented-out command
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
        fixed = Path(re.split(r"[^/]*[%$^~<{]", folder)[0])  # the part without variables
        if fixed.is_absolute():  # another machine's folders and a node's own /tmp are unknown
            top = Path(*fixed.parts[:2])
            candidates = [fixed] if top.exists() and top != Path("/tmp") else []
        else:
            candidates = [base / fixed for base in bases if ":" not in path]
        if candidates and not any(candidate.is_dir() for candidate in candidates):
            return f"no folder {fixed}: {LOST[scheduler]}; `mkdir -p {fixed}` where you submit"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("scripts", nargs="+", type=Path)
    has_problems = False
    for path in parser.parse_args().scripts:
        if not os.path.isfile(path):  # Path.is_file() raises if the name is too long
            parser.exit(2, f"{parser.prog}: no file {path}\n")
        for problem in find_problems(path):
            print(f"{path}: {problem}")
            has_problems = True
    sys.exit(has_problems)


if __name__ == "__main__":
    main()
