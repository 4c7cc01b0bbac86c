"""Part "nccl" of gpu.py: do GPUs train as a CPU does, several ranks as one? What if one fails?

On a node with one GPU, the ranks share it: each has a NCCL_HOSTID of its own, so NCCL takes it for
a node with one GPU, and connects the ranks by sockets. That is slow, but the collectives, streams
and watchdogs are those of a job on several nodes. With --device cpu the same runs over gloo.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from cluster.launch import (
    ROOT,
    common_multiple,
    describe_failure,
    finish_job,
    free_port,
    rank_environment,
    start_job,
)
from cluster.parameters import named_parameters
from cluster.records import outcome, read_records

LIMIT, TOTAL_LIMIT = 150, 330  # seconds: of a job, and, on GPUs, of all jobs together
FP64, ROUNDED = 1e-8, 0.02  # largest differences: of parameters in fp64; of losses, relative
GPT = ("--layers", 1, "--width", 48, "--text", ROOT / "05_zero" / "README.md", "--epochs", 2)
OWN_HOST = 'NCCL_HOSTID=node$RANK exec "$@"'  # bash runs this on each rank
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost")
ONE_NODE = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
SEARCH_HERE = {  # let Python find cluster and agree, too
    "PYTHONPATH": f"{ROOT / 'agree'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
MISTAKES = {  # {agree's verdict: (old, new text of chapter 3's main.py)}
    "own gradients": ("logits = ddp(images)", "logits = model(images)"),
    "sampler": ("DistributedSampler(train, world_size, rank,", "DistributedSampler(train, 1, 0,"),
    "apart": ("lr = args.lr *", "lr = (1 + rank) * args.lr *"),
}
IN_STEP = "            optimizer.step()\n"  # rank 1 fails after it, in step 5
FAILURES = {  # {what happens to rank 1: (its code, what the job has to print)}
    "raises an exception": ("raise ValueError('on purpose')", "ValueError: on purpose"),
    "is killed": ("os.kill(os.getpid(), 9)", "SIGKILL"),
    "is stopped": ("os.kill(os.getpid(), 19)", ""),
}
TELLS_WHY = "NCCL|[Ww]atchdog|Error|SIG|main.py:|exitcode"  # lines of a job that fails


class Jobs:
    """Starts programs on ranks of a device ("cuda" or "cpu"); their files are in one folder."""

    def __init__(self, device: str, gpus: int, folder: Path, end: float = math.inf):
        """end: time.monotonic() at which the last job has to end."""
        self.device, self.folder, self.end = device, folder, end
        self.ranks_share = device == "cpu" or gpus == 1
        self.several = (2, 4) if self.ranks_share else tuple(sorted({2, gpus}))
        self.digits = ("--global-batch-size", common_multiple(48, *self.several), "--epochs", 2)
        self.gpt = (*GPT, "--global-batch-size", common_multiple(32, *self.several))

    def run(self, ranks: int, *command: object, env: dict[str, str] | None = None,
            own_host: bool = True) -> tuple[int, str]:
        """Run `python command` on this many ranks. Return the exit code (124: limit) and output."""
        launcher = []
        if ranks > 1:
            launcher = [*TORCHRUN, "--nproc-per-node", ranks]
        if ranks > 1 and self.ranks_share and own_host:
            launcher += ["--no-python", "bash", "-c", OWN_HOST, "bash", sys.executable]
        job = start_job([sys.executable, *launcher, *command], self.folder,
                        rank_environment() | SEARCH_HERE | (ONE_NODE if self.ranks_share else {})
                        | (env or {}))
        try:
            finished = finish_job(job, min(LIMIT, max(1, self.end - time.monotonic())))
        except subprocess.TimeoutExpired as problem:
            return 124, describe_failure(problem)
        return finished.returncode, finished.stdout

    def train(self, name: str, ranks: int, program: str | Path, *flags: object,
              device: str | None = None, **options: object) -> tuple[dict | None, str]:
        """Run a chapter's program; return its record, or None if it failed, and its output."""
        results = self.folder / f"{name}.jsonl"
        code, output = self.run(ranks, ROOT / program, "--device", device or self.device,
                                "--results", results, *flags, **options)
        return read_records(results)[-1] if code == 0 else None, output

    def compare(self, name: str, ranks: int, program: str | Path, *flags: object,
                baseline: str | None, checkpoint: str | None = None, **options: object) -> dict:
        """Train in fp64, and compare the parameters with those that the run `baseline` saved.

        checkpoint: the run that saved what this one resumes.
        """
        saved = self.folder / name
        if checkpoint:
            copy = shutil.copytree if (self.folder / checkpoint).is_dir() else shutil.copy
            copy(self.folder / checkpoint, saved)
            flags = [*flags, "--resume"]
        record, output = self.train(name, ranks, program, *flags, "--precision", "fp64",
                                    "--checkpoint", saved, **options)
        difference = None
        if record and baseline:
            difference = largest_difference(named_parameters(saved),
                                            named_parameters(self.folder / baseline))
        return outcome(name, record and (not baseline or difference < FP64), output,
                       parameters_differ_by=difference)

    def compare_loss(self, name: str, ranks: int, program: str | Path, *flags: object,
                     baseline: str | None, **options: object) -> dict:
        """Train, and compare the loss with that of the run `baseline`."""
        record, output = self.train(name, ranks, program, *flags, **options)
        difference = None
        if record and baseline:
            loss = read_records(self.folder / f"{baseline}.jsonl")[-1]["loss"]
            difference = abs(record["loss"] / loss - 1)
        # DDP warns if a gradient has another layout than its bucket: on CPUs, a compiled one has
        strides = "strides" in output and self.device != "cpu"
        passed = record and not strides and (not baseline or difference < ROUNDED)
        return outcome(name, passed, output, loss_differs_by=difference)

    def compare_ranks(self, name: str, program: str | Path, *flags: object, baseline: str | None
                      ) -> Iterator[dict]:
        """Train on one and several ranks; resume what 2 ranks saved on others, and on the CPU."""
        yield self.compare(name, 1, program, *flags, baseline=baseline)
        for ranks in self.several:
            yield self.compare(f"{name}, {ranks} ranks", ranks, program, *flags, baseline=name)
        yield self.compare(f"{name}, stopped", 2, program, *flags, "--epochs", 1, baseline=None)
        for ranks, device in dict.fromkeys(
                [(1, self.device), (self.several[-1], self.device), (1, "cpu")]):
            yield self.compare(f"{name}, from 2 ranks to {ranks} on {device}", ranks, program,
                               *flags, baseline=name, checkpoint=f"{name}, stopped", device=device)

    def changed(self, name: str, chapter: str, old: str, new: str) -> Path:
        """Return the main.py of a copy of a chapter, with one text replaced."""
        copy = self.folder / name
        shutil.copytree(ROOT / chapter, copy, ignore=shutil.ignore_patterns("*.ipynb", "__py*"))
        text = (copy / "main.py").read_text()
        if old not in text:
            raise ValueError(f"{chapter}/main.py does not have {old!r}")
        (copy / "main.py").write_text(text.replace(old, new, 1))
        return copy / "main.py"


def largest_difference(first: dict, second: dict) -> float:
    """Return the largest difference between arrays of the same names."""
    return float(max(abs(first[name] - array).max() for name, array in second.items()))


def ddp(jobs: Jobs) -> Iterator[dict]:
    """Chapters 1 and 3 as chapter 1 on the CPU; checkpoints on another device, or more ranks."""
    single = "01_single_node/main.py", *jobs.digits
    yield jobs.compare("cpu", 1, *single, baseline=None, device="cpu")
    yield jobs.compare("cpu, stopped", 1, *single, "--epochs", 1, baseline=None, device="cpu")
    yield jobs.compare(f"chapter 1 on {jobs.device}", 1, *single, baseline="cpu")
    yield jobs.compare(f"chapter 1, from cpu to {jobs.device}", 1, *single, baseline="cpu",
                       checkpoint="cpu, stopped")
    chapter = "03_ddp/main.py", *jobs.digits
    yield from jobs.compare_ranks("ddp", *chapter, baseline="cpu")
    import torch
    if jobs.device == "cuda" and jobs.ranks_share and torch.cuda.nccl.version() >= (2, 30):
        yield jobs.compare("ddp, 2 ranks, NCCL_MULTI_RANK_GPU_ENABLE", 2, *chapter, baseline="ddp",
                           env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, own_host=False)


def layouts(jobs: Jobs) -> Iterator[dict]:
    """Chapter 3 in channels last and bf16, compiled or not: another loss, a warning of DDP?"""
    flags = "03_ddp/main.py", *jobs.digits, "--precision", "bf16"
    yield jobs.compare_loss("bf16", 1, *flags, baseline=None)
    yield jobs.compare_loss("bf16, 2 ranks", 2, *flags, baseline="bf16")
    wrap = "    ddp = DistributedDataParallel("
    main = jobs.changed("compile", "03_ddp", wrap, "    model.compile()\n" + wrap)
    yield jobs.compare_loss("bf16, compiled, 2 ranks", 2, main, *flags[1:], baseline="bf16")


def deepspeed(jobs: Jobs) -> Iterator[dict]:
    """Chapters 4 and 5 with DeepSpeed: every stage of ZeRO."""
    if not find_spec("deepspeed"):
        yield {"test": "DeepSpeed", "skipped": "it is not installed"}
        return
    yield jobs.compare_loss("deepspeed", 1, "04_deepspeed/main.py", *jobs.digits, baseline=None)
    yield jobs.compare_loss("deepspeed, 2 ranks", 2, "04_deepspeed/main.py", *jobs.digits,
                            baseline="deepspeed")
    flags = "05_zero/main.py", *jobs.gpt, "--stage"
    yield jobs.compare_loss("zero", 1, *flags, 0, baseline=None)
    for stage in range(4):
        yield jobs.compare_loss(f"zero, stage {stage}, 2 ranks", 2, *flags, stage, baseline="zero")
    if jobs.several[-1] > 2:
        yield jobs.compare_loss(f"zero, stage 3, {jobs.several[-1]} ranks", jobs.several[-1],
                                *flags, 3, baseline="zero")


def fsdp(jobs: Jobs) -> Iterator[dict]:
    """Chapter 5 with FSDP2, and with tensor parallelism; checkpoints as in ddp()."""
    flags = "05_zero/fsdp.py", *jobs.gpt
    yield from jobs.compare_ranks("fsdp", *flags, baseline=None)
    yield jobs.compare_loss("fsdp, stage 1, 2 ranks", 2, *flags, "--stage", 1, "--precision",
                            "fp64", baseline="fsdp")
    if jobs.several[-1] % 4 == 0:
        yield jobs.compare("two_d, 2 x 2 ranks", 4, "05_zero/two_d.py", *jobs.gpt, "--tensor", 2,
                           baseline="fsdp")


def own_scripts(jobs: Jobs) -> Iterator[dict]:
    """The two scripts to take home: do 2 ranks train as one does?"""
    script, losses = ROOT / "03_ddp" / "your_script_ddp.py", []
    for ranks in 1, 2:
        _, output = jobs.run(ranks, script)
        losses += re.findall(r"epoch 5: loss ([0-9.]+)", output)
    difference = float(losses[0]) - float(losses[1]) if len(losses) == 2 else None
    yield outcome(script.name, difference is not None and abs(difference) < ROUNDED, output,
                  loss_differs_by=difference)
    script, weights = ROOT / "05_zero" / "your_script_fsdp.py", []
    for ranks in 1, 2:
        code, output = jobs.run(ranks, script, "--precision", "fp64", "--steps", 20)
        if code == 0:
            weights.append(read_weights(jobs.folder / "gpt.pt"))
    difference = largest_difference(*weights) if len(weights) == 2 else None
    yield outcome(script.name, difference is not None and difference < FP64, output,
                  parameters_differ_by=difference)
    code, output = jobs.run(2, script, "--steps", 40, "--compile")
    yield outcome(f"{script.name}, bf16 if on a GPU, compiled", code == 0, output)


def read_weights(file):
    """Return {name: array in fp64} of a file that torch.save() wrote."""
    import torch
    return {name: tensor.double().numpy()
            for name, tensor in torch.load(file, map_location="cpu").items()}


def agreement(jobs: Jobs) -> Iterator[dict]:
    """What does agree say of two right programs, and of three mistakes?"""
    scripts = {"03_ddp/main.py": (ROOT / "03_ddp/main.py", jobs.digits, "no problems"),
               "05_zero/fsdp.py": (ROOT / "05_zero/fsdp.py", jobs.gpt, "no problems")}
    for verdict, (old, new) in MISTAKES.items():
        script = jobs.changed(f"mistake {verdict}", "03_ddp", old, new)
        scripts[f"the mistake {verdict}"] = script, jobs.digits, verdict
    for name, (script, flags, verdict) in scripts.items():
        _, output = jobs.run(2, "-m", "agree", script, "--device", jobs.device, *flags)
        verdicts = ", ".join(re.findall("verdict: (.*)", output))
        yield outcome(f"agree on {name}", verdict in verdicts, output, says=verdicts)


def doctor(jobs: Jobs) -> Iterator[dict]:
    """What does the doctor find, and how fast are its all-reduces?"""
    for ranks in jobs.several:
        code, output = jobs.run(ranks, "-m", "cluster.doctor")
        yield outcome(f"the doctor, {ranks} ranks", code == 0, output,
                      says=re.findall("all-reduce over .*|no problems.*", output))


def failures(jobs: Jobs) -> Iterator[dict]:
    """If rank 1 fails, who says why, and after how many seconds does the job end?"""
    event = jobs.folder / "event"
    for name, (code_line, expected) in FAILURES.items():
        line = (f"            if rank == 1 and step == 5:\n"
                f"                open({str(event)!r}, 'w').close(); {code_line}\n")
        main = jobs.changed(f"rank 1 {name}", "03_ddp", IN_STEP, IN_STEP + line)
        code, output = jobs.run(2, main, "--device", jobs.device, *jobs.digits, "--timeout", 10)
        seconds = time.time() - event.stat().st_mtime if event.exists() else None
        event.unlink(missing_ok=True)
        lines = [line[:200] for line in output.splitlines() if re.search(TELLS_WHY, line)]
        yield outcome(f"rank 1 {name}", code not in (0, 124) and expected in output, output,
                      seconds=seconds, exit_code=code, says=lines[:20])
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port())}
    start_time = time.time()
    code, output = jobs.run(1, ROOT / "03_ddp/main.py", "--device", jobs.device, "--timeout", 5,
                            env=alone)
    yield outcome("rank 1 never comes", code == 2 and "did not connect" in output, output,
                  seconds=time.time() - start_time, exit_code=code, says=output.splitlines()[-3:])


GROUPS = ddp, fsdp, deepspeed, failures, agreement, own_scripts, layouts, doctor


def nccl(device: str, gpus: int) -> Iterator[dict]:
    """Do GPUs train as a CPU does, several ranks as one, and what happens if one fails?"""
    end = time.monotonic() + TOTAL_LIMIT if device == "cuda" else math.inf
    workers = max(1, min(3, os.cpu_count() // 4)) if device == "cuda" else 1
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(workers) as pool:
        def run_group(group):
            folder = Path(temporary, group.__name__)
            folder.mkdir()
            try:
                yield from group(Jobs(device, gpus, folder, end))
            except (OSError, ValueError, KeyError) as problem:
                yield outcome(f"all of {group.__name__}()", False, repr(problem))

        for group, records in zip(GROUPS, pool.map(lambda group: [*run_group(group)], GROUPS)):
            yield from ({"group": group.__name__, **record} for record in records)
