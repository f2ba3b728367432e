"""Bytes of the draft's memory: over a run, against the context length, and by each knob of its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from masw.config import MemoryShape
from masw.figures.base import Drawn, canvas, empty, log_axes, method_style, style
from masw.timeline import entry_bytes, shape_of, steps
from masw.trace import Trace

MIB = 2**20


def memory_bytes(traces: Mapping[str, Trace], *, template: str = "light") -> Drawn:
    """Bytes that each draft holds after every step, measured from its events, beside the formula and an uncompressed cache."""
    title = "Draft memory over the run"
    figure = canvas(title, x="raw tokens read", y="KV bytes of the draft (MiB)", template=template)
    table: list[dict[str, Any]] = []
    for name, trace in traces.items():
        shape, size, found = shape_of(trace), entry_bytes(trace), steps(trace)
        if shape is None or size is None or not found:
            continue
        look = method_style(name)
        measured = [s for s in found if s.bytes]
        predicted = [shape.entries(s.tokens) * size for s in measured]
        figure.add_scatter(
            x=[s.tokens for s in measured],
            y=[s.bytes / MIB for s in measured],
            mode="markers",
            name=f"{name}, measured",
            marker={**look["marker"], "size": 6},
        )
        figure.add_scatter(
            x=[s.tokens for s in measured],
            y=[p / MIB for p in predicted],
            mode="lines",
            name=f"{name}, predicted",
            line=look["line"],
        )
        table += [
            {
                "method": name,
                "step": s.index,
                "raw tokens read": s.tokens,
                "measured bytes": s.bytes,
                "predicted bytes": p,
                "full cache bytes": s.tokens * size,
            }
            for s, p in zip(measured, predicted, strict=True)
            if s.kind != "draft"
        ]
    if not table:
        return empty(title, "No draft holds a memory in these runs.", template=template)
    last = {row["method"]: row for row in table}
    said = "; ".join(
        f"{m} {r['measured bytes'] / MIB:.1f} MiB, {r['measured bytes'] / r['full cache bytes']:.0%} of a full cache"
        for m, r in last.items()
    )
    return Drawn(
        figure,
        "Live KV bytes of the draft after each step (measured from the memory's own counts) beside the formula (S + W + "
        "floor(t / r)) x bytes of one entry (predicted).",
        f"At the end: {said}.",
        table,
    )


def memory_by_context(rows: Sequence[Mapping[str, Any]], *, template: str = "light") -> Drawn:
    """Bytes against context length. Rows: `method`, `context`, `predicted_bytes`, and `measured_bytes` where there is a measurement.

    This is also the memory calculator's curve: `masw.figures.calculator` makes such rows from a shape.
    """
    title = "KV memory against context length"
    if not rows:
        return empty(title, "No rows.", template=template)
    figure = canvas(title, x="context (tokens)", y="KV bytes (MiB)", template=template)
    measured = False
    for i, name in enumerate(dict.fromkeys(str(r["method"]) for r in rows)):
        mine = sorted((r for r in rows if r["method"] == name), key=lambda r: r["context"])
        look = style(i)
        figure.add_scatter(
            x=[r["context"] for r in mine],
            y=[r["predicted_bytes"] / MIB for r in mine],
            mode="lines",
            name=f"{name}, predicted",
            line=look["line"],
        )
        points = [r for r in mine if r.get("measured_bytes") is not None]
        if points:
            measured = True
            figure.add_scatter(
                x=[r["context"] for r in points],
                y=[r["measured_bytes"] / MIB for r in points],
                mode="markers",
                name=f"{name}, measured",
                marker=look["marker"],
            )
    log_axes(figure, [int(r["context"]) for r in rows])
    figure.update_yaxes(type="log", dtick=1)
    top = max(rows, key=lambda r: (r["context"], r["predicted_bytes"]))
    return Drawn(
        figure,
        "KV bytes allocated to reach a context: predicted from the model's shape"
        + (" (lines) and measured from allocated buffers (marks)" if measured else "")
        + ". Both axes are logarithmic.",
        f"Lines rise with the context; the largest is {top['method']} with {top['predicted_bytes'] / MIB:,.0f} MiB at "
        f"{top['context']:,} tokens.",
        [dict(r) for r in rows],
    )


def calculator(entry: int, shapes: Mapping[str, MemoryShape], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Rows for `memory_by_context`: bytes allocated for each shape, `entry` bytes an entry."""
    return [
        {
            "method": name,
            "context": t,
            "entries": shape.capacity(t),
            "predicted_bytes": shape.capacity(t) * entry,
            "share of full": shape.capacity(t) / t,
        }
        for name, shape in shapes.items()
        for t in contexts
    ]


def break_even(shape: MemoryShape, most: int = 2**20) -> int | None:
    """Shortest context from which the compact memory allocates fewer entries than a full one; None when it never does."""
    low, high = 1, most
    if shape.capacity(high) >= high:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if shape.capacity(middle) < middle else (middle + 1, high)
    return low


def knob_rows(shape: MemoryShape, knob: str, values: Sequence[int], tokens: Sequence[int], entry: int) -> list[dict[str, Any]]:
    """Rows for `sweep`: bytes allocated when one knob (sinks, window, stride) varies, for each context in `tokens`."""
    rows = []
    for value in values:
        varied = replace(shape, **{knob: value})
        rows += [
            {
                knob: value,
                "context": f"{t:,} tokens",
                "entries": varied.capacity(t),
                "mib": varied.capacity(t) * entry / MIB,
                "share": 100 * varied.capacity(t) / t,
            }
            for t in tokens
        ]
    return rows
