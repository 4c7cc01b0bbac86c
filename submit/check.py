"""Check the headers of PBS and Slurm submit scripts for what schedulers pass over in silence.

    python submit/check.py 03_ddp/submit.pbs my_own.slurm

A misspelt resource, a directive after the first command and `#SBATCH--time` without its space cost a wait in the queue
before they show. Options: OpenPBS's manual pages qsub(1B) and pbs_resources(7B); slurm.schedmd.com/sbatch.html.
"""

import argparse
import difflib
import re
import sys
from pathlib import Path

SLURM = {  # option: what its value looks like; None: it takes none
    "job-name": r"\S+", "nodes": r"\d+(-\d+)?", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+",
    "gpus": r"(\w+:)?\d+", "gpus-per-node": r"(\w+:)?\d+", "gpus-per-task": r"(\w+:)?\d+", "gres": r"\w+(:\w+)*",
    "time": r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", "account": r"\S+", "partition": r"\S+", "qos": r"\S+",
    "constraint": r"\S+", "output": r"\S+", "error": r"\S+", "mem": r"\d+[KMGT]?", "mem-per-cpu": r"\d+[KMGT]?",
    "reservation": r"\S+", "array": r"[\d,:%-]+", "dependency": r"\S+", "mail-type": r"[A-Z,]+", "mail-user": r"\S+",
    "export": r"\S+", "licenses": r"\S+", "chdir": r"\S+", "exclusive": None, "requeue": None, "no-requeue": None}
SLURM_LETTERS = {"J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time",
                 "A": "account", "p": "partition", "q": "qos", "C": "constraint", "o": "output", "e": "error",
                 "a": "array", "d": "dependency", "D": "chdir", "L": "licenses"}
PBS = {"N": r"[A-Za-z]\S{0,229}", "q": r"\w+", "A": r"\S+", "j": r"oe|eo|n", "o": r"\S+", "e": r"\S+", "k": r"[doe]+|n",
       "m": r"[abejn]+", "M": r"\S+", "r": r"[yn]", "v": r"\S+", "V": None, "S": r"\S+", "W": r"\S+", "J": r"\d+-\d+"}
PBS_RESOURCES = {"select": r"\d+(:.+)?(\+\d+(:.+)?)*",
                 "place": r"(free|pack|scatter|vscatter)(:(excl|shared|exclhost))?",
                 "walltime": r"\d+|(\d+:)?\d+:\d\d", "filesystems": r"\w+(:\w+)*"}
PBS_CHUNK = {"system", "ncpus", "ngpus", "mpiprocs", "ompthreads", "mem", "host", "vnode"}


def look_up(name, known, what):
    """A problem, as text, where the name is not known; else None."""
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        return f"no {what} {name!r}" + (f": {near[0]!r}?" if near else "")
    return None


def check_value(name, value, known, what):
    """A problem with an option or its value, else None."""
    pattern = known.get(name)
    if name not in known:
        return look_up(name, known, what)
    if pattern is None:
        return f"{what} {name!r} takes no value" if value else None
    return None if re.fullmatch(pattern, value) else f"{what} {name!r} cannot be {value!r}"


def check_slurm(words):
    """Problems of one #SBATCH line."""
    match = re.fullmatch(r"--([\w-]+)(?:[= ](.+))?|-(\w) ?(.*)", words)
    if not match:
        yield "no option: --name=value"
    elif match[1]:
        yield check_value(match[1], match[2] or "", SLURM, "option")
    else:
        yield check_value(SLURM_LETTERS.get(match[3], match[3]), match[4], SLURM, "option")


def check_pbs(words):
    """Problems of one #PBS line."""
    match = re.fullmatch(r"-(\w) ?(.*)", words)
    if not match:
        yield "no option: -letter value"
    elif match[1] != "l":
        yield check_value(match[1], match[2], PBS, "option")
    else:
        for part in match[2].split(","):
            name, _, value = part.partition("=")
            yield check_value(name, value, PBS_RESOURCES, "resource")
            for chunk in value.split("+") if name == "select" else ():
                yield from (look_up(word.partition("=")[0], PBS_CHUNK, "resource of a chunk")
                            for word in chunk.split(":")[1:])


def check(path):
    """The problems of a submit script, each as the text "line N: ..."; an empty list where there is none."""
    problems, directives, command = [], 0, 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = []
        match = re.match(r"(#|# +(?=\w+ *-))(SBATCH|PBS)\b( ?)(.*)", line)
        if match and (match[1] != "#" or match[3] != " "):
            found.append(f"not read by the scheduler: it wants `#{match[2]} ` at the start of the line")
        elif match:
            directives += 1
            found += (check_slurm if match[2] == "SBATCH" else check_pbs)(re.sub(r" +#.*", "", match[4]).strip())
            if command:
                found.append(f"not read by the scheduler: it comes after the first command (line {command})")
        elif line.strip() and not line.startswith("#"):
            command = command or number
            plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line)  # ${WORKSHOP:-..} is .. unless told
            found += (f"no file {word}" for word in re.findall(r'(?<![\w$}/"])"?(\.{1,2}/[\w./-]+)', plain)
                      if not (path.parent / word).exists())
        problems += [f"line {number}: {problem}" for problem in found if problem]
    return problems or ([] if directives else ["no directive: neither #PBS nor #SBATCH"])


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
