"""Figures over recorded and partial traces: words, tables, units, colours, glyphs, sizes, and hostile token text."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

from masw import figures as F
from masw.config import MemoryShape
from masw.eagle import EagleHead, EagleInfo
from masw.engine import Settings
from masw.figures.base import COLOURS, GLYPHS, Drawn, canvas, cell, method_bar, method_style, on, stepped
from masw.figures.timing import rounds_ms
from masw.methods import METHODS, MemoryOptions
from masw.metrics import summarise, wilson
from masw.policies import Rows, evicted, expiry, visible
from masw.session import RunOptions, Session, name_pieces
from masw.timeline import (
    FATES,
    STATES,
    fates,
    interleaved,
    raw_state,
    readers,
    sees,
    shape_of,
    slot_state,
    state_at,
    state_count,
    steps,
)
from masw.trace import Event, Trace
from masw.zoo import load_pair

TRACES = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*-*.jsonl"))
RECORDED = {p.stem: p for p in TRACES if '"type": "header"' in p.read_text(encoding="utf-8")[:40]}
SHAPES = [
    MemoryShape(4, 256, 8),
    MemoryShape(1, 4, 4),
    MemoryShape(0, 3),
    MemoryShape(),
    MemoryShape(2, 8, 1),
    MemoryShape(2, 5, 4),
]


PROMPT = list(b"The agreement was signed in March by both parties, and a copy")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """A run of each method of the table on the tiny pair (random weights, byte tokens)."""
    session = Session(load_pair("tiny", torch.device("cpu"), torch.float32))
    head = tmp_path_factory.mktemp("eagle") / "head.safetensors"
    EagleHead.copied(session.pair.target.decoder, EagleInfo(session.pair.target.name)).save(head)
    options = {m: RunOptions(m, MemoryOptions(2, 8, 4), Settings(24, 5), adaptor="none", eagle=str(head)) for m in METHODS}
    found = {}
    for name, option in options.items():
        run = session.run(PROMPT, option)
        assert all(True for _ in run)
        name_pieces(run.trace, session.pair.target.tokenizer)
        found[name] = run.trace
    return found


def of_one(trace: Trace, template: str = "light") -> list[Drawn]:
    return [
        F.token_strip(trace, template=template),
        F.token_strip(trace, steps=True, template=template),
        F.kv_map(trace, template=template),
        F.kv_map(trace, first=trace.header.get("prompt_tokens", 0), play=True, template=template),
        F.acceptance_histogram(trace, template=template),
        F.step_latency(trace, template=template),
    ]


def of_many(traces: dict[str, Trace], template: str = "light") -> list[Drawn]:
    return [
        F.acceptance_by_position(traces, template=template),
        F.rolling_acceptance(traces, template=template),
        F.memory_bytes(traces, template=template),
        F.latency_parts(traces, template=template),
        F.first_token(traces, template=template),
        F.speedup_curve(F.speedup_rows(traces), template=template),
    ]


def of_rows(template: str = "light") -> list[Drawn]:
    shape = MemoryShape(4, 256, 8)
    keys = [
        {"name": "x0", "kind": "sink", "position": 0, "share": 0.5},
        {"name": "g1", "kind": "slot", "position": 4, "share": 0.5},
    ]
    measure = {"set": "t", "method": "masw", "window": 8, "stride": 4, "n": 9, "agreement": 0.5, "nll": 3.0, "kl": 1.0}
    log: list[dict[str, Any]] = [
        {"kind": "start", "tokens": 0},
        {"kind": "measure", "tokens": 0, "rows": [measure, {**measure, "method": "window"}]},
        {"kind": "step", "tokens": 640, "agreement": 0.4, "nll": 3.1, "kl": 1.1},
    ]
    points = [
        {"method": m, "context": c, "acceptance": 0.5, "ms": 2.0, "p10_ms": 1.0, "p90_ms": 4.0, "n": 5, "floor_ms": 1.0}
        for m in ("full", "masw")
        for c in (1024, 4096)
    ]
    return [
        F.slot_birth(
            ["The", "agreement", "was", "signed", "in", "March", "by", "both", "."], MemoryShape(1, 4, 4), template=template
        ),
        F.slot_sources(shape, 1000, template=template),
        F.visibility_mask(MemoryShape(1, 4, 4), 9, template=template),
        F.memory_by_context(F.calculator(46_080, {"full": MemoryShape(), "masw": shape}, [1024, 131072]), template=template),
        F.slot_attention(
            {"slot": 1, "position": 4, "stride": 4, "keys": keys, "later": [{"position": 5, "share": 0.1}]}, template=template
        ),
        F.projection_distance([{"layer": 0, "key": 0.1, "value": 0.2}], template=template),
        F.failure_distance(
            [{"method": "masw", "position": 9, "distance": d, "match": 4} for d in (1, 300, None)], template=template
        ),
        F.accept_rule(
            [{"token": "A", "p": 1.0, "q": 1.0, "emitted": 1.0, "broken": 1.0, "drawn": 1.0, "n": 10}], template=template
        ),
        F.training_curve({"run": log}, template=template),
        F.method_bars(
            [{"method": "masw", "tokens": 2.0, "low": 1.5, "high": 2.5}], "tokens", unit="tokens/iteration", template=template
        ),
        F.method_table([{"method": "<b>masw</b>", "tokens": None}], template=template),
        F.acceptance_by_context(points, template=template),
        F.latency_by_context(points, template=template),
        F.sweep(
            [{"method": "masw", "W": w, "entries": w} for w in (64, 128)],
            "W",
            "entries",
            x_title="W (tokens)",
            y_title="entries",
            template=template,
        ),
    ]


def check(drawn: Drawn, size: int = 700_000) -> None:
    assert len(drawn.caption) > 10 and len(drawn.alt) > 10, drawn
    json.dumps(drawn.table)
    text = drawn.figure.to_json()
    assert len(text) < size
    assert "FigureWidget" not in type(drawn.figure).__name__
    plotted = [
        t for t in drawn.figure.data if t.type in ("bar", "scatter") and t.x is not None and any(v is not None for v in t.x)
    ]
    if plotted:
        assert drawn.table
        for axis in drawn.figure.select_xaxes():
            assert axis.visible is False or axis.title.text
        for axis in drawn.figure.select_yaxes():
            assert axis.visible is False or axis.title.text
    assert "legend" in drawn.figure.layout


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_draw(name: str) -> None:
    trace = Trace.load(RECORDED[name])
    assert RECORDED[name].stat().st_size < 300_000
    for drawn in of_one(trace):
        check(drawn)
    assert trace.header["pieces"]


def test_recorded_traces_draw_side_by_side() -> None:
    traces = {name.removeprefix("smollm2-"): Trace.load(path) for name, path in RECORDED.items() if name.startswith("smollm2-")}
    assert {"none", "full", "window", "masw", "lookup"} <= set(traces)
    for template in ("light", "dark"):
        for drawn in of_many(traces, template):
            check(drawn)
            assert drawn.table
    tokens = {name: summarise(t).tokens for name, t in traces.items()}
    assert all(t == tokens["none"] for t in tokens.values())  # fp32, greedy


@pytest.mark.parametrize("template", ["light", "dark"])
def test_tables_draw(template: str) -> None:
    for drawn in of_rows(template):
        check(drawn)
        assert drawn.table
    with pytest.raises(ValueError, match="light or dark"):
        canvas("x", template="blue")


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_partial_traces_draw(cut: int, traces: dict[str, Trace]) -> None:
    whole = traces["masw"]
    part = Trace(whole.header, whole.events[:cut])
    for drawn in [*of_one(part), *of_many({"masw": part, "none": Trace({})})]:
        check(drawn)


@pytest.mark.parametrize("method", METHODS)
def test_states_follow_the_events(method: str, traces: dict[str, Trace]) -> None:
    """The state that the steps tell is the one that the shape predicts, for every method of the table."""
    trace = traces[method]
    shape = shape_of(trace)
    found = steps(trace)
    assert [s.index for s in found] == list(range(len(found)))
    for drawn in of_one(trace):
        check(drawn)
    if shape is None or shape.budget is not None:
        return
    for s in found:
        assert s.slots == shape.slots(s.tokens)
        assert s.evicted == evicted(s.final, shape)
        for token in range(s.tokens):
            state = raw_state(token, s, shape)
            assert state in STATES
            if token < s.final:
                assert state == state_at(token, False, s.final, shape)
        held = sum(raw_state(t, s, shape) in ("sink", "window", "tentative") for t in range(s.tokens))
        held += sum(slot_state(m, s, shape) is not None for m in range(1, s.slots + 1))
        assert shape.entries(s.tokens) <= held <= shape.entries(s.tokens) + shape.rollback
    assert found[-1].tokens - found[-1].final == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_token_has_its_fate(method: str, traces: dict[str, Trace]) -> None:
    trace = traces[method]
    found = fates(trace)
    emitted = [t.id for t in found if t.fate in ("accepted", "correction", "bonus", "target")]
    assert emitted == summarise(trace).tokens
    assert sum(t.fate in ("accepted", "rejected") for t in found) == len(trace.of("draft"))
    for t in found:
        assert t.fate in FATES and (t.accept is None or 0 <= t.accept <= 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_visibility_is_that_of_the_masks(shape: MemoryShape) -> None:
    count = 40
    order = interleaved(count, shape)
    rows = Rows(0, count, tuple(p for p, s in order if s), shape.stride or 0)
    times = torch.tensor(rows.times())
    mask = visible(times, times, expiry(times, shape))
    ours = [[sees(i, a, j, b, shape) for j, b in order] for i, a in order]
    assert mask.tolist() == ours
    for token in range(shape.sinks, count - (shape.window or 0)):
        slots = (
            [order[q][0] // shape.stride for q in range(len(order)) if order[q][1] and ours[q][order.index((token, False))]]
            if shape.stride
            else []
        )
        assert slots == list(readers(token, shape))


def test_the_memory_at_token_one_thousand() -> None:
    assert state_count(MemoryShape(4, 256, 8), 1000) == {"sink": 4, "window": 256, "slot": 125, "evicted": 740}
    assert MemoryShape(4, 256, 8).entries(1000) == 385
    assert F.break_even(MemoryShape(4, 512, 8)) == 609
    assert F.break_even(MemoryShape(4, 512, 1)) is None


def test_hostile_tokens_are_shown_as_text() -> None:
    assert F.visible(" a\n\t\r\x1b\x7f") == "·a⏎⇥␍␛␡"
    assert F.visible("\ud800x\u202e\u200b") == "�x��"
    assert F.visible("́") == "◌́"
    assert F.visible("a" * 50, 10) == "a" * 10 + "…"
    for bad in ("<script>alert(1)</script>", "$x^2$", '"><img src=x>', "`x`", "</s><a href='javascript:1'>"):
        shown = F.token_html(bad)
        assert not set("<>\"'$`") & set(shown.replace("&#36;", "").replace("&#x27;", ""))
    random = Random(1)
    for _ in range(300):
        text = "".join(chr(random.randrange(0x11000)) for _ in range(5))
        F.token_html(text).encode()  # no lone surrogate
    assert cell("<$>") == "&lt;&#36;&gt;" and cell(None) == "not measured" and cell(1234567) == "1,234,567"


def test_hostile_pieces_never_reach_a_figure_raw() -> None:
    events = [
        Event("draft", "draft", 1, 1.0, 5, 1, data={"token": 7, "q": 0.5, "read": 1}),
        Event("accept", "engine", 1, 1.0, 5, 1, data={"tokens": [7], "p": [0.5], "q": [0.5]}),
    ]
    events.append(Event("emit", "engine", 1, 2.0, 5, 2, 1.0, data={"tokens": [7, 8], "roles": ["accepted", "bonus"]}))
    trace = Trace({"prompt_tokens": 5, "pieces": {"7": "<b>$x$\ud800", "8": "</s>"}}, events)
    drawn = F.token_strip(trace)
    strip = next(t for t in drawn.figure.data if t.name == "tokens")
    assert [x.count("<") for x in strip.text] == [0, 0, 0]
    assert not any("$" in x.replace("&#36;", "") for x in strip.text)
    assert [row["fate"] for row in drawn.table] == ["accepted draft", "bonus of the target"]
    assert list(strip.marker.color) == ["#DDDDDD", "#0072B2", "#56B4E9"]


def test_colours_and_glyphs() -> None:
    wanted = {
        "accepted": "#0072B2", "rejected": "#D55E00", "correction": "#F0E442", "bonus": "#56B4E9", "pending": "#555555", "sink": "#000000",
        "slot": "#E69F00", "window": "#56B4E9", "tentative": "#CC79A7", "evicted": "#DDDDDD",
    }  # fmt: skip
    assert {k: COLOURS[k] for k in wanted} == wanted
    for names in (FATES, STATES):
        assert len({GLYPHS[n] for n in names}) == len(names)
    assert on("#0072B2") == on("#555555") == "#ffffff" and on("#F0E442") == "#000000"
    assert F.CONFIG == {"showSendToCloud": False, "displaylogo": False}


def test_step_through_needs_no_kernel() -> None:
    bars = [go.Frame(data=[go.Bar(y=[i])]) for i in range(3)]
    raw = json.loads(stepped(canvas("x").add_bar(y=[1]), bars, ["a", "b", "c"], shown=1).to_json())
    assert [f["name"] for f in raw["frames"]] == ["0", "1", "2"]
    assert [s["args"][0] for s in raw["layout"]["sliders"][0]["steps"]] == [["0"], ["1"], ["2"]]
    players, step = raw["layout"]["updatemenus"]
    assert len(players["buttons"]) == 3 and raw["layout"]["sliders"][0]["active"] == 1

    def leads_to(buttons: list[dict[str, Any]]) -> list[str]:
        return [name for b in buttons for name in b["args"][0]]

    assert leads_to(step["buttons"]) == ["0", "2"]
    assert [leads_to(f["layout"]["updatemenus"][1]["buttons"]) for f in raw["frames"]] == [["0", "1"], ["0", "2"], ["1", "2"]]


def test_a_hatched_bar_of_many_colours_says_its_background(traces: dict[str, Trace]) -> None:
    """plotly would take the list for one colour, and complain."""
    for drawn in [*of_one(traces["masw"]), *of_many(traces), *of_rows("light")]:
        for trace in drawn.figure.data:
            marker = getattr(trace, "marker", None)
            if trace.type == "bar" and marker.pattern.shape and not isinstance(marker.color, str):
                assert isinstance(marker.pattern.bgcolor, str), drawn.caption


def test_what_cannot_exist_is_told_from_what_was_not_measured() -> None:
    trace = Trace.load(RECORDED["smollm2-masw"])
    held = F.kv_map(trace).table
    assert {row["evicted at step"] for row in held if row["state"] in ("sink", "slot")} == {"—"}
    corrections = [row for row in F.token_strip(trace).table if row["fate"].startswith("correction")]
    assert corrections and {row["q"] for row in corrections} == {row["min(1, p/q)"] for row in corrections} == {"—"}
    shown = F.method_table([{"method": "none", "ms": "—"}, {"method": "hf", "ms": None}])
    assert shown.figure.data[0].cells["values"][1] == ["—", "not measured"] and "does not apply" in shown.caption


def test_every_method_can_be_told_from_the_others() -> None:
    """Seen in a report: `full+lookup` had the colour of `none`, and nothing else to tell it by."""
    names = {*METHODS, "hf", "hf-assisted", "masw-untrained", "window-equal"}
    bars = [method_bar(name) for name in names]
    assert len({(bar["color"], bar["pattern"]["shape"]) for bar in bars}) == len(names)
    lines = [method_style(name) for name in names]
    assert len({(look["line"]["color"], look["line"]["dash"], look["marker"]["symbol"]) for look in lines}) == len(names)


def test_a_table_is_as_tall_as_its_broken_lines() -> None:
    short = F.method_table([{"what": "a", "n": 1}] * 3).figure.layout
    long = F.method_table([{"what": "copied K and V, mean slot input, rows of 512 to 2,048, with reconstruction", "n": 1}] * 3)
    assert long.figure.layout.height > short.height + 3 * 17 and long.figure.layout.meta["min_width"] > short.meta["min_width"]


def test_an_entry_that_was_rolled_back_has_a_life_for_each_time() -> None:
    """Met by a reader: the second entry at a position said that it was written at the step of the first."""
    trace = Trace.load(RECORDED["smollm2-masw"])
    prompt = trace.header["prompt_tokens"]
    drawn = F.kv_map(trace, first=prompt - 16, rows=400)
    last = max(step.tokens for step in steps(trace)) - 1
    assert drawn.caption.startswith(f"Entries of raw tokens {prompt - 16:,}-{last:,} and of the slots among them, each from")
    assert F.kv_map(trace).caption.startswith("Every entry from")
    lives: dict[str, dict[int, Any]] = {}
    for row in drawn.table:
        lives.setdefault(row["entry"], {})[row["written at step"]] = row["rolled back at step"]
    again = {entry: found for entry, found in lives.items() if len(found) > 1}
    assert again and any(entry.startswith("slot") for entry in again)
    for found in again.values():
        for (_, rolled), (written, _) in pairwise(sorted(found.items())):
            assert rolled <= written
    settled = {step.index for step in steps(trace) if step.kind == "settle"}
    assert {rolled for found in lives.values() for rolled in found.values()} - {"—"} <= settled
    assert any("rolled back at step" in text for bar in drawn.figure.data for text in bar.hovertext or ())


def test_neighbours_that_share_a_row_give_the_steps_of_all() -> None:
    trace = Trace.load(RECORDED["smollm2-masw"])
    single = {row["entry"]: row for row in F.kv_map(trace, first=800, last=816, rows=99).table if row["state"] == "evicted"}
    for row in F.kv_map(trace, rows=24).table:
        if row["state"] == "evicted" and row["entry"].startswith("x ") and "-" in row["entry"]:
            first, last = (int(n.replace(",", "")) for n in row["entry"][2:].split("-"))
            if first >= 800 and last < 816:
                both = single[f"x {first}"], single[f"x {last}"]
                for key in ("written at step", "evicted at step"):
                    ends = [both[0][key], both[1][key]]
                    assert row[key] == (ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}")
    kinds = {type(row["evicted at step"]) for row in F.kv_map(trace, rows=24).table if row["state"] == "evicted"}
    assert str in kinds  # some rows do leave over several steps


def test_the_guides_miniature_is_a_memory_that_can_be_built() -> None:
    text = (Path(__file__).parents[1] / "data" / "samples" / "guide.md").read_text(encoding="utf-8")
    found = re.search(r"miniature with S = (\d+), W = (\d+), r = (\d+)\. (.*)", text)
    assert found
    shape = MemoryShape(*(int(n) for n in found.groups()[:3]))

    def seen(position: int, is_slot: bool) -> list[str]:
        return [f"g_{j // 4}" if s else f"x_{j}" for j, s in interleaved(9, shape) if sees(position, is_slot, j, s, shape)]

    assert seen(4, True) == ["x_0", "x_1", "x_2", "x_3", "g_1"]
    assert sorted(seen(8, False)) == ["g_1", "g_2", "x_0", "x_5", "x_6", "x_7", "x_8"]
    assert "sees the window x_0 to x_3, and itself. Later, x_8 sees x_0, x_5, x_6, x_7, itself, g_1 and g_2." in found[4]


def test_parts_of_a_round_add_up(traces: dict[str, Trace]) -> None:
    trace = traces["masw"]
    emits = trace.of("emit")
    for row, emit in zip([r for r in rounds_ms(trace) if r["round"]], emits, strict=True):
        parts = sum(row[p] for p in ("draft", "verify", "upkeep", "other"))
        assert parts == pytest.approx(emit.ms, rel=0.05, abs=0.05)


def test_lines_over_the_rounds_are_named_where_no_bar_is_covered(traces: dict[str, Trace]) -> None:
    for trace in traces.values():
        figure = F.step_latency(trace).figure
        lines = [line for line in figure.data if line.type == "scatter"]
        assert not figure.layout.annotations and len({line.line.dash for line in lines}) == 3
        assert [line.name.split()[0] for line in lines] == ["p10", "median", "p90"] and all(" ms" in line.name for line in lines)


def test_a_zero_among_wide_steps_has_its_place() -> None:
    """S = 0 beside S = 64: a logarithmic axis drew the line to it from outside, without its mark."""
    rows = [{"sinks": s, "mib": 1.0 + s, "method": "masw"} for s in (0, 1, 4, 16, 64)]
    drawn = F.sweep(rows, "sinks", "mib", x_title="S", y_title="KV (MiB)")
    axis = drawn.figure.layout.xaxis
    assert axis.type == "category" and list(axis.categoryarray) == ["0", "1", "4", "16", "64"] == list(drawn.figure.data[0].x)


def test_the_kv_map_opens_at_the_step_that_it_shows() -> None:
    trace = Trace.load(RECORDED["smollm2-masw"])
    drawn = F.kv_map(trace, play=True)
    slider, last = drawn.figure.layout.sliders[0], len(steps(trace)) - 1
    assert slider.steps[slider.active].label.startswith(f"{last} (round ")
    cursor = next(line for line in drawn.figure.data if line.name == "cursor")
    assert set(cursor.x) == {last} and re.search(r"shows one step in \d+,", drawn.caption)
    assert "rows of raw tokens are finer" in drawn.caption and "finer" not in F.kv_map(trace, first=5300, rows=400).caption


def test_wilson_interval() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.49, 0.943)  # textbook value
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10)[1] == 1.0
