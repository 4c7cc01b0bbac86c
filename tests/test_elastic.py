"""A job that is started again goes on from its checkpoint, with the command of its first start."""

import os
import signal
import subprocess

import pytest
from conftest import BIN, NO_NETWORK, ROOT, chapters, environment, parameters, run
from test_deaths import marked
from test_mistakes import alive, linux, wait
from tolerances import FP64, close

DEATHS = 10
FLAGS = "--global-batch-size", 48, "--lr", 0.001, "--precision", "fp64"  # so low that rounding does not grow
EPOCHS = 200


def saved_at(checkpoint):
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


def workers(folder):
    """The process ids of rank 1."""
    return [pid for pid, env in alive(str(folder)).items() if b"\0RANK=1\0" in env]


@linux
@pytest.mark.timeout(1400)
@pytest.mark.fault
@chapters("03_ddp")
def test_a_job_of_torchrun_whose_worker_dies_ten_times(chapter, tmp_path):
    """torchrun keeps a store of its own over the restarts, at which half of them would hang."""
    checkpoint = tmp_path / "checkpoint"
    words = [BIN / "torchrun", "--nproc-per-node", 2, "--max-restarts", DEATHS, ROOT / chapter / "main.py", *FLAGS,
             "--epochs", EPOCHS, "--checkpoint", checkpoint, "--resume", "auto"]
    env = environment() | NO_NETWORK | {"MARK": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(list(map(str, words)), env=env, stdout=said, stderr=subprocess.STDOUT)
    killed = set()

    def goes_on():
        """The new rank 1, once its job has saved."""
        return saved_at(checkpoint) > before and set(workers(tmp_path)) - killed

    try:
        for _ in range(DEATHS):
            before = saved_at(checkpoint)
            rank_1, = wait(goes_on, 100, "a restart that goes on")
            os.kill(rank_1, signal.SIGKILL)
            killed.add(rank_1)
        assert job.wait(300) == 0, (tmp_path / "said").read_text()
    finally:
        for process in marked(tmp_path):
            process.kill()
    done = (tmp_path / "said").read_text()
    starts = [int(line.split("steps: ")[1].split()[0]) for line in done.splitlines() if "steps: " in line]
    assert len(starts) == DEATHS + 1 and starts == sorted(set(starts)), starts  # each went on
    whole = run("01_single_node", 1, *FLAGS, "--epochs", EPOCHS, "--checkpoint", tmp_path / "whole")
    assert whole.code == 0, whole.err
    close("parameters, fp64", abs(parameters(checkpoint) - parameters(tmp_path / "whole")).max(), FP64)
