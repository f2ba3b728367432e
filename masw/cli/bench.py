"""`masw bench`: a grid of documents, contexts and methods, or the steps of a public shape with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.alone import alone
from masw.cli.evaluate import numbers
from masw.cli.paths import folder
from masw.errors import Cancelled, MaswError, UsageError

if TYPE_CHECKING:
    from masw.methods import MemoryOptions
    from masw.results import Line
    from masw.steps import StepRow

SAMPLES = "samples"


def bench(
    context: typer.Context,
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
    gamma: Annotated[
        str, typer.Option(help="Drafted tokens per verify pass, or auto: 0 to 8, by what rounds cost and bring (peers: 8).")
    ] = "5",
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer at most, tokens.")] = 128,
    window: Annotated[int, typer.Option(help="W: last raw tokens kept exactly.")] = 512,
    stride: Annotated[int, typer.Option(help="r: raw tokens per memory slot.")] = 8,
    sinks: Annotated[int, typer.Option(help="S: first raw tokens kept exactly.")] = 4,
    adaptor: Annotated[str, typer.Option(help="auto | quiet | none | PATH, as in `masw run`.")] = "auto",
    draft_weights: Annotated[str, typer.Option(help="auto | plain | int8 | int4.")] = "auto",
    eagle: Annotated[str, typer.Option(help="Head for the method eagle: auto (shipped with masw) | PATH.")] = "auto",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    out: Annotated[
        Path, typer.Option(parser=folder("--out"), help="Folder of the table and traces; the same command goes on in it.")
    ] = Path("runs/bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
    steps_only: Annotated[
        bool, typer.Option("--steps-only", help="Time single passes of --shape instead: no documents, no prefill.")
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(help="With --steps-only: llama-3.2-3b | llama-3.1-8b | ... | config.json. Repeatable.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="With --steps-only, and needed there: weights are drawn, not loaded.")
    ] = False,
    batch: Annotated[str, typer.Option(help="With --steps-only: equally long sequences side by side: 1,16.")] = "1",
    graphs: Annotated[
        bool,
        typer.Option("--graphs", help="With --steps-only: each step also through static shapes, on CUDA as a replayed graph."),
    ] = False,
    limit_s: Annotated[
        float, typer.Option(help="With --steps-only: no row but the first begins after this many seconds; 0: no limit.")
    ] = 0.0,
    skip_too_large: Annotated[
        bool, typer.Option("--skip-too-large", help="With --steps-only: what cannot fit becomes a row with its estimate.")
    ] = False,
) -> None:
    """Measure methods on documents: speed, acceptance, bytes, and whether the output is the target's own; predicted beside measured."""
    from dataclasses import asdict

    from masw import bench as core
    from masw import cost, hardware, results
    from masw.adaptor import read_info
    from masw.cli.stop import Stop
    from masw.devices import resolve_device, resolve_dtype
    from masw.engine import Settings
    from masw.gamma import parse
    from masw.judged import file_digest
    from masw.methods import METHODS, MemoryOptions
    from masw.quantise import check_kind
    from masw.session import ADAPTORS, RunOptions, Session, adaptor_file, adaptor_for
    from masw.zoo import load_pair

    lengths = numbers("contexts", contexts)
    most, adaptive = parse(gamma)
    if steps_only:
        if not shape or not random_weights:
            raise UsageError("--steps-only needs a --shape and --random-weights: it times shapes, not models")
        context.with_resource(alone(out))
        kinds = "full,window,masw,verify" if methods == "all" else methods
        options = MemoryOptions(sinks, window, stride)
        time_steps(
            shape,
            kinds,
            lengths,
            numbers("batch", batch),
            options,
            most,
            repeats,
            device,
            dtype,
            out,
            as_json,
            skip_too_large,
            "plain" if draft_weights == "auto" else draft_weights,
            graphs,
            limit_s,
        )
        return
    if shape or random_weights or skip_too_large or graphs or limit_s:
        theirs = "--shape, --random-weights, --graphs, --limit-s and --skip-too-large"
        raise UsageError(f"{theirs} belong to --steps-only; add it, or leave them out")
    words = [word.strip() for word in methods.split(",") if word.strip()]
    asked = core.check_methods([m for word in words for m in (METHODS if word == "all" else [word])])
    if docs < 1 or repeats < 1:
        raise UsageError(f"--docs and --repeats must be at least 1, not {docs} and {repeats}")
    settings = Settings(max_new_tokens, most)
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
    context.with_resource(alone(out))
    session = Session(load_pair(pair, device=where, dtype=kind))
    chosen = core.runnable(session, asked, words, eagle, _note)
    draft = session.pair.draft
    file = adaptor_file(draft.name, stride, adaptor)
    shapes = [METHODS[m].memory(MemoryOptions(sinks, window, stride)) for m in chosen if m in METHODS]
    if adaptor not in ADAPTORS and any(found is not None and found.stride for found in shapes):
        adaptor_for(draft.decoder, draft.name, stride, adaptor)  # of another draft or stride: told now, not by every cell
    head = session.eagle_head(eagle)[1] if any(m in METHODS and METHODS[m].head for m in chosen) else None
    models = {"draft": session.pair.draft.provenance, "target": session.pair.target.provenance}
    definition = results.Definition(
        pair,
        str(kind).removeprefix("torch."),
        str(where),
        most,
        max_new_tokens,
        sinks,
        window,
        stride,
        adaptor,
        draft_weights,
        eagle,
        models,
        adaptive,
        file_digest(file),
        file_digest(head),
    )
    found = core.cases(sets, session, lengths, docs, max_new_tokens)
    if not found:
        raise UsageError(f"no document fills a context of {min(lengths):,} tokens; lower --contexts or give longer documents")
    for length in lengths:
        for name in sets:
            count = sum(case.set == name and case.context == length for case in found)
            if count < docs:
                _note(f"{name}: {count} of {docs} documents fill a context of {length:,} tokens")
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
            lines = results.write_tables(table, definition)
    cells = set(grid)
    done, failed = len(cells & table.done), [cell for cell in table.standing if cell.error is not None and cell.key in cells]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "lines": [asdict(line) for line in lines],
                    "cells": len(cells),
                    "done": done,
                    "out": str(out),
                    **results.heading(table, definition),
                },
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


def time_steps(
    names: list[str],
    kinds: str,
    contexts: list[int],
    batches: list[int],
    options: MemoryOptions,
    gamma: int,
    repeats: int,
    device: str,
    dtype: str,
    out: Path,
    as_json: bool,
    skip_too_large: bool,
    weights: str,
    graphs: bool,
    limit_s: float,
) -> None:
    """`masw bench --steps-only`: OUT/steps.jsonl and steps.csv, rewritten after every row."""
    from dataclasses import asdict

    from masw import cost, hardware, results, steps
    from masw.devices import resolve_device, resolve_dtype
    from masw.engine import Settings
    from masw.provenance import provenance
    from masw.quantise import check_kind
    from masw.shapes import resolve_shape

    if repeats < 1:
        raise UsageError(f"--repeats must be at least 1, not {repeats}")
    if not 0 <= limit_s < float("inf"):
        raise UsageError(f"--limit-s takes seconds, 0 for no limit, not {limit_s}")
    Settings(gamma=gamma)
    check_kind(weights)
    configs = {name: resolve_shape(name) for name in names}
    wanted = [k.strip() for k in kinds.split(",")]
    chosen = steps.plans(list(configs), wanted, contexts, batches, options, gamma, weights, graphs)
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    if not skip_too_large:
        steps.check_fit(chosen, configs, where, kind, repeats, options.stride)
    results.check_writable(out / "steps.jsonl")
    _note("measuring read bandwidth and product rate")
    rates = cost.Rates(hardware.measure_bandwidth(where, kind), hardware.measure_gemm(where, kind))
    about: dict[str, Any] = {
        "provenance": provenance(where, kind),
        "rates": asdict(rates),
        "options": asdict(options),
        "gamma": gamma,
    }
    rows: list[StepRow] = []
    interrupted = False
    try:
        for row in steps.run(chosen, configs, where, kind, rates, stride=options.stride, repeats=repeats, limit_s=limit_s):
            rows.append(row)
            results.write_steps(out, about, rows)
            _note(
                f"[{len(rows)}/{len(chosen)}] {row.shape} {row.kind} {row.context:,} batch {row.batch}: {row.error or f'{row.ms:.3f} ms'}"
            )
    except KeyboardInterrupt:
        interrupted = True
    if as_json:
        typer.echo(json.dumps({"rows": [asdict(row) for row in rows], "out": str(out), **about}))
    elif rows:
        rate = f"read bandwidth {rates.bytes_per_s / 1e9:.1f} GB/s, product rate {rates.flops_per_s / 1e12:.2f} TFLOP/s"
        typer.echo(f"{about['provenance']['device']}, {rows[0].dtype}; {rate}; random weights, noise for KV\n{show_steps(rows)}")
    if interrupted:
        raise Cancelled(f"interrupted; {len(rows)} of {len(chosen)} rows are in {out}")
    if len(rows) < len(chosen):
        _note(f"stopped after {limit_s:g} s; {len(rows)} of {len(chosen)} rows are in {out}")
    if failed := [row for row in rows if row.error is not None and not (skip_too_large and row.error.startswith("needs about"))]:
        raise MaswError(f"{len(failed)} of {len(rows)} rows failed, the first with: {failed[0].error}")


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


def show_steps(rows: list[StepRow]) -> str:
    """Measured beside the floor: the larger of bytes / bandwidth and FLOPs / product rate."""
    from masw.cli.display import columns

    shown: dict[str, Callable[[StepRow], str]] = {
        "shape": lambda x: x.shape,
        "step": lambda x: x.kind,
        "context": lambda x: f"{x.context:,}",
        "batch": lambda x: str(x.batch),
        "rows": lambda x: str(x.rows),
        "weights": lambda x: x.dtype if x.weights == "plain" else x.weights,
        "graphs": lambda x: x.graphs or "",
        "ms": lambda x: cell(x.ms, 3),
        "quartiles": lambda x: spread(x.ms_quartiles, 3),
        "floor ms": lambda x: cell(x.floor_ms, 3),
        "ms/floor": lambda x: cell(x.over_floor),
        "GB read": lambda x: per(x.read_bytes, 1e9, 3),
        "GFLOP": lambda x: per(x.flops, 1e9, 2),
        "KV MB": lambda x: per(x.kv_bytes, 1e6, 1),
        "peak GB": lambda x: per(x.peak_memory_bytes, 1e9, 2),
        "predicted": lambda x: per(x.needed_bytes, 1e9, 2),
        "n": lambda x: str(x.n),
        "error": lambda x: x.error or "",
    }
    return columns([list(shown), *([show(row) for show in shown.values()] for row in rows)])


def cell(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}" if isinstance(value, float) else str(value)


def per(value: float | None, unit: float, digits: int) -> str:
    return cell(None if value is None else value / unit, digits)


def spread(found: tuple[float, float] | None, digits: int = 2) -> str:
    return "-" if found is None else f"{found[0]:.{digits}f}-{found[1]:.{digits}f}"


def show(lines: list[Line]) -> str:
    """The summary for a terminal; summary.csv has more columns."""
    from masw.cli.display import columns

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
