"""The loss: next-token cross-entropy mixed with the distance to the same model with its full KV, and the agreement of the two.

Legend: n loss positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from masw.adaptor import Adaptor
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.dense import DenseMemory
from masw.memory import Block

CHUNK_BYTES = 128 * 2**20
"""Of logits at a time, as they come from the LM head: each product reads the whole head, so it should serve many rows."""

CACHED_BYTES = 8 * 2**20
"""Of fp32 logits at a time in the chain of elementwise passes. Temporaries of this size stay in the cache and are used again; larger
ones go back to the system each time, and its zeroed pages cost more than the arithmetic (3.5 times the whole chain at 152K)."""


class Passes:
    """Dense passes of one decoder. Their masks are kept, one set a shape."""

    def __init__(self, decoder: Decoder, attention: str = "auto", *, checkpoint: bool = False) -> None:
        """With `checkpoint` the backward pass computes each layer again instead of keeping what it needs of it."""
        self.decoder, self._attention, self._checkpoint = decoder, attention, checkpoint
        self._memories: dict[MemoryShape, DenseMemory] = {}

    def hidden(
        self, tokens: Tensor, shape: MemoryShape, adaptor: Adaptor | None, seen: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """Hidden states [B, T, H] of raw tokens [B, T] read through a memory of `shape`; slots only with an adaptor.

        `seen` gets those behind each layer, with the layer's number.
        """
        memory = self._memories.get(shape)
        if memory is None:
            memory = self._memories[shape] = DenseMemory(
                shape, dtype=self.decoder.dtype, group=self.decoder.config.group, attention=self._attention
            )
        memory.adaptor = adaptor
        around: Callable[..., Tensor] | None = None
        if self._checkpoint and adaptor is not None:
            around = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return self.decoder.forward(tokens, memory, around if seen is None else partial(_watched, around, seen))


def _watched(
    around: Callable[..., Tensor] | None,
    seen: Callable[[int, Tensor], None],
    layer: Callable[..., Tensor],
    index: int,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    block: Block,
    memory: DenseMemory,
) -> Tensor:
    """One layer of `Decoder.forward` whose raw rows are shown to `seen`."""
    rest = (index, x, cos, sin, block, memory)
    out = layer(*rest) if around is None else around(layer, *rest)
    seen(index, out if block.raw_rows is None else out.index_select(1, block.raw_rows))
    return out


@dataclass(frozen=True)
class Score:
    """Sums over loss positions."""

    count: int
    loss: float
    nll: float  # next token
    kl: float  # to the full-KV model
    agreed: int  # positions whose most likely token is the full-KV model's

    def __add__(self, other: Score) -> Score:
        return Score(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def means(self) -> dict[str, float]:
        n = max(self.count, 1)
        return {"loss": self.loss / n, "nll": self.nll / n, "kl": self.kl / n, "agreement": self.agreed / n}


NOTHING = Score(0, 0.0, 0.0, 0.0, 0)


class _HeadLoss(torch.autograd.Function):
    """Loss of hidden states [n, H], and its gradient in the same pass over the vocabulary: logits are never kept.

    With p the model's and t the full-KV model's distribution, loss = (1 - kl) * nll + kl * KL(t || p), whose gradient by the
    logits is p - ((1 - kl) * onehot + kl * t).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Tensor | None, labels: Tensor, decoder: Decoder, kl: float, total: float
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(4, dtype=torch.float64, device=hidden.device)
        vocabulary = decoder.weights.embed.shape[0]
        step = max(1, CHUNK_BYTES // (vocabulary * hidden.element_size()))
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            with torch.enable_grad():
                x = hidden[rows].detach().requires_grad_(grad is not None)
                raw = decoder.logits(x)
            other = None if teacher is None else decoder.logits(teacher[rows])
            logits = raw.detach()  # becomes its own gradient below, in place: the LM head's backward needs only its input
            small = max(1, CACHED_BYTES // (vocabulary * 4))
            for at in range(0, logits.shape[0], small):
                part = slice(at, at + small)
                sums += _score_rows(
                    logits[part], None if other is None else other[part], labels[rows][part], kl, None if grad is None else total
                )
            if grad is not None:
                (grad[rows],) = torch.autograd.grad(raw, x, logits)
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(sums)
        return (sums[0] / total).to(hidden.dtype if hidden.dtype == torch.float64 else torch.float32), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None, None


def _score_rows(logits: Tensor, other: Tensor | None, labels: Tensor, kl: float, total: float | None) -> Tensor:
    """Sums [4] in fp64 of loss, next-token loss, KL and agreement over logits [n, V] beside the full-KV model's `other` [n, V].

    With `total` the gradient of loss / total by the logits takes the place of `logits`.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    wide, target = logits.to(exact), labels[:, None]
    best = _argmax(wide)
    p = wide.softmax(-1)
    # The probability of the most likely token gives the log of the partition sum without another pass.
    lse = wide.gather(1, best).sub_(p.gather(1, best).log_()).squeeze(1)
    nll = lse - wide.gather(1, target).squeeze(1)
    distance = agreed = torch.zeros_like(nll)
    weight = 0.0
    if other is not None:
        wider, weight = other.to(exact), kl
        theirs = _argmax(wider)
        t = wider.softmax(-1)
        other_lse = wider.gather(1, theirs).sub_(t.gather(1, theirs).log_()).squeeze(1)
        agreed = (theirs == best).squeeze(1).to(nll.dtype)
        distance = torch.linalg.vecdot(t, wider.sub_(wide)) - other_lse + lse
        p.sub_(t, alpha=kl)
    loss = (1 - weight) * nll + weight * distance
    if total is not None:
        p.scatter_add_(1, target, torch.full_like(target, weight - 1, dtype=p.dtype))
        logits.copy_(p.div_(total))
    return torch.stack([part.sum().double() for part in (loss, nll, distance, agreed)])


def _argmax(x: Tensor) -> Tensor:
    """Index [n, 1] of the largest of x [n, V]: torch's maximum is several times faster on a CPU than its argmax, so the place is
    looked for in the winning 128 alone."""
    n, v = x.shape
    if v % 128:
        return x.argmax(-1, keepdim=True)
    blocks = x.view(n, -1, 128)
    block = blocks.amax(-1).argmax(-1, keepdim=True)  # [n, 1]
    inside = blocks.gather(1, block[:, :, None].expand(n, 1, 128)).squeeze(1).argmax(-1, keepdim=True)
    return block * 128 + inside


def hardest(decoder: Decoder, hidden: Tensor, teacher: Tensor, rows: Tensor, most: int) -> Tensor:
    """Which of n loss positions to score, in order: of each row at most `most`, those that the memory has moved furthest.

    hidden, teacher [n, H] before the final norm; rows [n], ascending, the row of each position. Distance is that of the hidden states
    behind the final norm: the LM head then multiplies what there is to learn from, and not the many positions that a window
    alone gets right.
    """
    with torch.no_grad():
        far = (decoder.normed(hidden) - decoder.normed(teacher)).float().square().sum(-1)
        counts = torch.bincount(rows)
        kept, start = [], 0
        for count in counts.tolist():
            kept.append(start + far[start : start + count].topk(min(most, count)).indices.sort().values)
            start += count
        return torch.cat(kept)


def head_loss(
    decoder: Decoder, hidden: Tensor, teacher: Tensor | None, labels: Tensor, *, kl: float, total: float
) -> tuple[Tensor, Score]:
    """Loss over `total` positions (of all workers) of hidden [n, H], and its sums; `teacher` [n, H] are the full-KV model's."""
    loss, sums = _HeadLoss.apply(hidden, teacher, labels, decoder, kl, total)
    found = sums.tolist()
    return loss, Score(len(labels), found[0], found[1], found[2], round(found[3]))


@torch.no_grad()
def full_hidden(passes: Passes, tokens: Tensor, scored: Tensor) -> list[Tensor]:
    """Hidden states of the full-KV model at each row's loss positions, for `score`. tokens [B, T], scored [B, T - 1]."""
    full = MemoryShape()
    return [passes.hidden(row[None], full, None)[0, where.nonzero().flatten()] for row, where in zip(tokens, scored, strict=True)]


@torch.no_grad()
def score(
    passes: Passes, tokens: Tensor, scored: Tensor, teacher: list[Tensor], shape: MemoryShape, adaptor: Adaptor | None
) -> Score:
    """Teacher-forced comparison of a memory with the full-KV model, one row at a time. tokens [B, T], scored [B, T - 1]."""
    total = NOTHING
    for row, where, other in zip(tokens, scored, teacher, strict=True):
        at = where.nonzero().flatten()
        hidden = passes.hidden(row[None], shape, adaptor)[0, at]
        total += head_loss(passes.decoder, hidden, other, row[1:][at], kl=1.0, total=1.0)[1]
    return total
