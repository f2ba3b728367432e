"""The dense masked pass of training: batched, differentiable in the adaptor alone, the same numbers as streaming."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from masw.config import MemoryShape
from masw.dense import ATTENTIONS, DenseMemory
from masw.errors import UsageError
from masw.flex import FlexMask
from masw.memory import Memory
from masw.policies import expiry
from tests.helpers import interleaved, random_tokens, reference_logits, table_mask, tiny_config, tiny_decoder, trained_adaptor

SHAPE = MemoryShape(2, 8, 4)
DECODER = tiny_decoder(tiny_config())


def dense_for(shape: MemoryShape, adaptor: object) -> DenseMemory:
    return DenseMemory(shape, dtype=torch.float64, group=2, adaptor=adaptor)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [SHAPE, MemoryShape(0, 5, 5), MemoryShape(9, 4, 1), MemoryShape(3, 300, 7)], ids=str)
@pytest.mark.parametrize("tokens", [3, 20, 33, 150])
def test_one_pass_is_the_plain_reference(tokens: int, shape: MemoryShape) -> None:
    """Few rows, many rows and several tiles."""
    adaptor, text = trained_adaptor(DECODER), random_tokens(tokens, 61, 2, batch=2)
    out = DECODER.logits(DECODER.forward(text, dense_for(shape, adaptor)))
    torch.testing.assert_close(out, reference_logits(DECODER, text, shape, adaptor), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [MemoryShape(), MemoryShape(2, 8)], ids=["full", "window"])
@pytest.mark.parametrize("tokens", [20, 150])
def test_without_slots(tokens: int, shape: MemoryShape) -> None:
    text = random_tokens(tokens, 61, 3, batch=2)
    out = DECODER.logits(DECODER.forward(text, dense_for(shape, None)))
    torch.testing.assert_close(out, reference_logits(DECODER, text, shape), rtol=0, atol=1e-9)


def test_passes_of_different_lengths_share_no_mask() -> None:
    adaptor, memory = trained_adaptor(DECODER), None
    memory = dense_for(SHAPE, adaptor)
    for tokens in (40, 12, 41, 40):
        text = random_tokens(tokens, 61, tokens)
        out = DECODER.logits(DECODER.forward(text, memory))
        torch.testing.assert_close(out, reference_logits(DECODER, text, SHAPE, adaptor), rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("mirror", ["kv", "qkv"])
@pytest.mark.parametrize("tokens", [14, 90])
def test_gradients_reach_the_adaptor_alone_and_are_right(family: str, mirror: str, tokens: int) -> None:
    """Against automatic differentiation of the plain reference."""
    decoder = tiny_decoder(tiny_config(family))
    adaptor = trained_adaptor(decoder, "learned", mirror).requires_grad_(True)
    text = random_tokens(tokens, 61, 4, batch=2)
    weight = torch.randn(2, tokens, 61, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = list(adaptor.parameters())
    ours = torch.autograd.grad((decoder.logits(decoder.forward(text, dense_for(SHAPE, adaptor))) * weight).sum(), parameters)
    theirs = torch.autograd.grad((reference_logits(decoder, text, SHAPE, adaptor) * weight).sum(), parameters)
    assert not any(t.requires_grad for t in decoder.weights.tensors())
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_loss_before_the_first_slot_teaches_nothing() -> None:
    adaptor = trained_adaptor(DECODER).requires_grad_(True)
    out = DECODER.logits(DECODER.forward(random_tokens(20, 61, 5), dense_for(SHAPE, adaptor)))
    early, late = (
        torch.autograd.grad(part.sum(), list(adaptor.parameters()), retain_graph=True) for part in (out[:, :4], out[:, 4:])
    )
    assert all(float(g.abs().max()) == 0 for g in early) and all(float(g.abs().max()) > 0 for g in late)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", [MemoryShape(), MemoryShape(2, 8), MemoryShape(2, 8, 4), MemoryShape(0, 16, 5)])
def test_every_kernel_reads_the_same_mask(family: str, shape: MemoryShape) -> None:
    """Those of a GPU too: torch's fused kernel with a whole mask, plain causal attention, and the block-sparse kernel (here in
    its plain form)."""
    decoder = tiny_decoder(tiny_config(family))
    adaptor = trained_adaptor(decoder) if shape.stride else None
    tokens = random_tokens(150, decoder.config.vocab, seed=3, batch=2)
    found = {}
    for attention in ATTENTIONS:
        memory = DenseMemory(shape, dtype=decoder.dtype, group=decoder.config.group, adaptor=adaptor, attention=attention)
        with torch.no_grad():
            found[attention] = [
                decoder.forward(tokens, memory),
                decoder.forward(tokens[:, :70], memory),
            ]  # two masks of one memory
    for results in found.values():
        for a, b in zip(results, found["tiled"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(UsageError, match="attention 'flash' is unknown; use one of auto, tiled, mask, flex"):
        DenseMemory(MemoryShape(), dtype=torch.float32, attention="flash")


def test_a_sparse_mask_skips_what_no_row_sees() -> None:
    times = torch.arange(1, 4097, 2)
    blocks = FlexMask(times, expiry(times, MemoryShape(4, 128)))._blocks
    assert blocks.sparsity() > 70  # percent of 128 x 128 blocks


@pytest.mark.parametrize("chunk", [1, 6, 45])
def test_slots_out_of_an_adaptors_reach_are_not_read(chunk: int) -> None:
    adaptor, text = trained_adaptor(DECODER), random_tokens(150, 61, 7)
    endless = reference_logits(DECODER, text, SHAPE, adaptor)
    adaptor.info = replace(adaptor.info, provenance={"recipe": {"stages": ["16x1:1k"]}})
    reach = adaptor.info.reach
    assert reach == 64
    rows = interleaved(150, SHAPE.stride)
    stamps = torch.tensor([2 * at + (kind == "raw") for kind, at in rows])
    far = (stamps % 2 == 0) & (stamps[:, None] - stamps > 2 * reach)
    mask = table_mask(256, SHAPE.sinks, SHAPE.window, SHAPE.stride)[: len(rows), : len(rows)] & ~far
    expected = reference_logits(DECODER, text, SHAPE, adaptor, lambda layer, q, k: mask.expand(1, q.shape[2], -1, -1))
    assert (expected - endless)[:, :60].abs().max() == 0 < (expected - endless)[:, 80:].abs().max()
    dense = DECODER.logits(DECODER.forward(text, dense_for(SHAPE, adaptor)))
    torch.testing.assert_close(dense, expected, rtol=0, atol=1e-9)
    memory = Memory(DECODER.config, SHAPE, tokens=150, device=text.device, dtype=torch.float64, adaptor=adaptor)
    parts = []
    for part in text.split(chunk, dim=1):
        parts.append(DECODER.logits(DECODER.forward(part, memory)))
        memory.commit()
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-9)
    assert memory.entries == SHAPE.entries(150)  # what is out of reach stays stored
