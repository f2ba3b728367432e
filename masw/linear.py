"""A weight as the forward multiplies with it: a plain tensor, or a packed copy that serves few rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Packed:
    """A weight [N, K] in a smaller form for blocks of up to `most` rows, beside the original for wider ones."""

    def __init__(self, dense: Tensor, most: int) -> None:
        self.dense, self._most = dense, most

    def few(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N] through the packed form."""
        raise RuntimeError("a packed weight needs its own product")

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed form: what a step reads."""
        return self.dense.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > self._most:
            return F.linear(x, self.dense, bias)
        out = self.few(x.reshape(rows, -1)).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias


Weight = Tensor | Packed


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)


def dense(weight: Weight) -> Tensor:
    """The original [N, K]."""
    return weight if isinstance(weight, Tensor) else weight.dense
