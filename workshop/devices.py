"""The device of a rank: a GPU of its own, or the CPU."""

import argparse
import os

from workshop.ranks import CollectiveExit, device_kind, find_launcher, own_gpu

SHARED_GPU = "not every rank has a GPU of its own"


def choose_device(args: argparse.Namespace, local_rank: int | None = None,
                  gpus: bool = True) -> object:
    """Return this rank's torch.device: a GPU of its own, or else, on all ranks, the CPU.

    local_rank: None for a program of one process. gpus: False if Horovod does not support them.
    """
    import torch
    kind = device_kind(args.device)
    index = 0 if kind != "cpu" and gpus else None
    if local_rank is not None and args.device != "cpu":
        index = own_gpu(local_rank, kind if gpus else "cpu")
    if index is not None:
        return torch.device(kind, index)
    reason = SHARED_GPU if gpus else "Horovod is built without GPU support"
    check_cpu_allowed(args, reason)
    if kind != "cpu" and find_launcher()[1] == 0:
        print(f"{reason}: all ranks train on the CPU", flush=True)
    if local_rank is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # else the ranks compete for the cores
    return torch.device("cpu")


def check_cpu_allowed(args: argparse.Namespace, reason: str = SHARED_GPU) -> None:
    """Exit on all ranks if --device asks for a GPU, but the program would use the CPU."""
    if args.device not in ("auto", "cpu"):
        raise CollectiveExit(f"--device {args.device}: {reason}: start one rank per GPU, or use "
                             "--device cpu")
