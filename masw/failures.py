"""Where a draft failed and what it would have needed. Pure: ids in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from masw.trace import Trace

LONGEST = 8  # tokens before the correction that are compared


def failures(trace: Trace, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """One row a rejection: `round`, `position`, `distance` back to an earlier occurrence of the correction (None: it is new), and
    `match`, the tokens before it that agree there, at most LONGEST. Of several places the one with the longest match counts, then the
    nearest: a long match far away is text to be recalled verbatim."""
    sequence = [*prompt, *(t for e in trace.of("emit") for t in e.data["tokens"])]
    places: dict[int, list[int]] = {}
    for i, token in enumerate(sequence):
        places.setdefault(token, []).append(i)
    rows = []
    for e in trace.of("reject"):
        at = e.position
        if at >= len(sequence):  # a cut trace: the correction was not emitted
            continue
        found = [(_agree(sequence, i, at), i) for i in places[sequence[at]] if i < at]
        match, where = max(found, default=(None, None))
        rows.append({"round": e.round, "position": at, "distance": None if where is None else at - where, "match": match})
    return rows


def _agree(sequence: Sequence[int], a: int, b: int) -> int:
    n = 0
    while n < LONGEST and a - n > 0 and sequence[a - n - 1] == sequence[b - n - 1]:
        n += 1
    return n
