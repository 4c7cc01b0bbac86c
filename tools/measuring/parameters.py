"""Read all parameters of a checkpoint, whichever chapter saved it."""

import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np


def parameters(checkpoint: str | Path) -> np.ndarray:
    """Return all parameters of a checkpoint in one vector, in fp64."""
    return np.concatenate([tensor.ravel() for tensor in named_parameters(checkpoint).values()])


def named_parameters(checkpoint: str | Path) -> dict[str, np.ndarray]:
    """Return {name: array in fp64} of a checkpoint's parameters, in its own order."""
    import torch

    if Path(checkpoint).is_dir():
        latest = Path(checkpoint, "latest").read_text()
        tensors = read_rank_files(Path(checkpoint, latest))
    else:
        tensors = torch.load(checkpoint, map_location="cpu")["model"]
    return {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}


def read_rank_files(folder):
    """Return {name: tensor} of a checkpoint folder, into which every rank saved a part."""
    import torch

    if (folder / ".metadata").exists():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        with tempfile.TemporaryDirectory() as temporary:
            dcp_to_torch_save(folder, f"{temporary}/whole")
            return torch.load(f"{temporary}/whole")["model"]
    if list(folder.glob("zero_*")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
            tensors = get_fp32_state_dict_from_zero_checkpoint(folder.parent, folder.name)
        return {name: tensor.detach() for name, tensor in tensors.items()}
    return torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
