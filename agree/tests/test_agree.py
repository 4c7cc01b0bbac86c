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


def test_a_failure_is_reported_before_the_script_ends_the_job(tmp_path):
    """The course's ranks.run() tells mpiexec to end the job, but not before agree's line."""
    script = tmp_path / "mine.py"
    script.write_text("import torch\nfrom workshop.ending import run\n\n\n"
                      "def main():\n    raise ValueError\n\n\nrun(main)\n")
    result = run_command([*MPIEXEC, script], timeout=180,
                         env={"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"})
    assert result.code == 2 and "ended with exit code 1" in result.err, result.err


CORRECT_TRAININGS = (  # functions of habits.py
    "no_grad_before_ddp", "rank_0_alone", "weights_averaged", "loss_divided_and_summed",
    "weighted_by_samples", "closure", "sum_of_micro_batches_divided", "gradients_by_hand",
    "gathered_before_the_forward", "a_stream_for_each_rank", "clips_all_micro_batches",
    "several_models", "rank_0_draws_for_all", "in_bf16", "compiled", "by_deepspeed",
    "averaged_by_mpi")
WRONG_TRAININGS = {  # {function of habits.py: (expected verdict, what else the output contains)}
    "no_process_group": ("alone", ""),
    "inner_model_is_called": ("own gradients", "call a model that"),
    "a_layer_is_not_sharded": ("part", "fully_shard"),
    "a_tensor_in_no_module": ("part", "wrap every model"),
    "weights_of_each_rank": ("weights", "broadcast rank 0's"),
    "shards_of_each_rank": ("weights", "set_model_state_dict"),
    "a_teacher_before_the_broadcast": ("weights", "copy a teacher"),
    "a_codebook_of_each_rank": ("", "note: .*codebooks: average"),
    "an_average_on_rank_0": ("apart", "rank 1 never changes it.*at the same step"),
    "a_plateau_of_each_rank": ("apart", "learning rates"),
    "one_stream_for_all": ("same data", "islice"),
    "rows_of_one_seed": ("same data", r"given to the models;.*order\[rank::world_size\]"),
    "the_same_noise": ("same data", "models' inputs"),
    "the_same_partners": ("same noise", "Python's random numbers"),
    "one_noise_for_all": ("same noise", r"dropout, .* workers' random numbers.*seed \+ rank"),
    "split_by_a_seed_per_rank": ("overlap", "what shuffles or splits"),
    "one_time_for_all": ("same noise", "tensor 2 of the models' inputs"),
    "a_sampler_with_a_seed_per_rank": ("sampler", "with one seed"),
    "a_rank_skips_a_batch": ("sequence", "decide together"),
    "rank_0_evaluates_by_ddp": ("sequence", "if rank == 0"),
    "other_collectives": ("sequence", r"rank 0 calls all_reduce of 1 numbers at habits\.py:\d+, "
                          r"in other_collectives.*; rank 1 calls all_reduce of 2"),
    "rank_1_ends_early": ("own gradients, steps", "drop_last"),
    "a_barrier_on_rank_0": ("hang", r"rank 0 +at habits\.py:\d+"),
    "clips_each_micro_batch": ("other gradients", "average first"),
    "clips_by_its_shards": ("other gradients", "norm of all shards"),
    "summed": ("sum", "op=AVG"), "averaged_twice": ("twice", "divide once"),
    "gradients_of_rank_0": ("one rank's", "those of rank 0"),
    "optimizer_before_sharding": ("nothing trains", r"after fully_shard\(\)"),
    "root_of_a_negative": ("not finite", "before averaging"),
    "notes_alone": ("", r"1/2 of 128 samples.*after step 1, rank 0 draws .* rank 1 calls")}
HABITS = FOLDER / "tests" / "habits.py"


@pytest.mark.core
@skip_without("02_horovod")
def test_horovods_optimizer_gets_its_verdict():
    result = forked.run([AGREE, FOLDER / "tests" / "by_horovod.py"], 2, ENVIRONMENT)
    assert f"verdict: {NO_PROBLEMS}\n" in result.out, result.out + result.err


@pytest.mark.parametrize("name", [*CORRECT_TRAININGS, *WRONG_TRAININGS])
def test_patterns_of_public_scripts_get_their_verdict(name):
    if name.endswith("by_mpi"):
        result = run_command([*MPIEXEC, HABITS, name], timeout=90, env=CHECKOUT)
    else:
        is_slow = name in ("by_deepspeed", "rank_0_alone")  # its imports; one rank is late
        timeout = 30 if is_slow else 5
        result = forked.run([AGREE, "--timeout", timeout, HABITS, name], 2, ENVIRONMENT, timeout=90)
    output = result.out + result.err
    if name not in WRONG_TRAININGS:
        assert result.code == 0 and f"verdict: {NO_PROBLEMS}\n" in result.out, output
        assert "not seen" not in result.out and "after step " not in result.out, output
        return
    verdict, detail = WRONG_TRAININGS[name]
    verdict = f"wrong: {verdict}" if verdict else NO_PROBLEMS
    assert result.code == ("wrong" in verdict) and f"verdict: {verdict}\n" in result.out, output
    assert re.search(detail, result.out), output


def test_fsdp_of_a_model_on_the_meta_device_gets_its_verdict():
    small = ["--layers", 2, "--width", 16, "--heads", 2, "--context", 8, "--global-batch-size", 8]
    result = forked.run([AGREE, "--seconds", 0, ROOT / "05_zero" / "fsdp.py", *small], 2,
                        ENVIRONMENT, timeout=90)
    assert result.code == 0 and f"verdict: {NO_PROBLEMS}\n" in result.out, result.out + result.err
    assert re.search("gradients the optimizer uses +the mean", result.out), result.out


@pytest.mark.check
def test_two_ranks_on_one_gpu_are_reported():
    """Rank reports are made up, so no GPU is needed."""
    reports = [{"gpu": gpu, "device": "cuda:0"} for gpu in "ab"]
    assert not verdicts.judge_devices(reports)[1]
    assert verdicts.judge_devices([*reports, reports[0]])[1].keys() == {"one GPU"}


def loader_facts(indices, probes=("a", "b"), are_set=(True,), shares=2):
    """Return what agree knows of a DistributedSampler's loader, with the same order each epoch."""
    epochs = [{"indices": list(indices), "shuffled": True, "is set": is_set, "seed": 0,
               "sampler": 0} for is_set in are_set]
    return {"dataset_size": 100, "probes": list(probes), "shares": shares,
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
@pytest.mark.parametrize(("shares", "expected"), [(1, {"same data", "sampler"}), (2, set())])
def test_a_sampler_for_one_rank_is_reported(shares, expected):
    drawn = [range(100)] * 2 if shares == 1 else [range(50), range(50, 100)]
    loaders = [loader_facts(indices, shares=shares) for indices in drawn]
    findings = samples.judge_loader(loaders)[1]
    assert samples.judge_sampler(loaders, findings).keys() == expected


@pytest.mark.check
@pytest.mark.parametrize(("are_set", "expected"), [
    ([True, True], {"order"}), ([False, False], {"order"}),  # set_epoch(0) twice; no set_epoch
    ([True], set()), ([False], {"note"})])
def test_equal_orders_are_a_mistake_if_no_epoch_is_a_probe(are_set, expected):
    facts = loader_facts(range(0, 100, 2), are_set=are_set)
    assert samples.judge_order(facts, "steps").keys() == expected


def test_agree_does_not_change_the_training(tmp_path):
    line = "            loss_sum += loss.item()\n"
    values = "rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item()"
    script = copy_and_edit("03_ddp", tmp_path, (line, f"{line}            print({values})\n"),
                           name="your_script_ddp.py")
    plain_run = forked.run([script], 2, ENVIRONMENT, timeout=90, cwd=tmp_path)
    agree_run = forked.run([AGREE, "--steps", 6, script], 2, ENVIRONMENT, timeout=90)
    for rank in "01":
        plain_lines = re.findall(f"^{rank} .*", plain_run.out, re.M)
        lines = re.findall(f"^{rank} .*", agree_run.out, re.M)
        assert len(lines) >= 5 and lines == plain_lines[:len(lines)]
    assert re.search("2 ranks on 1 node, 6 steps, [0-9]+ more .*; DDP", agree_run.out)
    assert f"verdict: {NO_PROBLEMS}\n" in agree_run.out, agree_run.out


def test_missing_set_epoch_is_reported_in_the_second_epoch(tmp_path):
    """After the measured steps, the script goes on; its loaders' workers persist."""
    script = copy_and_edit("03_ddp", tmp_path, ("sampler.set_epoch(epoch)", "pass"),
                           name="your_script_ddp.py")
    result = forked.run([AGREE, script], 2, ENVIRONMENT, timeout=90)
    assert "verdict: wrong: order\n" in result.out, result.out + result.err


@pytest.mark.fault
def test_agree_does_not_let_a_script_start_its_ranks():
    result = forked.run([AGREE, HABITS, "starts_its_ranks"], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2, result.out
    assert re.search(r"^agree: .* starts its ranks itself, at habits\.py:\d+", result.err, re.M)


def test_tensor_parallelism_is_not_checked():
    result = forked.run([AGREE, HABITS, "tensor_parallel"], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2 and "note: tensor parallelism: not compared" in result.out, result.out


@pytest.mark.parametrize("is_module", [False, True], ids=["file", "module"])
def test_a_script_imports_its_own_modules(is_module, tmp_path):
    """As under python: a file from its folder, a module from its package."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "sizes.py").write_text("INPUTS = 8\n")
    own = ".sizes" if is_module else "sizes"
    text = HABITS.read_text().replace("import copy\n", f"import copy\nfrom {own} import INPUTS\n")
    (folder / "train.py").write_text(text.replace("nn.Linear(8,", "nn.Linear(INPUTS,"))
    start = ["-m", "package.train"] if is_module else [folder / "train.py"]
    result = forked.run([AGREE, *start, "micro_batches"], 2, ENVIRONMENT, timeout=90, cwd=tmp_path)
    assert result.code == 0 and "data  " in result.out, result.out + result.err
    assert "96 samples" not in result.out and "60 samples given" in result.out, result.out


@pytest.mark.fault
@pytest.mark.parametrize(("name", "text", "problem"), [
    ("mine.py", "print('no training here')\n", "not all ranks have taken a step of a PyTorch opt"),
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
