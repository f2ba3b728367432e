"""A trace as tables for other programs. Pure, no torch."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from masw.timeline import fates
from masw.trace import Trace

_LOAD = """from pathlib import Path

from masw import figures
from masw.metrics import summarise
from masw.report.display import show
from masw.trace import Trace

run = Trace.load(Path(trace))
summarise(run)"""
_FIGURES = (
    "token_strip(run, steps=True)",
    "step_latency(run)",
    'acceptance_by_position({run.header["method"]: run})',
    'rolling_acceptance({run.header["method"]: run})',
    'memory_bytes({run.header["method"]: run})',
    "kv_map(run, play=True)",
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run a cell that begins so


def tokens_csv(trace: Trace) -> str:
    """One row for each drafted or emitted token: what became of it, and its probabilities."""
    texts = trace.header.get("pieces") or {}
    rows = [
        {
            "round": t.round,
            "position": t.position,
            "token_id": t.id,
            "text": texts.get(str(t.id), ""),
            "fate": t.fate,
            "p_target": t.p,
            "q_draft": t.q,
        }
        for t in fates(trace)
    ]
    return _csv(rows, ["round", "position", "token_id", "text", "fate", "p_target", "q_draft"])


def rounds_csv(trace: Trace) -> str:
    """One row for each round: times in ms, counts, bytes of both memories. Empty cells were not measured."""
    rows, by_round = [], defaultdict(list)
    for event in trace.events:
        by_round[event.round].append(event)
    for emit in trace.of("emit"):
        mine = by_round[emit.round]

        def total(kind: str, mine: list[Any] = mine) -> float | None:
            found = [e.ms for e in mine if e.kind == kind]
            return round(sum(found), 4) if found else None

        held = {who: next((e.bytes for e in reversed(mine) if e.who == who and e.bytes), None) for who in ("draft", "target")}
        rows.append(
            {
                "round": emit.round,
                "emitted": emit.count,
                "drafted": sum(e.count for e in mine if e.kind in ("accept", "reject")),
                "accepted": sum(e.count for e in mine if e.kind == "accept"),
                "round_ms": round(emit.ms, 4),
                "draft_ms": total("draft"),
                "verify_ms": total("verify"),
                "upkeep_ms": total("upkeep"),
                "draft_kv_bytes": held["draft"],
                "target_kv_bytes": held["target"],
            }
        )
    names = [
        "round",
        "emitted",
        "drafted",
        "accepted",
        "round_ms",
        "draft_ms",
        "verify_ms",
        "upkeep_ms",
        "draft_kv_bytes",
        "target_kv_bytes",
    ]
    return _csv(rows, names)


def jsonl(trace: Trace) -> str:
    """The trace as `masw run --trace` writes it (docs/TRACE.md)."""
    return "\n".join(trace.lines()) + "\n"


def notebook(trace_file: str) -> str:
    """A notebook (JSON) that draws the figures of a trace; its first code cell is tagged for papermill (`-p trace FILE`)."""

    def cell(kind: str, source: str, *tags: str) -> dict[str, Any]:
        code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        name = hashlib.sha256(source.encode()).hexdigest()[:8]
        return {"cell_type": kind, "id": name, "metadata": {"tags": list(tags)} if tags else {}, "source": source, **code}

    head = (
        "# A run of masw\n\nPut the trace beside this notebook, or give its path: `papermill run.ipynb out.ipynb -p trace FILE`."
    )
    cells = [
        cell("markdown", head),
        cell("code", f"trace = {json.dumps(trace_file)}  # what the app or `masw run --trace` wrote", "parameters"),
        cell("code", _LOAD),
        *(cell("code", f"show(figures.{call})") for call in _FIGURES),
    ]
    kernel = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def _csv(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: "'" + v if isinstance(v, str) and v.startswith(_FORMULA) else v for k, v in row.items()})
    return out.getvalue()
