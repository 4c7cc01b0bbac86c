"""A scaling table from a run of DDP on one GPU or one node, calibrated by the run itself.

run.jsonl is written by a chapter's --results, or, for your own script, as cluster/README.md says;
if it has records of smaller batches, too, they tell how fast these are. doctor.jsonl is written by
`cluster.doctor --results` on two or more nodes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas

from cluster.plan.step import (
    CENTRAL,
    OPTIMIST,
    PESSIMIST,
    Cluster,
    make_cluster,
    slowest_delay,
    step_seconds,
)

NEEDED = ("nodes", "ranks", "global_batch_size", "step_seconds", "gradient_bytes")  # above 0
CONFIGURATION = ("chapter", "model", "layers", "width", "context", "dataset", "image_size",
                 "precision", "device", "ranks")


def is_complete(record):
    """Return True if a record has all numbers that a prediction needs."""
    values = [record.get(name) for name in NEEDED]
    return all(isinstance(value, (int, float)) and value > 0 for value in values)


def step_times(records):
    """Return {batch per rank: step seconds} of the last record's configuration.

    The last record's batch is the last key. Times of several ranks on a node are corrected for
    jitter, but include communication.
    """
    times = {}
    for record in records:
        if all(record.get(name) == records[-1].get(name) for name in CONFIGURATION):
            jitter = CENTRAL.jitter * slowest_delay(record["ranks"])
            batch = record["global_batch_size"] // record["ranks"]
            times.pop(batch, None)
            times[batch] = record["step_seconds"] / (1 + jitter)
    return times


def compute_seconds(times, batch):
    """Return the step seconds of a batch on one GPU, interpolated between measured batches.

    Below the smallest measured batch the time is proportional to the batch, which is optimistic.
    """
    batches, seconds = zip(*sorted(times.items()))
    return np.interp(batch, batches, seconds) * min(1, batch / batches[0])


def measured_link(records: list[dict]) -> tuple[float, float]:
    """Return bytes/s of a node and seconds of a level, from records of cluster/doctor.py --results.

    Solves all_reduce_seconds, with its tree, for both. Raises ValueError if no records are from
    two or more nodes, or if more bytes took no longer.
    """
    records = [record for record in records if "all_reduce" in record and record["nodes"] > 1]
    nodes = records[-1]["nodes"] if records else 0
    records = [record for record in records if record["nodes"] == nodes]
    library = "NCCL" if any(record["all_reduce"] == "NCCL" for record in records) else "gloo"
    times = {record["bytes"]: record["seconds"] for record in records
             if record["all_reduce"] == library}
    if len(times) < 3:
        raise ValueError("no all-reduces on two or more nodes: run doctor.py --results FILE there")
    smaller, largest = sorted(times)[-2:]
    seconds_per_byte = (times[largest] - times[smaller]) / (largest - smaller)
    if seconds_per_byte <= 0:
        raise ValueError("the largest all-reduce was no slower than a smaller one: measure again")
    return 2 * (nodes - 1) / nodes / seconds_per_byte, times[min(times)] / (1 + math.log2(nodes))


def scale(images: float, compute: Callable[[int], float], batch: int, largest_batch: float,
          gradient_bytes: float, clusters: list[Cluster], **options: object) -> list[dict]:
    """Return throughput and time to train on each cluster, as dicts.

    images: of all epochs together. compute(b): seconds for one GPU to compute a batch of b. Each
    GPU gets `batch` images per step, or fewer if the global batch would exceed `largest_batch`. The
    rows end before a GPU gets none.
    """
    rows = []
    for cluster in clusters:
        rank_batch = int(min(batch, largest_batch / cluster.ranks))
        if rank_batch == 0:
            break
        seconds = step_seconds(compute(rank_batch), gradient_bytes, cluster, **options)
        images_per_second = rank_batch * cluster.ranks / seconds
        rows.append({"gpus": cluster.ranks, "nodes": cluster.nodes, "batch": rank_batch,
                     "images_per_second": images_per_second,
                     "hours": images / images_per_second / 3600})
    return rows


def worth_asking_for(rows: list[dict], gain: float = 1.5) -> int:
    """Return the number of GPUs up to which every doubling divides the hours by at least `gain`.

    rows: of scale(), in which each row has twice the GPUs of the row before. gain=1.5: a doubling
    saves at least a third of the hours, and costs at most a third more GPU hours.
    """
    best = rows[0]
    for smaller, larger in zip(rows, rows[1:]):
        if smaller["hours"] / larger["hours"] < gain:
            break
        best = larger
    return best["gpus"]


def predict_published(row, constants=CENTRAL, **changes):
    """Return images/s of a row of assets/records/published.csv; changes go to step_seconds.

    One GPU's compute time comes from the row's base run, on one GPU or the GPUs of one node.
    """
    one_gpu = row["base_images_per_second"] / row["base_gpus"]
    compute = row["batch"] / one_gpu / (1 + constants.jitter * slowest_delay(row["base_gpus"]))
    names = "nodes", "gpus", "node_link", "gpu_link", "algorithm", "measured"
    cluster = Cluster(**{name: row[name] for name in names})
    step = step_seconds(compute, row["gradient_bytes"], cluster, row["buckets"],
                        constants=constants, **changes)
    return cluster.ranks * row["batch"] / step


def predict_run(record, times, args, gpu_counts, constants=CENTRAL):
    """Return scale()'s rows for each number of GPUs, as a DataFrame."""
    chapter = record.get("chapter", "")
    if args.level_seconds:  # measured latency per level of a tree, scaled as in `constants`
        factor = constants.level / CENTRAL.level
        constants = replace(constants, level=args.level_seconds * factor)
    clusters = [make_cluster(gpus, args.gpus_per_node, args.node_link, args.gpu_link,
                             measured=bool(args.links)) for gpus in gpu_counts]
    return pandas.DataFrame(scale(
        args.epochs * args.samples, partial(compute_seconds, times), list(times)[-1],
        args.largest_batch, record["gradient_bytes"], clusters, constants=constants,
        library="Horovod 0.21" if "horovod" in chapter else "DDP",
        overlap="deepspeed" not in chapter))


def scaling_table(record, times, args):
    """Return the scaling table of a proposal, a row for each number of GPUs."""
    rows = predict_run(record, times, args, args.gpus)
    pessimist = predict_run(record, times, args, args.gpus, PESSIMIST)
    optimist = predict_run(record, times, args, args.gpus, OPTIMIST)
    alone = predict_run(record | {"gradient_bytes": 1}, times, args, args.gpus,
                        replace(CENTRAL, level=0))
    batch, seconds = list(times.items())[-1]
    one_gpu = batch / seconds  # samples/s
    return pandas.DataFrame({
        "nodes": rows.nodes, "GPUs": rows.gpus, "global batch": rows.batch * rows.gpus,
        "samples/s": rows.images_per_second, "speed-up": rows.images_per_second / one_gpu,
        "efficiency": rows.images_per_second / one_gpu / rows.gpus,
        "pessimist": pessimist.images_per_second / one_gpu / rows.gpus,
        "optimist": optimist.images_per_second / one_gpu / rows.gpus,
        "computing": alone.images_per_second / one_gpu / rows.gpus,
        "hours": rows.hours, "node hours": rows.hours * rows.nodes})
