"""Records a rank's gradients: its own, before they are averaged, and those an optimizer uses."""

import functools
from collections.abc import Callable

import torch

from .fingerprints import PROJECTIONS, local_part, projections
from .hooks import never_raise
from .models import Models

GRAPH_NODES = 4  # nodes of a loss's graph that are searched for divisions, from the root


class Gradients:
    """Projections of the gradients of parameters that have names; hooks while is_measuring()."""

    def __init__(self, models: Models, is_measuring: Callable[[], bool], add_progress: Callable):
        self.models, self.is_measuring, self.add_progress = models, is_measuring, add_progress
        self.half_precision = False
        self.used = {}  # {name: projections} of the gradients that the optimizer uses
        self.forget()

    def forget(self):
        self.own = {}  # {name: projections}, before averaging, since the last step
        self.left = {}  # {name: [version, projections]} after the last backward pass
        self.changed = {}  # {name: projections} of gradients changed between two backward passes

    def hook(self, parameter, name=""):
        """Record a parameter's gradients; name: for one that no called module has."""
        parameter.register_hook(functools.partial(self.note_own, parameter, name=name))

    @never_raise
    def note_own(self, parameter, gradient, name=""):
        """Add a backward pass's gradient, before it is averaged, to this rank's own gradients."""
        self.add_progress()
        if name:
            self.models.names.setdefault(parameter, name)
        name = self.models.names.get(parameter)
        if not name or gradient is None or not self.is_measuring():  # DDP: of an unused output
            return
        if gradient.element_size() < 4:
            self.half_precision = True
        if parameter.grad is None or not local_part(parameter.grad).any():
            self.own.pop(name, None)  # zero_grad() dropped what no step used
            self.changed.pop(name, None)
        earlier = self.own.get(name, [0.0] * PROJECTIONS)
        self.own[name] = [a + b for a, b in zip(earlier, projections(gradient))]

    def note_changed(self):
        """Record, before a backward pass, the gradients changed since the last one."""
        for parameter, name in self.models.names.items():
            version = getattr(parameter.grad, "_version", None)
            is_changed = version != self.left.get(name, [version])[0]
            if is_changed and version is not None and local_part(parameter.grad).any():
                self.changed[name] = projections(parameter.grad)

    def note_left(self):
        """Record what a backward pass left."""
        for parameter, name in self.models.names.items():
            if parameter.grad is not None:
                self.left[name] = [parameter.grad._version, self.projections_of(parameter)]

    def note_used(self, parameters):
        for parameter in parameters:
            self.add_progress()
            name = self.models.names.get(parameter)
            if name and parameter.grad is not None:
                self.used[name] = self.projections_of(parameter)

    def projections_of(self, parameter):
        return projections(parameter.grad, self.models.sharding.offsets.get(parameter, 0))

    def take(self) -> dict:
        """Return the gradients of the step that has been taken, and forget them."""
        used, self.used = self.used, {}
        names = list(used or self.own)
        step = {"used": used}
        for key, gradients in ("own", self.own), ("changed", self.changed):
            step[key] = {name: gradients.pop(name) for name in names if name in gradients}
        step["left"] = {name: values for name, (_, values) in self.left.items() if name in names}
        return step


def divisors_of(node: torch.autograd.graph.Node | None) -> list[float]:
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
