"""Checks for exercise 10: eight numbers of a plan, and three layouts."""

from cases import check_layout, draw, is_number
from runner import load_exercise, on_ranks

from workshop.gpus import read_gpus

RANKS, PARAMETERS, DDP_PARAMETERS = 4, 1.5e9, 100_000
PEAK = read_gpus()["h100"].peak
MEMORY_HINT = ("16 bytes per parameter: which of 2, 2, 4 and 8 does this stage divide by the "
               "number of GPUs? A GB is 10**9 bytes here")
NUMBERS = {  # name: (value, hint)
    "images/s on 2 nodes": (
        8 * 64 / (0.25 + 100e6 / (0.9 * 1.25e9)),
        "a step takes compute plus all-reduce. Each of n nodes sends 2 (n-1)/n of 100 MB. 10 Gbit/s"
        " are 1.25 GB/s, of which nine tenths are usable"),
    **{f"GB per GPU, ZeRO stage {stage}": (PARAMETERS * (kept + sharded / RANKS) / 1e9, MEMORY_HINT)
       for stage, kept, sharded in ((1, 4, 12), (2, 2, 14), (3, 0, 16))},
    "bytes sent per rank per DDP step": (
        2 * (RANKS - 1) / RANKS * 4 * DDP_PARAMETERS,
        "a ring sends (N-1)/N of the bytes, twice; an fp32 number has 4 bytes"),
    "FLOPs of a step": (
        6 * 7e9 * 4e6, "forward and backward together: 6 FLOPs per parameter and token"),
    "MFU in percent": (
        100 * 6 * 7e9 * 9000 / PEAK,
        "the FLOPs of a second's tokens on one GPU, divided by the h100's peak_tflops of gpus.csv"),
    "tokens per GPU and micro-batch": (  # seconds per parameter of a node's link, of a GPU
        8 / 400e9 / (6 / (0.4 * PEAK)),
        "a node's link sends two all-gathers in bf16 and a reduce-scatter in fp32 for all its "
        "GPUs. In this time each GPU can compute 6 FLOPs per parameter for how many tokens?")}


def checks(file):
    """Yield (description, passed, hint), after printing a table of all answers."""
    names = "PLAN", "SEED", "LAYOUTS"
    numbers, seed, layouts = on_ranks(
        file, lambda rank: [getattr(load_exercise(file), name) for name in names], 1,
        backend=None)[0]
    missing = [name for name in NUMBERS if not is_number(numbers.get(name))]
    yield "all eight numbers are typed in", not missing, (
        f"{len(missing)} of the 8 values are not numbers; answers are shown once all "
        "eight are numbers")

    print(f"  {'':36} {'you':>15} {'computed':>15}")
    for name, (value, _) in NUMBERS.items():
        print(f"  {name:36} {numbers[name]:15,.6g} {value:15,.6g}")
    for name, (value, hint) in NUMBERS.items():
        ratio = numbers[name] / value
        yield f"{name}, within 2 %", abs(ratio - 1) <= 0.02, (
            f"your value is {ratio:.3g} times the computed one: {hint}")

    yield "SEED is a whole number", isinstance(seed, int), (
        "replace None by any whole number, such as your birthday: it draws your three cases")
    cases = draw(seed)
    for number, case in enumerate(cases, 1):
        print(f"  case {number}, {case.sequences} sequences: {case}")
    yield "LAYOUTS has three rows of seven values", [len(row) for row in layouts] == 3 * [7], (
        "one row for each case")
    for number, (case, layout) in enumerate(zip(cases, layouts), 1):
        yield from check_layout(number, case, layout)
