"""agree.py against trainings with one mistake each, and against good ones, on two real ranks."""

import re
import sys

import agree_verdicts as verdicts
import forked
import pytest
from conftest import BIN, ROOT, copy_of, environment, execute, skip_without

AGREE = ROOT / "submit" / "agree.py"
NOTHING = "nothing wrong was found"
QUICK = (re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / "your_script_ddp.py").read_text(), re.S).group(),
         "num_workers=0)")

# Changes to chapter 3's your_script_ddp.py.
SAMPLER = "sampler=sampler,  # DDP: instead of shuffle=True"
BARE = ("ddp = nn.parallel.DistributedDataParallel(model)  # DDP: without device_ids, see set_device", "ddp = model")
STEP = "            optimizer.step()\n"
EACH = "            for parameter in model.parameters():\n"
REDUCE = "                torch.distributed.all_reduce(parameter.grad)\n"
DIVIDE = "                parameter.grad /= world_size\n"
BY_HAND = EACH + REDUCE + DIVIDE
TOLD = "            loss_sum += loss.item()"
SEED = "torch.manual_seed(0)"
BY_RANK = "torch.manual_seed(rank)"
MOMENTUM = "    for epoch in range(5):\n"
# Changes to stream.py.
LOSS = "nn.functional.mse_loss(model(inputs), targets)"
MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))"

CASES = {  # file: {name: (changes, the verdict)}
    "your_script_ddp": {
        "no wrapper": ([BARE], "own gradients"),
        "the wrapper is by-passed": ([("ddp(images)", "model(images)")], "own gradients"),
        "no sampler": ([(SAMPLER, "shuffle=True,")], "same data"),
        "no sampler, a seed a rank": (
            [(SEED, BY_RANK), (SAMPLER, "shuffle=True,"), ("model = nn", f"{SEED}\n    model = nn"),
             (MOMENTUM, f"    {BY_RANK}\n{MOMENTUM}")], "overlap"),
        "each rank splits in its own way": ([(SEED, BY_RANK)], "overlap"),
        "a sampler for one rank": ([("DistributedSampler(train,", "DistributedSampler(train, num_replicas=1, rank=0,")],
                                   "sampler"),
        "one epoch needs no set_epoch": ([("sampler.set_epoch(epoch)", "pass"), ("range(5)", "range(1)")], NOTHING),
        "set_epoch is forgotten": ([("sampler.set_epoch(epoch)", "pass")], "order"),
        "a sum by hand": ([BARE, (STEP, EACH + REDUCE + STEP)], "sum"),
        "averaged twice": ([(STEP, EACH + DIVIDE + STEP)], "twice"),
        "nobody broadcasts": ([BARE, (STEP, BY_HAND + STEP), ("    train, test = load()\n",
                                                              f"    train, test = load()\n    {BY_RANK}\n")],
                              "weights"),
        "gradients are broadcast": (
            [BARE, (STEP, EACH + "                torch.distributed.broadcast(parameter.grad, 0)\n" + STEP)],
            "one rank's"),
        "a layer is forgotten": (
            [BARE, (STEP, BY_HAND.replace("model.parameters()", "list(model.parameters())[:-2]") + STEP)], "part"),
        "a rate a rank": ([("lr=0.05", "lr=0.05 * (1 + rank)")], "rates"),
        "noise on the weights": (
            [(TOLD, f"{TOLD}\n            model[0].weight.data += rank * torch.randn_like(model[0].weight)")], "apart"),
        "unequal shares": ([("batch_size=64 // world_size", "batch_size=32 if rank else 48")], "batches"),
        "clipped by each rank": (
            [BARE, (STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (rank + 1))\n"
                    + BY_HAND + STEP)], "other gradients"),
        "clipped by a limit a rank": (
            [(STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (rank + 1))\n" + STEP)],
            "other gradients"),
        "rank 0 alone waits": (
            [(TOLD, f"{TOLD}\n            if rank == 0:\n                torch.distributed.barrier()")], "hang"),
        "by hand": ([BARE, (STEP, BY_HAND + STEP)], NOTHING),
        "clipped": ([(STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP)], NOTHING)},
    "by_horovod": {
        "as it is": ([], NOTHING),
        "not Horovod's optimizer": (
            [("optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n", "")],
            "own gradients"),
        "op=Sum, which Adam hides": (
            [("model.named_parameters())\nfor", "model.named_parameters(), op=hvd.Sum)\nfor")], "sum")},
    "by_mpi": {"as it is": ([], NOTHING), "no division": ([(" / ranks", "")], "sum")},
    "by_fsdp": {
        "as it is": ([], NOTHING),
        "a layer is no shard": ([("in model:", "in model[:1]:"), ("fully_shard(model)\n", "")], "part")},
    "by_deepspeed": {
        "as it is": ([], NOTHING),
        "its_own_loader, as it comes": ([("        loader.data_sampler.set_epoch(epoch)  # DeepSpeed does not\n", "")],
                                        "order")},
    "accumulation": {"no_sync stays on": ([("if last else", "if False else")], "own gradients")},
    "stream": {
        "as it is": ([], NOTHING),
        "all take all samples": ([("range(self.rank, 512, self.ranks)", "range(512)")], "same data"),
        "two optimizers, one unknown to DDP": (
            [("schedule =", "other = nn.Linear(1, 1)\nsecond = torch.optim.SGD(other.parameters(), lr=0.01)\n"
              "schedule ="), (LOSS, LOSS.replace("model(inputs)", "other(model(inputs))")),
             ("    schedule.step()", "    second.step()\n    second.zero_grad()\n    schedule.step()")],
            "own gradients"),
        "clipped by about a half, in bf16": (
            [(MODEL, f"{MODEL}.bfloat16()"), (LOSS, LOSS.replace("inputs)", "inputs.bfloat16()).float()")),
             ("    optimizer.step()\n", "    for parameter in model.parameters():\n"
              "        parameter.grad *= 0.45 + 0.02 * schedule.last_epoch\n    optimizer.step()\n")], NOTHING),
        "another call on one rank": (
            [("    optimizer.step()\n", "    optimizer.step()\n    if dist.get_rank():\n        dist.barrier()\n"
              "    dist.all_reduce(torch.ones(1))\n")], "sequence"),
        "it asks nobody": ([('dist.init_process_group("gloo")\n', ""), ("DDP(nn.Seq", "(nn.Seq"),
                            ("dist.get_rank(), dist.get_world_size()", "0, 1"), ("dist.destroy_process_group()\n", "")],
                           "alone")},
}


def changed(file, changes, tmp_path):
    """A copy of a training with these changes."""
    if file == "your_script_ddp":
        return copy_of("03_ddp", tmp_path, QUICK, *changes, name="your_script_ddp.py")
    return copy_of("tests/programs/trainings", tmp_path, *changes, name=f"{file}.py")


def watched(script, *flags, timeout=30):
    """What agree.py says of a script on two ranks."""
    words = [AGREE, "--timeout", timeout, *flags, script]
    if script.stem == "by_mpi":
        return execute([BIN / "mpiexec", "-n", 2, sys.executable, *words], timeout=90)
    return forked.run(words, 2, environment(), timeout=90)


@pytest.mark.parametrize(("file", "name"), [
    pytest.param(file, name, marks=[*[skip_without("02_horovod")] * (file == "by_horovod"),
                                    *[pytest.mark.core] * (file in ("by_horovod", "by_fsdp"))])
    for file, cases in CASES.items() for name in cases])
def test_each_training_has_its_verdict(file, name, tmp_path):
    changes, expected = CASES[file][name]
    wait = 12 if expected in ("hang", "sequence") else 30  # seconds: on a busy machine the ranks meet slowly, too
    done = watched(changed(file, changes, tmp_path), timeout=wait)
    wrong = re.findall("^WRONG: (.*)", done.out, re.M)
    if expected == NOTHING:
        assert done.code == 0 and not wrong and f"verdict: {NOTHING}\n" in done.out, done.out + done.err
        assert re.search("gradients the optimizer takes +(the|their) mean", done.out), done.out  # they were seen
    else:
        assert done.code == 1 and f"verdict: wrong: {expected}\n" in done.out, done.out + done.err
        assert len(wrong) == 1 and wrong[0].startswith(f"{expected}: {verdicts.FINDINGS[expected].symptom}")
    if expected == "hang":
        assert re.search(r"your_script_ddp\.py:\d+.*: rank 0", wrong[0])


@pytest.mark.parametrize(("file", "changes", "notes"), [
    ("accumulation", [("torch.manual_seed(1 + rank)\n", "")],
     ["all ranks draw the same random numbers.*dropout", "buffers differ", "a factor beside"]),
    ("accumulation", [("torch.manual_seed(0)\n", "torch.manual_seed(rank)\n")], ["each rank has another data set"]),
    ("stream", [("batch_size=16", "batch_size=16 - dist.get_rank()")], ["batches are of unequal size.*16, 15"])],
    ids=["random, buffers, scaled", "other data", "batch"])
def test_a_note_is_no_mistake(file, changes, notes, tmp_path):
    done = watched(changed(file, changes, tmp_path))
    assert f"verdict: {NOTHING}\n" in done.out, done.out + done.err
    assert all(re.search(f"^note: .*{note}", done.out, re.M) for note in notes), done.out


def report(**other):
    """What a rank has seen of a training of one step in which nothing is wrong."""
    step = {"local": {"w": [1.0, 2.0, 3.0]}, "final": {"w": [1.0, 2.0, 3.0]}, "rates": [0.1],
            "after": {"parameters": {"w": 1}, "buffers": {}}}
    return {"host": "a", "cores": [0, 1], "threads": 1, "device": "cuda:0", "gpu": "x", "current": "cuda:0",
            "met": True, "half": False, "hook": "", "joins": False, "wrappers": ["DDP"], "shards": [], "parts": [],
            "loaders": {}, "rows": [], "loaded": [],
            "random": {"torch": 1, "draws": ""}, "before": {"parameters": {"w": 0}}, "steps": [step]} | other


@pytest.mark.check
@pytest.mark.parametrize(("others", "expected"), [
    ({"gpu": "y"}, set()), ({}, {"one GPU"}), ({"host": "b"}, set()),
    ({"gpu": "y", "current": "cuda:1"}, {"other GPU"}),
    ({"gpu": None, "device": "cpu", "current": None, "threads": 2}, {"threads"}),
    ({"gpu": None, "device": "cpu", "current": None, "cores": [0]}, {"cores"})])
def test_devices(others, expected):
    """Without a GPU here: by reports as two ranks would give them."""
    both = {key: others[key] for key in ("device", "gpu", "current", "cores") if others.get("device") == "cpu"
            and key in others}
    assert verdicts.judge([report(**both), report(**others)])[1].keys() == expected


@pytest.mark.check
@pytest.mark.parametrize(("drawn", "like", "holds", "expected"), [
    ([range(50), range(50)], "ab", True, set()), ([range(50), range(50)], "aa", False, {"numbers"}),
    ([[*range(50), 0, 1, 2], [*range(50, 100), 3, 4, 5]], "aa", True, set())],
    ids=["own data", "made up", "padded"])
def test_items(drawn, like, holds, expected):
    loaders = [{"batches": 5, "items": 100, "like": kind, "holds": holds, "whole": False, "again": False,
                "epochs": [list(items)]} for kind, items in zip(like, drawn)]
    assert verdicts.judge_loader(loaders)[1].keys() == expected


def test_the_same_losses_with_and_without(tmp_path):
    """And weights: the training is not changed."""
    told = [(TOLD, f"{TOLD}\n            print(rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item())")]
    script = changed("your_script_ddp", told, tmp_path)
    plain = forked.run([script], 2, environment(), timeout=90, cwd=tmp_path)  # it saves digits.pt
    seen = watched(script, "--steps", 6)
    for rank in "01":
        with_it, without = ([line for line in done.out.splitlines() if line.startswith(f"{rank} ")]
                            for done in (seen, plain))
        assert len(with_it) >= 5 and with_it == without[:len(with_it)]
    assert "2 ranks on 1 node, 6 steps; DDP" in seen.out


def test_workers_that_stay_begin_a_new_epoch():
    """More steps than an epoch has: its items are drawn by the other rank in the next."""
    done = watched(ROOT / "03_ddp" / "your_script_ddp.py", "--steps", 30)
    assert f"verdict: {NOTHING}\n" in done.out, done.out + done.err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun", "deepspeed",
                                      pytest.param("horovodrun", marks=skip_without("02_horovod"))])
def test_under_each_launcher(launcher, tmp_path):
    words = {"mpiexec": [BIN / "mpiexec", "-n", 2, sys.executable],
             "torchrun": [BIN / "torchrun", "--nproc-per-node", 2],
             "horovodrun": [BIN / "horovodrun", "--gloo", "-np", 2, sys.executable],
             "deepspeed": [BIN / "deepspeed", "--num_gpus", 2, "--master_port", forked.free_port()]}[launcher]
    file = {"horovodrun": "by_horovod", "deepspeed": "by_deepspeed"}.get(launcher)
    script = changed(file, [], tmp_path) if file else ROOT / "03_ddp" / "your_script_ddp.py"
    done = execute([*words, AGREE, script], timeout=120, cwd=tmp_path)
    assert done.code == 0 and done.out.count(f"verdict: {NOTHING}") == 1, done.out + done.err
    assert "leaked" not in done.err  # of the script's worker processes
    assert "digits.pt" not in [path.name for path in tmp_path.iterdir()]


@pytest.mark.fault
@pytest.mark.parametrize(("name", "text", "said"), [
    ("mine.py", "print('no training here')\n", "ended before a step of a PyTorch optimizer"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n    raise ValueError('a bad\\nimage')\n",
     "rank 1 ended with ValueError: a bad$"),
    ("mine.ipynb", "{}", r"mine\.ipynb is a notebook: make a script ")],
    ids=["no step", "dies", "a notebook"])
def test_what_cannot_be_looked_at(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    done = forked.run([AGREE, tmp_path / name], 2, environment(), timeout=90)
    spoken = [line for line in done.err.splitlines() if line.startswith("agree.py: ")]
    assert done.code == 2 and len(spoken) == 1 and re.search(said, spoken[0]), done.out + done.err


def test_a_finding_is_explained():
    done = forked.run([AGREE, "--explain", "sum"], 1, environment(), timeout=60)
    assert done.code == 0 and done.out.strip() == verdicts.explain("sum")
