"""Run a learner's script on ranks, as its launcher would, under the eyes of submit/agree.py's watch."""

import io
import os
import pickle
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import sklearn.datasets  # noqa: F401  this and the next: once, before the ranks are forked
import torch
import torch._dynamo  # which optimizers import
import torch.distributed as dist
from runner import on_ranks, same
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook

sys.path.append(str(Path(__file__).resolve().parent.parent / "submit"))
import agree_verdicts
from agree_watch import Watch

ALL_STEPS = 10**9  # are watched
GRADIENTS = {"own gradients", "sum", "twice", "one rank's", "part", "scaled", "other gradients"}  # findings on them
Points = Iterator[tuple[str, bool, str]]  # what is asked, whether it is right, the hint if not


def by_torchrun(file: Path, ranks: int) -> list[dict]:
    """Per rank what its run of the script did, started as torchrun does: see watched()."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, none of the ranks
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
              "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "exercise"}
    variables = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        return run_script(file, variables, [folder] * ranks)


def run_script(file: Path, variables: list[dict], folders: list[Path]) -> list[dict]:
    """Per rank what its run of the script did, with these variables and in this folder: see watched()."""
    def on_rank(rank):
        os.environ.update({name: str(value) for name, value in variables[rank].items()})
        os.chdir(folders[rank])
        sys.argv = [str(file)]
        sys.path.insert(0, str(file.parent))
        return watched(file)
    return on_ranks(file, on_rank, len(variables), meet=False)


def watched(file):
    """What this rank does in a script: the report that agree.py judges, and what only an exercise asks for.

    That is the batches, the names of the collectives in turn, the lines printed, the bytes of each file saved, and the
    parameters at start and end.
    """
    watch, save, models = Watch(ALL_STEPS, lambda: None), torch.save, []
    found = {"report": watch.record, "batches": [], "printed": [], "saved": [], "start": {}}

    def enter(module, args):
        """The first module that is called in training is the model, wrapper and all, and what it is given a batch."""
        if module.training and torch.is_grad_enabled():
            if not models:
                models.append(module)
                found["start"] = parameters(module)
            if module is models[0]:
                found["batches"].append(args[0].detach().clone())

    def note_line(*words, **how):
        found["printed"].append(" ".join(map(str, words)))
        print(*words, **how)

    def note_file(content, place, *args, **how):
        if isinstance(place, (str, Path)):
            memory = io.BytesIO()
            save(content, memory)
            found["saved"].append(memory.getvalue())
        save(content, place, *args, **how)
    watch.install()
    register_module_forward_pre_hook(enter)
    torch.save = note_file
    dist.destroy_process_group = lambda *_: None  # gloo may abort if it goes before DDP; the rank is about to end
    try:
        runpy.run_path(str(file), {"print": note_line}, "__main__")
    except SystemExit as end:
        if end.code:
            raise
    watch.record["steps"] = [step for step in watch.record["steps"] if step["local"]]
    calls = [call.split(" at ")[0] for call in watch.calls]
    return found | {"calls": calls, "end": parameters(models[0]) if models else {}}


def parameters(model):
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}


def same_parameters(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in other)


def read(saved: bytes) -> object:
    """What torch.save has written; None if it is more than tensors, numbers and the like: a whole model, say."""
    try:
        return torch.load(io.BytesIO(saved), weights_only=True)
    except pickle.UnpicklingError:
        return None


def findings(ranks: list[dict]) -> dict[str, str]:
    """agree.py's, of the ranks' reports: {name: where}."""
    reports = [rank["report"] for rank in ranks]
    return agree_verdicts.judge(reports)[1] if all(report["steps"] for report in reports) else {}


def replay(reference: ModuleType, start: dict, batches: list, state: dict | None = None) -> list[dict]:
    """The parameters after each epoch of one rank whose batches are those of all ranks together.

    batches: those of each rank, in the order of the steps; their labels are found in the reference's data by the
    images. state: of the optimizer.
    """
    model, (train, _) = reference.build_model(), reference.load_data()
    label_of = {image.numpy().tobytes(): label for image, label in zip(*train.tensors)}
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), reference.RATE, reference.MOMENTUM)
    if state:
        optimizer.load_state_dict(state)
    after, steps = [], len(train) // reference.BATCH
    for number, parts in enumerate(zip(*batches), 1):
        batch = torch.cat(parts)
        optimizer.zero_grad()
        cross_entropy(model(batch), torch.stack([label_of[image.numpy().tobytes()] for image in batch])).backward()
        optimizer.step()
        if number % steps == 0:
            after.append(parameters(model))
    return after


# What exercises 3 and 4 both ask; `reference` is the solution's module.

def points_of_data(ranks: list[dict], found: dict, reference: ModuleType, meeting: str, asked: str) -> Points:
    """meeting: the call by which ranks meet; asked: what tells the sampler number and ranks."""
    yield "each rank trains", all(rank["report"]["steps"] for rank in ranks), (
        "a rank has ended without an optimizer step: is main() called, to its end?")
    yield f"the {len(ranks)} ranks have met", all(rank["report"]["met"] for rank in ranks), (
        f"each rank believes that it is alone, and trains alone: all have to call {meeting} first")
    yield "each rank trains on images of its own", not found.keys() & {"same data", "overlap", "sampler"}, (
        "the loader of each rank goes through all images, or its sampler deals for others: a DistributedSampler deals "
        f"them out, in place of shuffle=True; {asked}")
    sizes = [len(rank["batches"][0]) for rank in ranks]
    yield f"a step takes {reference.BATCH} images, of all ranks together", sum(sizes) == reference.BATCH, (
        f"it takes {' + '.join(map(str, sizes))} = {sum(sizes)}: what a rank's loader is given is its share of them")


def points_of_training(ranks: list[dict], reference: ModuleType, hint: str, state: dict | None = None) -> Points:
    """hint: what may differ from one rank's training; state: of its optimizer at the start."""
    (train, test), batches = reference.load_data(), [rank["batches"] for rank in ranks]
    steps = len(train) // reference.BATCH
    yield f"{reference.EPOCHS} epochs of {steps} steps", all(
        len(of_rank) == reference.EPOCHS * steps for of_rank in batches), (
        f"there are {len(batches[0])} steps on rank 0: epochs and global batch are to stay as they were")
    first, last = torch.cat(batches[0][:steps]), torch.cat(batches[0][-steps:])
    yield "each epoch has another order", not torch.equal(first, last), (
        "each epoch has the same order: the sampler shuffles by its seed and the number of the epoch, and was not told "
        "it")
    end = replay(reference, ranks[0]["start"], batches, state)[-1]
    yield "the training ends where one rank with these batches ends, to rounding", all(
        same_parameters(rank["end"], end) for rank in ranks), f"one rank ends elsewhere: {hint}"

    saving = [number for number, rank in enumerate(ranks) for _ in rank["saved"]]
    yield "one rank saves, once", len(saving) == 1, (
        f"torch.save is called {len(saving)} times, on ranks {saving}: ranks that write one file at the same time may "
        "spoil it")
    content = read(ranks[saving[0]]["saved"][0])
    yield "what is saved loads into the plain model: its own names, the last parameters", (
        isinstance(content, dict) and same_parameters(content, end)), (
        'it is no state_dict of the plain model at the end; in the wrapper\'s every name begins with "module."')

    counts, wanted = [len(rank["printed"]) for rank in ranks], reference.EPOCHS + 1
    yield "one rank prints, each line once", sum(counts) == max(counts) == wanted, (
        f"ranks print {' and '.join(map(str, counts))} lines, and one rank alone would print {wanted}")
    model, (images, labels) = reference.build_model(), test.tensors
    model.load_state_dict(end)
    accuracy = f"{(model(images).argmax(1) == labels).double().mean().item():.4f}"
    said = next(rank["printed"][-1] for rank in ranks if rank["printed"])
    yield "the accuracy that is printed is that of all test images", accuracy in said, (
        f"all {len(labels)} together have {accuracy}, and the last line is: {said}")
