"""Records a rank's training as one list of events: draw, forward, grad, backward, step.

Each event is a dictionary for JSON with "kind", "what" and "place"; a backward and a step also
have what was measured there. The functions that judge the ranks read these lists alone.
"""

import itertools
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import frames, hooks, internals
from .backward import Gradients, divisors_of
from .collectives import Collectives
from .data import Data
from .fingerprints import batch_checksums, random_states, state_of
from .hooks import never_raise
from .models import Models, has_values
from .sharding import Sharding

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
        self.unavailable = internals.check()
        self.is_measuring = True
        self.progress = 0  # grows while the training makes progress
        self.events = []
        self.data = Data(self.add_event, self.places, self.measures)
        self.sharding = Sharding()
        self.models = Models(self.sharding, self.places, self.add_progress,
                             lambda parameter: self.gradients.hook(parameter))
        self.gradients = Gradients(self.models, self.measures, self.add_progress)
        self.outermost = set()  # called modules
        self.called_model = None  # during its forward pass
        self.module_depth = self.step_depth = self.backward_depth = 0  # these calls nest
        self.ddp_waits = False  # in the next backward
        self.backwards = 0  # backward passes since the start
        self.keys, self.counter = WeakKeyDictionary(), itertools.count()  # {optimizer: its key}
        self.optimizer_names = {}  # {key: a name that is the same on all ranks}
        self.backwards_at_last_step = defaultdict(int)  # {key of an optimizer: self.backwards}
        self.step_counts = defaultdict(int)  # {key of an optimizer: steps}
        self.steps_together = 0  # steps before the last collective of all ranks
        self.step = None  # the step in progress
        self.measured_states = {}  # after the last measured step
        self.record = {"process_group": False, "dropout": False, "alone": ""}

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(
            self.after_forward, with_kwargs=True, always_call=True)
        internals.patch("torch.autograd:backward", self.before_backward, self.after_backward)
        internals.patch("torch.autograd:grad", self.before_grad, self.after_backward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.sharding.install(self.gradients.note_own)
        self.data.install()

    def measures(self):
        return self.is_measuring

    def add_progress(self):
        self.progress += 1

    def places(self):
        return frames.places(sys._getframe(), self.script)

    def place(self):
        return frames.place(sys._getframe(), self.script)

    def add_event(self, kind, *what, **measured):
        self.progress += 1
        if len(self.events) < MOST_EVENTS:
            event = {"kind": kind, "what": what, "place": self.place()}
            self.events.append(event | measured)

    # Models.

    @never_raise
    def before_forward(self, module, _):
        self.progress += 1
        self.module_depth += 1
        is_ddp = type(module).__name__ == "DistributedDataParallel"
        if is_ddp and internals.SEQUENCE not in self.unavailable:
            self.before_ddp(module)
        if self.called_model is not None and isinstance(module, _DropoutNd):
            self.record["dropout"] |= module.training and module.p > 0
        if self.module_depth > 1 or self.backward_depth:
            return
        if self.is_measuring or module not in self.outermost:
            self.outermost.add(module)
            if self.models.note(module):
                self.called_model = module

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

    # Backward passes.

    @never_raise
    def before_grad(self, *_, **__):
        self.begin_backward("grad", [])

    def begin_backward(self, kind, divisors):
        self.add_event(kind, divisors=divisors)
        self.backward_depth += 1
        self.backwards += 1
        self.data.note_backward()
        self.sharding.note_first_state(self.models.names)

    @never_raise
    def before_backward(self, tensors, *_, **__):
        root = tensors if torch.is_tensor(tensors) else tensors[0]
        self.begin_backward("backward", divisors_of(root.grad_fn))
        if self.is_measuring:
            self.gradients.note_changed()
        if self.ddp_waits:
            self.ddp_waits = False
            self.collectives.compare("DDP's backward", self.place())

    @never_raise
    def after_backward(self, *_, **__):
        self.backward_depth -= 1
        self.collectives.end()
        if not self.backward_depth and self.is_measuring and self.models.is_supported():
            self.gradients.note_left()

    # Optimizers. Wrappers nest steps: the innermost step gets the gradients that are used.

    @never_raise
    def before_step(self, optimizer, args, kwargs):
        self.progress += 1
        self.step_depth += 1
        if self.step_depth == 1:
            self.begin_step(optimizer, has_closure(args, kwargs))
        self.note_used_gradients(optimizer)

    def note_used_gradients(self, optimizer):
        if self.is_measuring and self.models.is_supported():
            self.gradients.note_used(parameters_of(optimizer))

    def begin_step(self, optimizer, calls_backward):
        """Record the parameters before a step."""
        self.step = None
        key = self.key_of(optimizer)
        self.record["process_group"] |= torch.distributed.is_initialized()
        if key not in self.optimizer_names:
            self.note_optimizer(optimizer)
            if not self.is_measuring and len(self.optimizer_names) < MOST_OPTIMIZERS:
                self.is_measuring = True
                self.gradients.forget()  # this step's are not known
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it for fused optimizers
        if found_inf is not None and found_inf.item():  # the optimizer skips this step
            return
        if calls_backward or self.backwards > self.backwards_at_last_step[key]:
            if self.is_measuring and self.step_counts[key] == self.steps:
                self.measured_states = self.models.states()
                self.is_measuring = False
            if not self.is_measuring:
                self.on_step(self.count_steps())
        parameters = parameters_of(optimizer)
        self.step = {"lr": [float(group.get("lr", 1)) for group in optimizer.param_groups]}
        if self.is_measuring and self.step_counts[key] < self.steps:
            names = self.models.names
            known = {parameter: names[parameter] for parameter in parameters if parameter in names}
            if len(self.optimizer_names) == 1:  # it may have other tensors, such as copies
                known = known or names
            self.step |= {"random": random_states(), "state": self.models.states_of(known)}
        elif any(map(has_values, parameters)):
            smallest = min(filter(has_values, parameters), key=torch.Tensor.numel)
            self.step["sample"] = state_of(smallest)

    def key_of(self, optimizer):
        """Return an optimizer's number; its id() may be that of one which exists no more."""
        if optimizer not in self.keys:
            self.keys[optimizer] = next(self.counter)
        return self.keys[optimizer]

    def note_optimizer(self, optimizer):
        """Name an optimizer, and its parameters that no called module has."""
        parameters, models = parameters_of(optimizer), self.models
        known = [models.names[parameter] for parameter in parameters if parameter in models.names]
        kind = type(optimizer).__name__
        optimizer_name = f"{kind} of {known[0] if known else len(parameters)}"
        self.optimizer_names[self.key_of(optimizer)] = optimizer_name
        if type(optimizer).__module__ == "horovod.torch.optimizer":
            models.add_wrapper("Horovod")
        for number, parameter in enumerate(parameters):
            if parameter not in models.hooked and parameter.requires_grad:
                models.hooked.add(parameter)
                self.gradients.hook(parameter, f"parameter {number} of {optimizer_name}")

    @never_raise
    def after_step(self, optimizer, args, kwargs):
        self.step_depth -= 1
        if has_closure(args, kwargs):
            self.note_used_gradients(optimizer)
        if self.step_depth:
            return
        key, step, self.step = self.key_of(optimizer), self.step, None
        if step is None or self.backwards == self.backwards_at_last_step[key]:
            self.gradients.used = {}
            return  # Horovod takes a step without a backward pass to broadcast optimizer state
        if "state" in step:
            step |= self.gradients.take()
        self.gradients.used = {}
        self.add_event("step", self.optimizer_names[key], **step)
        self.backwards_at_last_step[key] = self.backwards
        self.step_counts[key] += 1

    def count_steps(self) -> int:
        return sum(self.step_counts.values())

    def steps_alone(self) -> int:
        """Return the number of steps since the last collective of all ranks."""
        return self.count_steps() - self.steps_together

    @never_raise
    def end_alone(self, counts: list[int]):
        """Note if some ranks took steps since the last collective, and others none.

        Such are a search for a learning rate on rank 0, of which the other ranks know nothing.
        counts: the ranks' numbers of steps since that collective.
        """
        self.steps_together = self.count_steps()
        if 0 in counts and any(counts):
            self.record["alone"] = f"ranks 0 to {len(counts) - 1} took {counts} steps"

    # The end.

    def report(self, at_a_step: bool) -> dict:
        """Return the record of this rank, as values for JSON.

        at_a_step: all ranks are at the same step, or at the end, so that states can be compared.
        """
        horovod, accelerate = (sys.modules.get(f"{name}") for name in (
            "horovod.torch", "accelerate.state"))
        states = self.measured_states
        if at_a_step or not states:
            states = self.models.states()
        return self.record | states | {
            "host": socket.gethostname(), "device": str(self.models.device),
            "wrappers": self.models.wrappers, "comm_hook": self.models.comm_hook,
            "half_precision": self.gradients.half_precision,
            "measured": self.measured_states,
            "events": self.events, "backwards": self.backwards,
            "first_others": self.models.first_others,
            "parts": self.sharding.parts, "before_sharding": self.sharding.before_sharding,
            "failed_hooks": hooks.failed_hooks, "unavailable": self.unavailable,
            "loaders": self.data.report(min(self.steps, max(self.step_counts.values(), default=0))),
            "horovod": bool(horovod and horovod.is_initialized()),
            "accelerate": bool(accelerate and accelerate.PartialState._shared_state)}

    def status(self) -> dict:
        """Return where the main thread is, and in which collective it waits for other ranks."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        return {"stack": frames.places(frame, self.script), "progress": self.progress,
                "call": self.collectives.current}

    def is_on_gpu(self):
        return self.models.device.type != "cpu"


def parameters_of(optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_closure(args, kwargs) -> bool:
    """True if an optimizer's step calls backward() itself. args begins with the optimizer."""
    return any(map(callable, [*args[1:], *kwargs.values()]))
