"""Check PBS and Slurm submit scripts for what a scheduler silently ignores or does otherwise.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

With `#SBTACH`, `# PBS`, or a directive after the first command, the job runs without that setting.
If the folder of `--output` does not exist, the output may be lost. If the numbers of the directives
do not fit those of the command that starts the ranks, ranks wait for ever or share GPUs. Run this
where you submit. The scheduler itself reports misspelt options: `sbatch --test-only`.
"""

import argparse
import os
import re
import subprocess
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

import launches

COMMENT = re.compile(r"(\s*#+\s*)([A-Za-z]{2,8})\b\s*(.*?)(?:\s#.*)?$")
OUTPUT = re.compile(r"""(?:^|\s)(?:--(?:out|err)\w*[ =]\s*|-[oe]\s*)["']?([^"'\s]+)""")
OPTION = re.compile(r"""(?:^|\s)(--[\w-]+|-[A-Za-z])(?:[ =]?\s*((?:"[^"]*"|'[^']*'|[^\s-])\S*))?""")
# A comment `# sbatch ...` is a command if it contains a script, a variable, or two words in a row
COMMAND = re.compile(r"\.(sh|slurm|sbatch|pbs|job|sub|py)\b|[<`$|;]|(=\S+|\s[^-\s]\S*)\s+[^-\s]")
HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*[\\'\"]?(\w+)")
LOST = {"SBATCH": "Slurm before 23.02 ends the job without output",
        "PBS": "PBS cannot deliver the output"}
SHORT = {"-n": "--ntasks", "-N": "--nodes", "-G": "--gpus", "-a": "--array", "-t": "--time",
         "-p": "--partition", "-A": "--account", "-o": "--output", "-c": "--cpus-per-task",
         "-w": "--nodelist"}  # Slurm's options
LONG = (*SHORT.values(), "--ntasks-per-node", "--gpus-per-node", "--gpus-per-task", "--gres",
        "--signal", "--export")
NEEDS = (  # option of Slurm, its value, what the script has to contain then, what happens otherwise
    ("--signal", "B:", r"\btrap\b[\s\S]*\bwait\b", "this ends the shell, and so the job, without "
     "`trap`, a command with & and `wait`; without `B:` the tasks of srun get the signal"),
    ("--signal", "(?:SIG)?USR", r"--signals-to-handle|^(?![\s\S]*\bsrun\b[\s\S]*\btorchrun\b)",
     "this ends torchrun, which does not handle it: --signal=TERM@..., or srun python"),
    ("--export", "NONE", r"srun .*--export|SLURM_EXPORT_ENV|^(?![\s\S]*\bsrun\b)",
     "srun's tasks get none of this script's variables, not even PATH: srun --export=ALL"))


def find_problems(lines, bases):
    """Return the problems of a submit script, as (line number, text).

    bases: folders in which a relative --output may lie.
    """
    problems, directives, first_command, shell = [], [], None, [""] * len(lines)
    rest = iter(enumerate(lines, 1))
    for number, line in rest:
        while line.startswith("#PBS") and line.endswith("\\"):  # PBS joins such lines
            line = line[:-1] + next(rest, (0, ""))[1]
        if (first_command and "#!/" in line) or re.match("[^#]+#!/", line):
            break  # another script follows, as after `echo "#!/bin/bash`
        if match := COMMENT.match(line):
            start, word, options = match.groups()
            problem = why_ignored(start, word, options, first_command)
            if problem:
                is_off = word in LOST and not first_command and f"\n#{word} " in "\n".join(lines)
                problem = f"{'note: ' * is_off}not read by the scheduler: {problem}"
            elif not first_command and (start + word).strip() in ("#SBATCH", "#PBS"):
                problem = why_lost(line, word, options, lines[number:])
                directives += [(number, word, options)] * (not problem)
            problems += [(number, problem)] * bool(problem)
        elif line.strip() and not line.lstrip().startswith("#"):
            first_command = first_command or number
            shell[number - 1] = line
            opening = HERE_DOCUMENT.search(line)
            later = list(map(str.strip, lines[number:]))
            if opening and opening[1] in later:
                for _ in range(later.index(opening[1])):
                    next(rest)
    options = {}  # of Slurm: {name: (line number, value)}
    problems += judge_directives(directives, options, "\n".join(lines), bases)
    first_line = lines[0] if lines else ""
    if re.search(r"^#!.*\b(ba)?sh\b", first_line) and (error := syntax_error(lines)):
        return sorted([*problems, error])
    if re.match("#!(?!.*sh)", first_line):  # Python, for example
        return sorted(problems)
    resources = " ".join(text for _, scheduler, text in directives if scheduler == "PBS")
    options = {name: value for name, (_, value) in options.items()}
    if not re.search("(?m)^#SBATCH (het|pack)job", "\n".join(lines)):
        problems += launches.find_problems("\n".join(shell), options, resources)
    return sorted(problems)


def syntax_error(lines):
    """Return what bash says of a script's syntax, as (line number, text), or None."""
    with suppress(FileNotFoundError):
        result = subprocess.run(["bash", "-n"], input="\n".join(lines), text=True,
                                capture_output=True, env={**os.environ, "LC_ALL": "C"})
        match = re.search(r"line (\d+): (.*)", result.stderr)
        return match and (int(match[1]), f"bash: {match[2]}")


def why_ignored(start, word, options, first_command):
    """Return why the scheduler ignores a comment that is meant for it, or None."""
    prefix = start.lstrip() if word == "PBS" else start  # PBS allows blanks before #
    if prefix == "#" and word in LOST:
        return first_command and f"it comes after the first command (line {first_command})"
    if first_command or "##" in start or not options.startswith("-") or COMMAND.search(options):
        return None  # prose, a commented-out command, or switched off
    close = [name for name in LOST if sorted(name) == sorted(word.upper())]
    close += get_close_matches(word, LOST, 1, 0.8) if word != "YBATCH" else []  # another scheduler
    return f"write `#{close[0]} ` at the start of the line" if close else None


def why_lost(line, scheduler, options, later):
    """Return which part of a directive is lost, or None; later: the lines after it."""
    if re.search(rf"\s#\s*{scheduler}\s+-", line):
        return f"the second directive in this line is a comment: begin a new line for #{scheduler}"
    if scheduler == "PBS":
        walltime = re.search(r"walltime=\d\d?(?![\d:])", options)
        return walltime and f"{walltime[0]} is in seconds: write hours:minutes:seconds"
    if match := re.search(r"(?<!\S)-([A-Za-z])([\w-]*=\S*)", options):
        return (f"`{match[0]}` is the option -{match[1]} with the value `{match[2]}`: write "
                f"`-{match[1]} VALUE`, or the long option with two hyphens")
    if line.endswith("\\") and re.match(r"\s*-", "".join(later)):
        return "Slurm does not continue a line after \\: begin the next one with #SBATCH"
    return None


def missing_folder(scheduler, options, bases, text):
    """Return a message if the folder of the job's output does not exist, or None."""
    slurm = scheduler == "SBATCH"
    for path in OUTPUT.findall(options):
        folder = os.path.dirname(path)
        if slurm and (path.endswith("/") or os.path.isdir(path)):
            return f"{path} is a folder, and Slurm expects a file: the job ends without output"
        if slurm and re.search(r"\$|^~|%\d*[jJA]", folder):
            return f"no folder {folder} (Slurm does not expand $ and ~): {LOST[scheduler]}"
        fixed = Path(re.split(r"[^/]*[%$^~<{]", folder)[0])  # the part without variables
        if fixed.is_absolute() or ":" in path:  # perhaps of another machine
            continue
        if not slurm and re.search(rf"mkdir .*{re.escape(str(fixed))}\b", text):
            continue  # PBS copies the output at the end, when the job has made the folder
        if bases and not any((base / fixed).is_dir() for base in bases):
            return f"no folder {fixed}: {LOST[scheduler]}; `mkdir -p {fixed}` where you submit"
    return None


def judge_directives(directives, options, text, bases):
    """Return the problems that directives have together, as (line number, text); fill options."""
    problems = []
    for number, scheduler, words in directives:
        if words in ("hetjob", "packjob"):  # the options of another component follow
            break
        if folder := missing_folder(scheduler, words, bases, text):
            problems.append((number, folder))
        for option, value in OPTION.findall(words) if scheduler == "SBATCH" else ():
            names = [name for name in LONG if name.startswith(option)]  # of an abbreviation
            option = SHORT.get(option) or min(names, key=len, default=option)
            value = value.strip("\"'")
            earlier, before = options.setdefault(option, (number, value))
            if before != value and option in LONG:
                problems.append((number, f"{option} is {value}, and line {earlier} says {before}"))
    for option, pattern, needed, problem in NEEDS:
        number, value = options.get(option, (0, ""))
        if re.match(pattern, value) and not re.search(needed, text):
            problems.append((number, f"{option}={value}: {problem}"))
    number, output = options.get("--output", (0, "%j"))
    if "--array" in options and not re.search(r"%\d*[ajJ]|/dev/null", output):
        problems.append((number, f"all jobs of the array write {output}: add %a to its name"))
    number, _ = options.get("--ntasks", (0, ""))
    tasks, nodes, per_node = (launches.number_of(options.get(name, (0, "1"))[1])
                              for name in ("--ntasks", "--nodes", "--ntasks-per-node"))
    if number and tasks and launches.is_more((nodes or 1) * (per_node or 1), tasks):
        problems.append((number, f"--ntasks={tasks} overrides --nodes and --ntasks-per-node, which "
                         f"are {nodes} and {per_node}"))
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("scripts", nargs="+", type=Path)
    has_problems = False
    for path in parser.parse_args().scripts:
        if not os.path.isfile(path):  # Path.is_file() raises if the name is too long
            parser.exit(2, f"{parser.prog}: no file {path}\n")
        text = path.read_bytes().decode(errors="replace")
        if "\r\n" in text:
            parser.exit(1, f"{path}: DOS line breaks, which sbatch refuses: sed -i 's/\\r$//' "
                           f"{path}\n")
        lines = text.splitlines()
        changes_folder = any(re.match(r"#SBATCH .*(--chdir|-D)\b", line) for line in lines)
        for number, problem in find_problems(lines, [] if changes_folder else [
                Path(), *path.parents]):
            print(f"{path}: line {number}: {problem}")
            has_problems = has_problems or not problem.startswith("note: ")
    if not has_problems:
        print("no problems found")
    sys.exit(has_problems)


if __name__ == "__main__":
    main()
