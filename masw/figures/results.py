"""Figures of result tables: the accept rule on a toy vocabulary, learning curves, and methods beside each other."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from masw.figures.base import COLOURS, Drawn, canvas, cell, empty, grid, ink, method_bar, on, paper, style, titled
from masw.figures.timing import sweep
from masw.metrics import NOT_APPLICABLE


def accept_rule(rows: Sequence[Mapping[str, Any]], *, template: str = "light") -> Drawn:
    """Accept rule on a toy vocabulary. Rows: `token`, `p`, `q`, `emitted` (exact), `broken` (exact), and `drawn` (share of

    seeded draws) with `n`.
    """
    title = "What the accept rule emits"
    if not rows:
        return empty(title, "No vocabulary.", template=template)
    figure = canvas(title, x="token", y="probability", template=template)
    tokens = [str(r["token"]) for r in rows]
    series = (
        ("p", "p, the target", COLOURS["accepted"], ""),
        ("q", "q, the draft", COLOURS["slot"], "/"),
        ("emitted", "emitted, accept rule", COLOURS["bonus"], "x"),
        ("broken", "emitted, broken rule", COLOURS["rejected"], "\\"),
    )
    for key, name, colour, hatch in series:
        figure.add_bar(
            x=tokens,
            y=[r[key] for r in rows],
            name=name,
            marker={"color": colour, "pattern": {"shape": hatch, "fgcolor": "#333333", "size": 6, "solidity": 0.2}},
        )
    drawn = [r for r in rows if r.get("drawn") is not None]
    if drawn:
        figure.add_scatter(
            x=[str(r["token"]) for r in drawn],
            y=[r["drawn"] for r in drawn],
            mode="markers",
            name=f"drawn {drawn[0]['n']:,} times",
            marker={"color": ink(template), "symbol": "diamond-open", "size": 9},
        )
    figure.update_layout(barmode="group")
    tv = {key: sum(abs(r[key] - r["p"]) for r in rows) / 2 for key in ("emitted", "broken", "q")}
    return Drawn(
        figure,
        "One round on a toy vocabulary, computed exactly. The broken rule draws its correction from p instead of norm(max(0, p - q)).",
        f"Total variation to p: accept rule {tv['emitted']:.2e}, broken rule {tv['broken']:.3f}, the draft alone {tv['q']:.3f}.",
        [dict(r) for r in rows],
    )


def training_curve(
    records: Mapping[str, Sequence[Mapping[str, Any]]], *, value: str = "agreement", smooth: int = 20, template: str = "light"
) -> Drawn:
    """Learning curves from training logs (docs/TRAINING.md): held-out measures as marks, single steps averaged over `smooth` as thin lines.

    `value` is a field that both `step` and the rows of `measure` have: agreement, nll or kl.
    """
    units = {
        "agreement": "agreement with the full-KV draft (%)",
        "nll": "next-token loss (nats)",
        "kl": "KL to the full-KV draft (nats)",
    }
    called = {"agreement": "agreement", "nll": "next-token loss", "kl": "KL"}[value]
    title, scale = f"Learning curve: {called}", 100 if value == "agreement" else 1
    figure = canvas(title, x="trained tokens (thousands)", y=units[value], template=template)
    table: list[dict[str, Any]] = []
    for i, (name, lines) in enumerate(records.items()):
        look = style(i)
        steps = [r for r in lines if r.get("kind") == "step" and r.get(value) is not None]
        xs, ys = _averaged(steps, value, smooth)
        if xs:
            figure.add_scatter(
                x=[x / 1e3 for x in xs],
                y=[scale * y for y in ys],
                mode="lines",
                name=f"{name}, training" + (f" (mean of {smooth} logged steps)" if smooth > 1 else ""),
                line={"width": 1, "color": look["line"]["color"]},
                opacity=0.6,
            )
        window: float | None = None
        rows_alone = 0
        points: list[tuple[int, float, int]] = []
        for r in (r for r in lines if r.get("kind") == "measure"):
            mine = [row for row in r["rows"] if row["method"] == "masw"]
            alone = [row for row in r["rows"] if row["method"] == "window"]
            if mine:
                points.append((r["tokens"], sum(row[value] for row in mine) / len(mine), sum(row["n"] for row in mine)))
            if alone:
                window, rows_alone = sum(row[value] for row in alone) / len(alone), sum(row["n"] for row in alone)
        if points:
            figure.add_scatter(
                x=[t / 1e3 for t, _, _ in points],
                y=[scale * y for _, y, _ in points],
                mode="lines+markers",
                name=f"{name}, held out",
                **look,
            )
            table += [{"run": name, "tokens": t, "measure": "held out, masw", value: y, "n": n} for t, y, n in points]
        if window is not None:
            figure.add_scatter(
                x=[0, max((t for t, _, _ in points), default=0) / 1e3],
                y=[scale * window] * 2,
                mode="lines",
                name=f"{name}, window alone",
                line={"color": look["line"]["color"], "dash": "dot", "width": 1},
            )
            table.append(
                {"run": name, "tokens": NOT_APPLICABLE, "measure": "held out, window alone", value: window, "n": rows_alone}
            )
        table += [{"run": name, "tokens": x, "measure": "training", value: y, "n": smooth} for x, y in zip(xs, ys, strict=True)]
    if not table:
        return empty(title, "The log has no step and no measure yet.", template=template)
    held = [r for r in table if r["measure"] == "held out, masw"]
    said = "; ".join(
        f"{name}: {scale * mine[0][value]:.1f} at {mine[0]['tokens']:,} tokens, {scale * mine[-1][value]:.1f} at "
        f"{mine[-1]['tokens']:,}"
        for name in records
        if (mine := [r for r in held if r["run"] == name])
    )
    return Drawn(
        figure,
        f"Held-out measures (marks; mean over sets, W and r) and the training steps between them ({units[value]}). Steps "
        f"differ in W, r and kind of row. Measured.",
        f"Held out {said}." if said else "Only training steps are recorded.",
        table,
    )


def _averaged(steps: Sequence[Mapping[str, Any]], value: str, width: int) -> tuple[list[int], list[float]]:
    xs, ys = [], []
    for i in range(0, len(steps), width):
        part = steps[i : i + width]
        xs.append(int(part[-1]["tokens"]))
        ys.append(sum(float(r[value]) for r in part) / len(part))
    return xs, ys


def method_bars(
    rows: Sequence[Mapping[str, Any]],
    value: str,
    *,
    unit: str,
    group: str | None = None,
    title: str = "",
    template: str = "light",
) -> Drawn:
    """Methods beside each other. Rows: `method`, `value`, optionally `low` and `high` (spread or interval), `n`, and `group`

    (context, set).
    """
    title = title or titled(f"{value} by method")
    rows = [r for r in rows if r.get(value) is not None]
    if not rows:
        return empty(title, "No method has this number yet.", template=template)
    figure = canvas(
        title,
        x={"context": "context (tokens)"}.get(group or "", group or "method"),
        y=f"{value} ({unit})" if unit else value,
        template=template,
    )
    for name in dict.fromkeys(str(r["method"]) for r in rows):
        mine = [r for r in rows if r["method"] == name]
        bars = (
            {
                "type": "data",
                "symmetric": False,
                "array": [r["high"] - r[value] for r in mine],
                "arrayminus": [r[value] - r["low"] for r in mine],
                "color": ink(template),
            }
            if all(r.get("low") is not None for r in mine)
            else None
        )
        figure.add_bar(
            x=[str(r[group]) for r in mine] if group else [name],
            y=[r[value] for r in mine],
            name=name,
            marker=(marker := method_bar(name)),
            error_y=bars,
            text=[f"{r[value]:.3g}" for r in mine],
            insidetextfont={"color": on(marker["color"])},
            textposition="inside",
            insidetextanchor="start",
        )
    figure.update_layout(barmode="group")
    best = max(rows, key=lambda r: r[value])
    return Drawn(
        figure,
        f"{value}{f' ({unit})' if unit else ''} by method; whiskers where a row has a spread.",
        f"{len(rows)} rows; the largest is {best['method']} with {best[value]:.4g} {unit}.",
        [dict(r) for r in rows],
    )


def method_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    *,
    title: str = "Methods beside each other",
    template: str = "light",
) -> Drawn:
    """A result table as a figure. `columns` maps fields to headings with units; default: all fields. A cell that is None was not
    measured; NOT_APPLICABLE stands where there is nothing to measure."""
    import plotly.graph_objects as go

    if not rows:
        return empty(title, "No rows.", template=template)
    names = dict(columns or {name: name for name in dict.fromkeys(k for r in rows for k in r)})
    cells = {n: [html.unescape(cell(r.get(n))) for r in rows] for n in names}
    # As wide as the longest word of a column (of prose: as a short line), for a name that is cut names nothing; a page that is narrower
    # had better scroll.
    widths = [
        2
        + max(
            *(len(word) for text in (h, *cells[n]) for word in text.split() or [""]), *(min(len(text), 34) for text in cells[n])
        )
        for n, h in names.items()
    ]

    heads = [1.2 if len(h) > 3 else 1.0 for h in names.values()]  # bold letters are wider
    widths = [
        max(w, 2 + math.ceil(b * max(map(len, h.split() or [""])))) for w, b, h in zip(widths, heads, names.values(), strict=True)
    ]

    def height(texts: Sequence[str]) -> int:
        """Of a row, px: lines break at words, so that a cell may take one more than its length says."""
        return 10 + 17 * max(
            1, *(len(wrap(text, max(1, w - 1), break_on_hyphens=False)) for text, w in zip(texts, widths, strict=True))
        )

    tall = height(list(names.values())) + sum(height(row) for row in zip(*cells.values(), strict=True))
    figure = canvas(title, template=template, height=90 + tall, meta={"min_width": 8 * sum(widths)})
    figure.add_trace(
        go.Table(
            columnwidth=widths,
            header={
                "values": [f"<b>{cell(h)}</b>" for h in names.values()],
                "fill_color": grid(template),
                "font": {"color": ink(template)},
                "align": "left",
            },
            cells={
                "values": [[cell(r.get(n)) for r in rows] for n in names],
                "fill_color": paper(template),
                "font": {"color": ink(template)},
                "align": "left",
                "height": 26,
            },
        )
    )
    figure.update_layout(margin={"l": 12, "r": 12, "b": 12})
    dash = any(r.get(n) == NOT_APPLICABLE for r in rows for n in names)
    return Drawn(
        figure,
        title + (f". {NOT_APPLICABLE}: does not apply to this row." if dash else ""),
        f"A table of {len(rows)} rows and the columns {', '.join(names.values())}.",
        [{h: r.get(n) for n, h in names.items()} for r in rows],
    )


def acceptance_by_context(
    rows: Sequence[Mapping[str, Any]], *, value: str = "acceptance", unit: str = "share of drafts", template: str = "light"
) -> Drawn:
    """How acceptance (or tokens per iteration) holds up as the prefix grows, by method: where EAGLE-style heads and windows

    fall. Rows: `method`, `context`, the value.
    """
    return sweep(
        rows,
        "context",
        value,
        x_title="prefix (tokens)",
        y_title=f"{value} ({unit})",
        source="measured",
        title="Acceptance against prefix length",
        template=template,
    )
