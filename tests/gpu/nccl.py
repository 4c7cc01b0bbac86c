"""Do GPUs train as a CPU does, several ranks as one, and what happens if one fails?

On a node with one GPU, the ranks share it: each has a NCCL_HOSTID of its own, so NCCL takes it for
a node with one GPU, and connects the ranks by sockets. That is slow, but the collectives, streams
and watchdogs are those of a job on several nodes. With --device cpu the same runs over gloo.
"""

import math
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from cluster.launch import ROOT, describe_failure, rank_environment, run_job
from cluster.records import read_records

LIMIT = 150  # seconds, of a job
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"
OWN_HOST = "--no-python", "bash", "-c", 'NCCL_HOSTID=node$RANK exec "$@"', "bash", sys.executable
ONE_NODE = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": "0",  # so that fp32 rounds as on a CPU
    "PYTHONPATH": f"{ROOT}:{ROOT / 'agree'}:{os.environ.get('PYTHONPATH', '')}"}

DDP, FSDP, ZERO = "03_ddp/main.py", "05_zero/fsdp.py", "05_zero/main.py"
CHANGED = Path(__file__).with_name("changed.py")
DIGITS = "--global-batch-size", 48  # a multiple of 1, 2, 4, 8 and 16 ranks
GPT = ("--global-batch-size", 32, "--layers", 1, "--width", 48,
       "--text", ROOT / "05_zero" / "README.md")
FAILURES = {"raises": "ValueError: on purpose", "is killed": "SIGKILL", "is stopped": ""}

# Largest relative difference of an epoch's mean loss from the CPU's. fp64 rounds at 1e-16, fp32 at
# 1e-7: sums over a batch and ten layers enlarge that a thousand times, and in fp64 four epochs do
# so again. bf16 rounds at 1/512, most of which cancels in a mean. After one epoch on a CPU: 1e-8 in
# fp32, 2e-4 in bf16; with other first weights 1e-3 (GPT) or 3e-3 (digits) and more, and 8e-4 (GPT)
# or 2e-2 (digits) if the gradients are not averaged.
BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 1 / 512}


class Jobs:
    """Starts programs on ranks of a device ("gpu" or "cpu"); their files are in one folder."""

    def __init__(self, device, gpus, folder):
        self.device, self.folder = device, folder
        self.ranks_share = device == "cpu" or gpus == 1
        self.several = (2, 4) if self.ranks_share else sorted({2, 2 ** int(math.log2(gpus))})

    def run(self, ranks, *command):
        """Run `python command` on this many ranks. Return the exit code (124: limit) and output."""
        launcher, variables = [*TORCHRUN, "--nproc-per-node", ranks], VARIABLES
        if self.ranks_share:
            launcher, variables = [*launcher, *OWN_HOST], VARIABLES | ONE_NODE
        try:
            return 0, run_job([sys.executable, *launcher, *command], LIMIT, self.folder,
                              rank_environment() | variables)
        except subprocess.CalledProcessError as problem:
            return problem.returncode, problem.output
        except subprocess.TimeoutExpired as problem:
            return 124, describe_failure(problem)

    def run_chapter(self, ranks, program, *flags, starter=(), device=None):
        """Run a chapter with small data. starter: another program, which runs it."""
        shape = GPT if program.startswith("05") else DIGITS
        return self.run(ranks, *starter, ROOT / program, *shape, "--device", device or self.device,
                        *flags)

    def train(self, name, ranks, program, *flags, precision="fp64", baseline="cpu", device=None):
        """Run a chapter, and compare the last epoch's loss with that of the run `baseline`."""
        code, output = self.run_chapter(ranks, program, *flags, "--precision", precision,
                                        "--results", self.folder / f"{name}.jsonl", device=device)
        losses = [record["loss"] for run in (name, baseline)
                  for record in read_records(self.folder / f"{run}.jsonl")[-1:]]
        difference = abs(losses[0] / losses[1] - 1) if len(losses) == 2 else math.inf
        return outcome(name, code == 0 and difference < BOUNDS[precision], output,
                       loss_differs_by=float(f"{difference:.1e}"))


def outcome(name, passed, output, **facts):
    """Return the record of a test, with the last lines of the output if it has not passed."""
    last_lines = "" if passed else "\n".join(output.splitlines()[-15:])
    return {"test": name, "passed": passed, **facts, "output": last_lines}


def ddp(jobs, program=DDP):
    """Chapter 3 in fp64 on several ranks, and with a checkpoint that goes from one to the next."""
    yield jobs.train("cpu", 1, program, "--epochs", 4, device="cpu")
    for ranks in 1, *jobs.several:
        yield jobs.train(f"{ranks} ranks", ranks, program, "--epochs", 4)
    places = [(2, jobs.device), (1, jobs.device), (1, "cpu"), (jobs.several[-1], jobs.device)]
    for epoch, (ranks, device) in enumerate(places, 1):
        name, resume = f"epoch {epoch} on {device}, {ranks} ranks", ["--resume"] * (epoch > 1)
        yield jobs.train(name, ranks, program, "--epochs", epoch, "--checkpoint", "checkpoint",
                         *resume, device=device, baseline="cpu" if epoch == 4 else name)


def fsdp(jobs):
    """The same with chapter 5's FSDP2, and tensor parallelism."""
    yield from ddp(jobs, FSDP)
    if jobs.several[-1] >= 4:
        yield jobs.train("two_d, 2 x 2 ranks", 4, "05_zero/two_d.py", "--tensor", 2, "--epochs", 4)


def bf16(jobs):
    """Chapter 3 in bf16."""
    yield jobs.train("cpu", 1, DDP, "--epochs", 1, device="cpu")
    for ranks in 1, 2:
        yield jobs.train(f"{ranks} ranks", ranks, DDP, "--epochs", 1, precision="bf16")


def deepspeed(jobs):
    """Chapters 4 and 5 with DeepSpeed in fp32, compared with DDP and FSDP2 on the CPU."""
    if not find_spec("deepspeed"):
        return
    yield jobs.train("cpu", 1, DDP, "--epochs", 1, device="cpu")
    yield jobs.train("chapter 4, 2 ranks", 2, "04_deepspeed/main.py", "--epochs", 1,
                     precision="fp32")
    yield jobs.train("fsdp", 1, FSDP, "--epochs", 1, device="cpu", baseline="fsdp")
    for stage, ranks in (0, 2), (1, 2), (2, 2), (3, 2), (3, jobs.several[-1]):
        yield jobs.train(f"stage {stage}, {ranks} ranks", ranks, ZERO, "--epochs", 1,
                         "--stage", stage, precision="fp32", baseline="fsdp")


def failures(jobs):
    """If rank 1 fails, after how many seconds does the job end, and which line says why?"""
    failure = jobs.folder / "failure"
    for change, expected in FAILURES.items():
        code, output = jobs.run_chapter(2, DDP, "--timeout", 10, starter=[CHANGED, change])
        seconds = time.time() - failure.stat().st_mtime if failure.exists() else 999
        failure.unlink(missing_ok=True)
        lines = re.findall(".*(?:NCCL|[Ww]atchdog|Error|SIG|main.py:|exitcode).*", output)
        yield outcome(f"rank 1 {change}", code not in (0, 124) and expected in output, output,
                      seconds=round(seconds), exit_code=code, says="\n".join(["", *lines[:20]]))


def agreement(jobs):
    """What does agree say of two right programs, and of one that does not average gradients?"""
    for program, verdict in (FSDP, "no problems"), (DDP, "no problems"), (DDP, "own gradients"):
        change = [CHANGED, verdict] if verdict == "own gradients" else []
        _, output = jobs.run_chapter(2, program, starter=["-m", "agree", *change])
        verdicts = ", ".join(re.findall("verdict: (.*)", output))
        yield outcome(f"{program}: {verdict}", verdict in verdicts, output, says=verdicts)


PARTS = ddp, fsdp, bf16, deepspeed, failures, agreement
