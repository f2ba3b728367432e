"""The dense masked pass: the whole interleaved sequence at once, batched and differentiable.

It is a memory that stores nothing, so that training runs the very forward that inference runs. Streaming through
`masw.memory.Memory` must give the same numbers; the tests hold the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masw.adaptor import Adaptor
from masw.attention import FEW_ROWS, TiledMask, additive_mask, tiled_mask
from masw.config import MemoryShape
from masw.memory import Block, block_of
from masw.policies import expiry, materialise, visible


class DenseMemory:
    """One pass over [B, T] raw tokens from position 0. The mask depends on T alone and is kept between passes."""

    def __init__(self, shape: MemoryShape, *, dtype: torch.dtype, group: int = 1, adaptor: Adaptor | None = None) -> None:
        """`group` is the query heads per KV head of the decoder that will read (`ModelConfig.group`)."""
        self.shape, self.adaptor = shape, adaptor
        self._dtype, self._group = dtype, group
        self._mask: tuple[int, Tensor | TiledMask] | None = None

    def begin(self, tokens: Tensor) -> Block:
        rows = materialise(0, tokens.shape[1], self.shape.stride if self.adaptor is not None else None)
        # Slot rows come last: the order of rows means nothing to the forward, and the keys that a tile of rows sees are then
        # three ranges (sinks, window, slots).
        times = torch.tensor([*range(1, 2 * rows.count, 2), *(2 * tau for tau in rows.boundaries)], device=tokens.device)
        if self._mask is None or self._mask[0] != rows.count:
            seen = visible(times, times, expiry(times, self.shape))
            wide = rows.total > FEW_ROWS
            self._mask = rows.count, tiled_mask(seen, self._dtype) if wide else additive_mask(seen, self._group, self._dtype)
        adaptor = None if self.adaptor is None else self.adaptor.unbound(self._dtype)
        return block_of(tokens, rows, times, self._mask[1], False, adaptor, tokens)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.transpose(1, 2), v.transpose(1, 2)

    def end(self) -> None:
        """Nothing is kept."""
