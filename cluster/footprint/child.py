"""Runs a script as one pretended rank, in a process of its own."""

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import psutil

from cluster.footprint import dry_run, pretend
from cluster.footprint.report import add_links, check_collectives
from cluster.footprint.watch import Watch, run_script

REAL_FLOPS = 3e11  # of a step that runs on real tensors: seconds on a laptop's core


def footprint_of(args) -> dict:
    """Return a pretended rank's footprint, on real tensors if this computer can do it.

    Exits with the reason if the script fails.
    """
    memory = psutil.virtual_memory().available // 2
    fake, problem = None, ""
    if args.tensors != "real":
        fake, problem = run_child(args, "fake")
    if args.tensors == "fake":
        reason = "--tensors fake" if fake else problem
    elif fake and fake["memory"]["peak"] > memory:
        reason = f"this computer has {2 * memory / 1e9:.1f} GB of free memory"
    elif fake and sum(fake["flops"].values()) > REAL_FLOPS:
        reason = f"{sum(fake['flops'].values()):.0e} FLOPs would take long here"
    else:
        real, reason = run_child(args, "real", memory)
        if real:
            return real
    if fake:
        return fake | {"why_fake": reason}
    if problem not in ("", reason):
        reason += f"; on fake tensors, which have no values: {problem}"
    sys.exit(reason)


def run_child(args, tensors: str, limit: int = 0) -> tuple[dict | None, str]:
    """Run the script in a child process; return its footprint, or None and why there is none."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as output:
        child = context.Process(target=watch_pretended_rank, args=(
            args, tensors, limit, sender, output))
        child.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:  # the script has failed
            child.join()
            output.seek(0)
            return None, explain(args, output.read(), child.exitcode)
        finally:  # also if this process is told to end
            child.kill()


def watch_pretended_rank(args, tensors, limit, sender, output):
    """Run the script as a pretended rank, in the child process; send what run_child() returns."""
    for stream in 1, 2:
        os.dup2(output.fileno(), stream)
    faulthandler.dump_traceback_later(args.seconds, exit=True)

    def end():
        footprint = watch.footprint | {"rank": args.rank, "tensors": tensors, "pretended": True}
        if tensors == "fake":
            scalars = modes[1]
            footprint |= {"values_read": scalars.answers, "first_read": scalars.place}
        problem = check_collectives(footprint, args.ranks)
        add_links(footprint, [rank // args.gpus_per_node for rank in range(args.ranks)])
        sender.send((None if problem else footprint, problem))
        os._exit(0)

    pretend.set_variables(args.rank, args.ranks, args.gpus_per_node)
    pretend.pretend_group(args.rank, args.ranks)
    pretend.average_by_hook(fake=tensors == "fake")
    pretend.compute_as_on_a_gpu()
    watch = Watch(end, limit)
    watch.install()
    modes = pretend.fake_tensors() if tensors == "fake" else []
    dry_run.run_without_effect()
    sender.send((None, run_script(args, [*modes, watch])))


def explain(args, output: str, exit_code: int) -> str:
    """Return why a script failed, from what it, Python or faulthandler printed."""
    folder = Path(args.script).resolve().parent
    places = [f"{Path(file).name}:{line}" for file, line in
              re.findall(r'^ *File "(.*)", line (\d+)', output, re.M)
              if "site-packages" not in file and Path(file).resolve().is_relative_to(folder)]
    places = places or [args.script]
    if "Timeout (" in output:  # faulthandler begins with the innermost call
        return (f"no second optimizer step in {args.seconds:.0f} s (--seconds): the script was at "
                f"{places[0]}")
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"the script ended by {name} (SIGKILL: this computer's memory, perhaps)"
    # Of a traceback the first line after the last frame, else the last line
    messages = re.findall(r'^ *File ".*\n(?:\s.*\n)*(.*)', output, re.M)
    if "Traceback" not in output or not messages:
        lines = [line for line in output.splitlines() if line.strip()]
        return lines[-1] if lines else f"{args.script} ended, without a word"
    return f"{places[-1]}: {messages[-1]}"
