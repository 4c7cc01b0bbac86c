"""Submit scripts on a Slurm with two nodes of a lab; its qsub runs the PBS scripts."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    BIN,
    LESSONS,
    ROOT,
    copy_and_edit,
    needs_root,
    parameters,
    read_records,
    run_command,
    run_for_record,
    tracked_files,
)
from lab import LAB_SH, LAB_UNAVAILABLE, Lab
from test_deaths import copy_with_fault
from tolerances import assert_equal_in_fp64

MISSING_PROGRAMS = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "qsub")
                    if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")]
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-torque"
NO_SLURM = f"no {MISSING_PROGRAMS[0]} here: apt install {PACKAGES}" if MISSING_PROGRAMS else None
needs_slurm = needs_root(NO_SLURM or LAB_UNAVAILABLE)
ONE_STEP = ("--max-steps", "1", "--device", "cpu")
SITES = sorted(tracked_files(ROOT.glob("submit/sites/*.sh")))


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
            assert text.count(old) == 1, old
            text = text.replace(old, str(new))
        self.course_file.write_text(text)

    def run(self, *command, chapter="03_ddp", env=None, codes=(0,)):
        """Return the output of a command in a chapter's folder on the login node."""
        command = [LAB_SH, "on", "login", *command]
        process = subprocess.run([str(word) for word in command], cwd=self.folder / chapter,
                                 env=self.env | (env or {}), text=True, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
        assert process.returncode in codes, process.stdout
        return process.stdout

    def sbatch(self, *flags, chapter="03_ddp", script="submit.slurm"):
        """Source course.sh and submit on two nodes, as an attendee does. Return the job number."""
        output = self.run("bash", "-c", '. "$0" && sbatch "$@"', self.course_file,
                          "--output=job-%j.txt", "--cpus-per-task=1", "-N", 2,
                          "--ntasks-per-node=1", script, *flags, chapter=chapter)
        return re.search(r"\d+", output)[0]

    def qsub(self, *flags, chapter="03_ddp", script="submit.pbs"):
        """Submit on two nodes with Polaris' site file. Return the job number."""
        env = self.polaris | {"FLAGS": " ".join(map(str, flags))}
        output = self.run("qsub", "-V", "-o", "job-%j.txt", "-l", "select=2:system=polaris",
                          script, chapter=chapter, env=env)
        return output.strip()

    def wait_for(self, job, chapter="03_ddp", timeout=240):
        """Return a job's state, such as COMPLETED 0:0, and its output; a hang fails the test."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            report = self.run("scontrol", "show", "job", job)
            state, code = re.search(r"JobState=(\S+).*ExitCode=(\S+)", report, re.S).groups()
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING",
                             "SIGNALING", "REQUEUED"):
                return f"{state} {code}", (self.folder / chapter / f"job-{job}.txt").read_text()
            time.sleep(0.2)
        self.run("scancel", job)
        pytest.fail(f"job {job} is still {state}: {report}")


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
    jobs = [cluster.sbatch(*flags, *files["sbatch"]), cluster.qsub(*flags, *files["qsub"])]
    one_rank = run_for_record("03_ddp", 1, *flags, "--checkpoint", tmp_path / "python",
                              folder=tmp_path)
    for job in jobs:
        state, output = cluster.wait_for(job)
        assert state == "COMPLETED 0:0", output
    for name in files:
        record, = read_records(tmp_path / f"{name}.jsonl")
        assert (record["ranks"], record["nodes"], record["steps"]) == (2, 2, one_rank["steps"])
        assert_equal_in_fp64(parameters(tmp_path / name), parameters(tmp_path / "python"))


@needs_slurm
def test_srun_without_mpi_starts_one_world(cluster, tmp_path):
    cluster.run("srun", "--mpi=none", "-N", 2, "-n", 2, BIN / "python", "main.py", *ONE_STEP,
                "--results", tmp_path / "results")
    record, = read_records(tmp_path / "results")  # one world, not two
    assert (record["ranks"], record["nodes"]) == (2, 2)


@needs_slurm
@pytest.mark.slow
def test_the_doctor_runs_as_a_job(cluster):
    """gloo uses the address at which the other node is reached."""
    jobs = [cluster.sbatch(chapter=".", script="cluster/doctor.slurm"),
            cluster.qsub(chapter=".", script="cluster/doctor.pbs")]
    for job in jobs:
        state, output = cluster.wait_for(job, ".")
        assert state == "COMPLETED 0:0", output
        assert re.search("node nid2: local ranks 0, .*gloo uses 10.77.0.2,", output), output
        assert "ranks: 2, nodes: 2\n" in output and "no problems found" in output


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
    start = time.monotonic()
    cluster.run("srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-N", 2, "-n", 2, BIN / "python",
                main, "--device", "cpu", "--timeout", 20, codes=range(1, 256))
    assert time.monotonic() - start < 90


def test_a_submit_script_runs_without_a_scheduler(tmp_path):
    result = run_command(["bash", "submit.slurm", *ONE_STEP, "--results", tmp_path / "results"],
                         cwd=ROOT / "03_ddp", env={"SITE": "here", "VENV": sys.prefix})
    assert result.code == 0, result.err
    record, = read_records(tmp_path / "results")
    assert record["ranks"] == 2


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize(("env", "message"), [
    ({"SITE": "atlantis"}, "SITE=atlantis: there is no submit/sites/atlantis.sh"),
    ({"VENV": "/nowhere"}, "no environment in /nowhere: make setup SITE=here"),
    ({"FLAGS": "--data-dir 'my data'"}, "no flag may contain")])  # PBS would split it
def test_wrong_variables_of_a_submit_script_are_refused(env, message):
    env = {"SITE": "here", "VENV": sys.prefix, "PBS_O_WORKDIR": str(ROOT / "03_ddp")} | env
    result = run_command(["bash", "submit.pbs"], cwd=ROOT / "03_ddp", env=env)
    assert result.code == 2 and message in result.err and not result.out, result.err


@pytest.mark.check
@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_each_site_file_launches_the_ranks(site, tmp_path):
    """As many as the batch system says, then as many as the sweep says by RANKS and NODES."""
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")  # a node counts once
    env = {"PBS_NODEFILE": "nodes", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "USER": "me",
           "SLURM_CPUS_PER_TASK": "8", "PYTORCH": "/p", "CONTAINER": "/c.sif"}
    command = ('module() { :; }; conda() { :; }; mpiexec() { echo mpiexec "$@"; }; '
               f'srun() {{ echo srun "$@"; }}; . "{site}"; launch python main.py --epochs 3; '
               'RANKS=5 NODES=1; launch python')
    result = run_command(["bash", "-euc", command], env=env, cwd=tmp_path)
    assert result.code == 0, result.err
    first_line, second_line = result.out.splitlines()
    assert re.match("(mpiexec|srun) .*python main.py --epochs 3$", first_line)
    assert re.search(" (-n |--ntasks=)5 ", second_line)


@pytest.mark.check
def test_submit_scripts_of_all_chapters_are_equal():
    for name in "submit.pbs", "submit.slurm":
        for folder in {path.parent for path in LESSONS.values()} - {ROOT / "01_single_node"}:
            text = re.sub(r"(-N |--job-name=)\w+", r"\1ddp", (folder / name).read_text())
            text = re.sub(r'"\${PROGRAM:-(main|fsdp).py}"', "main.py", text)  # two programs
            assert text == (ROOT / "03_ddp" / name).read_text()


@pytest.mark.check
def test_check_script_accepts_ours_and_reports_wrong_headers(tmp_path):
    """The headers are of public scripts; an empty message means that a header is right."""
    def check(*paths):
        return run_command([sys.executable, ROOT / "submit" / "check_script.py", *paths])

    patterns = "0*/**/submit.*", "cluster/*.pbs", "cluster/*.slurm"
    scripts = tracked_files(path for pattern in patterns for path in ROOT.glob(pattern))
    result = check(*scripts)
    assert len(scripts) > 10 and (result.code, result.out) == (0, "no problems found\n"), result
    path = tmp_path / "submit"
    (tmp_path / "here").mkdir()
    for line, message in {
            "# SBATCH --nodes=2": "not read by the scheduler", "#sbatch -N 2": "write `#SBATCH `",
            "#SBTACH --nodes=2": "write `#SBATCH `", "#PSB -q debug": "write `#PBS `",
            "#SBATCH --nodes=2 #SBATCH -n 8": "second directive", "##SBATCH -n 8": "",
            "#SBATCH -o=x": "option -o with the value `=x`", "#SBATCH -output=x": "`utput=x`",
            "#SBATCH -J a \\\n--nodes=2": "not continue", "#PBS -q debug \\\n-l x=y": "",
            "cat <<A\n# SBATCH -n 8\nA": "",
            "#SBATCH --gres=gpu:4\npython a.py": "python is started once",
            "#SBATCH --gres=gpu:4\ntorchrun --nproc-per-node 4 a.py": "",
            "#SBATCH --nodes=2\ntorchrun x.py": "nothing starts", "#SBATCH -N 2\nsrun python x": "",
            "#SBATCH -N 2 --ntasks-per-node=4\nsrun torchrun --nproc-per-node 4 a.py":
                "each of a node's 4 tasks starts torchrun",
            "#SBATCH -N 2 --ntasks-per-node=4\nsrun -n 2 torchrun --nproc-per-node 4 a.py": "",
            "mpiexec -n 8 --ppn $N \\\n torchrun --nproc-per-node=$N a.py": "$N tasks starts",
            "mpiexec -n 2 --ppn 1 torchrun --nproc-per-node=4 a.py": "",
            "#SBATCH -N 2\nsrun accelerate launch --machine_rank $SLURM_PROCID a.py": "is 0 on",
            "#SBATCH -N 2\nsrun bash -c 'torchrun \\\n --node_rank $SLURM_NODEID a.py'": "",
            "#SBATCH -N 2\nsrun torchrun --node-rank=$SLURM_NODEID --rdzv-backend=c10d a": "",
            "#SBATCH -N 2\nsrun accelerate launch --num_machines 1 a.py": "each node trains alone",
            "#SBATCH -n 1 --ntasks-per-node=2": "--ntasks=1 overrides",
            "#SBATCH --signal=B:USR1@60\nsrun a": "which has no trap",
            "#SBATCH --signal=USR1@60\nsrun -n 1 torchrun a": "",
            "#SBATCH --signal=B:USR1@60\ntrap a USR1\nsrun a &\nwait": "",
            "#PBS -l walltime=30": "walltime=30 is in seconds", "#PBS -l walltime=3600": "",
            "#PBS -o logs/x\nmkdir -p logs": "",
            "ls\n#SBATCH --nodes=2": "first command", "#SBATCH -o here/": "is a folder",
            "#SBATCH --output=logs/%j.out": "no folder logs:", "#PBS -o logs/": "no folder logs:",
            "#!/bin/bash\n#SBATCH -o logs/%j": "no folder logs:", "#SBATCH -o here/%x.%j": "",
            "#sbatch -N 2 run": "", "#SBATCH hetjob": "", "ls <<A\n#SBATCH -N 2\nA": "",
            "#SBATCH -D x\n#SBATCH -o logs/%j": "", "#PBS -o host:logs/x -e here/$x/": ""}.items():
        path.write_text(f"#!/bin/bash\n#PBS -l place=scatter:group=tier0,ncpus=3\n{line}\n")
        result = check(path)
        assert result.code == bool(message) and message in result.out, (line, result.out)
        assert result.out.count("\n") == 1, (line, result.out)


GO_ON = re.search(r"```bash\n(touch started\n.*?)```",
                  (ROOT / "03_ddp" / "YOUR_SCRIPT.md").read_text(), re.S)[1]
TIME_LIMITED = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=2 --output=job-%j.txt
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
    folder = cluster.folder / "time limit"
    copy_and_edit("03_ddp", folder, (".float()", ".double()"),
                  ("10)).to(device)", "10)).double().to(device)"),
                  ("step += 1\n", "step += 1; time.sleep(1)\n"),
                  ("import signal\n", "import signal, time\n"), name="your_script_ddp.py")
    (folder / "limited.slurm").write_text(TIME_LIMITED)
    job = re.search(r"\d+", cluster.run("sbatch", "limited.slurm", chapter=folder.name))[0]
    state, output = cluster.wait_for(job, chapter=folder.name, timeout=600)
    assert state == "COMPLETED 0:0" and output.count("2 ranks on cpu") > 1, output
    whole = copy_and_edit("03_ddp", tmp_path / "whole", (".float()", ".double()"),
                          ("10)).to(device)", "10)).double().to(device)"),
                          name="your_script_ddp.py")
    run_command([sys.executable, whole], cwd=whole.parent)
    assert_equal_in_fp64(torch.load(folder / "digits.pt"), torch.load(whole.with_name("digits.pt")))
