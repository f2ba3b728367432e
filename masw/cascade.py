"""Two drafters in one: copy where the text repeats itself, let the model draft elsewhere.

A copied block costs no draft step, and a summary or an answer quotes its document often enough to matter. The model's memory is not
fed while blocks are copied: what it has not read by its next turn it reads in one block, which costs about as much as one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from masw.drafters import ModelDraft, Observer, Proposal
from masw.lookup import LookupDraft
from masw.memory import Memory
from masw.prefill import Reader
from masw.recorder import Recorder

SHORTEST = 3
"""Tokens that must match before a copy is trusted over the model: one or two recur by chance."""


class CascadeDraft:
    """Asks the copier first, the model when nothing matches."""

    observer: Observer | None = None

    def __init__(self, model: ModelDraft) -> None:
        self.inner = model
        self._copier = LookupDraft(shortest=SHORTEST, held=lambda: model.memory.live_nbytes)

    @property
    def memory(self) -> Memory:
        return self.inner.memory

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        return self.inner.reader(prompt, recorder, chunk)

    def propose(
        self, sequence: Sequence[int], gamma: int, recorder: Recorder, stop: Callable[[], bool], least: float = 0.0
    ) -> Proposal:
        copied = self._copier.propose(sequence, gamma, recorder, stop)
        return copied if copied.tokens else self.inner.propose(sequence, gamma, recorder, stop, least)

    def settle(self, length: int) -> None:
        self.inner.settle(length)
