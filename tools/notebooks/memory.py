"""What 05_zero/memory.ipynb counts and draws. Its formulae stand in its cells; the functions here take them.

Activations are counted on a small GPT-like network of plain PyTorch, in bytes of unique storages: each run on each
machine counts the same. MB and GB are 1e6 and 1e9 bytes.
"""

import json
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from pathlib import Path

import pandas
import torch
from matplotlib.patches import Patch
from records import published
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tools.style import ABSENT, MEASURED, ROLES, STAGES, Picture, picture

STATE = ("parameters", "gradients", "master copy", "optimizer state")
HATCH = {"facecolor": "white", "hatch": "///"}  # what is there for a moment only


# Model state, as chapter 5's runs have counted it

def counted_stages(ranks: int) -> list[dict]:
    """The bf16 records of 05_zero/main.py on so many ranks: stages 0 to 3."""
    found = [record for record in published("zero.jsonl")
             if (record["chapter"], record["ranks"], record["precision"]) == ("05_zero", ranks, "bf16")]
    return sorted(found, key=lambda record: record["stage"])


def draw_stages(held: Callable, ranks: int) -> Picture:
    """Bytes a parameter at each stage: held(stage, ranks), and what the fullest rank has counted."""
    groups = {}
    for stage, record in enumerate(counted_stages(ranks)):
        fullest = max(record["memory"], key=lambda rank: sum(rank[role] for role in STATE))
        counted = {role: fullest[role] / record["parameters"] for role in STATE}
        passing = fullest["peak gradients"] / record["parameters"] - counted["gradients"]
        groups[f"stage {stage}"] = {"formula": (held(stage, ranks), 0), "counted": (counted, passing)}
    return pairs(groups, "bytes a parameter", ".2f", "gradients, until backward ends", "gradients")


def pairs(groups: dict[str, dict], ylabel: str, number: str, passing: str, of: str) -> Picture:
    """For each group two stacked bars, the formula's pale beside what was counted.

    A bar is (its parts by role, what is on top for a moment). Below it stands the sum of its parts, above it the sum
    with what passes.
    """
    figure, axis = picture(3.7)
    ticks = {}
    for place, (group, bars) in enumerate(groups.items()):
        for x, (name, (parts, more)) in zip((place - 0.22, place + 0.22), bars.items()):
            alpha, top = (0.5 if name == "formula" else 1), 0
            for role, part in parts.items():
                axis.bar(x, part, 0.4, top, color=ROLES[role], alpha=alpha)
                top += part
            if more > 0:
                axis.bar(x, more, 0.4, top, edgecolor=ROLES[of], alpha=alpha, **HATCH)
                axis.text(x, top + more, f"{top + more:{number}}", ha="center", va="bottom", color=ROLES[of])
            ticks[x] = f"{name}\n{top:{number}}"
        axis.text(place, 1, group, ha="center", va="top", weight="bold", transform=axis.get_xaxis_transform())
    axis.margins(x=0.02, y=0.22)
    axis.set_xticks(list(ticks), ticks.values())
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel(ylabel)
    keys = [Patch(color=ROLES[role], label=role) for role in parts]
    figure.legend(handles=[*keys, Patch(edgecolor=ROLES[of], label=passing, **HATCH)], loc="outside upper center",
                  ncols=3)
    return figure


# Activations, counted on a small network

LAYERS, WIDTH, HEADS = 8, 128, 4
WAYS = {"plain attention": (False, False), "fused attention": (True, False),
        "fused + checkpointing": (True, True)}  # fused?, checkpointed?


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


def network(fused: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(fused) for _ in range(LAYERS))


def forward(layers: Iterable[nn.Module], sequence: int, batch: int, checkpointed: bool = False) -> torch.Tensor:
    x = torch.randn(batch, sequence, WIDTH)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    return x


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def kept_for_backward(layers: nn.ModuleList, sequence: int, batch: int, checkpointed: bool) -> int:
    """Bytes that autograd keeps of a forward, beside the parameters; each storage counts once."""
    parameters = dict(storage(parameter) for parameter in layers.parameters())
    found = {}

    def pack(tensor):
        found.update([storage(tensor)])
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(layers, sequence, batch, checkpointed)  # as long as it lives, so does what was kept
    del output
    return sum(size for address, size in found.items() if address not in parameters)


@cache
def counted_activations(sequence: int, batch: int, fused: bool, checkpointed: bool) -> tuple[int, int]:
    """Bytes that autograd keeps after forward of all layers; and of one layer more, computed again in backward."""
    layers = network(fused)
    again = kept_for_backward(layers[:1], sequence, batch, False) if checkpointed else 0
    return kept_for_backward(layers, sequence, batch, checkpointed), again


def trained(fused: bool) -> tuple[nn.ModuleList, torch.optim.Adam]:
    """The network after a step of Adam, which so has its state; the gradients are still there."""
    layers = network(fused)
    optimizer = torch.optim.Adam(layers.parameters())
    forward(layers, 2, 1).mean().backward()
    optimizer.step()
    return layers, optimizer


def adams(optimizer: torch.optim.Adam) -> list[torch.Tensor]:
    return [value for each in optimizer.state.values() for value in each.values()]


@cache
def counted_state() -> dict[str, int]:
    """Bytes of the network's parameters, gradients and Adam's state."""
    layers, optimizer = trained(True)
    return {"parameters": sum(tensor.nbytes for tensor in layers.parameters()),
            "gradients": sum(tensor.grad.nbytes for tensor in layers.parameters()),
            "optimizer state": sum(tensor.nbytes for tensor in adams(optimizer))}


def draw_activations(activations: Callable, sequence: int, batch: int) -> Picture:
    """The network's MB: activations(sequence, batch, fused, checkpointed), and as counted; below, its model state."""
    groups = {}
    for way, flags in WAYS.items():
        groups[way] = {}
        for name, found in (("formula", activations), ("counted", counted_activations)):
            after, again = found(sequence, batch, *flags)
            parts = {role: size / 1e6 for role, size in (counted_state() | {"activations": after}).items()}
            groups[way][name] = parts, again / 1e6
    return pairs(groups, "MB", ".0f", "a layer again, in backward", "activations")


# Memory over one step

PHASES = {"forward": 1.0, "backward": 2.0, "optimizer": 1.2}  # how wide each is drawn


class Watch(TorchDispatchMode):
    """Looks after each operation of PyTorch what is held by role; what is no model state counts as activations.

    Adam has its state already. A storage is there until the last tensor that uses it is gone.
    """

    def __init__(self, layers: nn.ModuleList, optimizer: torch.optim.Optimizer):
        super().__init__()
        self.parameters = list(layers.parameters())
        self.fixed = {storage(tensor)[0] for tensor in (*self.parameters, *adams(optimizer))}
        self.state = {role: counted_state()[role] for role in ("parameters", "optimizer state")}
        self.alive, self.samples, self.phase = {}, [], ""

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
        self.samples.append({"phase": self.phase, **self.state, "gradients": gradients, "activations": others})


@cache
def step(sequence: int, batch: int, fused: bool, checkpointed: bool) -> pandas.DataFrame:
    """What is held after each operation of a step, a row each: MB by role, and the phase as the index."""
    layers, optimizer = trained(fused)
    optimizer.zero_grad()
    with Watch(layers, optimizer) as watch:
        watch.phase = "forward"
        loss = forward(layers, sequence, batch, checkpointed).square().mean()
        watch.phase = "backward"
        loss.backward()
        watch.phase = "optimizer"
        optimizer.step()
    return pandas.DataFrame(watch.samples).set_index("phase") / 1e6


def draw_step(sequence: int, batch: int, attention: str) -> Picture:
    """MB held over one step of the network by role, without and with activation checkpointing."""
    figure, axes = picture(3.9, 1, 2, sharey=True)
    edges = list(accumulate(PHASES.values(), initial=0))
    for axis, checkpointed in zip(axes, (False, True)):
        found = step(sequence, batch, attention == "fused", checkpointed)
        places = []
        for start, (phase, width) in zip(edges, PHASES.items()):
            samples = (found.index == phase).sum()
            places += [start + width * (number + 1) / samples for number in range(samples)]
        axis.stackplot(places, found.to_numpy().T, colors=[ROLES[role] for role in found], labels=found,
                       step="post", lw=0)
        axis.vlines(edges[1:-1], 0, 1, transform=axis.get_xaxis_transform(), color="white", lw=1.5)
        peak = found.sum(axis=1).max()
        axis.axhline(peak, color=MEASURED, lw=1.5, ls="--")
        axis.text(edges[-1], peak, f"peak {peak:.0f} MB", ha="right", va="bottom")
        axis.set_xticks([(left + right) / 2 for left, right in zip(edges, edges[1:])], PHASES)
        axis.tick_params(axis="x", length=0)
        axis.set(xlim=(0, edges[-1]), title=f"{attention}, {'with' if checkpointed else 'without'} checkpointing")
    axes[0].set(ylabel="MB held", ylim=(0, 1.15 * axes[0].get_ylim()[1]))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


# What fits

def draw_rows(table: pandas.DataFrame, xlabel: str, number: str, room: float = 0) -> Picture:
    """A bar for each row, stacked by role (the columns), with its sum; a dashed line at `room`, if there is one."""
    figure, axis = picture(0.6 * len(table) + 1.5)
    left = 0
    for role in table:  # pandas' own plot imports pyplot, which in a kernel takes over how all figures are shown
        look = {"color": ROLES[role]} if role in ROLES else {"edgecolor": ROLES["activations"], **HATCH}
        axis.barh(table.index, table[role], 0.65, left, label=role, **look)
        left = left + table[role]
    for place, size in enumerate(left):
        axis.annotate(f"{size:{number}}", (size, place), (6, 0), textcoords="offset points", va="center",
                      weight="bold", bbox={"color": "white", "pad": 0})
    if room:
        axis.axvline(room, color=MEASURED, ls="--", lw=1.5, zorder=1)
        axis.text(room, -0.5, f"room: {room:.0f}", ha="center", va="bottom")
    axis.set(xlabel=xlabel, xlim=(0, 1.25 * max(left.max(), room)), ylim=(len(table) - 0.5, -0.5))
    figure.legend(loc="outside upper center", ncols=4 if len(table.columns) == 4 else 3)
    return figure


def draw_ranks(held: Callable, ranks_needed: Callable, parameters: float, room: float) -> Picture:
    """GB of model state on a rank by the number of ranks, for each stage; a dot from where on `room` is enough."""
    figure, axis = picture(3.9)
    numbers = [2 ** (power / 4) for power in range(41)]
    axis.axhspan(room / 1e9, 1e6, color=ABSENT, lw=0)
    axis.axhline(room / 1e9, color=MEASURED, ls="--", lw=1.5)
    for stage, color in enumerate(STAGES):
        needed = ranks_needed(parameters, room, stage)
        label = f"stage {stage}: " + (f"fits from {needed:,} rank(s) on" if needed else "fits on no number of ranks")
        axis.plot(numbers, [parameters * sum(held(stage, ranks).values()) / 1e9 for ranks in numbers], color=color,
                  lw=3.5, label=label)
        if needed:
            axis.plot(needed, parameters * sum(held(stage, needed).values()) / 1e9, "o", color=MEASURED, ms=10)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([4**power for power in range(6)], [4**power for power in range(6)])
    axis.yaxis.set_major_formatter("{x:g}")
    highest = max(3 * parameters * sum(held(0, 1).values()), 3 * room) / 1e9
    axis.set(xlim=(1, 1024), ylim=(room / 3e10, highest), xlabel="ranks", ylabel="GB on a rank")
    axis.annotate(f"room: {room / 1e9:.0f} GB", (1024, room / 1e9), (-6, 5), ha="right", textcoords="offset points",
                  bbox={"color": ABSENT, "pad": 0})
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def draw_grid(stages: pandas.DataFrame, title: str) -> Picture:
    """The lowest stage that fits, for each model (rows) and GPU (columns); missing: none does."""
    figure, axis = picture(3.7)
    for y, row in enumerate(stages.to_numpy(float)):
        for x, stage in enumerate(row):
            none = stage != stage
            axis.barh(y, 0.94, 0.88, x - 0.47, color="white" if none else STAGES[int(stage)], edgecolor="#BDBDBD")
            axis.text(x, y, "no" if none else f"stage {stage:.0f}", ha="center", va="center",
                      color="white" if stage >= 2 else "black")
    axis.set_xticks(range(stages.shape[1]), stages.columns)
    axis.set_yticks(range(stages.shape[0]), stages.index)
    axis.set(title=title, ylim=(stages.shape[0] - 0.5, -0.5))
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return figure


# Counted live

def counted(results: str, printed: list[str]) -> pandas.DataFrame:
    """Bytes by role that each rank of a run has counted, and those of the formula: a row each, from the run's record.

    Where there is none, it prints what the run printed last, and takes a record of chapter 5.
    """
    try:
        record = json.loads(Path(results).read_text())
    except FileNotFoundError:
        print(*printed[-3:], "No ranks have counted here. A larger network's record, stage 3 on two ranks:", sep="\n")
        record = counted_stages(2)[3]
    rows = {f"rank {rank}": found for rank, found in enumerate(record["memory"])}
    table = pandas.DataFrame({**rows, "formula": record["memory_formula"]}).T
    return table[[*STATE, "peak parameters", "peak gradients"]].astype(int)
