"""Checkpoints in two places in turn, so that a killed run always leaves a whole one.

A checkpoint is a folder with the places a and b; its file latest says which of them holds.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from workshop import refuse_altered


def next_place(folder: str) -> str:
    """The place that latest does not name; call mark_latest() when it has been written."""
    latest = Path(folder, "latest")
    return "b" if latest.exists() and latest.read_text() == "a" else "a"


def mark_latest(folder: str, place: str, training: dict) -> None:
    """When all ranks have written their parts, rank 0 writes down where, and of which training."""
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, place, "training.json").write_text(json.dumps(training))
        Path(folder, "latest.tmp").write_text(place)
        os.replace(Path(folder, "latest.tmp"), Path(folder, "latest"))
    dist.barrier()


def save(engine: Any, folder: str, training: dict) -> None:
    """Every rank saves its part of DeepSpeed's engine; `training` says of which training."""
    place = next_place(folder)
    dist.barrier()  # all have read latest
    if dist.get_rank() == 0:  # shares of another number of ranks do not stay
        shutil.rmtree(Path(folder, place), ignore_errors=True)
    engine.save_checkpoint(folder, place, save_latest=False)
    mark_latest(folder, place, training)


def training_in(folder: str) -> dict:
    """The training that was saved."""
    place = Path(folder, "latest").read_text()
    return json.loads(Path(folder, place, "training.json").read_text())


def load(engine: Any, folder: str) -> None:
    """Let the engine go on from the folder.

    All ranks look at all files: one alone that misses something would let the others wait.
    Exits with a line where the shares are those of another number of ranks.
    """
    from deepspeed.runtime.zero.utils import ZeRORuntimeException
    place = Path(folder, "latest").read_text()
    for path in Path(folder, place).glob("*.pt"):
        refuse_altered(path)
    try:
        engine.load_checkpoint(folder)
    except ZeRORuntimeException:
        sys.exit(f"{folder} holds shares of another number of ranks than these "
                 f"{dist.get_world_size()}: start as many as before, or convert it into a "
                 "universal checkpoint (README.md, What goes wrong)")
