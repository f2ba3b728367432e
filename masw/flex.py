"""Block-sparse attention for wide blocks on a GPU, through torch's flex_attention.

Legend: B batch, N rows, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class FlexMask:
    """Who sees whom among rows that are their own keys, by their stamps (see masw.policies). Blocks that no row sees are skipped."""

    def __init__(self, times: Tensor, expires: Tensor) -> None:
        """`times` and `expires` [N] of each row."""

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (times[key] <= times[row]) & (times[row] <= expires[key])

        self._blocks = create_block_mask(seen, None, None, len(times), len(times), device=times.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, H, D]; k, v [B, kv_heads, N, D]; returns [B, N, H * D]."""
        grouped = q.shape[2] != k.shape[1]
        out = _kernel(q.device.type)(q.transpose(1, 2), k, v, block_mask=self._blocks, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)


@lru_cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled on a GPU; on the CPU the plain form, which is slow and has no backward pass, for tests."""
    kernel: Any = torch.compile(flex_attention) if device == "cuda" else flex_attention
    return kernel
