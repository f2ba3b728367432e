"""What the terminal shows: safe text, a progress bar for prefill, and the table of a run. Pure but for the bar."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from masw.prefill import Progress


def safe(text: str) -> str:
    """Model and document text without what could steer a terminal: control, format and surrogate characters."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") or c == "\u200d" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


class PrefillBar:
    """Progress of both models over the prompt, with ETA, on standard error."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm] = {}

    def show(self, progress: Progress) -> None:
        bar = self._bars.get(progress.who)
        if bar is None:
            bar = tqdm(
                total=progress.total, desc=f"prefill {progress.who}", unit="tok", file=sys.stderr, leave=False, disable=None
            )
            self._bars[progress.who] = bar
        bar.update(progress.done - bar.n)
        if progress.done >= progress.total:
            bar.close()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()


@dataclass(frozen=True)
class Line:
    """A row of the table: what, the value of the run, the value of the autoregressive run or of the prediction."""

    name: str
    value: str
    beside: str = ""


def table(lines: Iterable[Line], heads: tuple[str, str, str]) -> str:
    rows = [heads, *((line.name, line.value, line.beside) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([text[0].rstrip(), "-" * (sum(widths) + 4), *(t.rstrip() for t in text[1:])])


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Cells under each other, two spaces between the columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.{digits}f}{' ' + unit if unit else ''}"


def size(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 2**20:,.2f} MiB"
