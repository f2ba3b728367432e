"""The accept rule of speculative decoding (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1). Pure functions.

p: what the target would draw from; q: what the draft token was really drawn from; gamma: drafted tokens. Both after
temperature, top-k and top-p. A drafted token x is kept with probability min(1, p(x) / q(x)); the first one refused is replaced by
a draw from norm(max(0, p - q)); when all are kept, one more token comes from the target's last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from masw.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How both models turn logits into a distribution. temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 1e-4 <= self.temperature <= 100.0:  # colder, and fp32 overflows
            raise UsageError(f"temperature must be 0 (greedy) or 0.0001 to 100, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top-k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be 0 to 2^63 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verify pass."""

    accepted: int  # drafted tokens kept, 0..gamma
    token: int  # the correction (accepted < gamma) or bonus (accepted == gamma) token
    gamma: int

    @property
    def bonus(self) -> bool:
        return self.accepted == self.gamma


def likeliest(logits: Tensor) -> Tensor:
    """Token [...] of the highest logit [..., V], the first of equal ones: argmax, which takes five times as long in bf16."""
    return logits.max(-1).indices


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] (fp32, fp64 for fp64 logits) that a token is drawn from: temperature, then top-k, then top-p."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # a token goes when the more likely ones alone reach top-p; the first one always stays
        beyond = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        beyond[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter_(-1, index, beyond), float("-inf"))
    return logits.softmax(-1)


def draw(probabilities: Tensor, u: float) -> int:
    """Token of `probabilities` [V] at the uniform number `u` in [0, 1); a token of probability 0 is never drawn."""
    cdf = probabilities.double().cumsum(0)
    index = int(torch.searchsorted(cdf, u * float(cdf[-1]), right=True))
    if index >= len(cdf) or probabilities[index] <= 0:  # only by rounding at the very end of the range
        index = int(probabilities.nonzero()[-1])
    return index


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) elementwise; 0 where the target never draws the token."""
    return torch.where(q > 0, (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp(max=1.0), (p > 0).to(p.dtype))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) [V]; p itself when nothing is left (p == q: a rejection then has probability 0)."""
    left = (p - q).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else p


def accept(p: Tensor, q: Tensor, drafted: Sequence[int], uniforms: Sequence[float]) -> Verdict:
    """Judges a block. p [gamma + 1, V], q [gamma, V], `uniforms` gamma + 1 numbers in [0, 1): one a drafted token, one for the draw."""
    gamma = len(drafted)
    rows = range(gamma)
    # All at once: on a GPU each number that the host asks for is a wait.
    keep = accept_probability(p[rows, drafted], q[rows, drafted]).tolist() if gamma else []
    for index in rows:
        if uniforms[index] >= keep[index]:
            return Verdict(index, draw(residual(p[index], q[index]), uniforms[gamma]), gamma)
    return Verdict(gamma, draw(p[gamma], uniforms[gamma]), gamma)


def accept_greedy(best: Sequence[int], drafted: Sequence[int]) -> Verdict:
    """`accept` for temperature 0, where p and q are one-hot: keep what equals the target's argmax. `best` has gamma + 1 entries."""
    gamma = len(drafted)
    kept = next((i for i, token in enumerate(drafted) if token != best[i]), gamma)
    return Verdict(kept, best[kept], gamma)
