"""Predict published runs, and say how wrong the predictions are: python -m cluster.plan --check.

A row of assets/records/published_llm.csv has what a source states, in its words, and the same as
arguments of the model: model.layers is Transformer's `layers`, layout.data Layout's `data`. Rows
without these state too little. The constants of step.py and gpus.csv were fitted to the rows of the
projects FITTED; all others judge them.
"""

from dataclasses import dataclass

import numpy as np
import pandas

from cluster.plan.memory import rank_memory
from cluster.plan.step import (
    CENTRAL,
    RECOMPUTED,
    Cluster,
    Constants,
    compute_seconds_of,
    transformer_step,
)
from cluster.plan.transformer import Layout, Software, Transformer, kind_of
from cluster.records import RECORDS
from workshop.gpus import Gpu, read_gpus

FITTED = "llm-foundry", "bigscience"
PUBLISHED = RECORDS / "published_llm.csv"
FAMILY = ["project", "model", "gpu", "context", "checkpointing", "precision", "compile"]


@dataclass(frozen=True)
class Run:
    """A published run, as the model's arguments, and what was measured."""
    project: str
    family: str
    model: Transformer
    layout: Layout
    gpu: Gpu
    cluster: Cluster
    software: Software
    tokens_per_second: float | None
    memory_gib: float | None
    memory_kind: str | None
    out_of_memory: bool

    def predict(self, constants: Constants = CENTRAL) -> float:
        """Return tokens/s per GPU."""
        step = transformer_step(
            self.model, self.layout, self.gpu, self.cluster, self.software, constants)
        return self.layout.sequences * self.model.context / step.seconds / self.layout.gpus


def read_table() -> pandas.DataFrame:
    return pandas.read_csv(PUBLISHED, true_values=["yes"], false_values=["no"])


def read_runs() -> list[Run]:
    """Return the runs that the model can predict."""
    table = read_table().dropna(subset="project").convert_dtypes().astype(object)
    return [read_run(row) for row in table.where(table.notna(), None).to_dict("records")]


def read_run(row: dict) -> Run:
    def arguments(prefix: str) -> dict:
        return {name.removeprefix(prefix): value for name, value in row.items()
                if name.startswith(prefix)}
    gpu = read_gpus()[row["gpu.name"]]
    return Run(
        row["project"], ", ".join(str(row[name]) for name in FAMILY),
        Transformer(**arguments("model.")), Layout(**arguments("layout.")), gpu,
        Cluster(**arguments("cluster."), gpu_link=gpu.gpu_link), Software(**arguments("software.")),
        row["tokens_per_s_per_gpu"], row["memory_gib"], row["memory.kind"], row["memory.out"])


def speed_errors(runs: list[Run]) -> pandas.DataFrame:
    """Return a row per run with a speed: predicted / measured tokens/s, and of simpler rules.

    calibrated: times the measured / predicted of the smallest run of its family, of several the
    fastest; weak: as fast per GPU as that run. Both are empty for that run itself. median: at the
    median share of the peak of the other projects' runs.
    """
    table = pandas.DataFrame([{
        "project": run.project, "family": run.family, "gpus": run.layout.gpus,
        "layout": kind_of(run.layout), "gpu": run.gpu.name, "measured": run.tokens_per_second,
        "predicted": run.predict(), "mfu": run.tokens_per_second * run.model.flops / run.gpu.peak,
        "peak_tokens": run.gpu.peak / run.model.flops}
        for run in runs if run.tokens_per_second])
    table["ratio"] = table.predicted / table.measured
    smallest = table.sort_values(["gpus", "measured"], ascending=[True, False]).groupby(
        "family").head(1)
    first = smallest.set_index("family").loc[table.family].set_index(table.index)
    others = ~table.index.isin(smallest.index)
    table["calibrated"] = (table.ratio / first.ratio).where(others)
    table["weak"] = (first.measured / table.measured).where(others)
    table["median"] = [table.mfu[table.project != row.project].median() * row.peak_tokens
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


def memory_errors(runs: list[Run]) -> pandas.DataFrame:
    """Return a row per run with its memory: predicted / measured, by what was measured."""
    rows = []
    for run in runs:
        if run.memory_kind:
            memory = rank_memory(run.model, run.layout, run.software)
            predicted = {"allocated": memory.allocated, "reserved": memory.reserved,
                         "nvidia-smi": memory.in_use}[run.memory_kind]
            rows.append({"project": run.project, "kind": run.memory_kind, "memory": memory,
                         "gpu": run.gpu, "out_of_memory": run.out_of_memory,
                         "ratio": predicted / run.memory_gib / 2**30 if run.memory_gib else None})
    return pandas.DataFrame(rows)
