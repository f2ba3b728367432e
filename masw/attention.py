"""Attention of a block of rows over one layer's keys. Legend: B batch, N rows, K keys, H query heads, G = H / kv_heads, D head dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 32
"""Up to this many rows a KV head's whole query group is one matrix, so that each key is read once and not G times
(measured at one row and 32K keys: 2.2 to 2.6 times faster than `enable_gqa`). Wider blocks are bound by arithmetic."""


def additive_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Turns a boolean mask [N, K] into what `attend` adds to the scores, once a forward instead of once a layer.

    Returns [G * N, K] for few rows, [N, K] otherwise.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return mask.repeat(group, 1) if group > 1 and seen.shape[0] <= FEW_ROWS else mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """Softmax attention. q [B, N, H, D]; k, v [B, kv_heads, K, D]; mask from `additive_mask`, or None when all keys are seen.

    `causal` is for N == K only: torch aligns its causal mask top-left, which is wrong for a block that continues a memory.
    Returns [B, N, H * D].
    """
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    if rows <= FEW_ROWS and not causal:
        group = heads // kv_heads
        # [B, N, kv, G, D] -> [B, kv, G * N, D]; rows of one query head stay together, as in the repeated mask
        q = q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * rows, dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(batch, kv_heads, group, rows, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, rows, heads * dim)
    if causal and rows != k.shape[2]:
        raise ValueError(f"causal attention needs as many rows as keys, not {rows} rows and {k.shape[2]} keys; pass a mask")
    # Fewer KV heads are expanded by hand: torch's fused CPU kernel and its backward then serve every shape.
    if kv_heads != heads:
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal)
    return out.transpose(1, 2).reshape(batch, rows, heads * dim)
