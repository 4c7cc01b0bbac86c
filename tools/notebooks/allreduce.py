"""What 02_horovod/allreduce.ipynb runs, draws and says. Its ranks are started in the top folder:

    mpiexec -n 2 python -m tools.notebooks.allreduce average     # two gradients, averaged by a ring
    mpiexec -n 4 python -m tools.notebooks.allreduce trace       # what each rank of a ring holds and sends

S is the size of a tensor in bytes, N the number of ranks. Units of the model: alpha in seconds a step, beta in seconds
a byte.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from tools.pages.style import ABSENT, COMMUNICATION, IDEAL, MEASURED, RANKS, TITLE, WAYS, WIDTH, Picture, picture

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = ROOT / "02_horovod"
SIMPLE = "everyone_to_everyone", "reduce_and_broadcast"
OURS = *SIMPLE, "ring"
NAMES = {"everyone_to_everyone": "everyone to everyone", "reduce_and_broadcast": "reduce and broadcast",
         "ring": "ring", "gloo": "gloo", "mpi": "MPI"}
KB, MB = 2**10, 2**20
SIZES = [4 * KB * 4**k for k in range(7)]  # bytes: 4 kB to 16 MB, for a run here and now
DDP_BUCKET, HOROVOD_BUFFER = 25 * MB, 128 * MB  # bytes; Horovod's since 0.21


# What the ranks run

def average(images_of_rank_0: int = 32) -> None:
    """On two ranks: the gradient of this rank's images, the average over the ranks, and the gradient of all 64."""
    import torch
    from ring_allreduce import Wire, meet, part, ring
    from sklearn.datasets import load_digits

    rank, ranks = meet()
    images, labels = (torch.tensor(array[:64]) for array in load_digits(return_X_y=True))
    torch.manual_seed(0)  # the same parameters on every rank
    model = torch.nn.Linear(64, 10)

    def gradient(share):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[share].float() / 16), labels[share]).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    share = slice(images_of_rank_0) if rank == 0 else slice(images_of_rank_0, None)
    own = gradient(share)
    mean = own.clone()
    ring(mean, Wire())  # the sum over the ranks, on every rank
    mean /= ranks
    of_all = gradient(slice(None))  # what one rank alone would compute
    same = torch.allclose(mean, of_all, rtol=0, atol=1e-6)
    # the end of the line in the same string: what ranks print at one time may mix
    print(f"own {len(labels[share])}: {own[-1]:+.4f}   average: {mean[-1]:+.4f}   all {len(labels)}: "
          f"{of_all[-1]:+.4f}   all {len(own)} equal to 1e-6: {same}\n", end="")
    part()


def trace() -> None:
    """A ring with one number a chunk; rank r begins with 2^r in all, so that each sum tells who is in it."""
    import torch
    from ring_allreduce import Wire, meet, part, ring

    holds, sends = [], []

    class Traced(Wire):
        def step(self, messages, receives):
            (chunk, to), = messages
            holds.append(tensor.int().tolist())
            sends.append([chunk.storage_offset(), to])
            super().step(messages, receives)

    rank, ranks = meet()
    tensor = torch.full((ranks,), 2.0**rank)
    ring(tensor, Traced())
    holds.append(tensor.int().tolist())
    print(json.dumps({"rank": rank, "holds": holds, "sends": sends}) + "\n", end="")
    part()


# What the notebook reads and measures

def traced(printed: Iterable[str]) -> list[dict]:
    """What trace() printed on all ranks, by rank: holds[step][chunk], before each step and at the end, and
    sends[step], which is a chunk and the rank that it goes to."""
    found = [json.loads(line) for line in printed if line.startswith("{")]
    if not found:
        raise RuntimeError("\n".join(printed))
    return sorted(found, key=lambda one: one["rank"])


def recorded() -> list[dict]:
    """The records of assets/records/allreduce.jsonl."""
    with open(ROOT / "assets" / "records" / "allreduce.jsonl") as file:
        return [json.loads(line) for line in file]


def measured_here(ranks: int, sizes: Iterable[int] = SIZES, repeats: int = 5) -> list[dict]:
    """The records of a run of ring_allreduce.py here and now, with tensors of these sizes in bytes."""
    with TemporaryDirectory() as folder:
        results = Path(folder, "results")
        words = ["-n", ranks, "python", "ring_allreduce.py", "--sizes", *sizes, "--repeats", repeats]
        words = [str(word) for word in words]
        print("run:", "mpiexec", *words)
        done = subprocess.run(["mpiexec", *words, "--results", results], cwd=CHAPTER, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=110)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return [json.loads(line) for line in results.read_text().splitlines()]


def selected(records: list[dict], **wanted: object) -> list[dict]:
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def times(records: list[dict], ranks: int, name: str) -> dict:
    """By size in bytes: the median of the runs' medians, and the least and most of all repeats, in seconds."""
    rows = selected(records, ranks=ranks, algorithm=name)
    found = {}
    for size in sorted({row["bytes"] for row in rows}):
        runs = selected(rows, bytes=size)
        found[size] = (statistics.median(run["seconds"] for run in runs), min(run["least"] for run in runs),
                       max(run["most"] for run in runs))
    return found


def bus_bandwidth(records: list[dict], ranks: int, name: str) -> dict:
    """By size in bytes: 2(N-1)/N S / time in GB/s. In a ring it is what each rank sends a second."""
    return {size: 2 * (ranks - 1) / ranks * size / seconds / 1e9
            for size, (seconds, _, _) in times(records, ranks, name).items()}


# The model

def bytes_sent(name: str, ranks: int) -> float:
    """By the rank that sends most, in units of S."""
    return 2 * (ranks - 1) / ranks if name == "ring" else ranks - 1


def path(name: str, ranks: int) -> tuple[int, float]:
    """Steps, and the bytes that go one after the other, in units of S."""
    return {"everyone_to_everyone": (1, ranks - 1), "reduce_and_broadcast": (2, 2 * (ranks - 1)),
            "ring": (2 * (ranks - 1), 2 * (ranks - 1) / ranks)}[name]


def modelled(name: str, ranks: int, size: "float | np.ndarray", alpha: float, beta: float):
    """Seconds, for S = size bytes, which may be an array."""
    steps, sizes = path(name, ranks)
    return steps * alpha + sizes * size * beta


def fitted(rows: list[tuple]) -> tuple:
    """Alpha, beta and the model's relative errors, whose squares are least. A row: name, ranks, bytes, seconds."""
    terms = []
    for name, ranks, size, seconds in rows:
        steps, sizes = path(name, ranks)
        terms.append((steps / seconds, sizes * size / seconds))
    (alpha, beta), *_ = np.linalg.lstsq(np.array(terms), np.ones(len(terms)), rcond=None)
    return alpha, beta, np.array(terms) @ (alpha, beta) - 1


def fit_of(records: list[dict], ranks: int, *names: str) -> tuple:
    """fitted() to the medians of these ways together."""
    return fitted([(name, ranks, size, seconds) for name in names
                   for size, (seconds, _, _) in times(records, ranks, name).items()])


def messages(name: str, ranks: int) -> int:
    """The messages that go one after the other where a rank sends or receives one at a time."""
    return ranks - 1 if name == "everyone_to_everyone" else 2 * (ranks - 1)


def crossing(other: str, ranks: int, alpha: float, beta: float, each_pays: bool = False) -> float:
    """The size in bytes above which the model's ring is faster than the other way: 0 is always, infinity is never.
    Each step pays one alpha, or each message does."""
    (steps, sizes), (ring_steps, ring_sizes) = path(other, ranks), path("ring", ranks)
    if each_pays:
        steps, ring_steps = messages(other, ranks), messages("ring", ranks)
    if sizes <= ring_sizes:
        return math.inf
    return max(0, (ring_steps - steps) * alpha / ((sizes - ring_sizes) * beta))


# Words

def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def listed(texts: list[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def sized(size: float) -> str:
    """4096: 4 kB, as the sizes of the records are named."""
    for unit, name in ((2**30, "GB"), (MB, "MB"), (KB, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.3g} B"


def ring_sentence(ranks: list[dict]) -> str:
    """What the trace of a ring shows."""
    count, steps = len(ranks), len(ranks[0]["sends"])
    half = steps // 2
    to_next = all(to == (one["rank"] + 1) % count for one in ranks for _, to in one["sends"])
    whole = []
    for step in (half, steps):
        sums = [one["holds"][step].count(2**count - 1) for one in ranks]
        more = "" if min(sums) == max(sums) else " or more"
        whole.append(counted(min(sums), "whole sum") + more)
    receiver = "the next rank" if to_next else "another rank"
    asked = count - 2  # rank 2 of 4
    chunks = [str(chunk) for chunk, held in enumerate(ranks[asked]["holds"][half]) if held == 2**count - 1]
    return (f"In each of the {steps} steps a rank sends one chunk to {receiver}: {steps}/{count} S = "
            f"{steps / count:g} S in all. After step {half} each rank holds {whole[0]} (rank {asked}: "
            f"chunk {' and '.join(chunks) or 'none'}); after step {steps}, {whole[1]}.")


def growths(records: list[dict], sizes: list[int]) -> list[float]:
    """In each run: the ring's bus bandwidth on two ranks at the last of these sizes over that at the first, to one
    digit."""
    first, last = ([row["seconds"] for row in selected(records, ranks=2, algorithm="ring", bytes=size)]
                   for size in (sizes[0], sizes[-1]))
    return [float(f"{sizes[-1] / sizes[0] * small / large:.0e}") for small, large in zip(first, last)]


def bandwidth_sentence(records: list[dict], here: list[dict]) -> str:
    """How the ring's bus bandwidth on two ranks changes with the size, in a run here and in the records."""
    rates = bus_bandwidth(here, 2, "ring")
    sizes = sorted(set(rates) & set(bus_bandwidth(records, 2, "ring")))
    found = growths(here, sizes), growths(records, sizes)
    texts = [f"{min(factors):g}" + (f" to {max(factors):g}" if max(factors) > min(factors) else "")
             for factors in found]
    every = found[0] + found[1]
    tenfold = "yes" if min(every) >= 10 else "no" if max(every) < 10 else "not in every run"
    says = [f"From {sized(sizes[0])} to {sized(sizes[-1])} the ring's bus bandwidth becomes about {texts[0]} times as "
            f"large here and now, {texts[1]} times in the records: at least tenfold, {tenfold}."]
    if min(every) >= 2:
        says.append("If only bytes took time it would not change: a small tensor waits for its steps.")
    best = max(rates, key=rates.get)
    if best != max(rates):
        says.append(f"Here the best is at {sized(best)}; beyond it other limits count, such as caches and shared "
                    "cores.")
    return " ".join(says)


def winners(records: list[dict], ranks: int) -> dict:
    """By size: which of our three is fastest by the median of the runs, and whether it is so in every run."""
    found = {}
    for size in sorted({record["bytes"] for record in records}):
        runs = {name: [row["seconds"] for row in selected(records, ranks=ranks, bytes=size, algorithm=name)]
                for name in OURS}
        first = min(runs, key=lambda name: statistics.median(runs[name]))
        in_each = [min(OURS, key=dict(zip(OURS, times)).get) for times in zip(*runs.values())]
        found[size] = first, set(in_each) == {first}
    return found


def fastest_sentence(records: list[dict], ranks: int) -> str:
    """Which of our three is the fastest in every run, and at which sizes none is."""
    found = winners(records, ranks)
    places = {name: [sized(size) for size, (first, always) in found.items() if always and first == name]
              for name in OURS}
    sure = [f"{NAMES[name]} at {listed(sizes)}" for name, sizes in places.items() if sizes]
    open_sizes = [sized(size) for size, (_, always) in found.items() if not always]
    says = [f"the fastest in every run is {', '.join(sure)}"] if sure else []
    if open_sizes:
        says.append(f"at {listed(open_sizes) if sure else 'all sizes'} no way is the fastest in every run")
    return f"{ranks} ranks on {counted(records[0]['cpus'], 'core')}: {'; '.join(says)}."


def fit_sentence(records: list[dict], ranks: int) -> str:
    """How far the fits to our three ways are off."""
    errors = [(abs(error), name, size) for name in OURS
              for size, error in zip(times(records, ranks, name), fit_of(records, ranks, name)[2])]
    middle = statistics.median(error for error, _, _ in errors)
    most, name, size = max(errors)
    together = np.median(abs(fit_of(records, ranks, *OURS)[2]))
    return (f"On {ranks} ranks the lines miss the points by {middle:.0%} in the median, and by {most:.0%} at most "
            f"({NAMES[name]} at {sized(size)}); with one alpha and beta for the three, by {together:.0%} in the "
            "median.")


def message_sentence(ranks: int, latency: float, bandwidth: float) -> str:
    """Where the model's ring is the fastest if each message pays an alpha; latency in µs, bandwidth in GB/s."""
    alpha, beta = latency / 1e6, 1e-9 / bandwidth
    everyone, reduce = (crossing(name, ranks, alpha, beta, each_pays=True) for name in SIMPLE)
    faster = max(everyone, reduce)
    where = "never the fastest" if math.isinf(faster) else f"the fastest above {sized(faster)}"
    never = ", and never slower than reduce and broadcast" if reduce == 0 else ""
    counts = [f"{messages(name, ranks)} in {NAMES[name]}" for name in OURS]
    return (f"If each message pays an alpha ({', '.join(counts)}), the ring on {ranks} ranks is {where}{never}. "
            f"Real all-reduces of small tensors take about log2 N steps, here {math.log2(ranks):.0f}.")


def fusion_sentence() -> str:
    return ("Large tensors want the ring, small ones few steps. So DDP packs gradients into buckets, of about "
            f"{sized(DDP_BUCKET)}, and Horovod into a buffer, of up to {sized(HOROVOD_BUFFER)} since 0.21, before they "
            "all-reduce. All this is the model: these links are chosen, not measured.")


# Tables and words for reading

def fit_table(records: list[dict], ranks: int) -> str:
    """Alpha, 1/beta and errors of the fits to each way, and to the three together."""
    lines = [f"{f'{ranks} ranks':22}{'alpha, µs':>10}{'1/beta, GB/s':>14}{'error: median':>15}{'largest':>9}"]
    for title, names in {**{NAMES[name]: [name] for name in OURS}, "the three together": OURS}.items():
        alpha, beta, errors = fit_of(records, ranks, *names)
        lines.append(f"{title:22}{1e6 * alpha:10.0f}{1e-9 / beta:14.1f}{np.median(abs(errors)):15.0%}"
                     f"{max(abs(errors)):9.0%}")
    return "\n".join(lines)


def fit_crossing(records: list[dict], other: str, ranks: int) -> float:
    """The size in bytes above which the fitted line of the ring lies below that of the other way."""
    (alpha, beta, _), (ring_alpha, ring_beta, _) = (fit_of(records, ranks, name) for name in (other, "ring"))
    (steps, sizes), (ring_steps, ring_sizes) = path(other, ranks), path("ring", ranks)
    later, gained = ring_steps * ring_alpha - steps * alpha, sizes * beta - ring_sizes * ring_beta
    if gained <= 0:
        return math.inf if later >= 0 else math.nan  # nan: below a size, not above
    return max(0, later / gained)


def ring_wins_from(records: list[dict], other: str, ranks: int) -> float:
    """The least size in bytes from which on the ring was faster than the other way in every run."""
    sizes = sorted({record["bytes"] for record in records})
    least = math.inf
    for size in reversed(sizes):
        pairs = zip(*([row["seconds"] for row in selected(records, ranks=ranks, bytes=size, algorithm=name)]
                      for name in ("ring", other)))
        if not all(ring < slower for ring, slower in pairs):
            break
        least = size
    return least


def crossing_table(records: list[dict]) -> str:
    lines = [f"{'the ring is faster than':34}{'in every run from':>18}{'by the fits from':>18}"]
    for ranks in sorted({record["ranks"] for record in records}):
        for other in SIMPLE:
            places = [ring_wins_from(records, other, ranks), fit_crossing(records, other, ranks)]
            texts = ["nowhere" if not math.isfinite(place) else sized(place) for place in places]
            lines.append(f"{f'{NAMES[other]}, {ranks} ranks':34}{texts[0]:>18}{texts[1]:>18}")
    return "\n".join(lines)


def rates(records: list[dict]) -> dict:
    """By ranks and way, at the largest size, in GB/s: the bytes one after the other, and all bytes of all ranks."""
    largest = max(record["bytes"] for record in records)
    found = {}
    for ranks in sorted({record["ranks"] for record in records}):
        for name in OURS:
            seconds = times(records, ranks, name)[largest][0]
            sent = sum(selected(records, ranks=ranks, algorithm=name, bytes=largest)[0]["bytes_sent"])
            found[ranks, name] = path(name, ranks)[1] * largest / seconds / 1e9, sent / seconds / 1e9
    return found


def rate_table(found: dict) -> str:
    lines = [f"{'GB/s':32}{'one after the other':>21}{'all together':>15}"]
    lines += [f"{f'{ranks} ranks, {NAMES[name]}':32}{link:21.1f}{total:15.1f}"
              for (ranks, name), (link, total) in found.items()]
    return "\n".join(lines)


def rate_sentence(found: dict) -> str:
    """Which of the two rates varies less over ranks and ways."""
    link, total = (max(column) / min(column) for column in zip(*found.values()))
    says = ("So within one machine all bytes together say more than those of one link." if total < link else
            "So all bytes together say no more than those of one link.")
    return f"The first rate varies by a factor of {link:.1f}, the second by {total:.1f}. {says}"


def one_or_many(ranks: int, size: float, tensors: int, latency: float, bandwidth: float) -> str:
    """The model's times of one ring of all bytes, and of a ring for each tensor; latency in µs, bandwidth in GB/s."""
    alpha, beta = latency / 1e6, 1e-9 / bandwidth
    one = modelled("ring", ranks, size, alpha, beta)
    many = tensors * modelled("ring", ranks, size / tensors, alpha, beta)
    steps, _ = path("ring", ranks)
    return (f"In one tensor {1000 * one:.0f} ms, tensor by tensor {1000 * many:.0f} ms. The bytes are the same; each "
            f"ring pays {steps} steps, {1000 * steps * alpha:.1f} ms.")


# Figures

def canvas(height: float) -> tuple:
    """A picture whose one axis is a sheet of paper in inches."""
    figure, axis = picture(height)
    figure.get_layout_engine().set(w_pad=0, h_pad=0)
    axis.set_axis_off()
    axis.set(xlim=(0, WIDTH), ylim=(0, height), aspect="equal")
    return figure, axis


def arrow(axis, start, end, **style):
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=22, lw=2.5, color=COMMUNICATION,
                                   shrinkA=0, shrinkB=0, **style))


def circle(ranks: int = 4) -> Picture:
    """The ranks on a circle, each with an arrow to the next, and the two rounds of the ring."""
    figure, axis = canvas(3.6)
    middle, radius, size = np.array((1.95, 1.8)), 1.3, 0.42
    angles = math.pi / 2 - 2 * math.pi * np.arange(ranks + 1) / ranks  # clockwise from the top
    half = math.degrees(size / radius) + 3
    for rank, (angle, after) in enumerate(zip(np.degrees(angles), np.degrees(angles[1:]))):
        place = middle + radius * np.array((math.cos(angles[rank]), math.sin(angles[rank])))
        axis.add_patch(Circle(place, size, color=RANKS[rank % len(RANKS)], lw=0))
        axis.text(*place, f"rank {rank}", ha="center", va="center")
        ends = [middle + radius * np.array((math.cos(turn), math.sin(turn)))
                for turn in np.radians([angle - half, after + half])]
        bend = math.tan(math.radians(angle - after - 2 * half) / 4)
        arrow(axis, *ends, connectionstyle=f"arc3,rad={-bend}")
    axis.text(*middle, f"S / {ranks}\na step", ha="center", va="center")
    notes = [(3.2, f"The S bytes are cut into {ranks} chunks. In each step", "normal"),
             (2.87, "a rank sends one of them to the next rank.", "normal"),
             (2.2, f"First round, {ranks - 1} steps: reduce-scatter", "bold"),
             (1.87, "The next rank adds the chunk to its own.", "normal"),
             (1.54, "At the end each rank has the sum of one chunk.", "normal"),
             (0.87, f"Second round, {ranks - 1} steps: all-gather", "bold"),
             (0.54, "Each sum goes once around.", "normal")]
    for height, text, weight in notes:
        axis.text(4.0, height, text, weight=weight, va="center")
    return figure


def ring_frame(ranks: list[dict], step: int) -> Picture:
    """What each rank holds before this step, from 0, and sends in it; after the last one, what all hold."""
    count, steps = len(ranks), len(ranks[0]["sends"])
    figure, axis = canvas(4.0)
    width, height, left, between = 1.3, 0.56, 1.45, 0.5
    if step == steps:
        title = f"after step {steps}: all ranks hold all sums"
    elif step < steps / 2:
        title = f"step {step + 1} of {steps}, reduce-scatter: the next rank adds it"
    else:
        title = f"step {step + 1} of {steps}, all-gather: the next rank keeps it"
    axis.text(0.05, 3.78, title, size=TITLE, va="center", weight="bold")
    for rank, one in enumerate(ranks):
        x = left + rank * (width + between)
        axis.text(x + width / 2, 3.28, f"rank {rank}", ha="center", va="center")
        for chunk, held in enumerate(one["holds"][step]):
            y = 2.45 - chunk * (height + 0.08)
            if rank == 0:
                axis.text(0.05, y + height / 2, f"chunk {chunk}", va="center")
            for other in range(count):
                inside = bool(held >> other & 1)
                corner = x + other * width / count
                axis.add_patch(Rectangle((corner, y), width / count, height, ec="white", lw=1,
                                         fc=RANKS[other % len(RANKS)] if inside else ABSENT))
                if inside:
                    axis.text(corner + width / count / 2, y + height / 2, other, ha="center", va="center")
        if step < steps:
            chunk, to = one["sends"][step]
            y = 2.45 - chunk * (height + 0.08)
            axis.add_patch(Rectangle((x, y), width, height, fill=False, ec=MEASURED, lw=4))
            arrow(axis, (x + width + 0.04, y + height / 2), (x + width + between - 0.02, y + height / 2))
            if to == 0:  # from the last rank back to the first
                arrow(axis, (left - between + 0.06, y + height / 2), (left - 0.02, y + height / 2))
    frame = f"Frame: a rank sends this chunk, S/{count}.   " if step < steps else ""
    axis.text(0.05, 0.2, f"{frame}Sent so far, by each rank: {step / count:g} S", va="center")
    return figure


def ring_frames(ranks: list[dict]) -> list[Picture]:
    return [ring_frame(ranks, step) for step in range(len(ranks[0]["sends"]) + 1)]


def against_size(axis, named: list[int], label: str = "") -> None:
    """Two logarithmic axes: across the size, with these sizes named, and upwards what the label says."""
    axis.set(xscale="log", yscale="log", xlabel="S, the size of the tensor", ylabel=label)
    axis.set_xticks(named, [sized(size) for size in named])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")  # an exponent would be too small to read


def bandwidth_figure(records: list[dict], here: list[dict]) -> Picture:
    """Bus bandwidth of two ranks against size: in the records, and in a run of now."""
    figure, axes = picture(4.0, columns=2, sharey=True)
    sizes = sorted({record["bytes"] for record in records})
    for axis, rows, title in zip(axes, (records, here), ("in the records", "here and now")):
        for name in ("mpi", "gloo", "ring"):
            found = bus_bandwidth(rows, 2, name)
            axis.plot(list(found), list(found.values()), "o-", color=WAYS[name], label=NAMES[name])
        against_size(axis, sizes[::3])
        axis.set_xlim(sizes[0] / 1.5, 1.5 * sizes[-1])
        axis.set_title(f"{title}: 2 ranks, {counted(rows[0]['cpus'], 'core')}")
    axes[0].set_ylabel("bus bandwidth, GB/s")
    axes[0].legend()
    return figure


def bytes_figure(records: list[dict], most: int = 12) -> Picture:
    """What the rank that sends most sends, in units of S, against N: formulas as lines, counts as points."""
    figure, axis = picture(3.8)
    ranks = np.arange(2, most + 1)
    lines = (("everyone_to_everyone", "-"), ("reduce_and_broadcast", "--"), ("ring", "-"))
    for name, style in lines:
        axis.plot(ranks, [bytes_sent(name, N) for N in ranks], style, color=WAYS[name], lw=4, label=NAMES[name])
    axis.axhline(2, color=IDEAL, ls=":", label="2 S")
    counts = {(record["ranks"], max(record["bytes_sent"]) / record["bytes"])
               for record in records if record["algorithm"] in OURS}
    axis.plot(*zip(*counts), "o", color=MEASURED, ls="", label="counted, on real ranks")
    axis.set(xlabel="N, the number of ranks", ylabel="the busiest rank sends, in S", ylim=0, xticks=ranks)
    axis.legend(loc="upper left")
    return figure


def time_figure(ranks: int) -> Picture:
    """Milliseconds against size, of the records, with the spread of all repeats; lines are the fits to each way."""
    records = recorded()
    cores = counted(records[0]["cpus"], "core")
    figure, axis = picture(4.3, title=f"{ranks} ranks on {cores}. Points: the records; lines: fitted")
    sizes = sorted({record["bytes"] for record in records})
    for place, name in enumerate(OURS):
        found = times(records, ranks, name)
        alpha, beta, _ = fit_of(records, ranks, name)
        beside = [size * 1.12 ** (place - 1) for size in found]  # so that no line hides another
        middle, least, most = 1000 * np.array(list(found.values())).T
        axis.vlines(beside, least, most, color=WAYS[name], alpha=0.35, lw=3)
        axis.plot(beside, middle, "o", color=WAYS[name])
        between = np.geomspace(sizes[0], sizes[-1])
        axis.plot(between, 1000 * modelled(name, ranks, between, alpha, beta), color=WAYS[name],
                  label=f"{NAMES[name]}\n{1e6 * alpha:.0f} µs a step, {1e-9 / beta:.1f} GB/s")
    against_size(axis, sizes[::2], "milliseconds")
    figure.legend(loc="outside right upper", labelspacing=1)
    return figure


def error_figure(records: list[dict], ranks: int) -> Picture:
    """By how much each fit is off, against size; with the fit to the three ways together, dashed."""
    figure, axis = picture(3.8, title=f"{ranks} ranks: (model - measured) / measured")
    together = fit_of(records, ranks, *OURS)[2].reshape(len(OURS), -1)
    for name, joint in zip(OURS, together):
        sizes = list(times(records, ranks, name))
        axis.plot(sizes, fit_of(records, ranks, name)[2], "o-", color=WAYS[name], label=NAMES[name])
        axis.plot(sizes, joint, "--", color=WAYS[name])
    axis.axhline(0, color=IDEAL, lw=1)
    axis.set(xscale="log", xlabel="S, the size of the tensor")
    axis.set_xticks(sizes[::2], [sized(size) for size in sizes[::2]])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.legend(loc="outside right upper", title="fit of each; dashed:\nof the three together", alignment="left")
    return figure


def network_figure(ranks: int, latency: float, bandwidth: float) -> Picture:
    """The model's time against size where each rank has its own link: latency in µs a step, bandwidth in GB/s."""
    figure, axis = picture(3.9)
    alpha, beta = latency / 1e6, 1e-9 / bandwidth
    sizes = np.geomspace(KB, 2**30, 200)
    for name in OURS:
        axis.plot(sizes, 1000 * modelled(name, ranks, sizes, alpha, beta), color=WAYS[name], label=NAMES[name])
    against_size(axis, [KB, 32 * KB, MB, 32 * MB, 2**30], "milliseconds")
    for size, name, side, away in ((DDP_BUCKET, "DDP's\nbucket", "right", -6),
                                   (HOROVOD_BUFFER, "Horovod's\nbuffer", "left", 6)):
        axis.axvline(size, color=IDEAL, ls=":")
        axis.annotate(f"{name}\n{sized(size)}", (size, 0.03), xytext=(away, 0), textcoords="offset points", ha=side,
                      xycoords=axis.get_xaxis_transform())
    faster = max(crossing(name, ranks, alpha, beta) for name in SIMPLE)
    where = "is never the fastest" if math.isinf(faster) else f"is the fastest above {sized(faster)}"
    axis.set_title(f"{ranks} ranks, {latency:g} µs a step, {bandwidth:g} GB/s: the ring {where}")
    axis.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    sys.path.append(str(CHAPTER))
    {"average": average, "trace": trace}[sys.argv[1]](*map(int, sys.argv[2:]))
