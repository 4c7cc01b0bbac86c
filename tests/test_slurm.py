"""Submit scripts on a Slurm with two nodes of a lab; its qsub runs the PBS scripts."""

import os
import re
import shutil
import sys

import pytest
import torch
from conftest import BIN, ROOT, copy_and_edit, needs_root, read_records, run_command, run_for_record
from lab import LAB_SH, LAB_UNAVAILABLE, Lab
from test_deaths import copy_with_fault
from tolerances import assert_equal_in_fp64

from tools.measuring.parameters import parameters

MISSING_PROGRAMS = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "qsub")
                    if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")]
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-torque"
NO_SLURM = f"no {MISSING_PROGRAMS[0]} here: apt install {PACKAGES}" if MISSING_PROGRAMS else None
needs_slurm = needs_root(NO_SLURM or LAB_UNAVAILABLE)


class Cluster:
    """A Slurm on two nodes, and a copy of the chapters in a folder with a space in its name."""

    def __init__(self, folder):
        self.folder = folder / "the workshop"
        for name in "03_ddp", "cluster", "submit", "workshop":
            shutil.copytree(ROOT / name, self.folder / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        self.lab = Lab(f"slurm-{os.getpid()}")
        self.lab("up", 2, "--slurm")
        self.env = self.lab.env | {"VENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
        self.write_site_files(folder)
        (folder / "bin").mkdir()  # an environment like Polaris', in which PALS's mpiexec is first
        (folder / "bin" / "activate").write_text(
            f'. "{sys.prefix}/bin/activate"\nPATH="{ROOT}/tests/pals:$PATH"\n')
        (folder / ".bash_profile").write_text("module() { :; }; conda() { :; }\n")  # for bash -l
        self.polaris = {"SITE": "polaris", "VENV": str(folder), "PALS_PPN": "1",
                        "HOME": str(folder)}

    def write_site_files(self, folder):
        """Write a site file and course.sh outside the clone, without a reservation."""
        self.course_file, site = folder / "course.sh", folder / "our site.sh"
        shutil.copy(ROOT / "submit" / "sites" / "slurm_cpu.sh", site)
        text = (ROOT / "submit" / "course.sh").read_text()
        for old, new in (("/shared/mine.sh", site), ("/shared/workshop-env", sys.prefix),
                         ("PARTITION=gpu", "PARTITION=debug"),
                         (" SBATCH_RESERVATION=course", "")):
            text = text.replace(old, str(new))
        self.course_file.write_text(text)

    def run(self, *command, chapter="03_ddp", env=None, codes=(0,), timeout=240):
        """Return the output of a command in a chapter's folder on the login node."""
        result = run_command([LAB_SH, "on", "login", *command], timeout, self.env | (env or {}),
                             self.folder / chapter)
        assert result.code in codes, result
        return result.out

    def sbatch(self, *flags):
        """Source course.sh, submit on two nodes, as an attendee does, and wait for the job."""
        script = '. "$0" && sbatch --wait "$@" || { cat job.txt; exit 1; }'
        self.run("bash", "-c", script, self.course_file, "--output=job.txt", "--cpus-per-task=1",
                 "-N", 2, "--ntasks-per-node=1", "submit.slurm", *flags)

    def qsub(self, *flags):
        """Submit on two nodes with Polaris' site file, and wait for the job."""
        env = self.polaris | {"FLAGS": " ".join(map(str, flags))}
        self.run("qsub", "-V", "-W", "block=true", "-l", "select=2:system=polaris",
                 "-o", "job.txt", "submit.pbs", env=env)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.lab.down()


@needs_slurm
def test_submit_scripts_train_as_one_rank_does(cluster, tmp_path):
    """sbatch and qsub on two nodes, and python alone, take the same steps to the same parameters.

    Site slurm_cpu starts the ranks by srun --mpi=pmi2, Polaris' file by tests/pals/mpiexec, which
    replaces that of Cray PALS.
    """
    flags = ("--global-batch-size", 320, "--epochs", 1, "--device", "cpu", "--precision", "fp64")
    files = {name: ("--checkpoint", tmp_path / name, "--results", tmp_path / f"{name}.jsonl")
             for name in ("sbatch", "qsub")}
    one_rank = run_for_record("03_ddp", 1, *flags, "--checkpoint", tmp_path / "python",
                              folder=tmp_path)
    for name in files:
        getattr(cluster, name)(*flags, *files[name])
        records = read_records(tmp_path / f"{name}.jsonl")
        assert [(record["ranks"], record["nodes"], record["steps"]) for record in records] == [
            (2, 2, one_rank["steps"])], (cluster.folder / "03_ddp" / "job.txt").read_text()
        assert_equal_in_fp64(parameters(tmp_path / name), parameters(tmp_path / "python"))


@needs_slurm
def test_srun_without_mpi_starts_one_world(cluster, tmp_path):
    cluster.run("srun", "--mpi=none", "-N", 2, "-n", 2, BIN / "python", "main.py",
                "--max-steps", 1, "--device", "cpu", "--results", tmp_path / "results")
    record, = read_records(tmp_path / "results")  # one world, not two
    assert (record["ranks"], record["nodes"]) == (2, 2)


@needs_slurm
@pytest.mark.slow
def test_the_rehearsal_submits_in_the_reservation(cluster):
    cluster.run("sh", "-c", "scontrol create reservation ReservationName=course StartTime=now "
                "Duration=9 Nodes=ALL Users=$(id -un)")
    script = '. "$0" && SBATCH_RESERVATION=course bash submit/rehearse.sh'
    output = cluster.run("bash", "-c", script, cluster.course_file, chapter=".")
    cluster.run("scontrol", "delete", "ReservationName=course")
    assert output.count(" s from submission to end; ranks: ") == 3, output
    assert re.search("chapter 3 on one node: ready; .* ranks: 2, nodes: 1$", output, re.M), output
    assert re.search("chapter 3 on two nodes: ready; .* ranks: 4, nodes: 2$", output, re.M), output
    assert re.search("\nnote: the job has 2 GPUs.*\nready, if the notes", output, re.S), output


@needs_slurm
@pytest.mark.fault
def test_a_killed_rank_ends_the_slurm_step(cluster, tmp_path):
    """The ranks start as in the site files; the other node's rank waits in an all-reduce."""
    main = copy_with_fault("03_ddp", tmp_path, "rank == 1 and step == 3", "os.kill(os.getpid(), 9)")
    cluster.run("timeout", 90, "srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-N", 2, "-n", 2,
                BIN / "python", main, "--device", "cpu", codes={*range(1, 256)} - {124})


GO_ON = re.search(r"```bash\n(touch started\n.*?)```",
                  (ROOT / "03_ddp" / "YOUR_SCRIPT.md").read_text(), re.S)[1]
TIME_LIMITED = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=2 --output=job.txt
#SBATCH --signal=TERM@10 --requeue --open-mode=append
. "$VENV/bin/activate"
{GO_ON.replace("my_train.py", "your_script_ddp.py")}"""


@pytest.mark.check
@pytest.mark.parametrize(("training", "code", "goes_on"), [
    ("exit 1", 1, False), ("touch -t 203001010000 digits.checkpoint", 0, True),
    ("touch -t 203001010000 digits.checkpoint; touch -t 203001010001 digits.pt", 0, False)])
def test_a_job_goes_on_only_if_it_has_saved_and_is_not_done(training, code, goes_on, tmp_path):
    """The files of an earlier training are there, too."""
    for name in "digits.checkpoint", "digits.pt":
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    commands = f"srun() {{ ({training}) }}\nscontrol() {{ echo $1; }}\n"
    result = run_command(["bash", "-c", commands + GO_ON], cwd=tmp_path)
    assert (result.code, result.out) == (code, "requeue\n" * goes_on), result


@pytest.mark.slow
@needs_slurm
def test_a_job_that_its_time_limit_ends_goes_on_by_itself(cluster, tmp_path):
    """As YOUR_SCRIPT.md says. The job needs more than its two minutes, and has data workers."""
    in_fp64 = (".float()", ".double()"), ("10)).to(device)", "10)).double().to(device)")
    folder = cluster.folder / "time limit"
    copy_and_edit("03_ddp/your_script_ddp.py", folder, *in_fp64,
                  ("step += 1\n", "step += 1; time.sleep(1)\n"),
                  ("import signal\n", "import signal, time\n"))
    (folder / "limited.slurm").write_text(TIME_LIMITED)
    cluster.run("sbatch", "--wait", "limited.slurm", chapter=folder.name, timeout=600)
    output = (folder / "job.txt").read_text()
    assert output.count("2 ranks on cpu") > 1, output
    whole = copy_and_edit("03_ddp/your_script_ddp.py", tmp_path / "whole", *in_fp64)
    run_command([sys.executable, whole], cwd=whole.parent)
    assert_equal_in_fp64(torch.load(folder / "digits.pt"), torch.load(whole.with_name("digits.pt")))
