"""Interactive controls for an audience: sliders, and a frame-by-frame player.

Each shows its first state where nobody can move it: without a kernel, on a web page, in a notebook
that is not trusted.
"""

import base64
import io
import json
from collections.abc import Callable
from inspect import cleandoc

import ipywidgets
from IPython.display import HTML, display
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from tools.style import DPI, small

VIEW = "application/vnd.jupyter.widget-view+json"


def choice(name: str, *values: object, first: object = None) -> ipywidgets.Widget:
    """Return a slider over these values, which may be of any kind; it begins at `first`."""
    return ipywidgets.SelectionSlider(
        options=values, value=values[0] if first is None else first, description=name,
        continuous_update=False, layout={"width": "45%"}, style={"description_width": "40%"})


def moved(draw: Callable[..., Figure], **controls: ipywidgets.Widget) -> None:
    """Show the figure that draw(**values) returns, and again whenever a control is moved."""
    def now():
        figure = draw(**{name: control.value for name, control in controls.items()})
        plt.close(figure)  # or Jupyter shows it again at the end of the cell
        return figure

    row = ipywidgets.HBox(list(controls.values()))
    names = ", ".join(control.description for control in controls.values())
    text = f"To be moved in JupyterLab: {names}"
    display({VIEW: row._repr_mimebundle_()[VIEW], "text/plain": text}, raw=True)
    shown = display(now(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: shown.update(now()), "value")


def player(frames: list[Figure]) -> HTML:
    """Return the frames as one at a time, turned by buttons and a slider.

    That works within the page: it needs no kernel and no network.
    """
    pictures = []
    for frame in frames:
        drawn = io.BytesIO()
        frame.savefig(drawn, format="png", dpi=DPI)
        plt.close(frame)
        pictures.append(base64.b64encode(small(drawn.getvalue())).decode())
    width = round(96 * frames[0].get_figwidth())
    turn = ("const box = this.closest('div'), slider = box.querySelector('input');"
            "if (this !== slider) slider.value = +slider.value + +this.value;"
            "box.querySelector('img').src = 'data:image/png;base64,'"
            " + JSON.parse(box.querySelector('script').textContent)[slider.value];")
    style = 'style="font-size: 20px; vertical-align: middle; padding: 2px 16px"'
    slider = f'type="range" min="0" max="{len(frames) - 1}" value="0" style="width: 400px"'
    return HTML(cleandoc(f"""
        <div>
        <button value="-1" onclick="{turn}" {style}>&#9664;</button>
        <input {slider} oninput="{turn}">
        <button value="1" onclick="{turn}" {style}>&#9654;</button><br>
        <img width="{width}" src="data:image/png;base64,{pictures[0]}">
        <script type="application/json">{json.dumps(pictures)}</script>
        </div>"""))
