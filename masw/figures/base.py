"""What every figure shares: colours, glyphs, layout, the step-through, and the record that a figure function returns."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

CONFIG = {"showSendToCloud": False, "displaylogo": False}  # plotly's "share" button would upload the data

# The palette with the largest separation over normal, protan, deutan and tritan sight; a glyph says the same without colour.
COLOURS = {
    "accepted": "#0072B2", "rejected": "#D55E00", "correction": "#F0E442", "bonus": "#56B4E9", "pending": "#555555",
    "prompt": "#DDDDDD", "target": "#BBBBBB",
    "sink": "#000000", "slot": "#E69F00", "selected": "#009E73", "window": "#56B4E9", "tentative": "#CC79A7", "evicted": "#DDDDDD",
}  # fmt: skip
GLYPHS = {
    "accepted": "✓", "rejected": "✗", "correction": "↻", "bonus": "+", "pending": "…", "prompt": "¶", "target": "=",
    "sink": "▼", "slot": "◆", "selected": "★", "window": "■", "tentative": "?", "evicted": "×",
}  # fmt: skip
MEANING = {
    "sink": "sink",
    "slot": "memory slot",
    "selected": "prompt entry kept by attention",
    "window": "raw token in the window",
    "tentative": "drafted, may be rolled back",
    "evicted": "evicted",
}  # of the states of a cache entry
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888", "#999933")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
AXIS, CONTROLS = 72, 166  # px below a plot for its axis and, under that, the step-through
METHOD_ORDER = ("none", "full", "masw", "window", "snapkv", "hybrid", "eagle", "lookup")
RELATIVES = {
    "hf": ("none", "x"),
    "hf-assisted": ("full", "x"),
    "masw-untrained": ("masw", "."),
    "window-equal": ("window", "."),
}  # of a method, with the hatch of their bars: outside peers, and the same memory in another state

_INK = {"light": "#1a1a1a", "dark": "#f0f0f0"}
_PAPER = {"light": "#ffffff", "dark": "#15181c"}
_GRID = {"light": "#e2e2e2", "dark": "#3a3f46"}
WHITE_TEXT = ("#0072B2", "#555555", "#000000")


@dataclass(frozen=True)
class Drawn:
    """A figure and what it says to someone who cannot see it. `table` holds the same numbers, a row a dict (cells are plain text)."""

    figure: go.Figure
    caption: str
    alt: str
    table: list[dict[str, Any]] = field(repr=False)


def cell(value: Any) -> str:
    """One table cell as escaped HTML; a missing value is said, never shown as 0."""
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return html.escape(str(value)).replace("&quot;", "&#34;").replace("$", "&#36;")


def ink(template: str) -> str:
    return _INK[_known(template)]


def grid(template: str) -> str:
    return _GRID[_known(template)]


def paper(template: str) -> str:
    return _PAPER[_known(template)]


def on(colour: str) -> str:
    """Text colour that reads on `colour`."""
    return "#ffffff" if colour in WHITE_TEXT else "#000000"


def titled(text: str) -> str:
    """With a capital: titles are made from axis titles, which have none."""
    return text[:1].upper() + text[1:]


def canvas(title: str, *, x: str = "", y: str = "", template: str = "light", height: int = 420, **layout: Any) -> go.Figure:
    """An empty figure in the house style; `x` and `y` are axis titles, with units."""
    line = {"gridcolor": grid(template), "zerolinecolor": grid(template), "linecolor": ink(template), "automargin": True}
    figure = go.Figure()
    figure.update_layout(
        template="plotly_dark" if template == "dark" else "plotly_white",
        title={
            "text": title,
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 12, "t": 14},
            "font": {"size": 16},
        },
        font={"family": "system-ui, sans-serif", "size": 13, "color": ink(template)},
        paper_bgcolor=paper(template),
        plot_bgcolor=paper(template),
        colorway=list(SERIES),
        height=height,
        margin={"l": 60, "r": 20, "t": 56, "b": 60},
        # under the title, growing downwards: on a narrow page it takes more lines and pushes the plot, never the title
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1 - 46 / height,
            "yanchor": "top",
            "x": 0,
            "font": {"size": 12},
            "traceorder": "normal",
        },
        hoverlabel={"font": {"family": "ui-monospace, monospace", "size": 12}},
        **layout,
    )
    figure.update_xaxes(title_text=x, **line)
    figure.update_yaxes(title_text=y, **line)
    return figure


def empty(title: str, why: str, *, template: str = "light") -> Drawn:
    """A figure that says in words why there is nothing to draw."""
    figure = canvas(title, template=template, height=180)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=html.escape(why), showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14})
    return Drawn(figure, why, f"{title}: {why}", [])


def legend_entries(figure: go.Figure, names: Iterable[str], labels: Mapping[str, str], template: str = "light") -> None:
    """Legend entries (colour, glyph and words) for bars whose colours are given one by one."""
    for name in names:
        figure.add_bar(
            x=[None], y=[None], name=f"{GLYPHS[name]} {labels.get(name, name)}", marker=swatch(name, template), orientation="h",
            hoverinfo="skip",
        )  # fmt: skip


def swatch(name: str, template: str = "light") -> dict[str, Any]:
    """Marker of a state or fate: colour, an outline where it would drown in the page, hatching for what is gone."""
    marker: dict[str, Any] = {"color": COLOURS[name], "line": {"width": 1, "color": outline(name, template)}}
    if name == "evicted":
        marker["pattern"] = {"shape": "/", "fgcolor": "#777777", "size": 6, "solidity": 0.25}
    return marker


def outline(name: str, template: str = "light") -> str:
    return "#ffffff" if name == "sink" and template == "dark" else "#777777" if COLOURS[name] == "#DDDDDD" else COLOURS[name]


def style(index: int) -> dict[str, Any]:
    """Colour, symbol and dash of a series: three ways to tell it apart."""
    return {
        "line": {"color": SERIES[index % len(SERIES)], "dash": DASHES[index % len(DASHES)], "width": 2},
        "marker": {"color": SERIES[index % len(SERIES)], "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 9},
    }


def _relative(method: str) -> tuple[str, str]:
    """(the method whose colour it has, its hatch); itself and none where it is nobody's relative."""
    return (method.removesuffix("+lookup"), "/") if method.endswith("+lookup") else RELATIVES.get(method, (method, ""))


def method_style(method: str) -> dict[str, Any]:
    """The same style for a method in every figure. A relative of a method (RELATIVES, `X+lookup`) has its colour, and a dash, symbol and
    hatch of its own."""
    of, hatch = _relative(method)
    look = style(METHOD_ORDER.index(of) if of in METHOD_ORDER else sum(map(ord, of)))
    if hatch:
        shift, variant = {"/": (2, "-open"), "x": (3, "-open-dot"), ".": (4, "-dot")}[hatch]
        look["line"]["dash"] = DASHES[(DASHES.index(look["line"]["dash"]) + shift) % len(DASHES)]
        look["marker"]["symbol"] += variant
    return look


def method_bar(method: str) -> dict[str, Any]:
    """The marker of a method's bars: its colour, hatched for a relative of another method."""
    hatch, colour = _relative(method)[1], method_style(method)["line"]["color"]
    return {"color": colour, "pattern": {"shape": hatch, "fgcolor": "#222222", "bgcolor": colour, "size": 7, "solidity": 0.25}}


def stepped(
    figure: go.Figure, frames: Sequence[go.Frame], labels: Sequence[str], what: str = "step", ms: int = 500, shown: int = 0
) -> go.Figure:
    """Adds a slider, play (two speeds), pause, previous and next. Frames live in the figure, so no kernel is needed to step through them.

    `shown`: the frame that the figure itself looks like. A button of plotly can only jump to a frame by name, so each frame brings the
    two step buttons that belong to it.
    """
    last = len(frames) - 1

    def animate(names: list[str] | list[None] | None, duration: int) -> list[Any]:
        # Bars need a redraw, and so do the step buttons.
        timing = {"frame": {"duration": duration, "redraw": True}, "transition": {"duration": 0}, "fromcurrent": True}
        return [names, {**timing, "mode": "immediate"}]

    def step_buttons(at: int) -> list[dict[str, Any]]:
        to = (("◀ previous", max(0, at - 1)), ("next ▶", min(last, at + 1)))
        return [{"label": label, "method": "animate", "args": animate([str(i)], 0)} for label, i in to]

    figure.frames = [
        go.Frame(data=f.data, traces=f.traces, layout={"updatemenus": [{}, {"buttons": step_buttons(i)}]}, name=str(i))
        for i, f in enumerate(frames)
    ]
    players = [("▶ play", animate(None, ms)), ("▶▶ fast", animate(None, ms // 4)), ("❚❚ pause", animate([None], 0))]
    row = {
        "type": "buttons", "direction": "left", "showactive": False, "x": 0, "xanchor": "left", "y": 0, "yanchor": "top",
        "font": {"color": "#1a1a1a", "size": 12}, "bgcolor": "#eeeeee",
    }  # fmt: skip
    figure.update_layout(
        updatemenus=[
            {
                **row,
                "pad": {"t": AXIS, "r": 8},
                "buttons": [{"label": label, "method": "animate", "args": args} for label, args in players],
            },
            {**row, "pad": {"t": AXIS + 38, "r": 8}, "buttons": step_buttons(shown)},
        ],
        sliders=[
            {
                "active": shown, "x": 0, "len": 1.0, "y": 0, "yanchor": "top", "pad": {"t": AXIS + 76, "b": 8}, "ticklen": 0,
                "minorticklen": 0, "font": {"color": "rgba(0,0,0,0)", "size": 1},
                "currentvalue": {"prefix": f"{what} ", "xanchor": "right", "font": {"size": 13, "color": figure.layout.font.color}},
                "steps": [
                    {"label": label, "method": "animate", "args": animate([str(i)], 0)} for i, label in enumerate(labels)
                ],
            }
        ],
    )  # fmt: skip
    figure.update_layout(height=(figure.layout.height or 420) + CONTROLS, margin={"b": 56 + CONTROLS})
    return figure


def log_axes(figure: go.Figure, contexts: Sequence[int]) -> None:
    """A logarithmic context axis with its ticks at powers of two."""
    ticks = [2**i for i in range(max(0, int(math.log2(max(1, min(contexts))))), math.ceil(math.log2(max(2, *contexts))) + 1)]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])


def span(a: int, b: int) -> str:
    """The numbers [a, b) in words: `3`, or `3-7`."""
    return str(a) if b - a == 1 else f"{a}-{b - 1}"


def describe_run(header: Mapping[str, Any]) -> str:
    """Which run a figure shows, for captions."""
    memory = header.get("memory") or {}
    size = ", ".join(f"{s} {memory[k]}" for s, k in (("S", "sinks"), ("W", "window"), ("r", "stride")) if memory.get(k))
    adaptor = header.get("adaptor")
    slots = "" if adaptor is None else ", trained slots" if adaptor.get("file") else ", untrained slots"
    prompt = int(header.get("prompt_tokens", 0))
    return f"{header.get('pair', '?')}, method {header.get('method', '?')}{f' ({size}{slots})' if size else ''}, {prompt:,} prompt tokens"


def _known(template: str) -> str:
    if template not in _INK:
        raise ValueError(f"template must be light or dark, not {template!r}")
    return template
