"""`masw doctor`: what this machine is and how fast it reads and multiplies."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Versions, device, cores, memory, instruction sets, measured GEMM rate and read bandwidth."""
    from masw.hardware import report

    found = report()
    if as_json:
        typer.echo(json.dumps(found))
        return
    width = max(len(key) for key in found)
    for key, value in found.items():
        typer.echo(f"{key.ljust(width)}  {value}")
