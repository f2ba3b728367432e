"""Attention of a block of rows over one layer's keys.

Legend: B batch, N rows, K keys, H query heads, G = H / kv_heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from masw import hardware

FEW_ROWS = 32
"""Up to this many rows a KV head's whole query group is one matrix, so that each key is read once and not G times
(measured at one row and 32K keys: 2.2 to 2.6 times faster than `enable_gqa`). Wider blocks are bound by arithmetic."""

MANY_KEYS = 1024
"""From this many keys on, a few bf16 rows on a CPU without AMX take `_few_rows`: torch's fused kernel takes 1.5 to 3 times as long there
for 4096 keys, but starts 30 microseconds sooner."""


def fused_is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's fused CPU kernel multiplies bf16 tiles itself. Measured with AMX against what stands in for it elsewhere: few rows over
    832 to 32K keys take 0.3 to 0.9 of the time of `_few_rows`, whose products first copy the keys of a memory that has room to grow;
    512 rows over 1K to 16K keys 0.2 to 0.7 of that of tiles, though it reads keys that no row sees."""
    return dtype == torch.bfloat16 and device.type == "cpu" and hardware.cpu_features()["amx_bf16"]


def _two_products(keys: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether few rows over `keys` keys go through `_few_rows` instead of torch's fused kernel."""
    return dtype == torch.bfloat16 and device.type == "cpu" and keys >= MANY_KEYS and not fused_is_fast(dtype, device)


def additive_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Turns a boolean mask [N, K] into what `attend` adds to the scores, once a forward instead of once a layer.

    Returns [G * N, K] for few rows, stored as the kernel that reads them likes it (`_few_rows`: keys first), [N, K] otherwise.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    if seen.shape[0] > FEW_ROWS:
        return mask
    mask = mask.repeat(group, 1)
    return mask.T.contiguous().T if _two_products(seen.shape[1], dtype, seen.device) else mask


def block_mask(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor | TiledMask:
    """The mask of a block that a memory reads, in the form that suits its width and the device."""
    rows, keys = seen.shape
    if rows <= FEW_ROWS or seen.device.type != "cpu" or fused_is_fast(dtype, seen.device):
        return additive_mask(seen, group, dtype)
    return tiled_mask(seen, dtype, min(TILE_ROWS, max(32, TILE_SCORES // keys)))


TILE_ROWS = 128
"""Rows of one tile. Fewer rows skip more unseen keys, more rows make larger products."""

TILE_SCORES = 2**18
"""Rows times keys of a tile of a long memory: the scores of all heads then stay in the cache."""

KEPT_BYTES = 48 * 2**20
"""Up to this size a layer's attention probabilities are kept for the backward pass; larger ones are computed again."""


@dataclass(frozen=True)
class Tile:
    """Rows [start, stop) of a block and the keys that any of them sees."""

    start: int
    stop: int
    spans: tuple[tuple[int, int], ...]  # key ranges, in order
    plain: int  # this many keys of the spans, from the first on, are seen by all rows
    mask: Tensor  # [stop - start, keys in spans after those], additive

    @property
    def scores(self) -> int:
        """Scores of one head."""
        return (self.stop - self.start) * (self.plain + self.mask.shape[1])


@dataclass(frozen=True)
class TiledMask:
    """A block-sparse mask: keys that no row of a tile sees are never read. For wide blocks, forward and backward.

    Torch's fused CPU kernel runs at a sixth of the bf16 matrix product rate, forward and backward (measured with AVX512-BF16:
    75 against 440 GFLOP/s), and reads every key; a window of 64 over 640 rows sees a third of them.
    """

    tiles: tuple[Tile, ...]


class OwnAttention(Protocol):
    """A mask that brings its own kernel (see masw.flex)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, H, D]; k, v [B, kv_heads, K, D]; returns [B, N, H * D]."""
        ...


def tiled_mask(seen: Tensor, dtype: torch.dtype, rows: int = TILE_ROWS) -> TiledMask:
    """Cuts a boolean mask [N, K] into tiles of `rows` rows."""
    tiles = []
    for start in range(0, seen.shape[0], rows):
        part = seen[start : start + rows]
        used = torch.nn.functional.pad(part.any(dim=0).int(), (1, 1)).diff()
        spans = tuple(zip((used == 1).nonzero().flatten().tolist(), (used == -1).nonzero().flatten().tolist(), strict=True))
        kept = torch.cat([part[:, a:b] for a, b in spans], dim=1)
        plain = int(kept.all(dim=0).cumprod(0).sum())
        mask = torch.zeros(kept[:, plain:].shape, dtype=dtype, device=seen.device).masked_fill_(~kept[:, plain:], float("-inf"))
        tiles.append(Tile(start, start + part.shape[0], spans, plain, mask))
    return TiledMask(tuple(tiles))


class _TiledAttention(torch.autograd.Function):
    """Softmax attention over tiles. q [B * kv, G, N, D]; k, v [B * kv, K, D]; returns [B * kv, G, N, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: TiledMask) -> Tensor:
        ctx.mask = mask
        out = torch.empty_like(q)
        entries = sum(t.scores for t in mask.tiles) * q.shape[0] * q.shape[1]
        keep = any(ctx.needs_input_grad) and entries * q.element_size() <= KEPT_BYTES
        kept = []
        for tile in mask.tiles:
            p = _probabilities(q, k, tile)
            out[:, :, tile.start : tile.stop] = torch.bmm(p, _gather(v, tile)).unflatten(1, (q.shape[1], -1))
            if keep:
                kept.append(p)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for index, tile in enumerate(ctx.mask.tiles):
            rows = slice(tile.start, tile.stop)
            p = kept[index] if kept else _probabilities(q, k, tile)  # [B * kv, G * n, keys]
            d_out = grads[0][:, :, rows].flatten(1, 2)
            d_p = torch.bmm(d_out, _gather(v, tile).transpose(1, 2))
            d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype).mul_(scale)
            dq[:, :, rows] = torch.bmm(d_scores, _gather(k, tile)).unflatten(1, (q.shape[1], -1))
            _scatter_add(dv, torch.bmm(p.transpose(1, 2), d_out), tile)
            _scatter_add(dk, torch.bmm(d_scores.transpose(1, 2), q[:, :, rows].flatten(1, 2)), tile)
        return dq, dk, dv, None


def _probabilities(q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    rows, keys = q[:, :, tile.start : tile.stop].flatten(1, 2), _gather(k, tile)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), rows, keys.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]))  # [B * kv, G * n, keys]
    scores.unflatten(1, (q.shape[1], -1))[..., tile.plain :] += tile.mask
    return torch.softmax(scores, dim=-1)


def _few_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Two products around a softmax, for bf16 on a CPU without AMX. q [B, kv, G * N, D]; mask [G * N, K]; returns [B, kv, G * N, D].

    Torch's fused kernel is 2 to 3 times slower there. Keys come first in the scores, since a tall product of few columns reads
    the keys at memory speed. Scores are rounded to bf16, as in transformers' eager attention.
    """
    keys = k.flatten(0, 1)  # [B * kv, K, D]
    start = q.new_empty(1, 1, 1) if mask is None else mask.T
    scores = torch.baddbmm(start, keys, q.flatten(0, 1).mT, beta=0 if mask is None else 1, alpha=1 / math.sqrt(q.shape[-1]))
    return torch.bmm(scores.mT.softmax(-1), v.flatten(0, 1)).view(q.shape)


def _gather(x: Tensor, tile: Tile) -> Tensor:
    parts = [x[:, a:b] for a, b in tile.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _scatter_add(total: Tensor, part: Tensor, tile: Tile) -> None:
    done = 0
    for a, b in tile.spans:
        total[:, a:b] += part[:, done : done + b - a]
        done += b - a


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | TiledMask | OwnAttention | None, *, causal: bool = False) -> Tensor:
    """Softmax attention. q [B, N, H, D]; k, v [B, kv_heads, K, D]; mask from `additive_mask` or `tiled_mask`, or None when all
    keys are seen.

    `causal` is for N == K only: torch aligns its causal mask top-left, which is wrong for a block that continues a memory.
    Returns [B, N, H * D].
    """
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    if mask is not None and not isinstance(mask, Tensor):
        if not isinstance(mask, TiledMask):
            return mask.attend(q, k, v)
        q = q.reshape(batch, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, rows, dim)
        out = _TiledAttention.apply(q, k.flatten(0, 1), v.flatten(0, 1), mask)
        return out.view(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)
    if rows <= FEW_ROWS and not causal:
        group = heads // kv_heads
        # [B, N, kv, G, D] -> [B, kv, G * N, D]; rows of one query head stay together, as in the repeated mask
        q = q.view(batch, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * rows, dim)
        products = _two_products(k.shape[2], q.dtype, q.device)
        out = _few_rows(q, k, v, mask) if products else F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(batch, kv_heads, group, rows, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, rows, heads * dim)
    if causal and rows != k.shape[2]:
        raise ValueError(f"causal attention needs as many rows as keys, not {rows} rows and {k.shape[2]} keys; pass a mask")
    # With a gradient, or on a GPU, fewer KV heads are expanded by hand: the fused kernels and their backward then serve every shape.
    grouped = q.device.type == "cpu" and not any(x.requires_grad for x in (q, k, v))
    if kv_heads != heads and not grouped:
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(batch, rows, heads * dim)
