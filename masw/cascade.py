"""Two drafters in one: copy where the text repeats itself, let the model draft elsewhere.

A copied block costs no draft step, and a summary or an answer quotes its document often enough to matter. The model's memory is not
fed while blocks are copied: what it has not read by its next turn it reads in one block, which costs about as much as one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from masw.drafters import ModelDraft, Observer, Proposal
from masw.gamma import Offer
from masw.lookup import LookupDraft
from masw.memory import Memory
from masw.prefill import Reader
from masw.recorder import Recorder

SHORTEST = 2
"""Tokens that must match before a copy is preferred to the model. Behind one, half a token of a block was right, behind two 1.2
(docs/LOG.md), which at no cost of drafting is more a second than a drafted block brought on most prompts; `--gamma auto` measures instead."""


class CascadeDraft:
    """Prefers a copy where enough of the text recurs, and the model elsewhere; offers both where it can."""

    observer: Observer | None = None

    def __init__(self, model: ModelDraft) -> None:
        self.inner = model
        self._copier = LookupDraft(held=lambda: model.memory.live_nbytes)

    @property
    def memory(self) -> Memory:
        return self.inner.memory

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        return self.inner.reader(prompt, recorder, chunk)

    def offers(self, sequence: Sequence[int], recorder: Recorder) -> Sequence[Offer]:
        copies, drafts = self._copier.offers(sequence, recorder), self.inner.offers(sequence, recorder)
        good = any(copy.match >= SHORTEST for copy in copies)
        return (*copies, *drafts) if good else (*drafts, *copies)

    def propose(
        self,
        sequence: Sequence[int],
        gamma: int,
        recorder: Recorder,
        stop: Callable[[], bool],
        least: float = 0.0,
        offer: Offer | None = None,
    ) -> Proposal:
        if (offer or self.offers(sequence, recorder)[0]).copied:
            return self._copier.propose(sequence, gamma, recorder, stop)
        return self.inner.propose(sequence, gamma, recorder, stop, least)

    def settle(self, length: int) -> None:
        self.inner.settle(length)
