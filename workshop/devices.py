"""One GPU per rank, or else all ranks on the CPU."""

import argparse
import os
import sys

from workshop.ranks import find_launcher, refuse


def gather(value: object) -> list:
    """Return the values of all ranks, in rank order, on every rank. All ranks have to call it."""
    hvd = sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")
    if hvd:
        return hvd.allgather_object(value, name="values")  # the default name is the value's type
    import torch.distributed as dist
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def check_device(args: argparse.Namespace, device: object) -> object:
    """Return this torch.device, or, on all ranks, the CPU if two ranks would share a GPU.

    NCCL refuses two ranks on one GPU. All ranks have to call this function, after they have
    connected. With --device cuda they exit instead of changing to the CPU.
    """
    import torch
    gpu = None
    if device.type != "cpu":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus = gather(gpu)
    if None in gpus or len(set(gpus)) < len(gpus):
        refuse_cpu(args)
        device = torch.device("cpu")
        if any(gpus) and find_launcher()[1] == 0:
            print("not every rank has a GPU of its own: all ranks train on the CPU", flush=True)
        if len(gpus) > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # else the ranks compete for the cores
    return device


def refuse_cpu(args: argparse.Namespace) -> None:
    """Exit if --device asks for a GPU. Call this on all ranks, if they would use the CPU."""
    if args.device == "cuda":
        refuse("--device cuda: not every rank has a GPU of its own: start one rank per GPU, or use "
               "--device cpu")
