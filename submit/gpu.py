"""Meet a node's GPUs for the first time: does everything train there, correctly, and how fast?

    python submit/gpu.py                    # all parts; make gpu does the same
    python submit/gpu.py ladder scaling     # some of them
    python submit/gpu.py --device cpu       # a try of this program itself, with small sizes

It takes the Python that runs it, with torch >= 2.6, torchvision, scikit-learn, psutil and tqdm. No
network is needed. What a part measures is printed, and appended to results/gpu.jsonl as lines of
JSON. If a part fails, it says why, and the next one begins.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from study import ROOT, Parser, append, machine, read, run

# ResNet-50, an image of 224 pixels: multiply and add, forward and twice that backward
FLOPS = 3 * 2 * 4.09e9
PEAKS = {  # bf16 without sparsity, FLOP/s, from the makers' data sheets
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "V100": 125e12, "L40S": 362e12}
STEPS = {"cuda": 30, "cpu": 2}
STARTED = time.monotonic()


def start(ranks, program, *flags, timeout=120):
    """Run a program on so many ranks; return its exit code, what it printed, and its records."""
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost",
                  "--nproc-per-node", ranks]
    words += [ROOT / program, *flags]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        if program.endswith("main.py"):
            words += ["--results", results]
        try:
            code, printed = 0, run(words, timeout)
        except subprocess.CalledProcessError as problem:
            code, printed = problem.returncode, problem.output
        except subprocess.TimeoutExpired:
            code, printed = 124, f"no end within {timeout} s"
        return code, printed, read(results)


def check(name, right, printed=""):
    """Return a record of what was tried: is it right, and if not, what was printed last?"""
    last_lines = "\n".join(printed.splitlines()[-12:])
    return {"check": name, "right": bool(right), "printed": "" if right else last_lines}


def doctor(device, gpus):
    """Does the doctor find anything? How fast are all-reduces?"""
    code, printed, _ = start(gpus, "submit/doctor.py")
    yield check("the doctor finds nothing wrong", code == 0, printed)
    for library, size, seconds, speed in re.findall(
            r"all-reduce over (\w+), (.*?): ([\d.]+) s, bus bandwidth ([\d.]+) GB/s", printed):
        yield {"all-reduce": size, "over": library, "seconds": float(seconds),
               "GB/s": float(speed)}


def same(device, gpus):
    """Is the loss the same on the CPU, one GPU, all GPUs? Do checkpoints pass between them?"""
    runs = {"chapter 1 on the CPU": ("01_single_node", 1, "cpu"),
            "chapter 1 on the device": ("01_single_node", 1, device),
            "chapter 3 on one rank": ("03_ddp", 1, device),
            "chapter 3 on all ranks": ("03_ddp", gpus, device),
            "chapter 3 on two ranks of the CPU": ("03_ddp", 2, "cpu")}
    for precision, tolerance in ("fp64", 1e-10), ("fp32", 0.02):
        cpu_loss = None
        for name, (folder, ranks, place) in runs.items():
            _, printed, records = start(
                ranks, f"{folder}/main.py", "--precision", precision, "--device", place,
                "--global-batch-size", 48, "--epochs", 2)
            loss = records[0]["loss"] if records else math.nan
            cpu_loss = loss if cpu_loss is None else cpu_loss
            difference = abs(loss - cpu_loss)
            yield {"loss": loss, "difference": difference} | check(
                f"{name}, {precision}: the loss of the CPU", difference < tolerance, printed)
    for first, second in ("cpu", device), (device, "cpu"):
        with tempfile.TemporaryDirectory() as folder:
            saved = "01_single_node/main.py", "--checkpoint", f"{folder}/c.pt"
            start(1, *saved, "--epochs", 1, "--device", first)
            code, printed, _ = start(1, *saved, "--epochs", 2, "--resume", "--device", second)
        yield check(f"a checkpoint of {first} continues on {second}",
                    code == 0 and "epoch 2/2" in printed, printed)


def bare(device, batch, side, rung):
    """Return images/s and peak bytes of a bare ResNet-50 loop on one batch (on a CPU ResNet-18)."""
    import torch
    from torchvision.models import resnet18, resnet50

    fast = rung != "fp32"
    torch.backends.cudnn.allow_tf32 = fast
    torch.set_float32_matmul_precision("high" if fast else "highest")
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if "channels last" in rung else torch.contiguous_format
    make = resnet50 if device == "cuda" else resnet18
    model = make(num_classes=10).to(device, memory_format=layout)
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=layout)
    labels = torch.randint(10, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9)
    if "compile" in rung:
        model.compile()
    for step in range(5 + STEPS[device]):
        if step == 5:
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled="bf16" in rung):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    loss.item()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return batch * STEPS[device] / (time.perf_counter() - started), peak


def ladder(device, gpus):
    """How fast is one GPU, rung by rung, and is main.py as fast as a bare loop?"""
    side, batches = (224, (256, 64, 128, 512)) if device == "cuda" else (32, (8, 4))
    rungs = [(rung, batches[0]) for rung in ("fp32", "TF32", "bf16", "bf16, channels last")]
    rungs += [("bf16, channels last", batch) for batch in batches[1:]]
    for rung, batch in [*rungs, ("bf16, channels last, compile", batches[0])]:
        call = f"gpu.bare({device!r}, {batch}, {side}, {rung!r})"
        code = f"import json, gpu; print(json.dumps({call}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "submit", text=True,
                              capture_output=True, timeout=150)
        if done.returncode:  # at 512 images memory may not suffice
            reason = done.stderr.strip().splitlines()[-1][:150]
            yield {"rung": rung, "batch": batch, "failed": reason}
            continue
        speed, peak = json.loads(done.stdout.splitlines()[-1])
        yield {"rung": rung, "batch": batch, "images/s": speed, "peak bytes": peak, **share(speed)}
    for precision in "fp32", "bf16":
        yield from chapter(1, "01_single_node", device, side, batches[0], precision)


def chapter(ranks, name, device, side, batch, precision):
    """Return the images/s of a chapter's main.py with ResNet-50."""
    model = "resnet50" if device == "cuda" else "resnet18"
    _, printed, records = start(
        ranks, f"{name}/main.py", "--device", device, "--dataset", "synthetic", "--model", model,
        "--image-size", side, "--batch-size", batch, "--precision", precision, "--lr", 0.001,
        "--epochs", 1, "--max-steps", 5 + STEPS[device])
    if not records:
        return [check(f"{name}, {ranks} ranks, {precision}", False, printed)]
    speed = records[0]["images_per_second"]
    return [{"main.py": name, "ranks": ranks, "precision": precision, "batch": batch, "side": side,
             "images/s": speed, "peak bytes": records[0]["peak_memory_bytes"],
             **share(speed / ranks)}]


def share(speed):
    """Return the share of the GPU's peak (MFU) of so many images/s, where the peak is known."""
    words = re.split(r"[ ,-]+", machine()["processor"])  # NVIDIA A100-SXM4-40GB
    peaks = [peak for name, peak in PEAKS.items() if name in words]
    return {"of its peak": speed * FLOPS / peaks[0]} if peaks else {}


def scaling(device, gpus):
    """How does chapter 3 scale over the GPUs, with the batch of each the same?"""
    side, batch = (224, 128) if device == "cuda" else (32, 8)
    for ranks in sorted({1, min(2, gpus), max(1, gpus // 2), gpus}):
        yield from chapter(ranks, "03_ddp", device, side, batch, "bf16")


def kill_rank_1():
    for process in psutil.Process().children(recursive=True):
        if process.environ().get("RANK") == "1":
            process.kill()


def failures(device, gpus):
    """Does a rank that dies end the job?"""
    threading.Timer(30, kill_rank_1).start()
    place = device if gpus > 1 else "cpu"
    code, printed, _ = start(
        max(2, gpus), "03_ddp/main.py", "--device", place, "--epochs", 100_000)
    yield check("a rank that dies ends the job", code not in (0, 124), printed)


PARTS = {part.__name__: part for part in (doctor, same, ladder, scaling, failures)}


def line_of(record):
    """Return a record as text, with numbers of four digits."""
    words = []
    for key, value in record.items():
        text = f"{value:,.4g}" if isinstance(value, float) else value
        words += [] if value == "" else [f"{key}: {text}"]
    return "   ".join(words)


def main():
    parser = Parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "gpu.jsonl",
                        help="a file (results/gpu.jsonl)")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"{', '.join(unknown)}: no part; there are {', '.join(PARTS)}")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    gpus = torch.cuda.device_count() if args.device == "cuda" else 2  # ranks of a CPU
    if not gpus:
        sys.exit("gpu.py: PyTorch sees no GPU here: compare nvidia-smi with torch.version.cuda, "
                 "or try --device cpu")
    args.results.parent.mkdir(parents=True, exist_ok=True)

    here, bad = machine() | {"ranks": gpus, "device": args.device}, 0
    print(f"{here['processor']}, torch {here['torch']}, {here['git']}, {here['time']}")
    for name in args.parts or PARTS:
        print(f"\n{name}: {PARTS[name].__doc__}", flush=True)
        try:
            for record in PARTS[name](args.device, gpus):
                bad += not record.get("right", True)
                print(f"    {line_of(record)}", flush=True)
                append(args.results, {"part": name, **record, **here})
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as problem:
            bad += 1
            print(f"    {name} failed: {type(problem).__name__}: {problem}")
    print(f"\n{bad} of the checks failed; {time.monotonic() - STARTED:.0f} s; {args.results}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
