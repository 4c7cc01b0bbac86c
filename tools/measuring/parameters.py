"""All parameters of a checkpoint, whichever chapter saved it."""

import os
import tempfile
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np


def parameters(checkpoint: str | Path) -> np.ndarray:
    """All parameters of a checkpoint in one vector, in fp64."""
    import torch

    if Path(checkpoint).is_dir():
        found = saved_by_ranks(Path(checkpoint, Path(checkpoint, "latest").read_text())).values()
    elif "training.npy" in zipfile.ZipFile(checkpoint).namelist():  # TensorFlow's chapters save with NumPy
        with np.load(checkpoint) as arrays:
            found = [arrays[name] for name in arrays if "/" in name and not name.startswith("sgd/")]
    else:
        found = torch.load(checkpoint, map_location="cpu")["model"].values()
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in found])


def saved_by_ranks(folder):
    """The tensors by name, of the folder in which DeepSpeed or PyTorch's ranks have saved a part each."""
    import torch

    if (folder / ".metadata").exists():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
        with tempfile.TemporaryDirectory() as temporary:
            dcp_to_torch_save(folder, f"{temporary}/whole")
            return torch.load(f"{temporary}/whole")["model"]
    if list(folder.glob("zero_*")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            found = get_fp32_state_dict_from_zero_checkpoint(folder.parent, folder.name)
        return {name: tensor.detach() for name, tensor in found.items()}
    return torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
