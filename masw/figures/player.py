"""The step-through with a live kernel: play, slider, previous, next and speed. For JupyterLab; a page uses the figure's own slider."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from masw.figures.base import CONFIG, CONTROLS, Drawn

SPEEDS = {"slow": 1200, "normal": 500, "fast": 120}  # ms a step


def play(drawn: Drawn, on: bool = True) -> None:
    """Shows a player for a figure with frames; does nothing when `on` is false, so that a notebook can leave it to a parameter.

    It draws each frame into an output area: a `FigureWidget` would store megabytes of script in the notebook.
    """
    if not on:
        return
    import json

    import ipywidgets as widgets
    from IPython.display import display

    last = len(drawn.figure.frames) - 1
    labels = [step.label for step in drawn.figure.layout.sliders[0].steps]
    runner = widgets.Play(min=0, max=last, step=1, interval=SPEEDS["normal"], description="play")
    slider = widgets.IntSlider(min=0, max=last, description="step", continuous_update=False)
    back, ahead = (
        widgets.Button(description="previous", icon="step-backward"),
        widgets.Button(description="next", icon="step-forward"),
    )
    speed = widgets.Dropdown(options=SPEEDS, value=SPEEDS["normal"], description="speed")
    label, area = widgets.Label(), widgets.Output()
    widgets.jslink((runner, "value"), (slider, "value"))
    widgets.jslink((speed, "value"), (runner, "interval"))

    def draw(index: int) -> None:
        label.value = labels[index]
        made = {**json.loads(still(drawn.figure, index).to_json()), "config": CONFIG}
        area.clear_output(wait=True)
        with area:
            display({"application/vnd.plotly.v1+json": made, "text/plain": labels[index]}, raw=True)

    def move(by: int) -> Any:
        return lambda _: setattr(slider, "value", min(last, max(0, slider.value + by)))

    back.on_click(move(-1))
    ahead.on_click(move(1))
    slider.observe(lambda change: draw(change["new"]), "value")
    display(widgets.VBox([widgets.HBox([runner, back, ahead, slider, speed]), label, area]))
    draw(0)


def still(figure: go.Figure, index: int) -> go.Figure:
    """The figure as frame `index` shows it, without slider and buttons."""
    made = go.Figure(data=figure.data, layout=figure.layout)
    made.update_layout(sliders=[], updatemenus=[], margin={"b": 60}, height=max(220, (figure.layout.height or 400) - CONTROLS))
    frame = figure.frames[index]
    for which, data in zip(frame.traces or range(len(frame.data)), frame.data, strict=True):
        made.data[which].update({k: v for k, v in data.to_plotly_json().items() if k != "type"})
    return made
