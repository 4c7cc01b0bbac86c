"""Checkpoints of fsdp.py: every rank writes its shards, and any number of ranks can read them."""

import argparse
import io
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

import workshop
from checkpoints import begin_place, mark_latest, training_in


def save(model: nn.Module, optimizer: Optimizer, args: argparse.Namespace, step: int) -> None:
    """Into the folder args.checkpoint, as checkpoints.py has it."""
    place = begin_place(args.checkpoint, workshop.training_of(args))
    writer = dcp.FileSystemWriter(Path(args.checkpoint, place), overwrite=True)
    writer.storage_meta = lambda: None  # holds a Path, which not every Python reads from another
    dcp.save(state_of(model, optimizer, step), storage_writer=writer)
    mark_latest(args.checkpoint, place)


def load(model: nn.Module, optimizer: Optimizer, args: argparse.Namespace) -> int:
    """Return the step; model and optimizer get the state that was saved."""
    place = Path(args.checkpoint, "latest").read_text()
    workshop.refuse_other(training_in(args.checkpoint), args)
    check(Path(args.checkpoint, place))
    state = state_of(model, optimizer, 0)
    try:
        dcp.load(state, checkpoint_id=Path(args.checkpoint, place), planner=PlainValues())
    except dcp.CheckpointException as problem:  # which is no Exception
        raise ValueError(str(problem)) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])
    return state["step"]


def state_of(model, optimizer, step):
    """What is saved, as this rank has it: of sharded tensors its shards."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"step": step, "model": model_state, "optimizer": optimizer_state}


# dcp.load() would run whatever program somebody has put into a checkpoint

IN_METADATA = {
    "pathlib": {"PosixPath"},
    "torch": {"Size", "float32", "float64", "bfloat16"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"},
}


class PlainMetadata(pickle.Unpickler):
    """Reads a description of shards, and nothing that could do something."""

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):  # thus Python 3.11.3 writes an enumeration's
            return lambda enumeration, member: enumeration[member]
        if name not in IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")
        return super().find_class(module, name)


class PlainValues(dcp.DefaultLoadPlanner):
    """Reads numbers, words and tensors."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)  # raises an exception at anything else
        value.seek(0)
        super().load_bytes(read_item, value)


def check(folder: Path) -> None:
    """Raise an exception where a checkpoint is altered, cut off, or holds more than data."""
    with open(folder / ".metadata", "rb") as file:
        metadata = PlainMetadata(file).load()
    for shard in metadata.storage_data.values():
        with open(folder / shard.relative_path, "rb") as file:
            file.seek(shard.offset)
            workshop.refuse_altered(io.BytesIO(file.read(shard.length)))
