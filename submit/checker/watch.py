"""What agree.py sees of a rank's training.

Hooks on modules, gradients, optimizers and loaders, which change nothing.
"""

import functools
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    dataloader,
)

from . import frames
from .sums import PROJECTIONS, fingerprint, likeness, projections, samples, shard_of

LONGEST = 10_000  # samples of an epoch whose numbers are recorded
WRAPPERS = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP1",
    "DeepSpeedEngine": "DeepSpeed"}


class Watch:
    """The hooks of a rank.

    `record` is what they have seen, in types that JSON has. `done` is called after `steps` steps.
    """

    def __init__(self, script: str, steps: int, done: Callable[[], None]):
        self.script, self.steps, self.done = script, steps, done
        self.models = []
        self.names = {}  # {parameter: its name}
        self.loader_names = {}  # {id of a DataLoader: its name in the record}
        self.step_counts = defaultdict(int)  # {id of an optimizer: its steps}
        self.module_depth = self.step_depth = 0  # DeepSpeed calls a step within its own
        self.on_gpu = False
        self.events = 0  # a count that grows while the training goes on
        self.local = {}  # {name: projections} of this rank's own gradients since the last step
        self.final = {}  # {name: projections} of what the optimizer takes
        self.record = {
            "host": socket.gethostname(), "gpu": None, "half": False, "hook": "",
            "wrappers": [], "shards": [], "parts": [], "loaders": {}, "rows": [], "steps": []}

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

        iterator = dataloader._BaseDataLoaderIter
        replace(iterator, "__init__", self.begin_epoch)
        replace(iterator, "_reset", self.begin_next_epoch)
        replace(iterator, "_next_index", self.draw)
        replace(iterator, "__next__", self.load)

    # Modules: the outermost that is called in training mode is a model, and its input is data.

    def before_forward(self, module, args):
        self.events += 1
        self.module_depth += 1
        if self.module_depth > 1 or not torch.is_grad_enabled():
            return
        # Any part: Lightning's wrapper may be in eval mode.
        if not any(part.training for part in module.modules()):
            return
        known = any(module is model for model in self.models)
        if not known and any(parameter.requires_grad for parameter in module.parameters()):
            self.begin_model(module)
        batch = first_tensor(args)
        if batch is not None and len(self.record["rows"]) < self.steps:
            self.record["rows"].append(samples(batch))

    def after_forward(self, *_):
        self.module_depth -= 1

    def begin_model(self, module):
        """Note a model at its first use: its wrappers, its names, and its first parameters."""
        first = not self.models
        self.models.append(module)
        for part in module.modules():
            self.note_wrapper(part)
        self.name_parameters(module, "" if first else f"model {len(self.models)}: ")
        if first:
            device = next(module.parameters()).device
            self.on_gpu = device.type != "cpu"
            self.record["device"] = str(device)
            if device.type == "cuda":
                self.record["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        # The earlier values of a model that has trained meanwhile stay.
        self.record["before"] = self.state() | self.record.get("before", {})

    def note_wrapper(self, part):
        """Note a module that communicates, and hook it where it does so out of sight."""
        name = type(part).__name__
        wrapper = WRAPPERS.get(name)
        if not wrapper and name.startswith("FSDP"):
            wrapper = "FSDP2"
        if wrapper and wrapper not in self.record["wrappers"]:
            self.record["wrappers"].append(wrapper)
        if wrapper == "DDP":
            self.record["hook"] = part._get_ddp_logging_data().get("comm_hook", "")
        elif wrapper == "DeepSpeed":
            self.hook_deepspeed(part)
        elif wrapper == "FSDP2":
            self.hook_fsdp()

    def name_parameters(self, module, prefix):
        """Give parameters names that are the same on all ranks, and hook their own gradients."""
        for name, parameter in module.named_parameters():
            if parameter in self.names:
                continue
            self.names[parameter] = prefix + name.replace("_orig_mod.", "").removeprefix("module.")
            sharded = hasattr(parameter, "to_local") or "FSDP1" in self.record["wrappers"]
            if parameter.requires_grad and not sharded:
                parameter.register_hook(functools.partial(self.note_local, parameter))
        names = self.names.items()
        self.record["shards"] = [name for parameter, name in names if self.is_shard(parameter)]
        self.record["parts"] = [name for parameter, name in names if hasattr(parameter, "to_local")]

    def is_shard(self, parameter):
        """Return True if each rank has another part of it: FSDP, stage 3 of DeepSpeed's ZeRO."""
        return (hasattr(parameter, "to_local") or hasattr(parameter, "ds_tensor")
                or "FSDP1" in self.record["wrappers"])

    def state(self):
        """Return fingerprints of all whole parameters, by name."""
        return {name: fingerprint(parameter) for parameter, name in self.names.items()
                if not self.is_shard(parameter)}

    # Gradients.

    def note_local(self, parameter, gradient):
        """Add to this rank's own gradient, before anybody averages it."""
        self.events += 1
        self.record["half"] = self.record["half"] or gradient.element_size() < 4
        name = self.names[parameter]
        if "DeepSpeed" not in self.record["wrappers"] and (
                parameter.grad is None or not shard_of(parameter.grad)[0].any()):
            self.local.pop(name, None)  # the earlier one was thrown away, without a step
        earlier = self.local.get(name, [0.0] * PROJECTIONS)
        self.local[name] = [a + b for a, b in zip(earlier, projections(gradient))]

    def hook_deepspeed(self, engine):
        """DeepSpeed keeps its gradients elsewhere; it hands them out between backward and step."""
        original = engine.step

        def step(*args, **kwargs):
            if engine.is_gradient_accumulation_boundary():
                from deepspeed.utils import safe_get_full_grad
                gradients = {name: safe_get_full_grad(parameter)
                             for parameter, name in self.names.items()}
                self.final = {name: projections(gradient) for name, gradient in gradients.items()
                              if gradient is not None}
            return original(*args, **kwargs)

        engine.step = step

    def hook_fsdp(self):
        """Note whole gradients where FSDP reduces them: the parameters themselves are shards."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
        if hasattr(fsdp.foreach_reduce, "agree"):
            return
        original = fsdp.foreach_reduce

        def foreach_reduce(parameters, gradients, *args, **kwargs):
            for parameter, gradient in zip(parameters, gradients):
                if parameter.sharded_param in self.names:
                    self.note_local(parameter.sharded_param, gradient)
            return original(parameters, gradients, *args, **kwargs)

        foreach_reduce.agree = True
        fsdp.foreach_reduce = foreach_reduce

    # Optimizers. Wrappers call another step within theirs: the innermost sees the final gradients.

    def before_step(self, optimizer, args, kwargs):
        self.events += 1
        self.step_depth += 1
        self.note_final(optimizer)

    def note_final(self, optimizer):
        if "FSDP1" in self.record["wrappers"]:  # it has no hook for its own gradients
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.get(parameter)
                if name and parameter.grad is not None:
                    self.final[name] = projections(parameter.grad)

    def after_step(self, optimizer, args, kwargs):
        self.step_depth -= 1
        if any(map(callable, [*args[1:], *kwargs.values()])):  # a closure computes them in the step
            self.note_final(optimizer)
        if self.step_depth or not self.models:  # Horovod broadcasts a state by an empty step
            return

        if hasattr(optimizer, "_allreduce_delay") and "Horovod" not in self.record["wrappers"]:
            self.record["wrappers"].append("Horovod")

        local = {name: self.local.pop(name) for name in self.final if name in self.local}
        step = {"local": local, "final": self.final, "after": self.state()}
        self.record["steps"].append(step)
        self.final = {}
        self.step_counts[id(optimizer)] += 1
        if self.step_counts[id(optimizer)] == self.steps:
            self.done()

    # Data: the numbers of the samples that each loader draws, epoch by epoch.

    def begin_epoch(self, original, iterator, loader, *args):
        name = self.loader_names.setdefault(id(loader), str(len(self.loader_names)))
        facts = self.record["loaders"].setdefault(name, describe(loader))
        sampler = loader.sampler
        steps = len(self.record["steps"])  # an epoch before the next step takes this one's place
        if isinstance(sampler, DistributedSampler):
            facts |= {"shuffle": sampler.shuffle, "ranks": sampler.num_replicas}
            facts["orders"][steps] = sampler.seed + sampler.epoch
        facts["epochs"][steps] = numbers = []
        iterator.agree = facts, numbers, loader.dataset
        original(iterator, loader, *args)

    def begin_next_epoch(self, original, iterator, loader, first_iter=False):
        """Persistent workers keep their iterator: it is new in the first epoch only."""
        if first_iter:
            original(iterator, loader, first_iter)
        else:
            self.begin_epoch(original, iterator, loader)

    @staticmethod
    def draw(original, iterator):
        index = original(iterator)
        if hasattr(iterator, "agree"):
            _, numbers, dataset = iterator.agree
            drawn = index if isinstance(index, (list, tuple)) else [index]
            if len(numbers) < LONGEST:
                numbers.extend(number_in_whole(dataset, number) for number in drawn
                               if hasattr(number, "__index__"))
        return index

    def load(self, original, iterator):
        self.events += 1
        batch = original(iterator)
        if hasattr(iterator, "agree") and torch.is_grad_enabled():
            iterator.agree[0]["used"] = True
        return batch

    def whereabouts(self) -> dict:
        """Return where the main thread is, and whether it waits there for others."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        return {"stack": frames.places(frame, self.script), "events": self.events,
                "waits": frames.waits(frame, self.on_gpu)}


def replace(owner, name, method):
    """Let method(original, ...) take the place of owner.name."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        return method(original, *args, **kwargs)

    setattr(owner, name, call)


def first_tensor(batch):
    """Return the first tensor with a row per sample of a batch, or None."""
    tensors = filter(torch.is_tensor, tree_leaves(batch))
    return next((tensor for tensor in tensors if tensor.dim() > 1), None)


def describe(loader):
    """Return the facts of a DataLoader that stay the same in all epochs."""
    data = loader.dataset
    while hasattr(data, "dataset"):  # a Subset, or another wrapper
        data = data.dataset
    try:
        size = len(loader.dataset)
    except TypeError:
        size = None
    sampler = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else None
    replacement = bool(getattr(loader.sampler, "replacement", False))
    all_samples = type(sampler) in (RandomSampler, SequentialSampler) and not replacement
    return {"items": size, "epochs": {}, "orders": {}, "used": False, "whole": all_samples,
            "like": likeness(data), "replacement": replacement}


def number_in_whole(dataset, number):
    """Return the number that a sample of a subset has in the whole data set."""
    if isinstance(dataset, Subset):
        return number_in_whole(dataset.dataset, dataset.indices[number])
    return int(number)
