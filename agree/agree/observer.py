"""Records a rank's training as one list of events: draw, forward, grad, backward, step.

Each event is a dictionary for JSON with "kind", "what" and "place"; a backward and a step also
have what was measured there. The functions that judge the ranks read these lists alone.
"""

import functools
import itertools
import os
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import frames, hooks
from .collectives import Collectives
from .data import Data
from .fingerprints import (
    PROJECTIONS,
    batch_checksums,
    local_part,
    projections,
    random_states,
    state_of,
    tensor_checksum,
)
from .hooks import never_raise, wrap_method
from .ranks import UNSUPPORTED
from .sharding import Sharding, is_fsdp2, part_of

WRAPPERS = {
    "DistributedDataParallel": "DDP", "FullyShardedDataParallel": "FSDP1",
    "DeepSpeedEngine": "DeepSpeed"}
GRAPH_NODES = 4  # nodes of a loss's graph that are searched for divisions, from the root
MOST_EVENTS = 20_000
MOST_OPTIMIZERS = 10  # measured ones: a script may make a new one for each batch


class Observer:
    """Hooks that record a rank's parameters before each step, and its gradients during the step.

    A step is an optimizer.step() that follows a backward pass. After `steps` steps of an optimizer,
    only events are recorded, without measurements, and before_step(number of steps) is called
    before each step.
    """

    def __init__(self, script: str, steps: int, before_step: Callable[[int], None],
                 collectives: Collectives):
        self.script, self.steps = script, steps
        self.on_step, self.collectives = before_step, collectives
        self.is_measuring = True
        self.data = Data(self.add_event, self.places, lambda: collectives.reductions)
        self.sharding = Sharding()
        self.events = []
        self.first_alone = 0  # event after the last collective of all ranks
        self.names = {}  # {parameter: its name}
        self.hooked = set()  # parameters with a gradient hook
        self.hooks = {}  # {parameter: its gradient hook}
        self.parts = WeakSet()  # called modules and their submodules
        self.outermost, self.other_modules = set(), set()  # called modules
        self.models = {}  # {outermost module with new parameters: number of events before it}
        self.called_model = self.last_model = None  # during its forward pass, and the last one
        self.others = {}  # {(module, name of a tensor that is not trained there): its full name}
        self.keys, self.counter = WeakKeyDictionary(), itertools.count()  # {optimizer: its key}
        self.optimizer_names = {}  # {key: a name that is the same on all ranks}
        self.backwards_at_last_step = defaultdict(int)  # {key of an optimizer: self.backwards}
        self.step_counts = defaultdict(int)  # {key of an optimizer: steps}
        self.module_depth = self.step_depth = self.backward_depth = 0  # these calls nest
        self.has_dropped = False  # dropout in this step
        self.on_gpu = self.ddp_waits = False  # in the next backward
        self.backwards = 0  # backward passes since the start
        self.progress = 0  # grows while the training makes progress
        self.own_gradients = {}  # {name: projections}, before averaging, since the last step
        self.left_gradients = {}  # {name: [version, projections]} after the last backward
        self.used_gradients = {}  # {name: projections} of the gradients that the optimizer uses
        self.changed_between = {}  # {name: projections} of gradients changed between two backwards
        self.step = None  # the step in progress
        self.first_others = {}  # {name: state} before its module's first call
        self.measured_states = {}  # after the last measured step
        self.record = {
            "host": socket.gethostname(), "gpu": None, "device": "cpu", "half_precision": False,
            "comm_hook": "", "process_group": False, "wrappers": [], "batch_norm": "",
            "dropout": []}

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(
            self.after_forward, with_kwargs=True, always_call=True)
        wrap_method(torch.autograd, "backward", self.before_backward, self.after_backward)
        wrap_method(torch.autograd, "grad", self.before_grad, self.after_backward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.sharding.install()
        self.data.install()

    def add_event(self, kind, *what, **measured):
        self.progress += 1
        if len(self.events) < MOST_EVENTS:
            event = {"kind": kind, "what": what, "place": self.place()}
            self.events.append(event | measured)

    def steps_alone(self) -> list[dict]:
        """Return the steps since the last collective of all ranks."""
        return [event for event in self.events[self.first_alone:] if event["kind"] == "step"]

    @never_raise
    def end_alone(self, counts: list[int]):
        """Forget the steps since the last collective if another rank took none, with its gradients.

        Such are a search for a learning rate on rank 0, of which the other ranks know nothing.
        counts: the ranks' numbers of steps since that collective.
        """
        first, steps = self.first_alone, self.steps_alone()
        self.first_alone = len(self.events)
        end = first + 1 + max((i for i, event in enumerate(self.events[first:])
                               if event in steps), default=-1)
        if min(counts) or not any(event["kind"] == "backward" for event in self.events[first:end]):
            return
        del self.events[first:end]
        self.first_alone = len(self.events)
        for name, count in Counter(step["what"][0] for step in steps).items():
            for key in self.optimizer_names:
                self.step_counts[key] -= count * (self.optimizer_names[key] == name)
        for model in [model for model, number in self.models.items() if number >= first]:
            del self.models[model]
            for parameter in model.parameters():
                self.names.pop(parameter, None)
                self.hooked.discard(parameter)
                if parameter in self.hooks:
                    self.hooks.pop(parameter).remove()
        self.note_model(self.last_model, self.sharding.parameters_of(self.last_model))
        self.forget_gradients()
        self.measured_states = {}
        self.is_measuring = self.data.is_measuring = max(self.step_counts.values()) < self.steps

    def forget_gradients(self):
        self.own_gradients, self.left_gradients, self.changed_between = {}, {}, {}

    # Modules: the outermost module with parameters to train is a model.

    @never_raise
    def before_forward(self, module, args):
        self.progress += 1
        self.module_depth += 1
        if type(module).__name__ == "DistributedDataParallel":
            self.before_ddp(module)
        if self.called_model is not None and isinstance(module, _DropoutNd) and args:
            self.note_dropout(module, args[0])
        if self.module_depth > 1 or self.backward_depth:
            return
        if torch.is_grad_enabled():
            self.last_model = module
        if not self.is_measuring and module in self.outermost:
            return
        self.outermost.add(module)
        parameters = self.sharding.parameters_of(module)
        if not torch.is_grad_enabled() or not any(
                parameter.requires_grad for _, parameter in parameters):
            self.note_others(module)  # it may be trained later
            return
        self.note_model(module, parameters)
        self.note_others(module)
        self.called_model = module

    def note_dropout(self, dropout, inputs):
        """Record the state of the random numbers, once in a step."""
        if dropout.training and dropout.p and not self.backward_depth and not self.has_dropped:
            self.has_dropped = True
            state = torch.cuda.get_rng_state(inputs.device) if inputs.is_cuda else (
                torch.get_rng_state())
            self.record["dropout"].append(tensor_checksum(state))

    def before_ddp(self, ddp):
        if ddp.process_group.size() == torch.distributed.get_world_size():
            self.ddp_waits |= torch.is_grad_enabled() and ddp.require_backward_grad_sync
            if ddp.will_sync_module_buffers():
                mode = "with" if torch.is_grad_enabled() else "without"
                self.collectives.compare(
                    f"DDP's forward {mode} gradients, which broadcasts buffers", self.place())

    @never_raise
    def after_forward(self, module, *arguments_and_result):
        """Record a model's inputs; only a hook after the call gets the keyword arguments."""
        self.module_depth -= 1
        self.collectives.end()
        if self.called_model is not None and not self.module_depth:
            self.called_model = None
            samples = batch_checksums(arguments_and_result[:-1])
            self.add_event("forward", id(module), samples=samples)

    def places(self):
        return frames.places(sys._getframe(), self.script)

    def place(self):
        return frames.place(sys._getframe(), self.script)

    def note_others(self, module):
        """Record what a module's state dict has besides trained parameters, before its first call.

        These are buffers, without BatchNorm's statistics, and parameters of a teacher, a target
        network or a codebook.
        """
        if module in self.other_modules:
            return
        self.other_modules.add(module)
        lines = " < ".join(place.split(",")[0] for place in self.places())
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
            if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor not in self.names
            and not isinstance(tensor, UninitializedTensorMixin)})

    def note_model(self, module, parameters):
        for part in module.modules():
            if part not in self.parts:
                self.parts.add(part)
                self.note_wrapper(part)
        # Skip lazy layers before their first forward pass: their shapes are unknown.
        new = [(name, parameter) for name, parameter in parameters
               if parameter not in self.hooked and parameter.requires_grad
               and not isinstance(parameter, UninitializedTensorMixin)]
        if new and module not in self.models:
            self.models[module] = len(self.events)
            self.note_device(parameters[0][1].device)
        kinds, kind = [kind_of(model) for model in self.models], kind_of(module)
        for own_name, parameter in new:
            number = kinds[:1 + [*self.models].index(module)].count(kind)
            name = own_name.replace("_orig_mod.", "").removeprefix("module.")
            name = f"{kind}{f' {number}' * (number > 1)}: {name}"
            self.sharding.parts[name] = part_of(parameter)
            if self.sharding.is_divided_otherwise(parameter):
                self.add_wrapper("tensor parallelism")
            self.name_parameter(parameter, name)

    def note_device(self, device):
        if not self.on_gpu:
            self.on_gpu = device.type != "cpu"
            self.record["device"] = str(device)
            if device.type == "cuda":
                uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device)
                host = os.environ.get("NCCL_HOSTID", self.record["host"])
                if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":  # ranks share it on purpose
                    self.record["gpu"] = f"GPU {uuid} of {host}"

    def name_parameter(self, parameter, name):
        """Give a parameter the name that it has on all ranks, and record its gradients."""
        self.hooked.add(parameter)
        for old in [old for old, old_name in self.names.items() if old_name == name]:
            del self.names[old]  # FSDP has replaced this parameter by a shard
            self.hooked.discard(old)
        self.names[parameter] = name
        if parameter not in self.sharding.managed and self.is_supported():
            self.hooks[parameter] = parameter.register_hook(
                functools.partial(self.note_gradient, parameter))

    def note_wrapper(self, part):
        """Record a module that communicates, and hook it if tensor hooks miss its gradients."""
        wrapper = "FSDP2" if is_fsdp2(part) else WRAPPERS.get(type(part).__name__)
        if isinstance(part, _BatchNorm) and part.training and not isinstance(part, SyncBatchNorm):
            self.record["batch_norm"] = type(part).__name__
        is_new = self.add_wrapper(wrapper)
        if wrapper == "DDP":
            self.record["comm_hook"] = part._get_ddp_logging_data().get("comm_hook", "")
        elif wrapper == "DeepSpeed":
            wrap_method(part, "step", functools.partial(self.before_deepspeed, part))
        elif wrapper == "FSDP2" and is_new:
            self.sharding.hook_reduction(self.note_gradient)
            if not self.sharding.is_installed:
                hooks.failed_hooks["note_api"] = "fully_shard() was called without its log"

    def add_wrapper(self, wrapper):
        """Record what communicates; return True if it is new."""
        is_new = wrapper and wrapper not in self.record["wrappers"]
        if is_new:
            self.record["wrappers"].append(wrapper)
        return is_new

    def is_supported(self):
        """Return False for wrappers whose gradients agree cannot compare."""
        return not set(self.record["wrappers"]) & set(UNSUPPORTED)

    # Gradients.

    @never_raise
    def before_grad(self, *_, **__):
        self.begin_backward("grad", [])

    def begin_backward(self, kind, divisors):
        self.add_event(kind, divisors=divisors)
        self.backward_depth += 1
        self.backwards += 1
        self.data.note_backward()
        self.sharding.note_first_state(self.names)

    @never_raise
    def before_backward(self, tensors, *_, **__):
        root = tensors if torch.is_tensor(tensors) else tensors[0]
        self.begin_backward("backward", divisors_of(root.grad_fn))
        for parameter, name in self.names.items() if self.is_measuring else ():
            version = getattr(parameter.grad, "_version", None)
            is_changed = version != self.left_gradients.get(name, [version])[0]
            if is_changed and version is not None and local_part(parameter.grad).any():
                self.changed_between[name] = projections(parameter.grad)
        if self.ddp_waits:
            self.ddp_waits = False
            self.collectives.compare("DDP's backward", self.place())

    @never_raise
    def after_backward(self, *_, **__):
        self.backward_depth -= 1
        self.collectives.end()
        if self.backward_depth or not self.is_measuring or not self.is_supported():
            return
        for parameter, name in self.names.items():
            if parameter.grad is not None:
                self.left_gradients[name] = [
                    parameter.grad._version,
                    projections(parameter.grad, self.sharding.offsets.get(parameter, 0))]

    @never_raise
    def note_gradient(self, parameter, gradient):
        """Add a backward pass's gradient, before it is averaged, to this rank's own gradients."""
        self.progress += 1
        name = self.names.get(parameter)
        if not name or gradient is None or not self.is_measuring:  # DDP: of an unused output
            return
        if gradient.element_size() < 4:
            self.record["half_precision"] = True
        is_zeroed = parameter.grad is None or not local_part(parameter.grad).any()
        if is_zeroed and "DeepSpeed" not in self.record["wrappers"]:
            self.own_gradients.pop(name, None)  # zero_grad() dropped what no step used
            self.changed_between.pop(name, None)
        earlier = self.own_gradients.get(name, [0.0] * PROJECTIONS)
        self.own_gradients[name] = [a + b for a, b in zip(earlier, projections(gradient))]

    @never_raise
    def before_deepspeed(self, engine, *_, **__):
        """Record the averaged gradients before a step: DeepSpeed does not store them in .grad."""
        if self.is_measuring and engine.is_gradient_accumulation_boundary():
            from deepspeed.utils import safe_get_full_grad
            gradients = {name: safe_get_full_grad(parameter)
                         for parameter, name in self.names.items()}
            self.used_gradients = {name: projections(gradient)
                                   for name, gradient in gradients.items() if gradient is not None}

    # Optimizers. Wrappers nest steps: the innermost step gets the gradients that are used.

    @never_raise
    def before_step(self, optimizer, args, kwargs):
        self.progress += 1
        self.step_depth += 1
        if self.step_depth == 1:
            self.begin_step(optimizer, has_closure(args, kwargs))
        self.note_used_gradients(optimizer)

    def begin_step(self, optimizer, calls_backward):
        """Record the parameters before a step."""
        self.step = None
        key = self.key_of(optimizer)
        self.record["process_group"] |= torch.distributed.is_initialized()
        if key not in self.optimizer_names:
            self.note_optimizer(optimizer)
            if not self.is_measuring and len(self.optimizer_names) < MOST_OPTIMIZERS:
                self.is_measuring = self.data.is_measuring = True
                self.forget_gradients()  # this step's are not known
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it for fused optimizers
        if found_inf is not None and found_inf.item():  # the optimizer skips this step
            return
        if calls_backward or self.backwards > self.backwards_at_last_step[key]:
            if self.is_measuring and self.step_counts[key] == self.steps:
                self.measured_states = self.states()
                self.is_measuring = self.data.is_measuring = False
            if not self.is_measuring:
                self.on_step(sum(self.step_counts.values()))
        self.step = {"lr": [float(group.get("lr", 1)) for group in optimizer.param_groups]}
        if self.is_measuring and self.step_counts[key] < self.steps:
            known = {parameter: self.names[parameter] for parameter in parameters_of(optimizer)
                     if parameter in self.names}
            self.step |= {
                "random": random_states(),
                "state": self.states_of(known or self.parameters_of_unknown_optimizer())}
        else:
            tensors = [parameter for parameter in parameters_of(optimizer)
                       if parameter.device.type != "meta"
                       and not isinstance(parameter, UninitializedTensorMixin)]
            if tensors:
                self.step["sample"] = state_of(min(tensors, key=torch.Tensor.numel))

    def parameters_of_unknown_optimizer(self):
        """Return all parameters for an optimizer that has none of them, such as DeepSpeed's.

        Return none if other optimizers have stepped before: it has tensors that are in no module.
        """
        only_one = len(self.optimizer_names) == 1 or "DeepSpeed" in self.record["wrappers"]
        return self.names if only_one else {}

    def key_of(self, optimizer):
        """Return an optimizer's number; its id() may be that of one which exists no more."""
        if optimizer not in self.keys:
            self.keys[optimizer] = next(self.counter)
        return self.keys[optimizer]

    def note_optimizer(self, optimizer):
        """Name an optimizer, and its parameters that no called module has."""
        parameters = parameters_of(optimizer)
        known = [self.names[parameter] for parameter in parameters if parameter in self.names]
        kind = type(optimizer).__name__
        optimizer_name = f"{kind} of {known[0] if known else len(parameters)}"
        self.optimizer_names[self.key_of(optimizer)] = optimizer_name
        if type(optimizer).__module__ == "horovod.torch.optimizer":
            self.add_wrapper("Horovod")
        for number, parameter in enumerate(parameters):
            if parameter not in self.hooked and parameter.requires_grad:
                self.hooked.add(parameter)
                name = f"parameter {number} of {optimizer_name}"
                parameter.register_hook(functools.partial(self.note_bare_gradient, name, parameter))

    @never_raise
    def note_bare_gradient(self, name, parameter, gradient):
        self.names.setdefault(parameter, name)
        self.note_gradient(parameter, gradient)

    def states_of(self, parameters):
        states = {}
        for parameter, name in list(parameters.items()):
            self.progress += 1  # large models take longer than the limit for a hang
            if parameter.device.type != "meta":
                states[name] = state_of(parameter)
        return states

    def note_used_gradients(self, optimizer):
        if not self.is_measuring or not self.is_supported():
            return
        for parameter in parameters_of(optimizer):
            self.progress += 1
            name = self.names.get(parameter)
            if name and parameter.grad is not None:
                self.used_gradients[name] = projections(
                    parameter.grad, self.sharding.offsets.get(parameter, 0))

    @never_raise
    def after_step(self, optimizer, args, kwargs):
        self.step_depth -= 1
        if has_closure(args, kwargs):
            self.note_used_gradients(optimizer)
        if self.step_depth:
            return
        key, step, used = self.key_of(optimizer), self.step, self.used_gradients
        self.step, self.used_gradients, self.has_dropped = None, {}, False
        if step is None or self.backwards == self.backwards_at_last_step[key]:
            return  # Horovod takes a step without a backward pass to broadcast optimizer state
        if "state" in step:
            step |= self.measure_step(optimizer, used)
        self.add_event("step", self.optimizer_names[key], **step)
        self.backwards_at_last_step[key] = self.backwards
        self.step_counts[key] += 1

    def measure_step(self, optimizer, used):
        """Return the gradients of a step: each rank's own, those used, and how they changed."""
        step = {"used": used, "without gradient": sum(
            parameter.grad is None for parameter in parameters_of(optimizer))}
        of_step = list(used or self.own_gradients)
        for key, gradients in ("own", self.own_gradients), ("changed", self.changed_between):
            step[key] = {name: gradients.pop(name) for name in of_step if name in gradients}
        step["left"] = {name: values for name, (_, values) in self.left_gradients.items()
                        if name in of_step}
        return step

    # The end.

    def states(self):
        for model in list(self.models):  # whose parameters may have been replaced
            self.note_model(model, self.sharding.parameters_of(model))
        return {"last_state": self.states_of(self.names),
                "last_others": self.states_of_others(self.others)}

    def report(self, at_a_step: bool) -> dict:
        """Return the record of this rank, as values for JSON.

        at_a_step: all ranks are at the same step, or at the end, so that states can be compared.
        """
        self.data.end_evaluation()
        horovod, accelerate = (sys.modules.get(f"{name}") for name in (
            "horovod.torch", "accelerate.state"))
        states = self.measured_states
        if at_a_step or not states:
            states = self.states()
        return self.record | states | {
            "measured": self.measured_states,
            "events": self.events, "backwards": self.backwards,
            "first_others": self.first_others,
            "parts": self.sharding.parts, "before_sharding": self.sharding.before_sharding,
            "failed_hooks": hooks.failed_hooks,
            "loaders": self.data.report(min(self.steps, max(self.step_counts.values(), default=0))),
            "shares": self.data.shares,
            "horovod": bool(horovod and horovod.is_initialized()),
            "accelerate": bool(accelerate and accelerate.PartialState._shared_state)}

    def status(self) -> dict:
        """Return where the main thread is, and whether it waits there for other ranks."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        return {"stack": frames.places(frame, self.script), "progress": self.progress,
                "waits": frames.waits(frame, self.on_gpu and self.is_measuring)}


def kind_of(model) -> str:
    """Return the name of a model's class, without what wraps it."""
    inner = getattr(model, "_orig_mod", getattr(model, "module", None))
    if isinstance(inner, torch.nn.Module):
        return kind_of(inner)
    return type(model).__name__.removeprefix("FSDP")


def parameters_of(optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_closure(args, kwargs) -> bool:
    """True if an optimizer's step calls backward() itself. args begins with the optimizer."""
    return any(map(callable, [*args[1:], *kwargs.values()]))


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
        if number and (number, name[:3]) != (0.5, "Mul"):  # the mean of two losses
            divisors.append(number if name.startswith("Div") else 1 / number)
        node = node.next_functions[0][0]
    return divisors
