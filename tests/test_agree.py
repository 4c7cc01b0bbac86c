"""agree.py against trainings with one mistake each, and against good ones, on two real ranks."""

import json
import re
import sys

import agree_verdicts as verdicts
import forked
import pytest
from conftest import BIN, ROOT, copy_of, environment, execute, skip_without

AGREE = ROOT / "submit" / "agree.py"
TRAININGS = ROOT / "tests" / "programs" / "trainings"
NOTHING = "nothing wrong was found"
QUICK = (re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / "your_script_ddp.py").read_text(), re.S).group(),
         "num_workers=0)")

# Changes to chapter 3's your_script_ddp.py.
SAMPLER = "sampler=sampler,  # DDP: instead of shuffle=True"
BARE = ("ddp = nn.parallel.DistributedDataParallel(model)  # DDP: without device_ids, see set_device", "ddp = model")
FORWARD = "            loss = cross_entropy(ddp(images), labels)  # DDP: ddp, not model\n"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
TO_DEVICE = "            images, labels = images.to(device), labels.to(device)\n            optimizer.zero"
EACH = "            for parameter in model.parameters():\n"
REDUCE = "                torch.distributed.all_reduce(parameter.grad)\n"
DIVIDE = "                parameter.grad /= world_size\n"
BY_HAND = EACH + REDUCE + DIVIDE
TOLD = "            loss_sum += loss.item()"
SEED = "torch.manual_seed(0)"
BY_RANK = "torch.manual_seed(rank)"
SGD = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
MOMENTUM = "    for epoch in range(5):\n"
YOUR_SCRIPT = {  # name: (changes, the verdict)
    "no wrapper": ([BARE], "own gradients"),
    "the wrapper is by-passed": ([("ddp(images)", "model(images)")], "own gradients"),
    "no_sync in every step": (
        [(FORWARD + BACKWARD, "            with ddp.no_sync():\n    " + FORWARD + "    " + BACKWARD)], "own gradients"),
    "no sampler": ([(SAMPLER, "shuffle=True,")], "same data"),
    "no sampler, a seed a rank": (
        [(SEED, BY_RANK), (SAMPLER, "shuffle=True,"), ("model = nn", f"{SEED}\n    model = nn"),
         (MOMENTUM, f"    {BY_RANK}\n{MOMENTUM}")], "overlap"),
    "a sampler for one rank": ([("DistributedSampler(train,", "DistributedSampler(train, num_replicas=1, rank=0,")],
                               "sampler"),
    "one epoch needs no set_epoch": ([("sampler.set_epoch(epoch)", "pass"), ("range(5)", "range(1)")], NOTHING),
    "set_epoch is forgotten": ([("sampler.set_epoch(epoch)", "pass")], "order"),
    "a sum by hand": ([BARE, (STEP, EACH + REDUCE + STEP)], "sum"),
    "a sum by hand, under Adam": ([BARE, (STEP, EACH + REDUCE + STEP), (SGD, "torch.optim.Adam(model.parameters())")],
                                  "sum"),
    "averaged twice": ([(STEP, EACH + DIVIDE + STEP)], "twice"),
    "nobody broadcasts": ([BARE, (STEP, BY_HAND + STEP), ("    train, test = load()\n",
                                                          f"    train, test = load()\n    {BY_RANK}\n")], "weights"),
    "gradients are broadcast": (
        [BARE, (STEP, EACH + "                torch.distributed.broadcast(parameter.grad, 0)\n" + STEP)], "one rank's"),
    "a layer is forgotten": (
        [BARE, (STEP, BY_HAND.replace("model.parameters()", "list(model.parameters())[:-2]") + STEP)], "part"),
    "a rate a rank": ([("lr=0.05", "lr=0.05 * (1 + rank)")], "rates"),
    "noise on the weights": (
        [(TOLD, f"{TOLD}\n            model[0].weight.data += rank * torch.randn_like(model[0].weight)")], "apart"),
    "unequal shares": ([("batch_size=64 // world_size", "batch_size=32 if rank else 48")], "batches"),
    "clipped by each rank": (
        [BARE, (STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (rank + 1))\n" + BY_HAND + STEP)],
        "other gradients"),
    "a rank leaves the loop": (
        [(TO_DEVICE, "            if rank and loss_sum > 4:\n                break\n" + TO_DEVICE)], "hang"),
    "rank 0 alone waits": (
        [(TOLD, f"{TOLD}\n            if rank == 0:\n                torch.distributed.barrier()")], "hang"),
    "as it is": ([], NOTHING), "by hand": ([BARE, (STEP, BY_HAND + STEP)], NOTHING),
    "clipped": ([(STEP, "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP)], NOTHING),
    "Adam": ([(SGD, "torch.optim.Adam(model.parameters())")], NOTHING),
    "fp64": ([(".float()", ".double()"), ("10)).to(device)", "10)).double().to(device)")], NOTHING),
    "a hook that sends fp16": ([(SGD, f"{SGD}\n    from torch.distributed.algorithms.ddp_comm_hooks import "
                                 "default_hooks\n    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)")],
                               NOTHING),
}

# Changes to stream.py, and to others.
LOSS = "nn.functional.mse_loss(model(inputs), targets)"
MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))"
OTHERS = {  # the same of whole trainings in other styles: file: {name: (changes, the verdict)}
    "by_horovod": {
        "as it is": ([], NOTHING),
        "not Horovod's optimizer": (
            [("optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n", "")],
            "own gradients"),
        "op=Sum": ([("model.named_parameters())\nfor", "model.named_parameters(), op=hvd.Sum)\nfor")], "sum"),
        "nobody broadcasts": ([("hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", "")], "weights"),
        "each rank has its own data": ([("torch.manual_seed(0)", "torch.manual_seed(hvd.rank())"),
                                        ("sampler=sampler", "shuffle=True")], NOTHING),
        "a sampler for one rank": ([("num_replicas=hvd.size(), rank=hvd.rank()", "num_replicas=1, rank=0")],
                                   "sampler")},
    "by_mpi": {
        "as it is": ([], NOTHING), "no division": ([(" / ranks", "")], "sum"),
        "nobody broadcasts": ([("    comm.Bcast(parameter.data.numpy(), root=0)", "    pass")], "weights"),
        "all take all samples": ([("torch.arange(rank, 256, ranks)", "torch.arange(256)")], "same data")},
    "by_fsdp": {
        "as it is": ([], NOTHING), "no sampler": ([("sampler=sampler)", "shuffle=True)")], "same data"),
        "a layer is no shard": ([("in model:", "in model[:1]:"), ("fully_shard(model)\n", "")], "part")},
    "by_deepspeed": {
        "as it is": ([], NOTHING),
        "its_own_loader, as it comes": ([("        loader.data_sampler.set_epoch(epoch)  # DeepSpeed does not\n", "")],
                                        "order")},
    "two_networks": {
        "as it is": ([], NOTHING),
        "one has no wrapper": ([("DDP(nn.Linear(4, 8))", "nn.Linear(4, 8)")], "own gradients")},
    "accumulation": {
        "as it is": ([], NOTHING), "no_sync stays on": ([("if last else", "if False else")], "own gradients"),
        "the first micro-batch communicates": ([("if last else", "if number % MICRO_BATCHES == 0 else")],
                                               "other gradients")},
    "sharded_optimizer": {"as it is": ([], NOTHING), "no wrapper": ([("DDP(model)", "model")], "own gradients")},
    "stream": {
        "as it is": ([], NOTHING),
        "gradients are thrown away": (
            [("    optimizer.zero_grad()\n", f"    {LOSS}.backward()\n    optimizer.zero_grad()\n")], NOTHING),
        "two optimizers, one unknown to DDP": (
            [("schedule =", "other = nn.Linear(1, 1)\nsecond = torch.optim.SGD(other.parameters(), lr=0.01)\n"
              "schedule ="), (LOSS, LOSS.replace("model(inputs)", "other(model(inputs))")),
             ("    schedule.step()", "    second.step()\n    second.zero_grad()\n    schedule.step()")],
            "own gradients"),
        "frozen, and other on each rank": (
            [(f"DDP({MODEL})", f"{MODEL}\nmodel[0].requires_grad_(False)\nfrozen, model = model[0], DDP(model)\n"
              "frozen.weight.data += dist.get_rank()")], "weights"),
        "clipped by about a half, in bf16": (
            [(MODEL, f"{MODEL}.bfloat16()"), (LOSS, LOSS.replace("inputs)", "inputs.bfloat16()).float()")),
             ("    optimizer.step()\n", "    for parameter in model.parameters():\n"
              "        parameter.grad *= 0.45 + 0.02 * schedule.last_epoch\n    optimizer.step()\n")], NOTHING),
        "the first FSDP": (
            [("DDP(nn", "FullyShardedDataParallel(nn"), (f"{MODEL})", f"{MODEL}, device_id=torch.device('cpu'))"),
             ("import DistributedDataParallel as DDP", "import DistributedDataParallel\n"
              "from torch.distributed.fsdp import FullyShardedDataParallel")], NOTHING),
        "Join, and unequal shares": (
            [("self.rank, 512, self.ranks", "self.rank, 200 - 120 * self.rank, self.ranks"),
             ("for inputs, targets in", "from torch.distributed.algorithms.join import Join\nstack = Join([model])\n"
              "stack.__enter__()\nfor inputs, targets in"),
             ("dist.destroy_process_group()", "stack.__exit__(None, None, None)\ndist.destroy_process_group()")],
            NOTHING),
        "a closure": ([("    optimizer.zero_grad()\n    nn.functional.mse_loss(model(inputs), targets).backward()\n"
                        "    optimizer.step()\n",
                        "    def closure():\n        optimizer.zero_grad()\n        nn.functional.mse_loss("
                        "model(inputs), targets).backward()\n    optimizer.step(closure)\n")], NOTHING),
        "the wrapper is in eval mode": ([("schedule =", "model.training = False\nschedule =")], NOTHING),
        "all take all samples": ([("range(self.rank, 512, self.ranks)", "range(512)")], "same data"),
        "a rank has less": ([("range(self.rank, 512, self.ranks)", "range(512 - 448 * self.rank)")], "hang"),
        "another call on one rank": (
            [("    optimizer.step()\n", "    optimizer.step()\n    if dist.get_rank():\n        dist.barrier()\n"
              "    dist.all_reduce(torch.ones(1))\n")], "sequence"),
        "it asks nobody": ([('dist.init_process_group("gloo")\n', ""), ("DDP(nn.Seq", "(nn.Seq"),
                            ("dist.get_rank(), dist.get_world_size()", "0, 1"), ("dist.destroy_process_group()\n", "")],
                           "alone")},
}
CASES = [("your_script_ddp", name) for name in YOUR_SCRIPT] + [(file, name) for file in OTHERS for name in OTHERS[file]]


def changed(file, changes, tmp_path):
    """A copy of a training with these changes."""
    if file == "your_script_ddp":
        return copy_of("03_ddp", tmp_path, QUICK, *changes, name="your_script_ddp.py")
    text = (TRAININGS / f"{file}.py").read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = tmp_path / f"{file}.py"
    script.write_text(text)
    return script


def watched(script, *flags, timeout=30):
    """What agree.py says of a script on two ranks."""
    words = [AGREE, "--timeout", timeout, *flags, script]
    if script.stem == "by_mpi":
        return execute([BIN / "mpiexec", "-n", 2, sys.executable, *words], timeout=90)
    return forked.run(words, 2, environment(), timeout=90)


def verdict(done):
    return re.search("^verdict: (?:wrong: )?(.*)", done.out, re.M)[1]


@pytest.mark.parametrize(("file", "name"), [
    pytest.param(*case, marks=skip_without("02_horovod") if case[0] == "by_horovod" else ()) for case in CASES])
def test_each_training_has_its_verdict(file, name, tmp_path):
    changes, expected = (YOUR_SCRIPT if file == "your_script_ddp" else OTHERS[file])[name]
    hangs = expected in ("hang", "sequence") or name.startswith("Join")
    done = watched(changed(file, changes, tmp_path), timeout=3 if hangs else 30)
    assert verdict(done) == expected, done.out + done.err
    assert done.code == (expected != NOTHING)


def test_there_are_enough_of_both():
    expected = [expected for cases in (YOUR_SCRIPT, *OTHERS.values()) for _, expected in cases.values()]
    assert expected.count(NOTHING) >= 10 and len(expected) - expected.count(NOTHING) >= 20


@pytest.mark.parametrize(("file", "changes", "note"), [
    ("accumulation", [("torch.manual_seed(1 + rank)\n", "")], "all ranks draw the same random numbers.*dropout"),
    ("accumulation", [("        if last:\n", "        if last:\n            __import__('time').sleep(0.3 * rank)\n")],
     "one rank computes longer than the others.*rank 1"),
    ("stream", [("batch_size=16", "batch_size=16 - dist.get_rank()")], "batches are of unequal size.*16, 15"),
    ("accumulation", [], "buffers differ"), ("accumulation", [], "a factor beside")],
    ids=["random", "straggler", "batch", "buffers", "scaled"])
def test_a_note_is_no_mistake(file, changes, note, tmp_path):
    done = watched(changed(file, changes, tmp_path))
    assert verdict(done) == NOTHING and re.search(f"^note: .*{note}", done.out, re.M), done.out + done.err


def report(**other):
    """What a rank has seen of a training of one step in which nothing is wrong."""
    step = {"seconds": 1.0, "waiting": 0.0, "watching": 0.0, "local": {"w": [1.0, 2.0, 3.0]}, "sent": {},
            "final": {"w": [1.0, 2.0, 3.0]}, "rates": [0.1], "after": {"parameters": {"w": 1}, "buffers": {}}}
    return {"host": "a", "cores": [0, 1], "threads": 1, "device": "cuda:0", "gpu": "x", "current": "cuda:0",
            "met": True, "half": False, "hook": "", "joins": False, "wrappers": ["DDP"], "shards": [], "parts": [],
            "loaders": {}, "rows": [], "loaded": [],
            "random": {"torch": 1, "draws": ""}, "before": {"parameters": {"w": 0}}, "steps": [step]} | other


@pytest.mark.parametrize(("others", "expected"), [
    ({"gpu": "y"}, set()), ({}, {"one GPU"}), ({"host": "b"}, set()),
    ({"gpu": "y", "current": "cuda:1"}, {"other GPU"})])
def test_gpus(others, expected):
    """Without any here: by reports as two ranks would give them."""
    _, found = verdicts.judge([report(), report(**others)])
    assert found.keys() == expected


@pytest.mark.parametrize(("drawn", "like", "holds", "expected"), [
    ([range(0, 50), range(50, 100)], "aa", True, set()), ([range(50), range(50)], "aa", True, {"same data"}),
    ([range(50), range(50)], "ab", True, set()), ([range(50), range(50)], "aa", False, {"numbers"}),
    ([range(0, 50), range(25, 75)], "aa", True, {"overlap"}),
    ([[*range(50), 0, 1, 2], [*range(50, 100), 3, 4, 5]], "aa", True, set())],
    ids=["shares", "the same", "own data", "made up", "overlap", "padded"])
def test_items(drawn, like, holds, expected):
    loaders = [{"batches": 5, "items": 100, "like": kind, "holds": holds, "whole": False, "again": False,
                "epochs": [list(items)]} for kind, items in zip(like, drawn)]
    assert verdicts.judge_loader(loaders)[1].keys() == expected


def test_threads():
    cpu = {"device": "cpu", "gpu": None, "current": None}
    _, found = verdicts.judge([report(**cpu), report(**cpu, threads=2)])
    assert found == {"threads": "a: 3 threads, 2 cores"}


def test_the_same_losses_with_and_without(tmp_path):
    """And weights: the training is not changed."""
    told = [(TOLD, f"{TOLD}\n            print(rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item())")]
    script = changed("your_script_ddp", told, tmp_path)
    plain = forked.run([script], 2, environment(), timeout=90)
    seen = watched(script, "--steps", 6)
    for rank in "01":
        with_it, without = ([line for line in done.out.splitlines() if line.startswith(f"{rank} ")]
                            for done in (seen, plain))
        assert len(with_it) >= 5 and with_it == without[:len(with_it)]


def test_a_compiler_in_the_midst_of_communication_is_no_hang(tmp_path):
    """As where DeepSpeed meets for the first time."""
    place = tmp_path / "deepspeed" / "comm" / "build.py"
    place.parent.mkdir(parents=True)
    place.write_text("import subprocess\nsubprocess.run(['sleep', '6'])\n")
    change = [("schedule =", f"import runpy\nrunpy.run_path({str(place)!r})\nschedule =")]
    assert verdict(watched(changed("stream", change, tmp_path), timeout=3)) == NOTHING


def test_the_record_has_what_was_seen(tmp_path):
    done = watched(changed("your_script_ddp", [BARE], tmp_path), "--record", tmp_path / "seen.json", "--steps", 3)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert set(seen["found"]) == {"own gradients"}, done.out
    assert [len(one["steps"]) for one in seen["reports"]] == [3, 3]


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun", "deepspeed",
                                      pytest.param("horovodrun", marks=skip_without("02_horovod"))])
def test_under_each_launcher(launcher, tmp_path):
    words = {"mpiexec": [BIN / "mpiexec", "-n", 2, sys.executable],
             "torchrun": [BIN / "torchrun", "--nproc-per-node", 2],
             "horovodrun": [BIN / "horovodrun", "--gloo", "-np", 2, sys.executable],
             "deepspeed": [BIN / "deepspeed", "--num_gpus", 2]}[launcher]
    file = {"horovodrun": "by_horovod", "deepspeed": "by_deepspeed"}.get(launcher, "your_script_ddp")
    script = changed(file, [], tmp_path)
    if launcher in ("mpiexec", "torchrun"):  # with the script's worker processes
        script = ROOT / "03_ddp" / "your_script_ddp.py"
    done = execute([*words, AGREE, script], timeout=120, cwd=tmp_path)
    assert done.code == 0 and NOTHING in done.out, done.out + done.err
    assert done.out.count("verdict") == 1 and "leaked" not in done.err
    assert "digits.pt" not in [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(("text", "flags", "said"), [
    ("def (:\n", [], "does not parse: line 1: "),
    ("print('no training here')\n", [], "ended before a step of a PyTorch optimizer"),
    ("import sys\nsys.exit('--data is required')\n", [], "rank 0 ended with --data is required"),
    ("import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n", [], "rank 0 ended with exit code 2"),
    ("import os, torch\nif os.environ['RANK'] == '1':\n    raise ValueError('a bad\\nimage')\n", [],
     "rank 1 ended with ValueError: a bad$"),
    ("import tensorflow\n", [], "trains with tensorflow; only PyTorch's training can be looked at"),
    ("import torch\nweight = torch.ones(1, requires_grad=True)\nfor step in range(9):\n    weight.sum().backward()\n"
     "    torch.optim.SGD([weight], lr=1).step()\n", [], "trains no torch.nn.Module that was seen"),
    ("\ufeffimport sys\n# a file of Windows\nsys.exit('it runs')\n", [], "rank 0 ended with it runs"),
    ("", ["--steps", 0], "--steps and --timeout have to be more than 0")],
    ids=["syntax", "no step", "wants arguments", "exit code", "dies", "tensorflow", "no module", "byte order mark",
         "no steps"])
def test_what_cannot_be_looked_at(text, flags, said, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    done = forked.run([AGREE, "--timeout", 3, *flags, script], 2, environment(), timeout=90)
    spoken = [line for line in done.err.splitlines() if line.startswith("agree.py: ")]
    assert done.code == 2 and len(spoken) == 1 and re.search(said, spoken[0]), done.out + done.err


def test_a_script_that_is_not_there():
    done = execute([sys.executable, AGREE, "missing.py"])
    assert done.code == 2 and done.err.strip() == "agree.py: no file missing.py: name your script"


def test_a_notebook_is_no_script(tmp_path):
    (tmp_path / "mine.ipynb").write_text("{}")
    done = forked.run([AGREE, tmp_path / "mine.ipynb"], 2, environment(), timeout=90)
    assert done.code == 2 and re.fullmatch(r"agree\.py: .*mine\.ipynb is a notebook: make a script .*\n", done.err)


def test_one_rank_has_nobody_to_agree_with(tmp_path):
    done = forked.run([AGREE, changed("your_script_ddp", [], tmp_path)], 1, environment(), timeout=60)
    assert done.code == 2 and "one process has nobody to agree with" in done.err


def test_a_rank_that_is_killed_under_watch(tmp_path):
    died = [(TOLD, "            if rank == 1:\n                import os\n                os.kill(os.getpid(), 9)\n")]
    script = changed("your_script_ddp", died, tmp_path)
    done = execute([BIN / "mpiexec", "-n", 2, sys.executable, AGREE, script], timeout=60)
    assert done.code not in (0, 1)


def test_each_finding_is_explained():
    for key in verdicts.FINDINGS:
        done = forked.run([AGREE, "--explain", key], 1, environment(), timeout=60)
        assert done.code == 0 and done.out.strip() == verdicts.explain(key)
    page = (ROOT / "submit" / "AGREE.md").read_text()
    assert verdicts.table() in page
    found = {expected for cases in (YOUR_SCRIPT, *OTHERS.values()) for _, expected in cases.values()}
    tried = {"random", "straggler", "batch", "buffers", "one GPU", "other GPU", "threads", "scaled", "numbers"}
    assert verdicts.FINDINGS.keys() - found - tried == {"steps", "unseen"}
