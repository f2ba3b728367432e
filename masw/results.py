"""The table of a benchmark: a line a cell, kept as it comes, and what follows from it: speed-ups over `none`, medians, CSV. No torch.

DIR/results.jsonl   a header (what makes its cells comparable), then sessions (provenance, measured rates) and cells
DIR/results.csv     the cells
DIR/summary.jsonl   a header, then a line a set, context and method; DIR/summary.csv the same
docs/BENCH.md defines every column.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from masw import cost
from masw.errors import UsageError
from masw.files import check_writable, replacing

SCHEMA = 1
BASE = "none"  # what every method is compared with; always part of a grid

Key = tuple[str, str, int, int, str]  # set, document, context, repeat, method


@dataclass(frozen=True)
class Definition:
    """What makes cells of one folder comparable. More documents, contexts, methods and repeats may join; these may not change."""

    pair: str
    dtype: str
    device: str
    gamma: int
    max_new_tokens: int
    sinks: int
    window: int
    stride: int
    adaptor: str
    draft_weights: str
    eagle: str
    models: dict[str, Any]  # where both models' weights come from, checksums included
    adaptive: bool = False  # gamma is chosen before each round, up to `gamma`
    adaptor_sha256: str | None = None  # of the file that `adaptor` stood for; None: untrained slots
    eagle_sha256: str | None = None  # of the head's; None: the pair has none


@dataclass(frozen=True)
class Cell:
    """One run, as measured; times in ms, sizes in bytes, None where a thing does not exist for this method or was not measured.

    `*_floor_*` and `*_predicted` come from `masw.cost`. `prefill_target_ms` was measured once for the document and counts in full in
    `ttft_ms` and end to end for every method; a peer's own prefill cannot be told from its first iteration.
    """

    set: str
    document: str
    context: int
    repeat: int
    method: str
    session: str  # cells of one session ran one after the other; only those are paired
    error: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    finish: str | None = None
    prefill_draft_ms: float | None = None
    prefill_draft_floor_ms: float | None = None
    prefill_target_ms: float | None = None
    prefill_target_floor_ms: float | None = None
    ttft_ms: float | None = None
    decode_ms: float | None = None
    end_to_end_ms: float | None = None
    decode_tokens_per_second: float | None = None
    end_to_end_tokens_per_second: float | None = None
    iterations: int | None = None
    tokens_per_iteration: float | None = None
    tokens_per_iteration_without_bonus: float | None = None
    acceptance: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    drafted_per_iteration: float | None = None
    draft_ms: float | None = None  # a drafted token, mean
    draft_floor_ms: float | None = None
    verify_ms: float | None = None
    verify_floor_ms: float | None = None
    upkeep_ms: float | None = None
    draft_weights: str | None = None
    draft_kv_bytes: int | None = None
    draft_kv_predicted_bytes: int | None = None
    draft_kv_ratio: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_predicted_bytes: int | None = None
    identical_to_greedy: bool | None = None
    first_difference: int | None = None  # index of the first token that differs from `none`
    logit_gap: float | None = None  # how close the target was there
    trace: str | None = None
    wall_s: float | None = None

    @property
    def key(self) -> Key:
        return (self.set, self.document, self.context, self.repeat, self.method)


def check_folder(folder: Path) -> None:
    """Finds out before a model is loaded whether the table can be written."""
    check_writable(folder / "results.jsonl")


class Table:
    """DIR/results.jsonl: a header, then sessions and cells as they come. A line cut by a crash is dropped when the file is opened."""

    def __init__(self, folder: Path, definition: Definition) -> None:
        """Opens or creates the folder. Raises UsageError when it holds another grid or cannot be written."""
        self.folder, self.path = folder, folder / "results.jsonl"
        self.cells: list[Cell] = []
        self._sessions: dict[str, dict[str, Any]] = {}
        try:
            (folder / "traces").mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._read(definition)
            else:
                self._write({"type": "header", "schema": SCHEMA, "definition": asdict(definition)})
            self._append({"type": "check"}, keep=False)
        except OSError as error:
            raise UsageError(f"cannot write to {folder} ({error.strerror or error}); choose another --out") from None

    def open_session(self, about: dict[str, Any]) -> None:
        self._sessions[about["id"]] = about
        self._append({"type": "session", **about})

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """Those that the standing cells come from, the latest last: id, provenance and rates."""
        used = {cell.session for cell in self.standing}
        return [about for key, about in self._sessions.items() if key in used]

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self._append({"type": "cell", **asdict(cell)})

    @property
    def done(self) -> set[Key]:
        """Cells that need not run again: those that did not fail."""
        return {cell.key for cell in self.cells if cell.error is None}

    @property
    def standing(self) -> list[Cell]:
        """Every measured cell, and of the failures those that no later run made good: one a key."""
        done = self.done
        failed = {cell.key: cell for cell in self.cells if cell.error is not None and cell.key not in done}
        return [cell for cell in self.cells if cell.error is None or failed.get(cell.key) is cell]

    def _read(self, definition: Definition) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    rows.append(json.loads(line))
            except ValueError:
                if any(lines[number:]):
                    raise UsageError(f"{self.path} is damaged at line {number}; move it away or choose another --out") from None
        head = rows[0] if rows and isinstance(rows[0], dict) else {}
        if head.get("type") != "header" or head.get("schema") != SCHEMA:
            raise UsageError(f"{self.path} is no results table of this masw (schema {SCHEMA}); choose another --out")
        mine, theirs = json.loads(json.dumps(asdict(definition), default=str)), head["definition"]
        changed = [f"{k} {theirs.get(k)} -> {v}" for k, v in mine.items() if k != "models" and v != theirs.get(k)]
        if changed or mine != theirs:
            what = ", ".join(changed) or "other weights"
            raise UsageError(f"{self.folder} holds another grid ({what}): its cells would not compare; choose another --out")
        known = Cell.__dataclass_fields__
        self.cells = [Cell(**{k: v for k, v in row.items() if k in known}) for row in rows if row.get("type") == "cell"]
        self._sessions = {
            row["id"]: {k: v for k, v in row.items() if k != "type"} for row in rows if row.get("type") == "session"
        }
        if lines[-1]:  # cut in the middle of a line
            with replacing(self.path) as partial:
                partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def _write(self, row: dict[str, Any]) -> None:
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(row, default=str) + "\n", encoding="utf-8")

    def _append(self, row: dict[str, Any], keep: bool = True) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            if keep:
                file.write(
                    json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, default=str) + "\n"
                )
                file.flush()
                os.fsync(file.fileno())


# ---- the table of means and medians


@dataclass(frozen=True)
class Line:
    """A set, context and method over documents and repeats. Speed-ups are medians of ratios to `none` of the same document, repeat
    and session, with quartiles; times, rates and bytes are medians, tokens per iteration and acceptance means."""

    set: str
    context: int
    method: str
    documents: int
    n: int
    errors: int
    new_tokens: float | None
    prefill_draft_ms: float | None
    prefill_draft_floor_ms: float | None
    prefill_target_ms: float | None
    prefill_target_floor_ms: float | None
    ttft_ms: float | None
    decode_tokens_per_second: float | None
    end_to_end_tokens_per_second: float | None
    pairs: int
    speedup: float | None  # decoding
    speedup_quartiles: tuple[float, float] | None
    speedup_predicted: float | None  # from tokens per iteration and the measured times of steps
    speedup_at_floor: float | None  # from the acceptance rate and the floors alone
    speedup_end_to_end: float | None
    speedup_end_to_end_quartiles: tuple[float, float] | None
    tokens_per_iteration: float | None
    tokens_per_iteration_without_bonus: float | None
    acceptance: float | None
    acceptance_by_position: list[float]
    drafted_per_iteration: float | None
    draft_ms: float | None
    draft_floor_ms: float | None
    verify_ms: float | None
    verify_floor_ms: float | None
    upkeep_ms: float | None
    draft_kv_bytes: float | None
    draft_kv_predicted_bytes: float | None
    draft_kv_ratio: float | None
    peak_memory_bytes: float | None
    peak_memory_predicted_bytes: float | None
    identical: int | None  # runs equal to `none`, of `compared`
    compared: int
    largest_logit_gap: float | None  # where they parted


def aggregate(found: Sequence[Cell]) -> list[Line]:
    """Lines by context, set and method, in the order of the cells; several sets also together, as the set `all`."""
    names = list(dict.fromkeys(cell.set for cell in found))
    groups: dict[tuple[int, str, str], list[Cell]] = {}
    for cell in found:
        for name in (cell.set, "all") if len(names) > 1 else (cell.set,):
            groups.setdefault((cell.context, name, cell.method), []).append(cell)
    base = {(c.set, c.document, c.context, c.repeat, c.session): c for c in found if c.method == BASE and c.error is None}
    methods = list(dict.fromkeys(cell.method for cell in found))
    order = sorted(groups, key=lambda g: (g[0], [*names, "all"].index(g[1]), methods.index(g[2])))
    return [_line(name, context, method, groups[context, name, method], base) for context, name, method in order]


def _line(name: str, context: int, method: str, group: list[Cell], base: dict[Any, Cell]) -> Line:
    ok = [cell for cell in group if cell.error is None]

    def values(what: str) -> list[float]:
        return [v for cell in ok if (v := getattr(cell, what)) is not None]

    def mid(what: str) -> float | None:
        return median(found) if (found := values(what)) else None

    def mean(what: str) -> float | None:
        return fmean(found) if (found := values(what)) else None

    pairs = [(c, base[k]) for c in ok if (k := (c.set, c.document, c.context, c.repeat, c.session)) in base]
    ratios: dict[str, list[float]] = {}
    for what in ("decode_tokens_per_second", "end_to_end_tokens_per_second"):
        both = [(getattr(a, what), getattr(b, what)) for a, b in pairs]
        ratios[what] = [a / b for a, b in both if a and b]
    decoding, whole = ratios["decode_tokens_per_second"], ratios["end_to_end_tokens_per_second"]
    judged = [c.identical_to_greedy for c in ok if c.identical_to_greedy is not None]
    shares = [c.acceptance_by_position for c in ok if c.acceptance_by_position]
    longest = max(map(len, shares), default=0)
    return Line(
        set=name,
        context=context,
        method=method,
        documents=len({(c.set, c.document) for c in ok}),
        n=len(ok),
        errors=len(group) - len(ok),
        new_tokens=mean("new_tokens"),
        prefill_draft_ms=mid("prefill_draft_ms"),
        prefill_draft_floor_ms=mid("prefill_draft_floor_ms"),
        prefill_target_ms=mid("prefill_target_ms"),
        prefill_target_floor_ms=mid("prefill_target_floor_ms"),
        ttft_ms=mid("ttft_ms"),
        decode_tokens_per_second=mid("decode_tokens_per_second"),
        end_to_end_tokens_per_second=mid("end_to_end_tokens_per_second"),
        pairs=len(decoding),
        speedup=median(decoding) if decoding else None,
        speedup_quartiles=_quartiles(decoding),
        speedup_predicted=_middle(_predicted(a, b) for a, b in pairs),
        speedup_at_floor=_middle(_at_floor(a, b) for a, b in pairs),
        speedup_end_to_end=median(whole) if whole else None,
        speedup_end_to_end_quartiles=_quartiles(whole),
        tokens_per_iteration=mean("tokens_per_iteration"),
        tokens_per_iteration_without_bonus=mean("tokens_per_iteration_without_bonus"),
        acceptance=mean("acceptance"),
        acceptance_by_position=[round(fmean(s[i] for s in shares if len(s) > i), 4) for i in range(longest)],
        drafted_per_iteration=mean("drafted_per_iteration"),
        draft_ms=mid("draft_ms"),
        draft_floor_ms=mid("draft_floor_ms"),
        verify_ms=mid("verify_ms"),
        verify_floor_ms=mid("verify_floor_ms"),
        upkeep_ms=mid("upkeep_ms"),
        draft_kv_bytes=mid("draft_kv_bytes"),
        draft_kv_predicted_bytes=mid("draft_kv_predicted_bytes"),
        draft_kv_ratio=mid("draft_kv_ratio"),
        peak_memory_bytes=max(values("peak_memory_bytes"), default=None),
        peak_memory_predicted_bytes=max(values("peak_memory_predicted_bytes"), default=None),
        identical=sum(judged) if judged else None,
        compared=len(judged),
        largest_logit_gap=max(map(abs, values("logit_gap")), default=None),
    )


def _predicted(cell: Cell, none: Cell) -> float | None:
    """`cost.speedup` from this cell's tokens per iteration and measured step times."""
    if cell.tokens_per_iteration is None or cell.verify_ms is None or not none.verify_ms or cell.method == BASE:
        return None
    drafted = cell.drafted_per_iteration or 0.0
    return cost.speedup(cell.tokens_per_iteration, drafted, cell.draft_ms or 0.0, cell.verify_ms, none.verify_ms)


def _at_floor(cell: Cell, none: Cell) -> float | None:
    """The cost model alone: tokens per iteration from the acceptance rate, step times at their floors."""
    if cell.acceptance is None or cell.drafted_per_iteration is None or not cell.verify_floor_ms or not none.verify_floor_ms:
        return None
    if cell.draft_ms is not None and cell.draft_floor_ms is None:
        return None
    expected = cost.tokens_per_iteration(cell.acceptance, cell.drafted_per_iteration)
    draft = cell.draft_floor_ms or 0.0
    return cost.speedup(expected, cell.drafted_per_iteration, draft, cell.verify_floor_ms, none.verify_floor_ms)


def _middle(found: Iterable[float | None]) -> float | None:
    values = [value for value in found if value is not None]
    return median(values) if values else None


def _quartiles(values: list[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def heading(table: Table, definition: Definition) -> dict[str, Any]:
    """Head of the summary: the definition, and provenance and rates of the last session whose cells are in the table; where several
    are, all of them as `sessions`. Empty of both where no cell ran."""
    head: dict[str, Any] = {"definition": asdict(definition)}
    sessions = table.sessions
    if sessions:
        head |= {key: sessions[-1][key] for key in ("provenance", "rates") if key in sessions[-1]}
    return head | ({"sessions": sessions} if len(sessions) > 1 else {})


def write_tables(table: Table, definition: Definition) -> list[Line]:
    """DIR/results.csv (a row a cell), DIR/summary.jsonl (a header, then a row a line) and DIR/summary.csv."""
    found, head = table.standing, heading(table, definition)
    lines = aggregate(found)
    with replacing(table.folder / "summary.jsonl") as partial, partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"type": "header", "schema": SCHEMA, **head}, default=str) + "\n")
        file.writelines(json.dumps({"type": "line", **asdict(line)}) + "\n" for line in lines)
    write_csv(table.folder / "results.csv", [asdict(cell) for cell in found])
    write_csv(table.folder / "summary.csv", [asdict(line) for line in lines])
    return lines


def write_steps(folder: Path, head: dict[str, Any], rows: Sequence[Any]) -> None:
    """DIR/steps.jsonl (a header, then a line a row of dataclasses) and DIR/steps.csv."""
    found = [asdict(row) for row in rows]
    with replacing(folder / "steps.jsonl") as partial, partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"type": "header", "schema": SCHEMA, **head}, default=str) + "\n")
        file.writelines(json.dumps({"type": "step", **row}) + "\n" for row in found)
    write_csv(folder / "steps.csv", found)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Lists become words separated by spaces; None an empty field."""
    if not rows:
        return
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in row.items()})
