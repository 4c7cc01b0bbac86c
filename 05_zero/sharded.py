"""What fsdp.py needs around its shards: checkpoints, and a check that gradients are averaged."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
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


def refuse_sums(device: torch.device) -> None:
    """Exit with one line where each rank's gradient of 1 does not come back as a mean of 1.

    Over gloo PyTorch 2.8.0 sums (github.com/pytorch/pytorch/issues/162338). Adam divides a gradient
    by its own size, so a training with gradients N times too large looks right.
    """
    layer = nn.Linear(1, 1, bias=False).to(device)
    fsdp.fully_shard(layer, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    layer(torch.ones(1, 1, device=device)).sum().backward()
    times = layer.weight.grad.full_tensor().item()
    if round(times) != 1:  # a mean over 7 ranks may be 0.9999999
        sys.exit(f"FSDP of PyTorch {torch.__version__} makes gradients {times:g} times as large as "
                 f"the mean over {dist.get_world_size()} ranks: take another PyTorch, or NCCL "
                 "(github.com/pytorch/pytorch/issues/162338)")
