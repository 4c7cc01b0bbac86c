"""Save and load FSDP's shards; fill them with rank 0's parameters."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.optim import Optimizer

from workshop import checkpoints


def save(model: nn.Module, optimizer: Optimizer, folder: str, settings: dict, step: int) -> None:
    """Write this rank's shards; any number of ranks can load the checkpoint."""
    def write(subfolder):
        writer = dcp.FileSystemWriter(Path(folder, subfolder))
        writer.storage_meta = lambda: None  # the default pickles a Path: not portable
        dcp.save(sharded_state(model, optimizer, step), storage_writer=writer)

    checkpoints.save(folder, settings, step, write)


def load(model: nn.Module, optimizer: Optimizer, folder: str, settings: dict) -> int:
    """Load the saved state into model and optimizer; return the step.

    Like torch.load(weights_only=False), dcp.load can run code from a file: load only your own.
    """
    state = sharded_state(model, optimizer, 0)
    subfolder = checkpoints.find_latest(folder, settings)
    try:
        dcp.load(state, checkpoint_id=Path(folder, subfolder))
    except dcp.CheckpointException as problem:  # a BaseException
        raise ValueError(str(problem)) from None
    states.set_state_dict(model, optimizer, model_state_dict=state["model"],
                          optim_state_dict=state["optimizer"])
    return state["step"]


def load_from_rank_0(sharded: nn.Module, whole: nn.Module) -> None:
    """Load rank 0's parameters of `whole` into the shards of all ranks."""
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dtype = next(sharded.parameters()).dtype
    states.set_model_state_dict(sharded, whole.to(dtype).state_dict(), options=options)


def sharded_state(model, optimizer, step):
    """Return the state to save; of sharded tensors, this rank's shards."""
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"step": step, "model": model_state, "optimizer": optimizer_state}
