"""The JSON side-car of a report: parameters, environment and every headline number of each notebook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from masw.errors import UsageError
from masw.report.display import ENVIRONMENT_MIME, HEADLINE_MIME
from masw.report.runner import Outcome

SCHEMA = 1


def sidecar(outcomes: Sequence[Outcome], title: str = "masw report") -> dict[str, Any]:
    """The record of a report."""
    from masw.provenance import versions

    return {
        "schema": SCHEMA,
        "title": title,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {**versions(), **_versions()},
        "notebooks": [_entry(outcome) for outcome in outcomes],
    }


def load(path: Path) -> dict[str, Any]:
    """A side-car, given its file or the folder of its report. Raises UsageError for anything else."""
    file = path / "report.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror or error}); give a report's folder or its report.json") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not JSON; give a report's folder or its report.json") from None
    if not isinstance(found, dict) or not isinstance(found.get("notebooks"), list):
        raise UsageError(f"{file} is not a report's side-car; give a report's folder or its report.json")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"{file} has schema {found.get('schema')}, this masw reads {SCHEMA}; write the report again")
    return found


def emitted(notebook: Any, mime: str) -> Iterable[dict[str, Any]]:
    """Records of one mimetype among a notebook's outputs, in order."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []) if cell.cell_type == "code" else []:
            if mime in output.get("data", {}):
                yield dict(output.data[mime])


def repeated_name(notebook: Any) -> str | None:
    """A name that two headline numbers of a notebook share."""
    names = [record["name"] for record in emitted(notebook, HEADLINE_MIME)]
    return next((name for name in names if names.count(name) > 1), None)


def _entry(outcome: Outcome) -> dict[str, Any]:
    headlines = list(emitted(outcome.notebook, HEADLINE_MIME))
    card = next(iter(emitted(outcome.notebook, ENVIRONMENT_MIME)), None)
    return {
        "name": outcome.source.name,
        "title": outcome.source.title,
        "summary": outcome.source.summary,
        "source_sha256": outcome.source.sha256,
        "status": outcome.status,
        "error": outcome.error,
        "seconds": round(outcome.seconds, 3),
        "parameters": outcome.parameters,
        "environment": None if card is None else {k: v for k, v in card.items() if k != "parameters"},
        "headlines": headlines,
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in ("plotly", "papermill", "ipykernel")}
