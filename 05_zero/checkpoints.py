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


def refuse_foreign(folder: str) -> None:
    """Exit with a line where a or b, which are emptied in turn, are somebody else's."""
    for name in ("a", "b"):
        place = Path(folder, name)
        if place.exists() and not Path(place, "training.json").exists():
            sys.exit(f"{place} is no part of a checkpoint: name another folder, or move it away")


def begin_place(folder: str, training: dict) -> str:
    """The place that latest does not name, empty; call mark_latest() when it has been written."""
    latest = Path(folder, "latest")
    place = "b" if latest.exists() and latest.read_text() == "a" else "a"
    dist.barrier()  # all have read latest
    if dist.get_rank() == 0:  # shares of another number of ranks do not stay
        shutil.rmtree(Path(folder, place), ignore_errors=True)
        Path(folder, place).mkdir(parents=True)
        Path(folder, place, "training.json").write_text(json.dumps(training))
    dist.barrier()
    return place


def mark_latest(folder: str, place: str) -> None:
    """When all ranks have written their parts, rank 0 writes down where."""
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "latest.tmp").write_text(place)
        os.replace(Path(folder, "latest.tmp"), Path(folder, "latest"))
    dist.barrier()


def save(engine: Any, folder: str, training: dict) -> None:
    """Every rank saves its part of DeepSpeed's engine; `training` says of which training."""
    place = begin_place(folder, training)
    engine.save_checkpoint(folder, place, save_latest=False)
    mark_latest(folder, place)


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
