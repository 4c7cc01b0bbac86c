"""Meet a node's GPUs for the first time: does all of this train there, rightly, and how fast?

    python submit/gpu.py                    # all parts; make gpu does the same
    python submit/gpu.py ladder scaling     # some of them
    python submit/gpu.py --device cpu       # a try of this program itself, with small sizes

It takes the Python that runs it, with torch >= 2.7, torchvision, scikit-learn, tqdm, pandas and matplotlib.
DeepSpeed is used where it is installed. No network is needed. What a part finds becomes lines of JSON in
results/gpu/records.jsonl and, in the end, a page, results/gpu/README.md, with two figures. A part that fails says so,
and the next one begins.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch import ROOT, machine

FLOPS = 3 * 2 * 4.09e9  # ResNet-50, an image of 224 pixels: multiply and add, forward and twice that backward
PEAKS = {  # bf16 without sparsity, FLOP/s, from the makers' data sheets
    "A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "V100": 125e12, "L40S": 362e12}
NVLINK = {"A100": 300, "H100": 450, "H200": 450, "V100": 150}  # GB/s of a GPU in one direction, from the same sheets
STEPS = {"cuda": 30, "cpu": 6}
STARTED = time.monotonic()


def start(ranks, program, *flags, env=None, timeout=120):
    """Run a program on so many ranks; return its exit code, what it printed, and its records."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        torchrun = "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", ranks
        words = [sys.executable, *(torchrun if ranks > 1 else []), ROOT / program, *flags]
        if program.endswith(("main.py", "fsdp.py")):
            words += ["--results", results]
        process = subprocess.Popen([str(word) for word in words], cwd=ROOT, env=os.environ | (env or {}), text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            printed = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            printed = process.communicate()[0] + f"\nno end within {timeout} s"
        records = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        return process.returncode, printed, records


def check(name, right, printed=""):
    """A line for the page: what was tried, and whether it is right; else what was printed last."""
    return {"check": name, "right": bool(right), "printed": "" if right else "\n".join(printed.splitlines()[-12:])}


def doctor(device, gpus):
    """What the doctor finds, the speed of all-reduces, and by which way NCCL sends."""
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
    code, printed, _ = start(max(2, gpus), "submit/doctor.py", env=env | hidden(device, gpus < 2))
    yield check("the doctor finds nothing wrong", code == 0, printed)
    for library, size, seconds, speed in re.findall(
            r"all-reduce over (\w+), (.*?): ([\d.]+) s, bus bandwidth ([\d.]+) GB/s", printed):
        limit = {"at most by NVLink": of_this_gpu(NVLINK)} if library == "NCCL" else {}
        yield {"all-reduce": size, "over": library, "seconds": float(seconds), "GB/s": float(speed)} | limit
    if ways := set(re.findall(r"via (P2P|SHM|NET/\w+)", printed)):
        yield {"NCCL sends by": sorted(ways)} | check("NCCL does not send over TCP", "NET/Socket" not in ways)


def hidden(device, hide):
    """The variables of ranks that are to take the CPU."""
    return {"CUDA_VISIBLE_DEVICES": ""} if hide or device == "cpu" else {}


def same(device, gpus):
    """Is the loss the same on the CPU, on a GPU, on all GPUs? Do checkpoints pass from one to the other?"""
    runs = {"chapter 1 on the CPU": ("01_single_node", 1, "cpu"),
            "chapter 1 on the device": ("01_single_node", 1, device),
            "chapter 3 on one rank": ("03_ddp", 1, device), "chapter 3 on all GPUs": ("03_ddp", gpus, device),
            "chapter 3 on two ranks of the CPU": ("03_ddp", 2, "cpu")}
    for precision, digits in ("fp64", 1e-10), ("fp32", 0.02):
        cpu = None
        for name, (folder, ranks, place) in runs.items():
            _, printed, records = start(ranks, f"{folder}/main.py", "--precision", precision, "--device", place,
                                        "--global-batch-size", 48, "--epochs", 2)
            loss = records[0]["loss"] if records else math.nan
            cpu = loss if cpu is None else cpu
            yield {"loss": loss, "difference": abs(loss - cpu)} | check(
                f"{name}, {precision}: the loss of the CPU", abs(loss - cpu) < digits, printed)
    code, printed, _ = start(2, "submit/agree.py", ROOT / "03_ddp/main.py", "--device", "cpu")
    yield check("agree.py finds nothing wrong in chapter 3", code == 0, printed)
    for first, second in ("cpu", device), (device, "cpu"):
        with tempfile.TemporaryDirectory() as folder:
            saved = "--checkpoint", f"{folder}/c.pt"
            start(1, "01_single_node/main.py", *saved, "--epochs", 1, "--device", first)
            code, printed, _ = start(1, "01_single_node/main.py", *saved, "--epochs", 2, "--resume", "--device", second)
        yield check(f"a checkpoint of {first} continues on {second}", code == 0 and "epoch 2/2" in printed, printed)


def bare(device, batch, side, rung):
    """Return images/s and peak bytes of a bare ResNet-50 loop on one batch in memory (on a CPU ResNet-18)."""
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
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, fused=True)
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
        code = f"import json, gpu; print(json.dumps(gpu.bare({device!r}, {batch}, {side}, {rung!r})))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "submit", capture_output=True, text=True,
                              timeout=150)
        if done.returncode:  # at 512 images memory may not suffice
            yield {"rung": rung, "batch": batch, "failed": done.stderr.strip().splitlines()[-1][:150]}
            continue
        speed, peak = json.loads(done.stdout.splitlines()[-1])
        yield {"rung": rung, "batch": batch, "images/s": speed, "peak bytes": peak, **share(speed)}
    for precision in "fp32", "bf16":
        yield from chapter(1, "01_single_node", device, side, batches[0], precision)


def chapter(ranks, name, device, side, batch, precision):
    """The images/s of a chapter's main.py with ResNet-50."""
    model = "resnet50" if device == "cuda" else "resnet18"
    _, printed, records = start(
        ranks, f"{name}/main.py", "--device", device, "--dataset", "synthetic", "--model", model, "--image-size", side,
        "--batch-size", batch, "--precision", precision, "--lr", 0.001, "--epochs", 1, "--max-steps", 5 + STEPS[device])
    for record in records:
        yield {"main.py": name, "ranks": ranks, "precision": precision, "batch": batch, "side": side,
               "images/s": record["images_per_second"], "peak bytes": record["peak_memory_bytes"],
               **(share(record["images_per_second"] / ranks) if side == 224 else {})}
    if not records:
        yield check(f"{name}, {ranks} ranks, {precision}, {side} pixels", False, printed)


def share(speed):
    """The share of the GPU's peak (MFU) that so many images/s are, where its peak is known."""
    peak = of_this_gpu(PEAKS)
    return {"of its peak": speed * FLOPS / peak} if peak else {}


def of_this_gpu(values):
    """The value of a dict by names of GPUs that belongs to those of this node, or None."""
    names = re.split(r"[ ,-]+", machine()["processor"])  # NVIDIA A100-SXM4-40GB
    return next((value for name, value in values.items() if name in names), None)


def scaling(device, gpus):
    """How does chapter 3 scale over this node's GPUs? How fast is chapter 1 at 32 pixels, where Python is slow?"""
    side, batch = (224, 128) if device == "cuda" else (32, 8)
    for ranks in sorted({1, 2, gpus // 2, gpus} & set(range(1, gpus + 1))) if device == "cuda" else (1, 2):
        yield from chapter(ranks, "03_ddp", device, side, batch, "bf16")
    for batch in (64, 256, 1024) if device == "cuda" else (8,):
        yield from chapter(1, "01_single_node", device, 32, batch, "fp32")


def zero(device, gpus):
    """Do chapter 5's bytes fit the formula and the allocator? With offload? Does stage 3 train what stage 0 cannot?"""
    size = ("--width", 8192, "--layers", 6) if device == "cuda" else ("--width", 64, "--layers", 2)
    runs = [("fsdp.py", 3, "none"), ("fsdp.py", 1, "none"), ("fsdp.py", 3, "cpu")]
    if importlib.util.find_spec("deepspeed"):
        runs += [("main.py", 0, "none"), ("main.py", 3, "none"), ("main.py", 2, "cpu")]
    for name, stage, offload in runs[:None if device == "cuda" else 2]:
        code, printed, records = start(gpus, f"05_zero/{name}", "--device", device, "--stage", stage, "--offload",
                                       offload, *size, "--precision", "bf16", "--epochs", 1, "--max-steps", 8)
        held = records[0]["memory"][0] if records and records[0].get("memory") else {}
        yield {"program": name, "stage": stage, "offload": offload, "held": held} | check(
            f"chapter 5, {name}, stage {stage}, offload {offload}", code == 0, printed)
    if gpus > 1:  # stage 1 needs 8 P + 8 P/N bytes in fp32, stage 3 needs 16 P/N
        import torch
        parameters = 1.15 * torch.cuda.get_device_properties(0).total_memory / (8 + 8 / gpus)
        for stage in 3, 1:
            code, printed, _ = start(gpus, "05_zero/fsdp.py", "--stage", stage, "--width", 8192, "--layers",
                                     int(parameters / 8192**2), "--epochs", 1, "--max-steps", 3, timeout=300)
            yield check(f"{parameters:,.0f} parameters at stage {stage}: they fit at stage 3 alone",
                        (code == 0) == (stage == 3), printed)


def failures(device, gpus):
    """A wrong flag is one line; a rank that dies ends the job; a profile is written."""
    code, printed, _ = start(1, "01_single_node/main.py", "--batch-size", "0")
    yield check("a wrong flag: one line, code 2", code == 2 and len(printed.splitlines()) == 1, printed)
    env = {"PYTHONPATH": str(Path(__file__).parent)} | hidden(device, gpus < 2)
    dying = "import os, runpy, sys, threading; os.environ['RANK'] == '1' and threading.Timer(9, os._exit, [9]).start()"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "dying.py")
        program.write_text(f"{dying}\nsys.argv[0] = {str(ROOT / '03_ddp/main.py')!r}\n"
                           "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
                           "runpy.run_path(sys.argv[0], run_name='__main__')")
        begun = time.monotonic()
        code, printed, _ = start(max(2, gpus), str(program), "--epochs", 10000, env=env)
        yield check("a rank that dies ends the job", code != 0 and time.monotonic() - begun < 90, printed)
        trace = Path(folder, "trace.json")
        code, printed, _ = start(1, "01_single_node/main.py", "--device", device, "--epochs", 1, "--profile", trace)
        yield check("a profile is written", trace.exists() and "ProfilerStep" in trace.read_text(), printed)


PARTS = {part.__name__: part for part in (doctor, same, ladder, scaling, zero, failures)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "gpu", help="a folder (results/gpu)")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"{', '.join(unknown)}: no part; there are {', '.join(PARTS)}")
    import torch
    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    if not gpus:
        sys.exit("gpu.py: PyTorch sees no GPU here: compare nvidia-smi with torch.version.cuda, or try --device cpu")
    args.results.mkdir(parents=True, exist_ok=True)
    here, bad = machine() | {"gpus": gpus, "device": args.device}, 0
    with open(args.results / "records.jsonl", "a") as file:
        for name in args.parts or PARTS:
            print(f"== {name}: {PARTS[name].__doc__}", flush=True)
            try:
                for record in PARTS[name](args.device, gpus):
                    bad += not record.get("right", True)
                    print("  ", *(f"{key}: {value:,.4g}" if isinstance(value, float) else f"{key}: {value}"
                                  for key, value in record.items() if value != ""), sep="  ", flush=True)
                    file.write(json.dumps({"part": name, **record, **here}) + "\n")
                    file.flush()
            except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as problem:
                bad += 1
                print(f"   {name} failed: {type(problem).__name__}: {problem}", flush=True)
    from gpu_page import write_page
    write_page(args.results)
    print(f"{bad} of the checks failed; {time.monotonic() - STARTED:.0f} s; {args.results}/README.md")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
