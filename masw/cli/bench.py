"""`masw bench`: a grid of documents, contexts and methods, or the steps of a public shape with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.cli.evaluate import numbers
from masw.errors import Cancelled, MaswError, UsageError

if TYPE_CHECKING:
    from masw.results import Line

SAMPLES = "samples"


def bench(
    pair: Annotated[str, typer.Option(help="Preset or DRAFT:TARGET.")] = "smollm2",
    methods: Annotated[
        str,
        typer.Option(help="Rows of the table of methods (all: every one), and peers: hf | hf-assisted | hf-assisted-default."),
    ] = "all",
    contexts: Annotated[str, typer.Option(help="Prompt lengths, tokens: 1k,2k,4k.")] = "2k",
    data: Annotated[
        list[str], typer.Option(help="Rows of JSON lines (text, question; or LongBench's own), or samples. Repeatable.")
    ] = [SAMPLES],  # noqa: B006 (typer reads it)
    docs: Annotated[int, typer.Option(help="Documents per set and context, those that fill it.")] = 2,
    repeats: Annotated[int, typer.Option(help="Runs of each method on each document, in turns.")] = 2,
    gamma: Annotated[int, typer.Option(help="Drafted tokens per verify pass.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer at most, tokens.")] = 128,
    window: Annotated[int, typer.Option(help="W: last raw tokens kept exactly.")] = 512,
    stride: Annotated[int, typer.Option(help="r: raw tokens per memory slot.")] = 8,
    sinks: Annotated[int, typer.Option(help="S: first raw tokens kept exactly.")] = 4,
    adaptor: Annotated[str, typer.Option(help="auto | quiet | none | PATH, as in `masw run`.")] = "auto",
    draft_weights: Annotated[str, typer.Option(help="auto | plain | int8 | int4.")] = "auto",
    eagle: Annotated[str, typer.Option(help="Head for the method eagle: auto (shipped with masw) | PATH.")] = "auto",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the table and traces; the same command goes on in it.")] = Path(
        "runs/bench"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
) -> None:
    """Measure methods on documents: speed, acceptance, bytes, and whether the output is the target's own; predicted beside measured."""
    from dataclasses import asdict

    from masw import bench as core
    from masw import cost, hardware, results
    from masw.adaptor import read_info
    from masw.cli.stop import Stop
    from masw.devices import resolve_device, resolve_dtype
    from masw.engine import Settings
    from masw.methods import METHODS, MemoryOptions
    from masw.provenance import provenance
    from masw.quantise import check_kind
    from masw.session import ADAPTORS, RunOptions, Session
    from masw.zoo import load_pair

    lengths = numbers("contexts", contexts)
    names = [m.strip() for part in methods.split(",") for m in (METHODS if part.strip() == "all" else [part]) if m.strip()]
    asked = core.check_methods(names)
    if docs < 1 or repeats < 1:
        raise UsageError(f"--docs and --repeats must be at least 1, not {docs} and {repeats}")
    settings = Settings(max_new_tokens, gamma)
    for method in asked:
        if method in METHODS:
            RunOptions(method, MemoryOptions(sinks, window, stride), settings).shape()
    check_kind(draft_weights)
    if adaptor not in ADAPTORS:
        read_info(Path(adaptor))
    sets = _sets(data)
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    results.check_folder(out)
    session = Session(load_pair(pair, device=where, dtype=kind))
    chosen = core.runnable(session, asked, methods.split(","), eagle, _note)
    models = {"draft": session.pair.draft.provenance, "target": session.pair.target.provenance}
    definition = results.Definition(
        pair,
        str(kind).removeprefix("torch."),
        str(where),
        gamma,
        max_new_tokens,
        sinks,
        window,
        stride,
        adaptor,
        draft_weights,
        eagle,
        models,
    )
    found = core.cases(sets, session, lengths, docs, max_new_tokens)
    if not found:
        raise UsageError(f"no document fills a context of {min(lengths):,} tokens; lower --contexts or give longer documents")
    for context in lengths:
        for name in sets:
            count = sum(case.set == name and case.context == context for case in found)
            if count < docs:
                _note(f"{name}: {count} of {docs} documents fill a context of {context:,} tokens")
    grid = core.Grid(definition, chosen, tuple(found), repeats)
    table = results.Table(out, definition)
    stop = Stop()
    with stop:
        _note("measuring read bandwidth and product rate")
        rates = cost.Rates(hardware.measure_bandwidth(where, kind), hardware.measure_gemm(where, kind))
        job = core.Bench(session, grid, table, rates, _note, stop)
        job.check_memory()
        try:
            job.run()
        finally:
            head = {"definition": asdict(definition), "provenance": provenance(where, kind), "rates": asdict(rates)}
            lines = results.write_tables(table, head)
    cells = set(grid)
    done, failed = len(cells & table.done), [cell for cell in table.standing if cell.error is not None]
    if as_json:
        typer.echo(
            json.dumps(
                {"lines": [asdict(line) for line in lines], "cells": len(cells), "done": done, "out": str(out), **head},
                default=str,
            )
        )
    elif lines:
        typer.echo(show(lines))
        typer.echo(f"{done} of {len(cells)} cells in {out} (results.jsonl, results.csv, summary.jsonl, summary.csv, traces)")
    if stop():
        raise Cancelled(f"interrupted; {done} of {len(cells)} cells are kept in {out}, the same command goes on from them")
    if failed:
        raise MaswError(
            f"{len(failed)} of {len(cells)} cells failed, the first with: {failed[0].error}; the same command tries them again"
        )


def _note(text: str) -> None:
    typer.echo(f"masw: {text}", err=True)


def _sets(data: list[str]) -> dict[str, list[dict[str, str]]]:
    """Set name -> rows."""
    from masw import cases
    from masw.session import data_folder

    found: dict[str, list[dict[str, str]]] = {}
    for word in dict.fromkeys(data):
        if word == SAMPLES:
            paths = sorted((data_folder() / "samples").glob("*.md"))
            name, rows = SAMPLES, [{"id": p.stem, "text": p.read_text(encoding="utf-8"), "question": ""} for p in paths]
        else:
            name, rows = Path(word).stem, cases.rows(Path(word))
        if name in found or name == "all":
            raise UsageError(f"two sets would be called '{name}'; rename {word}")
        found[name] = rows
    return found


def show(lines: list[Line]) -> str:
    """The summary for a terminal; every column of summary.csv is wider."""
    from masw.cli.display import columns

    def cell(value: Any, digits: int = 2) -> str:
        return "-" if value is None else f"{value:,.{digits}f}" if isinstance(value, float) else str(value)

    def per(value: float | None, unit: float, digits: int) -> str:
        return cell(None if value is None else value / unit, digits)

    def spread(found: tuple[float, float] | None) -> str:
        return "-" if found is None else f"{found[0]:.2f}-{found[1]:.2f}"

    def prefill(line: Line) -> float | None:
        return sum(v for v in (line.prefill_target_ms, line.prefill_draft_ms) if v is not None) or None

    shown: dict[str, Callable[[Line], str]] = {
        "set": lambda x: x.set,
        "context": lambda x: f"{x.context:,}",
        "method": lambda x: x.method,
        "n": lambda x: f"{x.n} ({x.errors} failed)" if x.errors else str(x.n),
        "prefill ms": lambda x: cell(prefill(x), 0),
        "TTFT ms": lambda x: cell(x.ttft_ms, 0),
        "tok/s": lambda x: cell(x.decode_tokens_per_second),
        "e2e tok/s": lambda x: cell(x.end_to_end_tokens_per_second),
        "speed-up": lambda x: cell(x.speedup),
        "quartiles": lambda x: spread(x.speedup_quartiles),
        "predicted": lambda x: cell(x.speedup_predicted),
        "e2e": lambda x: cell(x.speedup_end_to_end),
        "tok/iter": lambda x: cell(x.tokens_per_iteration),
        "no bonus": lambda x: cell(x.tokens_per_iteration_without_bonus),
        "accept": lambda x: cell(x.acceptance),
        "draft ms": lambda x: cell(x.draft_ms, 1),
        "floor": lambda x: cell(x.draft_floor_ms, 1),
        "verify ms": lambda x: cell(x.verify_ms, 1),
        "floor ": lambda x: cell(x.verify_floor_ms, 1),
        "upkeep": lambda x: cell(x.upkeep_ms),
        "draft KV MB": lambda x: per(x.draft_kv_bytes, 1e6, 1),
        "ratio": lambda x: cell(x.draft_kv_ratio, 3),
        "peak GB": lambda x: per(x.peak_memory_bytes, 1e9, 2),
        "predicted ": lambda x: per(x.peak_memory_predicted_bytes, 1e9, 2),
        "identical": lambda x: "-" if x.identical is None else f"{x.identical}/{x.compared}",
    }
    return columns([list(shown), *([show(line) for show in shown.values()] for line in lines)])
