"""Submit scripts: Slurm on two nodes of a lab, PBS scripts through its qsub, and what headers hide."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import check_script as header
import pytest
from conftest import BIN, LESSONS, ROOT, case, copy_of, execute, lines, needs_root, parameters, tracked
from lab import LAB, Lab
from tolerances import FP64, close

SCRIPTS = sorted(path.relative_to(ROOT) for pattern in ("0*/**/submit.*", "submit/*.pbs", "submit/*.slurm")
                 for path in ROOT.glob(pattern))
MISSING = next((name for name in ("slurmctld", "slurmd", "munged", "sbatch", "qsub")
                if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")), None)
WHY = f"no {MISSING} here: apt install slurmctld slurmd slurm-client munge slurm-wlm-torque" if MISSING else LAB
real_slurm = needs_root(WHY)
ONE_STEP = ("--max-steps", "1", "--device", "cpu")
LAUNCHES = {  # how a site's command begins; any other by mpiexec or srun
    "polaris": "mpiexec -n 8 --ppn 4 --depth=8 --cpu-bind depth bash -c",
    "slurm_gpu": "srun --kill-on-bad-exit=1 --cpu-bind=cores --gpu-bind=none python",
    "mvapich": "srun --kill-on-bad-exit=1 --export=ALL,LD_PRELOAD=/opt/m/lib/libmpi.so python",
    "mvapich4": "mpiexec -n 8 -ppn 4 -bind-to none python",
    "frontier": "srun --kill-on-bad-exit=1 --gpus-per-task=1 --gpu-bind=closest python",
    "lumi": "srun --mpi=none --kill-on-bad-exit=1 --cpu-bind=mask_cpu=",
    "aurora": "mpiexec --pmi=pmix -n 24 --ppn 12 --cpu-bind list:4-7:",
    "slurm_cpu": "srun --mpi=pmi2 --kill-on-bad-exit=1 python", "here": "mpiexec -n 2 python"}


class Cluster:
    """A copy of the chapters in a folder with a blank in its name, and a Slurm that runs their submit scripts."""

    def __init__(self, folder):
        self.folder = folder / "the workshop"
        for name in "01_single_node", "02_horovod", "03_ddp", "submit":
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.lab = Lab(f"slurm-{os.getpid()}")
        self.lab("up", 2, "--slurm")
        self.env = self.lab.env | {"VENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""}
        (folder / "bin").mkdir()  # an environment like Polaris': PALS's mpiexec comes first
        (folder / "bin" / "activate").write_text(f'. "{sys.prefix}/bin/activate"\nPATH="{ROOT}/tests/pals:$PATH"\n')
        (folder / ".bash_profile").write_text("module() { :; }; conda() { :; }\n")  # for bash -l
        self.polaris = {"SITE": "polaris", "VENV": str(folder), "PALS_PPN": "1", "HOME": str(folder)}

    def run(self, *words, chapter="03_ddp", env=None, codes=(0,)):
        """A command's output, in a chapter's folder on the login node."""
        done = subprocess.run([str(word) for word in (ROOT / "submit" / "lab.sh", "on", "login", *words)],
                              cwd=self.folder / chapter, env=self.env | (env or {}), text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
        assert done.returncode in codes, done.stdout
        return done.stdout

    def sbatch(self, *words, chapter="03_ddp", script="submit.slurm"):
        """Submit as an attendee does, for one thread a rank. Returns the job's number."""
        return re.search(r"\d+", self.run("sbatch", "--output=job-%j.txt", "--cpus-per-task=1", *words[:-1], script,
                                          *words[-1], chapter=chapter, env={"SITE": "slurm_cpu"}))[0]

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
        self.run("scancel", job)
        pytest.fail(f"job {job} is still {state}: {shown}")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.lab.down()


@real_slurm
@pytest.mark.parametrize("chapter", ["03_ddp", case("02_horovod/pytorch", marks=[pytest.mark.slow])])
def test_a_submit_script_trains_as_one_rank_does(chapter, cluster, tmp_path):
    """sbatch on two nodes, qsub on two nodes, python alone: the same number of images, the same parameters.

    Site slurm_cpu starts the ranks by srun --mpi=pmi2, Polaris' file by an mpiexec that stands in for Cray PALS.
    """
    flags = "--global-batch-size", 320, "--epochs", 1, "--device", "cpu", "--precision", "fp64"
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
    for name in "sbatch", "qsub":
        found, = lines(tmp_path / f"{name}.jsonl")
        assert (found["ranks"], found["nodes"], found["steps"]) == (2, 2, alone["steps"])
        one, other = parameters(tmp_path / "python"), parameters(tmp_path / name)
        close("parameters, fp64", abs(other - one).max(), FP64)


@real_slurm
def test_srun_without_mpi(cluster, tmp_path):
    cluster.run("srun", "--mpi=none", "-N", 2, "-n", 2, BIN / "python", "main.py", *ONE_STEP, "--results",
                tmp_path / "results")
    record, = lines(tmp_path / "results")  # one world, and not two
    assert (record["ranks"], record["nodes"]) == (2, 2)


@real_slurm
@pytest.mark.slow
def test_the_doctor_and_a_sweep_as_jobs(cluster, tmp_path):
    """Two nodes, to the doctor a rank each; of the sweep's runs one rank takes one of them, two ranks take both."""
    words = [("weak", "--ranks", *ranks, "--repeats", 1, "--results", tmp_path / name, "--", *ONE_STEP)
             for name, ranks in (("slurm", (1, 2)), ("pbs", (2,)))]
    slurm, pbs = ("-N", 2, "--ntasks-per-node=1"), ("-l", "select=2:system=polaris")
    jobs = [cluster.sbatch(*slurm, (), chapter="submit", script="doctor.slurm"),
            cluster.qsub(*pbs, flags=(), chapter="submit", script="doctor.pbs"),
            cluster.sbatch(*slurm, words[0], chapter="submit", script="sweep.slurm"),
            cluster.qsub(*pbs, flags=words[1], chapter="submit", script="sweep.pbs", PALS_PPN="4")]
    ended = [cluster.end(job, "submit") for job in jobs]
    assert [state for state, _ in ended] == ["COMPLETED 0:0"] * 4, ended
    for _, printed in ended[:2]:
        assert "node nid2: local ranks 0, gloo takes eth0 (10.77.0.2)" in printed, printed
        assert "ranks: 2, nodes: 2\n" in printed and "nothing wrong was found" in printed
    assert [(record["ranks"], record["nodes"]) for record in lines(tmp_path / "slurm")] == [(1, 1), (2, 2)]
    assert [(record["ranks"], record["nodes"]) for record in lines(tmp_path / "pbs")] == [(2, 1)]


@pytest.mark.fault
@real_slurm
def test_a_mistake_fails_the_job_with_one_line(cluster):
    state, printed = cluster.end(cluster.sbatch("-N", 2, "--ntasks-per-node=1", ("--lr", "-1")))
    assert state.startswith("FAILED") and len(re.findall(r"^main\.py: ", printed, re.M)) == 1, printed
    assert "Traceback" not in printed


@real_slurm
@pytest.mark.fault
@pytest.mark.parametrize("death", ["SIGKILL", case("SIGSTOP", marks=[pytest.mark.slow])])
def test_a_rank_that_dies_ends_the_step(death, cluster, tmp_path):
    """As the sites' files start it. The other node's rank waits in an all-reduce."""
    step = "            yield batch\n"
    dies = f"os.kill(os.getpid(), {signal.Signals[death]:d})"
    place = copy_of("03_ddp", tmp_path / "copy", (step, f"""{step}
            if self.rank == 1 and number == 3:
                {dies}
"""), name="workshop.py")
    flags = "--device", "cpu", "--timeout", 20
    started = time.monotonic()
    cluster.run("srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-N", 2, "-n", 2, BIN / "python",
                place.with_name("main.py"), *flags, codes=(137, 143))  # srun's, of the rank that ended first
    assert time.monotonic() - started < 90


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize(("env", "said"), [
    ({"SITE": "atlantis"}, "SITE=atlantis: there is no submit/sites/atlantis.sh"),
    ({"VENV": "/nowhere"}, "no environment in /nowhere: make setup SITE=here"),
    ({"SITE": "polaris"}, "module: command not found\nsites/polaris.sh failed")])
def test_what_is_missing_is_named(env, said):
    done = execute(["bash", "submit.slurm"], cwd=ROOT / "03_ddp", env={"SITE": "here", "VENV": sys.prefix} | env)
    assert done.code == 2 and said in done.err and not done.out, done.err


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize("flags", ["--data-dir 'my data'", r"--data-dir my\ data", "--data-dir *"])
def test_flags_that_pbs_would_tear_apart_are_refused(flags):
    """Wildcards, and what people write to keep a blank together."""
    env = {"SITE": "here", "VENV": sys.prefix, "PBS_O_WORKDIR": str(ROOT / "03_ddp"), "FLAGS": flags}
    done = execute(["bash", ROOT / "03_ddp" / "submit.pbs"], env=env, timeout=60)
    assert (done.code, done.out) == (2, "") and done.err.startswith(f"FLAGS={flags}: no flag may hold"), done.err


def test_a_submit_script_runs_without_a_scheduler(tmp_path):
    """The second of the five steps from a laptop to a cluster."""
    done = execute(["bash", "submit.slurm", *ONE_STEP, "--results", tmp_path / "results"], cwd=ROOT / "03_ddp",
                   env={"SITE": "here", "VENV": sys.prefix})
    assert done.code == 0, done.err
    record, = lines(tmp_path / "results")
    assert record["ranks"] == 2


@pytest.mark.check
@pytest.mark.parametrize("site", [path.stem for path in sorted(tracked(ROOT.glob("submit/sites/*.sh")))])
def test_a_site_has_a_row_and_launches(site, tmp_path):
    """With stand-ins that print their words; the nodes of a PBS file count once, however often they stand in it.

    Then as the sweep does, which sets RANKS and NODES.
    """
    assert f"[{site}](sites/{site}.sh)" in (ROOT / "submit" / "README.md").read_text()
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")
    env = {"PBS_NODEFILE": "nodes", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "8", "USER": "me",
           "MVAPICH": "/opt/m", "PYTORCH": "/opt/p", "CONTAINER": "/opt/c.sif"}
    words = f'module() {{ :; }}; conda() {{ :; }}; mpiexec() {{ echo mpiexec "$@"; }}; srun() {{ echo srun "$@"; }}; ' \
            f'. "{ROOT}/submit/sites/{site}.sh"; launch python main.py --epochs 3; RANKS=5 NODES=1; launch python; env'
    done = execute(["bash", "-euc", words], env=env, cwd=tmp_path)
    assert done.code == 0, done.err
    first, second, *variables = done.out.splitlines()
    assert first.startswith(LAUNCHES.get(site, ("mpiexec ", "srun "))) and first.endswith("python main.py --epochs 3")
    assert re.search(" (-n |--ntasks=)5 ", second)
    assert first.startswith("mpiexec") or "SRUN_CPUS_PER_TASK=8" in variables


@pytest.mark.check
def test_aurora_s_ranks_are_known_by_torchrun_s_variables(tmp_path):
    """Whatever else PALS, for which a stand-in starts one rank, may set."""
    (tmp_path / "nodes").write_text("x1.hsn.cm.aurora.alcf.anl.gov\nx2.hsn.cm.aurora.alcf.anl.gov\n")
    asked = f"import sys; sys.path[0] = '{ROOT / '03_ddp'}'; import os, ranks; " \
            "print(*ranks.find_ranks(), os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    words = 'module() { :; }; mpiexec() { PALS_RANKID=3 PALS_LOCAL_RANKID=2 PMI_RANK=3 PMI_SIZE=24 "${@:8}"; }; ' \
            f'. "{ROOT}/submit/sites/aurora.sh"; launch "{sys.executable}" -c "{asked}"'
    job = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "12345.aurora-pbs"}
    done = execute(["bash", "-euc", words], env=job, cwd=tmp_path)
    assert done.code == 0 and done.out.split() == ["3", "24", "2", "x1.hsn.cm.aurora.alcf.anl.gov", "22345"], done.err


@pytest.mark.check
def test_polaris_gives_each_rank_the_gpu_that_is_near_its_cores():
    """And not every rank GPU 3, where the launcher does not tell local ranks."""
    words = f'module() {{ :; }}; conda() {{ :; }}; . "{ROOT}/submit/sites/polaris.sh"; ' \
            'for rank in 0 1 2 3 ""; do PMI_LOCAL_RANK=$rank bash -c "$near_gpu" x printenv CUDA_VISIBLE_DEVICES; done'
    done = execute(["bash", "-c", words])
    assert done.code and done.out.split() == ["3", "2", "1", "0"]
    assert "gives no local rank, so no GPU can be chosen" in done.err


@pytest.mark.check
@pytest.mark.parametrize(("plugin", "net"), [("", "set by none"), ("1", "AWS Libfabric")])
def test_polaris_leaves_nccl_s_plugin_out_unless_asked(plugin, net):
    """Also where the site's module has chosen it."""
    words = 'module() { export NCCL_NET="of a module"; }; conda() { :; }; ' \
            f'. "{ROOT}/submit/sites/polaris.sh"; echo "${{NCCL_NET-set by none}}"'
    done = execute(["bash", "-c", words], env={"NCCL_PLUGIN": plugin})
    assert done.out.strip() == net, done.err


@pytest.mark.check
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_headers(script):
    text = (ROOT / script).read_text()
    assert header.check(ROOT / script) == []
    needed = (("-l select=", "-l place=scatter", "-l walltime=", "-l filesystems=", "-q debug", "-A ", "PBS_O_WORKDIR")
              if script.suffix == ".pbs" else ("--nodes=", "--ntasks-per-node=", "--gpus-per-node=", "--time="))
    assert all(word in text for word in needed) and len(text.splitlines()) < 20


@pytest.mark.check
@pytest.mark.parametrize("name", ["submit.pbs", "submit.slurm"])
def test_every_chapter_has_the_scripts_that_are_tried(name):
    """Chapter 1's has no launcher."""
    assert (ROOT / "01_single_node" / name).exists()
    for folder in {path.parent for path in LESSONS.values()} - {ROOT / "01_single_node"}:
        text = re.sub(r"(-N |--job-name=)\w+", r"\1ddp", (folder / name).read_text())
        assert text.replace(":-../..}", ":-..}") == (ROOT / "03_ddp" / name).read_text()


@pytest.mark.check
@pytest.mark.parametrize(("line", "said"), [
    ("# SBATCH --nodes=2", "not read by the scheduler"), ("# PBS -q debug", "not read by the scheduler"),
    (" #SBATCH --nodes=2", "not read by the scheduler"),
    ("#SBATCH nodes=2", "no option"), ("ls\n#SBATCH --nodes=2", "first command"),
    ("cd ../nowhere/else", "no file ../nowhere/else"),
    ('. "${WORKSHOP:-..}/submit/sit.sh"', "no file ../submit/sit.sh")])
def test_the_header_check_names_what_is_wrong(line, said, tmp_path):
    good = '#!/bin/bash\n#PBS -l place=scatter:group=tier0,ncpus=3\n#SBATCH -N 2 --job-name="my job"\n  # indented\n'
    path = tmp_path / "submit"
    path.write_text(good)
    assert header.check(path) == []
    path.write_text(good + line + "\n")
    done = execute([sys.executable, ROOT / "submit" / "check_script.py", path])
    assert done.code == 1 and said in done.out and len(done.out.splitlines()) == 1, done.out
