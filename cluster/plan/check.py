"""Predict published runs, and say how wrong the predictions are: python -m cluster.plan --check.

A file in the form of assets/records/published_llm.csv has a run per row. The constants of step.py
and gpus.csv were fitted to the rows of FITTED's sources; all others judge them.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas

from cluster.plan.measured import predict_published
from cluster.plan.memory import rank_memory
from cluster.plan.step import (
    CENTRAL,
    RECOMPUTED,
    Cluster,
    Constants,
    compute_seconds_of,
    step_seconds,
    transformer_step,
)
from cluster.plan.transformer import Layout, Software, Transformer
from cluster.records import RECORDS, read_records
from workshop.gpus import Gpu, read_gpus

FITTED = "llm-foundry", "bigscience"
PUBLISHED = RECORDS / "published_llm.csv"
CHECKPOINTING = (  # the first word that a row's checkpointing contains; with FlashAttention,
    ("full", "full"), ("op", "operations"), ("layer", "layers"),  # recomputing attention alone
    ("selective", "none"), ("attn", "none"), ("attention", "none"), ("no", "none"))  # is nothing


class NotPredicted(Exception):
    """A row lacks something, or is of a kind that the model does not know."""


@dataclass(frozen=True)
class Run:
    """A published run, as the model's arguments, and what was measured."""
    source: str
    family: str
    model: Transformer
    layout: Layout
    gpu: Gpu
    cluster: Cluster
    software: Software
    tokens: float
    tokens_per_second: float | None
    memory: float | None
    memory_kind: str
    out_of_memory: bool

    @property
    def gpus(self):
        return self.layout.gpus

    def predict(self, constants: Constants = CENTRAL) -> float:
        """Return tokens/s per GPU."""
        step = transformer_step(
            self.model, self.layout, self.gpu, self.cluster, self.software, constants)
        return self.tokens / step.seconds / self.gpus


def number(row, name, default=None):
    try:
        return float(row[name].replace(",", ""))
    except ValueError:
        return default


def read_model(row) -> Transformer:
    """Return the model whose number of parameters comes nearest to the stated one."""
    sizes = [number(row, name) for name in ("layers", "width", "context")]
    if None in sizes:
        raise NotPredicted("model, or its context, not stated")
    layers, width, context = map(int, sizes)
    heads = int(number(row, "heads", max(1, width // 128)))
    candidates = [Transformer(
        layers, width, heads, context, int(number(row, "vocabulary", 50_000)),
        int(number(row, "kv_heads", heads)), int(number(row, "ffn", 4 * width)), gated, tied)
        for gated in (False, True) for tied in (True, False)]
    stated = number(row, "parameters_billion")
    if not stated:
        return candidates[1]
    model = min(candidates, key=lambda model: abs(model.parameters - stated * 1e9))
    if abs(model.parameters / stated / 1e9 - 1) > 0.15:
        raise NotPredicted("its sizes do not give its parameters: a mixture of experts?")
    return model


def read_layout(row, gpus: int) -> Layout:
    """Return the layout that a row states in words such as "FSDP16 TP8, Interleaved 1F1B"."""
    text = re.sub(r"\(.*?\)", "", row["layout"])
    counts = {}
    for name, count in re.findall(r"\b(FSDP|HSDP|DP|TP|PP|CP|VP|EP)(\d*)", text):
        counts.setdefault(name, int(count or 0))
    stage = re.search(r"ZeRO-(\d)", text)
    if " x " in text or not (counts or stage):
        raise NotPredicted("layout not stated in full, or in unknown words")
    if counts.get("EP", 1) > 1:
        raise NotPredicted("a mixture of experts")
    tensor, stages, context = (counts.get(name) or 1 for name in ("TP", "PP", "CP"))
    data, rest = divmod(gpus, tensor * stages * context)
    if rest or not data:
        raise NotPredicted("its GPUs are no multiple of its layout")
    zero = int(stage[1]) if stage else 1 if "distributed optimizer" in text else 0
    if {"FSDP", "HSDP"} & set(counts):
        zero = 3
    shards = counts.get("FSDP" if "DP" in counts else "HSDP") or data * context
    micro_batch = number(row, "micro_batch")
    batch = number(row, "global_batch") or (micro_batch or 1) * data
    if not micro_batch:  # in a pipeline as many as stages, torchtitan's default
        micro_batch = max(1, batch / data / (stages if stages > 1 else 1))
    return Layout(
        data, context, tensor, stages, zero, max(1, data * context // shards),
        max(1, int(micro_batch)), max(1, round(batch / data / micro_batch)),
        counts.get("VP") or (2 if "Interleaved" in text else 1), checkpointing_of(row))


def checkpointing_of(row) -> str:
    text = row["checkpointing"].lower()
    if not text:
        return "none"
    for word, kind in CHECKPOINTING:
        if word in text:
            return kind
    raise NotPredicted("unknown kind of checkpointing")


def read_hardware(row, gpus: int) -> tuple[Gpu, Cluster]:
    """Return a row's GPU, and its links: the note's, or those of a usual node."""
    note, known = row["note"], read_gpus()
    name = next((name for name in ("v100", "a100", "h100", "h200", "b200", "mi250x", "mi300x")
                 if re.search(rf"\bg?{name}\b", row["gpu"].lower())), None)
    if not name:
        raise NotPredicted("its GPU is not in workshop/gpus.csv")
    if name == "a100" and "40" in row["gpu"]:
        name = "a100-40"
    gpu = known["h100-500w" if "500 W" in note else name]
    per_node = int(number(row, "gpus_per_node", 8))
    measured = re.search(r"all-reduce measured ([\d.]+) GB/s", note)
    per_gpu = re.search(r"(\d+) Gb/s(?: \S+)? per GPU", note)
    whole = re.search(r"(\d+) Gb/s(?: \S+)? per node", note)
    link = gpu.node_link
    if name == "a100-40":
        link = known["a100"].node_link
    if measured:
        link = float(measured[1]) * 1e9
    elif per_gpu:
        link = float(per_gpu[1]) / 8 * 1e9 * per_node
    elif whole:
        link = float(whole[1]) / 8 * 1e9
    elif "4 Omni-Path" in note:
        link = 4 * 12.5e9
    return gpu, Cluster(math.ceil(gpus / per_node), per_node, link, gpu.gpu_link,
                        measured=bool(measured))


def read_run(row) -> Run:
    """Return a row as a Run. Raises NotPredicted with the reason."""
    model = read_model(row)
    gpus, note, precision = number(row, "gpus"), row["note"], row["precision"].lower()
    if not gpus:
        raise NotPredicted("number of GPUs not stated")
    if re.search("32|64|fp4", precision.split(",")[0]):
        raise NotPredicted("neither bf16, fp16 nor float8")
    gpu, cluster = read_hardware(row, int(gpus))
    layout = read_layout(row, int(gpus))
    software = Software(
        flash="without FlashAttention" not in note, compiled=row["compile"] == "yes",
        float8="8" in precision.replace("bf16", ""), overlap="async" in row["layout"],
        gradient_bytes=2 if "PURE" in note or precision == "fp16" else 4)
    kind = next((kind for kind in ("nvidia-smi", "allocated") if kind in note), "reserved")
    tokens = layout.data * layout.micro_batch * layout.micro_batches * model.context
    source = re.split(r"[ /]", re.sub(r"^(hf\.co/spaces/)?[\w-]+/", "", row["source"]))[0]
    family = [source, *(row[name] for name in (
        "model", "gpu", "context", "checkpointing", "precision", "compile"))]
    return Run(source, ", ".join(family), model, layout, gpu, cluster, software, tokens,
               number(row, "tokens_per_s_per_gpu"), number(row, "memory_gib"), kind,
               "OUT OF MEMORY" in note)


def read_runs(path: Path = PUBLISHED) -> tuple[list[Run], Counter]:
    """Return the rows that the model can predict, and the number of others by reason.

    Raises ValueError if the file is not in the form of PUBLISHED.
    """
    runs, reasons = [], Counter()
    table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    missing = set(pandas.read_csv(PUBLISHED, nrows=0)) - set(table)
    if missing:
        raise ValueError(f"no column {', '.join(sorted(missing))}")
    for row in table.to_dict("records"):
        try:
            runs.append(read_run(row))
        except NotPredicted as reason:
            reasons[str(reason)] += 1
    return runs, reasons


def speed_errors(runs: list[Run], constants: Constants = CENTRAL) -> pandas.DataFrame:
    """Return a row per run with a speed: predicted / measured tokens/s, and of simpler rules.

    calibrated: times the measured / predicted of the smallest run of its family, of several the
    fastest; weak: as fast per GPU as that run. Both are empty for that run itself. median: at the
    median share of the peak of the other sources' runs.
    """
    table = pandas.DataFrame([{
        "source": run.source, "family": run.family, "gpus": run.gpus,
        "layout": layout_kind(run.layout), "gpu": run.gpu.name, "measured": run.tokens_per_second,
        "predicted": run.predict(constants),
        "mfu": run.tokens_per_second * run.model.flops / run.gpu.peak,
        "peak_tokens": run.gpu.peak / run.model.flops}
        for run in runs if run.tokens_per_second])
    table["ratio"] = table.predicted / table.measured
    smallest = table.sort_values(["gpus", "measured"], ascending=[True, False]).groupby(
        "family").head(1)
    first = table.family.map(smallest.set_index("family").ratio)
    measured = table.family.map(smallest.set_index("family").measured)
    others = ~table.index.isin(smallest.index)
    table["calibrated"] = (table.ratio / first).where(others)
    table["weak"] = (measured / table.measured).where(others)
    table["median"] = [table.mfu[table.source != row.source].median() * row.peak_tokens
                       / row.measured for row in table.itertuples()]
    return table


def computing_share(runs: list[Run]) -> float:
    """Return the median share of peak x matmul_share at which the model lets these runs compute.

    Of all FLOPs, as PyTorch counts them: with recomputation, causal attention in full.
    """
    shares = []
    for run in runs:
        products, attention, _ = RECOMPUTED[run.layout.checkpointing]
        flops = ((3 + products) * run.model.matmul_flops
                 + (3.5 + attention) * 2 * run.model.attention_flops)
        tokens = (run.layout.micro_batch * run.model.context
                  / (run.layout.context * run.layout.tensor * run.layout.pipeline))
        seconds = compute_seconds_of(run.model, run.layout, run.gpu, run.software, CENTRAL)
        shares.append(tokens * flops / seconds / run.gpu.peak / run.gpu.matmul_share)
    return float(np.median(shares))


def layout_kind(layout: Layout) -> str:
    kind = ["HSDP" if layout.replicas > 1 else ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")[layout.zero]]
    kind += ["TP"] if layout.tensor > 1 else []
    kind += ["CP"] if layout.context > 1 else []
    kind += ["PP"] if layout.pipeline > 1 else []
    return " + ".join(kind)


def memory_errors(runs: list[Run]) -> pandas.DataFrame:
    """Return a row per run with its memory: predicted / measured, by what was measured."""
    rows = []
    for run in runs:
        memory = rank_memory(run.model, run.layout, run.software)
        predicted = {"allocated": memory.allocated, "reserved": memory.reserved,
                     "nvidia-smi": memory.in_use}[run.memory_kind]
        if run.memory or run.out_of_memory:
            rows.append({"source": run.source, "kind": run.memory_kind, "memory": memory,
                         "gpu": run.gpu, "out_of_memory": run.out_of_memory,
                         "ratio": predicted / run.memory / 2**30 if run.memory else None})
    return pandas.DataFrame(rows)


def data_parallel_errors():
    """Return {description of recorded runs: the model's relative errors of samples/s}."""
    published = pandas.read_csv(RECORDS / "published.csv")
    published["error"] = [predict_published(row) / row["images_per_second"] - 1
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
    clusters = [Cluster(nodes, 4, 3.06e9, 300e9) for nodes in runs.nodes]
    runs["ratio"] = [cluster.ranks / step_seconds(compute, 35_630_224, cluster) / measured
                     for cluster, measured in zip(clusters, runs.samples_per_second)]
    return runs[runs.nodes > 2].groupby(runs.backend.str.split().str[0]).ratio
