"""Submit scripts: Slurm on two nodes of a lab, PBS scripts through its qsub, and what headers hide."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import check_script as header
import psutil
import pytest
from conftest import BIN, PROGRAMS, ROOT, case, chapters, execute, lines, pages, parameters
from forked import free_port
from lab import LAB, Lab
from test_mistakes import wait
from tolerances import FP64, LOSS, close

SCRIPTS = sorted(path.relative_to(ROOT) for pattern in ("0*/**/submit.*", "submit/*.pbs", "submit/*.slurm")
                 for path in ROOT.glob(pattern))
MISSING = next((name for name in ("slurmctld", "slurmd", "munged", "sbatch", "qsub")
                if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")), None)
WHY = f"no {MISSING} here: apt install slurmctld slurmd slurm-client munge slurm-wlm-torque" if MISSING else LAB
real_slurm = pytest.mark.skipif(bool(WHY), reason=str(WHY))
STEPS = ("--global-batch-size", "320", "--epochs", "1", "--device", "cpu")  # 4, and saved after them
ONE = ("--global-batch-size", "64", "--max-steps", "1", "--device", "cpu")  # DeepSpeed has no fp64: its first loss
FLAGS = {"04_deepspeed": ONE, "05_zero": (*ONE, "--width", "256", "--layers", "8")}
ONE_STEP = ("--max-steps", "1", "--device", "cpu")
FOLDERS = ["01_single_node", "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", "04_deepspeed", "05_zero"]
CHAPTERS = [case(folder) for folder in FOLDERS]


class Cluster:
    """A copy of the chapters in a folder with a blank in its name, and a Slurm that runs their submit scripts."""

    def __init__(self, folder):
        self.folder = folder / "the workshop"
        for name in {*(folder.partition("/")[0] for folder in FOLDERS), "submit"}:
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.lab = Lab(f"slurm-{os.getpid()}")
        self.lab("up", 2, "--slurm")
        self.env = self.lab.env | {"VENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}
        (folder / "bin").mkdir()  # an environment like Polaris': PALS's mpiexec comes first
        (folder / "bin" / "activate").write_text(f'. "{sys.prefix}/bin/activate"\nPATH="{ROOT}/tests/pals:$PATH"\n')
        (folder / ".bash_profile").write_text("module() { :; }; conda() { :; }\n")  # for bash -l
        self.polaris = {"SITE": "polaris", "VENV": str(folder), "PALS_PPN": "1", "HOME": str(folder)}

    def run(self, *words, chapter="03_ddp", env=None, code=0):
        """A command's output, in a chapter's folder on the login node."""
        done = subprocess.run([str(word) for word in (ROOT / "submit" / "lab.sh", "on", "login", *words)],
                              cwd=self.folder / chapter, env=self.env | (env or {}), text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
        assert done.returncode == code, done.stdout
        return done.stdout

    def sbatch(self, *words, chapter="03_ddp", site="slurm_cpu", script="submit.slurm"):
        """Submit as an attendee does, for one thread a rank. Returns the job's number."""
        return re.search(r"\d+", self.run("sbatch", "--output=job-%j.txt", "--cpus-per-task=1", *words[:-1], script,
                                          *words[-1], chapter=chapter, env={"SITE": site}))[0]

    def qsub(self, *words, flags, chapter="03_ddp", script="submit.pbs", **env):
        return self.run("qsub", "-V", "-o", "job-%j.txt", *words, script, chapter=chapter,
                        env=self.polaris | {"FLAGS": " ".join(map(str, flags))} | env).strip()

    def end(self, job, chapter="03_ddp", timeout=240):
        """How a job ended, as COMPLETED 0:0, and what it printed; a job that hangs fails the test."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            shown = self.run("scontrol", "show", "job", job)
            state, code = (re.search(rf"{name}=(\S+)", shown)[1] for name in ("JobState", "ExitCode"))
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return f"{state} {code}", (self.folder / chapter / f"job-{job}.txt").read_text()
            time.sleep(0.2)
        self.run("scancel", "--full", "--signal=ABRT", job)  # PYTHONFAULTHANDLER: each rank says where it is
        time.sleep(2)
        printed = (self.folder / chapter / f"job-{job}.txt").read_text()
        raise AssertionError(f"job {job} is still {state}: {shown}\n{printed}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.lab.down()


@real_slurm
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_submit_script_trains_as_one_rank_does(chapter, cluster, tmp_path):
    """sbatch on two nodes, qsub on two nodes, python alone: the same number of images, the same parameters."""
    flags = FLAGS.get(chapter, (*STEPS, "--precision", "fp64"))
    places = {name: ("--checkpoint", tmp_path / name, "--results", tmp_path / f"{name}.jsonl")
              for name in ("sbatch", "qsub", "python")}
    jobs = [cluster.sbatch("-N", 2, "--ntasks-per-node=1", (*flags, *places["sbatch"]), chapter=chapter),
            cluster.qsub("-l", "select=2:system=polaris", flags=(*flags, *places["qsub"]), chapter=chapter)]
    done = execute([sys.executable, ROOT / chapter / "main.py", *flags, *places["python"]])
    assert done.code == 0, done.err
    for job in jobs:
        state, printed = cluster.end(job, chapter)
        assert state == "COMPLETED 0:0", printed
    alone, = lines(tmp_path / "python.jsonl")
    ranks = 1 if chapter == "01_single_node" else 2
    for name in "sbatch", "qsub":
        found, = lines(tmp_path / f"{name}.jsonl")
        assert (found["ranks"], found["nodes"], found["steps"]) == (ranks, ranks, alone["steps"])
        if chapter in FLAGS:
            close("loss, fp32, relative", abs(found["loss"] / alone["loss"] - 1), LOSS)
        else:
            one, other = parameters(tmp_path / "python"), parameters(tmp_path / name)
            close("parameters, fp64", abs(other - one).max(), FP64)


@real_slurm
def test_sbatch_passes_over_what_the_header_check_names(cluster, tmp_path):
    """Two nodes there are; 99 are refused where the line is read."""
    for line, code in ("#SBATCH --nodes=99", 1), ("#SBATCH--nodes=99", 1), ("# SBATCH --nodes=99", 0), \
                      ("true\n#SBATCH --nodes=99", 0):
        (tmp_path / "submit").write_text(f"#!/bin/bash\n#SBATCH --time=0:10:00\n{line}\n")
        cluster.run("sbatch", "--test-only", tmp_path / "submit", code=code)
        assert bool(header.check(tmp_path / "submit")) == (code == 0), line


@real_slurm
def test_srun_starts_the_ranks_and_torchrun_does_as_the_page_has_it(cluster, tmp_path):
    """The two lines of submit/README.md, with what this machine has not: cores, and ranks for them."""
    page = (ROOT / "submit" / "README.md").read_text()
    both = re.search(r"^srun --ntasks-per-node=4 .*?torchrun .*?(?=^```)", page, re.M | re.S)[0]
    words = re.sub(r"(--cpus-per-task=)\d+", r"\g<1>1", both).replace("--ntasks-per-node=4", "--ntasks-per-node=1")
    words = words.replace("--nproc-per-node 4", "--nproc-per-node 1").replace("29500", str(free_port()))
    words = words.replace("main.py", f"main.py {' '.join(ONE_STEP)} --results {tmp_path / 'results'}")
    script = tmp_path / "both"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=0:10:00\n"
                      f'. "$VENV/bin/activate"\n{words}')
    job = re.search(r"\d+", cluster.run("sbatch", "--output=job-%j.txt", script))[0]
    state, printed = cluster.end(job)
    assert state == "COMPLETED 0:0", printed
    assert [(record["ranks"], record["nodes"]) for record in lines(tmp_path / "results")] == [(2, 2), (2, 2)]


@real_slurm
def test_the_allocation_says_how_many_ranks(cluster, tmp_path):
    """The script as it stands: 4 ranks a node, on as many nodes as the command line asks for."""
    flags = [(*ONE_STEP, "--results", tmp_path / name) for name in "abc"]
    jobs = [cluster.sbatch(flags[0]), cluster.sbatch("-N", 1, flags[1]),
            cluster.qsub("-l", "select=1:system=polaris", flags=flags[2], PALS_PPN="4")]
    for job, name, found in zip(jobs, "abc", ((8, 2), (4, 1), (4, 1))):
        state, printed = cluster.end(job)
        assert state == "COMPLETED 0:0", printed
        record, = lines(tmp_path / name)
        assert (record["ranks"], record["nodes"]) == found


@real_slurm
@chapters("02_horovod/pytorch", "03_ddp")
def test_a_sweep_within_one_allocation(chapter, cluster, tmp_path):
    """The nodes come from the allocation: one rank takes one of them, two ranks take both."""
    results, words = tmp_path / "results.jsonl", ("weak", "--chapters", chapter, "--ranks", 1, 2, "--repeats", 1)
    job = cluster.sbatch("-N", 2, "--ntasks-per-node=1", (*words, "--results", results, "--", *ONE_STEP),
                         chapter="submit", script="sweep.slurm")
    state, printed = cluster.end(job, "submit")
    assert state == "COMPLETED 0:0", printed
    assert [(record["ranks"], record["nodes"]) for record in lines(results)] == [(1, 1), (2, 2)]
    assert {record["launcher"] for record in lines(results)} == {"submit.slurm with sites/slurm_cpu.sh"}


@real_slurm
def test_a_sweep_within_one_allocation_of_pbs(cluster, tmp_path):
    results = tmp_path / "results.jsonl"
    flags = ("weak", "--ranks", 2, 8, "--repeats", 1, "--results", results, "--", *ONE_STEP)
    job = cluster.qsub("-l", "select=2:system=polaris", flags=flags, chapter="submit", script="sweep.pbs", PALS_PPN="4")
    state, printed = cluster.end(job, "submit")
    assert state == "COMPLETED 0:0", printed
    assert [(record["ranks"], record["nodes"]) for record in lines(results)] == [(2, 1), (8, 2)]
    assert {record["launcher"] for record in lines(results)} == {"submit.pbs with sites/polaris.sh"}


@real_slurm
def test_the_doctor_as_a_job(cluster):
    """Two ranks, each on a node of its own: gloo takes the network that both have."""
    jobs = [cluster.sbatch("-N", 2, "--ntasks-per-node=1", (), chapter="submit", script="doctor.slurm"),
            cluster.qsub("-l", "select=2:system=polaris", flags=(), chapter="submit", script="doctor.pbs")]
    for job in jobs:
        state, printed = cluster.end(job, "submit")
        assert state == "COMPLETED 0:0" and "ranks: 2, nodes: 2\n" in printed, printed
        assert "node nid2: local ranks 0, gloo takes eth0 (10.77.0.2)" in printed, printed
        assert "all-reduce over gloo, 16 MB" in printed and "nothing wrong was found" in printed


@real_slurm
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_srun_with_and_without_mpi(mpi, cluster, tmp_path):
    cluster.run("srun", f"--mpi={mpi}", "-N", 2, "-n", 2, BIN / "python", "main.py", *ONE_STEP, "--results",
                tmp_path / "results", env={"MPIR_CVAR_CH4_NETMOD": "ofi"})  # the page of submit/ says when
    record, = lines(tmp_path / "results")  # one world, and not two
    assert (record["ranks"], record["nodes"]) == (2, 2)


@real_slurm
def test_mpiexec_takes_the_nodes_of_the_allocation(cluster, tmp_path):
    words = f'"{BIN}/mpiexec" -n 2 -ppn 1 "{BIN}/python" main.py {" ".join(ONE_STEP)} --results {tmp_path / "results"}'
    submitted = cluster.run("sbatch", "--output=job-%j.txt", "-N", 2, "--ntasks-per-node=1", "--wrap", words)
    state, printed = cluster.end(re.search(r"\d+", submitted)[0])
    assert state == "COMPLETED 0:0", printed
    record, = lines(tmp_path / "results")
    assert (record["ranks"], record["nodes"]) == (2, 2)


@real_slurm
def test_mpi_starts_whatever_lies_in_memory(cluster):
    """With UCX it does not: submit/sites/slurm_cpu.sh says why."""
    words = f'. ../submit/sites/slurm_cpu.sh; NODES=2 RANKS=2 launch "{BIN}/python" "{PROGRAMS / "full_memory.py"}"'
    started = cluster.run("env", "-u", "MPIR_CVAR_CH4_NETMOD", "bash", "-euc", words)
    assert sorted(started.split()) == ["0/2", "1/2"], started


@real_slurm
def test_a_script_of_one_s_own_is_watched_under_srun(cluster):
    printed = cluster.run("srun", "--mpi=none", "-N", 2, "-n", 2, BIN / "python", "../submit/agree.py",
                          "your_script_ddp.py")
    assert "your_script_ddp.py: 2 ranks" in printed and "verdict: nothing wrong was found" in printed


@real_slurm
def test_a_contradiction_is_refused(cluster, tmp_path):
    """python in a batch script of 4 tasks would train once, or wait for the other three."""
    (cluster.folder / "03_ddp" / "wrong.slurm").write_text(f'#!/bin/bash\n"{BIN}/python" main.py "$@"\n')
    state, printed = cluster.end(cluster.sbatch("-N", 2, "-n", 4, (), script="wrong.slurm"))
    assert state == "FAILED 2:0" and re.fullmatch(r"main\.py: SLURM_NTASKS=4, .*\n", printed), printed


@real_slurm
def test_a_rank_that_is_killed_ends_the_job(cluster, tmp_path):
    job = cluster.sbatch("-N", 2, "--ntasks-per-node=1", ("--epochs", 5000, "--checkpoint", tmp_path / "checkpoint"))
    try:
        wait((tmp_path / "checkpoint").exists, 100, "a checkpoint")
        second, = (one for one in psutil.process_iter(["cmdline"])  # None where it ends just now
                   if {str(tmp_path / "checkpoint"), "main.py"} <= set(one.info["cmdline"] or ())
                   and one.environ().get("PMI_RANK") == "1")
        second.kill()
        killed = time.monotonic()
        state, printed = cluster.end(job)
        assert state.startswith("FAILED") and time.monotonic() - killed < 30, (state, printed)
    finally:
        cluster.run("scancel", job)  # others want the nodes


@pytest.mark.fault
@real_slurm
def test_a_job_that_loses_a_node_is_started_again_and_goes_on(cluster, tmp_path):
    """On three nodes: the job has two, one of them dies, the third takes its place."""
    flags = "--global-batch-size", 48, "--precision", "fp64", "--lr", 0.001, "--device", "cpu"
    saved, results = tmp_path / "checkpoint", tmp_path / "results"
    with Lab(f"{cluster.lab.name}-three") as lab:
        lab("up", 3, "--slurm")
        folder, env = cluster.folder / "03_ddp", cluster.env | {"LAB": lab.name, "SITE": "slurm_cpu"}
        words = "sbatch", "--requeue", "--output=lost.txt", "--open-mode=append", "-N", 2, "--ntasks-per-node=1", \
            "--cpus-per-task=1", "submit.slurm", *flags, "--epochs", 40, "--checkpoint", saved, "--resume", "auto", \
            "--results", results
        job = re.search(r"\d+", lab("on", "login", *words, cwd=folder, env=env).out)[0]
        deadline = time.monotonic() + 100

        def shown():
            return lab("on", "login", "scontrol", "show", "job", job, env=env).out

        while not saved.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "nid[1-2]" in shown()
        lab("kill", "nid2")
        while "JobState=COMPLETED" not in shown() and time.monotonic() < deadline:
            time.sleep(0.5)
        ended = shown()
        printed = (folder / "lost.txt").read_text()
        assert "JobState=COMPLETED" in ended and "Restarts=1" in ended and "NodeList=nid[1,3]" in ended, ended + printed
    found, = lines(results)
    assert 0 < found["steps"] < 40 * (1437 // 48) and found["nodes"] == 2, "it has gone on, and not begun again"
    done = execute([sys.executable, folder / "main.py", *flags, "--epochs", 40, "--checkpoint", tmp_path / "whole"])
    assert done.code == 0, done.err
    close("parameters, fp64", abs(parameters(saved) - parameters(tmp_path / "whole")).max(), FP64)


@real_slurm
def test_a_mistake_fails_the_job_with_one_line(cluster):
    state, printed = cluster.end(cluster.sbatch("-N", 2, "--ntasks-per-node=1", ("--lr", "-1")))
    assert state.startswith("FAILED") and len(re.findall(r"^main\.py: ", printed, re.M)) == 1, printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("env", "folder", "said"), [
    ({"SITE": "atlantis"}, "03_ddp", "SITE=atlantis: there is no submit/sites/atlantis.sh"),
    ({"VENV": "/nowhere"}, "03_ddp", "no environment in /nowhere: make setup SITE=here"),
    ({"SITE": "polaris"}, "03_ddp", "module: command not found\nsites/polaris.sh failed"),
    ({}, ".", r"\.\./submit/site.sh: No such file")])
def test_what_is_missing_is_named(env, folder, said):
    done = execute(["bash", ROOT / "03_ddp" / "submit.slurm"], cwd=ROOT / folder, env={"SITE": "here"} | env)
    assert done.code == 2 and re.search(said, done.err) and not done.out, done.err


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.suffix == ".pbs"], ids=str)
def test_flags_that_pbs_would_tear_apart_are_refused(script):
    """Wildcards, and what people write to keep a blank together; a script of Slurm does not look at FLAGS."""
    folder = ROOT / script.parent
    env = {"SITE": "here", "VENV": sys.prefix, "PBS_O_WORKDIR": str(folder)}
    for flags in "--data-dir 'my data'", '--data-dir "my data"', r"--data-dir my\ data", "--data-dir *", "-? x", "[a]":
        done = execute(["bash", ROOT / script], env=env | {"FLAGS": flags}, timeout=60)
        assert (done.code, done.out) == (2, "") and done.err.startswith(f"FLAGS={flags}: no flag may hold"), done.err
        assert len(done.err.splitlines()) == 1


def test_flags_of_pbs_do_not_concern_slurm(tmp_path):
    done = execute(["bash", "submit.slurm", *ONE_STEP], cwd=ROOT / "01_single_node", env={
        "SITE": "here", "VENV": sys.prefix, "FLAGS": "-O2 '*'"})
    assert done.code == 0, done.err


def test_a_submit_script_runs_without_a_scheduler(tmp_path):
    """The second of the five steps from a laptop to a cluster."""
    done = execute(["bash", "submit.slurm", *ONE_STEP, "--results", tmp_path / "results"], cwd=ROOT / "03_ddp",
                   env={"SITE": "here", "VENV": sys.prefix})
    assert done.code == 0, done.err
    record, = lines(tmp_path / "results")
    assert record["ranks"] == 2


@pytest.mark.parametrize(("site", "env", "expected"), [
    ("polaris", {"PBS_NODEFILE": "nodes"}, "mpiexec -n 8 --ppn 4 --depth=8 --cpu-bind depth bash -c"),
    ("slurm_gpu", {}, "srun --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none python"),
    ("mvapich", {"MVAPICH": "/opt/m"}, "srun --kill-on-bad-exit=1 --export=ALL,LD_PRELOAD=/opt/m/lib/libmpi.so python"),
    ("mvapich4", {"SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, "mpiexec -n 8 -ppn 4 -bind-to none python"),
    ("frontier", {"PYTORCH": "/opt/p", "USER": "me"},
     "srun --kill-on-bad-exit=1 --gpus-per-task=1 --gpu-bind=closest python"),
    ("lumi", {"CONTAINER": "/opt/c.sif", "USER": "me"}, "srun --mpi=none --kill-on-bad-exit=1 --cpu-bind=mask_cpu="),
    ("aurora", {"PBS_NODEFILE": "nodes"}, "mpiexec --pmi=pmix -n 24 --ppn 12 --cpu-bind list:4-7:"),
    ("slurm_cpu", {}, "srun --mpi=pmi2 --kill-on-bad-exit=1 python"), ("here", {}, "mpiexec -n 2 python")])
def test_a_site_s_launch_command(site, env, expected, tmp_path):
    """With stand-ins that print their words; the nodes of a PBS file count once, however often they stand in it."""
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")
    words = f'module() {{ :; }}; conda() {{ :; }}; mpiexec() {{ echo mpiexec "$@"; }}; srun() {{ echo srun "$@"; }}; ' \
            f'. "{ROOT}/submit/sites/{site}.sh"; launch python main.py --epochs 3'
    done = execute(["bash", "-euc", words], env=env | {"SLURM_CPUS_PER_TASK": "8"}, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.startswith(expected) and done.out.endswith("python main.py --epochs 3\n")
    assert "srun" not in done.out or "SRUN_CPUS_PER_TASK=8" in execute(
        ["bash", "-euc", f"{words} >/dev/null; env"], env=env | {"SLURM_CPUS_PER_TASK": "8"}, cwd=tmp_path).out


@pytest.mark.parametrize("pmi", ["", "PMI_RANK=3 PMI_SIZE=24"])
def test_aurora_s_ranks_are_known_by_torchrun_s_variables(pmi, tmp_path):
    """Whatever else PALS, for which a stand-in starts one rank, may set."""
    (tmp_path / "nodes").write_text("x1.hsn.cm.aurora.alcf.anl.gov\nx2.hsn.cm.aurora.alcf.anl.gov\n")
    asked = f"import sys; sys.path[0] = '{ROOT / '03_ddp'}'; import os, ranks; " \
            "print(*ranks.find_ranks(), os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    words = f'module() {{ :; }}; mpiexec() {{ PALS_RANKID=3 PALS_LOCAL_RANKID=2 {pmi} "${{@:8}}"; }}; ' \
            f'. "{ROOT}/submit/sites/aurora.sh"; launch "{sys.executable}" -c "{asked}"'
    job = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "12345.aurora-pbs"}
    done = execute(["bash", "-euc", words], env=job, cwd=tmp_path)
    assert done.code == 0 and done.out.split() == ["3", "24", "2", "x1.hsn.cm.aurora.alcf.anl.gov", "22345"], done.err


def queues(site):
    """{queue: (fewest nodes, most nodes, most hours)}, as the site's file says."""
    line, = re.findall("^# .*queues.*: (.*)$", (ROOT / "submit" / "sites" / f"{site}.sh").read_text(), re.M | re.I)
    found = re.findall(r"([\w-]+) (\d+)-(\d+), ([\d.]+) h", line)
    return {name: (int(fewest), int(most), float(hours)) for name, fewest, most, hours in found}


def asked_for(words):
    """Of a qsub's or sbatch's words, or those of a script's header: {"queue", "nodes", "time"} as far as they say."""
    text = " ".join(words) + " "
    options = {"queue": r"(?:-q|--qos)[ =](\S+) ", "nodes": r"(?:select=|--nodes[ =]|-N )(\d+)\b",
               "time": r"(?:walltime=|--time[ =])(\S+) "}
    return {name: found[1] for name, option in options.items() if (found := re.search(option, text))}


def refused(site, command, folder):
    """Why the site's scheduler would refuse a command that a page prints; None where nothing says that it would."""
    words = shlex.split(command.replace("\\\n", " "))
    script = next(word for word in words if re.search(r"\.(pbs|slurm)$", word))
    header = re.findall("^#(?:PBS|SBATCH) (.*)$", (folder / script).read_text(), re.M)
    wants = asked_for(header) | asked_for(words[:words.index(script)])
    if "SITE=" in command or wants.get("queue", "NAME").isupper():  # another site's; a placeholder, or the default
        return None
    if wants["queue"] not in queues(site):
        return f"there is no queue {wants['queue']}"
    fewest, most, hours = queues(site)[wants["queue"]]
    asked = sum(int(part) / 60 ** place for place, part in enumerate(wants["time"].split(":")))
    fits = fewest <= int(wants["nodes"]) <= most and asked <= hours
    return None if fits else f"{wants['queue']} has not that: {wants}"


def test_every_printed_submission_is_one_that_the_site_s_queues_take():
    found = {"qsub": 0, "sbatch": 0}
    for path, text in pages():
        for program, words in re.findall(r"\b(qsub|sbatch) ((?:[^`\n|]|\\\n|\n +)*?[\w.]+\.(?:pbs|slurm))\b", text):
            folder = next(place for place in (path.parent, ROOT / "03_ddp", ROOT / "submit")
                          if (place / words.split()[-1]).exists())
            assert refused({"qsub": "polaris", "sbatch": "slurm_gpu"}[program], words, folder) is None, (path, words)
            found[program] += 1
    assert found["qsub"] > 10 and found["sbatch"] > 10


@pytest.mark.parametrize("command, said", [
    ("-A PROJECT -l select=4:system=polaris submit.pbs", "debug has not that"),
    ("-q prod -l select=2:system=polaris submit.pbs", "prod has not that"),
    ("-l walltime=2:00:00 submit.pbs", "debug has not that"), ("-q debugging submit.pbs", "no queue debugging")])
def test_a_submission_that_polaris_refuses_is_noticed(command, said):
    assert said in refused("polaris", command, ROOT / "03_ddp")


def test_polaris_gives_each_rank_the_gpu_that_is_near_its_cores():
    words = f'module() {{ :; }}; conda() {{ :; }}; . "{ROOT}/submit/sites/polaris.sh"; ' \
            'for rank in 0 1 2 3; do PMI_LOCAL_RANK=$rank bash -c "$near_gpu" x printenv CUDA_VISIBLE_DEVICES; done'
    assert execute(["bash", "-c", words]).out.split() == ["3", "2", "1", "0"]


def test_on_polaris_a_launcher_without_local_ranks_is_named():
    """And not every rank given GPU 3."""
    words = f'module() {{ :; }}; conda() {{ :; }}; . "{ROOT}/submit/sites/polaris.sh"; bash -c "$near_gpu" x env'
    done = execute(["bash", "-c", words], env={"PMI_LOCAL_RANK": ""})
    assert done.code and not done.out and "gives no local rank, so no GPU can be chosen" in done.err


def test_polaris_takes_nccl_s_plugin_only_when_told():
    words = f'module() {{ :; }}; conda() {{ :; }}; . "{ROOT}/submit/sites/polaris.sh"; env'
    plain, told = (execute(["bash", "-c", words], env={"NCCL_PLUGIN": value}).out for value in ("", "1"))
    assert "NCCL_NET=" not in plain and "FI_CXI" not in plain
    assert "NCCL_NET=AWS Libfabric" in told and len(re.findall("^FI_CXI_", told, re.M)) == 9


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_headers(script):
    text = (ROOT / script).read_text()
    assert header.check(ROOT / script) == []
    needed = (("-l select=", "-l place=scatter", "-l walltime=", "-l filesystems=", "-q debug", "-A ", "PBS_O_WORKDIR")
              if script.suffix == ".pbs" else ("--nodes=", "--ntasks-per-node=", "--gpus-per-node=", "--time="))
    assert all(word in text for word in needed) and len(text.splitlines()) < 20


def test_every_chapter_has_both_scripts():
    assert {str(script.parent) for script in SCRIPTS if script.suffix == ".pbs"} == {
        str(script.parent) for script in SCRIPTS if script.suffix == ".slurm"} == {"submit", *FOLDERS}


def test_the_header_check_lets_pass_what_is_right(tmp_path):
    path = tmp_path / "submit"
    path.write_text("""#!/bin/bash
#PBS -q debug-scaling -l walltime=1:00:00
#PBS -l place=scatter:group=tier0,ncpus=3,mem=4gb,gpu_type=a100
#SBATCH -N 2 --mem=64GB --exclude=n1 --exclusive=user --job-name="my job"
#SBATCH --image=nersc/pytorch --gpus=a100-80:4 --gres=gpu:4,tmp:10 --nodes 2
  # indented
python main.py --results ../out/r.jsonl
mkdir ./out
""")
    assert header.check(path) == []


@pytest.mark.parametrize(("text", "said"), [
    ("#SBATCH --nodes=1\n", "name the shell"), ("#!/bin/bash\r\n#SBATCH --nodes=1\r\n", "dos2unix"),
    ("#!/bin/bash\nls\n", "no directive")])
def test_the_header_check_reads_the_whole_script(text, said, tmp_path):
    path = tmp_path / "submit"
    path.write_bytes(text.encode())
    assert any(said in problem for problem in header.check(path))


@pytest.mark.parametrize(("line", "said"), [
    ("# SBATCH --nodes=2", "not read by the scheduler"), ("# PBS -q debug", "not read by the scheduler"),
    ("#SBATCH nodes=2", "no option"),
    ("cd ../nowhere/else", "no file ../nowhere/else"),
    ('. "${WORKSHOP:-..}/submit/sit.sh"', "no file ../submit/sit.sh"), ("ls\n#SBATCH --nodes=2", "first command")])
def test_the_header_check_names_what_is_wrong(line, said, tmp_path):
    good = "#!/bin/bash\n#SBATCH --nodes=1\n"
    path = tmp_path / "submit"
    path.write_text(good)
    assert header.check(path) == []
    path.write_text(good + line + "\n")
    problem, = header.check(path)
    assert problem.startswith("line ") and said in problem
    done = execute([sys.executable, ROOT / "submit" / "check_script.py", path])
    assert done.code == 1 and problem in done.out


def test_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here: apt install shellcheck")
    files = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"], check=True,
                           capture_output=True, text=True).stdout.split("\n")
    shell = [name for name in files if name and Path(ROOT, name).suffix in (".sh", ".pbs", ".slurm", "")
             and re.match(r"#!.*\bb?a?sh\b|# shellcheck shell", Path(ROOT, name).read_text(errors="replace"))]
    assert len(shell) >= 20
    done = execute(["shellcheck", *shell], cwd=ROOT)
    assert done.code == 0, done.out
