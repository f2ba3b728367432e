"""Which entries a memory has and who sees them, from its shape alone: no run and no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from masw.config import MemoryShape
from masw.figures.base import (
    COLOURS,
    GLYPHS,
    MEANING,
    Drawn,
    canvas,
    empty,
    ink,
    legend_entries,
    on,
    outline,
    span,
    stepped,
    swatch,
)
from masw.figures.tokens import token_html, visible
from masw.metrics import NOT_APPLICABLE
from masw.timeline import interleaved, readers, sees, state_at, state_count


def slot_birth(pieces: Sequence[str], shape: MemoryShape, *, per_line: int = 12, template: str = "light") -> Drawn:
    """Step through a short text: after each token, what is in the memory. From the shape alone."""
    order = interleaved(len(pieces), shape)
    stride = shape.stride or 1
    columns = [i % per_line for i in range(len(order))]
    lines = [i // per_line for i in range(len(order))]
    figure = canvas("How a memory fills: sinks, window, slots", template=template, height=190 + 62 * (lines[-1] + 1))

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
                    "bgcolor": COLOURS["evicted"],  # else plotly takes the list of colours for one
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
    # Letters shrink with their bars: a page that is narrower had better scroll.
    figure.update_layout(barmode="overlay", margin={"l": 12, "r": 12, "b": 16}, meta={"min_width": 60 * per_line})
    frames = [go.Frame(data=[go.Bar(**look(read))], traces=[0]) for read in range(1, len(pieces) + 1)]
    stepped(figure, frames, [f"{n} tokens read" for n in range(1, len(pieces) + 1)], "after", ms=700, shown=len(pieces) - 1)
    table = []
    for read in range(1, len(pieces) + 1):
        count = state_count(shape, read)
        table.append(
            {
                "raw tokens read": read,
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
    table: list[dict[str, Any]] = []
    bars, r = [], shape.stride
    reads = f"{shape.window // r}" if shape.window % r == 0 else f"{shape.window // r} or {shape.window // r + 1}"
    for a in range(first, last, width):
        b = min(a + width, last)
        first_of, last_of = readers(a, shape), readers(b - 1, shape)
        low, high = first_of.start, last_of.start
        fewest, most = (pick(len(readers(t, shape)) for t in range(a, b)) for pick in (min, max))
        table.append(
            {
                "evicted tokens": span(a, b),
                "closed by slots": span(low, high + 1),
                "slots at positions": span(low * r, low * r + 1) if low == high else f"{low * r}-{high * r}",
                "read by slots": span(low, last_of.stop),
                "slots that read each": fewest if fewest == most else f"{fewest}-{most}",
            }
        )
        bars.append((low, last_of.stop - low))
    figure = canvas(title, x="evicted raw token (position)", y="number m of the slots that read it", template=template)
    figure.add_bar(
        x=list(range(first, last, width)),
        width=width * 0.9,
        base=[low for low, _ in bars],
        y=[height for _, height in bars],
        marker={"color": COLOURS["slot"], "line": {"width": 1, "color": ink(template)}},
        name=f"{GLYPHS['slot']} slots that could read it",
        showlegend=True,
        hovertext=[
            f"raw tokens {t['evicted tokens']}<br>closed by slots {t['closed by slots']} (positions {t['slots at positions']})<br>"
            f"read by slots {t['read by slots']}, each token by {t['slots that read each']}"
            for t in table
        ],
        hoverinfo="text",
    )
    return Drawn(
        figure,
        f"S {shape.sinks}, W {shape.window}, r {r}, after {tokens:,} tokens: {gone:,} raw tokens have left. Each was in the "
        f"window of {reads} of the slots shown"
        + (f" (a bar stands for {width} neighbours, and spans the slots of all of them)" if width > 1 else "")
        + "; the lowest one closed its stretch, and every later slot also reads the earlier slots. Predicted from the shape; the "
        "memory follows it exactly.",
        f"Bars rise from the slot that closed a token's stretch over the {reads} slots that could read the token before it left.",
        table,
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
        {
            "kind": MEANING[k],
            "entries": count[k],
            "first position": w[0] if w else NOT_APPLICABLE,
            "last position": w[-1] if w else NOT_APPLICABLE,
        }
        for k, w in held.items()
    ]
    return Drawn(figure, f"S {shape.sinks}, W {shape.window}, r {shape.stride}: {said}.{share}{note}", f"{said}.{note}", table)
