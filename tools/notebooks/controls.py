"""What an audience moves: sliders above a figure, and frames that are turned like pages.

Each shows its first state where nobody can move it: without a kernel, on a web page, in a notebook that is not trusted.
"""

import base64
import json
from collections.abc import Callable
from inspect import cleandoc

import ipywidgets
from IPython.display import HTML, display

from tools.style import WIDTH, Picture

VIEW = "application/vnd.jupyter.widget-view+json"


def choice(name: str, *values: object, first: object = None) -> ipywidgets.Widget:
    """A slider over these values, which may be of any kind; it begins at `first`."""
    return ipywidgets.SelectionSlider(
        options=values, value=values[0] if first is None else first, description=name, continuous_update=False,
        layout={"width": "45%"}, style={"description_width": "40%"})


def moved(draw: Callable[..., Picture], **controls: ipywidgets.Widget) -> None:
    """Show draw(**values) below the controls, and again whenever one of them is moved."""
    def now():
        return draw(**{name: control.value for name, control in controls.items()})

    row = ipywidgets.HBox(list(controls.values()))
    names = ", ".join(control.description for control in controls.values())
    display({VIEW: row._repr_mimebundle_()[VIEW], "text/plain": f"To be moved in JupyterLab: {names}"}, raw=True)
    shown = display(now(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: shown.update(now()), "value")


def player(frames: list[Picture]) -> HTML:
    """The frames one at a time, turned by buttons and a slider within the page: no kernel and no network."""
    pictures = [base64.b64encode(frame.png()).decode() for frame in frames]
    turn = ("const box = this.closest('div'), slider = box.querySelector('input');"
            "if (this !== slider) slider.value = +slider.value + +this.value;"
            "box.querySelector('img').src = 'data:image/png;base64,'"
            " + JSON.parse(box.querySelector('script').textContent)[slider.value];")
    style = 'style="font-size: 20px; vertical-align: middle; padding: 2px 16px"'
    return HTML(cleandoc(f"""
        <div>
        <button value="-1" onclick="{turn}" {style}>&#9664;</button>
        <input type="range" min="0" max="{len(frames) - 1}" value="0" oninput="{turn}" style="width: 400px">
        <button value="1" onclick="{turn}" {style}>&#9654;</button><br>
        <img width="{round(96 * WIDTH)}" src="data:image/png;base64,{pictures[0]}">
        <script type="application/json">{json.dumps(pictures)}</script>
        </div>"""))
