"""Check a new GPU node: do the chapters train correctly, and how fast?

    python -m cluster.gpu                    # all parts; make gpu does the same
    python -m cluster.gpu speed              # this part
    python -m cluster.gpu --device cpu       # a trial of this program, with small sizes

It needs torch >= 2.6, torchvision, scikit-learn and psutil in the Python that runs it, and no
network. It prints what each part measures, and appends it to results/gpu.jsonl as lines of JSON. If
a part fails, it says why, and continues with the next part.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from cluster.launch import ROOT, describe_failure, run_job
from cluster.nccl import nccl
from cluster.records import append_records, describe_machine
from workshop.flags import Parser

STEPS = {"cuda": 30, "cpu": 2}
START_TIME = time.monotonic()


def plain_loop(device, batch, image_size, settings):
    """Return images/s and peak bytes of a ResNet-50 loop on one batch (ResNet-18 on a CPU).

    settings: a text, such as "bf16, channels last".
    """
    import torch
    from torchvision.models import resnet18, resnet50

    torch.set_float32_matmul_precision("high")  # TF32; PyTorch's default for convolutions
    torch.backends.cudnn.benchmark = not torch.version.hip  # AMD's search takes minutes
    layout = torch.channels_last if "channels last" in settings else torch.contiguous_format
    build_model = resnet50 if device == "cuda" else resnet18
    model = build_model(num_classes=10).to(device, memory_format=layout)
    images = torch.randn(batch, 3, image_size, image_size, device=device).to(memory_format=layout)
    labels = torch.randint(10, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9)
    if "compile" in settings:
        model.compile()
    for step in range(5 + STEPS[device]):
        if step == 5:
            if device == "cuda":
                torch.cuda.synchronize()
            start_time = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled="bf16" in settings):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    loss.item()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return batch * STEPS[device] / (time.perf_counter() - start_time), peak


def speed(device, gpus):
    """How fast is a plain loop on one GPU with each setting?"""
    image_size, batches = (224, (256, 64, 128, 512)) if device == "cuda" else (32, (8, 4))
    all_settings = "TF32", "TF32, channels last", "bf16", "bf16, channels last"
    cases = [(settings, batches[0]) for settings in all_settings]
    cases += [("bf16, channels last", batch) for batch in batches[1:]]
    cases.append(("bf16, channels last, compile", batches[0]))
    for settings, batch in cases:
        call = f"gpu.plain_loop({device!r}, {batch}, {image_size}, {settings!r})"
        code = f"import json; from cluster import gpu; print(json.dumps({call}))"
        try:
            output = run_job([sys.executable, "-c", code], timeout=150)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            reason = describe_failure(problem).splitlines()[-1][:150]  # often: out of memory
            yield {"settings": settings, "batch": batch, "failed": reason}
            continue
        images_per_second, peak = json.loads(re.findall(r"^\[.*\]$", output, re.M)[-1])
        yield {"settings": settings, "batch": batch, "images/s": images_per_second,
               "peak bytes": peak}


PARTS = {"nccl": nccl, "speed": speed}


def format_record(record):
    """Return a record as text, with four digits per number, without empty values."""
    texts = []
    for key, value in record.items():
        text = f"{value:,.4g}" if isinstance(value, float) else value
        if isinstance(value, list):
            text = "".join(f"\n        {line}" for line in value)
        if value not in ("", None):
            texts.append(f"{key}: {text}")
    return "   ".join(texts)


def main():
    parser = Parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART",
                        help=f"parts to run (all): {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "gpu.jsonl",
                        help="file to append to (results/gpu.jsonl)")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    gpus = torch.cuda.device_count() if args.device == "cuda" else 2  # ranks on the CPU
    if not gpus:
        sys.exit("gpu.py: PyTorch sees no GPU: compare nvidia-smi with torch.version.cuda, "
                 "or try --device cpu")
    args.results.parent.mkdir(parents=True, exist_ok=True)

    machine = describe_machine() | {
        "launcher": "python or torchrun", "ranks": gpus, "device": args.device}
    failed = 0
    print(", ".join([machine["processor"], f"torch {machine['torch']}",
                     machine["git"], machine["time"]]))
    for name in args.parts or PARTS:
        print(f"\n{name}: {PARTS[name].__doc__}", flush=True)
        try:
            for record in PARTS[name](args.device, gpus):
                failed += not record.get("passed", True)
                print(f"    {format_record(record)}", flush=True)
                append_records(args.results, {"part": name, **machine, **record})
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as problem:
            failed += 1
            print(f"    {name} failed: {type(problem).__name__}: {problem}")
    print(f"\n{failed} of the tests failed; {time.monotonic() - START_TIME:.0f} s; {args.results}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
