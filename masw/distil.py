"""The loss: next-token cross-entropy mixed with the distance to the same model with its full KV, and the agreement of the two.

Legend: n loss positions, H hidden, V vocabulary.
"""

from __future__ import annotations

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

CHUNK_ROWS = 128  # of logits at a time: 128 rows of 49K fp32 are 25 MB


class Passes:
    """Dense passes of one decoder. Their masks are kept, one set a shape."""

    def __init__(self, decoder: Decoder, attention: str = "auto", *, checkpoint: bool = False) -> None:
        """With `checkpoint` the backward pass computes each layer again instead of keeping what it needs of it."""
        self.decoder, self._attention, self._checkpoint = decoder, attention, checkpoint
        self._memories: dict[MemoryShape, DenseMemory] = {}

    def hidden(self, tokens: Tensor, shape: MemoryShape, adaptor: Adaptor | None) -> Tensor:
        """Hidden states [B, T, H] of raw tokens [B, T] read through a memory of `shape`; slots only with an adaptor."""
        memory = self._memories.get(shape)
        if memory is None:
            memory = self._memories[shape] = DenseMemory(
                shape, dtype=self.decoder.dtype, group=self.decoder.config.group, attention=self._attention
            )
        memory.adaptor = adaptor
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return self.decoder.forward(tokens, memory, again if self._checkpoint and adaptor is not None else None)


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
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            with torch.enable_grad():
                x = hidden[rows].detach().requires_grad_(grad is not None)
                raw = decoder.logits(x)
            logits = raw.detach().to(torch.promote_types(raw.dtype, torch.float32))
            target = labels[rows, None]
            lse = logits.logsumexp(-1)
            nll = lse - logits.gather(1, target).squeeze(1)
            p = logits.softmax(-1)
            distance = torch.zeros_like(nll)
            agreed = torch.zeros_like(nll)
            if teacher is not None:
                other = decoder.logits(teacher[rows]).to(logits.dtype)
                t = other.softmax(-1)
                agreed = (other.argmax(-1) == logits.argmax(-1)).to(nll.dtype)
                other_lse = other.logsumexp(-1)
                distance = (t * other.sub_(logits)).sum(-1) - other_lse + lse
                p.sub_(t, alpha=kl)
            weight = kl if teacher is not None else 0.0
            loss = (1 - weight) * nll + weight * distance
            sums += torch.stack([part.sum().double() for part in (loss, nll, distance, agreed)])
            if grad is not None:
                p.scatter_add_(1, target, torch.full_like(target, weight - 1, dtype=p.dtype))
                (grad[rows],) = torch.autograd.grad(raw, x, p.div_(total).to(raw.dtype))
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(sums)
        return (sums[0] / total).to(hidden.dtype if hidden.dtype == torch.float64 else torch.float32), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None, None


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
