"""Runs a script as one pretended rank, in a process of its own."""

import faulthandler
import multiprocessing
import os
import pkgutil
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from cluster.footprint import dry_run, pretend
from cluster.footprint.report import Refusal, add_places, check_collectives
from cluster.footprint.watch import Watch

REAL_FLOPS = 3e11  # of a step that runs on real tensors: seconds on a laptop's core
CUDA = "not compiled with CUDA|NVIDIA driver|No CUDA GPUs|CUDA device"
PRIVATE_NAMES = (  # what pretend.py and watch.py need of PyTorch's internals
    "torch.testing._internal.distributed.fake_pg:FakeStore",  # the fake process group
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils.flop_counter:flop_registry",
    "torch.distributed.distributed_c10d:_resolve_process_group",  # a group by its name
    "torch._C._distributed_c10d:Reducer._rebuild_buckets",  # DDP on fake tensors
    "torch.distributed.device_mesh:DeviceMesh.__init__",
    "torch.nn:Module._apply",  # to() and to_empty() of fake tensors
    "torch:UntypedStorage._cdata",  # a storage's identity
    "torch:UntypedStorage.resize_",  # by which FSDP frees gathered parameters
)


class OwnMessage(Refusal):
    """What the script itself printed before it ended."""


def footprint_of(args, run_script: Callable) -> dict:
    """Return the footprint of a pretended rank: on real tensors if this computer can do it."""
    for name in PRIVATE_NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            raise Refusal(f"PyTorch {torch.__version__} has no {name.replace(':', '.')}: use the "
                          "version in requirements.txt") from None

    def run(tensors, rank=args.rank, broadcasts=(), limit=0):
        return run_child(args, run_script, tensors, rank, list(broadcasts), limit)

    broadcasts, footprint, problem = [], None, ""
    if args.rank > 0:
        broadcasts = run(args.tensors or "fake", rank=0)["broadcasts"]
    memory = psutil.virtual_memory().available // 2
    if args.tensors != "real":
        try:
            footprint = run("fake", broadcasts=broadcasts)["footprint"]
        except OwnMessage:
            raise
        except Refusal as refusal:
            if args.tensors == "fake":
                raise
            problem = str(refusal)
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
        except OwnMessage:
            raise
        except Refusal as refusal:
            reason = str(refusal)
            if not footprint:
                raise Refusal(f"{reason}{problem and '; on fake tensors: '}{problem}") from None
            reason = str(refusal)
    return footprint | {"why_fake": reason}


def run_child(args, run_script, tensors, rank, broadcasts, limit) -> dict:
    """Run the script in a child process; return its footprint and what rank 0 broadcast.

    Raises Refusal if the script fails, OwnMessage if by a message of its own.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as errors:
        child = context.Process(target=watch_pretended_rank, args=(
            args, run_script, tensors, rank, broadcasts, limit, sender, errors))
        child.start()
        sender.close()
        result = {}
        try:
            if receiver.poll(args.seconds):
                result = receiver.recv()
            else:
                os.kill(child.pid, signal.SIGUSR1)  # faulthandler writes where the script is
                child.join(2)
        except EOFError:  # it has ended without a result
            pass
        child.kill()
        child.join()
        errors.seek(0)
        if "footprint" not in result:
            raise result.get("refusal") or explain(args, errors.read())
    return result


def watch_pretended_rank(args, run_script, tensors, rank, broadcasts, limit, sender, errors):
    """Run the script as a pretended rank, in the child process; send the result, and exit."""
    os.dup2(errors.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)

    def send(**result):
        sender.send(result)
        dry_run.remove_folders()
        os._exit(0)

    def end():
        footprint = watch.footprint | {"rank": rank, "tensors": tensors, "pretended": True}
        try:
            check_collectives(footprint, args.ranks)
        except Refusal as refusal:
            send(refusal=refusal)
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
        print(end.code, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    dry_run.remove_folders()
    os._exit(1)


def explain(args, errors: str) -> Refusal:
    """Return the reason why a script failed, from what it wrote to standard error."""
    lines = errors.splitlines()
    frames = [(index, *re.match(r' *File "(.*)", line (\d+),? in', line).groups())
              for index, line in enumerate(lines) if re.match(r' *File ".*", line \d+,? in', line)]
    if not frames:
        return OwnMessage(([line for line in lines if line.strip()] or ["it ended"])[-1])
    folder = Path(args.script).resolve().parent
    places = [f"{Path(file).name}:{number}" for _, file, number in frames
              if Path(file).resolve().is_relative_to(folder) and "site-packages" not in file]
    if "Traceback" not in errors:  # faulthandler's list, in which the innermost call is the first
        return Refusal(f"no second optimizer step in {args.seconds:.0f} s (--seconds): the script "
                       f"was at {(places or ['an unknown line'])[0]}")
    place = (places or [args.script])[-1]
    message = next(line for line in lines[frames[-1][0] + 1:] if line[:1].strip())
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
        text = message
    return Refusal(f"{place}: {text}")
