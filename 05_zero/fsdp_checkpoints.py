"""Checkpoints of fsdp.py: every rank writes its shards, and any number of ranks can read them."""

import argparse
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

import workshop
from checkpoints import mark_latest, next_place


def save(model: nn.Module, optimizer: Optimizer, args: argparse.Namespace, step: int) -> None:
    """Into the folder args.checkpoint, as checkpoints.py has it."""
    place = next_place(args.checkpoint)
    writer = dcp.FileSystemWriter(Path(args.checkpoint, place), overwrite=True)
    dcp.save(state_of(model, optimizer, args, step), storage_writer=writer)
    mark_latest(args.checkpoint, place)


def load(model: nn.Module, optimizer: Optimizer, args: argparse.Namespace) -> int:
    """Return the step; model and optimizer get the state that was saved."""
    place = Path(args.checkpoint, "latest").read_text()
    state = state_of(model, optimizer, args, 0)
    try:
        dcp.load(state, checkpoint_id=Path(args.checkpoint, place))
    except dcp.CheckpointException as problem:  # which is no Exception
        raise ValueError(str(problem)) from None
    workshop.refuse_other(state["training"], args)
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    return state["step"]


def state_of(model, optimizer, args, step):
    """What is saved, as this rank has it: of sharded tensors its shards."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"training": workshop.training_of(args), "step": step, "model": model_state,
            "optimizer": optimizer_state}
