"""Check PBS and Slurm submit scripts for what a scheduler silently ignores or does otherwise.

    python submit/check_script.py 03_ddp/submit.pbs my_own.slurm

With `#SBTACH`, `# PBS`, or a directive after the first command, the job runs without that setting.
If the folder of `--output` does not exist, the output is lost. If each task of a node starts a
torchrun, or all have the same node rank, the ranks do not find each other. Run this where you
submit. The scheduler itself reports misspelt options: `sbatch --test-only`.
"""

import argparse
import os
import re
import sys
from difflib import get_close_matches
from pathlib import Path

COMMENT = re.compile(r"(\s*#+\s*)([A-Za-z]{2,8})\b\s*(.*?)(?:\s#.*)?$")
OUTPUT = re.compile(r"""(?:^|\s)(?:--(?:output|error)[ =]\s*|-[oe]\s*)["']?([^"'\s]+)""")
OPTION = re.compile(r"""(?:^|\s)(--[\w-]+|-[A-Za-z])(?:[ =]?\s*((?:"[^"]*"|'[^']*'|[^\s-])\S*))?""")
# A comment `# sbatch ...` is a command if it contains a script, a variable, or two words in a row
COMMAND = re.compile(r"\.(sh|slurm|sbatch|pbs|job|sub|py)\b|[<`$|;]|(=\S+|\s[^-\s]\S*)\s+[^-\s]")
HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*[\\'\"]?(\w+)")
NODES = re.compile(r"(?:--nodes[= ]|-N ?|select=|nodes=)0*([2-9]|1\d)")
GPUS = re.compile(r"(?:ngpus=|--gpus(?:-per-node)?[= ]|-G ?|gres[= ]gpu:(?:\w+:)?)0*([2-9]|1\d)")
STARTS_ONE = re.compile(r"^\s*(\w+=\S+\s+)*(\S*/)?(python[\d.]*|torchrun)\s", re.M)
STARTS_RANKS = re.compile(  # or runs another script, which may do so
    r"\b((?!torch)\w*run|mpi\w+|p?ssh|pb?s?dsh|parallel|deepspeed|ray|dask\S*|spark\S*|sbatch|"
    r"qsub)\b|\b(bash|sh) \S|^ *\S+\.sh\b", re.M)
SHORT = {"-n": "--ntasks", "-N": "--nodes", "-c": "--cpus-per-task", "-a": "--array",
         "-t": "--time", "-p": "--partition", "-A": "--account", "-o": "--output"}  # of Slurm
ARGUMENTS = r"(?:\\\n|[^\n;|&])*?"  # of one command, which may go on in the next line
LAUNCH = re.compile(rf"\b(srun|mpiexec|mpirun)\b({ARGUMENTS})\b(torchrun|accelerate launch|"
                    rf"torch\.distributed\.(?:run|launch))\b({ARGUMENTS})(?=[\n;|&]|$)")
ONE_NODE = r"--(?:num_machines|nnodes)[= ]1\b"
NODE_RANK = re.compile(r"^(?! *echo)(?:\\\n|.)*?(--(?:node|machine)[-_]rank[= ]\"?"
                       r"\$\{?SLURM_(?:NODEID|PROCID)\}?)", re.M)
QUOTED = re.compile(r"""("(?:\\[\s\S]|[^"\\])*")|'[^']*'|(?<=\s)#.*""")
LOST = {"SBATCH": "Slurm before 23.02 ends the job without output",
        "PBS": "PBS cannot deliver the output"}


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
                problem = f"not read by the scheduler: {problem}"
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
    given = {}  # {option of Slurm: (line number, value)}
    problems += judge_directives(directives, "\n".join(lines), bases, given)
    for position, problem in judge_commands("\n".join(shell), given):
        problems.append((1 + position, problem))
    return sorted(problems)


def why_ignored(start, word, options, first_command):
    """Return why the scheduler ignores a comment that is meant for it, or None."""
    prefix = start.lstrip() if word == "PBS" else start  # PBS allows blanks before #
    if prefix == "#" and word in LOST:
        return first_command and f"it comes after the first command (line {first_command})"
    if first_command or "##" in start or not options.startswith("-") or COMMAND.search(options):
        return None  # prose, a commented-out command, or switched off
    close = [name for name in LOST if sorted(name) == sorted(word.upper())]
    close += get_close_matches(word, LOST, 1, 0.8)
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


def judge_directives(directives, text, bases, given):
    """Return the problems that directives have together, as (line number, text); fill `given`."""
    problems = []
    code = re.sub("(?m)^ *#.*", "", text)
    is_alone = STARTS_ONE.search(text) and not STARTS_RANKS.search(code)
    is_one_rank = is_alone and not re.search("torchrun|distributed|launch", code)
    for number, scheduler, options in directives:
        for option, value in OPTION.findall(options) if scheduler == "SBATCH" else ():
            option = SHORT.get(option, option)
            earlier, before = given.setdefault(option, (number, value))
            if before != value:
                problems.append((number, f"{option} is {value}, and line {earlier} says {before}"))
        if folder := missing_folder(scheduler, options, bases, text):
            problems.append((number, folder))
        if is_alone and NODES.search(options):
            problems.append((number, "nothing starts processes on the other nodes: srun, mpiexec"))
        elif is_one_rank and (match := GPUS.search(options)):
            problems.append((number, f"{match[1]} GPUs, and python is started once: torchrun "
                             f"--nproc-per-node={match[1]}, unless the program itself uses all"))
        elif NODES.search(options) and (match := re.search(ONE_NODE, code)):
            problems.append((number, f"{match[0]}: each node trains alone; give all nodes"))
    total, per_node = (given.get(name, (0, ""))[1] for name in ("--ntasks", "--ntasks-per-node"))
    if total.isdecimal() and per_node.isdecimal() and int(total) < int(per_node):
        problems.append((given["--ntasks"][0], f"--ntasks={total} overrides "
                         f"--ntasks-per-node={per_node}: remove it"))
    number, value = given.get("--signal", (0, ""))
    if value.startswith("B:") and not re.search(r"\btrap\b", text):
        problems.append((number, f"--signal={value} ends this shell, which has no trap, and so the "
                         "job: without `B:` the tasks of srun get the signal"))
    elif value.startswith("B:") and not re.search(r"\bwait\b", text):
        problems.append((number, "bash waits for the running command before it runs a trap: start "
                         "the command with &, then `wait`"))
    elif re.match("(SIG)?USR", value) and re.search(
            r"\bsrun\b[\s\S]*\btorchrun\b(?![\s\S]*--signals-to-handle)", code):
        problems.append((number, f"--signal={value} ends torchrun, which does not handle it: "
                         "--signal=TERM@..., or srun python"))
    number, value = given.get("--export", (0, ""))
    if value == "NONE" and re.search(r"\bsrun\b", code) and not re.search(
            r"srun .*--export|SLURM_EXPORT_ENV", code):
        problems.append((number, "srun's tasks get none of this script's variables, not even PATH: "
                         "srun --export=ALL"))
    number, output = given.get("--output", (0, "%j"))
    if "--array" in given and not re.search(r"%\d*[ajJ]|/dev/null", output):
        problems.append((number, f"all jobs of the array write {output}: add %a to its name"))
    return problems


def judge_commands(shell, given):
    """Return problems of the commands that start ranks, as (lines before it, text).

    shell: the script without comments and here-documents. given: as judge_directives() fills it.
    """
    shell = QUOTED.sub(lambda match: match[1] or "\n" * match[0].count("\n"), shell)
    problems = []
    for match in LAUNCH.finditer(shell):
        starter, options, launcher, flags = match.groups()
        ranks = re.search(r"--nproc[-_]per[-_]node[= ]([^\s]+)|$", flags)[1]
        if starter == "srun":  # its --ntasks-per-node alone does not change the number of tasks
            tasks = given.get("--ntasks-per-node", (0, "1"))[1]
            tasks = "1" if re.search(r"(?<!\S)(-[nN]|--ntasks[= ]|--nodes[= ])", options) else tasks
        else:
            tasks = re.search(r"-(?:ppn|npernode)[= ](\S+)|$", options)[1]
            tasks = tasks if tasks == ranks else "1"
        if tasks and "1" not in (tasks, ranks):
            problems.append((match.start(), f"each of a node's {tasks} tasks starts {launcher}, "
                             "which starts all ranks of the node: start one task per node (srun "
                             '--ntasks="$SLURM_NNODES", mpiexec -n NODES --ppn 1)'))
    several = NODES.search(f"--nodes={given.get('--nodes', (0, ''))[1]}")
    if several and not re.search(r"rdzv[-_]backend[= ]?c10d", shell):
        for match in NODE_RANK.finditer(shell):
            problems.append((match.start(), f"`{match[1]}` is 0 on each node, because this script "
                             f"runs on the first: srun bash -c '... {match[1]} ...'"))
    return [(shell.count("\n", 0, position), text) for position, text in problems]


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("scripts", nargs="+", type=Path)
    has_problems = False
    for path in parser.parse_args().scripts:
        if not os.path.isfile(path):  # Path.is_file() raises if the name is too long
            parser.exit(2, f"{parser.prog}: no file {path}\n")
        lines = path.read_bytes().decode(errors="replace").splitlines()
        changes_folder = any(re.match(r"#SBATCH .*(--chdir|-D)\b", line) for line in lines)
        for number, problem in find_problems(lines, [] if changes_folder else [
                Path(), *path.parents]):
            print(f"{path}: line {number}: {problem}")
            has_problems = True
    if not has_problems:
        print("no problems found")
    sys.exit(has_problems)


if __name__ == "__main__":
    main()
