"""Compare programs by images/s on this machine's CPU, two in turn: what loading, ranks and libraries cost.

    python -m tools.measuring.bench [--sections N...]

The pages show some of what it prints. All raw figures go to results/bench-SECTIONS.jsonl; a killed bench goes on where
it was.
"""

import json
import statistics
import sys
import time
from argparse import REMAINDER, SUPPRESS
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas
from launch import ROOT, command, machine, missing, records_of
from one_line import Parser
from runs import study

REPEATS = 3  # of each comparison: A B A B ...
STAGE_3 = "--stage 3 --device cpu --dataset digits --batch-size 64 --max-steps 20"
CASES = {  # name: flags; the first 5 steps warm up
    "digits, cnn": "--dataset digits --model cnn --batch-size 64 --max-steps 155",
    "synthetic, cnn": "--dataset synthetic --model cnn --batch-size 64 --max-steps 105",
    "digits, resnet18": "--dataset digits --model resnet18 --batch-size 64 --max-steps 35"}
SIZES = {f"{model}, {side} pixels, {precision}": f"--dataset synthetic --model {model} --image-size {side} "
         f"--precision {precision} --lr 0.001 --batch-size {batch} --max-steps 25"
         for model, side, batch in
         (("resnet18", 32, 32), ("resnet18", 96, 8), ("resnet50", 32, 16), ("resnet50", 96, 4))
         for precision in ("fp32", "bf16")}
BARE = "-m tools.measuring.bench --bare"  # of python
TWICE = "twice at the same time, the two speeds added"
SECTIONS = {  # number: title, A, B (each a file, its ranks, how often it runs at the same time), a remark on B
    1: ("Chapter 1 against a bare loop", ("01_single_node/main.py", 1, 1), (BARE, 1, 1),
        "the same model and optimizer, the fastest that we know, on one batch kept in memory: no loading, no metrics"),
    2: ("What synchronisation costs", ("03_ddp/main.py", 2, 1), ("01_single_node/main.py", 1, 2), TWICE),
    5: ("Horovod against DDP, 2 ranks of one thread", ("02_horovod/pytorch/main.py", 2, 1), ("03_ddp/main.py", 2, 1),
        ""),
    6: ("What synchronisation costs with Horovod and TensorFlow", ("02_horovod/tensorflow/main.py", 2, 1),
        ("01_single_node/main_tf.py", 1, 2), TWICE),
    8: ("DeepSpeed's engine against DDP, 2 ranks of one thread", ("04_deepspeed/main.py", 2, 1),
        ("03_ddp/main.py", 2, 1), ""),
    9: ("Stage 3 of DeepSpeed against FSDP2, 2 ranks of one thread", ("05_zero/main.py", 2, 1),
        ("05_zero/fsdp.py", 2, 1), "")}


def bare_loop(flags):
    """Time chapter 1's training with these flags, without all but forward, loss, backward and step."""
    sys.path.insert(0, str(ROOT / "01_single_node"))
    import workshop

    import main as chapter
    import torch

    sys.argv = ["main.py", *flags]
    args = workshop.parse_args(chapter.__doc__)
    torch.manual_seed(args.seed)
    args.global_batch_size = args.batch_size
    train, _ = workshop.load_tensors(args)
    std, mean = torch.std_mean(train.tensors[0][:256].float())
    images, labels = train[list(range(args.batch_size))]
    layout = workshop.memory_format(args, "cpu")
    images = ((images.float() - mean) / std).to(memory_format=layout)
    model = chapter.build_model(args.model, images).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * args.batch_size / 256, momentum=0.9, fused=True)
    times = [time.perf_counter()]
    for _ in range(args.max_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    step_seconds = statistics.median([b - a for a, b in zip(times, times[1:])][5:])  # the first 5 warm up
    record = json.dumps({"chapter": "bare loop", "step_seconds": step_seconds,
                         "images_per_second": args.batch_size / step_seconds})
    print(record)
    if args.results:
        Path(args.results).write_text(record)


def cases(section):
    """{name: flags} of each comparison of a section."""
    if section == 9:
        return {"digits, perceptron": STAGE_3}
    chosen = CASES | SIZES if section == 1 else CASES
    return {name: f"--device cpu --epochs 100 {flags}" for name, flags in chosen.items()}


def measure(section, case, repeat, side):
    """The record of A or B, with images/s of all its programs together."""
    file, ranks, times = SECTIONS[section][1 + "AB".index(side)]
    words = [sys.executable, *BARE.split()] if file == BARE else command(file, ranks)
    words += cases(section)[case].split()
    with ThreadPoolExecutor(times) as pool:
        runs = [record for records in pool.map(lambda _: records_of(words), range(times)) for record in records]
    return {"section": section, "case": case, "repeat": repeat, "side": side, "runs": runs,
            "images_per_second": sum(record["images_per_second"] for record in runs)}


def spread(values, form):
    """The median of some values and their range, as text."""
    return f"{values.median():{form}} ({values.min():{form}}..{values.max():{form}})"


def table(section, records):
    """A section's title and commands; a line a case: images/s of A and of B, and the ratio of each pair."""
    title, *programs, remark = SECTIONS[section]
    flags = STAGE_3 if section == 9 else "--device cpu --epochs 100 FLAGS"
    lines = [f"{section}. {title}, {REPEATS} pairs in turn"]
    for side, (file, ranks, _) in zip("AB", programs):
        lines.append(f"{side}: {f'mpiexec -n {ranks} ' if ranks > 1 else ''}python {file} {flags}")
    if remark:
        lines.append(f"   {remark}")
    lines.append(f"{'case':26} {'A images/s':>24} {'B images/s':>24}   A / B")
    for name, rows in records[records["section"] == section].groupby("case", sort=False):
        pairs = rows.pivot(index="repeat", columns="side", values="images_per_second")
        lines.append(f"{name:26} {spread(pairs['A'], ',.0f'):>24} {spread(pairs['B'], ',.0f'):>24}   "
                     f"{spread(pairs['A'] / pairs['B'], '.3f')}")
    return "\n".join(lines)


def main(sections):
    without = [section for section in sections if section in (5, 6) and missing("02_horovod")]
    sections = [section for section in sections if section not in without]
    if without:
        print(f"sections 5 and 6 are left out: {missing('02_horovod')}", file=sys.stderr)
    if not sections:
        return
    results = ROOT / "results" / f"bench-{'-'.join(map(str, sections))}.jsonl"
    results.parent.mkdir(exist_ok=True)
    plan = [{"section": section, "case": case, "repeat": repeat, "side": side}
            for section in sections for case in cases(section) for repeat in range(REPEATS) for side in "AB"]
    records = pandas.DataFrame(study(results, plan, measure))
    here = machine()
    print(f"CPU figures of {here['host']}: {here['cpus']} cores, torch {here['torch']}, Python {here['python']}, "
          f"{here['git']}, {here['time']}; OMP_NUM_THREADS=1\nmedian (least..most)",
          *(table(section, records) for section in sections), sep="\n\n")


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--sections", nargs="+", type=int, choices=SECTIONS, default=[*SECTIONS], help="some of them")
    parser.add_argument("--bare", nargs=REMAINDER, help=SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        bare_loop(args.bare)
    else:
        main(args.sections)
