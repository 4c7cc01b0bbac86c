"""Measures a training step on one rank: seconds, samples, and bytes of gradients."""

import statistics
import time
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from .hooks import never_raise, wrap_method

WARM_UP = 5  # steps that are not timed: the first ones compile, choose algorithms, fill caches


class Measure:
    """Hooks that time a script's steps, and call done() after WARM_UP + `steps` of them.

    Only the steps of the first optimizer that takes one count, but the gradients of all.
    """

    def __init__(self, steps: int, done: Callable[[], None]):
        self.steps, self.done = steps, done
        self.first = None  # the optimizer whose steps are counted
        self.marks = []  # end of each step: seconds, or events on a GPU
        self.device = torch.device("cpu")
        self.gradients = {}  # {parameter: bytes of its gradient}
        self.drawn = self.given = 0  # samples since the last step: from loaders, into a model
        self.data_size = None  # samples in the data set

    def install(self) -> None:
        register_optimizer_step_post_hook(self.after_step)
        wrap_method(dataloader._BaseDataLoaderIter, "__init__", before=self.note_loader)
        wrap_method(dataloader._BaseDataLoaderIter, "__next__", after=self.note_batch)
        self.forwards = torch.nn.modules.module.register_module_forward_pre_hook(self.note_input)

    @never_raise
    def note_loader(self, iterator, loader, *_):
        iterator.measured = loader

    @never_raise
    def note_batch(self, batch, iterator):
        if batch is None or not torch.is_grad_enabled() or len(self.marks) >= WARM_UP:
            return
        self.drawn += iterator.measured.batch_size or first_length(batch)
        if hasattr(iterator.measured.dataset, "__len__"):
            self.data_size = len(iterator.measured.dataset)

    @never_raise
    def note_input(self, module, arguments):
        """Count samples without a loader: the first dimension of the model's input."""
        if torch.is_grad_enabled() and not self.given and not self.drawn and any(
                parameter.requires_grad for parameter in module.parameters()):
            self.given = first_length(arguments)

    @never_raise
    def after_step(self, optimizer, *_):
        self.first = self.first or optimizer
        if len(self.marks) < WARM_UP:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.device = parameter.device
                        self.gradients[parameter] = parameter.grad.nbytes
        if optimizer is not self.first:
            return
        self.marks.append(self.now())
        if len(self.marks) < WARM_UP:
            self.drawn = self.given = 0
        elif len(self.marks) == WARM_UP:
            self.forwards.remove()
        elif len(self.marks) == WARM_UP + self.steps:
            self.done()

    def now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        gpus = torch.get_device_module(self.device.type)
        return gpus.current_stream().record_event(gpus.Event(enable_timing=True))

    def record(self) -> dict | None:
        """Return a record as a chapter's --results writes it; None if there are too few steps."""
        marks = self.marks[WARM_UP - 1:]
        if len(marks) < 2:
            return None
        if self.device.type != "cpu":
            marks[-1].synchronize()
        seconds = statistics.median(
            end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1000
            for start, end in zip(marks, marks[1:]))
        samples = self.drawn or self.given
        return {"ranks": 1, "nodes": 1, "device": self.device.type,
                "batch_size": samples, "global_batch_size": samples,
                "images": self.data_size, "steps": len(marks) - 1, "step_seconds": seconds,
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
