"""The table of ablations: recipes at equal tokens, a JSON line each, and the rows and curves that follow from it. No torch.

data/results/ablations_PAIR.jsonl: a header, then a line a recipe as scripts/ablations.py wrote it, with provenance of its own (recipes
may come from several sessions).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from masw.errors import UsageError
from masw.files import check_writable, replacing
from masw.metrics import NOT_APPLICABLE

SCHEMA = 1
ANSWERS = "answers (n)"  # heading of the column that counts them
GAMMA = "5"  # the gamma whose tokens per iteration the table shows


class Table:
    """A file of recipes, replaced as a whole whenever one is added."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Opens `path`, or makes it with the first recipe. Raises UsageError when it cannot be written or is another file."""
        self.path, self._header = path, {"type": "header", "schema": SCHEMA, **header}
        check_writable(path)
        self.lines = read(path)

    def reread(self) -> None:
        """Takes up what another process added."""
        self.lines = read(self.path)

    def has(self, key: dict[str, Any]) -> bool:
        """Whether a recipe is there with these very settings."""
        return any(all(line.get(k) == v for k, v in key.items()) for line in self.lines)

    def add(self, line: dict[str, Any], order: Sequence[str]) -> None:
        """Adds a recipe, or puts it in the place of its older self; lines stand in the order of the names `order`."""
        self.lines = [known for known in self.lines if known["recipe"] != line["recipe"]]
        self.lines.append(json.loads(json.dumps({"type": "recipe", **line})))
        self.lines.sort(key=lambda known: order.index(known["recipe"]) if known["recipe"] in order else len(order))
        with replacing(self.path) as partial:
            partial.write_text("".join(json.dumps(known) + "\n" for known in (self._header, *self.lines)), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """The recipes of a table, none where there is no file. Raises UsageError for another kind of file."""
    if not path.exists():
        return []
    try:
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if head["type"] != "header" or head["schema"] != SCHEMA or any(line["type"] != "recipe" for line in lines):
            raise ValueError
        return lines
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a table of ablations of this masw (schema {SCHEMA}); move it away") from None


def rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flat rows for a figure or a printed table: a recipe, W and r each; above them what has no slots, or untrained ones.

    Agreement with the full-KV argmax and KL are means over the scored tokens of all held-out rows of a length (answers have few of them),
    tokens per iteration the mean over the target's own answers, of which "answers (n)" were judged. None where a thing was not measured.
    """
    found = []
    base = lines[0] if lines else None
    if base is not None:
        found += [
            _row(base, "full", None, None, "no slots, all keys kept", trained=False),
            *(_row(base, "window", w, None, "no slots", trained=False) for w in _windows(base)),
            *(_row(base, "masw-untrained", w, r, "slots from a plain copy, untrained", trained=False) for w, r in _shapes(base)),
        ]
    found += [_row(line, "masw", w, r, line["about"], trained=True) for line in lines for w, r in _shapes(line)]
    return [row for row in found if row[ANSWERS]]


def curves(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Next-token loss by trained tokens of each recipe, as `masw.figures.training_curve` reads logs."""
    return {line["recipe"]: [{"kind": "step", "tokens": t, "nll": loss} for t, loss in line["curve"]] for line in lines}


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """`rows` as a table in markdown."""
    if not table:
        return ""
    lines = [list(table[0]), ["---"] * len(table[0]), *([_text(value) for value in row.values()] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _row(
    line: dict[str, Any], method: str, window: int | None, stride: int | None, about: str, *, trained: bool
) -> dict[str, Any]:
    held = [r for r in line["held_out"] if (r["method"], r["window"], r["stride"]) == (method, window, stride)]
    judged = [r for r in line["rows"] if (r["method"], r["window"], r["stride"]) == (method, window, stride)]
    lengths = sorted({_length(r) for r in line["held_out"]})
    contexts = sorted({r["context"] for r in line["rows"]})
    first, last = line["curve"][0][1], line["curve"][-1][1]
    return {
        "recipe": line["recipe"] if trained else method,
        "what differs": about,
        "trained tokens": line["curve"][-1][0] if trained else 0,
        "W": window or NOT_APPLICABLE,
        "r": stride or NOT_APPLICABLE,
        "training loss, first to last (nats)": f"{first:.2f} to {last:.2f}" if trained else NOT_APPLICABLE,
        **{f"agreement at {n:,}": _over_tokens(held, n, "agreement") for n in lengths},
        **{f"KL at {n:,} (nats)": _over_tokens(held, n, "kl") for n in lengths[-1:]},
        **{
            f"tokens per iter at {n:,}": _mean([r["tokens_per_iteration"][GAMMA] for r in judged if r["context"] == n])
            for n in contexts
        },
        ANSWERS: sum(r["n"] for r in judged),
    }


def _length(row: dict[str, Any]) -> int:
    """Of the held-out set KIND-LENGTH."""
    return int(row["set"].rpartition("-")[2])


def _windows(line: dict[str, Any]) -> list[int]:
    return sorted({r["window"] for r in line["rows"] if r["method"] == "window"})


def _shapes(line: dict[str, Any]) -> list[tuple[int, int]]:
    return sorted({(r["window"], r["stride"]) for r in line["rows"] if r["method"] == "masw"})


def _over_tokens(held: list[dict[str, Any]], length: int, field: str) -> float | str | None:
    if not held:
        return NOT_APPLICABLE  # the full cache: what the others are compared with
    chosen = [r for r in held if _length(r) == length and r["n"]]
    return round(sum(r["n"] * r[field] for r in chosen) / sum(r["n"] for r in chosen), 3) if chosen else None


def _mean(values: list[float]) -> float | None:
    return round(fmean(values), 3) if values else None


def _text(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else str(value)
