"""Measure on this machine's CPU what loading, metrics, synchronisation and the start cost; a benchmark, not a test.

All raw figures are appended to results/bench.jsonl. This file imports no torch: the peak memory that the system reports
of a process is never less than that of the process which started it.
"""

import argparse
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch import ROOT, environment, launch, machine
from tqdm import tqdm

REPEATS = 7  # of each comparison: A B A B ...
STARTS = 3  # of each chapter's start
CASES = [("digits", "cnn", 155), ("synthetic", "cnn", 105), ("digits", "resnet18", 35)]  # steps: the first 5 warm up
MNIST = [(60_000, 10_000), (640, 640)]  # training and test images: as many as the real one has, and hardly any
RUNS = 2 * 2 * len(CASES) * REPEATS + 2 * STARTS + len(MNIST)
RESULTS = ROOT / "results" / "bench.jsonl"

STAGES = {"imports": "Python, imports of main.py", "ranks": "arguments, ranks", "data": "loading the data",
          "model": "building the model", "step": "first batch and step"}
START = """  # do what main.py does up to its first step, and note the time after each stage
import importlib.util, os, sys, time

def mark(stage, *more):
    print("mark", stage, time.time(), *more, file=sys.stderr)

def marked(function, before, after):
    def call(*args):
        if before:
            mark(before)
        result = function(*args)
        mark(after)
        return result
    return call

def stop(*_):
    mark("step", *sorted({"matplotlib", "mpi4py", "pandas", "torchvision"} & sys.modules.keys()))
    os._exit(0)

del sys.argv[0]
spec = importlib.util.spec_from_file_location("chapter", sys.argv[0])
chapter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chapter)
mark("imports")
chapter.prepare = marked(chapter.prepare, "ranks", "data")
chapter.build_model = marked(chapter.build_model, None, "model")
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(stop)
chapter.main()
"""


def flags_of(dataset, model, steps):
    """A chapter's flags for so many steps of 64 images a rank."""
    return ["--device", "cpu", "--dataset", dataset, "--model", model, "--batch-size", "64", "--epochs", "100",
            "--max-steps", str(steps)]


def output(*words):
    """What `python words` prints, on stdout and stderr; CalledProcessError, with that, where it fails."""
    return subprocess.run([sys.executable, *words], env=environment(), timeout=600, check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def save(measurement, repeat, record):
    """Append one run's figures to results/bench.jsonl."""
    with open(RESULTS, "a") as file:
        file.write(json.dumps({"measurement": measurement, "repeat": repeat} | record) + "\n")


def spread(values, form):
    """The median of some values and their range, as text."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def bare_loop(flags):
    """Print images/s of chapter 1's training with these flags, without all but forward, loss, backward and step."""
    import torch

    spec = importlib.util.spec_from_file_location("chapter", ROOT / "01_single_node" / "main.py")
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    sys.argv = ["main.py", *flags]
    args = chapter.parse_args()
    torch.manual_seed(args.seed)
    _, train, _ = chapter.prepare(args)
    std, mean = torch.std_mean(train.tensors[0][:256].float())
    images, labels = train[list(range(args.batch_size))]
    images = (images.float() - mean) / std
    model = chapter.build_model(args.model, images)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * args.batch_size / 256, momentum=0.9)
    times = [time.perf_counter()]
    for _ in range(args.max_steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter())
    step_seconds = statistics.median([b - a for a, b in zip(times, times[1:])][5:])  # the first 5 warm up
    print(json.dumps({"chapter": "bare loop", "dataset": args.dataset, "model": args.model, "steps": args.max_steps,
                      "batch_size": args.batch_size, "step_seconds": step_seconds,
                      "images_per_second": args.batch_size / step_seconds}))


def chapter_1(flags):
    return [launch("01_single_node", 1, *flags)]


def bare(flags):
    return [json.loads(output(__file__, "--bare", *flags).splitlines()[-1]) | machine()]


def chapter_3_on_2(flags):
    return [launch("03_ddp", 2, *flags)]


def chapter_1_twice(flags):
    """Two independent runs at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: launch("01_single_node", 1, *flags), range(2)))


def compare(measurement, ours, other, bar):
    """Run two things in turn; print a line a case: images/s of ours and of the other, and the ratio of each pair."""
    bar.write(f"{'dataset, model':18} {'A images/s':>24} {'B images/s':>24}   {'A / B':22}")
    for dataset, model, steps in CASES:
        pairs = []
        for repeat in range(REPEATS):
            pair = []
            for run in (ours, other):
                bar.set_description(f"{measurement}: {run.__name__}, {dataset}, {model}")
                records = run(flags_of(dataset, model, steps))
                for record in records:
                    save(f"{measurement}: {run.__name__}", repeat, record)
                pair.append(sum(record["images_per_second"] for record in records))
                bar.update()
            pairs.append(pair)
        a, b = zip(*pairs)
        bar.write(f"{dataset + ', ' + model:18} {spread(a, ',.0f'):>24} {spread(b, ',.0f'):>24}   "
                  f"{spread([a / b for a, b in pairs], '.3f')}")


def start(chapter):
    """Start a chapter once, up to its first step.

    Returns {stage: seconds}, {stage: {package: seconds of it spent on imports}} and the heavy packages it imported.
    """
    last, seconds, imports = time.time(), {}, {}
    spent = dict.fromkeys(("torch", "sklearn", "others"), 0)
    for line in output("-X", "importtime", "-c", START, str(ROOT / chapter / "main.py"),
                       *flags_of("digits", "cnn", 1)).splitlines():
        if line.startswith("mark "):
            _, stage, now, *heavy = line.split()
            seconds[stage], imports[stage] = float(now) - last, spent
            last, spent = float(now), dict.fromkeys(spent, 0)
        elif line.startswith("import time:") and "[us]" not in line:
            _, cumulative, name = line.split("|")
            package = name.split(".")[0].strip()
            if not name.startswith("  "):  # what another import imported is in that one's time
                spent[package if package in spent else "others"] += int(cumulative) / 1e6
    return seconds, imports, heavy


def starts(chapter, bar):
    """Print the seconds of each stage of a chapter's start, and which of them were imports."""
    runs = []
    bar.set_description(f"start: {chapter}")
    for repeat in range(STARTS):
        seconds, imports, heavy = start(chapter)
        save("start", repeat, {"chapter": chapter, "seconds": seconds, "imports": imports, "heavy": heavy} | machine())
        runs.append((seconds, imports))
        bar.update()
    bar.write(f"{chapter + ', 1 rank':28} {'seconds':>20}   of these, imports of: torch  sklearn   others")
    for stage, text in STAGES.items():
        packages = [statistics.median(imports[stage][name] for _, imports in runs)
                    for name in ("torch", "sklearn", "others")]
        bar.write(f"{text:28} {spread([seconds[stage] for seconds, _ in runs], '.2f'):>20}   "
                  f"{packages[0]:28.2f} {packages[1]:8.2f} {packages[2]:8.2f}")
    bar.write(f"{'in all':28} {spread([sum(seconds.values()) for seconds, _ in runs], '.2f'):>20}\n"
              f"imported by then of torchvision, mpi4py, matplotlib, pandas: {', '.join(heavy) or 'none'}\n")


def write_mnist(folder, *counts):
    """Random images of 28x28 bytes in MNIST's format: so many for training, so many for the test."""
    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for name, n in zip(("train", "t10k"), counts):
        images, labels = os.urandom(n * 784), bytes(i % 10 for i in range(n))
        Path(raw, f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, n, 28, 28) + images)
        Path(raw, f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, n) + labels)


def memory(bar):
    """Print chapter 1's peak memory with all of MNIST and with hardly any of it."""
    peaks = []
    for train, test in MNIST:
        bar.set_description(f"memory: {train:,} images")
        with tempfile.TemporaryDirectory() as folder:
            write_mnist(folder, train, test)
            record = launch("01_single_node", 1, *flags_of("mnist", "cnn", 10), "--data-dir", folder)
        save("memory", 0, record | {"train_images": train, "test_images": test})
        peaks.append(record["peak_memory_bytes"])
        bar.write(f"{train:6,} + {test:6,} images of 784 bytes: peak {peaks[-1] / 1e6:,.1f} MB")
        bar.update()
    pixels = 784 * (sum(MNIST[0]) - sum(MNIST[1]))
    difference = peaks[0] - peaks[1]
    bar.write(f"difference: {difference / 1e6:,.1f} MB; the further images are {pixels / 1e6:,.1f} MB as bytes and "
              f"{4 * pixels / 1e6:,.1f} MB as floats, so {difference / pixels:.2f} bytes a pixel")


def report(bar):
    """Make all measurements and print them one after the other."""
    here, command = machine(), " ".join(flags_of("DATASET", "MODEL", "STEPS"))
    bar.write(f"CPU figures of {here['host']}: {here['cpus']} cores, torch {here['torch']}, Python {here['python']}, "
              f"{here['git']}, {here['time']}; OMP_NUM_THREADS=1\nmedian (least..most); STEPS: "
              + ", ".join(f"{steps} for {dataset} {model}" for dataset, model, steps in CASES))
    bar.write(f"\n1. Chapter 1 against a bare loop, {REPEATS} pairs in turn (hoped for: 0.97 or more)\n"
              f"A: python 01_single_node/main.py {command}\n"
              f"B: python submit/bench.py --bare {command}\n"
              "   the same model and optimizer on one batch kept in memory, without loading and metrics")
    compare("bare loop", chapter_1, bare, bar)
    bar.write(f"\n2. What synchronisation costs, {REPEATS} pairs in turn\n"
              f"A: mpiexec -n 2 python 03_ddp/main.py {command}\n"
              "B: chapter 1's command of 1. twice at the same time, the two speeds added")
    compare("synchronisation", chapter_3_on_2, chapter_1_twice, bar)
    bar.write(f"\n3. Seconds from `python main.py` to the end of the first step, {STARTS} starts, files in cache\n"
              f"python -X importtime CHAPTER/main.py {' '.join(flags_of('digits', 'cnn', 1))}")
    starts("01_single_node", bar)
    starts("03_ddp", bar)
    bar.write(f"4. Memory, of random images in MNIST's format in FOLDER\n"
              f"python 01_single_node/main.py {' '.join(flags_of('mnist', 'cnn', 10))} --data-dir FOLDER")
    memory(bar)
    bar.write(f"\nraw figures: {RESULTS.relative_to(ROOT)}")


def main():
    RESULTS.parent.mkdir(exist_ok=True)
    with tqdm(total=RUNS, unit="run", disable=None) as bar:
        try:
            report(bar)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            bar.close()
            how = "took too long" if isinstance(problem, subprocess.TimeoutExpired) else (
                f"ended with {problem.returncode}:\n" + "\n".join(problem.stdout.splitlines()[-5:]))
            sys.exit(f"bench: failed in {bar.desc}{how}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bare", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    flags = parser.parse_args().bare
    if flags:
        bare_loop(flags)
    else:
        main()
