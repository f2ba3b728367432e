"""Where the time goes, and when a draft pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from masw import cost
from masw.figures.base import Drawn, canvas, describe_run, empty, ink, log_axes, method_style, style, titled
from masw.metrics import summarise
from masw.trace import Trace

PARTS = ("prefill", "draft", "verify", "upkeep", "other")
_COLOUR = dict(zip(PARTS, ("#555555", "#E69F00", "#0072B2", "#CC79A7", "#DDDDDD"), strict=True))
_HATCH = dict(zip(PARTS, ("", "/", "", "x", "."), strict=True))


def rounds_ms(trace: Trace) -> list[dict[str, float]]:
    """Milliseconds of each step of the run by part: prefill chunks first, then rounds. `other` is a round's time that no part claims."""
    found: list[dict[str, float]] = [{"round": 0, "prefill": e.ms} for e in trace.of("prefill")]
    for emit in trace.of("emit"):
        mine = [e for e in trace.events if e.round == emit.round]
        part = {k: sum(e.ms for e in mine if e.kind == k) for k in ("draft", "verify", "upkeep")}
        found.append({"round": emit.round, **part, "other": max(0.0, emit.ms - sum(part.values()))})
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """10th percentile, median and 90th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[1], cuts[9], cuts[17]


def step_latency(trace: Trace, *, template: str = "light") -> Drawn:
    """Stacked time of every round by part; the last bar has the medians and the whisker the p10 to p90 of whole rounds."""
    title = "Time of each round"
    rounds = [r for r in rounds_ms(trace) if r["round"]]
    if not rounds:
        return empty(title, "No round was finished.", template=template)
    figure = canvas(title, x="round (target verify pass)", y="time (ms)", template=template)
    used = [p for p in PARTS[1:] if any(r.get(p, 0) > 0 for r in rounds)]
    for part in used:
        figure.add_bar(
            x=[r["round"] for r in rounds],
            y=[r[part] for r in rounds],
            name=part,
            marker=_marker(part),
            hovertemplate="round %{x}: " + part + " %{y:.1f} ms<extra></extra>",
        )
    totals = [sum(r[p] for p in used) for r in rounds]
    low, middle, high = spread(totals)
    # Named in the legend: words on the lines would cover bars, the slowest rounds' among them.
    ends = [rounds[0]["round"] - 0.5, rounds[-1]["round"] + 0.5]
    for value, dash, label in ((low, "dot", "p10"), (middle, "solid", "median"), (high, "dash", "p90")):
        figure.add_scatter(
            x=ends,
            y=[value, value],
            mode="lines",
            line={"color": ink(template), "width": 1.5, "dash": dash},
            name=f"{label} {value:.1f} ms",
            hoverinfo="name",
        )
    figure.update_layout(barmode="stack", bargap=0.05)
    prefill = {who: sum(e.ms for e in trace.of("prefill", who)) for who in ("target", "draft") if trace.of("prefill", who)}
    table: list[dict[str, Any]] = [
        {"part": f"prefill {who}", "n": len(trace.of("prefill", who)), "total ms": ms} for who, ms in prefill.items()
    ]
    for part in used:
        values = [r[part] for r in rounds]
        p10, median, p90 = spread(values)
        table.append({"part": part, "n": len(values), "p10 ms": p10, "median ms": median, "p90 ms": p90, "total ms": sum(values)})
    table.append(
        {
            "part": "round",
            "n": len(rounds),
            "p10 ms": low,
            "median ms": middle,
            "p90 ms": high,
            "total ms": sum(sum(r[p] for p in used) for r in rounds),
        }
    )
    once = ", ".join(f"{who} {ms / 1e3:.2f} s" for who, ms in prefill.items())
    return Drawn(
        figure,
        f"Measured, {describe_run(trace.header)}; on "
        f"{trace.header.get('provenance', {}).get('device', 'an unknown device')}. Before the first round, "
        f"prefill{f': {once}' if once else ' was shared with an earlier run'}.",
        f"{len(rounds)} rounds take {middle:.0f} ms in the median (p10 {low:.0f}, p90 {high:.0f}), "
        + ", ".join(f"{p} {spread([r[p] for r in rounds])[1]:.1f} ms" for p in used)
        + " of it.",
        table,
    )


def latency_parts(traces: Mapping[str, Trace], *, template: str = "light") -> Drawn:
    """Median round of each method, stacked by part, with the p10 to p90 of whole rounds."""
    title = "A median round by method"
    figure = canvas(title, x="method", y="time of a round (ms)", template=template)
    table: list[dict[str, Any]] = []
    for name, trace in traces.items():
        rounds = [r for r in rounds_ms(trace) if r["round"]]
        if rounds:
            total = spread([sum(r[p] for p in PARTS[1:]) for r in rounds])
            table.append(
                {
                    "method": name,
                    "n": len(rounds),
                    **{f"{p} ms": spread([r[p] for r in rounds])[1] for p in PARTS[1:]},
                    "round p10 ms": total[0],
                    "round median ms": total[1],
                    "round p90 ms": total[2],
                }
            )
    if not table:
        return empty(title, "No round was finished.", template=template)
    for part in PARTS[1:]:
        figure.add_bar(x=[r["method"] for r in table], y=[r[f"{part} ms"] for r in table], name=part, marker=_marker(part))
    figure.add_scatter(
        x=[r["method"] for r in table],
        y=[r["round median ms"] for r in table],
        mode="markers",
        name="whole round, p10 to p90",
        marker={"color": ink(template), "symbol": "line-ew-open", "size": 12},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [r["round p90 ms"] - r["round median ms"] for r in table],
            "arrayminus": [r["round median ms"] - r["round p10 ms"] for r in table],
            "color": ink(template),
        },
    )
    figure.update_layout(barmode="stack")
    return Drawn(
        figure,
        "Measured. Bars stack the medians of the parts; the mark is the median of whole rounds, its whisker p10 to p90.",
        "; ".join(f"{r['method']}: {r['round median ms']:.0f} ms over {r['n']} rounds" for r in table) + ".",
        table,
    )


def speedup_rows(traces: Mapping[str, Trace], reference: str = "none") -> list[dict[str, Any]]:
    """One row a method: costs, tokens per iteration, speed-up measured against the autoregressive trace and predicted from the costs."""
    if reference not in traces:
        return []
    alone = summarise(traces[reference])
    step, rows = alone.verify_ms, []
    for name, trace in traces.items():
        s = summarise(trace)
        if name == reference or not (
            step and s.verify_ms and s.tokens_per_iteration and s.tokens_per_second and alone.tokens_per_second
        ):
            continue
        gamma = len(trace.of("draft")) / s.rounds  # drafted tokens a round, as they were
        draft = s.draft_ms or 0.0
        rows.append(
            {
                "method": name,
                "gamma": gamma,
                "draft ms": draft,
                "verify ms": s.verify_ms,
                "step ms": step,
                "n": s.rounds,
                "tokens per iteration": s.tokens_per_iteration,
                "measured speed-up": s.tokens_per_second / alone.tokens_per_second,
                "predicted speed-up": cost.speedup(s.tokens_per_iteration, gamma, draft, s.verify_ms, step),
            }
        )
    return rows


def speedup_curve(rows: Sequence[Mapping[str, Any]], *, template: str = "light") -> Drawn:
    """Speed-up against tokens per iteration: the model as lines, measured points, and the region where drafting loses. Rows:

    `speedup_rows`.
    """
    title = "When does a draft pay?"
    if not rows:
        return empty(title, "It needs a drafted run and the autoregressive one.", template=template)
    most = max(max(r["gamma"], r["tokens per iteration"] - 1) for r in rows) + 1
    figure = canvas(title, x="tokens per iteration", y="speed-up over autoregressive (x)", template=template)
    ceiling = max(
        1.6,
        *(r["measured speed-up"] * 1.15 for r in rows),
        *(cost.speedup(most, r["gamma"], r["draft ms"], r["verify ms"], r["step ms"]) for r in rows),
    )
    figure.add_hrect(
        y0=0,
        y1=1,
        fillcolor="#D55E00",
        opacity=0.12,
        line_width=0,
        annotation={"text": "slower than no draft", "font": {"size": 12, "color": ink(template)}},
        annotation_position="bottom right",
    )
    figure.add_hline(y=1, line={"color": ink(template), "width": 1})
    for r in rows:
        look = method_style(str(r["method"]))
        xs = [1 + i * (most - 1) / 24 for i in range(25)]
        figure.add_scatter(
            x=xs,
            y=[cost.speedup(x, r["gamma"], r["draft ms"], r["verify ms"], r["step ms"]) for x in xs],
            mode="lines",
            name=f"{r['method']}, predicted",
            line=look["line"],
        )
        figure.add_scatter(
            x=[r["tokens per iteration"]],
            y=[r["measured speed-up"]],
            mode="markers",
            name=f"{r['method']}, measured",
            marker={**look["marker"], "size": 13, "line": {"width": 1, "color": ink(template)}},
        )
    figure.update_xaxes(range=[0.9, most + 0.1])
    figure.update_yaxes(range=[0, min(ceiling, 1.6 * max(1.6, *(r["measured speed-up"] for r in rows)))])
    said = ", ".join(
        f"{r['method']} {r['measured speed-up']:.2f}x at {r['tokens per iteration']:.2f} tokens per iteration (predicted "
        f"{r['predicted speed-up']:.2f}x)"
        for r in rows
    )
    return Drawn(
        figure,
        "Lines: tokens per iteration / (gamma t_d / t_t + t_verify / t_t) with each method's own median costs (predicted). "
        "Marks: decode speed over that of the autoregressive run (measured).",
        f"Measured: {said}. Below 1 drafting costs more than it saves.",
        [dict(r) for r in rows],
    )


def latency_by_context(rows: Sequence[Mapping[str, Any]], *, template: str = "light") -> Drawn:
    """A decode step against the context, with floor lines. Rows: `method`, `context`, `ms` (median), `p10_ms`, `p90_ms`, `n`,

    `floor_ms` (predicted: bytes read / measured bandwidth).
    """
    title = "Decode step against context"
    if not rows:
        return empty(title, "No rows.", template=template)
    figure = canvas(title, x="context (tokens)", y="time of one step (ms)", template=template)
    for name in dict.fromkeys(str(r["method"]) for r in rows):
        mine, look = sorted((r for r in rows if r["method"] == name), key=lambda r: r["context"]), method_style(name)
        figure.add_scatter(
            x=[r["context"] for r in mine],
            y=[r["ms"] for r in mine],
            mode="lines+markers",
            name=f"{name}, measured",
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [r["p90_ms"] - r["ms"] for r in mine],
                "arrayminus": [r["ms"] - r["p10_ms"] for r in mine],
                "thickness": 1.2,
            },
            **look,
        )
        floor = [r for r in mine if r.get("floor_ms") is not None]
        figure.add_scatter(
            x=[r["context"] for r in floor],
            y=[r["floor_ms"] for r in floor],
            mode="lines",
            name=f"{name}, floor (predicted)",
            line={"color": look["line"]["color"], "dash": "dot", "width": 1},
        )
    log_axes(figure, [int(r["context"]) for r in rows])
    figure.update_yaxes(rangemode="tozero")
    ends = [
        max((r for r in rows if r["method"] == n), key=lambda r: r["context"]) for n in dict.fromkeys(r["method"] for r in rows)
    ]
    return Drawn(
        figure,
        "Median of single-token forwards, whiskers p10 to p90 (measured). Dotted: bytes that a step must read over the "
        "measured read bandwidth (predicted floor).",
        "At the longest context: "
        + ", ".join(f"{r['method']} {r['ms']:.1f} ms at {r['context']:,} tokens (n {r['n']})" for r in ends)
        + ".",
        [dict(r) for r in rows],
    )


def first_token(traces: Mapping[str, Trace], *, template: str = "light") -> Drawn:
    """Time to the first token, stacked: both prefills and the first round. A prefill that an earlier run shared is taken from it."""
    title = "Time to the first token"
    shared = next((sum(e.ms for e in t.of("prefill", "target")) for t in traces.values() if t.of("prefill", "target")), None)
    table: list[dict[str, Any]] = []
    for name, trace in traces.items():
        emits, own = trace.of("emit"), sum(e.ms for e in trace.of("prefill", "target"))
        if emits and shared is not None:
            table.append(
                {
                    "method": name,
                    "target prefill ms": own or shared,
                    "draft prefill ms": sum(e.ms for e in trace.of("prefill", "draft")),
                    "first round ms": emits[0].ms,
                    "shared": not own,
                }
            )
    if not table:
        return empty(title, "No run got to its first token.", template=template)
    figure = canvas(title, x="method", y="time (s)", template=template)
    for part, marker in (
        ("target prefill", _marker("verify")),
        ("draft prefill", _marker("draft")),
        ("first round", _marker("upkeep")),
    ):
        figure.add_bar(x=[r["method"] for r in table], y=[r[f"{part} ms"] / 1e3 for r in table], name=part, marker=marker)
    figure.update_layout(barmode="stack")
    return Drawn(
        figure,
        "Measured; on one device the two prefills run one after the other, so their times add up. Runs over one prompt share "
        "the target's prefill, which is then counted from the run that did it.",
        "; ".join(
            f"{r['method']} {(r['target prefill ms'] + r['draft prefill ms'] + r['first round ms']) / 1e3:.2f} s" for r in table
        )
        + ".",
        table,
    )


def sweep(
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    *,
    x_title: str,
    y_title: str,
    by: str = "method",
    source: str = "predicted",
    title: str = "",
    template: str = "light",
) -> Drawn:
    """One quantity against one knob (S, W, r, gamma, context), a line for each value of `by`. Rows may carry `n`, `low` and

    `high`; titles carry units.
    """
    title = title or titled(f"{y_title} against {x_title}")
    rows = [r for r in rows if r.get(y) is not None]
    if not rows:
        return empty(title, "No rows.", template=template)
    figure = canvas(title, x=x_title, y=y_title, template=template)
    for i, name in enumerate(dict.fromkeys(str(r[by]) for r in rows)):
        mine = sorted((r for r in rows if str(r[by]) == name), key=lambda r: r[x])
        bars = (
            {
                "type": "data",
                "symmetric": False,
                "array": [r["high"] - r[y] for r in mine],
                "arrayminus": [r[y] - r["low"] for r in mine],
                "thickness": 1.2,
            }
            if all(r.get("low") is not None for r in mine)
            else None
        )
        look = method_style(name) if by == "method" else style(i)
        figure.add_scatter(x=[r[x] for r in mine], y=[r[y] for r in mine], mode="lines+markers", name=name, error_y=bars, **look)
    least, most = min(r[x] for r in rows), max(r[x] for r in rows)
    if least == 0 and most >= 16:  # no place on a logarithmic axis: steps of equal width
        steps = sorted({r[x] for r in rows})
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=[str(step) for step in steps])
        figure.for_each_trace(lambda line: line.update(x=[str(value) for value in line.x]))
    elif most >= 16 * max(1, least):
        log_axes(figure, [int(r[x]) for r in rows])
    best, worst = max(rows, key=lambda r: r[y]), min(rows, key=lambda r: r[y])
    return Drawn(
        figure,
        f"{y_title} ({source}) against {x_title}, a line for each {by}.",
        f"Largest: {best[y]:,.4g} at {best[x]} ({best[by]}); smallest: {worst[y]:,.4g} at {worst[x]} ({worst[by]}).",
        [dict(r) for r in rows],
    )


def _marker(part: str) -> dict[str, Any]:
    return {
        "color": _COLOUR[part],
        "pattern": {"shape": _HATCH[part], "fgcolor": "#333333", "size": 6, "solidity": 0.2},
        "line": {"width": 0},
    }
