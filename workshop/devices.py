"""One GPU per rank, or else all ranks on the CPU."""

import argparse
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from workshop.ranks import find_launcher, refuse

# A batch job's own variables. Ranks that trained on its CPUs would waste its GPUs.
JOB_IDS = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"}


def gather(value: object) -> list:
    """Return the values of all ranks, in rank order, on every rank. All ranks have to call it.

    value: of any type that pickle knows, without tensors on GPUs.
    """
    hvd = sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")
    if hvd:
        return hvd.allgather_object(value, name="values")  # the default name is the value's type
    import torch.distributed as dist
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def count_nodes(local_rank: int) -> int:
    """Return the number of nodes of all ranks, on every rank. All ranks have to call it."""
    ranks_per_node = None
    if find_launcher()[0] == "torchrun":  # under another launcher the variable is left over
        ranks_per_node = os.environ.get("LOCAL_WORLD_SIZE")
    all_ranks = gather(ranks_per_node)
    if None in all_ranks:
        return gather(local_rank).count(0)
    return round(sum(1 / int(ranks) for ranks in all_ranks))


def check_device(args: argparse.Namespace, device: object) -> object:
    """Return this torch.device, or, on all ranks, the CPU if NCCL would refuse two ranks' GPUs.

    All ranks have to call this function, after they have connected. With --device gpu, or in a
    batch job that has GPUs, they exit instead of changing to the CPU.
    """
    import torch
    gpus = gather(identify_gpu(device) if device.type != "cpu" else None)
    if None in gpus or len(set(gpus)) < len(gpus):
        if args.device == "gpu" or (any(gpus) and not JOB_IDS.isdisjoint(os.environ)):
            refuse(f"--device {args.device}: not every rank has a GPU of its own: start one rank "
                   "per GPU, or use --device cpu")
        device = torch.device("cpu")
        if any(gpus) and find_launcher()[1] == 0:
            print("not every rank has a GPU of its own: all ranks train on the CPU", flush=True)
        if len(gpus) > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # else the ranks compete for the cores
    return device


def identify_gpu(device: object) -> str:
    """Return a GPU's PCI address (or its UUID, if PyTorch knows no address) and host, as text.

    NCCL refuses two ranks with equal texts, also on two slices (MIG) of a GPU. As for NCCL,
    NCCL_HOSTID replaces the host's name and boot id (NCCL 2.30.7, src/misc/utils.cc:117).
    """
    import torch
    properties = torch.get_device_module(device).get_device_properties(device)
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    gpu = f"UUID {getattr(properties, 'uuid', device)}"
    if None not in address:
        gpu = "PCI {:04x}:{:02x}:{:02x}".format(*address)
    host = socket.gethostname()
    with suppress(OSError):
        host += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{gpu} of {os.environ.get('NCCL_HOSTID', host)}"


def short_reason(problem: Exception, length: int = 200) -> str:
    """Return an exception's text on one line, cut; NCCL's reason comes after "Last error:"."""
    text = " ".join(str(problem).split())
    return (text.partition("Last error: ")[2] or text)[:length]
