"""Submit scripts: Slurm on two nodes of a lab, PBS scripts through its qsub, and their headers."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from conftest import (
    BIN,
    LESSONS,
    ROOT,
    copy_of,
    execute,
    lines,
    needs_root,
    parameters,
    record,
    tracked,
)
from lab import LAB, Lab
from tolerances import FP64, close

MISSING = next((name for name in ("slurmctld", "slurmd", "munged", "sbatch", "qsub")
                if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")), None)
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-torque"
real_slurm = needs_root(f"no {MISSING} here: apt install {PACKAGES}" if MISSING else LAB)
ONE_STEP = ("--max-steps", "1", "--device", "cpu")
SITES = sorted(tracked(ROOT.glob("submit/sites/*.sh")))


class Cluster:
    """The chapters in a folder with a space in its name, and a Slurm that runs their scripts."""

    def __init__(self, folder):
        self.folder = folder / "the workshop"
        for name in "03_ddp", "submit":
            shutil.copytree(ROOT / name, self.folder / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        self.lab = Lab(f"slurm-{os.getpid()}")
        self.lab("up", 2, "--slurm")
        self.env = self.lab.env | {"VENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
        self.write_site_files(folder)
        (folder / "bin").mkdir()  # an environment like Polaris': PALS's mpiexec comes first
        (folder / "bin" / "activate").write_text(
            f'. "{sys.prefix}/bin/activate"\nPATH="{ROOT}/tests/pals:$PATH"\n')
        (folder / ".bash_profile").write_text("module() { :; }; conda() { :; }\n")  # for bash -l
        self.polaris = {"SITE": "polaris", "VENV": str(folder), "PALS_PPN": "1",
                        "HOME": str(folder)}

    def write_site_files(self, folder):
        """Write a site file and course.sh outside the clone, without a reservation."""
        self.course, site = folder / "course.sh", folder / "our site.sh"
        shutil.copy(ROOT / "submit" / "sites" / "slurm_cpu.sh", site)
        text = (ROOT / "submit" / "course.sh").read_text()
        for old, new in (("/shared/mine.sh", site), ("/shared/workshop-env", sys.prefix),
                         ("PARTITION=gpu", "PARTITION=debug"),
                         (" SBATCH_RESERVATION=course", "")):
            assert text.count(old) == 1, old
            text = text.replace(old, str(new))
        self.course.write_text(text)

    def run(self, *words, chapter="03_ddp", env=None, codes=(0,)):
        """Return a command's output, in a chapter's folder on the login node."""
        words = [ROOT / "submit" / "lab.sh", "on", "login", *words]
        done = subprocess.run([str(word) for word in words], cwd=self.folder / chapter,
                              env=self.env | (env or {}), text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
        assert done.returncode in codes, done.stdout
        return done.stdout

    def sbatch(self, *flags, chapter="03_ddp", script="submit.slurm"):
        """Source course.sh and submit on two nodes, as an attendee does. Return the job number."""
        return re.search(r"\d+", self.run(
            "bash", "-c", '. "$0" && sbatch "$@"', self.course, "--output=job-%j.txt",
            "--cpus-per-task=1", "-N", 2, "--ntasks-per-node=1", script, *flags,
            chapter=chapter))[0]

    def qsub(self, *flags, chapter="03_ddp", script="submit.pbs"):
        return self.run("qsub", "-V", "-o", "job-%j.txt", "-l", "select=2:system=polaris", script,
                        chapter=chapter,
                        env=self.polaris | {"FLAGS": " ".join(map(str, flags))}).strip()

    def end(self, job, chapter="03_ddp", timeout=240):
        """Return a job's state, such as COMPLETED 0:0, and its output; a hang fails the test."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            shown = self.run("scontrol", "show", "job", job)
            state, code = re.search(r"JobState=(\S+).*ExitCode=(\S+)", shown, re.S).groups()
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return f"{state} {code}", (self.folder / chapter / f"job-{job}.txt").read_text()
            time.sleep(0.2)
        self.run("scancel", job)
        pytest.fail(f"job {job} is still {state}: {shown}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.lab.down()


@real_slurm
def test_a_submit_script_trains_as_one_rank_does(cluster, tmp_path):
    """sbatch and qsub on two nodes, and python alone: the same steps and parameters.

    Site slurm_cpu starts the ranks by srun --mpi=pmi2, Polaris' file by an mpiexec that stands in
    for Cray PALS.
    """
    flags = ("--global-batch-size", 320, "--epochs", 1, "--device", "cpu", "--precision", "fp64")
    files = {name: ("--checkpoint", tmp_path / name, "--results", tmp_path / f"{name}.jsonl")
             for name in ("sbatch", "qsub")}
    jobs = [cluster.sbatch(*flags, *files["sbatch"]), cluster.qsub(*flags, *files["qsub"])]
    alone = record("03_ddp", 1, *flags, "--checkpoint", tmp_path / "python", folder=tmp_path)
    for job in jobs:
        state, printed = cluster.end(job)
        assert state == "COMPLETED 0:0", printed
    for name in files:
        result, = lines(tmp_path / f"{name}.jsonl")
        assert (result["ranks"], result["nodes"], result["steps"]) == (2, 2, alone["steps"])
        one, other = parameters(tmp_path / "python"), parameters(tmp_path / name)
        close("parameters, fp64", abs(other - one).max(), FP64)


@real_slurm
def test_srun_without_mpi(cluster, tmp_path):
    cluster.run("srun", "--mpi=none", "-N", 2, "-n", 2, BIN / "python", "main.py", *ONE_STEP,
                "--results", tmp_path / "results")
    result, = lines(tmp_path / "results")  # one world, not two
    assert (result["ranks"], result["nodes"]) == (2, 2)


@real_slurm
@pytest.mark.slow
def test_the_doctor_as_a_job(cluster):
    """Each node's gloo uses the address that the other one reaches."""
    jobs = [cluster.sbatch(chapter="submit", script="doctor.slurm"),
            cluster.qsub(chapter="submit", script="doctor.pbs")]
    for job in jobs:
        state, printed = cluster.end(job, "submit")
        assert state == "COMPLETED 0:0", printed
        assert re.search("node nid2: local ranks 0, .*gloo uses 10.77.0.2,", printed), printed
        assert "ranks: 2, nodes: 2\n" in printed and "nothing wrong was found" in printed


@real_slurm
@pytest.mark.parametrize("reservation", [
    pytest.param("course", marks=pytest.mark.slow), "of another day"])
def test_readiness_script(cluster, reservation):
    """Jobs run through a valid reservation, and an invalid one is reported."""
    words = f'. "$0" && SBATCH_RESERVATION="{reservation}" bash submit/ready.sh'
    is_ready = reservation == "course"
    if is_ready:
        cluster.run("sh", "-c", "scontrol create reservation ReservationName=course StartTime=now "
                    "Duration=9 Nodes=ALL Users=$(id -un)")
    printed = cluster.run("bash", "-c", words, cluster.course, chapter=".",
                          codes=(0,) if is_ready else (3,))
    if is_ready:
        cluster.run("scontrol", "delete", "ReservationName=course")
    ready = re.findall("ready; .* s from submission to end; ranks: ", printed)
    assert len(ready) == 3 * is_ready, printed
    assert printed.endswith("\nready\n") or "Requested reservation is invalid" in printed


@real_slurm
@pytest.mark.fault
def test_a_rank_that_dies_ends_the_step(cluster, tmp_path):
    """Started as the site files do; the other node's rank waits in an all-reduce."""
    backward = "            loss.backward()"
    main = copy_of("03_ddp", tmp_path / "copy", (backward, f"""\
            if rank == 1 and step == 3:
                os.kill(os.getpid(), 9)
{backward}"""))
    started = time.monotonic()
    cluster.run("srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-N", 2, "-n", 2, BIN / "python",
                main, "--device", "cpu", "--timeout", 20, codes=range(1, 256))
    assert time.monotonic() - started < 90


# Without a scheduler

def test_a_submit_script_runs_on_this_machine(tmp_path):
    """Step 2 of the five from a laptop to a cluster."""
    done = execute(["bash", "submit.slurm", *ONE_STEP, "--results", tmp_path / "results"],
                   cwd=ROOT / "03_ddp", env={"SITE": "here", "VENV": sys.prefix})
    assert done.code == 0, done.err
    result, = lines(tmp_path / "results")
    assert result["ranks"] == 2


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize(("env", "message"), [
    ({"SITE": "atlantis"}, "SITE=atlantis: there is no submit/sites/atlantis.sh"),
    ({"VENV": "/nowhere"}, "no environment in /nowhere: make setup SITE=here"),
    ({"FLAGS": "--data-dir 'my data'"}, "no flag may contain")])  # PBS would tear it apart
def test_what_is_missing_is_named(env, message):
    env = {"SITE": "here", "VENV": sys.prefix, "PBS_O_WORKDIR": str(ROOT / "03_ddp")} | env
    done = execute(["bash", "submit.pbs"], cwd=ROOT / "03_ddp", env=env)
    assert done.code == 2 and message in done.err and not done.out, done.err


@pytest.mark.check
@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_site_file_launches_ranks(site, tmp_path):
    """On the batch system's number of ranks, then on the sweep's RANKS and NODES."""
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")  # each node counts once
    env = {"PBS_NODEFILE": "nodes", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "USER": "me",
           "SLURM_CPUS_PER_TASK": "8", "MVAPICH": "/m", "PYTORCH": "/p", "CONTAINER": "/c.sif"}
    words = ('module() { :; }; conda() { :; }; mpiexec() { echo mpiexec "$@"; }; '
             f'srun() {{ echo srun "$@"; }}; . "{site}"; launch python main.py --epochs 3; '
             'RANKS=5 NODES=1; launch python')
    done = execute(["bash", "-euc", words], env=env, cwd=tmp_path)
    assert done.code == 0, done.err
    first, second = done.out.splitlines()
    assert re.match("(mpiexec|srun) .*python main.py --epochs 3$", first)
    assert re.search(" (-n |--ntasks=)5 ", second)


# Headers

@pytest.mark.check
def test_submit_scripts_of_all_chapters_are_equal():
    for name in "submit.pbs", "submit.slurm":
        for folder in {path.parent for path in LESSONS.values()} - {ROOT / "01_single_node"}:
            text = re.sub(r"(-N |--job-name=)\w+", r"\1ddp", (folder / name).read_text())
            assert text.replace(":-../..}", ":-..}") == (ROOT / "03_ddp" / name).read_text()


@pytest.mark.check
def test_header_check_accepts_ours_and_reports_errors(tmp_path):
    """Lines of other scripts: those that Slurm and PBS ignore, and those that they read."""
    def check(*paths):
        return execute([sys.executable, ROOT / "submit" / "check_script.py", *paths])

    scripts = tracked(path for pattern in ("0*/**/submit.*", "submit/*.pbs", "submit/*.slurm")
                      for path in ROOT.glob(pattern))
    done = check(*scripts)
    assert len(scripts) > 10 and (done.code, done.out) == (0, ""), done.out
    path = tmp_path / "submit"
    (tmp_path / "here").mkdir()
    for line, message in {
            "# SBATCH --nodes=2": "not read by the scheduler", "#Sbatch -N 2": "write `#SBATCH `",
            "#sbatch -N 2 # nodes": "write `#SBATCH `", "ls\n#SBATCH --nodes=2": "first command",
            " #SBATCH -N 2": "write `#SBATCH `", "#SBATCH --output=logs/%j.out": "no folder logs:",
            "#SBATCH -N 1 -e logs/%x # mine": "no folder logs:", "#PBS -o logs/": "no folder logs:",
            "#SBATCH --error 'here/%j/err'": "no folder here/%j", "#SBATCH -o here/": "is a folder",
            "#SBATCH -o $HOME/out": "no folder $HOME", "#SBATCH -o /usr/logs/%j": "/usr/logs:",
            "#!/bin/bash\n#SBATCH -o logs/%j": "no folder logs:", "  #PBS -l ncpus=3": "",
            "#sbatch -N 2 run": "", "# sbatch --array=1-5 a.slurm": "", "#SBATCH hetjob": "",
            "ls <<A\n#SBATCH -N 2\nA": "", "echo '#!/bin/sh\n#SBATCH -N 2'": "",
            "#SBATCH -D x\n#SBATCH -o logs/%j": "", "#SBATCH -o here/%x.%j -e /dev/null": "",
            "#SBATCH -o /nowhere/x -e ../x": "", "#PBS -o host:logs/x -e here/$x/": ""}.items():
        path.write_text(f"#!/bin/bash\n#PBS -l place=scatter:group=tier0,ncpus=3\n{line}\n")
        done = check(path)
        assert done.code == bool(message) and message in done.out, (line, done.out)
        assert done.out.count("\n") == bool(message), (line, done.out)
