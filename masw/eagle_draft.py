"""Drafting with an EAGLE head: the chain of a model draft, whose rows also read features.

Rows of accepted tokens are read with the target's own features. Rows of drafted tokens read the head's predictions instead, and are
dropped once the target has spoken: what was accepted of them is read again with true features, in the first forward of the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from masw.decoder import Decoder
from masw.drafters import ModelDraft, Observer
from masw.eagle import EagleHead
from masw.memory import Memory
from masw.prefill import Progress, Reader
from masw.recorder import Recorder
from masw.verify import Sampling


class EagleDraft(ModelDraft):
    """Tokens held in the memory are those read with true features, whenever no block is being drafted."""

    def __init__(self, head: EagleHead, target: Decoder, memory: Memory, sampling: Sampling, random: Random, vocab: int) -> None:
        super().__init__(head.decoder(target), memory, sampling, random, vocab)
        self.observer: Observer | None = self
        self._head, self._target = head, target
        # Features of the token before the first unread one, and of all later ones that the target has read. [n, H] each
        self._waiting = [torch.zeros(1, target.config.hidden, dtype=target.dtype, device=target.device)]
        self._own: Tensor | None = None  # [1, 1, H] the head's prediction for the last token that it read
        self.stream: torch.cuda.Stream | None = None  # that the waiting features are made on, in prefill

    @property
    def seen(self) -> int:
        return self.memory.committed + sum(len(part) for part in self._waiting) - 1

    def observe(self, hidden: Tensor) -> None:
        self._waiting.append(self._target.normed(hidden))
        self.stream = torch.cuda.current_stream(hidden.device) if hidden.is_cuda else None

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader:
        return _Follower(self, prompt, recorder, chunk)

    def settle(self, length: int) -> None:
        """Drops every row that was read with a predicted feature, accepted or not."""
        self.memory.rollback(self.memory.length - min(length, self.memory.committed))
        self._own = None

    def _read(self, tokens: Tensor) -> Tensor:
        hidden = self.read_true(tokens) if self._own is None else self._forward(tokens, self._own)
        self._own = self._target.normed(hidden[:, -1:])
        return hidden

    def read_true(self, tokens: Tensor) -> Tensor:
        """Predicted hidden states of `tokens` [1, T], read with the target's features that wait for them."""
        features, count = torch.cat(self._waiting), tokens.shape[1]
        self._waiting = [features[count:]]
        return self._forward(tokens, features[None, :count])

    def _forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        return self._decoder.forward(tokens, self.memory, inputs=self._head.inputs(self._target, tokens, before))


class _Follower(Reader):
    """Reads the prompt behind the target, chunk by chunk, so that features are not kept."""

    def __init__(self, draft: EagleDraft, prompt: Sequence[int], recorder: Recorder, chunk: int) -> None:
        super().__init__("draft", draft._decoder, draft.memory, prompt, recorder, chunk)
        self._draft = draft

    def step(self) -> Progress:
        self._stream = self._draft.stream  # features are made there, chunk by chunk
        return super().step()

    @property
    def ready(self) -> int:
        return min(self.total, self._draft.seen)

    def _read(self, tokens: Tensor) -> Tensor:
        hidden = self._draft.read_true(tokens)
        self._memory.commit()
        return hidden
