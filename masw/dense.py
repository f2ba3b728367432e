"""The dense masked pass: the whole interleaved sequence at once, batched and differentiable.

It is a memory that stores nothing, so that training runs the very forward that inference runs. Streaming through
`masw.memory.Memory` must give the same numbers; the tests hold the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masw.adaptor import Adaptor
from masw.attention import FEW_ROWS, OwnAttention, TiledMask, additive_mask, fused_is_fast, tiled_mask
from masw.config import MemoryShape
from masw.errors import UsageError
from masw.flex import FlexMask
from masw.memory import Block, block_of, layout_of, on_device
from masw.policies import expiry, materialise, read_until, visible

ATTENTIONS = ("auto", "tiled", "mask", "flex")
FLEX_ROWS = 2048
"""From this many rows on a GPU reads a block-sparse mask; below, the fused kernel with a whole mask is as good."""


class DenseMemory:
    """One pass over [B, T] raw tokens from position 0. The mask depends on T alone and is kept between passes."""

    def __init__(
        self,
        shape: MemoryShape,
        *,
        dtype: torch.dtype,
        group: int = 1,
        adaptor: Adaptor | None = None,
        attention: str = "auto",
    ) -> None:
        """`group` is the query heads per KV head of the decoder that will read (`ModelConfig.group`).

        `attention` for more than FEW_ROWS rows: tiled (made for the CPU), mask (torch's fused kernel with a whole mask), flex
        (torch's block-sparse kernel), or auto: by device and number of rows.
        """
        if attention not in ATTENTIONS:
            raise UsageError(f"attention '{attention}' is unknown; use one of {', '.join(ATTENTIONS)}")
        self.shape, self.adaptor = shape, adaptor
        self._dtype, self._group, self._attention = dtype, group, attention
        self._mask: tuple[tuple[int, int | None, bool], Tensor | TiledMask | OwnAttention | None] | None = None

    def begin(self, tokens: Tensor) -> Block:
        rows = materialise(0, tokens.shape[1], self.shape.stride if self.adaptor is not None else None)
        # Slot rows come last: the order of rows means nothing to the forward, and the keys that a tile of rows sees are then
        # three ranges (sinks, window, slots).
        stamps = [*range(1, 2 * rows.count, 2), *(2 * tau for tau in rows.boundaries)]
        times = on_device(stamps, tokens.device)
        made_for = (rows.count, self._reach, torch.is_grad_enabled())
        if self._mask is None or self._mask[0] != made_for:
            self._mask = made_for, self._masked(times)
        adaptor = None if self.adaptor is None else self.adaptor.unbound(self._dtype)
        mask = self._mask[1]
        layout = layout_of(stamps, tokens.device) if rows.boundaries else None
        return block_of(tokens, rows, times, mask, mask is None, adaptor, tokens, layout)  # type: ignore[arg-type]

    def ends(self, times: Tensor) -> Tensor:
        """Last stamp that reads each of the rows with these stamps."""
        return read_until(times, expiry(times, self.shape), self._reach)

    @property
    def _reach(self) -> int | None:
        return None if self.adaptor is None else self.adaptor.info.reach

    def _masked(self, times: Tensor) -> Tensor | TiledMask | OwnAttention | None:
        """The mask of rows with these stamps; None for plain causal attention."""
        expires, kind = self.ends(times), self._attention
        plain = self.shape.window is None and self.adaptor is None
        if kind == "auto" and plain and not torch.is_grad_enabled() and fused_is_fast(self._dtype, times.device):
            return None  # the full-KV model beside a training: its pass takes 0.64 of the time with tiles
        if kind == "auto":
            kind = "tiled" if times.device.type == "cpu" else "flex" if len(times) > FLEX_ROWS else "mask"
        if len(times) > FEW_ROWS and kind != "mask":
            if kind == "flex":
                return None if plain else FlexMask(times, expires)
            return tiled_mask(visible(times, times, expires), self._dtype)
        return additive_mask(visible(times, times, expires), self._group, self._dtype)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.transpose(1, 2), v.transpose(1, 2)

    def end(self) -> None:
        """Nothing is kept."""
