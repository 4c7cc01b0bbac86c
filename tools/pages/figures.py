"""Draw the pages' figures from records, into assets/figures."""

import base64
import json
import re

import nbformat

from cluster.launch import ROOT
from cluster.records import FIGURES as FOLDER
from cluster.records import RECORDS, read_records
from tools import style
from tools.measuring import demo


def trace():
    """Draw when the CPU launches three steps of chapter 1 and when the GPU computes them."""
    record = json.loads((RECORDS / "trace_h200.json").read_text())
    colors = ("#525252", "#969696", "#737373")  # of neighbouring steps; greys have no other meaning
    figure, axis = style.make_figure(
        3.2, title="256 images in TF32: the CPU runs ahead, the GPU has no gaps")
    first = min(start for row, _, start, _ in record["steps"] if row == "GPU")
    step_before = ["GPU", 4, record["kernels"][0][0], first]  # launched before the profile began
    for row, step, start, end in [step_before, *record["steps"]]:
        y = ["GPU", "CPU"].index(row)
        axis.barh(y, (end - start) / 1000, 0.6, start / 1000, color=colors[int(step) % 3])
        axis.annotate(f"step {int(step) + 1}", ((start + end) / 2000, y), ha="center", va="center",
                      color="white")
    axis.set(yticks=[0, 1], yticklabels=["GPU computes", "CPU launches"], xlabel="milliseconds")
    style.add_footer(figure, "ResNet-50, 224 pixels, on one NVIDIA H200, with the profiler on")
    return figure


def ladder():
    """Draw the images/s of ResNet-50 with one change after the other that makes a GPU faster."""
    log = (RECORDS / "gpu_first.txt").read_text()
    compile_log = re.search(r"== compile\s+\((\d+\.\d+)", (RECORDS / "gpu_third.txt").read_text())
    changes = {"TF32": "TF32", "+ channels last": "TF32, channels last",
               "+ bf16": "bf16, channels last"}
    speeds = {label: float(re.search(rf"^{name} +(\S+) images/s", log, re.M)[1])
              for label, name in changes.items()} | {"+ compile": float(compile_log[1])}
    figure, axis = style.make_figure(4.4)
    bars = axis.bar(list(speeds), list(speeds.values()), color=style.MEASURED)
    axis.bar_label(bars, [f"{speed:,.0f}\n{speed / speeds['TF32']:.1f} times"
                          for speed in speeds.values()])
    axis.set(ylabel="images/s", ylim=(0, 8200))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    style.add_footer(figure, "ResNet-50, 224 pixels, 256 images per batch, one NVIDIA H200, "
                     "PyTorch 2.11; the last bar from another session")
    return figure


def loops():
    """Draw three steps of chapter 1's loop that reads its images itself, and with workers."""
    figure, axis = style.make_figure(
        3.4, title="Who reads the images? The loop itself, or two workers")
    records = read_records("loops.jsonl")
    for row, record in enumerate(records):
        for name, start, end in record["spans"]:
            axis.barh(row, (end - start) / 1000, 0.6, start / 1000, color=style.STEP[name])
    for name in ("data", "forward", "backward", "optimizer"):
        axis.barh(0, 0, color=style.STEP[name], label=name)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=4)
    axis.set(yticks=range(len(records)), xlabel="milliseconds",
             yticklabels=[f"num_workers={record['workers']}" for record in records])
    axis.invert_yaxis()
    style.add_footer(figure, "Three steps of chapter 1's network on two CPU cores, with the "
                     "profiler on; 64 images are a batch, and each takes 1 ms to read")
    return figure


FIGURES = {
    "trace.png": trace,
    "ladder.png": ladder,
    "loops.png": loops,
    "demo.png": lambda: demo.draw(read_records("demo.jsonl"))}
FROM_NOTEBOOKS = {  # {figure: (notebook, first line of the cell that draws it)}
    "batch_size.png": ("01_single_node/batch_size.ipynb", "# Draw the throughput of"),
    "mlperf.png": ("03_ddp/scaling.ipynb", "# Draw the three factors"),
    "zero.png": ("05_zero/memory.ipynb", "# Draw what was counted, and the formula"),
    "scaling.png": ("03_ddp/scaling.ipynb", "# Draw the images/s of each rank")}


def read_figure(notebook, first_line):
    """Return the picture, as bytes, that a notebook shows below a cell."""
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    cell = next(cell for cell in cells if cell.source.startswith(first_line))
    png = next(output.data["image/png"] for output in cell.outputs if "image/png" in output.data)
    return base64.b64decode(png)


def main():
    """Save every figure into assets/figures."""
    for name, draw in FIGURES.items():
        draw().savefig(FOLDER / name, dpi=style.DPI)
    for name, (notebook, first_line) in FROM_NOTEBOOKS.items():
        (FOLDER / name).write_bytes(read_figure(notebook, first_line))
