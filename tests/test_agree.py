"""agree.py on trainings with one mistake each and on correct ones, on two real ranks."""

import re
import sys

import forked
import pytest
from conftest import BIN, ROOT, copy_and_edit, environment, run_command, skip_without

from submit.agreement import verdicts

AGREE = ROOT / "submit" / "agree.py"
NOTHING_WRONG = "nothing wrong was found"
CONVERTED = (ROOT / "03_ddp" / "your_script_ddp.py").read_text()
QUICK = (re.search(r"num_workers=.*?\)", CONVERTED, re.S).group(), "num_workers=0)")

# Changes to chapter 3's your_script_ddp.py.
SAMPLER = "sampler=sampler,  # DDP: instead of shuffle=True"
WRAPPER = re.search("ddp = nn.parallel.*", CONVERTED).group()
NO_WRAPPER = (WRAPPER, "ddp = model")
SHUFFLED = (SAMPLER, "shuffle=True,")
NO_SET_EPOCH = ("sampler.set_epoch(epoch)", "pass")
STEP = "            optimizer.step()\n"
FOR_EACH_PARAMETER = "            for parameter in model.parameters():\n"
REDUCE = "                torch.distributed.all_reduce(parameter.grad)\n"
BROADCAST = "                torch.distributed.broadcast(parameter.grad, 0)\n"
DIVIDE = "                parameter.grad /= world_size\n"
AVERAGE_BY_HAND = FOR_EACH_PARAMETER + REDUCE + DIVIDE
AVERAGE_ALL_BUT_TWO = AVERAGE_BY_HAND.replace("model.parameters()", "list(model.parameters())[:-2]")
CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
CLIP_BY_RANK = CLIP.replace("0.1", "0.1 * (rank + 1)")
LOAD_DATA = "    train, test = load()\n"
LOSS = "            loss_sum += loss.item()"
NOISE_ON_WEIGHTS = "            model[0].weight.data += rank * torch.randn_like(model[0].weight)"
BARRIER_ON_RANK_0 = "            if rank == 0:\n                torch.distributed.barrier()"
SEED, SEED_BY_RANK = "torch.manual_seed(0)", "torch.manual_seed(rank)"
EPOCHS = "    for epoch in range(5):\n"
# Changes to stream.py.
STREAM_LOSS = "nn.functional.mse_loss(model(inputs), targets)"
STREAM_MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))"

CASES = {  # {file: {case: (changes, expected verdict)}}
    "your_script_ddp": {
        "the wrapper is bypassed": ([("ddp(images)", "model(images)")], "own gradients"),
        "no sampler": ([SHUFFLED], "same data"),
        "no sampler, a seed per rank": (
            [(SEED, SEED_BY_RANK), SHUFFLED, ("model = nn", f"{SEED}\n    model = nn"),
             (EPOCHS, f"    {SEED_BY_RANK}\n{EPOCHS}")], "overlap"),
        "a sampler for one rank": (
            [("DistributedSampler(train,", "DistributedSampler(train, num_replicas=1, rank=0,")],
            "sampler"),
        "averaged twice": ([(STEP, FOR_EACH_PARAMETER + DIVIDE + STEP)], "twice"),
        "no broadcast": (
            [NO_WRAPPER, (STEP, AVERAGE_BY_HAND + STEP),
             (LOAD_DATA, f"{LOAD_DATA}    {SEED_BY_RANK}\n")], "weights"),
        "gradients are broadcast": (
            [NO_WRAPPER, (STEP, FOR_EACH_PARAMETER + BROADCAST + STEP)], "one rank's"),
        "weights are broadcast": (
            [NO_WRAPPER, (STEP, STEP + FOR_EACH_PARAMETER + BROADCAST.replace(".grad", ".data"))],
            "one rank's"),
        "a layer's gradients are not averaged": (
            [NO_WRAPPER, (STEP, AVERAGE_ALL_BUT_TWO + STEP)], "part"),
        "noise on the weights": ([(LOSS, f"{LOSS}\n{NOISE_ON_WEIGHTS}")], "apart"),
        "each rank clips differently": (
            [NO_WRAPPER, (STEP, CLIP_BY_RANK + AVERAGE_BY_HAND + STEP)], "other gradients"),
        "rank 0 alone is in a barrier": ([(LOSS, f"{LOSS}\n{BARRIER_ON_RANK_0}")], "hang"),
        "clipped": ([(STEP, CLIP + STEP)], NOTHING_WRONG)},
    "by_horovod": {
        "unchanged": ([], NOTHING_WRONG),
        "without Horovod's optimizer": (
            [("optimizer = hvd.DistributedOptimizer(optimizer, "
              "named_parameters=model.named_parameters())\n", "")], "own gradients")},
    "by_mpi": {"unchanged": ([], NOTHING_WRONG), "no division": ([(" / ranks", "")], "sum")},
    "by_fsdp": {"unchanged": ([], NOTHING_WRONG)},
    "by_deepspeed": {"unchanged": ([], NOTHING_WRONG)},
    "accumulation": {"no_sync stays on": ([("if last else", "if False else")], "own gradients")},
    "stream": {
        "unchanged": ([], NOTHING_WRONG),
        "in bf16": (
            [(STREAM_MODEL, f"{STREAM_MODEL}.bfloat16()"),
             (STREAM_LOSS, STREAM_LOSS.replace("inputs)", "inputs.bfloat16()).float()"))],
            NOTHING_WRONG),
        "no process group": (
            [('dist.init_process_group("gloo")\n', ""), ("DDP(nn.Seq", "(nn.Seq"),
             ("dist.get_rank(), dist.get_world_size()", "0, 1"),
             ("dist.destroy_process_group()\n", "")], "alone"),
        "the optimizer gets another model's parameters": (
            [("SGD(model.parameters()", "SGD(nn.Linear(1, 1).parameters()")],
            "nothing trains")},
}


def write_changed_copy(file, changes, tmp_path):
    """Return the path of a copy of a training with these changes."""
    if file == "your_script_ddp":
        return copy_and_edit("03_ddp", tmp_path, QUICK, *changes, name="your_script_ddp.py")
    return copy_and_edit("tests/programs/trainings", tmp_path, *changes, name=f"{file}.py")


def run_agree(script, *flags, timeout=30):
    """Run agree.py on a script on two ranks."""
    arguments = [AGREE, "--timeout", timeout, *flags, script]
    if script.stem == "by_mpi":
        return run_command([BIN / "mpiexec", "-n", 2, sys.executable, *arguments], timeout=90)
    return forked.run(arguments, 2, environment(), timeout=90)


def all_cases():
    for file, cases in CASES.items():
        marks = [skip_without("02_horovod")] if file == "by_horovod" else []
        if file in ("by_horovod", "by_fsdp"):
            marks.append(pytest.mark.core)
        for name in cases:
            yield pytest.param(file, name, marks=marks)


@pytest.mark.parametrize(("file", "name"), list(all_cases()))
def test_each_training_gets_its_verdict(file, name, tmp_path):
    changes, expected = CASES[file][name]
    timeout = 12 if expected == "hang" else 30  # on a busy machine the ranks connect slowly
    result = run_agree(write_changed_copy(file, changes, tmp_path), timeout=timeout)
    output, findings = result.out + result.err, re.findall("^WRONG: (.*)", result.out, re.M)
    if expected == NOTHING_WRONG:
        assert result.code == 0 and not findings, output
        assert f"verdict: {NOTHING_WRONG}\n" in result.out, output
        assert re.search("gradients the optimizer uses +(the|their) mean", result.out), output
        return
    assert result.code == 1 and f"verdict: wrong: {expected}\n" in result.out, output
    assert len(findings) == 1 and findings[0].startswith(f"{expected}: "), output
    if expected == "hang":
        assert re.search(r"rank 0 +at your_script_ddp\.py:\d+", result.out)


def test_a_failure_within_run_is_reported(tmp_path):
    """ranks.run() ends a job by mpiexec, but not before agree.py's line."""
    script = copy_and_edit(
        "03_ddp", tmp_path, ("    for epoch in range(5):", "    raise ValueError\n    while True:"),
        name="your_script_ddp.py")
    result = run_command([BIN / "mpiexec", "-n", 2, sys.executable, AGREE, script], timeout=90)
    assert result.code == 2 and "ended with exit code 1" in result.err, result.err


CORRECT_TRAININGS = (  # functions of habits.py
    "forward_before_ddp", "lazy_layers", "look_at_a_batch", "clipped_by_value", "weights_averaged",
    "loss_divided_and_summed", "divided_by_all_samples", "weighted_by_samples", "two_optimizers",
    "closure", "sparse_and_complex", "copies_of_the_model", "a_bias_has_no_gradient",
    "micro_batches", "sum_of_micro_batches_divided", "gradients_by_hand",
    "gathered_before_the_forward", "compiled")
WRONG_TRAININGS = {  # {function of habits.py: expected verdict}
    "imaginary_part_is_lost": "other gradients", "one_stream_for_all": "same data",
    "rows_of_one_seed": "same data", "one_text_for_all": "same data",
    "step_within_backward": "own gradients", "root_of_a_negative": "not finite",
    "loss_without_effect": "nothing trains", "optimizer_before_sharding": "nothing trains",
    "one_model_is_not_wrapped": "part", "rank_0_alone_reduces": "sequence",
    "other_collectives": "sequence", "rank_1_ends_early": "own gradients, steps"}
ADVICE = {"one_stream_for_all": "islice", "rows_of_one_seed": r"order\[rank::world_size\]",
          "step_within_backward": "after backward"}
HABITS = ROOT / "tests" / "programs" / "trainings" / "habits.py"


@pytest.mark.parametrize("name", [*CORRECT_TRAININGS, *WRONG_TRAININGS])
def test_patterns_of_public_scripts_get_their_verdict(name):
    result = forked.run([AGREE, "--timeout", 5, HABITS, name], 2, environment(), timeout=90)
    output = result.out + result.err
    if name in CORRECT_TRAININGS:
        assert result.code == 0 and f"verdict: {NOTHING_WRONG}\n" in result.out, output
        assert "not seen" not in result.out, output
        return
    assert f"verdict: wrong: {WRONG_TRAININGS[name]}\n" in result.out, output
    assert result.code == 1 and re.search(ADVICE.get(name, ""), result.out), output


@pytest.mark.check
def test_the_end_does_not_initialize_mpi():
    """On some clusters, initializing MPI outside of mpiexec aborts the process."""
    program = ("import agree, sys; agree.exit_now = lambda code: sys.exit('mpi4py' in sys.modules);"
               "agree.leave(None, 0, 1, 0, finalize=True)")
    result = run_command([sys.executable, "-c", program], cwd=AGREE.parent)
    assert result.code == 0, result.err


@pytest.mark.check
def test_two_ranks_on_one_gpu_are_reported():
    """Rank reports are made up, so no GPU is needed."""
    reports = [{"host": host, "gpu": "x", "device": "cuda:0"} for host in "ab"]
    assert not verdicts.judge_devices(reports)[1]
    assert verdicts.judge_devices([*reports, reports[0]])[1].keys() == {"one GPU"}


@pytest.mark.check
@pytest.mark.parametrize(("drawn", "checksums", "expected"), [
    ([range(50), range(50)], [1, 2], {"same data"}),
    ([range(50), range(50, 100)], [0, 0], set()),
    ([[*range(50), 0, 1, 2], [*range(50, 100), 3, 4, 5]], [1, 1], set()),
    ([range(50), range(40, 90)], [1, 1], {"overlap"})],
    ids=["own data", "generated", "padded", "overlap"])
def test_sample_numbers_of_two_ranks_get_their_verdict(drawn, checksums, expected):
    loaders = [{"dataset_size": 100, "dataset_checksum": checksum, "without_replacement": True,
                "batches": [list(indices)], "epochs": [list(indices)]}
               for checksum, indices in zip(checksums, drawn)]
    assert verdicts.judge_loader(loaders)[1].keys() == expected


def test_agree_does_not_change_the_training(tmp_path):
    values = "rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item()"
    print_values = [(LOSS, f"{LOSS}\n            print({values})")]
    script = write_changed_copy("your_script_ddp", print_values, tmp_path)
    plain_run = forked.run([script], 2, environment(), timeout=90, cwd=tmp_path)
    agree_run = run_agree(script, "--steps", 6)
    for rank in "01":
        plain_lines = re.findall(f"^{rank} .*", plain_run.out, re.M)
        lines = re.findall(f"^{rank} .*", agree_run.out, re.M)
        assert len(lines) >= 5 and lines == plain_lines[:len(lines)]
    assert "2 ranks on 1 node, 6 steps; DDP" in agree_run.out


@pytest.mark.parametrize(("changes", "expected"), [
    ([], NOTHING_WRONG), ([NO_SET_EPOCH], "wrong: order")], ids=["set_epoch", "no set_epoch"])
def test_missing_set_epoch_is_reported_in_the_second_epoch(changes, expected, tmp_path):
    """In the second epoch a rank gets other samples; the loaders' workers persist."""
    script = copy_and_edit("03_ddp", tmp_path, *changes, name="your_script_ddp.py")
    result = run_agree(script, "--steps", 30)
    assert f"verdict: {expected}\n" in result.out, result.out + result.err


@pytest.mark.fault
@pytest.mark.parametrize(("name", "problem"), [
    ("updates_by_hand", "the weights changed without one, and are apart"),
    ("starts_its_ranks", r"starts its ranks itself, at habits\.py:\d+")])
def test_agree_says_why_it_cannot_judge(name, problem):
    result = forked.run([AGREE, HABITS, name], 2, environment(), timeout=90)
    assert result.code == 2 and re.search(f"^agree.py: .*{problem}", result.err, re.M), result.err


def test_agree_gives_up_waiting_for_the_first_step(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import time\ntime.sleep(60)\n")
    result = forked.run([AGREE, "--first-step", 16, script], 2, environment(), timeout=90)
    assert result.code == 2 and "has not reached the first step of a" in result.err, result.err
    assert "waiting for the first step of a PyTorch optimizer, up to 16 s" in result.err


def test_agree_runs_a_module_of_a_package(tmp_path):
    """As python -m does: the module imports from its package."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "sizes.py").write_text("INPUTS = 8\n")
    text = HABITS.read_text().replace("import io\n", "import io\nfrom .sizes import INPUTS\n")
    (package / "train.py").write_text(text.replace("nn.Linear(8,", "nn.Linear(INPUTS,"))
    result = forked.run([AGREE, "-m", "package.train", "micro_batches"], 2, environment(),
                        timeout=90, cwd=tmp_path)
    assert result.code == 0 and "data  " in result.out, result.out + result.err
    assert "96 samples" not in result.out and "60 samples given" in result.out, result.out


@pytest.mark.fault
@pytest.mark.parametrize(("name", "text", "problem"), [
    ("mine.py", "print('no training here')\n", "ended before the first step of a PyTorch opt"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n"
                "    raise ValueError('a bad\\nimage')\n", "rank 1 ended with ValueError: a bad$"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n    os._exit(1)\n",
     "rank 1 ended with exit code 1$"),
    ("mine.py", "raise ValueError('RANK expected, but not set')", "start it with torchrun"),
    ("mine.ipynb", "{}", "is a notebook: convert it")],
    ids=["no step", "dies", "os._exit", "RANK", "a notebook"])
def test_scripts_that_agree_cannot_run_get_one_line(name, text, problem, tmp_path):
    (tmp_path / name).write_text(text)
    result = forked.run([AGREE, tmp_path / name], 2, environment(), timeout=90)
    errors = re.findall("^agree.py: .*", result.err, re.M)
    assert result.code == 2 and len(errors) == 1, result.out + result.err
    assert re.search(problem, errors[0])
