"""The draft's memory: which entry holds what and when, which slot read which token, and what it all weighs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from masw.config import MemoryShape
from masw.figures.base import (
    COLOURS,
    GLYPHS,
    SERIES,
    Drawn,
    canvas,
    describe_run,
    empty,
    ink,
    legend_entries,
    method_style,
    on,
    outline,
    stepped,
    style,
    swatch,
)
from masw.figures.tokens import token_html, visible
from masw.timeline import (
    STATES,
    Step,
    entry_bytes,
    interleaved,
    raw_state,
    readers,
    sees,
    shape_of,
    slot_state,
    state_at,
    steps,
)
from masw.trace import Trace

MEANING = {
    "sink": "sink",
    "slot": "memory slot",
    "selected": "prompt entry kept by attention",
    "window": "raw token in the window",
    "tentative": "drafted, may be rolled back",
    "evicted": "evicted",
}
KIB, MIB = 2**10, 2**20
MOST_FRAMES = 80


def kv_map(
    trace: Trace,
    *,
    rows: int = 120,
    first: int | None = None,
    last: int | None = None,
    play: bool = False,
    template: str = "light",
) -> Drawn:
    """Life of every entry of the draft's memory: a row an entry, the x axis the steps. Bars are runs of one state.

    Entries of raw tokens [first, last) (default: all) and of the slots whose boundary lies among them. Neighbours share a row when
    there are more than `rows`; a row then shows the state of its oldest entry, and the hover says which entries those are.
    """
    title = "KV map: what the draft's memory holds, step by step"
    shape, all_steps = shape_of(trace), steps(trace)
    if shape is None:
        return empty(title, "Nothing is held: no model drafts with this method.", template=template)
    if not all_steps or not any(s.tokens for s in all_steps):
        return empty(title, "The draft has read nothing yet.", template=template)
    most = max(s.tokens for s in all_steps)
    lo, hi = max(0, first or 0), most if last is None else min(last, most)
    groups = _groups(lo, max(lo + 1, hi), max(s.slots for s in all_steps), shape, rows)
    size = entry_bytes(trace)
    runs: list[dict[str, Any]] = []
    for row, (is_slot, a, b) in enumerate(groups):
        runs += _runs(row, is_slot, a, b, all_steps, shape, size)
    kept = next((s for s in all_steps if s.selected), None)
    if kept is not None and lo == 0:  # as many in each layer and head, not the same ones: a row of its own
        run: dict[str, Any] = {"row": len(groups), "entry": f"{kept.selected:,} selected", "state": "selected"}
        run |= {"source tokens": "prompt; differ by layer and head", "from": kept.index, "to": len(all_steps)}
        run |= {"written at step": kept.index, "evicted at step": None}
        runs.append({**run, "bytes": None if size is None else kept.selected * size})
    if not runs:
        return empty(title, "The draft has read nothing of this range yet.", template=template)
    figure = canvas(
        title,
        x="step (chunk read, token drafted, round settled)",
        y="entry, by raw token position",
        template=template,
        height=max(320, min(720, 150 + 5 * len(groups))),
    )
    for state in STATES:
        mine = [r for r in runs if r["state"] == state]
        if mine:
            figure.add_bar(
                y=[r["row"] for r in mine],
                base=[r["from"] - 0.5 for r in mine],
                x=[r["to"] - r["from"] for r in mine],
                orientation="h",
                width=1.0 if len(groups) > 60 else 0.86,
                marker=swatch(state, template) if len(groups) <= 60 else {**swatch(state, template), "line": {"width": 0}},
                name=f"{GLYPHS[state]} {MEANING[state] if state != 'window' or shape.window is not None else 'raw token'}",
                hovertext=[_run_text(r) for r in mine],
                hoverinfo="text",
            )
    figure.add_scatter(
        x=[len(all_steps) - 1] * 2,
        y=[-0.5, len(groups) - 0.5],
        mode="lines",
        line={"color": ink(template), "width": 1, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
        name="cursor",
    )
    every = max(1, len(groups) // 14)
    ticks, extra = list(range(0, len(groups), every)), runs[-1]["state"] == "selected"
    labels = [_name(*groups[i]) for i in ticks] + ["selected"] * extra
    ticks += [len(groups)] * extra
    figure.update_yaxes(tickvals=ticks, ticktext=labels, range=[len(groups) - 0.5 + extra, -0.5], showgrid=False)
    figure.update_xaxes(range=[-0.5, len(all_steps) - 0.5], tickformat="d")
    figure.update_layout(barmode="overlay", bargap=0)
    prefills = sum(s.kind == "prefill" for s in all_steps)
    if prefills and prefills < len(all_steps):
        figure.add_vline(
            x=prefills - 0.5,
            line={"color": ink(template), "width": 1},
            annotation={"text": "drafting starts", "font": {"size": 11}},
        )
    if play:
        _cursor(figure, all_steps, len(groups))
    end = all_steps[-1]
    grouped = (
        f" Each row stands for up to {max(b - a for _, a, b in groups)} neighbours."
        if any(b - a > 1 for _, a, b in groups)
        else ""
    )
    return Drawn(
        figure,
        f"Every entry from the step that wrote it to the step that dropped it ({describe_run(trace.header)}).{grouped}"
        + ("" if size is None else f" One entry takes {size:,} bytes over all layers."),
        f"Rows are cache entries, columns are {len(all_steps)} steps. At the end the draft has read {end.tokens:,} tokens and holds "
        f"{end.tokens - end.evicted:,} of them raw and {end.slots:,} slots; {end.evicted:,} raw tokens have been evicted.",
        [{k: v for k, v in r.items() if k != "row"} for r in runs],
    )


def _groups(lo: int, hi: int, slots: int, shape: MemoryShape, rows: int) -> list[tuple[bool, int, int]]:
    """(is slot, first, behind last) of each row: sinks, then slots by number, then raw tokens, the last window of them in finer rows."""
    compact = shape.window is not None
    found = [(False, i, i + 1) for i in range(lo, min(shape.sinks, hi))] if compact else []
    stride = shape.stride or 0
    numbers = range(max(1, -(-(lo + 1) // stride)), min(slots, hi // stride) + 1) if stride else range(0)
    start = max(lo, shape.sinks if compact else 0)
    tail = max(start, hi - (shape.window or 0) - 64) if compact else hi
    parts = [(True, numbers.start, numbers.stop, 0.3), (False, start, tail, 0.3), (False, tail, hi, 0.4)]
    parts = [part for part in parts if part[2] > part[1]]
    room = max(3, rows - len(found)) / max(1e-9, sum(part[3] for part in parts))
    for is_slot, a, b, share in parts:
        width = math.ceil((b - a) / max(1, int(room * share)))
        found += [(is_slot, i, min(i + width, b)) for i in range(a, b, width)]
    return found


def _runs(
    row: int, is_slot: bool, a: int, b: int, all_steps: Sequence[Step], shape: MemoryShape, size: int | None
) -> list[dict[str, Any]]:
    states = [slot_state(a, s, shape) if is_slot else raw_state(a, s, shape) for s in all_steps]
    edges = [0, *(i for i, (x, y) in enumerate(pairwise(states), 1) if x != y), len(states)]
    written = next((i for i, s in enumerate(states) if s), None)
    gone = next((i for i, s in enumerate(states) if s == "evicted"), None)
    stride = shape.stride or 1
    what = _name(is_slot, a, b)
    source = f"{(a - 1) * stride}-{(b - 1) * stride - 1}" if is_slot else _span(a, b)
    return [
        {
            "row": row,
            "entry": what,
            "state": states[i],
            "source tokens": source,
            "from": i,
            "to": j,
            "written at step": written,
            "evicted at step": gone,
            "bytes": None if size is None else (0 if states[i] == "evicted" else (b - a) * size),
        }
        for i, j in pairwise(edges)
        if states[i]
    ]


def _run_text(r: Mapping[str, Any]) -> str:
    left = "still there at the end" if r["evicted at step"] is None else f"evicted at step {r['evicted at step']}"
    if r["entry"].startswith("slot") or r["state"] in ("sink", "selected"):
        left = "never evicted"
    size = "" if r["bytes"] is None else f"<br>{r['bytes']:,} bytes held"
    when = f"step {r['from']}" if r["to"] - r["from"] == 1 else f"steps {r['from']} to {r['to'] - 1}"
    return (
        f"<b>{r['entry']}</b>: {MEANING[r['state']]}, {when}<br>source tokens {r['source tokens']}"
        f"<br>written at step {r['written at step']}, {left}{size}"
    )


def _span(a: int, b: int) -> str:
    return str(a) if b - a == 1 else f"{a}-{b - 1}"


def _name(is_slot: bool, a: int, b: int) -> str:
    return f"{'slot' if is_slot else 'x'} {_span(a, b)}"


def _cursor(figure: go.Figure, all_steps: Sequence[Step], rows: int) -> None:
    every = math.ceil(len(all_steps) / MOST_FRAMES)
    chosen = all_steps[::every]
    which = len(figure.data) - 1
    frames = [go.Frame(data=[go.Scatter(x=[s.index] * 2, y=[-0.5, rows - 0.5])], traces=[which]) for s in chosen]
    labels = [
        f"{s.index} ({'prefill' if s.kind == 'prefill' else f'round {s.round}, {s.kind}'}): {s.tokens:,} read, {s.slots:,} slots"
        for s in chosen
    ]
    stepped(figure, frames, labels, "step", ms=300, redraw=False)


def slot_sources(shape: MemoryShape, tokens: int, *, rows: int = 40, template: str = "light") -> Drawn:
    """Which slots absorbed which evicted raw tokens, from the shape alone: of each evicted token, the slot that closed its stretch and
    the later ones that could still read it before it left."""
    title = "Which slots absorbed the tokens that left"
    gone = state_count(shape, tokens)["evicted"]
    if not shape.stride or shape.window is None or gone == 0:
        return empty(
            title, f"Nothing has been absorbed: {gone} tokens were evicted, {shape.slots(tokens)} slots exist.", template=template
        )
    first, last = shape.sinks, shape.sinks + gone
    width = math.ceil((last - first) / rows)
    table, r = [], shape.stride
    for a in range(first, last, width):
        b = min(a + width, last)
        by = readers(a, shape)
        table.append(
            {
                "evicted tokens": _span(a, b),
                "closed by slot": a // r + 1,
                "slot at position": (a // r + 1) * r,
                "read by slots": f"{by.start}-{by.stop - 1}" if len(by) > 1 else str(by.start),
                "readers": len(by),
            }
        )
    figure = canvas(title, x="evicted raw token (position)", y="slots that read it (number)", template=template)
    figure.add_bar(
        x=list(range(first, last, width)),
        width=width * 0.9,
        base=[int(str(t["closed by slot"])) for t in table],
        y=[int(str(t["readers"])) for t in table],
        marker={"color": COLOURS["slot"], "line": {"width": 1, "color": ink(template)}},
        name=f"{GLYPHS['slot']} slots that could read it",
        showlegend=True,
        hovertext=[
            f"raw tokens {t['evicted tokens']}<br>closed by slot {t['closed by slot']} (position {t['slot at position']})<br>"
            f"read by slots {t['read by slots']}"
            for t in table
        ],
        hoverinfo="text",
    )
    return Drawn(
        figure,
        f"S {shape.sinks}, W {shape.window}, r {r}, after {tokens:,} tokens: {gone:,} raw tokens have left. Each was in the "
        f"window of the slots shown; "
        "the lowest one closed its stretch, and every later slot also reads the earlier slots. Predicted from the shape; the "
        "memory follows it exactly.",
        f"Bars rise from the slot that closed a token's stretch over the {shape.window // r} or so slots that could read the "
        f"token before it left.",
        table,
    )


def state_count(shape: MemoryShape, tokens: int) -> dict[str, int]:
    """How many entries of each state `tokens` accepted tokens have left."""
    sinks = min(tokens, shape.sinks) if shape.window is not None else 0
    window = shape.entries(tokens) - sinks - shape.slots(tokens)
    return {"sink": sinks, "window": window, "slot": shape.slots(tokens), "evicted": tokens - sinks - window}


def visibility_mask(shape: MemoryShape, tokens: int, *, pieces: Sequence[str] = (), template: str = "light") -> Drawn:
    """Who sees whom, for a short text: a row a query, a column a key, raw tokens and slots interleaved as the forward orders them."""
    order = interleaved(tokens, shape)
    stride = shape.stride or 1
    names = [f"g{position // stride}" if is_slot else f"x{position}" for position, is_slot in order]
    kinds = [
        "slot" if is_slot else "sink" if position < shape.sinks and shape.window is not None else "window"
        for position, is_slot in order
    ]
    figure = canvas("Who sees whom", x="key (slot g or raw token x)", y="query", template=template, height=140 + 17 * len(order))
    seen = [
        (q, k) for q, (i, slot_q) in enumerate(order) for k, (j, slot_k) in enumerate(order) if sees(i, slot_q, j, slot_k, shape)
    ]
    for kind in ("sink", "window", "slot"):
        mine = [(q, k) for q, k in seen if kinds[k] == kind]
        if not mine:
            continue
        figure.add_scatter(
            x=[k for _, k in mine],
            y=[q for q, _ in mine],
            mode="markers",
            name=f"{GLYPHS[kind]} {MEANING[kind]}",
            marker={
                **swatch(kind, template),
                "size": 11,
                "symbol": {"sink": "triangle-down", "window": "square", "slot": "diamond"}[kind],
            },
            hovertext=[f"{names[q]} (position {order[q][0]}) sees {names[k]} (position {order[k][0]})" for q, k in mine],
            hoverinfo="text",
        )
    labels = [
        f"{n} {token_html(pieces[p], 8)}" if pieces and not s and p < len(pieces) else n
        for n, (p, s) in zip(names, order, strict=True)
    ]
    axis = {"tickvals": list(range(len(order))), "showgrid": False, "zeroline": False, "tickfont": {"size": 10}}
    figure.update_xaxes(ticktext=names, tickangle=-90, range=[-0.6, len(order) - 0.4], **axis)
    figure.update_yaxes(ticktext=labels, range=[len(order) - 0.4, -0.6], **axis)
    table = [
        {"query": names[q], "position": order[q][0], "sees": " ".join(names[k] for p, k in seen if p == q)}
        for q in range(len(order))
    ]
    return Drawn(
        figure,
        f"The visibility table for {tokens} tokens with S {shape.sinks}, W {shape.window}, r {shape.stride or 'none'}: a "
        f"mark where the row's query "
        "sees the column's key. A slot g has the position of the raw token after it.",
        "A staircase that is dense near its diagonal: each raw token sees the sinks, its window and every slot at or before "
        "its position; "
        "each slot sees the sinks, the window before it and all slots up to itself.",
        table,
    )


def slot_birth(pieces: Sequence[str], shape: MemoryShape, *, per_line: int = 12, template: str = "light") -> Drawn:
    """Step through a short text: after each token, what is in the memory. From the shape alone."""
    order = interleaved(len(pieces), shape)
    stride = shape.stride or 1
    columns = [i % per_line for i in range(len(order))]
    lines = [i // per_line for i in range(len(order))]
    figure = canvas("How a memory fills: sinks, window, slots", template=template, height=120 + 62 * (lines[-1] + 1))

    def look(read: int) -> dict[str, Any]:
        states = [
            (state_at(position, is_slot, read, shape) if (position <= read if is_slot else position < read) else None)
            for position, is_slot in order
        ]
        text = []
        for (position, is_slot), state in zip(order, states, strict=True):
            name = f"g{position // stride}" if is_slot else token_html(pieces[position], 7)
            text.append(f"{GLYPHS[state]} {name}<br><sub>pos {position}</sub>" if state else "")
        return {
            "marker": {
                "color": [COLOURS[s] if s else "rgba(0,0,0,0)" for s in states],
                "line": {"width": 1, "color": [outline(s, template) if s else "#999999" for s in states]},
                "pattern": {
                    "shape": ["/" if s == "evicted" else "" for s in states],
                    "fgcolor": "#777777",
                    "size": 6,
                    "solidity": 0.2,
                },
            },
            "text": text,
            "textfont": {"size": 12, "color": [on(COLOURS[s]) if s else ink(template) for s in states]},
        }

    base = {"x": [0.94] * len(order), "y": lines, "base": [c - 0.47 for c in columns], "orientation": "h", "width": 0.86}
    figure.add_bar(
        **base,
        **look(len(pieces)),
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hoverinfo="text",
        showlegend=False,
        hovertext=[
            f"slot {p // stride}, position {p}: closes raw tokens {p - stride} to {p - 1}"
            if s
            else f"raw token {p}: {token_html(pieces[p])}"
            for p, s in order
        ],
    )
    legend_entries(figure, ("sink", "window", "slot", "evicted"), MEANING, template)
    figure.update_xaxes(visible=False, range=[-0.55, per_line - 0.45], fixedrange=True)
    figure.update_yaxes(visible=False, range=[lines[-1] + 0.5, -0.5], fixedrange=True)
    figure.update_layout(barmode="overlay", margin={"l": 12, "r": 12, "b": 16})
    frames = [go.Frame(data=[go.Bar(**look(read))], traces=[0]) for read in range(1, len(pieces) + 1)]
    stepped(figure, frames, [f"{n} tokens read" for n in range(1, len(pieces) + 1)], "after", ms=700)
    figure.layout.sliders[0].active = len(pieces) - 1
    table = []
    for read in range(1, len(pieces) + 1):
        count = state_count(shape, read)
        table.append(
            {
                "tokens read": read,
                "token": visible(pieces[read - 1]),
                **{MEANING[k]: v for k, v in count.items()},
                "entries": shape.entries(read),
            }
        )
    end = state_count(shape, len(pieces))
    return Drawn(
        figure,
        f"{len(pieces)} tokens through a memory with S {shape.sinks}, W {shape.window}, r {shape.stride}: press play. A slot "
        f"g appears every {shape.stride} "
        "tokens, takes the position of the token that follows it, and stays; raw tokens leave when the window has passed them.",
        f"After {len(pieces)} tokens the memory holds {end['sink']} sinks, {end['window']} raw tokens of the window and "
        f"{end['slot']} slots; "
        f"{end['evicted']} raw tokens have been evicted.",
        table,
    )


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
                "tokens read": s.tokens,
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
    title = "Draft memory against context length"
    if not rows:
        return empty(title, "No rows.", template=template)
    figure = canvas(title, x="context (tokens)", y="KV bytes of the draft (MiB)", template=template)
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
        "KV bytes allocated to reach a context: predicted from the model's shape (lines) and measured from allocated buffers "
        "(marks). Both axes are logarithmic.",
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


def log_axes(figure: go.Figure, contexts: Sequence[int]) -> None:
    """A logarithmic context axis with its ticks at powers of two."""
    ticks = [2**i for i in range(max(0, int(math.log2(max(1, min(contexts))))), math.ceil(math.log2(max(2, *contexts))) + 1)]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{t // KIB}K" if t >= KIB else str(t) for t in ticks])


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


def memory_content(shape: MemoryShape, tokens: int, *, template: str = "light") -> Drawn:
    """What is held once `tokens` tokens are accepted, by RoPE position: one line a kind of entry, from the shape alone."""
    count, r = state_count(shape, tokens), shape.stride or 1
    start = tokens - count["window"]
    held = {
        "sink": list(range(count["sink"])),
        "slot": [m * r for m in range(1, count["slot"] + 1)],
        "window": list(range(start, tokens)),
        "evicted": [count["sink"], start - 1] if count["evicted"] else [],
    }
    figure = canvas(
        f"What the draft holds after {tokens:,} tokens",
        x="RoPE position (tokens)",
        y="kind of entry",
        template=template,
        height=360,
    )
    for kind, where in held.items():
        if not where:
            continue
        mode = "lines" if kind == "evicted" else "markers"
        look = {"line": {"color": "#999999", "width": 8, "dash": "dot"}} if mode == "lines" else {}
        figure.add_scatter(
            x=where,
            y=[MEANING[kind]] * len(where),
            mode=mode,
            name=f"{GLYPHS[kind]} {MEANING[kind]}: {count[kind]:,}",
            marker={
                "color": COLOURS[kind],
                "line": {"width": 1, "color": outline(kind, template)},
                "size": 7,
                "symbol": {"sink": "triangle-down", "slot": "diamond"}.get(kind, "square"),
            },
            **look,
        )
    twice = tokens if shape.stride and tokens % r == 0 else None
    if twice:
        figure.add_scatter(
            x=[tokens],
            y=[MEANING["window"]],
            mode="markers",
            name=f"the next raw token, also at position {tokens:,}",
            marker={"symbol": "square-open", "size": 12, "color": ink(template), "line": {"width": 2}},
        )
        figure.add_vline(x=tokens, line={"color": ink(template), "width": 1, "dash": "dot"})
    entries = shape.entries(tokens)
    said = (
        f"{count['sink']} sinks, {count['window']} raw tokens of the window and {count['slot']} slots are {entries} entries; "
        f"{count['evicted']} raw tokens have left"
    )
    share = f" A full cache would hold {tokens:,}."
    note = f" Slot {tokens // r} and the raw token that comes next share position {tokens:,}." if twice else ""
    table = [
        {"kind": MEANING[k], "entries": count[k], "first position": w[0] if w else None, "last position": w[-1] if w else None}
        for k, w in held.items()
    ]
    return Drawn(figure, f"S {shape.sinks}, W {shape.window}, r {shape.stride}: {said}.{share}{note}", f"{said}.{note}", table)


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
