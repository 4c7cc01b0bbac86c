"""Knows the models that a rank calls, and names their tensors as on the other ranks."""

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedTensorMixin

from .fingerprints import state_of
from .internals import FSDP2
from .ranks import UNSUPPORTED
from .sharding import Sharding, part_of

WRAPPERS = {"DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP1",
            "DeepSpeedEngine": "DeepSpeed"}


class Models:
    """Names of parameters and of other tensors; the outermost module with parameters is a model."""

    def __init__(self, sharding: Sharding, find_places: Callable[[], list[str]],
                 add_progress: Callable, on_parameter: Callable):
        self.sharding, self.find_places = sharding, find_places
        self.add_progress, self.on_parameter = add_progress, on_parameter
        self.names = {}  # {parameter: its name}
        self.hooked = set()  # parameters that have or had a name
        self.parts = WeakSet()  # called modules and their submodules
        self.models = []  # outermost modules with parameters to train
        self.other_modules = set()  # outermost called modules
        self.others = {}  # {(module, name of a tensor that is not trained there): its full name}
        self.first_others = {}  # {name: state} before its module's first call
        self.wrappers = []  # what communicates
        self.comm_hook = ""  # DDP's
        self.device = torch.device("cpu")

    def note(self, module) -> bool:
        """Record an outermost module, before its call; return True if it is trained."""
        parameters = self.sharding.parameters_of(module)
        is_trained = torch.is_grad_enabled() and any(
            parameter.requires_grad for _, parameter in parameters)
        if is_trained:
            self.note_parameters(module, parameters)
        self.note_others(module)
        return is_trained

    def note_parameters(self, module, parameters):
        for part in module.modules():
            if part not in self.parts:
                self.parts.add(part)
                self.note_wrapper(part)
        new = [(name, parameter) for name, parameter in parameters if parameter.requires_grad
               and parameter not in self.hooked and has_values(parameter)]
        if new and module not in self.models:
            self.models.append(module)
            if self.device.type == "cpu":
                self.device = parameters[0][1].device
        kinds, kind = [kind_of(model) for model in self.models], kind_of(module)
        for own_name, parameter in new:
            number = kinds[:1 + self.models.index(module)].count(kind)
            name = own_name.replace("_orig_mod.", "").removeprefix("module.")
            name = f"{kind}{f' {number}' * (number > 1)}: {name}"
            self.sharding.parts[name] = part_of(parameter)
            if self.sharding.is_divided_otherwise(parameter):
                self.add_wrapper("tensor parallelism")
            self.name_parameter(parameter, name)

    def name_parameter(self, parameter, name):
        self.hooked.add(parameter)
        for old in [old for old, old_name in self.names.items() if old_name == name]:
            del self.names[old]  # FSDP has replaced this parameter by a shard
            self.hooked.discard(old)
        self.names[parameter] = name
        if parameter not in self.sharding.managed and self.is_supported():
            self.on_parameter(parameter)

    def note_wrapper(self, part):
        """Record a module that communicates."""
        is_fsdp2 = isinstance(part, FSDPModule)
        wrapper = FSDP2 if is_fsdp2 else WRAPPERS.get(type(part).__name__)
        self.add_wrapper(wrapper)
        if wrapper == "DDP":
            self.comm_hook = part._get_ddp_logging_data().get("comm_hook", "")

    def add_wrapper(self, wrapper):
        if wrapper and wrapper not in self.wrappers:
            self.wrappers.append(wrapper)

    def is_supported(self):
        """Return False for wrappers whose gradients agree cannot compare."""
        return not set(self.wrappers) & set(UNSUPPORTED)

    def note_others(self, module):
        """Record what a module's state dict has besides trained parameters, before its first call.

        These are buffers, without BatchNorm's statistics, and parameters of a teacher, a target
        network or a codebook.
        """
        if module in self.other_modules:
            return
        self.other_modules.add(module)
        lines = " < ".join(place.split(",")[0] for place in self.find_places())
        kind = f"{type(module).__name__}, first called at {lines}"
        new = {}
        for prefix, part in module.named_modules():
            buffers = {} if isinstance(part, _NormBase) else part._buffers
            for name in [*buffers, *part._parameters]:
                own = "buffer of " * (name in buffers)
                if name not in part._non_persistent_buffers_set and (part, name) not in self.others:
                    new[part, name] = f"{own}{kind}: {prefix}.{name}"
        self.others |= new
        self.first_others |= self.states_of_others(new)

    def states_of_others(self, others):
        tensors = {getattr(part, name, None): full_name
                   for (part, name), full_name in others.items()}
        return self.states_of({
            tensor: name for tensor, name in tensors.items()
            if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor not in self.names})

    def states_of(self, tensors):
        states = {}
        for tensor, name in list(tensors.items()):
            self.add_progress()  # large models take longer than the limit for a hang
            if has_values(tensor):
                states[name] = state_of(tensor)
        return states

    def states(self):
        """Return the present states of all tensors that have names."""
        for model in list(self.models):  # whose parameters may have been replaced
            self.note_parameters(model, self.sharding.parameters_of(model))
        return {"last_state": self.states_of(self.names),
                "last_others": self.states_of_others(self.others)}


def has_values(tensor) -> bool:
    """Return False on the meta device, and for lazy layers before their first forward pass."""
    return tensor.device.type != "meta" and not isinstance(tensor, UninitializedTensorMixin)


def kind_of(model) -> str:
    """Return the name of a model's class, without what wraps it."""
    inner = getattr(model, "_orig_mod", getattr(model, "module", None))
    if isinstance(inner, torch.nn.Module):
        return kind_of(inner)
    return type(model).__name__.removeprefix("FSDP")
