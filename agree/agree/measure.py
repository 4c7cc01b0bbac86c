"""Measures a training step on one rank: seconds, samples, and bytes of gradients."""

import json
import statistics
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from .hooks import never_raise, wrap_method
from .session import EXIT_NOT_CHECKED, EXIT_NOTHING_WRONG, leave, say

WARM_UP = 5  # steps that are not timed: the first ones compile, choose algorithms, fill caches


class StepTimer:
    """Hooks that time WARM_UP + `steps` of a script's steps; replaces a Session for --results.

    Steps of the first optimizer that takes one are counted, and gradients of all optimizers.
    """

    rank = 0

    def __init__(self, name: str, steps: int, results: str):
        try:
            self.file = open(results, "a")  # now, because the script may change the folder
        except OSError as problem:
            raise SystemExit(f"--results: cannot write {results}: {problem.strerror}") from None
        self.name, self.steps = name, steps
        self.optimizer = None  # the one whose steps are counted
        self.step_ends = []  # in seconds, or as events on a GPU
        self.device = torch.device("cpu")
        self.gradients = {}  # {parameter: bytes of its gradient}
        self.samples = 0  # drawn by DataLoaders since the last step
        self.dataset_size = None

    def install(self) -> None:
        register_optimizer_step_post_hook(self.after_step)
        wrap_method(dataloader._BaseDataLoaderIter, "__init__", before=self.note_loader)
        wrap_method(dataloader._BaseDataLoaderIter, "__next__", after=self.note_batch)

    @never_raise
    def note_loader(self, iterator, loader, *_):
        iterator.timed_loader = loader

    @never_raise
    def note_batch(self, batch, iterator):
        if batch is None or not torch.is_grad_enabled() or len(self.step_ends) >= WARM_UP:
            return
        loader = iterator.timed_loader
        self.samples += loader.batch_size or first_length(batch)
        if hasattr(loader.dataset, "__len__"):
            self.dataset_size = len(loader.dataset)

    @never_raise
    def after_step(self, optimizer, *_):
        self.optimizer = self.optimizer or optimizer
        if len(self.step_ends) < WARM_UP:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.device = parameter.device
                        self.gradients[parameter] = parameter.grad.nbytes
        if optimizer is not self.optimizer:
            return
        self.step_ends.append(self.now())
        if len(self.step_ends) < WARM_UP:
            self.samples = 0
        elif len(self.step_ends) == WARM_UP + self.steps:
            self.finish()

    def now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        gpus = torch.get_device_module(self.device.type)
        return gpus.current_stream().record_event(gpus.Event(enable_timing=True))

    def finish(self, end="steps", problem=""):
        """Print the step time, append it to the file of --results, and exit."""
        record = self.record()
        if not record:
            say(f"agree: {problem or 'too few steps of a PyTorch optimizer to time them'}")
            leave(None, 0, 1, EXIT_NOT_CHECKED)
        say(f"{self.name}: {record['steps']} steps on one rank, {record['device']}: "
            f"{record['step_seconds']:.4f} s per step (median), {record['batch_size']:,} samples, "
            f"{record['gradient_bytes']:,} bytes of gradients")
        with self.file:
            self.file.write(json.dumps({"chapter": self.name} | record) + "\n")
        leave(None, 0, 1, EXIT_NOTHING_WRONG, finalize=True)

    def record(self) -> dict | None:
        """Return a record as a chapter's --results writes it; None if there are too few steps."""
        ends = self.step_ends[WARM_UP - 1:]
        if len(ends) < 2:
            return None
        if self.device.type == "cpu":
            seconds = [end - start for start, end in zip(ends, ends[1:])]
        else:
            ends[-1].synchronize()
            seconds = [start.elapsed_time(end) / 1000 for start, end in zip(ends, ends[1:])]
        return {"ranks": 1, "nodes": 1, "device": self.device.type,
                "batch_size": self.samples, "global_batch_size": self.samples,
                "images": self.dataset_size, "steps": len(seconds),
                "step_seconds": statistics.median(seconds),
                "gradient_bytes": sum(self.gradients.values()),
                "parameters": sum(parameter.numel() for parameter in self.gradients)}


def first_length(batch: object) -> int:
    """Return the first dimension of the first tensor in a batch, or 0 if there is none."""
    if torch.is_tensor(batch) and batch.dim():
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, (dict, list, tuple)):
        return 0
    return next(filter(None, map(first_length, parts)), 0)
