"""Prints plans, and how wrong the model is."""

import sys

import pandas

from cluster.plan.by_footprint import plan_footprint
from cluster.plan.check import (
    FITTED,
    computing_share,
    memory_errors,
    read_runs,
    read_table,
    speed_errors,
)
from cluster.plan.layouts import BATCH_TOLERANCE, rank
from cluster.plan.memory import MEMORY_ERROR, fits
from cluster.plan.step import make_cluster

GIB = 2**30


def show_table(rows: list[dict]) -> None:
    print(pandas.DataFrame(rows).to_string(index=False))


def show_hardware(args, description: str) -> None:
    gpu = args.gpu
    print(f"{description}; {gpu.name}: {gpu.peak / 1e12:.4g} TFLOP/s, {gpu.memory / GIB:.0f} GiB; "
          f"{args.gpu_link / 1e9:.3g} GB/s per GPU in a node, {args.node_link / 1e9:.3g} per node")


def speed_range(gpu, speed: float | None) -> tuple[float, float, float, str]:
    """Return factors of a predicted speed: central, low, high; and where the range comes from.

    speed: the central one, measured by a run of the user's own.
    """
    table = speed_errors(read_runs())
    if speed:
        high, low = 1 / table.calibrated.quantile([0.1, 0.9])
        return speed, speed * low, speed * high, (
            "8 of 10 published runs, calibrated by the smallest of their family")
    if "assumed" in gpu.source:
        low, high = table.mfu.quantile([0.1, 0.9]) / table.mfu.median()
        return 1, low, high, (
            "the MFU of 8 of 10 published runs over its median: none had this GPU")
    high, low = 1 / judges(table).ratio.quantile([0.1, 0.9])
    return 1, low, high, "8 of 10 published runs that no constant was fitted to"


def judges(table: pandas.DataFrame) -> pandas.DataFrame:
    return table[~table.project.isin(FITTED)]


def with_range(value: float, low: float, high: float, form: str = ".3g") -> str:
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def show_transformer(args) -> None:
    """Print the best layouts for each number of GPUs, and what all tokens take."""
    model, gpu = args.model, args.gpu
    central, low, high, meaning = speed_range(gpu, args.speed)
    sequences = args.global_batch_tokens / model.context
    show_hardware(args, f"{model.parameters / 1e9:.3g} billion parameters, "
                        f"{model.flops / 1e9:.3g} GFLOP per token")
    best = []
    for gpus in args.gpus:
        cluster = make_cluster(gpus, args.gpus_per_node, args.node_link, args.gpu_link)
        plans = rank(model, gpu, cluster, sequences)
        if not plans:
            print(f"cluster.plan: {gpus} GPUs: no layout has a batch within {BATCH_TOLERANCE:.0%} "
                  f"of {sequences:.3g} sequences: each rank, or each group of at most 128 in a "
                  "pipeline with tensors, needs whole ones", file=sys.stderr)
            if len(args.gpus) == 1:
                sys.exit(2)
            continue
        print(f"\n{gpus} GPUs, {cluster.nodes} node(s), "
              + ("no layout fits" if plans[0].fits == "no" else "the best layout first"))
        show_table([layout_row(plan, central, low, high) for plan in plans])
        best.append(plans[0])
    if args.tokens:
        print(f"\n{args.tokens / 1e9:g} billion tokens")
        show_table([proposal_row(plan, args.tokens, central, low, high) for plan in best])
    print(f"\nrange: {low / central:.2f} to {high / central:.2f} times the predicted speed, as "
          f"{meaning}\n"
          f"fits: yes, if {MEMORY_ERROR:.0%} more memory would, too; not modelled: docs/PLAN.md")


def layout_row(plan, central, low, high) -> dict:
    layout, step = plan.layout, plan.step
    return {
        "layout": plan.name, "micro-batches": f"{layout.micro_batches} x {layout.micro_batch}",
        "sequences": layout.sequences,
        "recompute": {"none": "no", "full": "all"}[layout.checkpointing],
        "GiB": f"{plan.memory.in_use / GIB:.0f}", "fits": plan.fits,
        "step s": with_range(step.seconds / central, step.seconds / high, step.seconds / low),
        "tokens/s/GPU": f"{central * plan.tokens_per_second:,.0f}",
        "MFU": f"{central * plan.mfu:.0%}",
        **{name: f"{seconds / central:.3g}" for name, seconds in (
            ("computing", step.compute), ("sending", step.tensor), ("waiting", step.data_exposed),
            ("idle", step.bubble))},
        "limit": plan.limit}


def proposal_row(plan, tokens, central, low, high) -> dict:
    """Return what a number of GPUs needs for all tokens."""
    tokens_per_second = plan.tokens_per_second * plan.layout.gpus
    days = tokens / tokens_per_second / 24 / 3600
    hours = 24 * days * plan.cluster.nodes
    return {"GPUs": plan.layout.gpus, "nodes": plan.cluster.nodes, "layout": plan.name,
            "tokens/s": f"{central * tokens_per_second:,.0f}", "MFU": f"{central * plan.mfu:.0%}",
            "memory GiB": f"{plan.memory.in_use / GIB:.0f} of {plan.gpu.memory / GIB:.0f}",
            "fits": plan.fits, "days": with_range(days / central, days / high, days / low),
            "node hours": with_range(hours / central, hours / high, hours / low, ",.0f")}


def show_footprint(args) -> None:
    """Print what a program needs on each number of GPUs, from its footprint."""
    share = computing_share(read_runs())
    central, slow, fast, meaning = speed_range(args.gpu, args.speed)
    rows = []
    for gpus in args.gpus:
        cluster = make_cluster(gpus, args.gpus_per_node, args.node_link, args.gpu_link)
        row = plan_footprint(args.footprints, args.gpu, cluster, central * share)
        seconds = row.seconds, row.seconds * central / fast, row.seconds * central / slow
        rows.append({
            "GPUs": gpus, "nodes": cluster.nodes, "counted": "yes" if row.is_counted else "scaled",
            "GiB": f"{row.memory.in_use / GIB:.1f}", "fits": fits(row.memory, args.gpu),
            "GB sent": f"{row.sent / 1e9:.3g}", "computing s": f"{row.compute:.3g}",
            "sending s": f"{row.communication:.3g}", "step s": with_range(*seconds),
            "efficiency": f"{row.compute / row.seconds:.0%}",
            "node hours of 1,000 steps": with_range(
                *(value * cluster.nodes / 3.6 for value in seconds), ",.3g")})
    footprint = args.footprints[-1]
    show_hardware(args, f"{footprint['script']} as counted on {footprint['ranks']:,} ranks")
    show_table(rows)
    print(f"computing: at {central * share * args.gpu.matmul_share:.0%} of the peak in bf16; "
          f"range: {slow / central:.2f} to {fast / central:.2f} times that speed, as\n"
          f"{meaning}, planned from their sizes\n"
          "narrow layers and convolutions reach less, fp32 much less: give predicted / measured "
          "seconds of a step as --speed\n"
          "scaled: each rank keeps its batch; count it with `cluster.footprint --ranks N` instead")


def show_check() -> None:
    """Print how wrong the predictions of published runs are, and those of trivial rules."""
    runs = read_runs()
    speeds = speed_errors(runs)
    rows = len(read_table())
    print(f"published runs: {rows}, {len(speeds)} with a speed that the model can predict; "
          f"{rows - len(runs)} state too little of the model or the layout\n")
    groups = [(f"{project}{' (fitted)' if project in FITTED else ''}", rows)
              for project, rows in speeds.groupby("project")]
    groups += list(speeds.groupby("layout"))
    judging = judges(speeds)
    groups += [("all", speeds), ("not fitted", judging),
               ("not fitted, of 700 W", judging[judging.gpu != "h100-500w"])]
    show_table([speed_row(name, rows) for name, rows in groups])
    print("\nmedian error of tokens/s; within 10 %: share of rows; bias: + is too fast; "
          "calibrated: by the\nsmallest run of the family, other rows; weak: as fast per GPU as "
          "that run; median: at the\nmedian MFU of the other projects\n")
    memory = memory_errors(runs)
    show_table([{
        "memory": project, "kind": kind, "rows": len(ratio), "error": median_error(ratio),
        "bias": f"{ratio.median() - 1:+.1%}", "worst": f"{(ratio - 1).abs().max():.0%}"}
        for (project, kind), ratio in memory.dropna(subset="ratio").groupby(
            ["project", "kind"]).ratio])
    for name, group in (("ran", memory[~memory.out_of_memory]),
                        ("were out of memory", memory[memory.out_of_memory])):
        verdicts = [fits(row.memory, row.gpu) for row in group.itertuples()]
        print(f"{len(group)} of them {name}; the model says that they fit: no "
              f"{verdicts.count('no')}, perhaps {verdicts.count('perhaps')}, yes "
              f"{verdicts.count('yes')}")
    high = (1 / judges(memory).ratio).quantile(0.9)
    print(f"one in ten of those not fitted needed more than {high:.2f} times the prediction")


def median_error(ratios: pandas.Series) -> str:
    error = (ratios - 1).abs().median()
    return "" if pandas.isna(error) else f"{error:.1%}"


def speed_row(name: str, rows: pandas.DataFrame) -> dict:
    is_near = (rows.ratio - 1).abs() < 0.1
    return {"": name, "rows": len(rows), "error": median_error(rows.ratio),
            "within 10 %": f"{is_near.mean():.0%}", "bias": f"{rows.ratio.median() - 1:+.1%}",
            **{rule: median_error(rows[rule]) for rule in ("calibrated", "weak", "median")}}
