"""How many drafted tokens were kept: how often, where in a block, when, and what the draft was missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from masw.figures.base import COLOURS, Drawn, canvas, describe_run, empty, ink, method_bar, method_style
from masw.metrics import blocks, wilson
from masw.trace import Trace

NOTHING = "No drafted block was judged."


def acceptance_histogram(trace: Trace, *, template: str = "light") -> Drawn:
    """How many drafts of a block were kept."""
    title = "Accepted drafts in a block"
    judged = blocks(trace)
    if not judged:
        return empty(title, NOTHING, template=template)
    counts = Counter(kept for kept, _ in judged)
    longest = max(drafted for _, drafted in judged)
    table = []
    for kept in range(longest + 1):
        low, high = wilson(counts[kept], len(judged))
        table.append(
            {
                "accepted": kept,
                "blocks": counts[kept],
                "n": len(judged),
                "share": counts[kept] / len(judged),
                "low": low,
                "high": high,
            }
        )
    figure = canvas(title, x="accepted drafts in a block (tokens)", y="share of blocks (%)", template=template)
    figure.add_bar(
        x=[r["accepted"] for r in table],
        y=[100 * r["share"] for r in table],
        error_y=_whiskers(table, template),
        marker=_blue(),
        text=[str(r["blocks"]) for r in table],
        textposition="none",  # under the whiskers nobody could read it
        hovertemplate="%{x} accepted: %{text} blocks, %{y:.1f} %<extra></extra>",
    )
    figure.update_xaxes(tickvals=[r["accepted"] for r in table], ticktext=[f"{r['accepted']}<br>n {r['blocks']}" for r in table])
    mean = sum(kept for kept, _ in judged) / len(judged)
    return Drawn(
        figure,
        f"{len(judged)} blocks ({describe_run(trace.header)}). Whiskers: 95 % Wilson interval; n under the axis are counts.",
        f"Blocks keep {mean:.2f} of up to {longest} drafts on average; {counts[0]} of {len(judged)} keep none, "
        f"{sum(k == d for k, d in judged)} keep all.",
        table,
    )


def acceptance_by_position(traces: Mapping[str, Trace], *, template: str = "light") -> Drawn:
    """Share of drafts kept at each position of a block, of the blocks that drafted it, with n and Wilson interval, by method."""
    title = "Acceptance by position in the block"
    table: list[dict[str, Any]] = []
    figure = canvas(title, x="position in the block (1 = first draft)", y="kept (% of blocks that drafted it)", template=template)
    for name, trace in traces.items():
        judged = blocks(trace)
        rows: list[dict[str, Any]] = []
        for position in range(1, max((d for _, d in judged), default=0) + 1):
            reached = [kept >= position for kept, drafted in judged if drafted >= position]
            low, high = wilson(sum(reached), len(reached))
            rows.append(
                {
                    "method": name,
                    "position": position,
                    "kept": sum(reached),
                    "n": len(reached),
                    "share": sum(reached) / len(reached),
                    "low": low,
                    "high": high,
                }
            )
        if rows:
            look = method_style(name)
            figure.add_scatter(
                x=[r["position"] for r in rows],
                y=[100 * r["share"] for r in rows],
                error_y=_whiskers(rows, template, look["line"]["color"]),
                mode="lines+markers",
                name=f"{name} (n {rows[0]['n']})",
                hovertext=[f"{name}: {r['kept']} of {r['n']}" for r in rows],
                hoverinfo="text+y",
                **look,
            )
            table += rows
    if not table:
        return empty(title, NOTHING, template=template)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 103])
    first = [r for r in table if r["position"] == 1]
    return Drawn(
        figure,
        "A draft counts as kept when it and all before it in its block were kept. n is the number of blocks that drafted "
        "the position (in the legend: position 1); whiskers: 95 % Wilson interval.",
        "Kept at the first position: " + ", ".join(f"{r['method']} {r['share']:.0%} (n {r['n']})" for r in first) + ".",
        table,
    )


def rolling_acceptance(traces: Mapping[str, Trace], *, width: int = 10, template: str = "light") -> Drawn:
    """Acceptance over the answer: share of drafts kept in the last `width` blocks."""
    title = "Acceptance along the answer"
    figure = canvas(
        title, x="position in the answer (emitted tokens)", y=f"drafts kept in the last {width} blocks (%)", template=template
    )
    table: list[dict[str, Any]] = []
    for name, trace in traces.items():
        judged, emits = blocks(trace), {e.round: e for e in trace.of("emit")}
        ends, total = [], 0
        for event in trace.of("accept"):
            if event.round in emits:
                total = emits[event.round].position + emits[event.round].count - int(trace.header.get("prompt_tokens", 0))
                ends.append(total)
        rows: list[dict[str, Any]] = []
        for i, end in enumerate(ends):
            part = judged[max(0, i - width + 1) : i + 1]
            kept, drafted = sum(k for k, _ in part), sum(d for _, d in part)
            if drafted:
                low, high = wilson(kept, drafted)
                rows.append(
                    {
                        "method": name,
                        "emitted tokens": end,
                        "kept": kept,
                        "n": drafted,
                        "share": kept / drafted,
                        "low": low,
                        "high": high,
                    }
                )
        if rows:
            look = method_style(name)
            figure.add_scatter(
                x=[r["emitted tokens"] for r in rows],
                y=[100 * r["share"] for r in rows],
                mode="lines",
                name=name,
                line=look["line"],
            )
            table += rows
    if not table:
        return empty(title, NOTHING, template=template)
    figure.update_yaxes(range=[0, 103])
    overall = {name: blocks(trace) for name, trace in traces.items()}
    said = ", ".join(
        f"{n} {sum(k for k, _ in b) / max(1, sum(d for _, d in b)):.0%}" for n, b in overall.items() if any(d for _, d in b)
    )
    return Drawn(
        figure,
        f"Share of drafted tokens kept in the last {width} blocks; the table has n and the 95 % Wilson interval.",
        f"Over the whole answer drafts are kept: {said}.",
        table,
    )


def failure_distance(rows: Sequence[Mapping[str, Any]], *, template: str = "light") -> Drawn:
    """Where a draft failed and what it would have needed: distance back to the nearest earlier place of the token that was right.

    Rows: `method`, `position`, `distance` (tokens back to the nearest earlier occurrence; None: it is new), `match` (tokens before it
    that agree there: 0 is the bare token, 4 or more is verbatim text).
    """
    title = "What a failed draft would have needed"
    known = [r for r in rows if r.get("distance") is not None]
    if not rows:
        return empty(title, "No draft failed.", template=template)
    figure = canvas(title, x="distance back (tokens)", y="rejections (share, %)", template=template)
    edges = [1, 4, 16, 64, 256, 1024, 4096, 2**20]
    labels = [f"{a}-{b - 1}" if b < 2**20 else f"{a}+" for a, b in pairwise(edges)] + ["new token"]
    table: list[dict[str, Any]] = []
    for name in dict.fromkeys(str(r["method"]) for r in rows):
        mine = [r for r in rows if r["method"] == name]
        for label, a, b in zip(labels, [*edges[:-1], None], [*edges[1:], None], strict=True):
            part = [
                r for r in mine if (r["distance"] is None if a is None else r["distance"] is not None and a <= r["distance"] < b)
            ]
            table.append(
                {
                    "method": name,
                    "distance": label,
                    "rejections": len(part),
                    "n": len(mine),
                    "share": len(part) / len(mine),
                    "of them verbatim (4+ tokens agree)": sum((r.get("match") or 0) >= 4 for r in part),
                }
            )
        own = [r for r in table if r["method"] == name]
        figure.add_bar(
            x=[r["distance"] for r in own],
            y=[100 * r["share"] for r in own],
            name=f"{name} (n {len(mine)})",
            marker=method_bar(name),
            hovertext=[f"{r['rejections']} of {r['n']}, {r['of them verbatim (4+ tokens agree)']} verbatim" for r in own],
            hoverinfo="text+name",
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(categoryorder="array", categoryarray=labels)
    return Drawn(
        figure,
        "For each rejection: how far back the correction stands in prompt and answer. The nearest place is the one where "
        "most of the tokens before it agree; ties go to the nearer.",
        f"Of {len(rows)} rejections {len(rows) - len(known)} needed a token that had not occurred before.",
        table,
    )


def _whiskers(rows: Sequence[Mapping[str, Any]], template: str, colour: str | None = None) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [100 * (r["high"] - r["share"]) for r in rows],
        "arrayminus": [100 * (r["share"] - r["low"]) for r in rows],
        "color": colour or ink(template),
        "thickness": 1.2,
        "width": 4,
    }


def _blue() -> dict[str, Any]:
    return {"color": COLOURS["accepted"]}
