"""What a training is measured on while it runs: fixed rows, and how far a memory agrees with the full-KV model on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from masw.adaptor import Adaptor
from masw.config import MemoryShape
from masw.curriculum import Curriculum
from masw.data import Answers, Texts
from masw.distil import Passes, Score, full_hidden, score
from masw.stages import Stage


@dataclass(frozen=True)
class HeldOut:
    """A fixed set that the agreement is measured on."""

    name: str
    tokens: Tensor  # [B, T]
    scored: Tensor  # [B, T - 1]


def held_out(texts: Texts | None, answers: Answers | None, separator: list[int], *, length: int, rows: int) -> list[HeldOut]:
    """The three kinds of rows, `rows` of each, always the same ones."""
    sets = []
    for kind, stage in (
        ("reconstruction", Stage(length, rows, length * rows, 1, 0, 0)),
        ("text", Stage(length, rows, length * rows)),
        ("answers", Stage(length, rows, length * rows, 0, 0, 1)),
    ):
        if (answers if kind == "answers" else texts) is None:
            continue
        drawn = Curriculum(texts, answers, (stage,), 0, (length,), (1,), separator, seed=0).batch(0)
        sets.append(HeldOut(f"{kind}-{length}", drawn.tokens, drawn.scored))
    return sets


def digest(rows: Sequence[Tensor]) -> str:
    """Names the rows that a run is measured on, so that it is not gone on with on others: its best so far would mean nothing."""
    found = hashlib.sha256()
    for each in rows:
        found.update(str(tuple(each.shape)).encode())
        found.update(each.to("cpu", copy=True).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


@dataclass
class Baselines:
    """What measurements of one decoder share."""

    full: dict[str, list[Tensor]] = field(default_factory=dict)  # set -> hidden states at its loss positions
    window: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # (set, window) -> its row


def measure(
    passes: Passes,
    adaptor: Adaptor | None,
    held: list[HeldOut],
    sinks: int,
    windows: tuple[int, ...],
    strides: tuple[int, ...],
    baselines: Baselines | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Rows {set, method, window, stride, n, agreement, nll, kl} for the window alone and, with an adaptor, for masw.

    `baselines` keeps what does not depend on the adaptor from one call to the next. Once `stop()` is true no more rows come.
    """
    known = baselines or Baselines()
    rows: list[dict[str, Any]] = []
    device = passes.decoder.device
    for data in held:
        if stop():
            break
        tokens, scored = data.tokens.to(device), data.scored.to(device)
        if data.name not in known.full:
            known.full[data.name] = full_hidden(passes, tokens, scored)
        full = known.full[data.name]
        for window in windows:
            key = data.name, window
            if key not in known.window:
                known.window[key] = _rounded(score(passes, tokens, scored, full, MemoryShape(sinks, window), None))
            rows.append({"set": data.name, "method": "window", "window": window, "stride": None, **known.window[key]})
            for stride in strides if adaptor is not None else ():
                if stop():
                    break
                found = _rounded(score(passes, tokens, scored, full, MemoryShape(sinks, window, stride), adaptor))
                rows.append({"set": data.name, "method": "masw", "window": window, "stride": stride, **found})
    return rows


def _rounded(found: Score) -> dict[str, Any]:
    means = found.means()
    return {"n": found.count, **{key: round(means[key], 4) for key in ("agreement", "nll", "kl")}}
