"""Run a learner's script on ranks, as its launcher would, and write down what each of them does."""

import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo  # which optimizers import: once, before the ranks are forked
import torch.distributed as dist
from runner import counted, on_ranks
from torch.nn.functional import cross_entropy
from torch.nn.modules import module as modules

sys.path.append(str(Path(__file__).resolve().parent.parent / "submit"))
import agree_verdicts
from agree_watch import Watch

ALL_STEPS = 10**9  # are watched
Point = tuple[str, bool, str]  # what is asked, whether it is right, the hint if not


def ranks_met():
    return dist.get_world_size() if dist.is_initialized() else 1


def torchruns_variables(ranks: int) -> tuple[list[dict], dist.TCPStore]:
    """What torchrun sets for each rank, and the store at which they meet: as torchrun's, it is none of the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
              "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "exercise"}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)], store


def run_script(file: Path, places: list[dict], folders: list[Path], world: Callable[[], int] = ranks_met) -> list[dict]:
    """Per rank what its run of the script did, with these variables and in this folder: see Seen.facts().

    world() is the number of ranks that the script knows of.
    """
    def on_rank(rank):
        calls = counted()
        os.environ.update({name: str(value) for name, value in places[rank].items()})
        os.chdir(folders[rank])
        sys.argv = [str(file)]
        sys.path.insert(0, str(file.parent))
        seen = Seen(world)
        try:
            runpy.run_path(str(file), {"print": seen.print}, "__main__")
        except SystemExit as end:
            if end.code:
                raise
        return seen.facts() | {"calls": calls}
    return on_ranks(file, on_rank, len(places), meet=False)


class Seen:
    """What a rank's script does: agree.py's watch, and what only an exercise asks for."""

    def __init__(self, world):
        self.watch, self.world = Watch(ALL_STEPS, lambda: None), world
        self.watch.install()
        self.model, self.start, self.inside = None, {}, False
        self.found = {"batches": [], "printed": [], "saved": [], "wrapped": 0, "world": 1}
        modules.register_module_forward_pre_hook(self.enter)
        modules.register_module_forward_hook(self.leave, always_call=True)
        dist.destroy_process_group = lambda *_: None  # gloo may abort if it goes before DDP; the rank is about to end
        self.before(torch, "save", self.save)
        self.before(torch.nn.parallel.DistributedDataParallel, "__init__", self.wrap)

    @staticmethod
    def before(place, name, seen):
        original = getattr(place, name)

        def call(*args, **kwargs):
            seen(*args)
            return original(*args, **kwargs)
        setattr(place, name, call)

    def enter(self, module, args):
        """The outermost module that is called in training is the model, and what it is given a batch."""
        if self.inside or not module.training or not torch.is_grad_enabled():
            return
        self.inside = module
        if self.model is None:
            self.model, self.found["start"] = module, parameters(module)
            self.found["world"] = self.world()
        self.found["batches"].append(args[0].detach().clone())

    def leave(self, module, *_):
        if module is self.inside:
            self.inside = False

    def print(self, *words, **how):
        self.found["printed"].append(" ".join(map(str, words)))
        print(*words, **how)

    def save(self, content, path, *_):
        if isinstance(path, (str, Path)):
            self.found["saved"].append(str(Path(path).resolve()))

    def wrap(self, *_):
        self.found["wrapped"] += 1

    def facts(self):
        """batches, lines printed, files saved, parameters at start and end, and the report that agree.py judges."""
        report = self.watch.record
        report["steps"] = [step for step in report["steps"] if step["local"]]
        return self.found | {"report": report, "end": parameters(self.model) if self.model else {}}


def parameters(model):
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}


def findings(facts: list[dict]) -> dict[str, str]:
    """agree.py's, of the ranks' reports."""
    reports = [fact["report"] for fact in facts]
    if not all("before" in report and report["steps"] for report in reports):
        return {}
    return agree_verdicts.judge(reports)[1]


def replay(reference: ModuleType, start: dict, batches: list, rate: float, state: dict | None = None) -> list[dict]:
    """The parameters after each epoch of one rank whose batches are those of all ranks together.

    batches: those of each rank, in the order of the steps; their labels are found in the reference's data by the
    images. state: of the optimizer.
    """
    model, (train, _) = reference.build_model(), reference.load_data()
    label_of = {image.numpy().tobytes(): label for image, label in zip(*train.tensors)}
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), rate, reference.MOMENTUM)
    for number, parameter in enumerate(model.parameters()):
        if state:
            optimizer.state[parameter]["momentum_buffer"] = state[number]["momentum_buffer"].clone()
    after, steps = [], len(train) // reference.BATCH
    for number, parts in enumerate(zip(*batches), 1):
        batch = torch.cat(parts)
        optimizer.zero_grad()
        cross_entropy(model(batch), torch.stack([label_of[image.numpy().tobytes()] for image in batch])).backward()
        optimizer.step()
        if number % steps == 0:
            after.append(parameters(model))
    return after


def same(one: dict, other: dict) -> bool:
    """Whether two dicts of parameters are the same but for rounding, in fp64."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-8, atol=1e-10) for name in one)


# What exercises 3 and 4 both ask; `reference` is the solution's module.

def global_batch(batches: list, reference: ModuleType) -> Point:
    sizes = [len(parts[0]) if parts else 0 for parts in batches]
    return f"a step takes {reference.BATCH} images, of all ranks together", sum(sizes) == reference.BATCH, (
        f"it takes {' + '.join(map(str, sizes))} = {sum(sizes)}: what a rank's loader is given is its share of them")


def order(batches: list, found: dict, reference: ModuleType) -> Point:
    steps = len(batches[0]) // reference.EPOCHS
    orders = [torch.cat(batches[0][epoch * steps:(epoch + 1) * steps]) for epoch in range(reference.EPOCHS)]
    return "each epoch has another order", "order" not in found and not torch.equal(*orders), (
        "the sampler shuffles by its seed and the number of the epoch, and was not told it: each epoch has the "
        "same order")


def training(ranks: list[dict], reference: ModuleType, state: dict | None = None) -> Point:
    """Whether the whole training is that of one rank with the same images in each step. state: of its optimizer."""
    train, _ = reference.load_data()
    batches, steps = [rank["batches"] for rank in ranks], len(train) // reference.BATCH * reference.EPOCHS
    hint = ("in the same steps one rank comes elsewhere: are model, optimizer, learning rate and momentum what "
            "they were?")
    right = False
    if {len(parts) for parts in batches} != {steps}:
        hint = (f"{len(batches[0])} steps on rank 0, and one rank makes {steps}: epochs and global batch are to "
                "stay as they were")
    else:
        def by_one_rank(factor, state):
            return replay(reference, ranks[0]["start"], batches, factor * reference.RATE, state)[-1]
        end = by_one_rank(1, state)
        right = all(same(rank["end"], end) for rank in ranks)
        if state and not right and same(ranks[0]["end"], by_one_rank(1, None)):
            hint = ("the momentum of start.pt is lost: hvd.DistributedOptimizer makes a new optimizer out of the one "
                    "that it is given, and takes its parameters and rates, not its state")
        elif not right and same(ranks[0]["end"], by_one_rank(len(ranks), state)):
            hint = (f"the learning rate is {len(ranks)} times what it was: that belongs to {len(ranks)} times the "
                    "global batch, and the global batch is the same")
    return "the training ends where one rank with these batches ends, to rounding", right, hint


def contents(facts: list[dict]) -> list:
    """What lies in the files that were saved."""
    return [torch.load(path, weights_only=False) for path in sorted({path for fact in facts for path in fact["saved"]})]


def checkpoint(ranks: list[dict], files: list) -> Iterator[Point]:
    saving = [number for number, rank in enumerate(ranks) if rank["saved"]]
    yield "one rank saves, once", len(saving) == 1 and len(ranks[saving[0]]["saved"]) == 1, (
        "nothing is saved by torch.save" if not saving else
        f"ranks {' and '.join(map(str, saving))} all save: they write one file at the same time, and it may be spoilt"
        if len(saving) > 1 else f"rank {saving[0]} saves {len(ranks[saving[0]]['saved'])} times")
    names, end = set(files[0]), ranks[0]["end"]
    yield "what is saved loads into the plain model: its own names, the last parameters", (
        names == set(end) and same(files[0], end)), (
        "every name begins with \"module.\": that is the wrapper's state_dict, and the plain model does not load it"
        if all(name.startswith("module.") for name in names) else
        f"the names are {', '.join(sorted(names))}" if names != set(end) else "these are not the parameters at the end")


def lines(ranks: list[dict], reference: ModuleType) -> Iterator[Point]:
    counts = [len(rank["printed"]) for rank in ranks]
    wanted = reference.EPOCHS + 1
    yield "one rank prints, each line once", sum(counts) == wanted == max(counts), (
        f"ranks print {' and '.join(map(str, counts))} lines, and one rank alone would print {wanted}")
    said = next(rank["printed"][-1] for rank in ranks if rank["printed"])
    model, (images, labels) = reference.build_model(), reference.load_data()[1].tensors
    model.load_state_dict(ranks[0]["end"])
    accuracy = (model(images).argmax(1) == labels).double().mean().item()
    numbers = re.findall(r"\d+\.\d+", said)
    yield "the accuracy that is printed is that of all test images", numbers[-1:] == [f"{accuracy:.4f}"], (
        f"all {len(labels)} together have {accuracy:.4f}, and the last line is: {said}")
