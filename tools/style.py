"""The style of all figures, on pages and in notebooks: size, text, and colours with one meaning.

A figure is WIDTH inches wide and shown at 96 pixels per inch. Its smallest text, of TEXT points, is
then 18.7 pixels high: readable from the last row on a projector of 1280 x 800.
"""

import io
import textwrap

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

WIDTH = 9  # inches
TEXT, TITLE = 14, 16  # points
DPI = 200  # sharp at twice the size

# Okabe and Ito's colours, Tol's, and ColorBrewer's: distinguishable for the colour-blind.
RANK_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442")
COMMUNICATION, ABSENT = "#404040", "#E6E6E6"  # ABSENT: also grid lines and areas
MEASURED, PREDICTED, IDEAL = "#000000", "#D55E00", "#8C8C8C"  # IDEAL: the upper bound
STEP = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73",
        "all-reduce": COMMUNICATION, "waits": ABSENT, "data": "#BBCC33"}
LIBRARIES = {"one process": "#000000", "Horovod": "#D55E00", "DDP": "#0072B2",
             "DeepSpeed": "#009E73", "FSDP": "#CC79A7"}
CHAPTERS = {"01_single_node": "one process", "02_horovod": "Horovod",
            "02_horovod/main_tf.py": "Horovod", "03_ddp": "DDP",
            "04_deepspeed": "DeepSpeed", "05_zero": "DeepSpeed", "05_zero/fsdp.py": "FSDP",
            "05_zero/two_d.py": "FSDP"}
ALGORITHM_COLORS = {"everyone_to_everyone": "#0072B2", "reduce_and_broadcast": "#009E73",
                    "ring": "#D55E00", "gloo": "#CC79A7", "mpi": "#000000"}  # of all-reduce
RULE_COLORS = {"best rate": "#000000", "linear rule": "#D55E00", "constant rate": "#0072B2"}
STAGE_COLORS = ("#BDBDBD", "#9ECAE1", "#4292C6", "#08519C")  # of ZeRO
ROLE_COLORS = {"parameters": "#332288", "gradients": "#882255", "master copy": "#44AA99",
               "optimizer state": "#DDCC77", "activations": "#CC6677"}  # of memory
GPU_COLORS = {"A100-SXM-40GB": "#999933", "A100-SXM-80GB": "#661100", "H100-SXM-80GB": "#AA4499"}
COUNT_COLORS = ("#ADA8D3", "#756BB1", "#3F007D")  # of GPUs, each ten times the one before

matplotlib.rcParams.update({
    "font.size": TEXT, "axes.titlesize": TITLE, "figure.titlesize": TITLE, "axes.labelsize": TEXT,
    "xtick.labelsize": TEXT, "ytick.labelsize": TEXT, "legend.fontsize": TEXT,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "lines.linewidth": 2.5, "lines.markersize": 8, "figure.dpi": 96})


def reduce_colors(png: bytes) -> bytes:
    """Return the PNG with 128 colours, a third of the bytes, to keep notebooks small in git."""
    image = Image.open(io.BytesIO(png))
    reduced = io.BytesIO()
    quantized = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    quantized.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def make_figure(height: float, rows: int = 1, columns: int = 1, title: str = "", **grid: object):
    """Return a figure `height` inches high, and its axes; `grid` goes to Figure.subplots."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.subplots(rows, columns, **grid)


def add_footer(figure: Figure, text: str) -> None:
    """Add text at the bottom: what was measured, where and how often."""
    figure.supxlabel(textwrap.fill(text, 84), x=0.01, ha="left", fontsize=TEXT, color=COMMUNICATION)
