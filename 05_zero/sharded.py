"""Checkpoints of FSDP's shards, and shards of the parameters that rank 0 has."""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import checkpoints


def save(model: nn.Module, optimizer: Optimizer, checkpoint: str, training: dict,
         step: int) -> None:
    """Let every rank write its shards; any number of ranks can read them."""
    def write(place):
        writer = dcp.FileSystemWriter(Path(checkpoint, place))
        writer.storage_meta = lambda: None  # a Path, which not every Python reads from another
        dcp.save(state_of(model, optimizer, step), storage_writer=writer)

    checkpoints.save(checkpoint, training, step, write)


def load(model: nn.Module, optimizer: Optimizer, checkpoint: str, training: dict) -> int:
    """Return the step; model and optimizer get the state that was saved.

    Like torch.load of old, dcp.load runs what a file tells it to: load only what you wrote.
    """
    state = state_of(model, optimizer, 0)
    place = checkpoints.last_saved(checkpoint, training)
    try:
        dcp.load(state, checkpoint_id=Path(checkpoint, place))
    except dcp.CheckpointException as problem:  # which is no Exception
        raise ValueError(str(problem)) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    return state["step"]


def load_from_rank_0(sharded: nn.Module, whole: nn.Module) -> None:
    """Give each rank its shards of the parameters that `whole` has on rank 0."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dtype = next(sharded.parameters()).dtype
    set_model_state_dict(sharded, whole.to(dtype).state_dict(), options=options)


def state_of(model, optimizer, step):
    """Return what is saved, as this rank has it: of sharded tensors its shards."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"step": step, "model": model_state, "optimizer": optimizer_state}
