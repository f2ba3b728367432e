"""What a training reads and is measured on, from the names of its sources. The command line and the ablations start here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from masw import data
from masw.data import Answers, Notice, Texts
from masw.errors import UsageError
from masw.heldout import HeldOut, held_out
from masw.tokenizer import AnyTokenizer

SEPARATOR = "\n\n---\n\n"  # between a passage and its copy
HELD_SEED = 1  # held-out rows are the same for every seed of training


@dataclass(frozen=True)
class Corpus:
    texts: Texts | None
    answers: Answers | None
    held: list[HeldOut]
    separator: list[int]


@dataclass(frozen=True)
class Sources:
    """Sources as `masw.data.documents` names them; validation is for the held-out rows."""

    text: Sequence[str] = ()
    answers: Sequence[str] = ()
    valid: Sequence[str] = ()
    valid_answers: Sequence[str] = ()


def load(
    sources: Sources, tokenizer: AnyTokenizer, cache: Path, seed: int, held: Sequence[tuple[int, int]], notice: Notice
) -> Corpus:
    """Tokenises what is not in `cache` yet. `held` are (length, rows) of the held-out rows, of each kind."""

    def texts(names: Sequence[str], seed: int) -> Texts | None:
        return data.texts(list(names), tokenizer, cache, seed, notice) if names else None

    def answers(names: Sequence[str], seed: int) -> Answers | None:
        return data.answers(list(names), tokenizer, cache, seed, notice) if names else None

    separator = tokenizer.encode(SEPARATOR)
    plain, answered = texts(sources.text, seed), answers(sources.answers, seed)
    unseen = texts(sources.valid, HELD_SEED), answers(sources.valid_answers, HELD_SEED)
    try:
        rows = [s for length, count in held for s in held_out(*unseen, separator, length=length, rows=count)]
    except UsageError as error:
        raise UsageError(f"held-out rows: {error}") from None
    return Corpus(plain, answered, rows, separator)


def held_rows(text: str) -> list[tuple[int, int]]:
    """'1024x3,2048x3' -> [(1024, 3), (2048, 3)]."""
    found = []
    for part in text.split(","):
        length, _, rows = part.strip().partition("x")
        if not (length.isdecimal() and rows.isdecimal() and int(length) >= 16 and int(rows) >= 1):
            raise UsageError(f"held-out rows are LENGTHxROWS of at least 16 tokens, like 1024x3,2048x3, not '{part.strip()}'")
        found.append((int(length), int(rows)))
    return found
