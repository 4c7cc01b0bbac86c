"""What agree.py sees of a rank's training: hooks on modules, gradients, optimizers and data loaders, which change nothing."""

import os
import random
import socket
import sys
import time
from collections import defaultdict

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler, dataloader

VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**22
PROJECTIONS = 3


def shard_of(tensor):
    """The part of a tensor that this rank has, and the place in the whole where it begins."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), sum(at * step for at, step in zip(offset, tensor.stride()))


def fingerprint(tensor):
    """A number of 64 bits that another value of any element makes another: equal tensors have equal ones."""
    local, _ = shard_of(tensor)
    flat, total = local.contiguous().reshape(-1), 0
    for start in range(0, flat.numel(), CHUNK):
        piece = flat[start:start + CHUNK]
        piece = piece.view(VIEWS[piece.element_size()]) if piece.dtype != torch.bool else piece.to(torch.uint8)
        place = torch.arange(start, start + piece.numel(), device=piece.device)
        total += ((piece.to(torch.int64) + 1) * (place * 6364136223846793005 + 1442695040888963407)).sum().item()
    return total % 2**64


def projections(tensor):
    """PROJECTIONS sums of all elements, each with its own pseudo-random weight, in fp64: linear, as averaging is.

    So the projections of an average of gradients are the average of their projections, and the sum of those of its shards.
    """
    local, first = shard_of(tensor)
    flat, sums = local.reshape(-1), [0.0] * PROJECTIONS
    for start in range(0, flat.numel(), CHUNK):
        piece = flat[start:start + CHUNK].double()
        place = torch.arange(first + start, first + start + piece.numel(), device=piece.device)
        for number in range(PROJECTIONS):
            weights = (place * 2654435761 + 97 * number) * (number + 1) % 2147483647 / 2147483647 - 0.5
            sums[number] += (piece * weights).sum().item()
    return sums


def rows(tensor):
    """A fingerprint of each of a batch's items."""
    flat = tensor.detach().reshape(len(tensor), -1)
    flat = flat.to(torch.uint8) if flat.dtype == torch.bool else flat.contiguous().view(VIEWS[flat.element_size()])
    place = torch.arange(flat.shape[1], device=flat.device)
    weights = place * 6364136223846793005 + 1442695040888963407
    return ((flat.to(torch.int64) + 1) * weights).sum(1).tolist()


class Watch:
    """The hooks of one rank. `record` is what they have seen, in types that JSON has; `done()` is called after `steps`."""

    def __init__(self, steps, done):
        self.steps, self.done = steps, done
        self.depth = self.inside = 0  # of modules; of optimizers' steps, which Horovod and DeepSpeed nest
        self.models, self.names, self.local, self.final = [], {}, {}, {}
        self.loaders = {}
        self.taken = defaultdict(int)
        self.started = self.computed = time.perf_counter()
        self.happened = 0  # anything at all: the watchdog looks whether it grows
        self.record = {
            "host": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "wrappers": [], "steps": [],
            "loaders": {}, "rows": [], "tensors": {}, "collectives": {}}

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.enter)
        modules.register_module_forward_hook(self.leave, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.replace(dataloader._BaseDataLoaderIter, "__init__", self.begin_epoch)
        self.replace(dataloader._BaseDataLoaderIter, "_next_index", self.draw)
        self.replace(dataloader._BaseDataLoaderIter, "__next__", self.use)
        self.replace(DistributedSampler, "set_epoch", self.set_epoch)

    @staticmethod
    def replace(kind, name, seen):
        original = getattr(kind, name)

        def method(self, *args, **kwargs):
            return seen(original, self, *args, **kwargs)
        setattr(kind, name, method)

    # Modules: the outermost that is called in training mode is a model, and what it is given is data.

    def enter(self, module, args):
        self.happened += 1
        self.depth += 1
        if self.depth > 1 or not module.training or not torch.is_grad_enabled():
            return
        if not any(module is model for model in self.models) and any(p.requires_grad for p in module.parameters()):
            self.meet(module)
        batch = next((arg for arg in args if torch.is_tensor(arg) and arg.dim() > 1), None)
        if batch is not None and len(self.record["rows"]) < self.steps:
            self.record["rows"].append(rows(batch))

    def leave(self, *_):
        self.depth -= 1

    def meet(self, module):
        """A model at its first use: names, and hooks on the gradients before anybody has averaged them."""
        first = not self.models
        self.models.append(module)
        for part in module.modules():
            name = type(part).__name__
            known = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP1", "DeepSpeedEngine": "DeepSpeed"}
            wrapper = known.get(name) or ("FSDP2" if name.startswith("FSDP") else None)
            if wrapper and wrapper not in self.record["wrappers"]:
                self.record["wrappers"].append(wrapper)
            if name == "DeepSpeedEngine":
                self.before_deepspeed_steps(part)
            elif wrapper == "FSDP2":
                self.before_fsdp_reduces()
        prefix = "" if first else f"model {len(self.models)}: "
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in self.names:
                name = prefix + name.replace("_orig_mod.", "").removeprefix("module.")
                self.names[parameter] = name
                if not hasattr(parameter, "to_local"):
                    parameter.register_hook(lambda gradient, name=name: self.note_local(name, gradient))
        self.record["shards"] = [name for parameter, name in self.names.items() if hasattr(parameter, "to_local")]
        if first:
            self.note_seeds(module)
            parameter = next(module.parameters())
            self.record["device"] = str(parameter.device)
            if parameter.device.type == "cuda":
                self.record["gpu"] = str(torch.cuda.get_device_properties(parameter.device).uuid)
                self.record["current"] = f"cuda:{torch.cuda.current_device()}"
            self.record["threads"] = torch.get_num_threads()
        known = self.record.get("before", {"parameters": {}})["parameters"]
        self.record["before"] = self.state()
        self.record["before"]["parameters"] |= known  # of a model that has trained meanwhile

    def before_deepspeed_steps(self, engine):
        """Its gradients are its own matter; it hands them out between backward and step."""
        original = engine.step

        def step(*args, **kwargs):
            if engine.is_gradient_accumulation_boundary():
                from deepspeed.utils import safe_get_full_grad
                found = {name: safe_get_full_grad(parameter) for parameter, name in self.names.items()}
                self.final = {name: projections(gradient) for name, gradient in found.items() if gradient is not None}
            return original(*args, **kwargs)
        engine.step = step

    def before_fsdp_reduces(self):
        """FSDP's parameters are shards: the gradients of the whole ones are seen where it reduces them."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as place
        if hasattr(place.foreach_reduce, "agree"):
            return
        original = place.foreach_reduce

        def foreach_reduce(parameters, gradients, *args, **kwargs):
            for parameter, gradient in zip(parameters, gradients):
                if parameter.sharded_param in self.names:
                    self.note_local(self.names[parameter.sharded_param], gradient)
            return original(parameters, gradients, *args, **kwargs)
        foreach_reduce.agree = True
        place.foreach_reduce = foreach_reduce

    def note_seeds(self, module):
        drops = any("Dropout" in type(part).__name__ and getattr(part, "p", 0) for part in module.modules())
        device = next(module.parameters()).device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        self.record["random"] = {"torch": fingerprint(state), "python": hash(random.getstate()),
                                 "numpy": fingerprint(torch.from_numpy(np.random.get_state()[1].astype(np.int64))),
                                 "drops": drops}

    def note_local(self, name, gradient):
        self.happened += 1
        found = projections(gradient)
        self.local[name] = [a + b for a, b in zip(self.local.get(name, [0.0] * PROJECTIONS), found)]
        self.computed = time.perf_counter()

    def state(self):
        """{name: fingerprint} of all parameters and buffers."""
        whole = {name: parameter for parameter, name in self.names.items() if not hasattr(parameter, "to_local")}
        found = {"parameters": {name: fingerprint(parameter) for name, parameter in whole.items()}, "buffers": {}}
        for model in self.models:
            for name, buffer in model.named_buffers():
                found["buffers"][name.removeprefix("module.")] = fingerprint(buffer)
        return found

    # Optimizers. Wrappers call another step inside of theirs: the innermost sees what the parameters move by.

    def before_step(self, optimizer, *_):
        self.happened += 1
        self.inside += 1
        own = self.computed - self.started  # until its last gradient was there, before it waits for others'
        self.seconds = own if own > 0 else time.perf_counter() - self.started
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.get(parameter)
                if name and parameter.grad is not None:
                    self.final[name] = projections(parameter.grad)

    def after_step(self, optimizer, *_):
        self.inside -= 1
        if self.inside:
            return
        if hasattr(optimizer, "_allreduce_delay") and "Horovod" not in self.record["wrappers"]:
            self.record["wrappers"].append("Horovod")
        number = id(optimizer)
        self.taken[number] += 1
        self.record["steps"].append({"optimizer": list(self.taken).index(number), "seconds": self.seconds,
                                     "local": self.local, "final": self.final, "after": self.state()})
        self.local, self.final = {}, {}
        if self.taken[number] == self.steps:
            self.done()
        self.started = self.computed = time.perf_counter()

    # Data: which items of which loader, by their numbers, and how often each epoch's order was drawn.

    def begin_epoch(self, original, iterator, loader, *args):
        name = self.loaders.setdefault(id(loader), str(len(self.loaders)))
        try:
            batches, items = len(loader), len(loader.dataset)
        except TypeError:
            batches = items = None
        sampler = loader.sampler
        found = self.record["loaders"].setdefault(name, {"batches": batches, "items": items, "epochs": [], "used": 0})
        found["sampler"] = type(sampler).__name__
        if isinstance(sampler, DistributedSampler):
            found |= {"shuffle": sampler.shuffle, "ranks": sampler.num_replicas, "rank": sampler.rank}
            found.setdefault("drawn", []).append(sampler.epoch)
            found["set"] = getattr(sampler, "agree_set", False)
        found["epochs"].append([])
        iterator.agree = found, found["epochs"][-1]
        original(iterator, loader, *args)

    def draw(self, original, iterator):
        index = original(iterator)
        if hasattr(iterator, "agree") and len(iterator.agree[1]) < 10_000:
            iterator.agree[1].extend(map(int, index) if isinstance(index, (list, tuple)) else
                                     [int(index)] if isinstance(index, int) else [])
        return index

    def use(self, original, iterator):
        self.happened += 1
        batch = original(iterator)
        if hasattr(iterator, "agree") and torch.is_grad_enabled():
            iterator.agree[0]["used"] += 1
        return batch

    @staticmethod
    def set_epoch(original, sampler, epoch):
        sampler.agree_set = True
        return original(sampler, epoch)


def place_of(frame, script):
    """Where the script is: "file:line, in function", of the innermost frame that is its own and not a library's."""
    own = None
    while frame:
        path = frame.f_code.co_filename
        if path == script:
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        own = own or (f"{os.path.basename(path)}:{frame.f_lineno}" if "site-packages" not in path else None)
        frame = frame.f_back
    return own or "unknown"


def main_frame():
    import threading
    return sys._current_frames().get(threading.main_thread().ident)
