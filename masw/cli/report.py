"""`masw report`: run the notebooks, write one page that needs no network, and compare two reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from masw.cli.paths import folder
from masw.errors import Cancelled, MaswError, UsageError

if TYPE_CHECKING:
    from masw.report.library import Source
    from masw.report.runner import Outcome


class _RunByDefault(TyperGroup):
    """`masw report 01_slots` means `masw report run 01_slots`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer brings a click of its own
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Run the notebooks into one offline report: masw report [NAME...|all] [options] (see `masw report run --help`); "
    "also `list` and `diff`.",
    rich_markup_mode=None,
)

Notebooks = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of notebooks. Default: masw's own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")]


@app.command(name="run")
def run_notebooks(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...|all]", help="Notebooks, by name or number (`01`). Default: all.")
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="A parameter, or NOTEBOOK.KEY for one alone. Repeatable.")
    ] = [],  # noqa: B006
    params: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Parameters from a file; --set wins.")] = None,
    pair: Annotated[str | None, typer.Option(help="The pair of a live run; implies --mode live.")] = None,
    mode: Annotated[str | None, typer.Option(help="trace (recorded, no model) | live. Default: as each notebook says.")] = None,
    format_: Annotated[str, typer.Option("--format", help="Comma-separated: html, ipynb, json.")] = "html,ipynb,json",
    out: Annotated[
        Path,
        typer.Option(
            parser=folder("--out"), metavar="DIR", help="Folder of the report; its earlier files are replaced at the end."
        ),
    ] = Path("out/report"),
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds that one notebook may take.")] = 1800.0,
    kernel: Annotated[str, typer.Option(help="Name of the Jupyter kernel.")] = "python3",
    notebooks: Notebooks = None,
    as_json: AsJson = False,
) -> None:
    """Run notebooks and write report.html, report.json and the executed notebooks. Exit 3 names the first cell that failed."""
    from masw.cli.run import Stop
    from masw.report import extras
    from masw.report.build import FORMATS, build, check_out
    from masw.report.checks import check
    from masw.report.library import choose
    from masw.report.runner import check_kernel
    from masw.report.schema import did_you_mean, parse_file, parse_sets, resolve

    # Everything that can be refused is refused before a kernel starts or a model is fetched.
    extras.need(*extras.RUN)
    formats = [word.strip() for word in format_.split(",") if word.strip()]
    for word in formats:
        if word not in FORMATS:
            raise UsageError(f"no format '{word}'{did_you_mean(word, FORMATS)}")
    if not formats:
        raise UsageError(f"--format needs one of {', '.join(FORMATS)}")
    if not 0 < timeout < 1e7:
        raise UsageError(f"--timeout must be above 0 seconds, not {timeout:g}")
    sources = choose(names or [], notebooks)
    sets = parse_sets([*set_, *_own_options(pair, mode)])
    schemas = {s.name: s.schema for s in sources}
    values = check(schemas, resolve(schemas, sets, {} if params is None else parse_file(_read(params), params.name)))
    check_kernel(kernel)
    check_out(out)
    _fetch_models(values)

    def told(outcome: Outcome) -> None:
        word = "done" if outcome.status == "ok" else outcome.status
        _note(f"{outcome.source.name}: {word}, {outcome.seconds:.1f} s")

    def bar(number: int, source: Source) -> bool | dict[str, Any]:
        if not sys.stderr.isatty():
            return False
        return {"desc": f"[{number + 1}/{len(sources)}] {source.name}", "leave": False, "file": sys.stderr}

    stop = Stop()
    with stop:
        report = build(
            sources, values, out, formats=formats, kernel=kernel, timeout_s=timeout, stop=stop, told=told, progress=bar
        )
    bad = [outcome for outcome in report.outcomes if outcome.status != "ok"]
    if as_json:
        status = {o.source.name: {"status": o.status, "seconds": round(o.seconds, 3), "error": o.error} for o in report.outcomes}
        typer.echo(json.dumps({"folder": str(report.folder), "files": [str(f) for f in report.files], "notebooks": status}))
    else:
        for file in report.files:
            typer.echo(f"{file}  {file.stat().st_size / 1e6:.2f} MB")
    if any(outcome.status == "interrupted" for outcome in bad):
        raise Cancelled(f"interrupted; what ran is in {report.folder}, the earlier report is as it was")
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise MaswError(
            f"{bad[0].source.name}, {bad[0].error}{more}; what ran is in {report.folder}, the earlier report is as it was"
        )


@app.command(name="list")
def list_notebooks(notebooks: Notebooks = None, as_json: AsJson = False) -> None:
    """Notebooks and their parameters: name, type, default, meaning."""
    from masw.report.library import choose

    sources = choose([], notebooks)
    if as_json:
        found = {
            s.name: {
                "title": s.title,
                "parameters": {
                    p.name: {"type": p.annotation, "default": p.default, "help": p.help} for p in s.schema.parameters.values()
                },
            }
            for s in sources
        }
        typer.echo(json.dumps(found))
        return
    for source in sources:
        typer.echo(f"{source.name}  {source.title}")
        for p in source.schema.parameters.values():
            typer.echo(f"    {p.name}: {p.annotation} = {p.default!r}" + (f"  {p.help}" if p.help else ""))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A report's folder or its report.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    tolerance: Annotated[float, typer.Option(help="Relative difference that counts as none, for floats.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Values that differ between two reports, and timings apart. Exit 1 when values that must repeat do not, 0 otherwise."""
    from masw.report.diff import compare
    from masw.report.sidecar import load

    if not 0 <= tolerance < 1:
        raise UsageError(f"--tolerance is a share from 0 to below 1, not {tolerance:g}")
    found = compare(load(a), load(b), tolerance)
    hard = [d for d in found if d.deterministic]
    if as_json:
        rows = [
            {"notebook": d.notebook, "name": d.name, "kind": d.kind, "a": _json(d.a), "b": _json(d.b), "unit": d.unit}
            for d in found
        ]
        typer.echo(json.dumps({"differ": bool(hard), "differences": rows}))
    else:
        groups = {
            "parameters that differ": [d for d in found if d.kind == "parameter"],
            "values that differ": hard,
            "timings": [d for d in found if d.kind == "timing"],
        }
        for heading, rows_of in groups.items():
            if rows_of:
                typer.echo("\n".join([f"{heading}:", *(f"  {d}" for d in rows_of)]))
        if not hard:
            typer.echo("deterministic values: all equal")
    if hard:
        raise typer.Exit(1)


def _own_options(pair: str | None, mode: str | None) -> list[str]:
    if pair is not None and mode == "trace":
        raise UsageError("--pair is for live runs; leave out --mode trace")
    mode = "live" if pair is not None else mode
    return [f"{key}={value}" for key, value in (("mode", mode), ("pair", pair)) if value is not None]


def _fetch_models(values: Mapping[str, Mapping[str, Any]]) -> None:
    """Models of live runs are made present here, where a failure is one line and a download has a bar."""
    pairs = {v["pair"] for v in values.values() if v.get("mode", "live") == "live" and isinstance(v.get("pair"), str)}
    if not pairs:
        return
    from masw.catalogue import distinct, resolve_pair
    from masw.packages import ProgressBar
    from masw.store import obtain

    models = {model for pair in sorted(pairs) for model in distinct(resolve_pair(pair))}
    with ProgressBar() as bar:
        for model in models:
            obtain(model, bar)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror or error}); name a YAML file with --params") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; name a YAML file with --params") from None


def _json(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str, list)) else "absent"


def _note(text: str) -> None:
    typer.echo(f"masw: {text}", err=True)
