"""Runs a script as one pretended rank, in a process of its own."""

import faulthandler
import linecache
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from cluster.footprint import dry_run, pretend
from cluster.footprint.report import Refusal, add_places, check_collectives
from cluster.footprint.watch import Watch

REAL_FLOPS = 3e11  # of a step that runs on real tensors: seconds on a laptop's core
CUDA = "compiled with CUDA|NVIDIA driver|No CUDA GPUs|CUDA device|CUDA driver|CUDA error"


class FinalRefusal(Refusal):
    """A reason that real tensors would not change: the script's own message, or its time."""


def footprint_of(args, run_script: Callable) -> dict:
    """Return the footprint of a pretended rank: on real tensors if this computer can do it."""
    def run(tensors, rank=args.rank, broadcasts=(), limit=0):
        return run_child(args, run_script, tensors, rank, list(broadcasts), limit)

    broadcasts, footprint, problem = [], None, ""
    if args.rank > 0:
        broadcasts = run(args.tensors or "fake", rank=0)["broadcasts"]
    memory = psutil.virtual_memory().available // 2
    if args.tensors != "real":
        try:
            footprint = run("fake", broadcasts=broadcasts)["footprint"]
        except FinalRefusal:
            raise
        except Refusal as refusal:
            problem = str(refusal)
            if args.tensors == "fake":
                raise
    flops = sum(footprint["flops"].values()) if footprint else 0
    if args.tensors == "fake":
        reason = "--tensors fake"
    elif footprint and footprint["memory"]["peak"] > memory:
        reason = f"this computer has {2 * memory / 1e9:.1f} GB of free memory"
    elif flops > REAL_FLOPS:
        reason = f"{flops:.0e} FLOPs would take long here"
    else:
        try:
            return run("real", broadcasts=broadcasts, limit=memory)["footprint"]
        except FinalRefusal:
            raise
        except Refusal as refusal:
            reason = str(refusal)
            if not footprint:
                if problem not in ("", reason):
                    reason += f"; on fake tensors: {problem}"
                raise Refusal(reason) from None
    return footprint | {"why_fake": reason}


def run_child(args, run_script, tensors, rank, broadcasts, limit) -> dict:
    """Run the script in a child process; return its footprint and what rank 0 broadcast.

    Raises Refusal if the script fails.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as errors:
        child = context.Process(target=watch_pretended_rank, args=(
            args, run_script, tensors, rank, broadcasts, limit, sender, errors))
        child.start()
        sender.close()
        result, late = {}, not receiver.poll(args.seconds)
        with suppress(EOFError):  # it has ended without a result
            if late:
                os.kill(child.pid, signal.SIGUSR1)  # faulthandler writes where the script is
                child.join(2)
                child.kill()
            else:
                result = receiver.recv()
        child.join()
        errors.seek(0)
        output = errors.read()
        if "refusal" in result:
            last = [f" (it printed: {line})" for line in output.splitlines() if line.strip()][-1:]
            raise Refusal(f"{result['refusal']}{''.join(last)}")
        if "footprint" not in result:
            raise explain(args, output, late, child.exitcode)
    return result


def watch_pretended_rank(args, run_script, tensors, rank, broadcasts, limit, sender, errors):
    """Run the script as a pretended rank, in the child process; send the result, and exit."""
    for stream in 1, 2:
        os.dup2(errors.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, all_threads=False)

    def send(**result):
        dry_run.remove_folders()
        sender.send(result)
        os._exit(0)

    def end():
        footprint = watch.footprint | {"rank": rank, "tensors": tensors, "pretended": True}
        try:
            check_collectives(footprint, args.ranks)
        except Refusal as refusal:
            send(refusal=refusal)
        if tensors == "fake":
            scalars = modes[1]
            footprint |= {"values_read": scalars.answers, "first_read": scalars.place}
        add_places(footprint, args.gpus_per_node)
        send(footprint=footprint, broadcasts=broadcasts)

    pretend.set_variables(rank, args.ranks, args.gpus_per_node)
    pretend.pretend_group(rank, args.ranks, broadcasts)
    pretend.average_by_hook(fake=tensors == "fake")
    watch = Watch(end, limit)
    watch.install()
    modes = pretend.fake_tensors() if tensors == "fake" else []
    dry_run.run_without_effect()
    try:
        run_script(args, [*modes, watch])
    except Refusal as refusal:
        send(refusal=refusal)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    dry_run.remove_folders()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def explain(args, output: str, late: bool, exit_code: int) -> Refusal:
    """Return the reason why a script failed, from what it printed.

    late: it was stopped after --seconds, and faulthandler has written where it was.
    """
    lines = output.splitlines()
    frames = [(index, *re.match(r' *File "(.*)", line (\d+),? in', line).groups())
              for index, line in enumerate(lines) if re.match(r' *File ".*", line \d+,? in', line)]
    folder = Path(args.script).resolve().parent
    places = [(Path(file), int(number)) for _, file, number in frames if "site-packages" not in file
              and Path(file).resolve().is_relative_to(folder)]
    if late:  # faulthandler begins with the innermost call
        file, number = (places or [(Path(args.script), "an unknown line")])[0]
        return FinalRefusal(f"no second optimizer step in {args.seconds:.0f} s (--seconds): the "
                            f"script was at {file.name}:{number}")
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return Refusal(f"the script ended by {name} (SIGKILL: this computer's memory, perhaps)")
    if not frames or "Traceback" not in output:
        text = [line for line in lines if line.strip()] or [f"{args.script} ended, without a word"]
        return FinalRefusal(text[-1])
    place, source = args.script, ""
    if places:
        place = f"{places[-1][0].name}:{places[-1][1]}"
        source = linecache.getline(str(places[-1][0]), places[-1][1]).strip()
    rest = lines[frames[-1][0] + 1:]
    first = next(index for index, line in enumerate(rest) if line[:1].strip())
    message = rest[first].strip()
    kind, _, text = message.partition(": ")
    kind = kind.rpartition(".")[2]
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        text = f"{text} depends on the values of tensors, and fake ones have none"
    elif kind == "UnsupportedOperatorException":
        text = f"{text} has no rule for fake tensors"
    elif re.search(CUDA, text):
        text = ("asks for CUDA, which this computer lacks: use the CPU where "
                "torch.cuda.is_available() is False")
    elif kind == "MemoryError":
        text = "needs more than half of this computer's free memory"
    else:
        text = f"{message} ({source})"
    if kind == "FileNotFoundError" and "footprint" not in text:
        text += ": footprint writes no files, so it has to be there before"
    return Refusal(f"{place}: {text}")
