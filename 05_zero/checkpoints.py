"""Sharded checkpoints in one folder, whose file `latest` names the last complete subfolder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from workshop import refuse_other_settings


def save(checkpoint: str, training: dict, step: int, write: Callable[[str], None]) -> None:
    """Call write("step22") on every rank to write its shard into that subfolder.

    Then rank 0 updates `latest` and removes the previous subfolder.
    """
    folder = Path(checkpoint)
    subfolder = f"step{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder / subfolder, ignore_errors=True)  # left over from a killed job
    dist.barrier()
    write(subfolder)
    dist.barrier()
    if dist.get_rank() == 0:
        latest = folder / "latest"
        previous = latest.read_text() if latest.exists() else None
        (folder / subfolder / "training.json").write_text(json.dumps(training))
        (folder / "latest.tmp").write_text(subfolder)
        os.replace(folder / "latest.tmp", latest)  # never a half-written file
        if previous:
            shutil.rmtree(folder / previous)


def find_latest(checkpoint: str, training: dict) -> str:
    """Return the subfolder that `latest` names; exit if it was saved with other settings."""
    subfolder = Path(checkpoint, "latest").read_text()
    saved_training = json.loads(Path(checkpoint, subfolder, "training.json").read_text())
    refuse_other_settings(saved_training, training)
    return subfolder
