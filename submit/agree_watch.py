"""What agree.py sees of a rank's training: hooks on modules, gradients, optimizers, loaders, which change nothing."""

import functools
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler, dataloader

CHUNK = 2**22
COLUMNS = 2**12
PROJECTIONS = 3
LATEST = 20  # collectives that are told to the watchdog
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv",
               "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_to_all", "all_to_all_single", "_broadcast_coalesced")
HOROVODS = ("_allreduce_async", "_grouped_allreduce_async", "_allgather_async", "_broadcast_async",
            "_reducescatter_async")
WRAPPERS = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP1", "DeepSpeedEngine": "DeepSpeed"}
CALLERS = {"/deepspeed/": "DeepSpeed", "/torch/distributed/fsdp": "FSDP", "/torch/nn/parallel/distributed": "DDP",
           "/torch/nn/modules/_functions": "SyncBatchNorm", "/torch/distributed/optim": "ZeroRedundancyOptimizer",
           "/horovod/torch/optimizer": "Horovod's optimizer", "/horovod/torch/functions": "Horovod's functions",
           "/accelerate/": "Accelerate", "/lightning": "Lightning"}
HERE = os.path.splitext(__file__)[0].removesuffix("_watch")  # agree.py, and its two files
COMMUNICATES = "/torch/distributed/", "/torch/nn/parallel/distributed", "/horovod/", "/deepspeed/comm", "/mpi4py/"


def shard_of(tensor):
    """The part of a tensor that this rank has, and the place in the whole where it begins."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), sum(at * step for at, step in zip(offset, tensor.stride()))


@functools.cache
def column_weights(device, dtype):
    """PROJECTIONS pseudo-random weights for each of COLUMNS columns."""
    place = torch.arange(COLUMNS)
    return torch.stack([scatter(place, number) for number in range(PROJECTIONS)], 1).to(device, dtype)


def scatter(place, number):
    """Pseudo-random numbers from -0.5 to 0.5, which follow from the places and the number of a projection."""
    mixed = (place + 1) * (2654435761 + 2 * number) ^ (place + 7 * number) * 40503
    return (mixed * 6364136223846793005 >> 33).double() / 2**31


def table(flat, before=0):
    """A flat tensor as rows of COLUMNS numbers: with `before` zeros in front of it, and others behind."""
    return torch.nn.functional.pad(flat, (before, -(before + flat.numel()) % COLUMNS)).view(-1, COLUMNS)


def words(tensor):
    """A tensor's bytes along its last dimension as integers of 64 bits, with zeros behind them to fill the last."""
    found = tensor.contiguous().view(torch.uint8)
    found = torch.nn.functional.pad(found, (0, -found.shape[-1] % 8))
    return (found if found.data_ptr() % 8 == 0 else found.clone()).view(torch.int64)


def fingerprint(tensor):
    """A number of 64 bits that another value of any element makes another: equal tensors have equal ones."""
    flat, total = shard_of(tensor)[0].reshape(-1), 0
    for number, start in enumerate(range(0, flat.numel(), CHUNK)):
        found = words(flat[start:start + CHUNK])
        full = len(found) // COLUMNS * COLUMNS
        sums = torch.cat([found[:full].view(-1, COLUMNS).sum(1), found[full:].sum(0, keepdim=True)])
        rows = torch.arange(len(sums), device=sums.device) + number * CHUNK
        total += (sums * (2 * rows + 1)).sum().item()
    return total % 2**64


def projections(tensor):
    """PROJECTIONS sums of all elements, each with its own pseudo-random weight: linear, as averaging is.

    So the projections of an average of gradients are the average of their projections, and those of a whole tensor are
    the sum of its shards'.
    """
    local, first = shard_of(tensor)
    flat, sums = local.reshape(-1), torch.zeros(PROJECTIONS, dtype=torch.float64)
    for start in range(0, flat.numel(), CHUNK):
        place = first + start
        lines = table(flat[start:start + CHUNK], place % COLUMNS)
        kind = torch.float64 if lines.dtype == torch.float64 else torch.float32
        products = (lines.to(kind) @ column_weights(lines.device, kind)).cpu().double()
        rows = torch.arange(len(products)) + place // COLUMNS
        sums += (products * torch.stack([scatter(rows, 10 + number) for number in range(PROJECTIONS)], 1)).sum(0)
    return sums.tolist()


def items(batch):
    """A fingerprint of each of a batch's items, by their values and the order of these."""
    found = words(batch.detach().reshape(len(batch), -1))
    place = torch.arange(found.shape[1], device=found.device)
    return (found * (place * 6364136223846793005 + 1442695040888963407)).sum(1).tolist()


class Watch:
    """The hooks of a rank. `record` is what they have seen, in types that JSON has; after `steps` they call `done`."""

    def __init__(self, steps, done):
        self.steps, self.done = steps, done
        self.models, self.ddp, self.names = [], [], {}  # names: {parameter: its name}
        self.loaders, self.augments = {}, ""  # augments: the name of a transform that draws random numbers
        self.taken = defaultdict(int)  # {id of an optimizer: its steps}
        self.modules_deep = self.steps_deep = 0  # Horovod and DeepSpeed call another step inside of theirs
        self.in_collective = self.on_gpu = self.hears_horovod = False
        self.happened, self.calls = 0, []  # for the watchdog: whether it grows; collectives, each as "name at place"
        self.computed = 0.0  # when the last gradient was there
        self.begin_step()
        self.record = {
            "host": socket.gethostname(), "cores": sorted(os.sched_getaffinity(0)), "gpu": None, "current": None,
            "met": False, "bare": False, "half": False, "hook": "", "wrappers": [], "shards": [], "loaders": {},
            "rows": [], "steps": []}

    def begin_step(self):
        """What is known of one step: {name: projections} before and after the average, {caller: [calls, bytes]}, s."""
        self.local, self.final, self.sent = {}, {}, {}
        self.spent = {"watching": 0.0, "waiting": 0.0}
        self.started = time.perf_counter()

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
        self.replace(torch.autograd, "backward", self.backward)
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.listen(dist, name, lambda args, kwargs: [*args, *kwargs.values()])

    @staticmethod
    def replace(kind, name, seen):
        original = getattr(kind, name)

        def method(*args, **kwargs):
            return seen(original, *args, **kwargs)
        setattr(kind, name, method)

    @contextmanager
    def spending(self, what):
        started = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - started

    # Collectives: what each sends, and who has called it.

    def listen(self, module, name, tensors_of):
        """Note the calls of a communicating function: in torch.distributed, in its implementation, in Horovod."""
        original, plain = getattr(module, name), name.strip("_").removesuffix("_async")

        @functools.wraps(original)
        def call(*args, **kwargs):
            self.happened += 1
            if self.in_collective:  # one that is made of others
                return original(*args, **kwargs)
            size = max((size_of(value) for value in tensors_of(args, kwargs)), default=0)
            caller = caller_of(sys._getframe(1))
            self.calls.append(f"{plain} at {caller}")
            self.count(plain, caller, 1, size)
            self.in_collective = True
            try:
                with self.spending("waiting"):
                    return original(*args, **kwargs)
            finally:
                self.in_collective = False
        for place in (module, dist.distributed_c10d):
            if getattr(place, name, None) is original:
                setattr(place, name, call)

    def count(self, name, caller, calls, size):
        key = f"{name} by {caller}"
        before = self.sent.get(key, [0, 0])
        self.sent[key] = [before[0] + calls, before[1] + size]

    # Modules: the outermost that is called in training mode is a model, and what it is given is data.

    def enter(self, module, args):
        self.happened += 1
        self.modules_deep += 1
        if self.modules_deep > 1 or not module.training or not torch.is_grad_enabled():
            return
        if not any(module is model for model in self.models) and any(p.requires_grad for p in module.parameters()):
            self.meet(module)
        with self.spending("watching"):
            self.note_batch(args)

    def note_batch(self, args):
        batch = next((arg for arg in args if torch.is_tensor(arg) and arg.dim() > 1), None)
        if batch is not None and len(self.record["rows"]) < self.steps:
            self.record["rows"].append(items(batch))

    def leave(self, *_):
        self.modules_deep -= 1

    def meet(self, module):
        """A model at its first use: names, and hooks on the gradients before anybody has averaged them."""
        first = not self.models
        self.models.append(module)
        self.listen_to_horovod()
        for part in module.modules():
            name = type(part).__name__
            wrapper = WRAPPERS.get(name) or ("FSDP2" if name.startswith("FSDP") else None)
            if wrapper and wrapper not in self.record["wrappers"]:
                self.record["wrappers"].append(wrapper)
            if name == "DistributedDataParallel":
                self.ddp.append(part)
            elif name == "DeepSpeedEngine":
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
            self.on_gpu = parameter.device.type != "cpu"
            if parameter.device.type == "cuda":
                self.record["gpu"] = str(torch.cuda.get_device_properties(parameter.device).uuid)
                self.record["current"] = f"cuda:{torch.cuda.current_device()}"
            self.record["threads"] = torch.get_num_threads()
        known = self.record.get("before", {"parameters": {}})["parameters"]
        self.record["before"] = self.state()
        self.record["before"]["parameters"] |= known  # of a model that has trained meanwhile

    def listen_to_horovod(self):
        module = sys.modules.get("horovod.torch.mpi_ops")
        if module and not self.hears_horovod:
            self.hears_horovod = True
            for name in HOROVODS:
                self.listen(module, name, lambda args, kwargs: args[:1])
            self.replace(sys.modules["horovod.torch.optimizer"], "synchronize", self.wait)

    def backward(self, original, *args, **kwargs):
        """From its last gradient to its end, it waits for the others: DDP in C++, where no hook is."""
        original(*args, **kwargs)
        self.spent["waiting"] += max(0.0, time.perf_counter() - max(self.computed, self.started))

    def wait(self, original, *args, **kwargs):
        with self.spending("waiting"):
            return original(*args, **kwargs)

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
        """The generators' states before the first step, and what draws from them."""
        drops = any("Dropout" in type(part).__name__ and getattr(part, "p", 0) for part in module.modules())
        device = next(module.parameters()).device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        self.record["random"] = {"torch": fingerprint(state), "draws": "dropout" if drops else self.augments}

    def note_local(self, name, gradient):
        self.happened += 1
        self.record["half"] = self.record["half"] or gradient.element_size() < 4
        with self.spending("watching"):
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
        self.steps_deep += 1
        with self.spending("watching"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names.get(parameter)
                    if name and parameter.grad is not None:
                        self.final[name] = projections(parameter.grad)

    def after_step(self, optimizer, *_):
        self.steps_deep -= 1
        if self.steps_deep:
            return
        if not self.models:  # or Horovod, which makes an empty step when it broadcasts an optimizer's state
            self.record["bare"] = True
            return
        if hasattr(optimizer, "_allreduce_delay") and "Horovod" not in self.record["wrappers"]:
            self.record["wrappers"].append("Horovod")
        whole = time.perf_counter() - self.started - self.spent["watching"]
        number = id(optimizer)
        self.taken[number] += 1
        self.count_ddp()
        self.record["met"] = self.record["met"] or dist.is_initialized() or self.hears_horovod
        with self.spending("watching"):
            after = self.state()
        self.record["steps"].append({"seconds": whole, **self.spent, "local": self.local, "final": self.final,
                                     "sent": self.sent, "after": after})
        if self.taken[number] == self.steps:
            self.done()
        self.begin_step()

    def count_ddp(self):
        """DDP sends its buckets from C++, where no hook of Python's is; it tells their sizes."""
        for ddp in self.ddp:
            if ddp.require_backward_grad_sync and ddp.logger:
                told = ddp._get_ddp_logging_data()
                sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
                sizes = [int(size) for size in str(sizes).split(",") if size.strip()]
                hook = self.record["hook"] = told.get("comm_hook", "")
                self.count("all_reduce", f"DDP with {hook}" if hook else "DDP", len(sizes), sum(sizes))

    # Data: which items of which loader, by their numbers, and how often each epoch's order was drawn.

    def begin_epoch(self, original, iterator, loader, *args):
        name = self.loaders.setdefault(id(loader), str(len(self.loaders)))
        try:
            batches, items = len(loader), len(loader.dataset)
        except TypeError:
            batches = items = None
        self.augments = self.augments or augmentation(loader.dataset)
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
            found = index if isinstance(index, (list, tuple)) else [index]
            iterator.agree[1].extend(int(item) for item in found if hasattr(item, "__index__"))
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


    # For the watchdog.

    def whereabouts(self, script: str) -> dict:
        """Where the main thread is, whether it waits for other ranks there, and the collectives it has called last."""
        frames = list(stack(sys._current_frames().get(threading.main_thread().ident)))
        waits = any(part in path for path, _, _ in frames for part in COMMUNICATES)
        if self.models:  # DDP waits at the end of backward; a GPU's queue is waited for anywhere
            waits = waits or self.on_gpu or any(path.endswith("autograd/graph.py") for path, _, _ in frames)
        last = [path for path, _, _ in frames].index(script) if script in [path for path, _, _ in frames] else len(frames)
        own = [f"{os.path.basename(path)}:{line}, in {name}" for path, line, name in frames[:last + 1]
               if "site-packages" not in path and not path.startswith(HERE)]
        return {"stack": own or ["its start"], "waits": waits, "happened": self.happened,
                "first": max(0, len(self.calls) - LATEST), "calls": self.calls[-LATEST:]}


def size_of(value):
    """Bytes of a tensor or of a list of tensors; 0 for anything else."""
    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0


def augmentation(dataset):
    """What a data set, or the one within it, does at random to its items; "" if nothing is seen."""
    while dataset is not None:
        for name in "transform", "transforms":
            words = repr(getattr(dataset, name, ""))
            found = next((word for word in ("Random", "AutoAugment", "Jitter", "Erasing") if word in words), None)
            if found:
                return f"augmentation: {found}"
        dataset = getattr(dataset, "dataset", None)
    return ""


def stack(frame):
    """(file, line, function) of a frame and its callers."""
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def caller_of(frame):
    """A library that is known, or "file:line" of whoever else has called."""
    for path, line, _ in stack(frame):
        known = next((name for part, name in CALLERS.items() if part in path), None)
        if known:
            return known
        if "/torch/" not in path:
            return f"{os.path.basename(path)}:{line}"
    return "torch"
