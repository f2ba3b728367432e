"""Attention: the few-row, wide, tiled and causal paths give what a plain softmax gives (fp64)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from masw import hardware
from masw.attention import FEW_ROWS, MANY_KEYS, additive_mask, attend, block_mask, tiled_mask
from tests.helpers import naive_attention, table_mask

HEADS = [(4, 4), (4, 2), (6, 1), (6, 2)]  # query heads, KV heads
DIM = 8


def tensors(rows: int, keys: int, heads: int, kv_heads: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, N, H, D]; k, v [B, kv_heads, K, D]."""
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    q = torch.randn(batch, rows, heads, DIM, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(batch, kv_heads, keys, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return naive_attention(q, k.transpose(1, 2), v.transpose(1, 2), seen)


def random_mask(rows: int, keys: int) -> Tensor:
    seen = torch.rand(rows, keys, generator=torch.Generator().manual_seed(rows)) < 0.4
    seen[range(rows), torch.arange(rows) % keys] = True  # a row sees at least itself
    return seen


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, 2, 7, FEW_ROWS, FEW_ROWS + 1, 70])
def test_any_mask(rows: int, heads: int, kv_heads: int, batch: int) -> None:
    q, k, v = tensors(rows, 83, heads, kv_heads, batch)
    seen = random_mask(rows, 83)
    out = attend(q, k, v, additive_mask(seen, heads // kv_heads, torch.float64))
    torch.testing.assert_close(out, plain(q, k, v, seen), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_no_mask_sees_every_key(rows: int, heads: int, kv_heads: int) -> None:
    q, k, v = tensors(rows, 50, heads, kv_heads, 2)
    torch.testing.assert_close(attend(q, k, v, None), plain(q, k, v, torch.ones(rows, 50).bool()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_few_rows_and_wide_blocks_agree(heads: int, kv_heads: int) -> None:
    """The same rows, once alone and once as part of a block that takes the other path."""
    q, k, v = tensors(FEW_ROWS + 8, 61, heads, kv_heads, 2)
    seen = random_mask(FEW_ROWS + 8, 61)
    wide = attend(q, k, v, additive_mask(seen, heads // kv_heads, torch.float64))
    few = attend(q[:, :9], k, v, additive_mask(seen[:9], heads // kv_heads, torch.float64))
    torch.testing.assert_close(few, wide[:, :9], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, 9, FEW_ROWS, 45])
def test_causal_over_a_square(rows: int, heads: int, kv_heads: int) -> None:
    q, k, v = tensors(rows, rows, heads, kv_heads, 2)
    seen = torch.ones(rows, rows).tril().bool()
    torch.testing.assert_close(attend(q, k, v, None, causal=True), plain(q, k, v, seen), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "keys"), [(1, 2), (4, 30), (30, 4), (40, 90)])
def test_causal_needs_a_square(rows: int, keys: int) -> None:
    """Torch aligns its causal mask top-left: a verify block over a prefix would see the wrong end."""
    q, k, v = tensors(rows, keys, 4, 2, 1)
    with pytest.raises(ValueError, match=f"not {rows} rows and {keys} keys; pass a mask"):
        attend(q, k, v, None, causal=True)


@pytest.mark.parametrize("group", [1, 3])
def test_additive_mask_repeats_for_few_rows_only(group: int) -> None:
    few, wide = random_mask(3, 7), random_mask(FEW_ROWS + 1, 7)
    assert additive_mask(few, group, torch.float32).shape == (3 * group, 7)
    assert additive_mask(wide, group, torch.float32).shape == (FEW_ROWS + 1, 7)
    mask = additive_mask(few, group, torch.float32)
    assert torch.equal(mask == 0, few.repeat(group, 1)) and set(mask.unique().tolist()) == {0.0, float("-inf")}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("tile", [16, 128])
def test_tiles_forward_and_backward(tile: int, heads: int, kv_heads: int, batch: int) -> None:
    """The block-sparse path of training: values and gradients of sinks + window + slots."""
    seen = table_mask(60, 2, 9, 4)
    rows = len(seen)
    q, k, v = (t.requires_grad_() for t in tensors(rows, rows, heads, kv_heads, batch))
    weight = torch.randn(batch, rows, heads * DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, expected = attend(q, k, v, tiled_mask(seen, torch.float64, tile)), plain(q, k, v, seen)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_tiles_of_a_random_mask() -> None:
    q, k, v = tensors(50, 50, 4, 2, 1)
    seen = random_mask(50, 50)
    torch.testing.assert_close(attend(q, k, v, tiled_mask(seen, torch.float64, 7)), plain(q, k, v, seen), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 40])
def test_bf16_is_as_near_as_torch_gets(rows: int, heads: int, kv_heads: int, masked: bool) -> None:
    """Error against fp64 within twice that of a plain bf16 softmax attention, whichever path takes the block."""
    low = [t.bfloat16() for t in tensors(rows, 96, heads, kv_heads, 2)]
    q, k, v = (t.double() for t in low)
    seen = random_mask(rows, 96) if masked else torch.ones(rows, 96).bool()
    exact = plain(q, k, v, seen)
    ours = attend(*low, block_mask(seen, heads // kv_heads, torch.bfloat16) if masked else None)
    theirs = plain(*low, seen)
    error, reference = (ours.double() - exact).abs(), (theirs.double() - exact).abs()
    assert float(error.mean()) <= 2 * float(reference.mean()) and float(error.max()) <= 2 * float(reference.max())


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 200])
def test_block_mask_suits_every_width(rows: int, heads: int, kv_heads: int) -> None:
    q, k, v = tensors(rows, 250, heads, kv_heads, 2)
    seen = random_mask(rows, 250)
    out = attend(q, k, v, block_mask(seen, heads // kv_heads, torch.float64))
    torch.testing.assert_close(out, plain(q, k, v, seen), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, 6, FEW_ROWS + 40])
@pytest.mark.parametrize("amx", [True, False])
def test_bf16_over_many_keys(
    rows: int, heads: int, kv_heads: int, masked: bool, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bf16 paths of the CPU err at most twice as much as plain bf16 attention, against fp64."""
    monkeypatch.setattr(hardware, "cpu_features", lambda: {"amx_bf16": amx})
    exact = tensors(rows, MANY_KEYS + 7, heads, kv_heads, 2)
    seen = random_mask(rows, MANY_KEYS + 7) if masked else torch.ones(rows, MANY_KEYS + 7).bool()
    q, k, v = (t.bfloat16() for t in exact)
    mask = block_mask(seen, heads // kv_heads, torch.bfloat16) if masked else None
    truth = plain(q.double(), k.double(), v.double(), seen)
    ours, theirs = ((out.double() - truth).abs().max() for out in (attend(q, k, v, mask), plain(q, k, v, seen)))
    assert ours <= 2 * theirs + 1e-3


def test_block_mask_is_cut_into_tiles_that_leave_no_key_out() -> None:
    """Narrow tiles over a long memory: the keys that all rows see, and those that the mask decides."""
    seen = torch.ones(150, 9000).tril(8850).bool()
    tiles = block_mask(seen, 1, torch.float64)
    assert not isinstance(tiles, Tensor)
    assert [t.start for t in tiles.tiles] == [0, 32, 64, 96, 128]
    assert [t.plain for t in tiles.tiles] == [8851, 8883, 8915, 8947, 8979]
    assert sum(t.scores for t in tiles.tiles) == sum((t.stop - t.start) * (8850 + t.stop) for t in tiles.tiles)
    q, k, v = tensors(150, 9000, 2, 1, 1)
    torch.testing.assert_close(attend(q, k, v, tiles), plain(q, k, v, seen), rtol=0, atol=1e-12)
