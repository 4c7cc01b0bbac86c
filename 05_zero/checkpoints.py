"""Checkpoints to which every rank writes a part: a folder, whose file latest names a whole one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from workshop import refuse_other


def save(checkpoint: str, training: dict, step: int, write: Callable[[str], None]) -> None:
    """Every rank writes its part by write("step22"), a folder in the checkpoint's.

    When all have, rank 0 puts that name into latest, and removes the checkpoint before.
    """
    folder, place = Path(checkpoint), f"step{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / place, ignore_errors=True)  # of a job that was killed in between
    dist.barrier()
    write(place)
    dist.barrier()
    if dist.get_rank() == 0:
        latest = folder / "latest"
        before = latest.read_text() if latest.exists() else None
        (folder / place / "training.json").write_text(json.dumps(training))
        (folder / "latest.tmp").write_text(place)
        os.replace(folder / "latest.tmp", latest)  # never a half-written file
        if before:
            shutil.rmtree(folder / before)


def last_saved(checkpoint: str, training: dict) -> str:
    """Return what latest names; exit with one line where it is of another training."""
    place = Path(checkpoint, "latest").read_text()
    refuse_other(json.loads(Path(checkpoint, place, "training.json").read_text()), training)
    return place
