"""Prints plans, and how wrong the model is."""

import math
import sys
from itertools import pairwise

import pandas

from cluster.plan.by_footprint import plan_footprint
from cluster.plan.check import (
    FITTED,
    computing_share,
    data_parallel_errors,
    memory_errors,
    polaris_ratios,
    read_runs,
    speed_errors,
)
from cluster.plan.layouts import (
    BATCH_TOLERANCE,
    MEMORY_ERROR,
    all_plans,
    find_bolder,
    fits,
    limit,
    rank,
    why_it_lost,
)
from cluster.plan.measured import predict_run, scaling_table, worth_asking_for
from cluster.plan.step import make_cluster

GIB = 2**30
RECOMPUTE = {"none": "no", "full": "all"}


def show_table(table: pandas.DataFrame, markdown: bool = False) -> None:
    """Print a table of strings, or, for a proposal, as Markdown."""
    if not markdown:
        print(table.to_string(index=False))
        return
    rows = [list(table.columns), ["---"] * len(table.columns), *table.values.tolist()]
    print("\n".join(f"| {' | '.join(str(cell).strip() for cell in row)} |" for row in rows))


def speed_range(gpu, speed: float | None) -> tuple[float, float, float, str]:
    """Return factors of a predicted speed: central, low, high; and what they are.

    speed: the central one, measured by a run of the user's own.
    """
    table = speed_errors(read_runs()[0])
    if speed:
        high, low = 1 / table.calibrated.quantile([0.1, 0.9])
        return speed, speed * low, speed * high, ("8 of 10 of the published runs, calibrated by "
                                                  "the smallest of their family")
    if "assumed" in gpu.source:
        low, high = table.mfu.quantile([0.1, 0.9]) / table.mfu.median()
        return 1, low, high, ("no published run of this GPU; the MFU of 8 of 10 of "
                              f"{len(table)} others, over its median")
    judges = table[~table.source.isin(FITTED)]
    high, low = 1 / judges.ratio.quantile([0.1, 0.9])
    return 1, low, high, (f"8 of 10 of the {len(judges)} published runs that no constant was "
                          "fitted to")


def show_transformer(args) -> None:
    """Print the layouts for each number of GPUs, best first, and what limits them."""
    model, gpu = args.model, args.gpu
    *factors, meaning = speed_range(gpu, args.speed)
    print(f"{model.parameters / 1e9:.3g} billion parameters, {model.flops / 1e9:.3g} GFLOP per "
          f"token; {gpu.name}: {gpu.peak / 1e12:.4g} TFLOP/s, {gpu.memory / GIB:.0f} GiB; "
          f"{args.gpu_link / 1e9:.3g} GB/s per GPU in a node, {args.node_link / 1e9:.3g} per node")
    proposal = []
    for gpus in args.gpus:
        cluster = make_cluster(gpus, args.gpus_per_node, args.node_link, args.gpu_link)
        plans = rank(model, gpu, cluster, args.global_batch_tokens / model.context)
        if not plans:
            sequences = args.global_batch_tokens / model.context
            print(f"cluster.plan: {gpus} GPUs: no layout has a batch within {BATCH_TOLERANCE:.0%} "
                  f"of {sequences:.3g} sequences: each rank, or each group of at most 128 in a "
                  "pipeline with tensors, needs whole ones", file=sys.stderr)
            if len(args.gpus) == 1:
                sys.exit(2)
            continue
        best = plans[0]
        if not args.markdown:
            print(f"\n{gpus} GPUs, {cluster.nodes} node(s)")
            show_table(layout_table(plans, *factors))
            if best.fits == "no":
                print("no layout fits")
            else:
                print(f"recommended: {best.name}; limited by {limit(best)}")
                bolder = find_bolder(best, all_plans(
                    model, gpu, cluster, args.global_batch_tokens / model.context))
                if bolder:
                    gain = bolder.tokens_per_second / best.tokens_per_second - 1
                    print(f"perhaps it fits: {bolder.name}, {batches(bolder)}, recompute "
                          f"{RECOMPUTE[bolder.layout.checkpointing]}: {gain:.0%} faster, "
                          f"{bolder.memory.in_use / GIB:.0f} GiB")
            for number, plan in enumerate(plans[1:]):
                print(f"{'runner-up' if number == 0 else 'then'}: {plan.name}: "
                      f"{why_it_lost(best, plan)}")
        proposal.append(proposal_row(best, args.tokens, *factors))
    print()
    if args.tokens or args.markdown:
        show_table(pandas.DataFrame(proposal), args.markdown)
    low, high = (factor / factors[0] for factor in factors[1:])
    print(f"range: {meaning}:\n       {low:.2f} to {high:.2f} times the prediction. "
          f"It fits: yes, if {MEMORY_ERROR:.0%} more memory would, too")
    print("none of these runs is HSDP (FSDP8 x 2: two groups of 8), plain DDP, or ZeRO-1 in a "
          "pipeline\nnot tried: context parallelism, interleaved pipelines, mixtures of experts, "
          "torch.compile, float8\nnot modelled: kernel launches (small networks), reading data, "
          "failures, other jobs' traffic")


def batches(plan) -> str:
    return f"{plan.layout.micro_batches} x {plan.layout.micro_batch}"


def layout_table(plans, central, low, high) -> pandas.DataFrame:
    return pandas.DataFrame([{
        "layout": plan.name,
        "micro-batches": batches(plan),
        "sequences": f"{plan.batch_tokens / plan.model.context:.0f}",
        "recompute": RECOMPUTE[plan.layout.checkpointing],
        "GiB": f"{plan.memory.in_use / GIB:.0f}", "fits": plan.fits,
        "step s": f"{plan.step.seconds / central:.3g}",
        "tokens/s per GPU": f"{central * plan.tokens_per_second:,.0f} "
                            f"({low * plan.tokens_per_second:,.0f}-"
                            f"{high * plan.tokens_per_second:,.0f})",
        "MFU": f"{central * plan.mfu:.0%} ({low * plan.mfu:.0%}-{high * plan.mfu:.0%})",
        "computing": f"{plan.efficiency:.0%}"} for plan in plans])


def proposal_row(plan, tokens, central, low, high) -> dict:
    """Return a row of a proposal's table: what a number of GPUs needs for all tokens."""
    row = {"GPUs": plan.layout.gpus, "nodes": plan.cluster.nodes, "layout": plan.name,
           "tokens/s": f"{central * plan.tokens_per_second * plan.layout.gpus:,.0f}",
           "MFU": f"{central * plan.mfu:.0%}",
           "memory GiB": f"{plan.memory.in_use / GIB:.0f} of {plan.gpu.memory / GIB:.0f}",
           "fits": plan.fits}
    if tokens:
        hours = tokens / plan.tokens_per_second / plan.layout.gpus / 3600
        nodes = plan.cluster.nodes
        days = hours / 24
        row |= {"days": f"{days / central:.3g} ({days / high:.3g}-{days / low:.3g})",
                "node hours": f"{hours * nodes / central:,.0f} ({hours * nodes / high:,.0f}-"
                              f"{hours * nodes / low:,.0f})"}
    return row


def show_footprint(args) -> None:
    """Print what a program needs on each number of GPUs, from its footprint."""
    runs, _ = read_runs()
    share = computing_share(runs)
    central, slow, fast, meaning = speed_range(args.gpu, args.speed)
    meaning = (f"at {central * share * args.gpu.matmul_share:.0%} of the peak in bf16 without "
               f"communication,\n  {slow / central:.2f} to {fast / central:.2f} times that: "
               f"{meaning}")
    if not args.speed:
        meaning += (";\n  convolutions reach less, fp32 much less: measure a step, and give "
                    "predicted / measured as --speed")
    rows = []
    for gpus in args.gpus:
        row = plan_footprint(args.footprints, args.gpu, gpus, args.gpus_per_node, args.node_link,
                             args.gpu_link, share)
        seconds, longest, shortest = (row.seconds / factor for factor in (central, slow, fast))
        rows.append({
            "GPUs": gpus, "nodes": row.nodes, "counted": "yes" if row.exact else "scaled",
            "GiB": f"{row.memory.in_use / GIB:.1f}",
            "fits": fits(row.memory, args.gpu, MEMORY_ERROR),
            "GB sent": f"{row.sent / 1e9:.3g}", "computing s": f"{row.compute / central:.3g}",
            "sending s": f"{row.communication:.3g}",
            "step s": f"{seconds:.3g} ({shortest:.3g}-{longest:.3g})",
            "limited by": "link" if row.communication > row.compute else "compute",
            "node hours of 1,000 steps": f"{seconds * row.nodes / 3.6:,.3g} "
                                         f"({shortest * row.nodes / 3.6:,.3g}-"
                                         f"{longest * row.nodes / 3.6:,.3g})"})
    first = args.footprints[-1]
    if not args.markdown:
        print(f"{first['script']} as counted on {first['ranks']:,} ranks; {args.gpu.name}: "
              f"{args.gpu.peak / 1e12:.4g} TFLOP/s, {args.gpu.memory / GIB:.0f} GiB; "
              f"{args.gpu_link / 1e9:.3g} GB/s per GPU in a node, "
              f"{args.node_link / 1e9:.3g} per node")
    show_table(pandas.DataFrame(rows), args.markdown)
    print(f"computing: {meaning}")
    print("scaled: each rank keeps its batch; count it with `cluster.footprint --ranks N` instead")


def show_measured(args) -> None:
    """Print the scaling table of a run of DDP, and the model's errors."""
    table = scaling_table(args.record, args.times, args)
    seconds = list(args.times.values())[-1]
    doublings = [2**power for power in range(1 + int(math.log2(args.gpus[-1])))]
    worthwhile = worth_asking_for(
        predict_run(args.record, args.times, args, doublings).to_dict("records"))
    shares = dict.fromkeys(("efficiency", "pessimist", "optimist", "computing"), "{:.0%}")
    shares |= {"samples/s": "{:,.0f}", "speed-up": "{:,.1f}", "hours": "{:.3g}",
               "node hours": "{:,.3g}"}
    shown = table.assign(**{name: table[name].map(form.format) for name, form in shares.items()})
    if args.markdown:
        return show_table(shown, True)
    print(f"a step of {seconds:.3g} s on one device ({args.record.get('device')}), "
          f"{args.record['gradient_bytes'] / 1e6:,.1f} MB of gradients")
    print(f"nodes of {args.gpus_per_node} such devices, {args.node_link / 1e9:.3g} GB/s per node; "
          f"--epochs {args.epochs} of {args.samples:,} samples")
    show_table(shown)
    print(f"worth asking for: {worthwhile} GPUs; each doubling up to there is at least 1.5 times "
          "as fast")
    if table["global batch"].iloc[-1] < min(args.times) * table.GPUs.iloc[-1]:
        print(f"batches below {min(args.times)} per GPU were not measured: assumed the same "
              "samples/s")
    print("computing: the efficiency if communication took no time")
    for smaller, larger in pairwise(sorted(args.times)):
        if args.times[smaller] > args.times[larger]:
            print(f"a batch of {smaller} took longer than one of {larger} "
                  f"({args.times[smaller]:.3g} s, {args.times[larger]:.3g} s), which is no "
                  "network's fault: the GPU waited for the CPU, or the run was a cold one: "
                  "measure it again")
    print("not modelled: whether these global batches learn as well (--largest-batch), reading "
          "data, other jobs' traffic, failures")
    show_data_parallel_errors()
    return None


def show_data_parallel_errors() -> None:
    for name, error in data_parallel_errors().items():
        print(f"{len(error)} predictions for {name}: median error {error.abs().median():.1%}, "
              f"worst {error.abs().max():.1%}")
    for library, ratio in polaris_ratios():
        print(f"{len(ratio)} predictions for CosmoFlow with {library} on Polaris: "
              f"{ratio.min():.1f} to {ratio.max():.1f} times the measured samples/s")


def show_check(args) -> None:
    """Print how wrong the predictions of a file's runs are, and those of trivial rules."""
    runs, reasons = args.runs, args.reasons
    speeds = speed_errors(runs)
    print(f"{args.check.name}: {len(runs) + sum(reasons.values())} rows, {len(speeds)} with a "
          "speed that the model can predict\n")
    groups = [(f"{source}{' (fitted)' if source in FITTED else ''}", rows)
              for source, rows in speeds.groupby("source")]
    groups += list(speeds.groupby("layout"))
    judges = speeds[~speeds.source.isin(FITTED)]
    groups += [("all", speeds), ("not fitted", judges),
               ("not fitted, of 700 W", judges[judges.gpu != "h100-500w"])]
    show_table(pandas.DataFrame([speed_row(name, rows) for name, rows in groups if len(rows)]))
    print("\nmedian error of tokens/s; within 10 %: share of rows; bias: + is too fast; "
          "calibrated: by the\nsmallest run of the family, other rows; weak: as fast per GPU as "
          "that run; median: at the\nmedian MFU of the other sources\n")
    memory = memory_errors(runs)
    if memory.empty:
        memory = memory.reindex(columns=["source", "kind", "ratio", "out_of_memory"])
    rows = []
    for (source, kind), group in memory[memory.ratio.notna()].groupby(["source", "kind"]):
        error = (group.ratio - 1).abs()
        rows.append({"memory": source, "kind": kind, "rows": len(group),
                     "error": f"{error.median():.1%}", "bias": f"{group.ratio.median() - 1:+.1%}",
                     "worst": f"{error.max():.0%}"})
    if rows:
        show_table(pandas.DataFrame(rows))
    for name, group in (("ran", memory[memory.out_of_memory.eq(False)]),
                        ("were out of memory", memory[memory.out_of_memory.eq(True)])):
        verdicts = [fits(row.memory, row.gpu, MEMORY_ERROR) for row in group.itertuples()]
        print(f"{len(group)} of them {name}; the model says that they fit: no "
              f"{verdicts.count('no')}, perhaps {verdicts.count('perhaps')}, yes "
              f"{verdicts.count('yes')}")
    high = (1 / memory.ratio[~memory.source.isin(FITTED)]).quantile(0.9)
    print(f"one in ten of those not fitted needed more than {high:.2f} times the prediction")
    no_speed = sum(not run.tokens_per_second for run in runs)
    print(f"\nnot predicted: {no_speed} rows without tokens/s")
    for reason, number in reasons.most_common():
        print(f"not predicted: {number} row(s): {reason}")
    show_data_parallel_errors()


def speed_row(name, rows) -> dict:
    def median_error(column):
        error = (rows[column] - 1).abs().median()
        return "" if math.isnan(error) else f"{error:.1%}"
    error = (rows.ratio - 1).abs()
    return {"": name, "rows": len(rows), "error": median_error("ratio"),
            "within 10 %": f"{(error < 0.1).mean():.0%}",
            "bias": f"{rows.ratio.median() - 1:+.1%}", "calibrated": median_error("calibrated"),
            "weak": median_error("weak"), "median": median_error("median")}
