"""Observes the training of a rank: its models, gradients, optimizers and weights."""

import functools
import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import frames, hooks, private_names
from .data import Data
from .fingerprints import (
    PROJECTIONS,
    gradient_projections,
    local_part,
    parameter_state,
    shard_name,
    shard_offset,
)
from .hooks import never_raise, wrap_method

WRAPPERS = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP1",
    "DeepSpeedEngine": "DeepSpeed"}
OPTIMIZERS = ("Horovod", "ZeroRedundancyOptimizer")  # that communicate
STEPS_WITH_STATE_AFTER = 2  # after which the weights are recorded, too, to see if they are replaced
GRAPH_NODES = 4  # nodes of a loss's graph that are searched for divisions, from the root


class Observer:
    """Hooks that record a rank's parameters before each step, and its gradients during the step.

    A step is an optimizer.step() that follows a backward pass. on_finish() is called before an
    optimizer's step number `steps` + 1.
    """

    def __init__(self, script: str, steps: int, on_finish: Callable[..., None]):
        self.script, self.steps, self.on_finish = script, steps, on_finish
        self.data = Data()
        self.names = {}  # {parameter: its name}
        self.hooked_ids = set()  # of parameters with a gradient hook
        self.shards = {}  # {name of a sharded parameter: which part of it this rank has}
        self.fsdp_parameters = {}  # {parameter: what FSDP2 knows of it}
        self.offsets = {}  # {name: offset of FSDP2's shard in the tensor that it shards}
        self.module_ids = set()  # of called modules and their submodules
        self.models = []  # the outermost modules with new parameters
        self.optimizer_names = {}  # {id: a name that is the same on all ranks}
        self.backwards_at_last_step = defaultdict(int)  # {id of an optimizer: self.backwards}
        self.step_counts = defaultdict(int)  # {id of an optimizer: steps}
        self.module_depth = self.step_depth = self.backward_depth = 0  # these calls nest
        self.on_gpu = self.has_fsdp_hook = self.has_sharding_hook = False
        self.micro_batches = 0  # since the last step
        self.backwards = 0  # backward passes since the start
        self.events = 0  # grows while the training makes progress
        self.own_gradients = {}  # {name: projections}, before averaging, since the last step
        self.reduced_gradients = {}  # {name: projections} of shards' gradients after backward
        self.used_gradients = {}  # {name: projections} of the gradients that the optimizer uses
        self.divisors = []  # of the losses since the last step
        self.step = None  # the step in progress
        self.first_state = {}  # {name: state} before the first backward pass
        self.record = {
            "host": socket.gethostname(), "gpu": None, "device": "cpu", "half_precision": False,
            "comm_hook": "", "mpi": False, "process_group": False, "wrappers": [], "steps": [],
            "tensor_group": [],  # this rank and those with which it divides layers
            "before_sharding": {}}  # {name: [part, checksum] of what fully_shard() got}

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, always_call=True)
        wrap_method(torch.autograd, "backward", self.before_backward, self.after_backward)
        wrap_method(torch.autograd, "grad", self.before_grad, self.after_backward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        wrap_method(torch._C, "_log_api_usage_once", self.note_api)
        self.data.install()

    # Modules: the outermost module with parameters to train is a model.

    @never_raise
    def before_forward(self, module, args):
        self.events += 1
        self.module_depth += 1
        if self.module_depth > 1 or self.backward_depth or not torch.is_grad_enabled():
            return
        parameters = self.parameters_of(module)
        if not any(parameter.requires_grad for _, parameter in parameters):
            return
        self.note_model(module, parameters)
        # Global hooks do not get the keyword arguments; the calling frame has them.
        arguments = sys._getframe(2).f_locals.get("kwargs", {})
        self.data.note_forward(module, [args, arguments])

    @never_raise
    def after_forward(self, *_):
        self.module_depth -= 1

    def parameters_of(self, module):
        """Return [(name, parameter)], with its shard for a parameter that FSDP has gathered."""
        shards = {}
        for part in module.modules():
            group = part._get_fsdp_state()._fsdp_param_group if is_fsdp2(part) else None
            for managed in group.fsdp_params if group else []:
                whole = getattr(managed, "_unsharded_param", None)
                shards[id(whole)] = managed.sharded_param
                self.fsdp_parameters[managed.sharded_param] = managed
        return [(name, shards.get(id(parameter), parameter))
                for name, parameter in module.named_parameters()]

    def note_model(self, module, parameters):
        for part in module.modules():
            if id(part) not in self.module_ids:
                self.module_ids.add(id(part))
                self.note_wrapper(part)
        # Skip lazy layers before their first forward pass: their shapes are unknown.
        new = [(name, parameter) for name, parameter in parameters
               if id(parameter) not in self.hooked_ids and parameter.requires_grad
               and not isinstance(parameter, UninitializedTensorMixin)]
        if new and module not in self.models:
            self.models.append(module)
            self.note_device(parameters[0][1].device)
        for name, parameter in new:
            if hasattr(parameter, "to_local"):
                self.note_tensor_group(module, name, parameter)
            number = self.models.index(module) + 1
            name = name.replace("_orig_mod.", "").removeprefix("module.")
            self.name_parameter(parameter, name if number == 1 else f"model {number}: {name}")

    def note_device(self, device):
        if not self.on_gpu:
            self.on_gpu = device.type != "cpu"
            self.record["device"] = str(device)
            if device.type == "cuda":
                self.record["gpu"] = identify_gpu(device)

    def name_parameter(self, parameter, name):
        """Give a parameter the name that it has on all ranks, and record its gradients."""
        self.hooked_ids.add(id(parameter))
        for old in [old for old, old_name in self.names.items() if old_name == name]:
            del self.names[old]  # FSDP has replaced this parameter by a shard
            self.hooked_ids.discard(id(old))
        self.names[parameter] = name
        is_fsdp1 = "FSDP1" in self.record["wrappers"]
        self.shards[name] = shard_name(parameter)
        if hasattr(parameter, "ds_tensor") or is_fsdp1:
            self.shards[name] = f"of process {os.getpid()} on {self.record['host']}"
        if parameter not in self.fsdp_parameters and not is_fsdp1:
            parameter.register_hook(functools.partial(self.note_gradient, parameter, name))

    def note_tensor_group(self, module, name, parameter):
        """Record the ranks that divide a layer, along other dimensions of the mesh than FSDP2's.

        Tensor parallelism divides linear layers and embeddings. What shards others is unknown.
        """
        mesh, managed = parameter.device_mesh, self.fsdp_parameters.get(parameter)
        data_ranks = set(managed.mesh_info.mesh.mesh.flatten().tolist()) if managed else set()
        divided = [dimension for dimension, placement in enumerate(parameter.placements)
                   if not placement.is_replicate()
                   and not data_ranks.issuperset(ranks_along(mesh, [dimension]))]
        group = ranks_along(mesh, divided)
        is_layer = isinstance(module.get_submodule(name.rpartition(".")[0]),
                              (torch.nn.Linear, torch.nn.Embedding))
        if is_layer and len(group) > max(1, len(self.record["tensor_group"])):
            self.record["tensor_group"] = group

    def note_wrapper(self, part):
        """Record a module that communicates, and hook it if tensor hooks miss its gradients."""
        name = type(part).__name__
        wrapper = WRAPPERS.get(name)
        if is_fsdp2(part):
            wrapper = "FSDP2"
        if not wrapper:
            return
        if wrapper not in self.record["wrappers"]:
            self.record["wrappers"].append(wrapper)
            problem = private_names.problem(wrapper)
            if problem:
                self.on_finish("died", problem)
        if wrapper == "DDP":
            self.record["comm_hook"] = part._get_ddp_logging_data().get("comm_hook", "")
        elif wrapper == "DeepSpeed":
            wrap_method(part, "step", functools.partial(self.before_deepspeed, part))
        elif wrapper == "FSDP2":
            self.hook_fsdp()

    @never_raise
    def note_api(self, name, *_):
        """Record what FSDP2 shards, from the first call of fully_shard() on."""
        if name == "torch.distributed.fsdp.fully_shard" and not self.has_sharding_hook:
            self.has_sharding_hook = True
            from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
            wrap_method(FSDPParam, "__init__", self.before_sharding, self.after_sharding)

    @never_raise
    def before_sharding(self, managed, parameter, *_, **__):
        if parameter.device.type != "meta":
            managed.agree_whole = shard_name(parameter), parameter_state(parameter)[0]

    @never_raise
    def after_sharding(self, _, managed, *__, **___):
        if hasattr(managed, "agree_whole"):
            managed.agree_shard = parameter_state(managed.sharded_param)

    def note_first_state(self):
        self.first_state = self.states_of(self.names)
        for parameter, name in self.names.items():
            managed = self.fsdp_parameters.get(parameter)
            if getattr(managed, "agree_shard", None) == self.first_state.get(name, []):
                self.record["before_sharding"][name] = managed.agree_whole

    # Gradients.

    @never_raise
    def before_grad(self, *_, **__):
        self.backward_depth += 1
        self.backwards += 1
        self.events += 1
        self.data.note_backward()
        if not self.first_state:
            self.note_first_state()

    @never_raise
    def before_backward(self, tensors, *_, **__):
        self.before_grad()
        self.micro_batches += 1
        root = tensors if torch.is_tensor(tensors) else tensors[0]
        self.divisors += divisors_of(root.grad_fn)

    @never_raise
    def after_backward(self, *_, **__):
        self.backward_depth -= 1
        for parameter, name in self.names.items():
            if hasattr(parameter, "to_local") and parameter.grad is not None:
                self.reduced_gradients |= self.projections_of(name, parameter.grad)

    def projections_of(self, name, gradient):
        return gradient_projections(name, gradient, self.offsets.get(name, 0))

    @never_raise
    def note_gradient(self, parameter, name, gradient):
        """Add a backward pass's gradient, before it is averaged, to this rank's own gradients."""
        self.events += 1
        self.names.setdefault(parameter, name)
        if gradient.element_size() < 4:
            self.record["half_precision"] = True
        is_zeroed = parameter.grad is None or not local_part(parameter.grad).any()
        for part, values in gradient_projections(name, gradient).items():
            if is_zeroed and "DeepSpeed" not in self.record["wrappers"]:
                self.own_gradients.pop(part, None)  # zero_grad() dropped what no step used
            earlier = self.own_gradients.get(part, [0.0] * PROJECTIONS)
            self.own_gradients[part] = [a + b for a, b in zip(earlier, values)]

    @never_raise
    def before_deepspeed(self, engine, *_, **__):
        """Record the averaged gradients before a step: DeepSpeed does not store them in .grad."""
        if not engine.is_gradient_accumulation_boundary():
            return
        from deepspeed.utils import safe_get_full_grad
        self.used_gradients = {}
        for parameter, name in self.names.items():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                self.used_gradients |= gradient_projections(name, gradient)

    def hook_fsdp(self):
        """Record full gradients when FSDP reduces them, because its parameters are shards."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
        if not self.has_fsdp_hook:
            self.has_fsdp_hook = True
            wrap_method(fsdp, "foreach_reduce", self.before_fsdp)

    @never_raise
    def before_fsdp(self, parameters, gradients, *_, **__):
        for parameter, gradient in zip(parameters, gradients):
            name = self.names.get(parameter.sharded_param)
            if name:
                self.offsets[name] = shard_offset(gradient.shape, parameter.mesh_info.mesh)
                self.note_gradient(parameter.sharded_param, name, gradient)

    # Optimizers. Wrappers nest steps: the innermost step gets the gradients that are used.

    @never_raise
    def before_step(self, optimizer, args, kwargs):
        self.events += 1
        self.step_depth += 1
        if self.step_depth == 1:
            self.begin_step(optimizer, has_closure(args, kwargs))
        self.note_used_gradients(optimizer)

    def begin_step(self, optimizer, calls_backward):
        """Record the parameters before a step."""
        self.step = None
        key = id(optimizer)
        parameters = [parameter for group in optimizer.param_groups
                      for parameter in group["params"]]
        known = {parameter: self.names[parameter] for parameter in parameters
                 if parameter in self.names}
        self.record["mpi"] |= uses_mpi()
        self.record["process_group"] |= torch.distributed.is_initialized()
        if key not in self.optimizer_names:
            self.note_optimizer(optimizer, parameters, known)
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it for fused optimizers
        if found_inf is not None and found_inf.item():  # the optimizer skips this step
            return
        has_gradients = calls_backward or self.backwards > self.backwards_at_last_step[key]
        if has_gradients and self.step_counts[key] == self.steps:
            self.on_finish()
        self.step = {
            "optimizer": self.optimizer_names[key], "within backward": self.backward_depth > 0,
            "state": self.states_of(known or self.parameters_of_unknown_optimizer()),
            "not reduced": [name for parameter, name in known.items()
                            if has_whole_gradient(self.fsdp_parameters.get(parameter))],
            "lr": max(float(group.get("lr", 1)) for group in optimizer.param_groups)}

    def parameters_of_unknown_optimizer(self):
        """Return all parameters for an optimizer that has none of them, such as DeepSpeed's.

        Return none if other optimizers have stepped before: it has tensors that are in no module.
        """
        only_one = len(self.optimizer_names) == 1 or "DeepSpeed" in self.record["wrappers"]
        return self.names if only_one else {}

    def note_optimizer(self, optimizer, parameters, known):
        """Name an optimizer, and its parameters that no called module has."""
        first = next(iter(known.values()), "")
        kind = type(optimizer).__name__
        self.optimizer_names[id(optimizer)] = f"{kind} of {first or len(parameters)}"
        is_horovod = type(optimizer).__module__ == "horovod.torch.optimizer"
        wrapper = "Horovod" if is_horovod else kind
        if wrapper in OPTIMIZERS and wrapper not in self.record["wrappers"]:
            self.record["wrappers"].append(wrapper)
        for number, parameter in enumerate(parameters):
            if id(parameter) not in self.hooked_ids and parameter.requires_grad:
                self.hooked_ids.add(id(parameter))
                name = f"parameter {number} of {self.optimizer_names[id(optimizer)]}"
                parameter.register_hook(functools.partial(self.note_gradient, parameter, name))

    def states_of(self, parameters):
        states = {}
        for parameter, name in list(parameters.items()):
            self.events += 1  # large models take longer than the limit for a hang
            if parameter.device.type != "meta":
                states[name] = parameter_state(parameter)
        return states

    def note_used_gradients(self, optimizer):
        if "FSDP1" in self.record["wrappers"]:  # FSDP1 has no hook for a rank's own gradients
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.events += 1
                name = self.names.get(parameter)
                if name and parameter.grad is not None:
                    self.used_gradients |= self.projections_of(name, parameter.grad)

    @never_raise
    def after_step(self, optimizer, args, kwargs):
        self.step_depth -= 1
        if has_closure(args, kwargs):
            self.note_used_gradients(optimizer)
        if self.step_depth:
            return
        step = self.step
        used, reduced = self.used_gradients, self.reduced_gradients
        self.step = None
        self.used_gradients, self.reduced_gradients = {}, {}
        if step is None or self.backwards == self.backwards_at_last_step[id(optimizer)]:
            return  # Horovod takes a step without a backward pass to broadcast optimizer state
        own = {name: self.own_gradients.pop(name) for name in list(used or self.own_gradients)
               if name in self.own_gradients}
        if self.step_counts[id(optimizer)] < STEPS_WITH_STATE_AFTER:
            trained = {parameter: name for parameter, name in self.names.items()
                       if name in step["state"]}
            step["state_after"] = self.states_of(trained)
        self.record["steps"].append(step | {
            "own_gradients": own, "reduced_gradients": reduced, "used_gradients": used,
            "divisors": self.divisors, "samples": self.data.step_samples,
            "micro_batches": self.micro_batches,
            "without gradient": sum(
                parameter.grad is None for group in optimizer.param_groups
                for parameter in group["params"])})
        self.divisors = []
        self.data.step_samples = []
        self.micro_batches = 0
        self.backwards_at_last_step[id(optimizer)] = self.backwards
        self.step_counts[id(optimizer)] += 1

    # Reports.

    def report(self) -> dict:
        """Return the record of this rank, as values for JSON."""
        horovod = sys.modules.get("horovod.torch")
        return self.record | {
            "first_state": self.first_state, "last_state": self.states_of(self.names),
            "shards": self.shards, "backwards": self.backwards, "failed_hooks": hooks.failed_hooks,
            "loaders": self.data.report(max(self.step_counts.values(), default=0)),
            "horovod": bool(horovod and horovod.is_initialized())}

    def status(self) -> dict:
        """Return where the main thread is, and whether it waits there for other ranks."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        return {"stack": frames.places(frame, self.script), "events": self.events,
                "waits": frames.waits(frame, self.on_gpu)}


def identify_gpu(device) -> str:
    """Return a GPU's PCI address and host, by which NCCL tells two ranks' GPUs apart, as text.

    As for NCCL, NCCL_HOSTID replaces the host's name and boot id, and with
    NCCL_MULTI_RANK_GPU_ENABLE=1 ranks may share a GPU, since 2.30 (NCCL 2.30.7, src/init.cc:1055,
    src/misc/utils.cc:117).
    """
    properties = torch.cuda.get_device_properties(device)
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    gpu = f"UUID {getattr(properties, 'uuid', device)}"  # if PyTorch knows no address
    if None not in address:
        gpu = "PCI {:04x}:{:02x}:{:02x}".format(*address)
    host = socket.gethostname()
    with suppress(OSError):
        host += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = os.environ.get("NCCL_HOSTID", host)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.nccl.version() >= (2, 30):
        host += f", process {os.getpid()}"
    return f"{gpu} of {host}"


def has_closure(args, kwargs) -> bool:
    """True if an optimizer's step calls backward() itself. args begins with the optimizer."""
    return any(map(callable, [*args[1:], *kwargs.values()]))


def is_fsdp2(module) -> bool:
    return type(module).__name__.startswith("FSDP") and hasattr(module, "_get_fsdp_state")


def has_whole_gradient(managed) -> bool:
    """Return True if FSDP2 keeps a parameter's gradient whole, and has not averaged it."""
    whole = getattr(managed, "_unsharded_param", None)
    return managed is not None and (
        managed.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None)


def ranks_along(mesh, dimensions) -> list[int]:
    """Return the ranks that have this rank's coordinates in all other dimensions of the mesh."""
    return mesh.mesh[tuple(
        slice(None) if dimension in dimensions else coordinate
        for dimension, coordinate in enumerate(mesh.get_coordinate()))].flatten().tolist()


def uses_mpi() -> bool:
    """Return True if a module other than mpi4py's own has imported mpi4py.MPI or a part of it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and any(
        value is mpi or type(value).__module__ == "mpi4py.MPI"
        for name, module in list(sys.modules.items()) if not name.startswith("mpi4py")
        for value in list(getattr(module, "__dict__", {}).values()))


def divisors_of(node) -> list[float]:
    """Return the numbers by which the loss was divided last, from its autograd graph."""
    divisors = []
    for _ in range(GRAPH_NODES):
        name = node.name() if node else ""
        if not name.startswith(("DivBackward", "MulBackward")):
            break
        other = node._saved_other
        if other is None:  # the other factor is a tensor that needs a gradient
            break
        number = float(other)
        if number:
            divisors.append(number if name.startswith("Div") else 1 / number)
        node = node.next_functions[0][0]
    return divisors
