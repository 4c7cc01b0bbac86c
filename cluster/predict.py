"""Predict how a training scales over a cluster's nodes, from a run on one GPU.

    python -m cluster.predict run.jsonl --site polaris --nodes 1 2 4 8 16 32
    python -m cluster.predict run.jsonl --measured doctor.jsonl --epochs 90 --samples 1281167

run.jsonl is written by a chapter's --results, or, for your own script, as cluster/README.md says;
if it has records of smaller batches, too, they tell how fast these are. doctor.jsonl is written by
`cluster.doctor --results` on two or more nodes. 03_ddp/cost_model.py models a step.
"""

import math
import os
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas

from cluster.launch import ROOT
from cluster.records import RECORDS, read_records
from workshop.flags import Parser

model = import_module("03_ddp.cost_model")  # of the notebook; `import` allows no leading digit
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
            jitter = model.CENTRAL.jitter * model.slowest_delay(record["ranks"])
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


def predict(record, times, args, nodes, constants=model.CENTRAL):
    """Return cost_model.plan's rows for each number of `nodes`, as a DataFrame."""
    batch = list(times)[-1]
    chapter = record.get("chapter", "")
    if args.level_seconds:  # measured latency per level of a tree, scaled as in `constants`
        factor = constants.level / model.CENTRAL.level
        constants = replace(constants, level=args.level_seconds * factor)
    measured = bool(args.measured)
    cluster = model.Cluster(1, args.gpus, args.node_link, args.gpu_link, measured=measured)
    return pandas.DataFrame(model.plan(
        args.epochs * args.samples, partial(compute_seconds, times), batch,
        args.largest_batch, record["gradient_bytes"], cluster, nodes, constants=constants,
        library="Horovod 0.21" if "horovod" in chapter else "DDP",
        overlap="deepspeed" not in chapter))


def scaling_table(record, times, args):
    """Return the scaling table of a proposal, a row for each number of nodes."""
    rows = predict(record, times, args, args.nodes)
    pessimist = predict(record, times, args, args.nodes, model.PESSIMIST)
    optimist = predict(record, times, args, args.nodes, model.OPTIMIST)
    alone = predict(record | {"gradient_bytes": 1}, times, args, args.nodes,
                    replace(model.CENTRAL, level=0))
    batch, seconds = list(times.items())[-1]
    one_gpu = batch / seconds  # samples/s
    gpus = rows.nodes * args.gpus
    return pandas.DataFrame({
        "nodes": rows.nodes, "GPUs": gpus, "global batch": rows.batch * gpus,
        "samples/s": rows.images_per_second, "speed-up": rows.images_per_second / one_gpu,
        "efficiency": rows.images_per_second / one_gpu / gpus,
        "pessimist": pessimist.images_per_second / one_gpu / gpus,
        "optimist": optimist.images_per_second / one_gpu / gpus,
        "computing": alone.images_per_second / one_gpu / gpus,
        "hours": rows.hours, "node hours": rows.hours * rows.nodes})


def model_errors():
    """Return {description of recorded runs: the model's relative errors of samples/s}."""
    published = pandas.read_csv(RECORDS / "published.csv")
    published["error"] = [model.predict(row) / row["images_per_second"] - 1
                          for row in published.to_dict("records")]
    lab = pandas.DataFrame(read_records("lab_predictions.jsonl"),
                           columns=["predicted", "images_per_second"])
    return {"published runs over a network, 6 of them known when the constants were chosen":
            published.error[published.group == "A"],
            "published runs within a node, 7 of them known then":
            published.error[published.group == "B"],
            "runs on lab.sh's simulated nodes": lab.predicted / lab.images_per_second - 1}


def polaris_ratios():
    """Return predicted / measured samples/s of CosmoFlow on 4 to 256 nodes of Polaris.

    By library. The step on 2 nodes counts as computation; the link is that of --site polaris.
    """
    runs = pandas.read_csv(RECORDS / "cosmoflow_polaris.csv")
    runs = runs[runs.backend.str.contains("20992 samples")]
    compute = runs.gpus.iloc[0] / runs.samples_per_second.iloc[0]
    clusters = [model.Cluster(nodes, 4, 3.06e9, 300e9) for nodes in runs.nodes]
    runs["ratio"] = [cluster.ranks / model.step_seconds(compute, 35_630_224, cluster) / measured
                     for cluster, measured in zip(clusters, runs.samples_per_second)]
    return runs[runs.nodes > 2].groupby(runs.backend.str.split().str[0]).ratio


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", type=Path, help="records of a training on one GPU or one node")
    add("--site", metavar="NAME", help="describe the nodes by a file of submit/sites, or by a path")
    add("--measured", type=Path, metavar="FILE", help="records of doctor.py --results on two nodes")
    add("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N",
        help="numbers of nodes (1 ... 64)")
    add("--gpus", type=int, default=4, help="GPUs per node (4)")
    add("--node-link", type=float, metavar="BYTES/S",
        help="bandwidth per node, unless given by --site or --measured: 100e9 is 4 x 200 Gbit/s")
    add("--gpu-link", type=float, metavar="BYTES/S", default=300e9,
        help="bandwidth per GPU within a node (300e9)")
    add("--epochs", type=int, default=1, help="epochs to train (1)")
    add("--samples", type=int, help="samples per epoch (those of the record)")
    add("--largest-batch", type=float, default=math.inf,
        help="largest global batch that reaches the same accuracy (the whole data set)")
    add("--csv", type=Path, metavar="FILE", help="save the table to FILE")
    args = parser.parse_args()
    if args.site:
        path = Path(args.site)
        if "/" not in args.site:
            path = ROOT / "submit" / "sites" / f"{args.site}.sh"
        flags = re.search("^# predict.py: (.*)", path.read_text() if path.exists() else "", re.M)
        if not flags:
            parser.error(f"--site {args.site}: {path} has no line '# predict.py: --gpus ...'")
        site_flags = shlex.split(flags[1], comments=True)
        args = parser.parse_args([*site_flags, *sys.argv[1:]])
    if args.csv and not os.access(args.csv.absolute().parent, os.W_OK):
        parser.error(f"--csv {args.csv}: name a file in a folder that you may write to")
    args.nodes = sorted(set(args.nodes))
    records = [record for record in read_records(args.run) if is_complete(record)]
    if not records or records[-1]["nodes"] > 1:
        parser.error(f"{args.run}: no record of a run on one node: a chapter's --results, or a "
                     f"line of JSON with {', '.join(NEEDED)}, all above 0")
    args.samples = args.samples or records[-1].get("images")
    if not args.samples:
        parser.error("--samples N: the record has no `images`, the samples per epoch")
    args.largest_batch = min(args.largest_batch, args.samples)
    args.level_seconds = None  # latency per level of a tree
    if args.measured:
        try:
            args.node_link, args.level_seconds = model.measured_link(read_records(args.measured))
        except ValueError as problem:
            parser.error(f"--measured {args.measured}: {problem}")
    for name in "node_link", "gpu_link", "gpus", "epochs", "largest_batch":
        if not (getattr(args, name) or 0) > 0:
            parser.error(f"--{name.replace('_', '-')}: give a number above 0")
    if args.nodes[0] < 1 or args.largest_batch < args.nodes[0] * args.gpus:
        parser.error("--nodes: at least 1, and at least one sample of --largest-batch per GPU")
    return args, records


def main():
    args, records = parse_args()
    times, record = step_times(records), records[-1]
    table = scaling_table(record, times, args)
    doublings = [2**power for power in range(1 + int(math.log2(args.nodes[-1])))]
    worthwhile_nodes = model.worth_asking_for(
        predict(record, times, args, doublings).to_dict("records"))
    print(f"a step of {list(times.values())[-1]:.3g} s on one device ({record.get('device')}), "
          f"{record['gradient_bytes'] / 1e6:,.1f} MB of gradients")
    print(f"nodes of {args.gpus} such devices, {args.node_link / 1e9:.3g} GB/s per node; "
          f"--epochs {args.epochs} of {args.samples:,} samples")
    formats = dict.fromkeys(("pessimist", "efficiency", "optimist", "computing"),
                            "{:.0%}".format)
    formats |= {"samples/s": "{:,.0f}".format, "speed-up": "{:,.1f}".format}
    print(table.to_string(index=False, formatters=formats, float_format="{:,.3g}".format))
    print(f"worth asking for: {worthwhile_nodes} nodes; each doubling up to there is at least "
          "1.5 times as fast")
    if table["global batch"].iloc[-1] < min(times) * table.GPUs.iloc[-1]:
        print(f"batches below {min(times)} per GPU were not measured: assumed the same samples/s")
    print("computing: the efficiency if communication took no time")
    for smaller, larger in pairwise(sorted(times)):
        if times[smaller] > times[larger]:
            print(f"a batch of {smaller} took longer than one of {larger} ({times[smaller]:.3g} s, "
                  f"{times[larger]:.3g} s), which is no network's fault: the GPU waited for the "
                  "CPU, or the run was a cold one: measure it again")
    print("not modelled: whether these global batches learn as well (--largest-batch), reading "
          "data, other jobs' traffic, failures")
    for name, error in model_errors().items():
        print(f"{len(error)} predictions for {name}: median error {error.abs().median():.1%}, "
              f"worst {error.abs().max():.1%}")
    for library, ratio in polaris_ratios():
        print(f"{len(ratio)} predictions for CosmoFlow with {library} on Polaris: "
              f"{ratio.min():.1f} to {ratio.max():.1f} times the measured samples/s")
    if args.csv:
        table.to_csv(args.csv, index=False)


if __name__ == "__main__":
    main()
