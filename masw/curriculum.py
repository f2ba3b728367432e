"""What a training step reads. A batch is a function of the seed, the step and three counters, so any step can be made again.

Legend: B rows of a batch, T raw tokens a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masw.config import MemoryShape
from masw.data import Answers, Texts
from masw.errors import UsageError

KINDS = ("reconstruction", "text", "answers")
MOST_TOKENS = 2**22  # of one step


def amount(text: str) -> int:
    """A number of tokens: 300000, 300k or 1.5m, in thousands and millions. Raises ValueError for anything else."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    count = float(text[:-1] if unit > 1 else text) * unit
    if not 0 <= count < 1e15 or abs(count - round(count)) > 1e-6:  # nan and inf too
        raise ValueError(text)
    return round(count)


@dataclass(frozen=True)
class Stage:
    """A stretch of training: `tokens` tokens in rows of `length`, `rows` rows a step, of each kind in these shares."""

    length: int
    rows: int
    tokens: int
    reconstruction: float = 0.0  # a passage, a separator, the same passage again: loss on the second copy
    text: float = 1.0  # next token everywhere
    answers: float = 0.0  # a document, a question, an answer: loss on the answer

    def __post_init__(self) -> None:
        if not 16 <= self.length <= 131_072:
            raise UsageError(f"a training row has 16 to 131,072 tokens, not {self.length}")
        if self.rows < 1 or self.tokens < 1:
            raise UsageError(f"a stage needs at least one row a step and one token, not {self.rows} and {self.tokens}")
        if self.length * self.rows > MOST_TOKENS:
            raise UsageError(
                f"a step of {self.rows:,} rows of {self.length:,} tokens is more than {MOST_TOKENS:,} tokens; take fewer rows"
            )
        if min(self.shares) < 0 or sum(self.shares) <= 0:
            raise UsageError(f"shares of a stage must be zero or more and not all zero, not {self.shares}")

    @property
    def shares(self) -> tuple[float, float, float]:
        return self.reconstruction, self.text, self.answers

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.length * self.rows))

    @staticmethod
    def parse(text: str) -> Stage:
        """LENGTHxROWS:TOKENS[:RECONSTRUCTION/TEXT/ANSWERS], for example 384x8:300k:2/1/0."""
        try:
            size, tokens, *rest = text.split(":")
            length, rows = size.split("x")
            shares = [float(s) for s in rest[0].split("/")] if rest else [0.0, 1.0, 0.0]
            reconstruction, plain, answered = shares
            return Stage(int(length), int(rows), amount(tokens), reconstruction, plain, answered)
        except (ValueError, IndexError):
            raise UsageError(
                f"stage '{text}' is not LENGTHxROWS:TOKENS[:RECONSTRUCTION/TEXT/ANSWERS], such as 384x8:300k:2/1/0 "
                "(TOKENS: a whole number, 300k or 1.5m)"
            ) from None


def check_sources(stages: tuple[Stage, ...], text: bool, answers: bool) -> None:
    """Raises UsageError when the stages read a kind of source that is not there."""
    if not text and any(s.reconstruction or s.text for s in stages):
        raise UsageError("the stages read plain text but no text source was named; pass --text or use answers only")
    if not answers and any(s.answers for s in stages):
        raise UsageError("the stages read answers but no question source was named; pass --answers or give them no share")


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [B, T]
    scored: Tensor  # [B, T - 1] bool: token i + 1 is a loss position of row i
    shape: MemoryShape
    kinds: tuple[str, ...]


@dataclass
class Curriculum:
    """Draws batches. `drawn` counts the rows taken from each kind, and is all that a checkpoint needs."""

    texts: Texts | None
    answers: Answers | None
    stages: tuple[Stage, ...]
    sinks: int
    windows: tuple[int, ...]
    strides: tuple[int, ...]
    separator: list[int]
    seed: int
    most_pieces: int = 8  # a reconstructed passage comes again in up to so many shuffled pieces
    score_documents: bool = False  # rows of answers: loss on the document and the question too
    drawn: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def __post_init__(self) -> None:
        check_sources(self.stages, self.texts is not None, self.answers is not None)
        for stage in self.stages:
            # Asked now: a text that is too short for the last stage must not show after hours.
            if self.texts is not None and (stage.text or stage.reconstruction):
                self.texts.blocks(stage.length if stage.text else self._half(stage.length))

    @property
    def steps(self) -> int:
        return sum(s.steps for s in self.stages)

    def stage(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before `step`."""
        total = 0
        for stage in self.stages:
            total += min(step, stage.steps) * stage.length * stage.rows
            step = max(0, step - stage.steps)
        return total

    def batch(self, step: int) -> Batch:
        stage = self.stage(step)
        rng = np.random.default_rng((self.seed, step))
        # A window that holds most of a row leaves the slots nothing to do.
        windows = [w for w in self.windows if w <= stage.length // 4] or [min(self.windows)]
        stride, window = int(rng.choice(self.strides)), int(rng.choice(windows))
        share = np.array(stage.shares) / sum(stage.shares)
        kinds = tuple(KINDS[i] for i in rng.choice(len(KINDS), size=stage.rows, p=share))
        rows = [self.row(kind, stage.length, rng) for kind in kinds]
        tokens = torch.from_numpy(np.stack([tokens for tokens, _ in rows]))
        scored = torch.from_numpy(np.stack([scored for _, scored in rows]))
        return Batch(tokens, scored[:, 1:], MemoryShape(self.sinks, window, stride), kinds)

    def sample(self) -> Tensor:
        """Tokens [t] of one row of the first stage, outside the order of training: what the text is like."""
        source = self.texts or self.answers
        assert source is not None
        row = source.row(0, self.stages[0].length)
        return torch.from_numpy(row if isinstance(source, Texts) else row[0])

    def _half(self, length: int) -> int:
        """Tokens of a passage that comes twice in a row of `length`."""
        return (length - len(self.separator)) // 2

    def row(self, kind: str, length: int, rng: np.random.Generator) -> tuple[Any, Any]:
        """Tokens [T] and which of them are predicted [T]."""
        index = self.drawn[kind]
        self.drawn[kind] += 1
        scored = np.zeros(length, dtype=bool)
        if kind == "answers":
            assert self.answers is not None
            tokens, answer = self.answers.row(index, length)
            scored[1 if self.score_documents else answer.start : answer.stop] = True
            return tokens, scored
        assert self.texts is not None
        if kind == "text":
            scored[1:] = True
            return self.texts.row(index, length), scored
        half = self._half(length)
        passage = self.texts.row(index, half)
        most = max(1, min(self.most_pieces, half // 32))
        count = 2 ** int(rng.integers(0, int(np.log2(most)) + 1))
        again = np.concatenate([np.array_split(passage, count)[i] for i in rng.permutation(count)])
        tokens = np.concatenate([passage, self.separator, again])
        scored[half + len(self.separator) : len(tokens)] = True
        return np.pad(tokens, (0, length - len(tokens)), constant_values=tokens[-1]), scored
