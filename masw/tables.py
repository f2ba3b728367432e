"""Rows of the result tables in data/results, as notebooks show them: what was measured, what was not, and what does not exist."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from masw.methods import METHODS
from masw.metrics import NOT_APPLICABLE, summarise
from masw.trace import Trace

PAPER = [
    {"method": "MASW", "target": "8B", "context": "8K to 32K", "speed-up": "1.30x to 2.08x"},
    {"method": "MASW", "target": "70B", "context": "best", "speed-up": "3.33x"},
    {"method": "uncompressed strong draft", "target": "8B", "context": "8K to 32K", "speed-up": "1.18x to 0.98x"},
    {"method": "EAGLE", "target": "70B", "context": "8K", "speed-up": "0.64x"},
    {"method": "sliding window", "target": "8B", "context": "16K", "speed-up": "0.37x"},
]  # as the paper reports them (arXiv 2608.30252): GovReport, QMSum and MultiNews of LongBench

BENCH_COLUMNS = {
    "set": "set", "context": "context (tokens)", "method": "method", "n": "runs",
    "speedup": "speed-up (x, measured)", "speedup_predicted": "speed-up (x, predicted)", "speedup_at_floor": "speed-up (x, at floor)",
    "tokens_per_iteration": "tokens per iter", "acceptance": "accept (share)", "draft_ms": "draft step (ms)",
    "draft_kv_ratio": "draft KV (share of the drafter's own full cache)", "identical": "equal to greedy (runs)",
    "compared": "compared (runs)",
    "largest_logit_gap": "logit gap where they part",
}  # fmt: skip


def results(name: str) -> list[dict[str, Any]]:
    """Rows of data/results/NAME.jsonl, without headers; none when it is not there (yet)."""
    path = results_folder() / f"{name}.jsonl"
    return [row for row in read_lines(path) if row.get("type", "row") not in ("header", "session")] if path.is_file() else []


def ablations(pair: str) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Rows of the pair's table of ablations and its loss curves by recipe (docs/TRAINING.md); empty while there is none."""
    from masw import ablations as table

    lines = table.read(results_folder() / f"ablations_{pair}.jsonl")
    return table.rows(lines), table.curves(lines)


def bench_lines(pair: str) -> list[dict[str, Any]]:
    """Lines of the pair's benchmark tables in data/results (docs/BENCH.md): a set, a context and a method each. Tables with an adaptive
    gamma stay out: their rows have the names of those with a fixed one."""
    found = []
    for path in sorted(results_folder().glob("**/*.jsonl")):
        head, *rows = read_lines(path)
        about = head.get("definition", {})
        if about.get("pair") == pair and not about.get("adaptive"):
            found += [row for row in rows if {"set", "context", "method", "speedup", "speedup_quartiles"} <= row.keys()]
    return found


NO_RESULTS = (
    "No benchmark results yet: `masw bench` writes them and data/results holds them. "
    "Shown instead: the recorded runs on one document."
)


RECALL_WINDOW = 256  # of the rows that a notebook shows, where a measure has several


def recall(pair: str) -> list[dict[str, Any]]:
    """How draft memories repeat a made-up code that was planted far back in a document (`masw eval-adaptor --recall`): the pair's rows
    in data/results, untrained slots left out; empty while there are none."""
    rows = [r for r in results(f"adaptor_{pair}") if r["set"] == "recall" and r.get("weights", "plain") == "plain"]
    wide = {r["window"] for r in rows} - {None}
    shown = {None, RECALL_WINDOW} if RECALL_WINDOW in wide else {None, *wide}
    names = {"context": "context (tokens)", "window": "W", "stride": "r", "method": "method", "n": "answers (n)",
             "agreement": "agreement on the planted tokens (share)"}  # fmt: skip
    return [
        {heading: NOT_APPLICABLE if r[key] is None else r[key] for key, heading in names.items()}
        | {"tokens per iter": next(iter(r["tokens_per_iteration"].values()))}
        for r in rows
        if r["method"] != "masw-untrained" and r["window"] in shown
    ]


def missing(*questions: str) -> list[dict[str, Any]]:
    """Rows that say what has not been measured."""
    return [{"question": q, "result": "not measured yet"} for q in questions]


def speedup_points(lines: Sequence[dict[str, Any]], traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """Rows for `masw.figures.method_bars`: decode speed-up by method and context, from benchmark lines (all sets together where there
    are several), else from the traces of one document."""
    from masw.figures import speedup_rows

    if not lines:
        context = traces["none"].header["prompt_tokens"]
        return [
            {"method": r["method"], "context": context, "speed-up": r["measured speed-up"], "n": r["n"]}
            for r in speedup_rows(traces)
        ]
    sets = {r["set"] for r in lines}
    whole = "all" if "all" in sets else lines[0]["set"]
    return [
        {"method": r["method"], "context": r["context"], "speed-up": r["speedup"], "n": r["n"],
         "low": (r["speedup_quartiles"] or (None, None))[0], "high": (r["speedup_quartiles"] or (None, None))[1]}
        for r in lines
        if r["set"] == whole
    ]  # fmt: skip


def trade_off(lines: Sequence[dict[str, Any]], traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """Memory, step time and tokens per iteration of each method, at the longest context of the lines, else of the traces."""
    names = {
        "set": "set", "method": "method", "draft_kv_bytes": "draft KV (bytes)", "draft_ms": "draft step (ms)",
        "tokens_per_iteration": "tokens per iteration", "n": "n",
    }  # fmt: skip
    if lines:
        longest = max(r["context"] for r in lines)
        found = [r for r in lines if r["context"] == longest]
    else:
        found = []
        for name, trace in traces.items():
            s, kv = summarise(trace), trace.header.get("draft_kv") or {}
            found.append(
                {"method": name, "draft_kv_bytes": kv.get("allocated_bytes"), "draft_ms": s.draft_ms,
                 "tokens_per_iteration": s.tokens_per_iteration, "n": s.rounds}
            )  # fmt: skip
    return [{heading: r[k] for k, heading in names.items() if k in r} for r in map(marked, found)]


def marked(line: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark line for a table: what cannot exist for its method is NOT_APPLICABLE, what nobody measured stays None."""
    return {k: NOT_APPLICABLE if v is None and k in _inapplicable(line) else v for k, v in line.items()}


def _inapplicable(line: Mapping[str, Any]) -> set[str]:
    method, found = METHODS.get(str(line["method"])), set()
    if method is not None and not method.drafts:  # decoding alone is what the others are compared with
        found |= {"speedup_predicted", "speedup_at_floor", "draft_ms", "draft_floor_ms", "tokens_per_iteration_without_bonus"}
        found |= {"identical"}
    if method is not None and method.shape is None:  # nothing reads the prompt or holds a memory
        found |= {"prefill_draft_ms", "prefill_draft_floor_ms", "draft_kv_bytes", "draft_kv_predicted_bytes", "draft_kv_ratio"}
    if line.get("drafted_per_iteration") == 0:
        found |= {"acceptance"}
    if line.get("identical") == line.get("compared") or "identical" in found:  # outputs never parted
        found |= {"largest_logit_gap"}
    return found


def results_folder() -> Path:
    from masw.session import data_folder

    return data_folder() / "results"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
