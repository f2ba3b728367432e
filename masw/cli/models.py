"""`masw models`: what is there, fetch, where it lies, and whether the files are whole."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from masw.errors import MaswError

app = typer.Typer(help="List, fetch and check model pairs.", invoke_without_command=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def default(context: typer.Context) -> None:
    """List, fetch and check model pairs. Without a command: list."""
    if context.invoked_subcommand is None:
        list_models()


@app.command(name="list")
def list_models(as_json: AsJson = False) -> None:
    """Presets: draft, target, whether they are on this machine, size on disk or to download (MB), context (tokens)."""
    from masw.zoo import cache_root, status

    rows = status()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        there = f"{row.disk_bytes / 1e6:,.0f} MB on disk" if row.cached else f"{row.download_bytes / 1e6:,.0f} MB to fetch"
        if not row.disk_bytes and not row.download_bytes:
            there = "nothing to fetch"
        typer.echo(f"{row.name:14}  {there:20}  context {row.context:>7,}  {row.draft} -> {row.target}")
        typer.echo(f"{'':14}  {row.note}")
    typer.echo(f"cache: {cache_root()} (MASW_HOME moves it)")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Preset, model, hub id or DRAFT:TARGET.")]) -> None:
    """Download a pair into the cache, with progress; what is whole is not fetched again, an interrupted fetch goes on."""
    from masw.zoo import fetch as fetch_pair

    for model, folder in fetch_pair(name).items():
        typer.echo(f"{model}  {folder or 'random weights, nothing to fetch'}")


@app.command()
def path(name: Annotated[str, typer.Argument(help="Preset, model, hub id or DRAFT:TARGET.")]) -> None:
    """Print the folder of each model of a pair that is on this machine."""
    from masw.zoo import path as folders

    for model, folder in folders(name).items():
        typer.echo(f"{model}  {folder}")


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="Preset or model; without one, all that are here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare it with its recorded SHA-256; exits 3 when one differs."""
    from masw.zoo import verify as check

    rows = check(name)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
    else:
        for row in rows:
            typer.echo(
                f"{'ok ' if row.ok else 'BAD'}  {row.model}  {row.file}  {'' if row.ok and row.detail == 'ok' else row.detail}".rstrip()
            )
        if not rows:
            typer.echo("no models on this machine; run: masw models fetch smollm2")
    bad = [row for row in rows if not row.ok]
    if bad:
        raise MaswError(f"{len(bad)} of {len(rows)} files are damaged; run: masw models fetch {bad[0].model}")
