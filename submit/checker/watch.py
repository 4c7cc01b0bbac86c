"""What agree.py sees of a rank's training: hooks on modules, gradients, optimizers, loaders, which change nothing."""

import functools
import os
import socket
import sys
import threading
from collections import defaultdict

import agree_frames as frames
import torch
import torch.distributed as dist
from agree_sums import PROJECTIONS, fingerprint, items, likeness, projections, shard_of
from torch.distributed.algorithms.join import Join
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, Subset, dataloader

LATEST = 20  # collectives that are told to the watchdog
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv",
               "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_to_all", "all_to_all_single", "_broadcast_coalesced")
HOROVODS = ("_allreduce_async", "_grouped_allreduce_async", "_allgather_async", "_broadcast_async",
            "_reducescatter_async")
WRAPPERS = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP1", "DeepSpeedEngine": "DeepSpeed"}


class Watch:
    """The hooks of a rank. `record` is what they have seen, in types that JSON has; after `steps` they call `done`."""

    def __init__(self, steps, done):
        self.steps, self.done = steps, done
        self.models, self.ddp, self.names = [], [], {}  # names: {parameter: its name}
        self.loaders, self.augments = {}, ""  # augments: whether a transform draws random numbers, in a word
        self.taken = defaultdict(int)  # {id of an optimizer: its steps}
        self.modules_deep = self.steps_deep = self.backward_deep = 0  # DeepSpeed calls a step inside of its own
        self.in_collective = self.on_gpu = self.hears_horovod = False
        self.happened, self.calls = 0, []  # for the watchdog: whether it grows; collectives, each as "name at place"
        self.local = {}  # {name: projections} of this rank's own gradients, until their optimizer's step
        self.final = {}  # {name: projections} of what the optimizer takes in a step
        self.record = {
            "host": socket.gethostname(), "cores": sorted(os.sched_getaffinity(0)), "gpu": None, "current": None,
            "met": False, "bare": False, "half": False, "hook": "", "joins": False, "wrappers": [], "shards": [],
            "parts": [], "loaders": {}, "rows": [], "loaded": [], "steps": []}

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.enter)
        modules.register_module_forward_hook(self.leave, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.replace(dataloader._BaseDataLoaderIter, "__init__", self.begin_epoch)
        self.replace(dataloader._BaseDataLoaderIter, "_reset", self.begin_again)
        self.replace(dataloader._BaseDataLoaderIter, "_next_index", self.draw)
        self.replace(dataloader._BaseDataLoaderIter, "__next__", self.use)
        self.replace(DistributedSampler, "set_epoch", self.set_epoch)
        self.replace(torch.autograd, "backward", self.backward)
        self.replace(Join, "__enter__", self.join)
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.listen(dist, name)

    @staticmethod
    def replace(kind, name, seen):
        original = getattr(kind, name)

        def method(*args, **kwargs):
            return seen(original, *args, **kwargs)
        setattr(kind, name, method)

    # Collectives, and who has called each.

    def listen(self, module, name):
        """Note the calls of a communicating function: in torch.distributed, in its implementation, in Horovod."""
        original, plain = getattr(module, name), name.strip("_").removesuffix("_async")

        @functools.wraps(original)
        def call(*args, **kwargs):
            self.happened += 1
            if self.in_collective:  # one that is made of others
                return original(*args, **kwargs)
            self.calls.append(f"{plain} at {frames.caller_of(sys._getframe(1))}")
            self.in_collective = True
            try:
                return original(*args, **kwargs)
            finally:
                self.in_collective = False
        for place in (module, dist.distributed_c10d):
            if getattr(place, name, None) is original:
                setattr(place, name, call)

    # Modules: the outermost that is called in training mode is a model, and what it is given is data.

    def enter(self, module, args):
        self.happened += 1
        self.modules_deep += 1
        if self.modules_deep > 1 or not torch.is_grad_enabled():
            return
        if not any(part.training for part in module.modules()):  # Lightning's wrapper alone may be in eval mode
            return
        if not any(module is model for model in self.models) and any(p.requires_grad for p in module.parameters()):
            self.begin_model(module)
        batch = first_tensor(args)
        if batch is not None and len(self.record["rows"]) < self.steps:
            self.record["rows"].append(items(batch))

    def leave(self, *_):
        self.modules_deep -= 1

    def begin_model(self, module):
        """A model at its first use: its wrappers, its names, and what it begins with."""
        first = not self.models
        self.models.append(module)
        self.listen_to_horovod()
        for part in module.modules():
            self.note_wrapper(part)
        self.name_parameters(module, "" if first else f"model {len(self.models)}: ")
        if first:
            self.note_seeds(module)
            self.note_device(next(module.parameters()).device)
        known = self.record.get("before", {"parameters": {}})["parameters"]
        self.record["before"] = self.state()
        self.record["before"]["parameters"] |= known  # of a model that has trained meanwhile

    def note_wrapper(self, part):
        """A module that communicates: its name, and hooks where it does so out of sight."""
        name = type(part).__name__
        wrapper = WRAPPERS.get(name) or ("FSDP2" if name.startswith("FSDP") else None)
        if wrapper and wrapper not in self.record["wrappers"]:
            self.record["wrappers"].append(wrapper)
        if wrapper == "DDP":
            self.ddp.append(part)
        elif wrapper == "DeepSpeed":
            self.before_deepspeed_steps(part)
        elif wrapper == "FSDP2":
            self.before_fsdp_reduces()

    def name_parameters(self, module, prefix):
        """Names, which are the same on all ranks, and hooks on the gradients before anybody has averaged them."""
        for name, parameter in module.named_parameters():
            if parameter not in self.names:
                self.names[parameter] = prefix + name.replace("_orig_mod.", "").removeprefix("module.")
                whole = not hasattr(parameter, "to_local") and "FSDP1" not in self.record["wrappers"]
                if parameter.requires_grad and whole:
                    parameter.register_hook(lambda gradient, parameter=parameter: self.note_local(parameter, gradient))
        self.record["shards"] = [name for parameter, name in self.names.items() if self.is_shard(parameter)]
        self.record["parts"] = [name for parameter, name in self.names.items() if hasattr(parameter, "to_local")]

    def note_device(self, device):
        self.record["device"] = str(device)
        self.on_gpu = device.type != "cpu"
        if device.type == "cuda":
            self.record["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
            self.record["current"] = f"cuda:{torch.cuda.current_device()}"
        self.record["threads"] = torch.get_num_threads()

    def is_shard(self, parameter):
        """Whether each rank has another part of it: FSDP2's, stage 3 of DeepSpeed's ZeRO, the first FSDP's."""
        return hasattr(parameter, "to_local") or hasattr(parameter, "ds_tensor") or "FSDP1" in self.record["wrappers"]

    def listen_to_horovod(self):
        module = sys.modules.get("horovod.torch.mpi_ops")
        if module and not self.hears_horovod:
            self.hears_horovod = True
            for name in HOROVODS:
                self.listen(module, name)

    def backward(self, original, *args, **kwargs):
        self.backward_deep += 1
        try:
            original(*args, **kwargs)
        finally:
            self.backward_deep -= 1

    def join(self, original, *args):
        self.record["joins"] = True
        return original(*args)

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
                    self.note_local(parameter.sharded_param, gradient)
            return original(parameters, gradients, *args, **kwargs)
        foreach_reduce.agree = True
        place.foreach_reduce = foreach_reduce

    def note_seeds(self, module):
        """The generators' states before the first step, and what draws from them."""
        drops = any("Dropout" in type(part).__name__ and getattr(part, "p", 0) for part in module.modules())
        device = next(module.parameters()).device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        self.record["random"] = {"torch": fingerprint(state), "draws": "dropout" if drops else self.augments}

    def note_local(self, parameter, gradient):
        self.happened += 1
        self.record["half"] = self.record["half"] or gradient.element_size() < 4
        name, found = self.names[parameter], projections(gradient)
        if "DeepSpeed" not in self.record["wrappers"] and (
                parameter.grad is None or not shard_of(parameter.grad)[0].any()):
            self.local.pop(name, None)  # what was there has been thrown away, without a step
        self.local[name] = [a + b for a, b in zip(self.local.get(name, [0.0] * PROJECTIONS), found)]

    def state(self):
        """{name: fingerprint} of all parameters and buffers."""
        whole = {name: parameter for parameter, name in self.names.items() if not self.is_shard(parameter)}
        found = {"parameters": {name: fingerprint(parameter) for name, parameter in whole.items()}, "buffers": {}}
        for model in self.models:
            for name, buffer in model.named_buffers():
                found["buffers"][name.removeprefix("module.")] = fingerprint(buffer)
        return found

    # Optimizers. Wrappers call another step inside of theirs: the innermost sees what the parameters move by.

    def before_step(self, optimizer, args, kwargs):
        self.happened += 1
        self.steps_deep += 1
        self.note_final(optimizer)

    def note_final(self, optimizer):
        if hasattr(optimizer, "_starting_models") or "FSDP1" in self.record["wrappers"]:
            return  # Horovod's Adasum combines steps, not gradients; of the first FSDP's no hook is here
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.get(parameter)
                if name and parameter.grad is not None:
                    self.final[name] = projections(parameter.grad)

    def after_step(self, optimizer, args, kwargs):
        self.steps_deep -= 1
        if any(map(callable, [*args[1:], *kwargs.values()])):  # a closure, which computes gradients within the step
            self.note_final(optimizer)
        if self.steps_deep or self.backward_deep:  # Adasum steps each parameter in a hook of backward
            return
        if not self.models:  # or Horovod, which makes an empty step when it broadcasts an optimizer's state
            self.record["bare"] = True
            return
        if hasattr(optimizer, "_allreduce_delay") and "Horovod" not in self.record["wrappers"]:
            self.record["wrappers"].append("Horovod")
        for ddp in self.ddp:
            self.record["hook"] = ddp._get_ddp_logging_data().get("comm_hook", "")
        self.record["met"] = self.record["met"] or have_met()
        local = {name: self.local.pop(name) for name in self.final if name in self.local}
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.record["steps"].append({"local": local, "final": self.final, "rates": rates, "after": self.state()})
        self.final = {}
        self.taken[id(optimizer)] += 1
        if self.taken[id(optimizer)] == self.steps:
            self.done()

    # Data: which items of which loader, by their numbers, and how often each epoch's order was drawn.

    def begin_epoch(self, original, iterator, loader, *args):
        name = self.loaders.setdefault(id(loader), str(len(self.loaders)))
        try:
            batches, size = len(loader), len(loader.dataset)
        except TypeError:
            batches = size = None
        if "Random" in repr(getattr(whole(loader.dataset), "transform", "")):
            self.augments = "augmentation"
        sampler = loader.sampler
        found = self.record["loaders"].setdefault(name, {"batches": batches, "items": size, "epochs": [], "used": 0})
        if isinstance(sampler, DistributedSampler):
            found |= {"shuffle": sampler.shuffle, "ranks": sampler.num_replicas}
            found.setdefault("drawn", []).append(sampler.seed + sampler.epoch)
            told = getattr(sampler, "agree_set", False)
            found["forgets"] = not told and frames.epoch_comes_again(sys._getframe(2))
        if not found["epochs"]:
            found["like"], found["holds"] = likeness(whole(loader.dataset)), holds(whole(loader.dataset))
            found["part"] = likeness(getattr(loader.dataset, "indices", None))
            found["whole"] = goes_through_all(loader)
            found["again"] = bool(getattr(sampler, "replacement", False))
        found["epochs"].append([])
        iterator.agree = found, loader.dataset
        original(iterator, loader, *args)

    def begin_again(self, original, iterator, loader, first_iter=False):
        """Persistent workers keep their iterator: it is new in the first epoch only."""
        if first_iter:
            original(iterator, loader, first_iter)
        else:
            self.begin_epoch(original, iterator, loader)

    def draw(self, original, iterator):
        index = original(iterator)
        found, dataset = getattr(iterator, "agree", ({"epochs": [[]]}, None))
        if len(found["epochs"][-1]) < 10_000:
            drawn = index if isinstance(index, (list, tuple)) else [index]
            found["epochs"][-1].extend(number_in_whole(dataset, item) for item in drawn if hasattr(item, "__index__"))
        return index

    def use(self, original, iterator):
        self.happened += 1
        batch = original(iterator)
        if hasattr(iterator, "agree") and torch.is_grad_enabled():
            iterator.agree[0]["used"] += 1
            found = first_tensor(batch)
            if found is not None and len(self.record["loaded"]) < self.steps:
                self.record["loaded"].append(items(found))
        return batch

    @staticmethod
    def set_epoch(original, sampler, epoch):
        sampler.agree_set = True
        return original(sampler, epoch)

    # For the watchdog.

    def whereabouts(self, script: str) -> dict:
        """Where the main thread is, whether it waits for other ranks there, and the collectives it has called last."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        waits = frames.waits(frame, self.on_gpu)  # a GPU's queue is waited for anywhere
        return {"stack": frames.places(frame, script), "waits": waits, "happened": self.happened,
                "first": max(0, len(self.calls) - LATEST), "calls": self.calls[-LATEST:]}


def have_met():
    """Whether the process knows of other ranks."""
    horovod = sys.modules.get("horovod.torch")
    return (dist.is_initialized() and dist.get_world_size() > 1) or bool(
        horovod and horovod.is_initialized() and horovod.size() > 1)


def first_tensor(batch):
    """The first tensor with a row for each item of a batch, which may be a tensor, a list, or a dict."""
    if torch.is_tensor(batch):
        return batch if batch.dim() > 1 else None
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else []
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def goes_through_all(loader):
    """Whether a loader draws every item of its data set, as shuffle=True or False do."""
    plain = type(loader.batch_sampler) is BatchSampler
    sampler = loader.batch_sampler.sampler if plain else None
    return type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)


def holds(dataset):
    """Whether something in a data set is as long as it: images, file names. Else it may make its items up."""
    values = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    values += [part for value in values if isinstance(value, (list, tuple)) and len(value) < 10 for part in value]
    lengths = [len(value) for value in values if hasattr(value, "__len__") and getattr(value, "ndim", 1)]
    return hasattr(dataset, "__len__") and len(dataset) in lengths


def whole(dataset):
    """The data set of which another may be a subset, of a subset."""
    return whole(dataset.dataset) if isinstance(dataset, Subset) else dataset


def number_in_whole(dataset, number):
    """The number that an item of a subset has in the whole data set."""
    return number_in_whole(dataset.dataset, dataset.indices[number]) if isinstance(dataset, Subset) else int(number)
