"""How long does a step of my own script take on one GPU? For predict.py, as a line of a file.

    python cluster/step_time.py run.jsonl my_train.py FLAGS     # any folder; one rank

The script, a PyTorch program, runs unmodified until its first optimizer has taken 5 + 30 steps. The
first 5 are not timed: they compile, choose algorithms, and fill caches.
"""

import json
import os
import runpy
import statistics
import sys
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

WARM_UP, STEPS = 5, 30


class StepTimer:
    """Hooks that time steps, and count samples and bytes of gradients, of all optimizers."""

    def __init__(self, script: str):
        self.script = script
        self.optimizer = None  # the first one, whose steps are counted
        self.step_ends = []  # in seconds, or as events on a GPU
        self.device = torch.device("cpu")
        self.gradients = {}  # {parameter: bytes of its gradient}
        self.samples = 0  # drawn by DataLoaders since the last step
        self.dataset_size = None

    def install(self) -> None:
        register_optimizer_step_post_hook(self.after_step)
        draw = dataloader._BaseDataLoaderIter.__next__

        def draw_and_count(iterator):
            batch = draw(iterator)
            if torch.is_grad_enabled() and len(self.step_ends) < WARM_UP:
                self.samples += first_length(batch)
                self.dataset_size = dataset_size(iterator)
            return batch

        dataloader._BaseDataLoaderIter.__next__ = draw_and_count

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
        elif len(self.step_ends) == WARM_UP + STEPS:
            raise SystemExit(0)

    def now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        gpus = torch.get_device_module(self.device.type)
        return gpus.current_stream().record_event(gpus.Event(enable_timing=True))

    def record(self) -> dict:
        """Return a record as a chapter's --results writes it; exit if there are too few steps."""
        ends = self.step_ends[WARM_UP - 1:]
        if len(ends) < 2:
            sys.exit(f"step_time.py: too few steps of a PyTorch optimizer: {len(self.step_ends)}, "
                     f"at least {WARM_UP + 1} are needed")
        if self.device.type == "cpu":
            seconds = [end - start for start, end in zip(ends, ends[1:])]
        else:
            ends[-1].synchronize()
            seconds = [start.elapsed_time(end) / 1000 for start, end in zip(ends, ends[1:])]
        return {"chapter": self.script, "ranks": 1, "nodes": 1, "device": self.device.type,
                "batch_size": self.samples, "global_batch_size": self.samples,
                "images": self.dataset_size, "steps": len(seconds),
                "step_seconds": statistics.median(seconds),
                "gradient_bytes": sum(self.gradients.values()),
                "parameters": sum(parameter.numel() for parameter in self.gradients)}


def dataset_size(iterator):
    try:
        return len(iterator._dataset)
    except TypeError:  # a stream
        return None


def first_length(batch: object) -> int:
    """Return the first dimension of the first tensor in a batch, or 0 if there is none."""
    if torch.is_tensor(batch) and batch.dim():
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, (dict, list, tuple)):
        return 0
    return next(filter(None, map(first_length, parts)), 0)


def main():
    if len(sys.argv) < 3 or not os.path.isfile(sys.argv[2]):
        sys.exit("usage: step_time.py RESULTS.jsonl my_train.py FLAGS")
    results, script = sys.argv[1:3]
    try:
        file = open(results, "a")  # now, because the script may change the folder
    except OSError as problem:
        sys.exit(f"step_time.py: cannot write {results}: {problem.strerror}")
    timer = StepTimer(os.path.basename(script))
    timer.install()
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    record = timer.record()
    with file:
        file.write(json.dumps(record) + "\n")
    print(f"{record['chapter']}: {record['steps']} steps on one rank, {record['device']}: "
          f"{record['step_seconds']:.4f} s per step (median), {record['batch_size']:,} samples, "
          f"{record['gradient_bytes']:,} bytes of gradients")


if __name__ == "__main__":
    main()
