"""Measure on this machine's CPU what loading, metrics, synchronisation, start and set-up cost; a benchmark, no test.

    python -m tools.measuring.bench [--sections N...]

All raw figures go to results/bench-SECTIONS.jsonl; a killed bench goes on where it was. This file imports no torch: the
peak memory that the system reports of a process is never less than that of the process which started it.
"""

import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, SUPPRESS
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch import ROOT, environment, launch, machine, missing
from one_line import Parser
from runs import Runs, end_with_the_study, said
from tqdm import tqdm

REPEATS = 7  # of each comparison: A B A B ...
STARTS = 3  # of each chapter's start
CASES = [("digits", "cnn", 155), ("synthetic", "cnn", 105), ("digits", "resnet18", 35)]  # steps: the first 5 warm up
MNIST = [(60_000, 10_000), (640, 640)]  # training and test images: as many as the real one has, and hardly any

STAGES = {"imports": "Python, imports of main.py", "ranks": "arguments, ranks", "data": "loading the data",
          "model": "building the model", "step": "first batch and step"}
START = Path(__file__).with_name("time_to_first_step.py")  # main.py, up to its first step


def flags_of(dataset, model, steps):
    """A chapter's flags for so many steps of 64 images a rank."""
    return ["--device", "cpu", "--dataset", dataset, "--model", model, "--batch-size", "64", "--epochs", "100",
            "--max-steps", str(steps)]


def perceptron(dataset, _, steps):
    """The flags of chapter 5's files for so many steps of 64 images a rank."""
    return ["--stage", "3", "--device", "cpu", "--dataset", dataset, "--batch-size", "64", "--max-steps", str(steps)]


def output(*words):
    """What `python words` prints, on stdout and stderr; CalledProcessError, with that, where it fails."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), timeout=600, check=True, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def spread(values, form):
    """The median of some values and their range, as text."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def bare_loop(flags):
    """Print images/s of chapter 1's training with these flags, without all but forward, loss, backward and step."""
    sys.path.insert(0, str(ROOT / "01_single_node"))
    import main as chapter
    import torch

    import workshop

    sys.argv = ["main.py", *flags]
    args = workshop.parse_args(chapter.__doc__)
    torch.manual_seed(args.seed)
    args.global_batch_size = args.batch_size
    train, _ = workshop.load_tensors(args, "cpu")
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


def chapter_1_tf(flags):
    return [launch("01_single_node/main_tf.py", 1, *flags)]


def bare(flags):
    return [json.loads(output("-m", "tools.measuring.bench", "--bare", *flags).splitlines()[-1]) | machine()]


def on_2(chapter):
    return lambda flags: [launch(chapter, 2, *flags)]


def twice(chapter):
    """Two independent runs at the same time."""
    def run(flags):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda _: launch(chapter, 1, *flags), range(2)))
    return run


def compare(measurement, bar, runs, a, b, cases=CASES, flags=flags_of):
    """Run two things in turn; print a line a case: images/s of A and of B, and the ratio of each pair."""
    bar.write(f"{'dataset, model':18} {'A images/s':>24} {'B images/s':>24}   {'A / B':22}")
    for dataset, model, steps in cases:
        pairs = []
        for repeat in range(REPEATS):
            pair = []
            for name, run in (("A", a), ("B", b)):
                bar.set_description(f"{measurement}: {name}, {dataset}, {model}")
                key = {"measurement": f"{measurement}: {name}", "case": [dataset, model, steps], "repeat": repeat}
                records = runs.once(key, lambda run=run: run(flags(dataset, model, steps)))  # noqa: B023  called here
                pair.append(sum(record["images_per_second"] for record in records))
                bar.update()
            pairs.append(pair)
        speeds = [spread(column, ",.0f") for column in zip(*pairs)]
        bar.write(f"{dataset + ', ' + model:18} {speeds[0]:>24} {speeds[1]:>24}   "
                  f"{spread([one / other for one, other in pairs], '.3f')}")


def start(chapter):
    """Start a chapter once, up to its first step.

    Returns its record: {stage: seconds}, {stage: {package: seconds of it spent on imports}} and the heavy packages
    that it imported.
    """
    last, seconds, imports = time.time(), {}, {}
    spent = dict.fromkeys(("torch", "numpy", "others"), 0)
    for line in output("-X", "importtime", str(START), str(ROOT / chapter / "main.py"),
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
    return {"chapter": chapter, "seconds": seconds, "imports": imports, "heavy": heavy} | machine()


def starts(chapter, bar, runs):
    """Print the seconds of each stage of a chapter's start, and which of them were imports."""
    found = []
    bar.set_description(f"start: {chapter}")
    for repeat in range(STARTS):
        key = {"measurement": "start", "chapter": chapter, "repeat": repeat}
        found.append(runs.once(key, lambda: start(chapter)))
        bar.update()
    bar.write(f"{chapter + ', 1 rank':28} {'seconds':>20}   of these, imports of: torch    numpy   others")
    for stage, text in STAGES.items():
        packages = [statistics.median(record["imports"][stage][name] for record in found)
                    for name in ("torch", "numpy", "others")]
        bar.write(f"{text:28} {spread([record['seconds'][stage] for record in found], '.2f'):>20}   "
                  f"{packages[0]:28.2f} {packages[1]:8.2f} {packages[2]:8.2f}")
    heavy = ", ".join(found[-1]["heavy"]) or "none"
    bar.write(f"{'in all':28} {spread([sum(record['seconds'].values()) for record in found], '.2f'):>20}\n"
              f"imported by then of torchvision, mpi4py, matplotlib, pandas, sklearn: {heavy}\n")


def write_mnist(folder, *counts):
    """Random images of 28x28 bytes in MNIST's format: so many for training, so many for the test."""
    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for name, n in zip(("train", "t10k"), counts):
        images, labels = os.urandom(n * 784), bytes(i % 10 for i in range(n))
        Path(raw, f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, n, 28, 28) + images)
        Path(raw, f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, n) + labels)


def memory(bar, runs):
    """Print chapter 1's peak memory with all of MNIST and with hardly any of it."""
    peaks = []
    for train, test in MNIST:
        bar.set_description(f"memory: {train:,} images")
        with tempfile.TemporaryDirectory() as folder:
            write_mnist(folder, train, test)
            record = runs.once({"measurement": "memory", "train_images": train, "test_images": test}, lambda: launch(
                "01_single_node", 1, *flags_of("mnist", "cnn", 10), "--data-dir", folder))
        peaks.append(record["peak_memory_bytes"])
        bar.write(f"{train:6,} + {test:6,} images of 784 bytes: peak {peaks[-1] / 1e6:,.1f} MB")
        bar.update()
    pixels = 784 * (sum(MNIST[0]) - sum(MNIST[1]))
    difference = peaks[0] - peaks[1]
    bar.write(f"difference: {difference / 1e6:,.1f} MB; the further images are {pixels / 1e6:,.1f} MB as bytes and "
              f"{4 * pixels / 1e6:,.1f} MB as floats, so {difference / pixels:.2f} bytes a pixel")


COMMAND = " ".join(flags_of("DATASET", "MODEL", "STEPS"))
PAIRS = 2 * len(CASES) * REPEATS
SECTIONS = {  # number: runs, title, what is run, how
    1: (PAIRS, f"Chapter 1 against a bare loop, {REPEATS} pairs in turn (hoped for: 0.97 or more)",
        f"A: python 01_single_node/main.py {COMMAND}\n"
        f"B: python -m tools.measuring.bench --bare {COMMAND}\n"
        "   the same model and optimizer on one batch kept in memory, without loading and metrics",
        lambda *to: compare("bare loop", *to, chapter_1, bare)),
    2: (PAIRS, f"What synchronisation costs, {REPEATS} pairs in turn",
        f"A: mpiexec -n 2 python 03_ddp/main.py {COMMAND}\n"
        f"B: python 01_single_node/main.py {COMMAND}\n"
        "   twice at the same time, the two speeds added",
        lambda *to: compare("synchronisation", *to, on_2("03_ddp"), twice("01_single_node"))),
    3: (2 * STARTS, f"Seconds from `python main.py` to the end of the first step, {STARTS} starts, files in cache",
        f"python -X importtime CHAPTER/main.py {' '.join(flags_of('digits', 'cnn', 1))}",
        lambda *to: (starts("01_single_node", *to), starts("03_ddp", *to))),
    4: (len(MNIST), "Memory, of random images in MNIST's format in FOLDER",
        f"python 01_single_node/main.py {' '.join(flags_of('mnist', 'cnn', 10))} --data-dir FOLDER", memory),
    5: (PAIRS, f"Horovod against DDP, 2 ranks of one thread, {REPEATS} pairs in turn",
        f"A: mpiexec -n 2 python 02_horovod/pytorch/main.py {COMMAND}\n"
        f"B: mpiexec -n 2 python 03_ddp/main.py {COMMAND}",
        lambda *to: compare("Horovod and DDP", *to, on_2("02_horovod/pytorch"), on_2("03_ddp"))),
    6: (PAIRS, f"What synchronisation costs with Horovod and TensorFlow, {REPEATS} pairs in turn",
        f"A: mpiexec -n 2 python 02_horovod/tensorflow/main.py {COMMAND}\n"
        f"B: python 01_single_node/main_tf.py {COMMAND}\n"
        "   twice at the same time, the two speeds added",
        lambda *to: compare("TensorFlow", *to, on_2("02_horovod/tensorflow"), twice("01_single_node/main_tf.py"))),
    8: (PAIRS, f"DeepSpeed's engine against DDP, 2 ranks of one thread, {REPEATS} pairs in turn",
        f"A: mpiexec -n 2 python 04_deepspeed/main.py {COMMAND}\n"
        f"B: mpiexec -n 2 python 03_ddp/main.py {COMMAND}",
        lambda *to: compare("DeepSpeed and DDP", *to, on_2("04_deepspeed"), on_2("03_ddp"))),
    9: (2 * REPEATS, f"Stage 3 of DeepSpeed against FSDP2, 2 ranks of one thread, {REPEATS} pairs in turn",
        f"A: mpiexec -n 2 python 05_zero/main.py {' '.join(perceptron('digits', '', 20))}\n"
        f"B: mpiexec -n 2 python 05_zero/fsdp.py {' '.join(perceptron('digits', '', 20))}",
        lambda *to: compare("stage 3", *to, on_2("05_zero"), on_2("05_zero/fsdp.py"),
                            [("digits", "perceptron", 20)], perceptron)),
    10: (PAIRS, f"TensorFlow against PyTorch, one thread, {REPEATS} pairs in turn",
         f"A: python 01_single_node/main_tf.py {COMMAND}\n"
         f"B: python 01_single_node/main.py {COMMAND}",
         lambda *to: compare("frameworks", *to, chapter_1_tf, chapter_1))}


def report(bar, runs, numbers):
    """Make the measurements of these sections and print them one after the other."""
    here = machine()
    bar.write(f"CPU figures of {here['host']}: {here['cpus']} cores, torch {here['torch']}, Python {here['python']}, "
              f"{here['git']}, {here['time']}; OMP_NUM_THREADS=1\nmedian (least..most); STEPS: "
              + ", ".join(f"{steps} for {dataset} {model}" for dataset, model, steps in CASES))
    for number in numbers:
        _, title, commands, measure = SECTIONS[number]
        bar.write(f"\n{number}. {title}\n{commands}")
        if number in (5, 6) and missing("02_horovod"):
            bar.write(f"skipped: {missing('02_horovod')}")
        else:
            measure(bar, runs)


def main(numbers):
    results = ROOT / "results" / f"bench-{'-'.join(map(str, numbers))}.jsonl"
    results.parent.mkdir(exist_ok=True)
    end_with_the_study()
    runs = Runs(f"{results}.part")
    with tqdm(total=sum(SECTIONS[number][0] for number in numbers), unit="run", disable=None) as bar:
        try:
            report(bar, runs, numbers)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            bar.close()
            sys.exit(f"bench: {bar.desc}{said(problem)}")
        runs.publish(results)
        bar.write(f"\nraw figures: {results.relative_to(ROOT)}")


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--sections", nargs="+", type=int, choices=SECTIONS, default=[*SECTIONS], help="some of them")
    parser.add_argument("--bare", nargs=REMAINDER, help=SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare_loop(args.bare)
    else:
        main(args.sections)
