"""How every figure looks, on the pages and in the notebooks: its size, its text, and one colour for one meaning.

A figure is WIDTH inches wide and shown at 96 pixels an inch. Then its smallest text, of TEXT points, is 18.7 pixels
high, which the last row can read on a projector of 1280 x 800.
"""

import io
import textwrap

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

WIDTH = 9  # inches
TEXT, TITLE = 14, 16  # points
DPI = 200  # so that it stays sharp at twice the size

RANKS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito's: the colour-blind tell them apart, too
COMMUNICATION, ABSENT = "#404040", "#E6E6E6"
MEASURED, PREDICTED, IDEAL = "#000000", "#D55E00", "#8C8C8C"  # points, lines, and what cannot be beaten
STEP = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73", "all-reduce": COMMUNICATION}
LIBRARIES = {"one process": "#000000", "Horovod": "#D55E00", "DDP": "#0072B2", "DeepSpeed": "#009E73",
             "FSDP": "#CC79A7"}
CHAPTERS = {"01_single_node": "one process", "01_single_node/main_tf.py": "one process",
            "02_horovod/pytorch": "Horovod", "02_horovod/tensorflow": "Horovod", "03_ddp": "DDP",
            "04_deepspeed": "DeepSpeed", "05_zero": "DeepSpeed", "05_zero/fsdp.py": "FSDP"}
WAYS = {"everyone_to_everyone": "#0072B2", "reduce_and_broadcast": "#009E73", "ring": "#D55E00", "gloo": "#CC79A7",
        "mpi": "#000000"}  # of all-reduce
PARALLEL = {"data": "#4477AA", "tensor": "#C43C4E", "pipeline": "#228833"}  # ways to share a network; like Tol's bright
RULES = {"best rate": "#000000", "linear rule": "#D55E00", "constant rate": "#0072B2"}  # for another batch size
STAGES = ("#BDBDBD", "#9ECAE1", "#4292C6", "#08519C")  # of ZeRO
ROLES = {"parameters": "#332288", "gradients": "#882255", "master copy": "#44AA99", "optimizer state": "#DDCC77",
         "activations": "#CC6677"}  # of memory; Tol's muted colours
GPUS = {"A100-SXM-40GB": "#999933", "A100-SXM-80GB": "#117733", "H100-SXM-80GB": "#882255"}  # of MLPerf; Tol's
TIME = {"useful": "#92C5DE", "stragglers": "#F4A259", "communication": COMMUNICATION,
        "failures": "#B2182B"}  # where that of many GPUs goes
CACHE = {"warm": "#EE7733", "cold": "#33BBEE"}  # a file in the kernel's memory, or on the disk alone

matplotlib.rcParams.update({
    "font.size": TEXT, "axes.titlesize": TITLE, "figure.titlesize": TITLE, "axes.labelsize": TEXT,
    "xtick.labelsize": TEXT, "ytick.labelsize": TEXT, "legend.fontsize": TEXT, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "lines.linewidth": 2.5, "lines.markersize": 8})


class Picture(Figure):
    """A figure that a notebook shows WIDTH inches wide; opaque, so that it can be read on a dark page, too."""

    def __init__(self, *args, facecolor="white", **options):
        super().__init__(*args, facecolor=facecolor, **options)

    def png(self) -> bytes:
        """With 128 colours, which nobody sees, and a third of the bytes: notebooks are under version control."""
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        few = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        few.save(small, format="png", optimize=True)
        return small.getvalue()

    def _repr_png_(self):  # IPython's own hook
        width, height = self.get_size_inches()
        return self.png(), {"width": round(96 * width), "height": round(96 * height)}


def picture(height: float, rows: int = 1, columns: int = 1, title: str = "", **grid: object) -> tuple:
    """A Picture of this height in inches, and its axes: one, or an array of them. `grid` is for Figure.subplots."""
    figure = Picture(figsize=(WIDTH, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.subplots(rows, columns, **grid)


def head(figure: Figure, title: str, entries: dict, **options: object) -> None:
    """The title, and a legend in one line below it, where figure.suptitle leaves no room. entries: artists by label."""
    look = {"ncols": len(entries), "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 1.3, "borderpad": 0,
            "borderaxespad": 0.46}
    figure.legend(entries.values(), entries.keys(), loc="outside upper left", title=title, title_fontsize=TITLE,
                  alignment="left", **look | options)
    figure.get_layout_engine().set(h_pad=0.08)  # inches


def foot(figure: Figure, text: str) -> None:
    """What was measured, where and how often, under everything."""
    figure.supxlabel(textwrap.fill(text, 84), x=0.01, ha="left", fontsize=TEXT, color=COMMUNICATION)
