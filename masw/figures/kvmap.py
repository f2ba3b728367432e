"""The KV map: the life of every entry of a draft's memory over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from masw.config import MemoryShape
from masw.figures.base import GLYPHS, MEANING, Drawn, canvas, describe_run, empty, ink, paper, span, stepped, swatch
from masw.metrics import NOT_APPLICABLE
from masw.timeline import STATES, Step, entry_bytes, raw_state, shape_of, slot_state, steps
from masw.trace import Trace

MOST_FRAMES = 80
NOT_ALWAYS = ("evicted at step", "rolled back at step", "bytes")  # what a run need not have


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
    An entry that was rolled back and written again has a life, with steps of its own, for each time.
    """
    title = "KV map: what the draft's memory holds, step by step"
    if first is not None or last is not None:
        title = f"KV map of raw tokens {first or 0:,} to {'the last' if last is None else f'{last - 1:,}'}"
    shape, all_steps = shape_of(trace), steps(trace)
    if shape is None:
        return empty(title, "Nothing is held: no model drafts with this method.", template=template)
    if not all_steps or not any(s.tokens for s in all_steps):
        return empty(title, "The draft has read nothing yet.", template=template)
    most = max(s.tokens for s in all_steps)
    lo, hi = max(0, first or 0), most if last is None else min(last, most)
    parts = _parts(lo, max(lo + 1, hi), max(s.slots for s in all_steps), shape, rows)
    groups = [row for part in parts for row in part]
    size = entry_bytes(trace)
    runs: list[dict[str, Any]] = []
    for row, (is_slot, a, b) in enumerate(groups):
        runs += _runs(row, is_slot, a, b, all_steps, shape, size)
    kept = next((s for s in all_steps if s.selected), None)
    if kept is not None and lo == 0:  # as many in each layer and head, not the same ones: a row of its own
        run: dict[str, Any] = {"row": len(groups), "entry": f"{kept.selected:,} selected", "state": "selected"}
        run |= {"source tokens": "prompt; differ by layer and head", "from": kept.index, "to": len(all_steps)}
        run |= {"written at step": kept.index, "evicted at step": None, "rolled back at step": None}
        runs.append({**run, "bytes": None if size is None else kept.selected * size})
    if not runs:
        return empty(title, "The draft has read nothing of this range yet.", template=template)
    figure = canvas(
        title,
        x="step (chunk, draft or round)",
        y="entry, by raw token position",
        template=template,
        height=max(360, min(720, 150 + 5 * len(groups))),
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
    widths = [max(b - a for _, a, b in part) for part in parts]
    first_raw = shape.sinks if shape.window is not None else 0
    uneven = len({w for w, part in zip(widths, parts, strict=True) if not part[0][0] and part[0][1] >= first_raw}) > 1
    if uneven:
        figure.add_hline(y=len(groups) - len(parts[-1]) - 0.5, line={"color": paper(template), "width": 4})
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
            annotation={"text": "drafting starts", "font": {"size": 11}, "bgcolor": paper(template)},
        )
    shown_every = math.ceil(len(all_steps) / MOST_FRAMES)
    if play:
        _cursor(figure, all_steps, len(groups), shown_every)
    end = all_steps[-1]
    which = (
        "Every entry" if (lo, hi) == (0, most) else f"Entries of raw tokens {lo:,}-{hi - 1:,} and of the slots among them, each"
    )
    grouped = ""
    if max(widths) > 1:
        sizes = dict.fromkeys(
            f"{w:,} {'slots' if part[0][0] else 'raw tokens'}" for w, part in zip(widths, parts, strict=True) if w > 1
        )
        grouped = f" A row stands for up to {' or '.join(sizes)}, and shows the state of the oldest one."
        grouped += (
            " Under the gap, rows of raw tokens are finer: heights compare on either side of it, not across." if uneven else ""
        )
    grouped += (
        f" The step-through shows one step in {shown_every}, as a line over the whole run." if play and shown_every > 1 else ""
    )
    return Drawn(
        figure,
        f"{which} from the step that wrote it to the step that dropped it ({describe_run(trace.header)}).{grouped}"
        + ("" if size is None else f" One entry takes {size:,} bytes over all layers."),
        f"Rows are cache entries, columns are {len(all_steps)} steps. At the end the draft has read {end.tokens:,} tokens and holds "
        f"{end.tokens - end.evicted:,} of them raw and {end.slots:,} slots; {end.evicted:,} raw tokens have been evicted.",
        [_row(r) for r in runs],
    )


def _parts(lo: int, hi: int, slots: int, shape: MemoryShape, rows: int) -> list[list[tuple[bool, int, int]]]:
    """(is slot, first, behind last) of each row: sinks, then slots by number, then raw tokens, the last window of them in finer rows."""
    compact = shape.window is not None
    sinks = [(False, i, i + 1) for i in range(lo, min(shape.sinks, hi))] if compact else []
    found = [sinks] if sinks else []
    stride = shape.stride or 0
    numbers = range(max(1, -(-(lo + 1) // stride)), min(slots, hi // stride) + 1) if stride else range(0)
    start = max(lo, shape.sinks if compact else 0)
    tail = max(start, hi - (shape.window or 0) - 64) if compact else hi
    parts = [(True, numbers.start, numbers.stop, 0.3), (False, start, tail, 0.3), (False, tail, hi, 0.4)]
    parts = [part for part in parts if part[2] > part[1]]
    room = max(3, rows - len(sinks)) / max(1e-9, sum(part[3] for part in parts))
    for is_slot, a, b, share in parts:
        width = math.ceil((b - a) / max(1, int(room * share)))
        found.append([(is_slot, i, min(i + width, b)) for i in range(a, b, width)])
    return found


def _runs(
    row: int, is_slot: bool, a: int, b: int, all_steps: Sequence[Step], shape: MemoryShape, size: int | None
) -> list[dict[str, Any]]:
    def life(entry: int) -> list[str | None]:
        return [slot_state(entry, s, shape) if is_slot else raw_state(entry, s, shape) for s in all_steps]

    oldest, newest = life(a), life(b - 1)
    stride = shape.stride or 1
    what = _name(is_slot, a, b)
    source = f"{(a - 1) * stride}-{(b - 1) * stride - 1}" if is_slot else span(a, b)
    found = []
    for start, end in _stretches([state is not None for state in oldest]):
        # Neighbours are written, and leave, from the oldest to the newest.
        written = start, next((i for i in range(start, end) if newest[i]), None)
        gone = (next((i for i in range(start, end) if states[i] == "evicted"), None) for states in (oldest, newest))
        when = {
            "written at step": _from_to(*written),
            "evicted at step": _from_to(*gone),
            "rolled back at step": end if end < len(all_steps) else None,
        }
        for i, j in _same(oldest[start:end], start):
            # Neighbours come and go one by one: only the row of a single entry has one number of bytes.
            held = None if size is None or b - a > 1 else (0 if oldest[i] == "evicted" else size)
            run = {"row": row, "entry": what, "state": oldest[i], "source tokens": source, "from": i, "to": j}
            found.append({**run, **when, "bytes": held})
    return found


def _same(values: Sequence[Any], at: int = 0) -> list[tuple[int, int]]:
    """[from, to) of each run of equal values; the first value stands at `at`."""
    edges = [0, *(i for i, (x, y) in enumerate(pairwise(values), 1) if x != y), len(values)]
    return [(at + i, at + j) for i, j in pairwise(edges)]


def _stretches(there: Sequence[bool]) -> list[tuple[int, int]]:
    return [(i, j) for i, j in _same(there) if there[i]]


def _from_to(first: int | None, last: int | None) -> int | str | None:
    """Steps at which the oldest and the newest of a row did something; None: no step of theirs."""
    if first is None or first == last:
        return first
    return f"{first} on" if last is None else f"{first} to {last}"


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    return {k: NOT_APPLICABLE if v is None and k in NOT_ALWAYS else v for k, v in run.items() if k != "row"}


def _run_text(r: Mapping[str, Any]) -> str:
    left = "still there at the end" if r["evicted at step"] is None else f"evicted at step {r['evicted at step']}"
    if r["rolled back at step"] is not None:
        left = f"rolled back at step {r['rolled back at step']}"
    elif r["entry"].startswith("slot") or r["state"] in ("sink", "selected"):
        left = "never evicted"
    size = "" if r["bytes"] is None else f"<br>{r['bytes']:,} bytes held"
    when = f"step {r['from']}" if r["to"] - r["from"] == 1 else f"steps {r['from']} to {r['to'] - 1}"
    return (
        f"<b>{r['entry']}</b>: {MEANING[r['state']]}, {when}<br>source tokens {r['source tokens']}"
        f"<br>written at step {r['written at step']}, {left}{size}"
    )


def _name(is_slot: bool, a: int, b: int) -> str:
    return f"{'slot' if is_slot else 'x'} {span(a, b)}"


def _cursor(figure: go.Figure, all_steps: Sequence[Step], rows: int, every: int) -> None:
    chosen = all_steps[::-every][::-1]  # the last one among them
    which = len(figure.data) - 1
    frames = [go.Frame(data=[go.Scatter(x=[s.index] * 2, y=[-0.5, rows - 0.5])], traces=[which]) for s in chosen]
    labels = [
        f"{s.index} ({'prefill' if s.kind == 'prefill' else f'round {s.round}, {s.kind}'}): {s.tokens:,} read, {s.slots:,} slots"
        for s in chosen
    ]
    stepped(figure, frames, labels, "step", ms=300, shown=len(frames) - 1)
