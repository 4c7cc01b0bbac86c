"""The counting and the figures of 05_zero/memory.ipynb: model state by ZeRO's formula and as counted, and activations.

Activations are counted here, on a small GPT-like network of plain PyTorch: bytes of unique storages, so that each run
on each machine counts the same. MB and GB are 1e6 and 1e9 bytes; a GPU's gigabytes are 2^30 bytes.
"""

import runpy
import weakref
from collections.abc import Iterable
from functools import cache
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

import torch
from launch import ROOT
from matplotlib.patches import Patch, Rectangle
from records import published
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tools.pages.style import ABSENT, MEASURED, ROLES, STAGES, Picture, picture

ACCOUNTING = runpy.run_path(str(ROOT / "05_zero" / "accounting.py"))  # the chapter's: a folder, no package
formula, STATE = ACCOUNTING["formula"], ACCOUNTING["ROLES"]
ADAM = {"width": 2, "gathered": 2, "master": 4, "moments": 8}  # bytes a parameter: bf16 and Adam
MOMENTUM = ADAM | {"moments": 4}  # SGD with momentum in Adam's place

PALE, HATCH = 0.5, "///"  # a formula's bars are pale; hatched is what is there for a moment only


# Model state

def state(stage: int, ranks: float, parameters: float = 1, keeps_gradients: bool = True, **recipe: int) -> dict:
    """Bytes of model state by role that ZeRO's paper expects on each of so many ranks."""
    expected = formula(stage, ranks, parameters, layer=0, keeps_gradients=keeps_gradients, **(recipe or ADAM))
    return {role: expected[role] for role in STATE}


def total(found: dict) -> float:
    return sum(found[role] for role in STATE)


def most(record: dict) -> dict:
    """What the rank counted that holds most."""
    return max(record["memory"], key=total)


def counted_stages(ranks: int, precision: str = "bf16", chapter: str = "05_zero") -> list[dict]:
    """The records of chapter 5 at each stage, in the stages' order."""
    found = [record for record in published("zero.jsonl") if (record["chapter"], record["ranks"], record["precision"])
             == (chapter, ranks, precision)]
    return sorted(found, key=lambda record: record["stage"])


def draw_stages(ranks: int, precision: str) -> Picture:
    """Bytes a parameter that a rank holds at each stage, by role: formula beside counted, from the records.

    Below a bar is the sum after backward, above it the sum with all gradients that were there at once.
    """
    figure, axis = picture(4.4)
    ticks, labels = [], []
    for stage, record in enumerate(counted_stages(ranks, precision)):
        for x, name, row, alpha in ((stage - 0.22, "formula", record["memory_formula"], PALE),
                                    (stage + 0.22, "counted", most(record), 1)):
            each = {role: row[role] / record["parameters"] for role in (*STATE, "peak gradients")}
            top = stack(axis, x, 0.4, {role: each[role] for role in STATE}, alpha)
            more = each["peak gradients"] - each["gradients"]
            in_passing(axis, x, 0.4, top, more, "gradients", alpha)
            if more > 0:
                axis.text(x, top + more, f"{top + more:.2f}", ha="center", va="bottom", color=ROLES["gradients"])
            ticks.append(x)
            labels.append(f"{name}\n{total(each):.2f}")
    axis.set_xticks(ticks, labels)
    axis.set(ylabel="bytes a parameter", ylim=(0, 23), xlim=(-0.5, 3.5))
    axis.tick_params(axis="x", length=0)
    for stage in range(4):
        axis.text(stage, 23, f"stage {stage}", ha="center", va="top", weight="bold")
    figure.legend(handles=keys(STATE, "gradients until backward ends", "gradients"), loc="outside upper center",
                  ncols=3)
    return figure


def stack(axis: object, x: float, width: float, parts: dict[str, float], alpha: float) -> float:
    """Draw a bar of these parts, by role, from the bottom up; its top."""
    top = 0
    for role, part in parts.items():
        axis.bar(x, part, width, top, color=ROLES[role], alpha=alpha)
        top += part
    return top


def in_passing(axis: object, x: float, width: float, bottom: float, height: float, role: str, alpha: float) -> None:
    """Draw on top of a bar what is there for a moment only."""
    if height > 0:
        axis.bar(x, height, width, bottom, color="white", edgecolor=ROLES[role], hatch=HATCH, alpha=alpha)


def keys(roles: Iterable[str], passing: str, role: str) -> list[Patch]:
    """A legend's keys: the roles, and what passes."""
    handles = [Patch(color=ROLES[name], label=name) for name in roles]
    return [*handles, Patch(facecolor="white", edgecolor=ROLES[role], hatch=HATCH, label=passing)]


def stages_in_words(records: list[dict]) -> str:
    """What the rank that holds most keeps after backward, and at the peak of its gradients, at stages 0 to 3."""
    each = [total(most(record)) / record["parameters"] for record in records]
    after = [most(record)["gradients"] for record in records]
    peaks = [max(rank["peak gradients"] for rank in record["memory"]) / record["parameters"] for record in records]
    compared = "as many bytes of gradients as"
    if after[1] != after[2]:
        compared = f"{'more' if after[1] > after[2] else 'fewer'} bytes of gradients than"
    return (f"In the records, on {records[3]['ranks']} ranks, stage 3 leaves {each[3]:.2f} of {each[0]:.2f} bytes. "
            f"Once backward is over, DeepSpeed's stage 1 holds {compared} stage 2; during backward there are up to "
            f"{peaks[1]:.2f} and {peaks[2]:.2f} bytes of gradients a parameter.")


def above_the_formula(record: dict) -> float:
    """Percent that the fullest rank holds more than the formula says."""
    return 100 * (total(most(record)) / total(record["memory_formula"]) - 1)


def elements_kept_whole(sizes: list[int], ranks: int) -> list[int]:
    """For each rank the elements of all tensors that lie, wholly or partly, in its share of them laid end to end."""
    share = ceil(sum(sizes) / (2 * ranks)) * 2  # an even number
    padded = [*sizes, ranks * share - sum(sizes)]
    pieces = list(zip(padded, accumulate(padded)))
    return [sum(size for size, end in pieces if end - size < (rank + 1) * share and end > rank * share)
            for rank in range(ranks)]


def sizes_of(record: dict, pixels: int = 64, classes: int = 10) -> list[int]:
    """Elements of each tensor of chapter 5's perceptron on the digits, which have 8 x 8 pixels."""
    width = record["width"]
    return [pixels * width, width, *[width * width, width] * record["layers"], classes * width, classes]


def deviation_in_words(records: list[dict]) -> str:
    """How far the fullest rank is from the formula, for each program and stage."""
    off = {}
    for record in records:
        off.setdefault((record["chapter"], record["stage"]), []).append(above_the_formula(record))
    largest = {key: max(values, key=abs) for key, values in off.items()}
    own, pytorch = "05_zero", "05_zero/fsdp.py"
    whole = max(largest[own, 0], largest[own, 3], key=abs)
    cut = max(largest[own, 1], largest[own, 2], key=abs)
    return (f"Furthest from the formula: DeepSpeed's stages 0 and 3 by {whole:+.4f} %, its stages 1 and 2 by "
            f"{cut:+.1f} %, `fsdp.py --stage 3` by {largest[pytorch, 3]:+.2f} %, `fsdp.py --stage 1`, which deals out "
            f"whole tensors, by {largest[pytorch, 1]:+.1f} %.")


# Activations, counted on a small network

LAYERS, WIDTH, HEADS = 8, 128, 4
FLOAT = 4  # bytes


class Layer(nn.Module):
    """One layer of a GPT-like network: attention, then two linear layers; no dropout."""

    def __init__(self, fused: bool):
        super().__init__()
        self.attend = fused_attention if fused else plain_attention
        self.before_attention, self.before_linear = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.after_attention = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gelu, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(batch, sequence, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = self.attend(query, key, value).transpose(1, 2).reshape(batch, sequence, WIDTH)
        x = x + self.after_attention(found)
        return x + self.down(self.gelu(self.up(self.before_linear(x))))


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keeps a score for each pair of tokens and each head."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value


def fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same in one kernel, which computes the scores again in backward."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return nn.functional.scaled_dot_product_attention(query, key, value)


def kept_by_layer(sequence: int, batch: int, fused: bool) -> int:
    """Bytes of activations that backward of one Layer needs, derived: 16 s b h elements, and what attention keeps.

    s b h: what goes into both norms, into query_key_value, after_attention and up (5), query, key and value (3), what
    goes into gelu and into down (4 each). Both norms keep a mean and a deviation a token. Attention keeps a score for
    each head and pair of tokens; fused one number for each head and token.
    """
    tokens = sequence * batch
    scores = HEADS * tokens * (1 if fused else sequence)
    return FLOAT * (16 * tokens * WIDTH + 4 * tokens + scores)


def kept_by_checkpoint(sequence: int, batch: int) -> int:
    """Bytes that remain of a Layer with activation checkpointing: its input."""
    return FLOAT * sequence * batch * WIDTH


def network(fused: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(fused) for _ in range(LAYERS))


def through(layers: Iterable[nn.Module], x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    return x


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def kept_for_backward(layers: nn.ModuleList, x: torch.Tensor, checkpointed: bool) -> int:
    """Bytes that autograd keeps of a forward, beside the parameters; each storage counts once."""
    parameters = dict(storage(parameter) for parameter in layers.parameters())
    found = {}

    def pack(tensor):
        found.update([storage(tensor)])
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = through(layers, x, checkpointed)  # as long as it lives, so does what was kept
    del output
    return sum(size for address, size in found.items() if address not in parameters)


WAYS = {"plain attention": (False, False), "fused attention": (True, False),
        "fused + checkpointing": (True, True)}  # fused?, checkpointed?


@cache
def counted_activations(sequence: int, batch: int, way: str) -> tuple[int, int]:
    """Bytes that autograd keeps after forward of all layers; and of one layer more, computed again in backward."""
    fused, checkpointed = WAYS[way]
    layers, x = network(fused), torch.randn(batch, sequence, WIDTH)
    again = kept_for_backward(layers[:1], x, False) if checkpointed else 0
    return kept_for_backward(layers, x, checkpointed), again


def expected_activations(sequence: int, batch: int, way: str) -> tuple[int, int]:
    """The same, derived."""
    fused, checkpointed = WAYS[way]
    layer = kept_by_layer(sequence, batch, fused)
    return (LAYERS * kept_by_checkpoint(sequence, batch), layer) if checkpointed else (LAYERS * layer, 0)


@cache
def counted_state() -> dict[str, int]:
    """Bytes of the small network's parameters, gradients and Adam's state, after a step."""
    layers = network(True)
    optimizer = torch.optim.Adam(layers.parameters())
    through(layers, torch.randn(1, 2, WIDTH), False).mean().backward()
    optimizer.step()
    parameters = list(layers.parameters())
    return {"parameters": sum(tensor.nbytes for tensor in parameters),
            "optimizer state": sum(value.nbytes for each in optimizer.state.values() for value in each.values()),
            "gradients": sum(tensor.grad.nbytes for tensor in parameters)}


def draw_activations(sequence: int, batch: int) -> Picture:
    """Activations of the small network on its model state, in MB: the derived beside the counted, three ways."""
    figure, axis = picture(4.2)
    count = counted_state()["parameters"] // FLOAT
    states = {"formula": {"parameters": 4 * count, "optimizer state": 8 * count, "gradients": 4 * count},
              "counted": counted_state()}
    kept = {"formula": expected_activations, "counted": counted_activations}
    ticks, labels = [], []
    for place, way in enumerate(WAYS):
        for x, name, alpha in ((place - 0.22, "formula", PALE), (place + 0.22, "counted", 1)):
            after, again = kept[name](sequence, batch, way)
            parts = states[name] | {"activations": after}
            top = stack(axis, x, 0.4, {role: part / 1e6 for role, part in parts.items()}, alpha)
            in_passing(axis, x, 0.4, top, again / 1e6, "activations", alpha)
            ticks.append(x)
            labels.append(f"{name}\n{short(after)}" + (f" + {short(again)}" if again else ""))
    axis.set_xticks(ticks, labels)
    axis.tick_params(axis="x", length=0)
    axis.margins(y=0.14)
    for place, way in enumerate(WAYS):
        axis.text(place, axis.get_ylim()[1], way, ha="center", va="top", weight="bold")
    axis.set(ylabel="MB", xlim=(-0.5, 2.5), xlabel="MB of activations")
    figure.legend(handles=keys((*states["counted"], "activations"), "a layer again, in backward", "activations"),
                  loc="outside upper center", ncols=3)
    return figure


def short(size: float) -> str:
    """Bytes as MB, in three characters or so."""
    return f"{size / 1e6:.0f}" if size >= 1e7 else f"{size / 1e6:.1f}"


def activations_in_words(kept: dict[str, tuple[int, int]], expected: dict[str, tuple[int, int]],
                         state_bytes: int) -> str:
    """Whether bytes counted and derived agree, by way, and how they compare with model state."""
    wrong = [way for way in kept if kept[way] != expected[way]]
    agree = f"differ ({', '.join(wrong)})" if wrong else "are equal"
    plain, (after, again) = sum(kept["plain attention"]), kept["fused + checkpointing"]
    return (f"Counted and derived bytes {agree}. With plain attention activations are {plain / state_bytes:.1f} times "
            f"the model state. Fused attention with checkpointing keeps {100 * after / plain:.0f} % of them, and "
            f"{100 * (after + again) / plain:.0f} % with the layer that comes back. The bars add up what is never "
            "there at one time: gradients come as activations go. The next figure has the real peak.")


# Memory over one step

class Watch(TorchDispatchMode):
    """Looks after each operation of PyTorch what is held by role; what is no model state counts as activations.

    Adam has its state already. A storage is there until the last tensor that uses it is gone.
    """

    def __init__(self, layers: nn.ModuleList, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.parameters = list(layers.parameters())
        moments = [value for each in optimizer.state.values() for value in each.values()]
        self.fixed = {storage(tensor)[0] for tensor in (*self.parameters, *moments)}
        self.state = {"parameters": sum(tensor.nbytes for tensor in self.parameters),
                      "optimizer state": sum(tensor.nbytes for tensor in moments)}
        self.alive, self.samples = {}, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.remember(tensor)
        self.look()
        return result

    def remember(self, tensor: torch.Tensor) -> None:
        address, size = storage(tensor)
        if size and address not in self.fixed and address not in self.alive:
            gone = weakref.ref(tensor.untyped_storage(), lambda _: self.alive.pop(address))
            self.alive[address] = gone, size

    def look(self) -> None:
        gradients = sum(tensor.grad.nbytes for tensor in self.parameters if tensor.grad is not None)
        others = sum(size for _, size in self.alive.values()) - gradients
        self.samples.append(self.state | {"gradients": gradients, "activations": others})


PHASES = {"forward": 1.0, "backward": 2.0, "optimizer": 1.2}  # how wide each is drawn


@cache
def step(sequence: int, batch: int, fused: bool, checkpointed: bool) -> dict[str, list[dict[str, int]]]:
    """What is held after each operation of forward, backward and optimizer step: bytes by role. Adam has its state."""
    layers = network(fused)
    optimizer = torch.optim.Adam(layers.parameters())
    through(layers, torch.randn(1, 2, WIDTH), False).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ends = []
    with Watch(layers, optimizer) as watch:
        loss = through(layers, torch.randn(batch, sequence, WIDTH), checkpointed).square().mean()
        watch.look()
        ends.append(len(watch.samples))
        loss.backward()
        watch.look()
        ends.append(len(watch.samples))
        optimizer.step()
        optimizer.zero_grad()
        watch.look()
    return {phase: watch.samples[begin:end]
            for phase, begin, end in zip(PHASES, (0, *ends), (*ends, len(watch.samples)))}


def peak(phases: dict[str, list[dict[str, int]]]) -> int:
    """The most bytes that are held at once."""
    return max(sum(sample.values()) for samples in phases.values() for sample in samples)


def draw_step(sequence: int, batch: int, attention: str) -> Picture:
    """MB held over one step of the small network by role, without and with activation checkpointing."""
    figure, axes = picture(4.4, 1, 2, sharey=True)
    for axis, checkpointed in zip(axes, (False, True)):
        phases = step(sequence, batch, attention == "fused", checkpointed)
        places, samples, start = [], [], 0
        for (_, width), found in zip(PHASES.items(), phases.values()):
            places += [start + width * (number + 1) / len(found) for number in range(len(found))]
            samples += found
            start += width
            axis.axvline(start, color="white", lw=1.5)
        rows = [[sample[role] / 1e6 for sample in samples] for role in samples[0]]
        axis.stackplot(places, rows, colors=[ROLES[role] for role in samples[0]], step="post", lw=0)
        axis.axhline(peak(phases) / 1e6, color=MEASURED, lw=1.5, ls="--")
        axis.text(start, peak(phases) / 1e6, f"peak {peak(phases) / 1e6:.0f} MB", ha="right", va="bottom")
        edges = [0, *accumulate(PHASES.values())]
        axis.set_xticks([(left + right) / 2 for left, right in zip(edges, edges[1:])], PHASES)
        axis.tick_params(axis="x", length=0)
        axis.set(xlim=(0, start), title=f"{attention}, {'with' if checkpointed else 'without'} checkpointing")
    axes[0].set(ylabel="MB held", ylim=(0, 1.15 * axes[0].get_ylim()[1]))
    figure.legend(handles=[Patch(color=ROLES[role], label=role) for role in samples[0]], loc="outside upper center",
                  ncols=4)
    return figure


def arithmetic(sequence: int, batch: int, checkpointed: bool) -> int:
    """Floating-point operations of the matrix products in a forward and a backward."""
    layers = network(False)
    with FlopCounterMode(display=False) as counter:
        through(layers, torch.randn(batch, sequence, WIDTH), checkpointed).mean().backward()
    return counter.get_total_flops()


def step_in_words(whole: dict, checkpointed: dict, more_arithmetic: float) -> str:
    """Peaks of two steps with plain attention, and what checkpointing costs: more_arithmetic is a factor."""
    peaks = [peak(phases) / 1e6 for phases in (whole, checkpointed)]
    first, second = (max(phases, key=lambda phase, of=phases: peak({phase: of[phase]}))
                     for phases in (whole, checkpointed))
    return (f"With plain attention the peak is {peaks[0]:.0f} MB, in *{first}*; checkpointed {peaks[1]:.0f} MB, in "
            f"*{second}*: {100 * peaks[1] / peaks[0]:.0f} %, for {more_arithmetic:.2f} times the arithmetic.")


# Activations of published models

class Model(NamedTuple):
    parameters: float
    layers: int
    width: int
    heads: int


GPTS = {"GPT-2 1.5B": Model(1.5e9, 48, 1600, 25), "GPT-3 6.7B": Model(6.7e9, 32, 4096, 32),
        "GPT-3 175B": Model(175e9, 96, 12288, 96)}
GPU = 80 * 2**30
VOCABULARY = 50257  # words, or parts of words, that these models know


def published_activations(model: Model, sequence: int, batch: int, way: str) -> tuple[float, float]:
    """Bytes of activations in 16 bits by Korthikanti et al. (2205.05198): after forward, and of one layer more."""
    fused, checkpointed = WAYS[way]
    token = sequence * batch * model.width
    scores = 0 if fused else 5 * model.heads * sequence / model.width
    layer = token * (34 + scores)
    return (model.layers * 2 * token, layer) if checkpointed else (model.layers * layer, 0)


def logits(sequence: int, batch: int) -> int:
    """Bytes in 16 bits of a number for each token and each word of the vocabulary; their gradient has as many."""
    return 2 * sequence * batch * VOCABULARY


def draw_model(model: str, sequence: int, batch: int, ranks: int) -> Picture:
    """GB on a rank of a published model, at stage 3 on so many ranks, three ways to keep activations; by formula."""
    figure, axis = picture(3.9)
    shape = GPTS[model]
    shared = state(3, ranks, shape.parameters)
    for place, way in enumerate(WAYS):
        after, again = published_activations(shape, sequence, batch, way)
        left = 0
        for role, part in (shared | {"activations": after}).items():
            axis.barh(place, part / 1e9, 0.6, left, color=ROLES[role])
            left += part / 1e9
        if again:
            axis.barh(place, again / 1e9, 0.6, left, color="white", edgecolor=ROLES["activations"], hatch=HATCH)
        end = left + again / 1e9
        axis.annotate(f"{end:,.1f} GB", (end, place), (6, 0), textcoords="offset points", va="center", weight="bold",
                      bbox={"color": "white", "pad": 0})
    axis.axvline(GPU / 1e9, color=MEASURED, ls="--", lw=1.5, zorder=1)
    axis.set_yticks(range(len(WAYS)), [way.replace("+ ", "+\n") for way in WAYS])
    axis.set_xlim(0, 1.2 * max(GPU / 1e9, axis.dataLim.x1))
    axis.text(GPU / 1e9, -0.45, f" GPU: {GPU / 2**30:.0f} GiB = {GPU / 1e9:.0f} GB ", va="bottom",
              ha="left" if axis.get_xlim()[1] > 2 * GPU / 1e9 else "right")
    axis.set_ylim(len(WAYS) - 0.5, -0.85)
    axis.set_xlabel(f"GB on a rank: {model} in 16 bits, stage 3 on {ranks} rank{'s' * (ranks > 1)}")
    figure.legend(handles=keys((*STATE, "activations"), "a layer again", "activations"), loc="outside upper center",
                  ncols=3)
    return figure


def model_in_words(name: str, sequence: int, batch: int) -> str:
    """Model state and activations of a published model on one rank, and the logits, which are left out; in GB."""
    model = GPTS[name]
    held = total(state(0, 1, model.parameters)) / 1e9
    each = []
    for way in WAYS:
        after, again = (size / 1e9 for size in published_activations(model, sequence, batch, way))
        layer = f", and {again:.1f} GB for a layer again," if again else ""
        each.append(f"{after:.1f} GB{layer} with {way} ({'more' if after + again > held else 'less'} than model state)")
    return (f"{name} has {held:.0f} GB of model state. {batch} sequence{'s' * (batch > 1)} of {sequence:,} tokens have "
            f"activations of {'; '.join(each)}. Left out are the logits, a number for each token and each of "
            f"{VOCABULARY:,} words: {logits(sequence, batch) / 1e9:.1f} GB in 16 bits, and as much again for their "
            "gradient.")


# Which stage fits, and on how many ranks

MODELS = {"ResNet-50": 25.6e6, "BERT-large": 340e6, "GPT-2": 1.5e9, "Llama 3 8B": 8.03e9, "Llama 3 70B": 70.6e9}
GPUS = {name: size * 2**30 for name, size in
        {"V100 16": 16, "V100 32": 32, "A100 40": 40, "H100 80": 80, "H200 141": 141}.items()}


def lowest_stage(parameters: float, room: float, ranks: int) -> int | None:
    """The lowest stage at which model state fits into this many bytes of each rank, or None."""
    fitting = (stage for stage in range(4) if total(state(stage, ranks, parameters)) <= room)
    return next(fitting, None)


def ranks_needed(parameters: float, room: float, stage: int, **recipe: int) -> int | None:
    """The least number of ranks on which model state fits into `room` bytes of each; None if none is enough.

    Solves whole + shared / N <= room: what every rank holds whole, and what is shared out.
    """
    alone, whole = (total(state(stage, ranks, parameters, **recipe)) for ranks in (1, inf))
    if alone <= room:
        return 1
    return ceil((alone - whole) / (room - whole)) if stage > 0 and room > whole else None


def draw_ranks(billions: float, gpu: str, percent: int) -> Picture:
    """GB of model state on a rank against the number of ranks, for each stage, and where a part of a GPU is enough."""
    figure, axis = picture(4.3)
    room, numbers = GPUS[gpu] * percent / 100, [2 ** (power / 4) for power in range(41)]
    axis.axhspan(room / 1e9, 1e6, color=ABSENT, lw=0)
    axis.axhline(room / 1e9, color=MEASURED, ls="--", lw=1.5)
    for stage, color in enumerate(STAGES):
        axis.plot(numbers, [total(state(stage, ranks, billions * 1e9)) / 1e9 for ranks in numbers], color=color, lw=3.5)
        needed = ranks_needed(billions * 1e9, room, stage)
        label = "fits on no number of ranks" if needed is None else f"fits from {needed} rank{'s' * (needed > 1)} on"
        axis.plot([], [], color=color, lw=3.5, label=f"stage {stage}: {label}")
        if needed and needed <= numbers[-1]:
            axis.plot(needed, total(state(stage, needed, billions * 1e9)) / 1e9, "o", color=MEASURED, ms=10)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([4**power for power in range(6)], [4**power for power in range(6)])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lowest, highest = room / 3e10, max(3 * total(state(0, 1, billions)), room / 3e8)
    axis.set(xlim=(1, numbers[-1]), ylim=(lowest, highest), xlabel="ranks", ylabel="GB of model state")
    axis.annotate(f"{percent} % of {gpu}: {room / 1e9:.0f} GB", (numbers[-1], room / 1e9), (-6, 5), ha="right",
                  textcoords="offset points", bbox={"color": ABSENT, "pad": 0})
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def draw_grid(ranks: int, percent: int) -> Picture:
    """For models and GPUs the lowest stage at which model state fits into a part of the GPU."""
    figure, axis = picture(4.1)
    for y, size in enumerate(MODELS.values()):
        for x, memory in enumerate(GPUS.values()):
            stage = lowest_stage(size, memory * percent / 100, ranks)
            color = "white" if stage is None else STAGES[stage]
            axis.add_patch(Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, facecolor=color, edgecolor="#BDBDBD"))
            axis.text(x, y, "no" if stage is None else f"stage {stage}", ha="center", va="center",
                      color="white" if stage in (2, 3) else "black")
    axis.set(xlim=(-0.5, len(GPUS) - 0.5), ylim=(len(MODELS) - 0.5, -0.5),
             title=f"{ranks} rank{'s' * (ranks > 1)}, model state in {percent} % of the GPU")
    axis.set_xticks(range(len(GPUS)), GPUS)
    names = [f"{name}\n{total(state(0, 1, size)) / 1e9:,.1f} GB" for name, size in MODELS.items()]
    axis.set_yticks(range(len(MODELS)), names)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return figure


def ranks_table() -> dict[str, dict]:
    """By GPU, model and stage: the ranks that model state needs; in brackets, if it may take half of the GPU."""
    cells = {}
    for gpu, size in GPUS.items():
        for model in list(MODELS)[2:]:
            for stage in (1, 2, 3):
                full, half = (ranks_needed(MODELS[model], size * part, stage) for part in (1, 0.5))
                cells.setdefault(gpu, {})[model, f"stage {stage}"] = f"{full or '-'} ({half or '-'})"
    return cells


def ends_in_words() -> str:
    """What follows for the largest model of the grid, and for the smallest."""
    (small, tiny), *_, (large, huge) = MODELS.items()
    gpu = "H100 80"
    number = "no number of GPUs is enough" if ranks_needed(huge, GPUS[gpu], 2) is None else "enough GPUs will do"
    return (f"The parameters of {large} alone take {2 * huge / 1e9:.0f} GB, and stages 1 and 2 keep them whole: "
            f"{number} ({gpu}). Stage 3 needs {ranks_needed(huge, GPUS[gpu], 3)} for the state, and "
            f"{ranks_needed(huge, GPUS[gpu] / 2, 3)} if half of each is for the rest. All model state of a {small} is "
            f"{total(state(0, 1, tiny)) / 1e9:.1f} GB: more than that ZeRO cannot save.")


# Counted live

def rows_of(printed: Iterable[str]) -> dict[str, dict[str, int]]:
    """Bytes of each rank and of the formula by role, from what 05_zero/main.py prints; ValueError where that lacks."""
    lines = [line.replace("rank ", "rank-").split() for line in printed if line.startswith(("rank ", "formula"))]
    if len(lines) < 2:
        raise ValueError("the run above has not ended well: read what it printed")
    names = [*STATE, "sum", "peak parameters", "peak gradients"]
    return {name.replace("-", " "): {role: int(number.replace(",", "")) for role, number in zip(names, numbers)}
            for name, *numbers in lines}


def draw_counted(rows: dict[str, dict[str, int]]) -> Picture:
    """What each rank of a run has counted, by role, and the formula below, in kB."""
    figure, axis = picture(3.0)
    for place, (name, row) in enumerate(rows.items()):
        left = 0
        for role in STATE:
            axis.barh(place, row[role] / 1e3, 0.65, left, color=ROLES[role], alpha=PALE if name == "formula" else 1)
            left += row[role] / 1e3
        axis.text(left, place, f" {row['sum']:,} bytes", va="center")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, 1.3 * max(row["sum"] for row in rows.values()) / 1e3)
    axis.set_xlabel("kB on a rank, between backward and optimizer step")
    figure.legend(handles=[Patch(color=ROLES[role], label=role) for role in STATE], loc="outside upper center", ncols=4)
    return figure


def furthest(rows: dict[str, dict[str, int]]) -> int:
    """Bytes by which any rank's number differs most from the formula's."""
    ranks = [row for name, row in rows.items() if name != "formula"]
    return max(abs(row[role] - rows["formula"][role]) for row in ranks for role in row)


def rest_in_words(rows: dict[str, dict[str, int]]) -> str:
    """The column that is cut off where a run's lines are printed, and how far the count is from the formula."""
    peaks = ", ".join(f"{name} {row['peak gradients']:,}" for name, row in rows.items())
    return (f"cut off here, peak gradients: {peaks}\n"
            f"furthest from the formula: {furthest(rows):,} bytes (Adam's count of its steps takes 4)")
