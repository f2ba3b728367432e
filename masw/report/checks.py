"""What parameters mean together, beyond the type of each: checked before a kernel starts or a model is fetched.

These are the names that masw's notebooks share (mode, pair, document, sinks, window, stride, p, q, text); a notebook that declares
others, or fewer, is checked for those that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from masw.errors import UsageError
from masw.report.schema import Parameter, Schema

LIVE = "(live)"  # in the help of a parameter: recorded runs have their own value of it


def check(schemas: Mapping[str, Schema], values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`values` of each notebook, a value for live runs alone taken back where nothing runs. Raises UsageError with the notebook's name."""
    values = _live_alone(schemas, values)
    read: set[str] = set()  # documents that were found good: all notebooks may name the same one
    for name, mine in values.items():
        try:
            _together(mine, read)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    return values


def _live_alone(schemas: Mapping[str, Schema], values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """In trace mode a parameter of live runs stays as declared, provided that some other chosen notebook uses the value given."""
    found = {name: dict(mine) for name, mine in values.items()}
    for name, schema in schemas.items():
        for p in schema.parameters.values():
            given = values[name][p.name]
            if given == p.default or not _idle(p, values[name]):
                continue
            used = any(
                p.name in other.parameters
                and values[where][p.name] == given
                and not _idle(other.parameters[p.name], values[where])
                for where, other in schemas.items()
            )
            if not used:
                raise UsageError(f"{name}: {p.name} is for live runs, and the recorded ones have their own; add --mode live")
            found[name][p.name] = p.default
    return found


def _idle(parameter: Parameter, values: Mapping[str, Any]) -> bool:
    return LIVE in parameter.help and values.get("mode") == "trace"


def _together(values: Mapping[str, Any], read: set[str]) -> None:
    mode = values.get("mode")
    if {"sinks", "window", "stride"} <= values.keys():
        from masw.config import MemoryShape

        MemoryShape(values["sinks"], values["window"], values["stride"])
    if mode == "trace" and "pair" in values:
        from masw.lessons import recorded_pairs

        if values["pair"] not in (there := recorded_pairs()):
            raise UsageError(f"no runs of {values['pair']} are recorded (there are: {', '.join(there)}); add --mode live")
    document = values.get("document")
    if mode != "trace" and document and document not in read:
        from masw import documents

        documents.read(document)
        read.add(document)
    if {"p", "q"} <= values.keys():
        from masw.explain import check_distributions

        check_distributions(values["p"], values["q"])
    if "text" in values and not str(values["text"]).split():
        raise UsageError("text needs at least one word")
