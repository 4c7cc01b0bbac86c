"""agree on trainings with one mistake each and on correct ones, on two real ranks."""

import os
import re
import sys

import forked
import pytest
from conftest import (
    BIN,
    ROOT,
    assert_refused,
    copy_and_edit,
    environment,
    run_command,
    skip_without,
)

from agree import launcher, samples, verdicts

FOLDER = ROOT / "agree"
AGREE = FOLDER / "agree" / "__main__.py"
CHECKOUT = {"PYTHONPATH": str(FOLDER)}  # not the installed agree
ENVIRONMENT = environment() | CHECKOUT
MPIEXEC = [BIN / "mpiexec", "-n", 2, sys.executable, "-m", "agree"]
NO_PROBLEMS = "no problems found"
CONVERTED = (ROOT / "03_ddp" / "your_script_ddp.py").read_text()
QUICK = (re.search(r"num_workers=.*?\)", CONVERTED, re.S).group(), "num_workers=0)")

# Changes to chapter 3's your_script_ddp.py.
SAMPLER = re.search(r"sampler=sampler,.*generator=generator,", CONVERTED, re.S).group()
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
EPOCHS = re.search("    for epoch in .*\n", CONVERTED).group()

# Changes to chapter 5's fsdp.py.
SMALL = ["--layers", 2, "--width", 16, "--heads", 2, "--context", 8, "--global-batch-size", 8]
NOT_BLOCK_1 = "        if part is model[1]:\n            continue\n"
SHARD_ROOT = "    fsdp.fully_shard(model, mesh=mesh, "
CLIP_SHARDS = (
    "            shards = [parameter.grad.to_local() for parameter in model.parameters()]\n"
    "            norm = sum(shard.pow(2).sum() for shard in shards).sqrt()\n"
    "            torch._foreach_mul_(shards, min(1, 0.1 / norm.item()))\n")
TO_EMPTY = "    model.to_empty("
STAGE_1 = ("choices=(1, 3), default=3", "choices=(1, 3), default=1")
SHARDS = "    shards = list("
NO_SYNC = "    no_sync = parallel_model.no_sync()\n    no_sync.__enter__()\n"

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
        "clipped": ([(STEP, CLIP + STEP)], NO_PROBLEMS)},
    "fsdp": {
        "unchanged": ([], NO_PROBLEMS),
        "a block is not sharded": (
            [("        fsdp.fully_shard(part,", f"{NOT_BLOCK_1}        fsdp.fully_shard(part,"),
             (SHARD_ROOT, f"{SHARD_ROOT}ignored_params=set(model[1].parameters()), ")], "part"),
        "clipped by a shard's norm": ([(STEP, CLIP_SHARDS + STEP)], "other gradients"),
        "gradients never synchronised": (
            [(TO_EMPTY, f"    model.set_requires_gradient_sync(False)\n{TO_EMPTY}")],
            "nothing trains"),
        "no_sync() is never left": ([STAGE_1, (SHARDS, NO_SYNC + SHARDS)], "own gradients"),
        "another order on one rank": ([("rank, seed=args.seed,", "rank, seed=rank,")], "sampler"),
        "another seed on one rank": (
            [("torch.manual_seed(args.seed)", SEED_BY_RANK), ('"meta" if', "device if"),
             (TO_EMPTY, f"    return model\n{TO_EMPTY}")], "weights")},
    "several_models": {
        "unchanged": ([], NO_PROBLEMS),
        "a model is not wrapped": (
            [("DistributedDataParallel(generator)", "generator")], "part"),
        "a tensor in no module is not averaged": (
            [("        dist.all_reduce(temperature.grad, dist.ReduceOp.AVG)\n", "")], "part"),
        "the same noise on all ranks": (
            [('torch.manual_seed(1 + int(os.environ["RANK"]))', "os.sync()")], "same data")},
}


def write_changed_copy(file, changes, tmp_path):
    """Return the path of a copy of a training with these changes."""
    if file == "your_script_ddp":
        return copy_and_edit("03_ddp", tmp_path, QUICK, *changes, name="your_script_ddp.py")
    if file == "fsdp":
        return copy_and_edit("05_zero/fsdp.py", tmp_path, *changes)
    return copy_and_edit("agree/tests", tmp_path, *changes, name=f"{file}.py")


def run_agree(script, *flags, timeout=30):
    """Run agree on a script on two ranks."""
    arguments = [AGREE, "--timeout", timeout, *flags, script]
    arguments += SMALL if script.name == "fsdp.py" else []
    return forked.run(arguments, 2, ENVIRONMENT, timeout=90)


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, cases in CASES.items() for name in cases])
def test_each_training_gets_its_verdict(file, name, tmp_path):
    changes, expected = CASES[file][name]
    timeout = 12 if expected == "hang" else 30  # on a busy machine the ranks connect slowly
    script = write_changed_copy(file, changes, tmp_path)
    result = run_agree(script, "--seconds", 0, timeout=timeout)  # five steps show it
    output, findings = result.out + result.err, re.findall("^WRONG: (.*)", result.out, re.M)
    if expected == NO_PROBLEMS:
        assert result.code == 0 and not findings, output
        assert f"verdict: {NO_PROBLEMS}\n" in result.out, output
        assert re.search("gradients the optimizer uses +(the|their) mean", result.out), output
        return
    assert result.code == 1 and f"verdict: wrong: {expected}\n" in result.out, output
    assert len(findings) == 1 and findings[0].startswith(f"{expected}: "), output
    if expected == "hang":
        assert re.search(r"rank 0 +at your_script_ddp\.py:\d+", result.out)


def test_a_failure_within_run_is_reported(tmp_path):
    """The course's ranks.run() ends a job by mpiexec, but not before agree's line."""
    script = copy_and_edit(
        "03_ddp", tmp_path, (EPOCHS, "    raise ValueError\n    while True:\n"),
        name="your_script_ddp.py")
    result = run_command([*MPIEXEC, script], timeout=180, env=CHECKOUT)
    assert result.code == 2 and "ended with exit code 1" in result.err, result.err


CORRECT_TRAININGS = (  # functions of habits.py
    "no_grad_before_ddp", "look_at_a_batch", "weights_averaged", "loss_divided_and_summed",
    "weighted_by_samples", "closure", "micro_batches", "sum_of_micro_batches_divided",
    "gradients_by_hand", "gathered_before_the_forward", "a_stream_for_each_rank",
    "clips_all_micro_batches", "in_bf16", "compiled", "by_deepspeed", "averaged_by_mpi")
WRONG_TRAININGS = {  # {function of habits.py: expected verdict}
    "summed_by_mpi": "sum", "no_process_group": "alone",
    "one_stream_for_all": "same data",
    "rows_of_one_seed": "same data", "step_within_backward": "own gradients",
    "root_of_a_negative": "not finite",
    "optimizer_before_sharding": "nothing trains", "rank_0_alone_reduces": "sequence",
    "other_collectives": "sequence", "rank_1_ends_early": "own gradients, steps",
    "clips_each_micro_batch": "other gradients", "a_rank_skips_a_batch": "sequence",
    "a_codebook_of_each_rank": "apart", "a_teacher_before_the_broadcast": "weights",
    "the_same_partners": "same data", "split_by_a_seed_per_rank": "overlap",
    "a_plateau_of_each_rank": "apart", "rank_0_evaluates_by_ddp": "sequence"}
ADVICE = {"one_stream_for_all": "islice", "rows_of_one_seed": r"order\[rank::world_size\]",
          "step_within_backward": "after backward", "a_plateau_of_each_rank": "learning rates",
          "a_codebook_of_each_rank": r"all_reduce\(\) of sums",
          "a_teacher_before_the_broadcast": "copy a teacher",
          "a_rank_skips_a_batch": "decide together",
          "split_by_a_seed_per_rank": "what shuffles or splits", "the_same_partners": "tensor 2"}
HABITS = FOLDER / "tests" / "habits.py"


@pytest.mark.core
@skip_without("02_horovod")
@pytest.mark.parametrize(("wrap", "expected"), [
    ("wrapped", NO_PROBLEMS), ("unwrapped", "wrong: own gradients")])
def test_horovods_optimizer_gets_its_verdict(wrap, expected):
    result = forked.run([AGREE, FOLDER / "tests" / "by_horovod.py", wrap], 2, ENVIRONMENT)
    assert f"verdict: {expected}\n" in result.out, result.out + result.err


@pytest.mark.parametrize("name", [*CORRECT_TRAININGS, *WRONG_TRAININGS])
def test_patterns_of_public_scripts_get_their_verdict(name):
    if name.endswith("by_mpi"):
        result = run_command([*MPIEXEC, HABITS, name], timeout=90, env=CHECKOUT)
    else:
        timeout = 30 if name == "by_deepspeed" else 5  # its imports are slow on a busy machine
        result = forked.run([AGREE, "--timeout", timeout, HABITS, name], 2, ENVIRONMENT, timeout=90)
    output = result.out + result.err
    if name in CORRECT_TRAININGS:
        assert result.code == 0 and f"verdict: {NO_PROBLEMS}\n" in result.out, output
        assert "not seen" not in result.out, output
        return
    assert f"verdict: wrong: {WRONG_TRAININGS[name]}\n" in result.out, output
    assert result.code == 1 and re.search(ADVICE.get(name, ""), result.out), output


@pytest.mark.check
def test_two_ranks_on_one_gpu_are_reported():
    """Rank reports are made up, so no GPU is needed."""
    reports = [{"gpu": gpu, "device": "cuda:0"} for gpu in "ab"]
    assert not verdicts.judge_devices(reports)[1]
    assert verdicts.judge_devices([*reports, reports[0]])[1].keys() == {"one GPU"}


def loader_facts(indices, probes=("a", "b"), are_set=(True,)):
    """Return what agree knows of a DistributedSampler's loader, with the same order each epoch."""
    epochs = [{"indices": list(indices), "shuffled": True, "is set": is_set, "seed": 0}
              for is_set in are_set]
    return {"dataset_size": 100, "probes": list(probes), "drawn": [f"{indices}"], "shares": 2,
            "without_replacement": True, "is_distributed": True, "epochs": epochs,
            "batches": [[f"content {index}" for index in indices]]}


@pytest.mark.check
@pytest.mark.parametrize(("drawn", "probes", "expected"), [
    ([range(50), range(50)], ["ab", "ab"], {"same data"}),
    ([range(50), range(50, 100)], ["ab", "ab"], set()),
    ([range(50), range(50, 100)], ["", ""], set()),  # generated
    ([range(50), range(50, 100)], ["ab", "cd"], {"overlap"}),  # of data sets that differ
    ([[*range(50), 0, 1, 2], [*range(50, 100), 3, 4, 5]], ["ab", "ab"], set()),  # padded
    ([range(50), range(40, 90)], ["ab", "ab"], {"overlap"})])
def test_sample_numbers_of_two_ranks_get_their_verdict(drawn, probes, expected):
    loaders = [loader_facts(*rank) for rank in zip(drawn, probes)]
    assert samples.judge_loader(loaders)[1].keys() == expected


@pytest.mark.check
@pytest.mark.parametrize(("are_set", "expected"), [
    ([True, True], {"order"}), ([False, False], {"order"}),  # set_epoch(0) twice; no set_epoch
    ([False, True], set()),  # a probe before the first epoch
    ([True], set()), ([False], {"note"})])
def test_equal_orders_are_a_mistake_if_no_epoch_is_a_probe(are_set, expected):
    facts = loader_facts(range(0, 100, 2), are_set=are_set)
    assert samples.judge_order(facts, "steps").keys() == expected


def test_agree_does_not_change_the_training(tmp_path):
    values = "rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item()"
    print_values = [(LOSS, f"{LOSS}\n            print({values})")]
    script = write_changed_copy("your_script_ddp", print_values, tmp_path)
    plain_run = forked.run([script], 2, ENVIRONMENT, timeout=90, cwd=tmp_path)
    agree_run = run_agree(script, "--steps", 6)
    for rank in "01":
        plain_lines = re.findall(f"^{rank} .*", plain_run.out, re.M)
        lines = re.findall(f"^{rank} .*", agree_run.out, re.M)
        assert len(lines) >= 5 and lines == plain_lines[:len(lines)]
    assert re.search("2 ranks on 1 node, 6 steps, [0-9]+ more .*; DDP", agree_run.out)


@pytest.mark.parametrize(("changes", "expected"), [
    ([], NO_PROBLEMS), ([NO_SET_EPOCH], "wrong: order")], ids=["set_epoch", "no set_epoch"])
def test_missing_set_epoch_is_reported_in_the_second_epoch(changes, expected, tmp_path):
    """After the measured steps, the script goes on; its loaders' workers persist."""
    script = copy_and_edit("03_ddp", tmp_path, *changes, name="your_script_ddp.py")
    result = run_agree(script)
    assert f"verdict: {expected}\n" in result.out, result.out + result.err


@pytest.mark.fault
def test_agree_does_not_let_a_script_start_its_ranks():
    result = forked.run([AGREE, HABITS, "starts_its_ranks"], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2, result.out
    assert re.search(r"^agree: .* starts its ranks itself, at habits\.py:\d+", result.err, re.M)


def test_tensor_parallelism_is_not_checked():
    result = forked.run([AGREE, HABITS, "tensor_parallel"], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2 and "note: tensor parallelism: not compared" in result.out, result.out


def test_agree_gives_up_waiting_for_the_first_step(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import time\ntime.sleep(60)\n")
    result = forked.run([AGREE, "--first-step", 16, script], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2 and "has not reached the first step of a" in result.err, result.err
    assert "waiting for the first step of a PyTorch optimizer, up to 16 s" in result.err


@pytest.mark.parametrize("is_module", [False, True], ids=["file", "module"])
def test_a_script_imports_its_own_modules(is_module, tmp_path):
    """As under python: a file from its folder, a module from its package; even an agree.py."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "agree.py").write_text("INPUTS = 8\n")
    own = ".agree" if is_module else "agree"
    text = HABITS.read_text().replace("import copy\n", f"import copy\nfrom {own} import INPUTS\n")
    (folder / "train.py").write_text(text.replace("nn.Linear(8,", "nn.Linear(INPUTS,"))
    start = ["-m", "package.train"] if is_module else [folder / "train.py"]
    result = forked.run([AGREE, *start, "micro_batches"], 2, ENVIRONMENT, timeout=90, cwd=tmp_path)
    assert result.code == 0 and "data  " in result.out, result.out + result.err
    assert "96 samples" not in result.out and "60 samples given" in result.out, result.out


@pytest.mark.fault
@pytest.mark.parametrize(("name", "text", "problem"), [
    ("mine.py", "print('no training here')\n", "ended before the first step of a PyTorch opt"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n"
                "    raise ValueError('a bad\\nimage')\n", "rank 1 ended with ValueError: a bad$"),
    ("mine.py", "import os, torch\nif os.environ['RANK'] == '1':\n    os._exit(1)\n",
     "rank 1 ended with exit code 1$"),
    ("mine.py", "raise ValueError('RANK expected, but not set')", "start it by torchrun")],
    ids=["no step", "dies", "os._exit", "RANK"])
def test_scripts_that_agree_cannot_run_get_one_line(name, text, problem, tmp_path):
    (tmp_path / name).write_text(text)
    result = forked.run([AGREE, tmp_path / name], 2, ENVIRONMENT, timeout=90)
    errors = re.findall("^agree: .*", result.err, re.M)
    assert result.code == 2 and len(errors) == 1, result.out + result.err
    assert re.search(problem, errors[0])


@pytest.mark.fault
@pytest.mark.parametrize(("arguments", "message"), [
    ("none.py", "no file"), ("mine.ipynb", "is a notebook: convert it"),
    ("mine.py", "needs at least 2 ranks"), ("--steps 0 mine.py", "--steps must be more than 0"),
    ("--seconds -1 mine.py", "--seconds must be at least 0")])
def test_bad_arguments_get_one_line(arguments, message, tmp_path):
    (tmp_path / "mine.py").touch()
    result = run_command([sys.executable, "-m", "agree", *arguments.split()], cwd=tmp_path,
                         env=CHECKOUT)
    assert_refused(result, message, "agree")


@pytest.mark.fault
def test_a_private_name_that_has_moved_is_reported(tmp_path):
    """As in another version of PyTorch: agree cannot check, and does not say nothing is wrong."""
    program = tmp_path / "older.py"
    program.write_text("import sys\nfrom torch.utils.data.dataloader import _BaseDataLoaderIter\n"
                       "del _BaseDataLoaderIter._reset\nfrom agree.__main__ import main\n"
                       "sys.exit(main())\n")
    result = forked.run([program, HABITS, "in_bf16"], 2, ENVIRONMENT)
    assert_refused(result, "could not check: torch [0-9.]+.* has moved .*_reset", "agree")


LAUNCHERS = [  # (variables, launcher with rank and world size, or the message)
    ("PMI_RANK=1 PMI_SIZE=2", ("MPICH", 1, 2)),
    ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", ("Open MPI", 1, 2)),
    ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 PMIX_RANK=1", ("srun", 1, 2)),
    ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 PMI_RANK=1 PMI_SIZE=2", ("MPICH", 1, 2)),
    ("SLURM_PROCID=0 SLURM_NTASKS=2", (None, 0, 1)),  # python in an allocation
    ("HOROVOD_RANK=1 HOROVOD_SIZE=2 PMI_RANK=0 PMI_SIZE=1", ("horovodrun", 1, 2)),
    ("RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1", ("torchrun", 3, 4)),
    ("RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1 PMI_RANK=1 PMI_SIZE=2", ("MPICH", 1, 2)),
    ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 TORCHELASTIC_RUN_ID=a GROUP_WORLD_SIZE=1 "
     "PMI_RANK=1 PMI_SIZE=2", "MPICH has started 2 times torchrun"),
    ("PALS_RANKID=1", "no variable has the number of ranks"),
    ("PMI_RANK=x PMI_SIZE=2", "PMI_RANK is 'x', not a number")]


@pytest.mark.check
@pytest.mark.parametrize(("variables", "expected"), LAUNCHERS)
def test_launchers_are_found_by_their_variables(variables, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(pair.split("=") for pair in variables.split()))
    if isinstance(expected, str):
        with pytest.raises(SystemExit, match=expected):
            launcher.find_launcher()
    else:
        assert launcher.find_launcher() == expected
