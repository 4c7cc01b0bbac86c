"""Interactive controls: sliders, and a frame-by-frame player.

Without a kernel, as on a web page, and in an untrusted notebook each shows its initial state.
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

from tools.style import DPI, reduce_colors

VIEW = "application/vnd.jupyter.widget-view+json"


def choice(name: str, *values: object, first: object = None) -> ipywidgets.Widget:
    """Return a slider over values of any type, initially at `first`."""
    return ipywidgets.SelectionSlider(
        options=values, value=values[0] if first is None else first, description=name,
        continuous_update=False, layout={"width": "45%"}, style={"description_width": "40%"})


def moved(draw: Callable[..., Figure], **controls: ipywidgets.Widget) -> None:
    """Show the figure that draw(**values) returns; redraw it when a control is moved."""
    def redraw():
        figure = draw(**{name: control.value for name, control in controls.items()})
        plt.close(figure)  # or Jupyter shows it twice
        return figure

    row = ipywidgets.HBox(list(controls.values()))
    names = ", ".join(control.description for control in controls.values())
    text = f"Open this notebook in JupyterLab to use the controls: {names}"
    display({VIEW: row._repr_mimebundle_()[VIEW], "text/plain": text}, raw=True)
    shown = display(redraw(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: shown.update(redraw()), "value")


def player(frames: list[Figure]) -> HTML:
    """Return an HTML player that shows one frame at a time, with buttons and a slider.

    It works within the page, without a kernel or a network.
    """
    pictures = []
    for frame in frames:
        drawn = io.BytesIO()
        frame.savefig(drawn, format="png", dpi=DPI)
        plt.close(frame)
        pictures.append(base64.b64encode(reduce_colors(drawn.getvalue())).decode())
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
