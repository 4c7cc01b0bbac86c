"""Check the headers of PBS and Slurm submit scripts for what costs a wait in the queue before it shows.

    python submit/check.py 03_ddp/submit.pbs my_own.slurm

Schedulers pass over `#SBATCH--time` without its space, `# PBS`, and directives after the first command in silence. What
this program does not know and what resembles nothing that it knows, it lets pass: sites have resources of their own.
Options: OpenPBS's manual pages qsub(1B) and pbs_resources(7B); slurm.schedmd.com/sbatch.html.
"""

import argparse
import difflib
import re
import shlex
import sys
from pathlib import Path

GPUS, SIZE = r"([\w-]+:)?\d+(,([\w-]+:)?\d+)*", r"\d+(\.\d+)?[KMGTkmgt]?[Bb]?"
SLURM = {  # option: what its value looks like; None: anything
    "nodes": r"\d+(-\d+)?", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+", "gpus": GPUS,
    "gpus-per-node": GPUS, "gpus-per-task": GPUS, "mem": SIZE, "mem-per-cpu": SIZE, "mem-per-gpu": SIZE,
    "time": r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", **dict.fromkeys((
        "account", "array", "chdir", "constraint", "cpu-bind", "dependency", "error", "exclude", "exclusive", "export",
        "gpu-bind", "gres", "hint", "job-name", "licenses", "mail-type", "mail-user", "no-requeue", "nodelist",
        "output", "open-mode", "partition", "qos", "requeue", "reservation", "signal", "switches"))}
SLURM_LETTERS = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time"}
WALLTIME = r"\d+|(\d+:)?\d+:\d\d"
PBS = {"N": r"\S{1,230}", "j": r"oe|eo|n", "m": r"[abejn]+", "r": r"[yn]", "J": r"\d+-\d+(:\d+)?(%\d+)?",
       **dict.fromkeys("aAceGhIkMopPqRSuvVWXz")}
PBS_RESOURCES = {"select": r"\d+(:.+)?(\+\d+(:.+)?)*", "walltime": WALLTIME,
                 "place": r"(free|pack|scatter|vscatter)?:?(excl|shared|exclhost)?(:?group=\w+)?",
                 "filesystems": r"\w+(:\w+)*", "ncpus": r"\d+", "ngpus": r"\d+", "mem": SIZE, "mpiprocs": r"\d+"}
PBS_CHUNK = ["system", "ncpus", "ngpus", "mpiprocs", "ompthreads", "mem", "host", "vnode"]


def look_up(name, known, what):
    """A problem, as text, where the name is not known but resembles one that is; else None."""
    near = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, 1, 0.75)
    return f"no {what} {name!r}: {near[0]!r}?" if near and name not in known else None


def check_value(name, value, known, what):
    """A problem with an option or its value, else None."""
    if known.get(name) is None:
        return look_up(name, known, what)
    return None if re.fullmatch(known[name], value) else f"{what} {name!r} cannot be {value!r}"


def check_slurm(words):
    """Problems of one #SBATCH line, given as words."""
    for word, value in zip(words, [*words[1:], ""]):
        name, equals, own = word.partition("=")
        if name.startswith("--"):
            yield check_value(name[2:], own if equals else value, SLURM, "option")
        elif word.startswith("-"):
            yield check_value(SLURM_LETTERS.get(word[1:2], word[1:2]), word[2:] or value, SLURM, "option")


def check_pbs(words):
    """Problems of one #PBS line, given as words."""
    for word, value in zip(words, [*words[1:], ""]):
        if not word.startswith("-"):
            continue
        value = word[2:] or value
        if word[1:2] not in ("l", *PBS):
            yield f"no option {word[:2]!r}"
        elif word[1:2] != "l":
            yield check_value(word[1:2], value, PBS, "option")
        for part in value.split(",") if word.startswith("-l") else ():
            name, _, amount = part.partition("=")
            yield check_value(name, amount, PBS_RESOURCES, "resource")
            for chunk in amount.split("+") if name == "select" else ():
                yield from (look_up(item.partition("=")[0], PBS_CHUNK, "resource of a chunk")
                            for item in chunk.split(":")[1:])


def check(path):
    """The problems of a submit script, each as the text "line N: ..."; an empty list where there is none."""
    text, problems, directives, command = path.read_bytes().decode(errors="replace"), [], 0, 0
    if "\r" in text:
        problems.append("line 1: lines end as on Windows: dos2unix")
    if not text.startswith("#!"):
        problems.append("line 1: the first line has to name the shell: #!/bin/bash")
    for number, line in enumerate(text.splitlines(), 1):
        found = []
        match = re.match(r"(#|# +(?=\w+ *-))(SBATCH|PBS)\b(\s?)(.*)", line)
        if match and (match[1] != "#" or not match[3]):
            found.append(f"not read by the scheduler: it wants `#{match[2]} ` at the start of the line")
        elif match:
            directives += 1
            words = shlex.split(match[4], comments=True)
            if not words or not words[0].startswith("-"):
                found.append("no option: it begins with -")
            found += (check_slurm if match[2] == "SBATCH" else check_pbs)(words)
            if command:
                found.append(f"not read by the scheduler: it comes after the first command (line {command})")
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or number
            plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line)  # ${WORKSHOP:-..} is .. unless told
            places = re.findall(r'(?:^|[;&] *)(?:cd|\.|source) +"?(\.{1,2}/[\w./-]+)', plain)
            found += (f"no file {place}" for place in places if not (path.parent / place).exists())
        problems += [f"line {number}: {problem}" for problem in found if problem]
    return problems if directives else [*problems, "no directive: neither #PBS nor #SBATCH"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="+", type=Path)
    found = False
    for path in parser.parse_args().scripts:
        if not path.is_file():
            sys.exit(f"check.py: no file {path}")
        for problem in check(path):
            print(f"{path}: {problem}")
            found = True
    sys.exit(found)


if __name__ == "__main__":
    main()
