"""Who proposes the next tokens. A drafter sees the accepted sequence, proposes a block, and is told how much of it was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from masw.decoder import Decoder
from masw.gamma import DRAFT, Offer
from masw.memory import Memory, on_device
from masw.prefill import Reader
from masw.recorder import Recorder
from masw.verify import Sampling, distribution, draw, likeliest


@dataclass(frozen=True)
class Proposal:
    """A drafted block."""

    tokens: list[int]
    q: Tensor | None = None  # [gamma, V], what each token was drawn from; None when greedy (one-hot)
    confidence: tuple[float, ...] = ()  # q of each token; its softmax probability when greedy


class Observer(Protocol):
    """Who is shown the target's hidden states of accepted text, each position once and in order."""

    @property
    def seen(self) -> int:
        """Positions shown so far; the next one has this number."""
        ...

    def observe(self, hidden: Tensor) -> None:
        """Hidden states [n, H] of the next n positions, before the final norm."""
        ...


class Drafter(Protocol):
    """`propose` never changes what is accepted; `settle` drops what was refused."""

    @property
    def memory(self) -> Memory | None: ...

    @property
    def observer(self) -> Observer | None:
        """Who wants the target's hidden states; None: nobody, and nothing is spent on them."""
        ...

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        """Reads the prompt; None when there is nothing to read."""
        ...

    def offers(self, sequence: Sequence[int], recorder: Recorder) -> Sequence[Offer]:
        """Ways to draft what continues `sequence`, the preferred one first; none where there is nothing to propose."""
        ...

    def propose(
        self,
        sequence: Sequence[int],
        gamma: int,
        recorder: Recorder,
        stop: Callable[[], bool],
        least: float = 0.0,
        offer: Offer | None = None,
    ) -> Proposal:
        """Up to `gamma` tokens that continue `sequence` (accepted tokens, the last one not yet read by the target), in one of the ways
        that it `offers`; None: the preferred one.

        A block ends early after the token with which the product of its q falls below `least`: what would follow is not worth
        its step. That depends on tokens drafted before, never on the one that is or is not drafted, so each position that is reached
        keeps the target's distribution.
        """
        ...

    def settle(self, length: int) -> None:
        """The first `length` tokens of the sequence are final; forget all that came after them."""
        ...


class NoDraft:
    """Proposes nothing: the loop then is autoregressive decoding."""

    memory: Memory | None = None
    observer: Observer | None = None

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        return None

    def offers(self, sequence: Sequence[int], recorder: Recorder) -> Sequence[Offer]:
        return ()

    def propose(
        self,
        sequence: Sequence[int],
        gamma: int,
        recorder: Recorder,
        stop: Callable[[], bool],
        least: float = 0.0,
        offer: Offer | None = None,
    ) -> Proposal:
        return Proposal([])

    def settle(self, length: int) -> None:
        """Nothing is held."""


class ModelDraft:
    """An independent draft model; what it remembers is its memory's business."""

    observer: Observer | None = None
    deferred: bool | None = None
    """Whether greedy tokens stay on the device and are read back once a block, so that the host never waits inside it. None: on CUDA.
    A block that may end early needs each token's probability, and waits."""

    def __init__(self, decoder: Decoder, memory: Memory, sampling: Sampling, random: Random, vocab: int) -> None:
        """`vocab` is the width of the target's distribution; the draft's logits are cut or padded to it."""
        self.memory: Memory = memory
        self._decoder, self._sampling, self._random, self._vocab = decoder, sampling, random, vocab

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        self.memory.prompt_ends(len(prompt))
        return Reader("draft", self._decoder, self.memory, prompt, recorder, chunk)

    def offers(self, sequence: Sequence[int], recorder: Recorder) -> Sequence[Offer]:
        return (DRAFT,)

    def propose(
        self,
        sequence: Sequence[int],
        gamma: int,
        recorder: Recorder,
        stop: Callable[[], bool],
        least: float = 0.0,
        offer: Offer | None = None,
    ) -> Proposal:
        tokens: list[int] = []
        confidence: list[float] = []
        rows: list[Tensor] = []
        # One token as a rule; two after a fully accepted block, whose last token the draft has not read yet.
        unread = self._on_device(sequence[self.memory.length :])
        on_cuda = self._decoder.device.type == "cuda"
        if self._sampling.greedy and least <= 0 and (on_cuda if self.deferred is None else self.deferred):
            return self._propose_deferred(unread, len(sequence), gamma, recorder, stop)
        hope = 1.0  # the draft's own probability that the whole block so far is right
        while len(tokens) < gamma and hope >= least and not stop():
            with recorder.span() as span:
                logits = self._step(unread, first=not tokens)
                if self._sampling.greedy:
                    token = int(likeliest(logits))
                    belief = float(logits.softmax(0, dtype=torch.float32)[token])
                else:
                    q = distribution(logits, self._sampling)
                    token = draw(q, self._random.random())
                    belief = float(q[token])
                    rows.append(q)
            position = len(sequence) + len(tokens)
            read = unread.shape[1]
            recorder.add(
                "draft", "draft", position, 1, ms=span.ms, nbytes=self.memory.live_nbytes, token=token, q=belief, read=read
            )
            tokens.append(token)
            confidence.append(belief)
            hope *= belief
            unread = self._on_device([token])
        return Proposal(tokens, torch.stack(rows) if rows else None, tuple(confidence))

    def settle(self, length: int) -> None:
        self.memory.rollback(max(0, self.memory.length - length))
        self.memory.commit()

    def _propose_deferred(
        self, unread: Tensor, position: int, gamma: int, recorder: Recorder, stop: Callable[[], bool]
    ) -> Proposal:
        """The greedy block whose tokens are read back at its end; each event has its share of the block's time."""
        chosen: list[Tensor] = []
        beliefs: list[Tensor] = []
        read, held = [], []
        with recorder.span() as span:
            while len(chosen) < gamma and not stop():
                logits = self._step(unread, first=not chosen)
                read.append(unread.shape[1])
                held.append(self.memory.live_nbytes)
                unread = likeliest(logits).view(1, 1)
                chosen.append(unread[0])
                beliefs.append(logits.softmax(0, dtype=torch.float32).gather(0, unread[0]))
            tokens: list[int] = torch.cat(chosen).tolist() if chosen else []
            confidence: list[float] = torch.cat(beliefs).tolist() if beliefs else []
        for index, (token, q) in enumerate(zip(tokens, confidence, strict=True)):
            ms = span.ms / len(tokens)
            recorder.add("draft", "draft", position + index, 1, ms=ms, nbytes=held[index], token=token, q=q, read=read[index])
        return Proposal(tokens, None, tuple(confidence))

    def _on_device(self, tokens: Sequence[int]) -> Tensor:
        """[1, len(tokens)]"""
        return on_device(tokens, self._decoder.device)[None]

    def _step(self, unread: Tensor, *, first: bool) -> Tensor:
        """Next-token logits [V] after reading `unread` [1, T], which is accepted text if it comes `first` in a block."""
        # A target padded further than the draft may emit ids that the draft has no row for; any row does, its guess is checked.
        hidden = self._read(unread.clamp_max(self._decoder.config.vocab - 1))
        if first:
            self.memory.commit()
        return aligned(self._decoder.logits(hidden[:, -1])[0], self._vocab)

    def _read(self, tokens: Tensor) -> Tensor:
        """Hidden states [1, T, H] of `tokens` [1, T], which follow what the memory holds."""
        return self._decoder.forward(tokens, self.memory)


def aligned(logits: Tensor, vocab: int) -> Tensor:
    """Cuts or pads draft logits [V'] to the target's [vocab]: checkpoints of one tokenizer are padded to different sizes."""
    width = logits.shape[-1]
    if width >= vocab:
        return logits[..., :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - width), value=float("-inf"))
