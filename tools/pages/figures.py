"""Draw the pages' figures from records, into assets/figures."""

import base64
import json

import nbformat
import pandas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cluster.launch import ROOT
from cluster.records import FIGURES as FOLDER
from cluster.records import RECORDS, read_records
from tools import style
from tools.measuring import demo, reading
from tools.measuring.zero import ROLES, total


def zero():
    """Draw a rank's bytes per parameter in chapter 5, bf16, by stage: counted, and by formula."""
    records = [record for record in read_records("zero.jsonl")
               if record["precision"] == "bf16" and record["chapter"] == "05_zero"]
    figure, axes = style.make_figure(4.6, 1, 3, sharey=True)
    for axis, ranks in zip(axes, (1, 2, 4)):
        selected = [record for record in records if record["ranks"] == ranks]
        for record in selected:
            stage, parameters = record["stage"], record["parameters"]
            memory, height = max(record["memory"], key=total), 0
            for role in ROLES:
                size = memory[role] / parameters
                axis.bar(stage, size, 0.7, height, color=style.ROLE_COLORS[role])
                height += size
            expected = total(record["memory_formula"]) / parameters
            paper = 4 + 12 / ranks if stage == 1 and ranks > 1 else expected
            if paper > expected:  # ZeRO's paper keeps other ranks' gradients
                axis.plot([stage - 0.45, stage + 0.45], [paper] * 2, "--", color=style.IDEAL, lw=2)
            axis.plot([stage - 0.45, stage + 0.45], [expected] * 2, color=style.PREDICTED, lw=2)
            axis.annotate(f"{height:.3g}", (stage, height), (0, -6), textcoords="offset points",
                          ha="center", va="top")
        axis.set(title=f"{ranks} rank{'s' * (ranks > 1)}", xlabel="stage", xticks=range(4),
                 yticks=range(0, 17, 4), ylim=(0, 18.5))
    axes[0].set_ylabel("bytes per parameter")
    entries = {role: Patch(color=style.ROLE_COLORS[role]) for role in ROLES}
    entries["formula"] = Line2D([], [], color=style.PREDICTED, lw=2)
    style.add_title_and_legend(
        figure, "What a rank holds between backward and optimizer step", entries)
    style.add_footer(
        figure, "Counted on a CPU, on the rank that holds most: bf16, "
        f"{records[0]['parameters']:,} parameters. Dashed: at stage 1 ZeRO's paper keeps other "
        "ranks' gradients, which DeepSpeed drops.")
    return figure


def trace():
    """Draw when the CPU launches three steps of chapter 1 and when the GPU computes them."""
    record = json.loads((RECORDS / "trace_h200.json").read_text())
    colors = ("#525252", "#969696", "#737373")  # of neighbouring steps; greys have no other meaning
    figure, axis = style.make_figure(3.2, 1, 1)
    for row, step, start, end in record["steps"]:
        y = ["GPU", "CPU"].index(row)
        axis.barh(y, (end - start) / 1000, 0.6, start / 1000, color=colors[int(step) % 3])
        axis.annotate(f"step {int(step) + 1}", ((start + end) / 2000, y), ha="center", va="center",
                      color="white")
    axis.set(yticks=[0, 1], yticklabels=["GPU computes", "CPU launches"], xlabel="milliseconds")
    style.add_title_and_legend(figure, "The CPU runs ahead, and the GPU never waits", {})
    style.add_footer(
        figure, "ResNet-50, 224 pixels, 256 images per batch, TF32, on one NVIDIA H200")
    return figure


FIGURES = {
    "zero.png": zero, "trace.png": trace,
    "demo.png": lambda: demo.draw(read_records("demo.jsonl")),
    "read_data.png": lambda: reading.draw(pandas.DataFrame(read_records("read_data.jsonl")))}
FROM_NOTEBOOKS = {  # {figure: (notebook, first line of the cell that draws it)}
    "batch_size.png": ("01_single_node/batch_size.ipynb", "# Draw the throughput, and"),
    "scaling.png": ("03_ddp/scaling.ipynb", "# Draw the efficiency of two and four ranks")}


def read_figure(notebook, first_line):
    """Return the picture, as bytes, that a notebook shows below a cell."""
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    cell = next(cell for cell in cells if cell.source.startswith(first_line))
    return base64.b64decode(cell.outputs[0].data["image/png"])


def main():
    """Save every figure into assets/figures."""
    for name, draw in FIGURES.items():
        draw().savefig(FOLDER / name, dpi=style.DPI)
    for name, (notebook, first_line) in FROM_NOTEBOOKS.items():
        (FOLDER / name).write_bytes(read_figure(notebook, first_line))
