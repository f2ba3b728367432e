"""What the draft's layers do with a slot: its attention, and how far its projections are from the frozen ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from masw.figures.base import GLYPHS, MEANING, SERIES, Drawn, canvas, empty, ink, swatch


def slot_attention(profile: Mapping[str, Any], *, template: str = "light") -> Drawn:
    """What one slot attends to, and who attends to it later.

    `profile`: `slot` (number), `position`, `stride`, `keys` ([{`name`, `kind`, `position`, `share`}]) and `later` ([{`position`, `share`}]);
    shares are means over layers and heads.
    """
    from plotly.subplots import make_subplots

    keys, later = profile["keys"], profile["later"]
    title = f"Slot {profile['slot']}: what it reads, and who reads it"
    frame = canvas(title, template=template, height=620)
    figure = make_subplots(
        rows=2, cols=1, subplot_titles=("what it attends to", "who attends to it later"), vertical_spacing=0.24
    )
    figure.update_layout(frame.layout)
    for kind in ("sink", "window", "slot"):
        mine = [k for k in keys if k["kind"] == kind]
        if mine:
            figure.add_bar(
                x=[k["name"] for k in mine],
                y=[100 * k["share"] for k in mine],
                marker=swatch(kind, template),
                name=f"{GLYPHS[kind]} {MEANING[kind]}",
                hovertext=[f"{k['name']} (position {k['position']}): {100 * k['share']:.2f} %" for k in mine],
                hoverinfo="text",
                row=1,
                col=1,
            )
    figure.add_scatter(
        x=[r["position"] for r in later],
        y=[100 * r["share"] for r in later],
        mode="lines+markers",
        name="raw tokens after it",
        line={"color": SERIES[0]},
        marker={"size": 6, "color": SERIES[0]},
        row=2,
        col=1,
    )
    axis = frame.layout.xaxis.to_plotly_json()
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(**{k: v for k, v in axis.items() if k != "title"})
    figure.update_xaxes(title_text="key", categoryorder="array", categoryarray=[k["name"] for k in keys], row=1, col=1)
    figure.update_xaxes(title_text="position of the reader (tokens)", row=2, col=1)
    figure.update_yaxes(title_text="attention (%)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="attention to the slot (%)", rangemode="tozero", row=2, col=1)
    figure.update_layout(margin={"t": 130})
    by_kind = {kind: sum(k["share"] for k in keys if k["kind"] == kind) for kind in ("sink", "window", "slot")}
    mean = sum(r["share"] for r in later) / max(1, len(later))
    return Drawn(
        figure,
        f"Attention of slot {profile['slot']} (position {profile['position']}), mean over all layers and heads, and "
        f"attention paid to it by later raw tokens. {profile.get('note', '')}".strip(),
        "The slot gives "
        + ", ".join(
            f"{100 * v:.1f} % to {MEANING[k]}s" if k != "window" else f"{100 * v:.1f} % to the window" for k, v in by_kind.items()
        )
        + f"; later raw tokens give it {100 * mean:.2f} % on average.",
        [{"direction": "slot attends to", "key": k["name"], "position": k["position"], "share": k["share"]} for k in keys]
        + [
            {"direction": "attends to the slot", "key": f"x{r['position']}", "position": r["position"], "share": r["share"]}
            for r in later
        ],
    )


def projection_distance(rows: Sequence[Mapping[str, Any]], *, note: str = "", template: str = "light") -> Drawn:
    """How far mirrored projections are from the frozen ones. Rows: `layer`, `key`, `value`: relative Frobenius distances."""
    title = "Mirrored against frozen projections"
    if not rows:
        return empty(title, "No layers.", template=template)
    figure = canvas(title, x="layer", y="distance from the copy (% of its norm)", template=template)
    for i, (field, label) in enumerate((("key", "keys W_K,g"), ("value", "values W_V,g"))):
        figure.add_bar(
            x=[r["layer"] for r in rows],
            y=[100 * r[field] for r in rows],
            name=label,
            marker={"color": SERIES[i], "pattern": {"shape": ["", "\\"][i], "fgcolor": ink(template)}},
        )
    figure.update_layout(barmode="group")
    mean = {f: 100 * sum(r[f] for r in rows) / len(rows) for f in ("key", "value")}
    return Drawn(
        figure,
        f"Norm of (mirrored minus frozen) over the norm of the frozen matrix, layer by layer; 0 is the copy that training "
        f"starts from. {note}".strip(),
        f"Over {len(rows)} layers keys moved by {mean['key']:.1f} % and values by {mean['value']:.1f} % of their norm on average.",
        [dict(r) for r in rows],
    )
