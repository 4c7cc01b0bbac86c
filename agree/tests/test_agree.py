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

from agree import internals, launcher, samples

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
    "compiled_in_bf16", "rank_0_alone", "weights_averaged", "loss_divided_and_summed", "closure",
    "gradients_by_hand", "a_stream_for_each_rank", "clips_all_micro_batches", "several_models",
    "averaged_by_mpi",
    pytest.param("by_horovod", marks=[pytest.mark.core, skip_without("02_horovod")]))
WRONG_TRAININGS = {  # {function of habits.py: (expected verdict, what else the output contains)}
    "no_process_group": ("alone", ""),
    "inner_model_is_called": ("own gradients", "call a model that"),
    "a_layer_is_not_sharded": ("part", "fully_shard"),
    "a_tensor_in_no_module": ("part", "wrap every model"),
    "weights_of_each_rank": ("weights", "broadcast rank 0's"),
    "shards_of_each_rank": ("weights", "set_model_state_dict"),
    "an_average_on_rank_0": ("apart", "rank 1 never changes it.*at the same step"),
    "a_plateau_of_each_rank": ("apart", "learning rates"),
    "one_stream_for_all": ("same data", "islice"),
    "rows_of_one_seed": ("same data", r"given to the models;.*order\[rank::world_size\]"),
    "rows_of_the_step_before": ("overlap", "in other steps"),
    "one_noise_for_all": ("same noise", r"dropout, .*PyTorch's .*Python's .*seed \+ rank"),
    "split_by_a_seed_per_rank": ("overlap", "what shuffles or splits"),
    "one_time_for_all": ("same noise", "tensor 2 of the models' inputs"),
    "a_sampler_with_a_seed_per_rank": ("sampler", "with one seed"),
    "a_sampler_for_one_rank": ("sampler", "created after init_process_group"),
    "a_rank_skips_a_batch": ("sequence", "decide together"),
    "rank_0_evaluates_by_ddp": ("sequence", "if rank == 0"),
    "other_collectives": ("sequence", r"rank 0 calls all_reduce of 1 numbers at habits\.py:\d+, "
                          r"in other_collectives.*; rank 1 calls all_reduce of 2"),
    "rank_1_ends_early": ("own gradients, steps", "drop_last"),
    "a_barrier_on_rank_0": ("hang", r"rank 0 +at habits\.py:\d+"),
    "clips_each_micro_batch": ("other gradients", "average first"),
    "summed": ("sum", "op=AVG"), "averaged_twice": ("twice", "divide once"),
    "gradients_of_rank_0": ("one rank's", "those of rank 0"),
    "optimizer_before_sharding": ("nothing trains", r"after fully_shard\(\)"),
    "root_of_a_negative": ("not finite", "before averaging"),
    "one_mask_for_all": ("", r"note: PyTorch's random numbers are the same .*seed \+ rank"),
    "notes_alone": ("", r"after step 1, rank 0 draws .* rank 1 calls")}
HANGS = "a_rank_skips_a_batch", "a_barrier_on_rank_0"
HABITS = FOLDER / "tests" / "habits.py"


@pytest.mark.parametrize("name", [*CORRECT_TRAININGS, *WRONG_TRAININGS])
def test_patterns_of_public_scripts_get_their_verdict(name):
    if name.endswith("by_mpi"):
        result = run_command([*MPIEXEC, HABITS, name], timeout=90, env=CHECKOUT)
    else:
        timeout = 5 if name in HANGS else 30  # a busy machine may stand still for seconds
        program = [HABITS, name] if name != "by_horovod" else [HABITS.with_name("by_horovod.py")]
        result = forked.run([AGREE, "--timeout", timeout, *program], 2, ENVIRONMENT, timeout=90)
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


def loader_facts(indices, probes):
    """Return what agree knows of a DistributedSampler's loader after an epoch."""
    epoch = {"indices": list(indices), "shuffled": True, "is set": True, "seed": 0, "sampler": 0}
    return {"dataset_size": 100, "probes": list(probes), "shares": 2, "without_replacement": True,
            "is_distributed": True, "epochs": [epoch],
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


def test_agree_does_not_change_the_training(tmp_path):
    line = "            loss_sum += loss.item()\n"
    values = "rank, loss.item(), model[0].weight.sum().item(), torch.rand(1).item()"
    script = copy_and_edit("03_ddp", tmp_path, (line, f"{line}            print({values})\n"),
                           name="your_script_ddp.py")
    plain_run = forked.run([script], 2, ENVIRONMENT, timeout=90, cwd=tmp_path)
    agree_run = forked.run([AGREE, "--steps", 6, "--seconds", 5, script], 2, ENVIRONMENT,
                           timeout=90)
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
    result = forked.run([AGREE, "--seconds", 10, script], 2, ENVIRONMENT, timeout=90)
    assert "verdict: wrong: order\n" in result.out, result.out + result.err


@pytest.mark.fault
def test_agree_does_not_let_a_script_start_its_ranks():
    result = forked.run([AGREE, HABITS, "starts_its_ranks"], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2, result.out
    assert re.search(r"^agree: .* starts its ranks itself, at habits\.py:\d+", result.err, re.M)


@pytest.mark.parametrize(("name", "note"), [
    ("tensor_parallel", "tensor parallelism: not compared"),
    ("rank_0_searches_alone", r"not compared: .* ranks 0 to 1 took \[8, 0\] steps")])
def test_what_agree_cannot_judge_is_not_checked(name, note):
    result = forked.run([AGREE, HABITS, name], 2, ENVIRONMENT, timeout=90)
    assert result.code == 2 and "verdict: not checked" in result.out, result.out + result.err
    assert re.search(f"^note: {note}", result.out, re.M), result.out


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
    result = forked.run([AGREE, *start, "clips_all_micro_batches"], 2, ENVIRONMENT, timeout=90,
                        cwd=tmp_path)
    assert result.code == 0 and "data  " in result.out, result.out + result.err
    assert "96 samples" not in result.out and "60 samples given" in result.out, result.out


@pytest.mark.fault
@pytest.mark.parametrize(("text", "problem"), [
    ("print('no training here')\n", "not all ranks have taken a step of a PyTorch opt"),
    ("import os, torch\nif os.environ['RANK'] == '1':\n"
                "    raise ValueError('a bad\\nimage')\n", "rank 1 ended with ValueError: a bad$"),
    ("import os, torch\nif os.environ['RANK'] == '1':\n    os._exit(1)\n",
     "rank 1 ended with exit code 1$")], ids=["no step", "dies", "os._exit"])
def test_scripts_that_agree_cannot_run_get_one_line(text, problem, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(text)
    result = forked.run([AGREE, script], 2, ENVIRONMENT, timeout=90)
    errors = re.findall("^agree: .*", result.err, re.M)
    assert result.code == 2 and len(errors) == 1, result.out + result.err
    assert re.search(problem, errors[0])


@pytest.mark.fault
@pytest.mark.parametrize(("arguments", "message"), [
    ("none.py", "no file"), ("mine.py", "needs at least 2 ranks"),
    ("--steps 0 mine.py", "--steps and --timeout must be more than 0"),
    ("--seconds -1 mine.py", "--seconds at least 0")])
def test_bad_arguments_get_one_line(arguments, message, tmp_path):
    (tmp_path / "mine.py").touch()
    result = run_command([sys.executable, "-m", "agree", *arguments.split()], cwd=tmp_path,
                         env=CHECKOUT)
    assert_refused(result, message, "agree")


@pytest.mark.check
def test_the_installed_pytorch_is_as_agree_expects():
    assert internals.check() == {}


@pytest.mark.fault
@pytest.mark.parametrize(("change", "name", "expected"), [
    ("del torch.utils.data.dataloader._BaseDataLoaderIter._reset", "rank_0_alone",
     r"note: what DataLoaders draw: not available; torch .*_reset \(self, loader, first_iter\)"),
    ("groups = torch.distributed.fsdp._fully_shard._fsdp_param_group\n"
     "reduce = groups.foreach_reduce\n"
     "groups.foreach_reduce = lambda *args, **options: reduce(*args, **options)",
     "shards_of_each_rank", "note: FSDP2: not compared; torch .* has no .*foreach_reduce"),
    ("torch.autograd.backward = lambda: None", "summed", "could not check: torch .*backward")],
    ids=["data", "FSDP2", "all"])
def test_internals_that_differ_give_a_line_and_no_wrong_verdict(change, name, expected, tmp_path):
    """As in another version of PyTorch."""
    program = tmp_path / "other.py"
    program.write_text(f"import sys\nimport torch.distributed.fsdp\n{change}\n"
                       "from agree.__main__ import main\nsys.exit(main())\n")
    result = forked.run([program, HABITS, name], 2, ENVIRONMENT)
    assert result.code == 2, result.out + result.err
    assert re.search(expected, result.out + result.err), result.out + result.err
    assert "no problems" not in result.out and "wrong" not in result.out, result.out


RENDEZVOUS = "RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1"


@pytest.mark.check
@pytest.mark.parametrize(("variables", "expected"), [  # launcher, rank, world size; or the message
    ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 PMI_RANK=1 PMI_SIZE=2", ("srun", 1, 2)),
    ("SLURM_PROCID=0 SLURM_NTASKS=2", (None, 0, 1)),  # python in an allocation
    ("HOROVOD_RANK=1 HOROVOD_SIZE=2 PMI_RANK=0 PMI_SIZE=1", ("horovodrun", 1, 2)),
    (RENDEZVOUS, ("torchrun", 3, 4)),
    (f"{RENDEZVOUS} PMI_RANK=1 PMI_SIZE=2", ("MPICH", 1, 2)),
    (f"{RENDEZVOUS} TORCHELASTIC_RUN_ID=a GROUP_WORLD_SIZE=1 PMI_RANK=1 PMI_SIZE=2",
     "MPICH has started 2 times torchrun"),
    ("PALS_RANKID=1", (None, 0, 1)),  # refused, because agree needs 2 ranks
    ("PMI_RANK=x PMI_SIZE=2", "PMI_RANK is 'x', not a number")])
def test_variables_of_several_launchers_give_one_world_or_a_line(variables, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(pair.split("=") for pair in variables.split()))
    if isinstance(expected, str):
        with pytest.raises(SystemExit, match=expected):
            launcher.find_launcher()
    else:
        assert launcher.find_launcher() == expected
