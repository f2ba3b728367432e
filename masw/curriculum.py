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
from masw.stages import KINDS, Stage, check_sources


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
