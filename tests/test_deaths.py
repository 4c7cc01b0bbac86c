"""One rank is killed, stopped or fails: the job ends soon, not with code 0, says why, and leaves nothing behind.

And --resume reaches what no death would have.
"""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import BIN, NO_NETWORK, ROOT, case, copy_of, environment, execute, observe, parameters, record, run, wait
from forked import free_port
from tolerances import FP64, close

from submit.study import command

pytestmark = pytest.mark.fault

PATIENCE = 20  # seconds: the --timeout of the ranks that wait for a stopped one; a first step of TensorFlow takes some
SOON = 150  # seconds: torchrun and deepspeed give a stopped rank 30 s to end by itself; other programs may be busy
LAUNCHERS = {"mpiexec": ["mpiexec", "-n", 2, sys.executable],
             "torchrun": ["torchrun", "--nproc-per-node", 2],
             "horovodrun": ["horovodrun", "--gloo", "-np", 2, sys.executable],
             "deepspeed": ["deepspeed", "--num_gpus", 2, "--master_port", free_port()]}
FAILED = {"mpiexec": r"PID \d+ RUNNING AT .*\n=   EXIT CODE: 9\n",
          "torchrun": r"Root Cause .*\n\[\d\]:\n.*\n.*\n  rank      : 1 ",
          "horovodrun": "Process name: 1\n", "deepspeed": "return code = -9"}  # what they say of the rank that died
TIMED_OUT = "[Tt]imed out|Alarm clock|SIGALRM|return code = -14"
slow = pytest.mark.slow


def start(launcher, words, folder, **options):
    """Start a program of Python on two ranks; the folder marks its processes, and gets what they print."""
    name, *flags = LAUNCHERS[launcher]
    env = environment() | NO_NETWORK | {"MARK": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}",
                                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # for restarts
    with open(folder / "said", "a") as said:
        return subprocess.Popen(list(map(str, [BIN / name, *flags, *words])), env=env, stdin=subprocess.DEVNULL,
                                stdout=said, stderr=subprocess.STDOUT, **options)


def marked(folder, **variables):
    """The processes with this mark, and with these variables in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if ({"MARK": str(folder)} | variables).items() <= process.environ().items():
                found.append(process)
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return found


def ranks(folder, **variables):
    """Those that run a main.py: Python 3.14 starts helpers beside them, which inherit their variables."""
    return [process for process in marked(folder, **variables)
            if any(word.endswith("main.py") for word in process.cmdline())]


@pytest.fixture
def folder(tmp_path):
    """A folder for start(); what a test that fails leaves behind is ended."""
    yield tmp_path
    for process in marked(tmp_path):
        process.kill()


@pytest.mark.parametrize(("chapter", "launcher", "death"), [
    case("03_ddp", "mpiexec", "SIGKILL", marks=[slow, pytest.mark.core]),
    case("03_ddp", "mpiexec", "SIGSTOP"),
    case("03_ddp", "torchrun", "exception", marks=[slow]),
    case("03_ddp", "torchrun", "SIGKILL", marks=[pytest.mark.core]),
    case("03_ddp", "torchrun", "SIGSTOP", marks=[slow]),
    case("02_horovod/pytorch", "horovodrun", "SIGKILL", marks=[slow]),
    case("02_horovod/pytorch", "horovodrun", "SIGSTOP", marks=[slow]),
    case("02_horovod/tensorflow", "mpiexec", "SIGSTOP", marks=[slow]),
    case("04_deepspeed", "deepspeed", "SIGKILL", marks=[slow]),
    case("04_deepspeed", "deepspeed", "SIGSTOP", marks=[slow])])
def test_a_death_ends_the_job_and_is_told(chapter, launcher, death, folder):
    """Rank 1 dies before its fourth step; the other waits for it in the all-reduce."""
    dies = "raise RuntimeError" if death == "exception" else f"os.kill(os.getpid(), {signal.Signals[death]:d})"
    step = "            yield batch\n"
    place = copy_of(chapter, folder / "copy", (step, f"""{step}
            if self.rank == 1 and number == 3:
                print("dies now", flush=True)
                {dies}
"""), name="workshop.py")
    job = start(launcher, [place.with_name("main.py"), *["--timeout", PATIENCE] * (death == "SIGSTOP")], folder)
    wait(lambda: "dies now" in (folder / "said").read_text() or job.poll() is not None, 300, "a death")
    assert job.wait(SOON) not in (0, 2)
    wait(lambda: not marked(folder), 20, "no process is left")
    said = (folder / "said").read_text()
    assert "dies now" in said and re.search(TIMED_OUT if death == "SIGSTOP" else FAILED[launcher], said), said


@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch", marks=[slow])])
def test_resume_after_a_death_reaches_the_parameters_of_an_uninterrupted_run(chapter, folder):
    """On another number of ranks."""
    checkpoint = folder / "checkpoint"
    flags = "--global-batch-size", 48, "--precision", "fp64", "--lr", 0.001  # so low that rounding does not grow
    words = command(chapter, 3, *flags, "--checkpoint", checkpoint, "--epochs", 2000, "--resume", "auto")
    job = subprocess.Popen(words, env=environment() | NO_NETWORK | {"MARK": str(folder)}, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(checkpoint.exists, 300, "first checkpoint")
    rank_1, = ranks(folder, PMI_RANK="1")
    rank_1.kill()
    assert job.wait(SOON) != 0
    wait(lambda: not marked(folder), 20, "no rank is left")
    done = torch.load(checkpoint)["step"] // 29 + 1  # whole epochs of 29 steps behind it, and one more
    assert run(chapter, 2, *flags, "--epochs", done, "--checkpoint", checkpoint, "--resume", "auto").code == 0
    record("01_single_node", 1, *flags, "--epochs", done, "--checkpoint", folder / "whole", folder=folder)
    close("parameters, fp64", abs(parameters(checkpoint) - parameters(folder / "whole")).max(), FP64)


def test_an_error_on_one_rank_alone_ends_the_job(folder):
    """Not a mistake of the user's: one traceback, and the others end, too."""
    line = "    report.begin("
    main = copy_of("03_ddp", folder / "copy", (line, f"    assert rank != 1, 'only here'\n{line}"))
    started = time.monotonic()
    done = observe(main, 2, folder / "seen", launcher=True, env={"MARK": str(folder)})
    assert done.code not in (0, 2) and done.err.count("Error: only here") == 1 and time.monotonic() - started < SOON
    assert done.err.count("Traceback") == 1, done.err
    wait(lambda: not marked(folder), 20, "no rank is left")


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_rank_that_fails_while_the_others_wait_in_a_library_says_why(launcher, folder):
    """In deepspeed.initialize(), where rank 0 would wait for half an hour, whatever --timeout says."""
    call = "        engine, optimizer, _, _ = deepspeed.initialize("
    fails = '        if os.environ["RANK"] == "1":\n            raise RuntimeError("invalid device ordinal")\n'
    place = copy_of("04_deepspeed", folder / "copy", (call, fails + call), name="ds_config.py")
    job = start(launcher, [place.with_name("main.py")], folder)
    assert job.wait(SOON) != 0
    wait(lambda: not marked(folder), 20, "no process is left")
    told = (folder / "said").read_text()
    assert re.findall("^.*main.py: .*", told, re.M) == [
        "main.py: rank 1: deepspeed.initialize(), with ds_config.json, failed: RuntimeError: invalid device ordinal"]


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=slow)])
def test_ctrl_c_ends_the_job_without_a_traceback_of_the_ranks(launcher, folder):
    """A terminal sends it to the launcher and all ranks at once."""
    job = start(launcher, [ROOT / "03_ddp" / "main.py", "--epochs", 500], folder, start_new_session=True)
    wait(lambda: "epoch 2/" in (folder / "said").read_text() or job.poll() is not None, 300, "two epochs")
    for process in marked(folder):
        process.send_signal(signal.SIGINT)
    assert job.wait(SOON) != 0
    wait(lambda: not marked(folder), 20, "no process is left")
    said = (folder / "said").read_text().replace("main.py FAILED", "")
    assert "main.py" not in said, said


@slow
@pytest.mark.timeout(800)
def test_a_job_of_torchrun_whose_worker_dies_four_times_goes_on(folder):
    """By the command of its first start. torchrun keeps a store over the restarts, at which half of them would hang."""
    checkpoint, deaths = folder / "checkpoint", 4
    flags = "--global-batch-size", 48, "--lr", 0.001, "--precision", "fp64", "--epochs", 80  # rounding does not grow
    job = start("torchrun", ["--max-restarts", deaths, ROOT / "03_ddp" / "main.py", *flags, "--checkpoint", checkpoint,
                             "--resume", "auto"], folder)

    def saved():
        return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0

    def goes_on():
        """The new rank 1, once its job has saved."""
        return saved() > before and set(ranks(folder, RANK="1")) - killed

    killed = set()
    for _ in range(deaths):
        before = saved()
        rank_1, = wait(goes_on, 100, "a restart that goes on")
        rank_1.kill()
        killed.add(rank_1)
    assert job.wait(300) == 0, (folder / "said").read_text()
    starts = [int(step) for step in re.findall(r"steps: (\d+) of", (folder / "said").read_text())]
    assert len(starts) == deaths + 1 and starts == sorted(set(starts)), starts  # each went on
    whole = run("01_single_node", 1, *flags, "--checkpoint", folder / "whole")
    assert whole.code == 0, whole.err
    close("parameters, fp64", abs(parameters(checkpoint) - parameters(folder / "whole")).max(), FP64)


@pytest.mark.parametrize(("last", "code"), [("alarm(0)", 0), ("alarm(1)", -signal.SIGALRM)])
def test_the_alarm_ends_with_the_loop_or_with_a_reason(last, code):
    """Evaluation and checkpoint may take longer than a step."""
    program = f"import time\nfrom ranks import alarm\nalarm(1)\n{last}\ntime.sleep(4)"
    done = execute([sys.executable, "-c", program], timeout=30, cwd=ROOT / "05_zero")
    assert done.code == code and ("rank 0: no step within 1 s" in done.err) == (code < 0), done.err
