"""A quiet start: slots that no query looks at, until training teaches some to.

Copied projections make slots loud: they look like raw tokens, there are hundreds of them, and they say nothing true, so a draft
with untrained slots is far worse than one without. A bias on the slot keys that points away from where queries point lowers the score
of every slot by about `depth`, at any distance: it lies in the slow RoPE dimensions, which hardly turn within `reach` positions. The
draft then starts as good as its sinks and window alone, and gradients still flow, since no score is minus infinity.

This goes beyond the paper (arXiv 2608.30252), which starts from the copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from masw.adaptor import Adaptor
from masw.config import MemoryShape
from masw.decoder import Decoder, rotate
from masw.dense import DenseMemory
from masw.errors import UsageError

DEPTH = 5.0  # nats; at 5 untrained slots cost at most 0.02 of agreement (docs/LOG.md)
REACH = 1024  # positions; a slow dimension turns by less than a radian over them
RIDGE = 0.1  # keeps the bias short where the queries of a group point in different directions


class _QueryProbe(DenseMemory):
    """Collects the queries of each layer as attention gets them."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(MemoryShape(), dtype=decoder.dtype, group=decoder.config.group)
        self.queries: list[Tensor] = []

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.queries.append(q[0])
        return super().extend(layer, q, k, v)


@torch.no_grad()
def hush(adaptor: Adaptor, decoder: Decoder, sample: Tensor, depth: float = DEPTH) -> None:
    """Adds the bias to `adaptor` in place; `sample` [t] is text of a few hundred tokens that shows where queries point.

    The adaptor needs biases: `AdaptorInfo(bias=True)`, or a backbone that has them.
    """
    if adaptor.kv_bias is None:
        raise UsageError("a quiet start needs slot biases; make the adaptor with bias=True")
    c = decoder.config
    positions = torch.arange(len(sample), device=decoder.device)
    cos, sin = decoder._rotation(positions)
    probe = _QueryProbe(decoder)
    decoder.forward(sample[None], probe)
    frequencies = decoder._inv_freq  # [D / 2], falling; short heads may have none that slow: then their slowest quarter
    slow = (frequencies <= max(1 / REACH, float(frequencies[-max(1, len(frequencies) // 4)]))).repeat(2)  # [D]
    for layer, rotated in enumerate(probe.queries):
        mean = rotate(rotated, cos, -sin)[len(sample) // 16 :].double().mean(0) * slow  # [heads, D]; the first tokens are odd
        for head, group in enumerate(mean.split(c.group)):  # [G, D]
            gram = group @ group.T
            gram += RIDGE * gram.diagonal().mean() * torch.eye(c.group, dtype=gram.dtype, device=gram.device)
            wanted = torch.full((c.group,), -depth * math.sqrt(c.head_dim), dtype=gram.dtype, device=gram.device)
            bias = group.T @ torch.linalg.solve(gram, wanted)
            adaptor.kv_bias[layer, head * c.head_dim : (head + 1) * c.head_dim] += bias.to(adaptor.kv_bias.dtype)
