"""Predicted bytes and FLOPs against real tensors and real allocations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from masw import cost
from masw.config import MemoryShape, ModelConfig
from masw.quantise import quantised
from tests.helpers import FAMILIES, memory_for, random_tokens, tiny_config, tiny_decoder

SHAPES = [MemoryShape(), MemoryShape(4, 16), MemoryShape(4, 16, 4), MemoryShape(0, 8, 8, 5)]
SMOLLM2 = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, 1e5, 1e-5, True)
QWEN_DRAFT = ModelConfig("qwen2", 151936, 896, 24, 14, 2, 64, 4864, 32768, 1e6, 1e-6, True, qkv_bias=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_are_those_of_the_tensors(family: str, tied: bool, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(tiny_config(family, tied=tied), dtype=dtype)
    assert cost.weight_bytes(decoder.config, dtype.itemsize) == decoder.nbytes
    read = decoder.nbytes - (0 if tied else decoder.weights.embed.nbytes)  # a step looks up one row of an untied embedding
    assert cost.parameters(decoder.config) * dtype.itemsize == read


def test_parameters_of_real_models() -> None:
    """What the model cards say."""
    assert cost.parameters(SMOLLM2) == 134_515_008
    assert cost.parameters(QWEN_DRAFT) == 494_032_768


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 10, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kv_bytes_are_what_is_allocated(shape: MemoryShape, tokens: int, batch: int, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(tiny_config(), dtype=dtype)
    memory = memory_for(decoder, shape, tokens=tokens, batch=batch)
    assert cost.kv_bytes(decoder.config, shape, tokens, dtype.itemsize, batch) == memory.nbytes
    decoder.forward(random_tokens(tokens, 61, 0, batch), memory)
    memory.commit()
    assert memory.nbytes == cost.kv_bytes(decoder.config, shape, tokens, dtype.itemsize, batch)
    weights = cost.parameters(decoder.config) * dtype.itemsize
    assert cost.step_bytes(decoder.config, shape, tokens, dtype.itemsize, batch) == weights + memory.live_nbytes


def test_the_compact_memory_at_8k() -> None:
    """r = 8, window 512 at 8K: at most a fifth of the full draft KV."""
    for config in (SMOLLM2, QWEN_DRAFT):
        compact = cost.kv_bytes(config, MemoryShape(4, 512, 8), 8192, 2)
        full = cost.kv_bytes(config, MemoryShape(), 8192, 2)
        assert compact == (4 + 512 + 16 + 1024) * 2 * config.layers * config.kv_heads * config.head_dim * 2
        assert compact / full <= 0.20


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("rows", "before"), [(1, 63), (5, 59), (40, 0)])  # whole multiples of what a memory shows at a time
def test_flops_are_those_of_the_products(family: str, rows: int, before: int) -> None:
    """Against torch's own count of matrix products; norms and biases are the small rest."""
    decoder = tiny_decoder(tiny_config(family), dtype=torch.float32)
    memory = memory_for(decoder, MemoryShape())
    if before:
        decoder.forward(random_tokens(before, 61, 0), memory)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the fused CPU kernel is not counted
        decoder.logits(decoder.forward(random_tokens(rows, 61, 1), memory))
    predicted = cost.forward_flops(decoder.config, rows, before + rows)
    assert counter.get_total_flops() <= predicted <= 1.03 * counter.get_total_flops()


def test_run_bytes_counts_each_model_once() -> None:
    shape, tokens = MemoryShape(4, 512, 8), 4096
    alone = cost.run_bytes(SMOLLM2, SMOLLM2, None, tokens, 2, shared=True)
    shared = cost.run_bytes(SMOLLM2, SMOLLM2, shape, tokens, 2, shared=True)
    apart = cost.run_bytes(SMOLLM2, SMOLLM2, shape, tokens, 2, shared=False)
    assert shared - alone == cost.kv_bytes(SMOLLM2, shape, tokens, 2)
    assert apart - shared == cost.weight_bytes(SMOLLM2, 2)
    assert alone > cost.weight_bytes(SMOLLM2, 2) + cost.kv_bytes(SMOLLM2, MemoryShape(), tokens, 2)


def test_speedup_by_hand() -> None:
    assert cost.speedup(3.0, 5, draft_ms=1.0, verify_ms=10.0, step_ms=10.0) == pytest.approx(2.0)
    assert cost.speedup(1.0, 0, draft_ms=1.0, verify_ms=7.0, step_ms=7.0) == 1.0  # nothing drafted: autoregressive


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bytes_are_those_of_the_packed_copies(family: str, kind: str) -> None:
    shape = replace(tiny_config(family), hidden=64, head_dim=16, intermediate=96)
    decoder = tiny_decoder(shape, dtype=torch.bfloat16)
    packed = quantised(decoder, kind).weights
    assert cost.packed_bytes(shape, kind) == packed.packed_nbytes
    small = sum(t.nbytes for t in packed.tensors() if t.dim() == 1)  # norms and biases stay as they are
    assert cost.read_bytes(shape, 2, kind) == packed.packed_nbytes + small
    assert cost.packed_bytes(shape, "plain") == 0 and cost.read_bytes(shape, 2) == cost.parameters(shape) * 2
    shared = cost.run_bytes(shape, shape, MemoryShape(), 64, 2, shared=True)
    assert (
        cost.run_bytes(shape, shape, MemoryShape(), 64, 2, shared=True, kind=kind, baseline=7)
        == shared + packed.packed_nbytes + 7
    )
    assert cost.run_bytes(shape, shape, None, 64, 2, shared=True, kind=kind) == cost.run_bytes(
        shape, shape, None, 64, 2, shared=True
    )


def test_packing_needs_no_second_copy_of_the_model() -> None:
    """What the default pair weighs at 8K with an int4 draft, in numbers: both models, the packed copy, both caches."""
    target = ModelConfig("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 32768, 1e6, 1e-6, True, qkv_bias=True)
    found = cost.run_bytes(target, QWEN_DRAFT, MemoryShape(4, 512, 8), 8192, 2, shared=False, kind="int4", baseline=250_000_000)
    assert found == pytest.approx(4.08e9 + 0.36e9 + 0.25e9 + 0.25e9, rel=0.04)


def test_floors_by_hand() -> None:
    rates = cost.Rates(bytes_per_s=20e9, flops_per_s=1e12)
    assert rates.floor_ms(20e6, 1e6) == 1.0 and rates.floor_ms(1, 5e9) == 5.0
    step = cost.pass_ms(SMOLLM2, MemoryShape(), 4096, 2, rates)
    assert step == pytest.approx(1e3 * (134_515_008 * 2 + 4096 * 23_040) / 20e9)
    # Many rows are bound by arithmetic, few by bytes; a batch multiplies the caches, not the weights.
    assert cost.pass_ms(SMOLLM2, MemoryShape(), 4096, 2, rates, rows=6) == step
    wide = cost.pass_ms(SMOLLM2, MemoryShape(), 4096, 2, rates, rows=512)
    assert wide == pytest.approx(1e3 * cost.forward_flops(SMOLLM2, 512, 4096) / 1e12)
    batch = cost.pass_ms(SMOLLM2, MemoryShape(), 4096, 2, rates, batch=16)
    assert batch - step == pytest.approx(1e3 * 15 * 4096 * 23_040 / 20e9)
    assert cost.pass_ms(QWEN_DRAFT, MemoryShape(), 64, 2, rates, kind="int4") < 0.4 * cost.pass_ms(
        QWEN_DRAFT, MemoryShape(), 64, 2, rates
    )
    assert cost.pass_ms(SMOLLM2, MemoryShape(4, 512, 8), 8192, 2, rates) < cost.pass_ms(SMOLLM2, MemoryShape(), 8192, 2, rates)


@pytest.mark.parametrize("shape", [MemoryShape(), MemoryShape(4, 16), MemoryShape(4, 16, 4)], ids=str)
def test_prefill_flops_are_those_of_chunks(shape: MemoryShape) -> None:
    """Against a sum over chunks of what each row sees, the mean of its first and last row's keys."""
    c, tokens, total = SMOLLM2, 2048, 0
    for start in range(0, tokens, cost.PREFILL_CHUNK):
        rows = cost.PREFILL_CHUNK + shape.slots(start + cost.PREFILL_CHUNK) - shape.slots(start)
        total += cost.forward_flops(c, rows, shape.entries(start) + cost.PREFILL_CHUNK // 2) - 2 * c.vocab * c.hidden * rows
    assert cost.prefill_flops(c, shape, tokens) == pytest.approx(total, rel=0.01)
    rates = cost.Rates(1e15, 1e12)
    assert cost.prefill_ms(c, shape, tokens, 2, rates) == pytest.approx(total / 1e9, rel=0.01)


def test_tokens_per_iteration_by_hand() -> None:
    assert cost.tokens_per_iteration(0.0, 5) == 1 and cost.tokens_per_iteration(1.0, 5) == 6
    assert cost.tokens_per_iteration(0.5, 2) == 1.75  # 1 + 1/2 + 1/4
