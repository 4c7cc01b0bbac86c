"""Interactive controls for notebooks: sliders, and a frame-by-frame player.

Without a kernel, as on a web page, and in an untrusted notebook, a control shows its initial state.
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
STYLE = "<style>.controls { --jp-widgets-font-size: 18px }</style>"  # as large as a figure's text


def make_slider(name: str, *options: object, value: object = None) -> ipywidgets.Widget:
    """Return a slider over options of any type; `value` is the initial one, default the first."""
    return ipywidgets.SelectionSlider(
        options=options, value=options[0] if value is None else value, description=name,
        continuous_update=False, layout={"width": "47%"}, style={"description_width": "initial"})


def interact(draw: Callable[..., Figure], **sliders: ipywidgets.Widget) -> None:
    """Show the figure that draw(**values) returns; redraw it when a slider moves."""
    def redraw():
        figure = draw(**{name: slider.value for name, slider in sliders.items()})
        plt.close(figure)  # otherwise Jupyter shows the figure twice
        return figure

    style = ipywidgets.HTML(STYLE, layout={"display": "none"})
    layout = {"flex_flow": "row wrap", "justify_content": "space-between"}  # two in a row
    row = ipywidgets.HBox([style, *sliders.values()], layout=layout)
    row.add_class("controls")
    names = ", ".join(slider.description for slider in sliders.values())
    text = f"Run this cell in JupyterLab to use the controls: {names}"
    view = {"version_major": 2, "version_minor": 0, "model_id": row.model_id}
    display({VIEW: view, "text/plain": text}, raw=True)
    output = display(redraw(), display_id=True)
    for slider in sliders.values():
        slider.observe(lambda _: output.update(redraw()), "value")


def make_player(frames: list[Figure]) -> HTML:
    """Return an HTML player with buttons and a slider, which needs no kernel and no network."""
    pictures = []
    for frame in frames:
        buffer = io.BytesIO()
        frame.savefig(buffer, format="png", dpi=DPI)
        plt.close(frame)
        png = reduce_colors(buffer.getvalue())
        pictures.append(base64.b64encode(png).decode())
    width = round(96 * frames[0].get_figwidth())
    on_input = ("const box = this.closest('div'), slider = box.querySelector('input');"
            "if (this !== slider) slider.value = +slider.value + +this.value;"
            "box.querySelector('img').src = 'data:image/png;base64,'"
            " + JSON.parse(box.querySelector('script').textContent)[slider.value];")
    style = 'style="font-size: 20px; vertical-align: middle; padding: 2px 16px"'
    slider = f'type="range" min="0" max="{len(frames) - 1}" value="0" style="width: 400px"'
    return HTML(cleandoc(f"""
        <div>
        <button value="-1" onclick="{on_input}" {style}>&#9664;</button>
        <input {slider} oninput="{on_input}">
        <button value="1" onclick="{on_input}" {style}>&#9654;</button><br>
        <img width="{width}" src="data:image/png;base64,{pictures[0]}">
        <script type="application/json">{json.dumps(pictures)}</script>
        </div>"""))
