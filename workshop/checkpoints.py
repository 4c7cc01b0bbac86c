"""Sharded checkpoints in one folder, whose file `latest` names the last complete subfolder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from workshop.flags import refuse_other_settings


def save(folder: str, settings: dict, step: int, write: Callable[[str], None]) -> None:
    """Call write("step22") on every rank to write its shard into that subfolder.

    Then rank 0 updates `latest` and removes the previous subfolder. settings: what find_latest()
    compares.
    """
    subfolder, latest = Path(folder, f"step{step}"), Path(folder, "latest")
    if dist.get_rank() == 0:
        shutil.rmtree(subfolder, ignore_errors=True)  # left over from a killed job
    dist.barrier()
    write(subfolder.name)
    dist.barrier()
    if dist.get_rank() == 0:
        previous = latest.read_text() if latest.exists() else None
        (subfolder / "settings.json").write_text(json.dumps(settings))
        temporary = Path(folder, "latest.tmp")
        temporary.write_text(subfolder.name)
        os.replace(temporary, latest)  # never a half-written file
        if previous:
            shutil.rmtree(Path(folder, previous))


def find_latest(folder: str, settings: dict) -> str:
    """Return the subfolder that `latest` names; exit if it was saved with other settings."""
    subfolder = Path(folder, "latest").read_text()
    saved_settings = json.loads(Path(folder, subfolder, "settings.json").read_text())
    refuse_other_settings(saved_settings, settings)
    return subfolder
