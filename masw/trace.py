"""The one record of a run: typed events -> JSON lines on disk -> one table -> figures. See docs/TRACE.md for every field.

No torch here: notebooks, report and app read traces on machines that never load a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from masw.errors import UsageError
from masw.files import replacing

SCHEMA = 1

KINDS = {
    "prefill": "one chunk of the prompt went through a model",
    "materialise": "memory slots were born in the draft's memory",
    "select": "exact prompt entries were chosen to stay, where the prompt ends",
    "evict": "raw tokens left the window for good",
    "draft": "the draft model proposed one token",
    "verify": "the target read the pending token and the drafted block",
    "accept": "drafted tokens were kept",
    "reject": "drafted tokens were refused",
    "rollback": "a memory dropped the entries of refused tokens",
    "upkeep": "what a round spends on its memories and on the accept rule, outside the two models",
    "emit": "tokens joined the output",
    "end": "the run is over",
}
ROLES = ("accepted", "correction", "bonus", "target")  # of an emitted token; target: nothing was drafted


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `position` is the token position it starts at, `count` how many tokens (slots for materialise)."""

    kind: str
    who: str  # draft | target | engine
    round: int  # 0 for prefill, then 1, 2, ...
    at_ms: float  # since the start of the run, at the end of the event
    position: int
    count: int
    ms: float = 0.0  # its duration; 0 where the time belongs to an enclosing event
    bytes: int = 0  # KV bytes that `who` holds after it
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """Header (settings and provenance) and events of one run."""

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    truncated: bool = False  # the file ended inside a line

    def of(self, kind: str, who: str | None = None) -> list[Event]:
        return [e for e in self.events if e.kind == kind and (who is None or e.who == who)]

    def save(self, path: Path) -> None:
        """Writes JSON lines under a temporary name, then renames. Raises UsageError when it cannot."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in self.lines())
        except OSError as error:
            raise UsageError(f"cannot write the trace to {path}: {error.strerror or error}; choose another path") from None

    def lines(self) -> Iterator[str]:
        yield json.dumps({"type": "header", "schema": SCHEMA, **self.header})
        for event in self.events:
            yield json.dumps(
                {"type": "event", **{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(event).items()}}
            )

    @staticmethod
    def load(path: Path) -> Trace:
        """Reads a trace; a cut last line is dropped and noted. Raises UsageError with the line number for anything else."""
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"cannot read the trace {path}: {error.strerror or error}") from None
        return Trace.parse(text, name=path.name)

    @staticmethod
    def parse(text: str, name: str = "trace") -> Trace:
        lines = text.splitlines()
        known = {f.name for f in fields(Event)}
        trace: Trace | None = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                kind = row.pop("type")
                if kind == "header" and trace is None:
                    schema = row.pop("schema")
                    if schema != SCHEMA:
                        raise UsageError(
                            f"{name} has trace schema {schema}, this masw reads {SCHEMA}; record it again or update masw"
                        )
                    trace = Trace(row)
                elif trace is not None and kind == "event":
                    trace.events.append(Event(**{k: v for k, v in row.items() if k in known}))
                else:
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                if number == len(lines) and trace is not None:
                    trace.truncated = True
                    break
                raise UsageError(
                    f"{name} is not a masw trace (line {number}); use a .jsonl file that `masw run --trace` wrote"
                ) from None
        if trace is None:
            raise UsageError(f"{name} holds no trace header; use a .jsonl file that `masw run --trace` wrote")
        return trace
