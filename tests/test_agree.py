"""agree.py on trainings with one mistake each and on correct ones, on two real ranks."""

import re
import sys

import forked
import pytest
from conftest import BIN, ROOT, copy_of, environment, execute, skip_without

from submit.agreement import verdicts

AGREE = ROOT / "submit" / "agree.py"
NOTHING = "nothing wrong was found"
CONVERTED = (ROOT / "03_ddp" / "your_script_ddp.py").read_text()
QUICK = (re.search(r"num_workers=.*?\)", CONVERTED, re.S).group(), "num_workers=0)")

# Changes to chapter 3's your_script_ddp.py.
SAMPLER = "sampler=sampler,  # DDP: instead of shuffle=True"
WRAPPER = re.search("ddp = nn.parallel.*", CONVERTED).group()
NO_WRAPPER = (WRAPPER, "ddp = model")
SHUFFLED = (SAMPLER, "shuffle=True,")
NO_SET_EPOCH = ("sampler.set_epoch(epoch)", "pass")
STEP = "            optimizer.step()\n"
EACH = "            for parameter in model.parameters():\n"
REDUCE = "                torch.distributed.all_reduce(parameter.grad)\n"
BROADCAST = "                torch.distributed.broadcast(parameter.grad, 0)\n"
DIVIDE = "                parameter.grad /= world_size\n"
BY_HAND = EACH + REDUCE + DIVIDE
ALL_BUT_TWO = BY_HAND.replace("model.parameters()", "list(model.parameters())[:-2]")
CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
CLIP_BY_RANK = CLIP.replace("0.1", "0.1 * (rank + 1)")
LOAD = "    train, test = load()\n"
LOSS = "            loss_sum += loss.item()"
NOISE = "            model[0].weight.data += rank * torch.randn_like(model[0].weight)"
WAIT = "            if rank == 0:\n                torch.distributed.barrier()"
SEED, SEED_BY_RANK = "torch.manual_seed(0)", "torch.manual_seed(rank)"
EPOCHS = "    for epoch in range(5):\n"
# Changes to stream.py.
STREAM_LOSS = "nn.functional.mse_loss(model(inputs), targets)"
STREAM_MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))"

CASES = {  # file: {name: (changes, the verdict)}
    "your_script_ddp": {
        "the wrapper is by-passed": ([("ddp(images)", "model(images)")], "own gradients"),
        "no sampler": ([SHUFFLED], "same data"),
        "no sampler, one seed per rank": (
            [(SEED, SEED_BY_RANK), SHUFFLED, ("model = nn", f"{SEED}\n    model = nn"),
             (EPOCHS, f"    {SEED_BY_RANK}\n{EPOCHS}")], "overlap"),
        "a sampler for one rank": (
            [("DistributedSampler(train,", "DistributedSampler(train, num_replicas=1, rank=0,")],
            "sampler"),
        "averaged twice": ([(STEP, EACH + DIVIDE + STEP)], "twice"),
        "no broadcast": (
            [NO_WRAPPER, (STEP, BY_HAND + STEP), (LOAD, f"{LOAD}    {SEED_BY_RANK}\n")],
            "weights"),
        "gradients are broadcast": ([NO_WRAPPER, (STEP, EACH + BROADCAST + STEP)], "one rank's"),
        "a layer is forgotten": ([NO_WRAPPER, (STEP, ALL_BUT_TWO + STEP)], "part"),
        "noise on the weights": ([(LOSS, f"{LOSS}\n{NOISE}")], "apart"),
        "clipped by each rank": (
            [NO_WRAPPER, (STEP, CLIP_BY_RANK + BY_HAND + STEP)], "other gradients"),
        "rank 0 alone waits": ([(LOSS, f"{LOSS}\n{WAIT}")], "hang"),
        "by hand": ([NO_WRAPPER, (STEP, BY_HAND + STEP)], NOTHING),
        "clipped": ([(STEP, CLIP + STEP)], NOTHING)},
    "by_horovod": {
        "as it is": ([], NOTHING),
        "not Horovod's optimizer": (
            [("optimizer = hvd.DistributedOptimizer(optimizer, "
              "named_parameters=model.named_parameters())\n", "")], "own gradients")},
    "by_mpi": {"as it is": ([], NOTHING), "no division": ([(" / ranks", "")], "sum")},
    "by_fsdp": {"as it is": ([], NOTHING)},
    "by_deepspeed": {"as it is": ([], NOTHING)},
    "accumulation": {"no_sync stays on": ([("if last else", "if False else")], "own gradients")},
    "stream": {
        "as it is": ([], NOTHING),
        "all take all samples": ([("range(self.rank, 512, self.ranks)", "range(512)")],
                                 "same data"),
        "in bf16": (
            [(STREAM_MODEL, f"{STREAM_MODEL}.bfloat16()"),
             (STREAM_LOSS, STREAM_LOSS.replace("inputs)", "inputs.bfloat16()).float()"))], NOTHING),
        "it asks nobody": (
            [('dist.init_process_group("gloo")\n', ""), ("DDP(nn.Seq", "(nn.Seq"),
             ("dist.get_rank(), dist.get_world_size()", "0, 1"),
             ("dist.destroy_process_group()\n", "")], "alone"),
        "the optimizer holds another model": (
            [("SGD(model.parameters()", "SGD(nn.Linear(1, 1).parameters()")],
            "nothing trains")},
}


def write_changed_copy(file, changes, tmp_path):
    """Return the path of a copy of a training with these changes."""
    if file == "your_script_ddp":
        return copy_of("03_ddp", tmp_path, QUICK, *changes, name="your_script_ddp.py")
    return copy_of("tests/programs/trainings", tmp_path, *changes, name=f"{file}.py")


def run_agree(script, *flags, timeout=30):
    """Run agree.py on a script on two ranks."""
    words = [AGREE, "--timeout", timeout, *flags, script]
    if script.stem == "by_mpi":
        return execute([BIN / "mpiexec", "-n", 2, sys.executable, *words], timeout=90)
    return forked.run(words, 2, environment(), timeout=90)


def each_case():
    for file, cases in CASES.items():
        marks = [skip_without("02_horovod")] if file == "by_horovod" else []
        if file in ("by_horovod", "by_fsdp"):
            marks.append(pytest.mark.core)
        for name in cases:
            yield pytest.param(file, name, marks=marks)


@pytest.mark.parametrize(("file", "name"), list(each_case()))
def test_each_training_has_its_verdict(file, name, tmp_path):
    changes, expected = CASES[file][name]
    wait = 12 if expected == "hang" else 30  # on a busy machine the ranks connect slowly
    done = run_agree(write_changed_copy(file, changes, tmp_path), timeout=wait)
    wrong = re.findall("^WRONG: (.*)", done.out, re.M)
    if expected == NOTHING:
        assert done.code == 0 and not wrong, done.out + done.err
        assert f"verdict: {NOTHING}\n" in done.out, done.out + done.err
        assert re.search("gradients the optimizer uses +(the|their) mean", done.out), done.out
        return
    assert done.code == 1 and f"verdict: wrong: {expected}\n" in done.out, done.out + done.err
    assert len(wrong) == 1 and wrong[0].startswith(f"{expected}: "), done.out
    if expected == "hang":
        assert re.search(r"rank 0 +at your_script_ddp\.py:\d+", done.out)


RIGHT = (
    "forward_before_ddp", "lazy_layers", "look_at_a_batch", "clipped_by_value",
    "weights_averaged", "loss_divided_and_summed", "divided_by_all_samples",
    "weighted_by_samples", "two_optimizers", "closure", "sparse_and_complex",
    "copies_of_the_model", "a_layer_rests", "micro_batches",
    "sum_of_micro_batches_divided", "gradients_by_hand",
    "gathered_before_the_forward", "compiled")
MISTAKES = {  # {a function of habits.py: the findings}
    "imaginary_half_is_lost": "other gradients", "one_stream_for_all": "same data",
    "rows_of_one_seed": "same data", "one_text_for_all": "same data",
    "step_within_backward": "own gradients", "root_of_a_negative": "not finite",
    "loss_without_effect": "nothing trains", "optimizer_before_sharding": "nothing trains",
    "one_model_is_not_wrapped": "part", "rank_0_alone_reduces": "sequence",
    "other_collectives": "sequence", "rank_1_ends_early": "own gradients, steps"}
FIXES = {"one_stream_for_all": "islice", "rows_of_one_seed": r"order\[rank::world_size\]",
         "step_within_backward": "after backward"}
HABITS = ROOT / "tests" / "programs" / "trainings" / "habits.py"


@pytest.mark.parametrize("name", [*RIGHT, *MISTAKES])
def test_patterns_of_public_scripts(name):
    done = forked.run([AGREE, "--timeout", 5, HABITS, name], 2, environment(), timeout=90)
    if name in RIGHT:
        assert done.code == 0 and f"verdict: {NOTHING}\n" in done.out, done.out + done.err
        assert "not seen" not in done.out, done.out
        return
    assert f"verdict: wrong: {MISTAKES[name]}\n" in done.out, done.out + done.err
    assert done.code == 1 and re.search(FIXES.get(name, ""), done.out), done.out


@pytest.mark.check
def test_two_ranks_on_one_gpu():
    """Judged from fabricated rank reports; no GPU needed."""
    ranks = [{"host": host, "gpu": "x", "device": "cuda:0"} for host in "ab"]
    assert not verdicts.judge_devices(ranks)[1]
    assert verdicts.judge_devices([*ranks, ranks[0]])[1].keys() == {"one GPU"}


@pytest.mark.check
@pytest.mark.parametrize(("drawn", "checksums", "expected"), [
    ([range(50), range(50)], [1, 2], {"same data"}),
    ([range(50), range(50, 100)], [0, 0], set()),
    ([[*range(50), 0, 1, 2], [*range(50, 100), 3, 4, 5]], [1, 1], set()),
    ([range(50), range(40, 90)], [1, 1], {"overlap"})],
    ids=["own data", "generated", "padded", "overlap"])
def test_data_verdicts(drawn, checksums, expected):
    loaders = [{"dataset_size": 100, "dataset_checksum": checksum, "without_replacement": True,
                "batches": [list(indices)], "epochs": [list(indices)]}
               for checksum, indices in zip(checksums, drawn)]
    assert verdicts.judge_loader(loaders)[1].keys() == expected


def test_agree_does_not_change_the_training(tmp_path):
    """Losses, weights and random numbers are the same with agree.py and without."""
    numbers = "rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item()"
    printed = [(LOSS, f"{LOSS}\n            print({numbers})")]
    script = write_changed_copy("your_script_ddp", printed, tmp_path)
    plain = forked.run([script], 2, environment(), timeout=90, cwd=tmp_path)  # it saves digits.pt
    seen = run_agree(script, "--steps", 6)
    for rank in "01":
        lines, plain_lines = ([line for line in done.out.splitlines()
                               if line.startswith(f"{rank} ")] for done in (seen, plain))
        assert len(lines) >= 5 and lines == plain_lines[:len(lines)]
    assert "2 ranks on 1 node, 6 steps; DDP" in seen.out


@pytest.mark.parametrize(("changes", "expected"), [
    ([], NOTHING), ([NO_SET_EPOCH], "wrong: order")], ids=["set_epoch", "no set_epoch"])
def test_sampler_order_over_two_epochs(changes, expected, tmp_path):
    """In the second epoch the ranks swap samples; the loaders' workers persist."""
    script = copy_of("03_ddp", tmp_path, *changes, name="your_script_ddp.py")
    done = run_agree(script, "--steps", 30)
    assert f"verdict: {expected}\n" in done.out, done.out + done.err


@pytest.mark.fault
@pytest.mark.parametrize(("name", "problem"), [
    ("updates_by_hand", "the weights changed without one, and are apart"),
    ("starts_its_ranks", r"starts its ranks itself, at habits\.py:\d+")])
def test_trainings_that_agree_cannot_judge(name, problem):
    done = forked.run([AGREE, HABITS, name], 2, environment(), timeout=90)
    assert done.code == 2 and re.search(f"^agree.py: .*{problem}", done.err, re.M), done.err


def test_waiting_message_says_for_what_and_how_long(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import time\ntime.sleep(60)\n")
    done = forked.run([AGREE, "--first-step", 16, script], 2, environment(), timeout=90)
    assert done.code == 2 and "has not reached the first step of a" in done.err, done.err
    assert "waiting for the first step of a PyTorch optimizer, up to 16 s" in done.err


def test_python_m_module(tmp_path):
    """Started as by python -m; it imports from its package."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "sizes.py").write_text("INPUTS = 8\n")
    text = HABITS.read_text().replace("import io\n", "import io\nfrom .sizes import INPUTS\n")
    (package / "train.py").write_text(text.replace("nn.Linear(8,", "nn.Linear(INPUTS,"))
    done = forked.run([AGREE, "-m", "package.train", "micro_batches"], 2, environment(),
                      timeout=90, cwd=tmp_path)
    assert done.code == 0 and "data  " in done.out, done.out + done.err
    assert "96 samples" not in done.out and "60 samples given" in done.out, done.out


@pytest.mark.fault
@pytest.mark.parametrize(("name", "text", "problem"), [
    ("mine.py", "print('no training here')\n", "ended before the first step of a PyTorch opt"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n"
                "    raise ValueError('a bad\\nimage')\n", "rank 1 ended with ValueError: a bad$"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n    os._exit(1)\n",
     "rank 1 ended with exit code 1$"),
    ("mine.ipynb", "{}", "is a notebook: convert it")],
    ids=["no step", "dies", "os._exit", "a notebook"])
def test_scripts_that_agree_cannot_run(name, text, problem, tmp_path):
    (tmp_path / name).write_text(text)
    done = forked.run([AGREE, tmp_path / name], 2, environment(), timeout=90)
    lines = [line for line in done.err.splitlines() if line.startswith("agree.py: ")]
    assert done.code == 2 and len(lines) == 1, done.out + done.err
    assert re.search(problem, lines[0])
