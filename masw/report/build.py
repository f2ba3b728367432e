"""A report from beginning to end: check, run, assemble beside the old one, and only then take its place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from masw.errors import MaswError, UsageError
from masw.report import html
from masw.report.library import Source
from masw.report.runner import Outcome, execute
from masw.report.sidecar import repeated_name, sidecar

FORMATS = ("html", "ipynb", "json")
PAGES = ("report.html", "report.json")
INCOMPLETE = "incomplete"  # folder in the report's own for runs that did not end well


@dataclass(frozen=True)
class Report:
    outcomes: list[Outcome]
    folder: Path  # where the files are
    files: list[Path]

    @property
    def complete(self) -> bool:
        return all(outcome.status == "ok" for outcome in self.outcomes)


def check_out(out: Path) -> None:
    """Creates the folder and writes a probe into it. Raises UsageError before any kernel starts."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        folder = next((p for p in (out, *out.parents) if os.path.lexists(p)), out)
        what = f"{folder} is a file, not a folder" if folder.is_file() else error.strerror or str(error)
        raise UsageError(f"cannot write into {out} ({what}); choose another folder with --out") from None


def build(
    sources: Sequence[Source],
    values: Mapping[str, Mapping[str, Any]],
    out: Path,
    *,
    formats: Sequence[str] = FORMATS,
    kernel: str = "python3",
    timeout_s: float = 1800.0,
    stop: Callable[[], bool] = lambda: False,
    told: Callable[[Outcome], None] = lambda outcome: None,
    progress: Callable[[int, Source], bool | dict[str, Any]] = lambda number, source: False,
) -> Report:
    """Runs every notebook (one that fails does not keep the others from running) and writes the report.

    When all went well the files take their places in `out`. Otherwise they go to `out`/incomplete and what lay in `out` stays as it
    was. `told` hears of each notebook as it ends. Raises MaswError when the files cannot be written.
    """
    check_out(out)
    work = Path(tempfile.mkdtemp(prefix=".report.", suffix=".partial", dir=out))
    try:
        outcomes: list[Outcome] = []
        for number, source in enumerate(sources):
            outcome = execute(
                source,
                values[source.name],
                work,
                kernel=kernel,
                timeout_s=timeout_s,
                stop=stop,
                progress=progress(number, source),
            )
            if outcome.status == "ok" and (twice := repeated_name(outcome.notebook)):
                outcome.status, outcome.error = "failed", f"two numbers are called '{twice}'; every headline needs its own name"
            outcomes.append(outcome)
            told(outcome)
            if outcome.status == "interrupted":
                break
        record = sidecar(outcomes)
        if "json" in formats:
            (work / "report.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if "html" in formats:
            made = html.page(record, {o.source.name: o.notebook for o in outcomes})
            (work / "report.html").write_text(made, encoding="utf-8", errors="replace")
        if "ipynb" not in formats:
            for outcome in outcomes:
                outcome.path.unlink(missing_ok=True)
        complete = all(outcome.status == "ok" for outcome in outcomes)
        folder = out if complete else out / INCOMPLETE
        folder.mkdir(exist_ok=True)
        expected = [*PAGES, *(outcome.path.name for outcome in outcomes)]
        earlier = _files(folder)
        placed = _place(work, folder, expected)
        _retire(folder, earlier - {path.name for path in placed})
        if complete and (out / INCOMPLETE).is_dir():
            _retire(out / INCOMPLETE, _files(out / INCOMPLETE))
            with suppress(OSError):
                (out / INCOMPLETE).rmdir()  # unless someone keeps something of their own there
        return Report(outcomes, folder, placed)
    except OSError as error:
        raise MaswError(
            f"cannot write the report into {out} ({error.strerror or error}); free some space or choose --out"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    """Names of the files of the report that lies in `folder`, as its side-car tells them."""
    try:
        notebooks = json.loads((folder / PAGES[1]).read_text(encoding="utf-8"))["notebooks"]
        names = {f"{notebook['name']}.ipynb" for notebook in notebooks}
    except (OSError, ValueError, KeyError, TypeError):
        names = set()
    return {*PAGES, *(name for name in names if Path(name).name == name)}


def _retire(folder: Path, names: Iterable[str]) -> None:
    """Takes away what the new report does not bring: two reports in one folder would pass for one."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def _place(work: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    """Moves the report's own files; whatever else a notebook left in its working folder goes with that."""
    placed = []
    for path in (work / name for name in names):
        if not path.is_file():
            continue
        target = folder / path.name
        if target.is_dir():
            raise UsageError(f"{target} is a folder where the report's file belongs; move it away")
        os.replace(path, target)
        placed.append(target)
    return placed
