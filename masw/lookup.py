"""Prompt lookup: drafts by copying what followed the same words earlier in the text. No model, no memory, no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from masw.drafters import Observer, Proposal
from masw.gamma import Offer
from masw.memory import Memory
from masw.prefill import Reader
from masw.recorder import Recorder

LONGEST = 6  # tokens of the suffix that is looked up first; shorter ones follow


class LookupDraft:
    """Proposes the continuation of the latest earlier occurrence of the sequence's last tokens, longest match first.

    An index from each n-gram to its last place grows with the accepted text, so a proposal costs a few dictionary look-ups whatever
    the prompt's length. The draft is deterministic: q is one-hot.
    """

    memory: Memory | None = None
    observer: Observer | None = None

    def __init__(self, longest: int = LONGEST, shortest: int = 1, held: Callable[[], int] = lambda: 0) -> None:
        """Matches of `shortest` to `longest` tokens count. `held`: KV bytes of a memory beside it, for the trace."""
        self._longest, self._shortest, self._held = longest, shortest, held
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it, latest first to win
        self._indexed = 0  # n-grams that end before this token are in the index
        self._looked_ms = 0.0  # spent on the offer for the block that is proposed next

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        return None

    def offers(self, sequence: Sequence[int], recorder: Recorder) -> Sequence[Offer]:
        with recorder.span() as span:
            match, _ = self._find(sequence)
        self._looked_ms = span.ms
        return (Offer(copied=True, match=match),) if match else ()

    def propose(
        self,
        sequence: Sequence[int],
        gamma: int,
        recorder: Recorder,
        stop: Callable[[], bool],
        least: float = 0.0,
        offer: Offer | None = None,
    ) -> Proposal:
        with recorder.span() as span:
            _, start = self._find(sequence)
            tokens = list(sequence[start : start + gamma])
        share, held = (self._looked_ms + span.ms) / max(1, len(tokens)), self._held()
        self._looked_ms = 0.0
        for offset, token in enumerate(tokens):
            recorder.add("draft", "draft", len(sequence) + offset, 1, ms=share, nbytes=held, token=token, q=1.0, read=0)
        return Proposal(tokens, None, (1.0,) * len(tokens))

    def settle(self, length: int) -> None:
        """The index holds accepted tokens only: nothing to drop."""

    def _find(self, sequence: Sequence[int]) -> tuple[int, int]:
        """Tokens of the longest match, and where what followed it starts; none: 0 and the sequence's end."""
        # Only n-grams with a token after them are worth an entry, so the current suffix itself never matches.
        for end in range(max(1, self._indexed), len(sequence)):
            for n in range(self._shortest, min(self._longest, end) + 1):
                self._places[tuple(sequence[end - n : end])] = end
        self._indexed = len(sequence)
        for n in range(min(self._longest, len(sequence)), self._shortest - 1, -1):
            start = self._places.get(tuple(sequence[len(sequence) - n :]))
            if start is not None:
                return n, start
        return 0, len(sequence)
