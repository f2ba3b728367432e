"""Bytes and FLOPs from a model's shape alone: what is predicted, beside what is measured. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from masw.config import MemoryShape, ModelConfig

INT4_GROUP = 32  # inputs that share a scale and an offset, two bf16 numbers
INT4_ROWS = 16  # torch packs output rows by so many
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do: how fast one-row products read weights, and large products multiply."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, nbytes: float, flops: float) -> float:
        """The least time that reading `nbytes` and computing `flops` can take, whichever is longer."""
        return 1e3 * max(nbytes / self.bytes_per_s, flops / self.flops_per_s)


def kv_entry_bytes(config: ModelConfig, itemsize: int, batch: int = 1) -> int:
    """Bytes of one KV entry over all layers: 2 * layers * batch * kv_heads * head_dim * itemsize."""
    return 2 * config.layers * batch * config.kv_width * itemsize


def kv_bytes(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, batch: int = 1) -> int:
    """KV bytes allocated to reach `tokens` raw tokens: (S + W + rollback window + floor(t / r)) entries, or t for a full memory."""
    return shape.capacity(tokens) * kv_entry_bytes(config, itemsize, batch)


def peak_kv_bytes(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, batch: int = 1) -> int:
    """Most KV bytes allocated on the way to `tokens`: a memory that selects also holds the whole prompt until that ends."""
    return shape.peak(tokens) * kv_entry_bytes(config, itemsize, batch)


def parameters(config: ModelConfig) -> int:
    """Weights that a decode step reads, the LM head once whether tied or not."""
    c = config
    qkv = c.q_width + 2 * c.kv_width
    attention = c.hidden * qkv + (qkv if c.qkv_bias else 0) + (2 * c.head_dim if c.qk_norm else 0) + c.q_width * c.hidden
    return c.layers * (attention + 3 * c.hidden * c.intermediate + 2 * c.hidden) + c.vocab * c.hidden + c.hidden


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights in memory; an untied embedding is a second table."""
    extra = 0 if config.tied else config.vocab * config.hidden
    return (parameters(config) + extra) * itemsize


def packed_bytes(config: ModelConfig, kind: str) -> int:
    """Bytes of the packed copies that a quantised draft's steps read in place of its matrices; 0 for plain weights.

    int8: a byte a weight and a bf16 scale an output row. int4: half a byte a weight and two bf16 numbers a group.
    """
    if kind not in ("int8", "int4"):
        return 0
    c = config
    qkv = c.q_width + 2 * c.kv_width
    shapes = [(qkv, c.hidden), (c.hidden, c.q_width), (2 * c.intermediate, c.hidden), (c.hidden, c.intermediate)]
    head = (c.vocab, c.hidden)
    if kind == "int8":
        return c.layers * sum(map(_int8_bytes, shapes)) + _int8_bytes(head)
    return c.layers * sum(map(_int4_bytes, shapes)) + (_int4_bytes if head_in_int4(c) else _int8_bytes)(head)


def head_in_int4(config: ModelConfig) -> bool:
    """Whether the LM head of an int4 draft is int4 too; else it is int8, since the vocabulary is no multiple of what is packed."""
    return config.vocab % INT4_ROWS == 0


def _int8_bytes(shape: tuple[int, int]) -> int:
    rows, inputs = shape
    return rows * inputs + 2 * rows


def _int4_bytes(shape: tuple[int, int]) -> int:
    rows, inputs = shape
    return rows * inputs // 2 + 4 * rows * inputs // INT4_GROUP


def read_bytes(config: ModelConfig, itemsize: int, kind: str = "plain") -> int:
    """Bytes of weights that a decode step reads, `kind` being what they are packed as."""
    if kind not in ("int8", "int4"):
        return parameters(config) * itemsize
    c = config
    matrices = c.layers * c.hidden * (2 * c.q_width + 2 * c.kv_width + 3 * c.intermediate) + c.vocab * c.hidden
    return packed_bytes(config, kind) + (parameters(config) - matrices) * itemsize


def step_bytes(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, batch: int = 1, kind: str = "plain") -> int:
    """Bytes that one decode step at `tokens` raw tokens reads: all weights and the live KV entries."""
    return read_bytes(config, itemsize, kind) + shape.entries(tokens) * kv_entry_bytes(config, itemsize, batch)


def forward_flops(config: ModelConfig, rows: int, keys: int) -> int:
    """FLOPs of a forward of `rows` rows with logits of each: 2 per weight and row, and 4 * q_width per row, key and layer."""
    return 2 * parameters(config) * rows + 4 * config.q_width * rows * keys * config.layers


def pass_ms(
    config: ModelConfig,
    shape: MemoryShape,
    tokens: int,
    itemsize: int,
    rates: Rates,
    *,
    rows: int = 1,
    batch: int = 1,
    kind: str = "plain",
) -> float:
    """Floor of a pass of `rows` rows a sequence after `tokens` tokens: a draft step (1 row) or a verify pass (gamma + 1)."""
    nbytes = step_bytes(config, shape, tokens, itemsize, batch, kind)
    return rates.floor_ms(nbytes, forward_flops(config, rows * batch, shape.entries(tokens)))


def prefill_flops(config: ModelConfig, shape: MemoryShape, tokens: int) -> int:
    """FLOPs of reading `tokens` tokens, without logits: each row (a raw token or a slot) sees what the memory held before it."""
    c = config
    share = (tokens + shape.slots(tokens)) / max(tokens, 1)
    keys = sum(shape.entries(t) * min(PREFILL_CHUNK, tokens - t) for t in range(0, tokens, PREFILL_CHUNK))
    keys += tokens * min(PREFILL_CHUNK, tokens) // 2  # within the chunk
    return int(share * (2 * (parameters(c) - c.vocab * c.hidden) * tokens + 4 * c.q_width * c.layers * keys))


def prefill_ms(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, rates: Rates) -> float:
    """Floor of reading `tokens` tokens in chunks; each chunk reads the weights once."""
    chunks = -(-tokens // PREFILL_CHUNK)
    return rates.floor_ms(chunks * read_bytes(config, itemsize), prefill_flops(config, shape, tokens))


def run_bytes(
    target: ModelConfig,
    draft: ModelConfig,
    shape: MemoryShape | None,
    tokens: int,
    itemsize: int,
    *,
    shared: bool,
    kind: str = "plain",
    baseline: int = 0,
) -> int:
    """Memory that a run needs: weights (once when draft and target are one model), the draft's packed copies of `kind`, both KV
    caches, prefill activations, and what the process held before it loaded anything (`baseline`)."""
    weights = weight_bytes(target, itemsize) + (0 if shared or shape is None else weight_bytes(draft, itemsize))
    kv = kv_bytes(target, MemoryShape(), tokens, itemsize)
    if shape is not None:
        weights += packed_bytes(draft, kind)
        kv += peak_kv_bytes(draft, replace(shape, prompt=tokens), tokens, itemsize)
    chunk = PREFILL_CHUNK
    widest = max(target.intermediate, draft.intermediate)
    # gate/up and their product, the [chunk, keys] mask and one layer's expanded keys and values
    activations = chunk * widest * 4 * itemsize + chunk * tokens * (itemsize + 1) + 2 * tokens * target.q_width * itemsize
    return baseline + weights + kv + activations


def bench_bytes(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, *, rows: int = 1, batch: int = 1) -> int:
    """Memory that a bench of steps needs: weights, one memory, its adaptor where it has slots, the logits and one layer's activations."""
    adaptor = 2 * config.layers * config.kv_width * config.hidden * itemsize if shape.stride else 0
    logits = 2 * rows * batch * config.vocab * itemsize
    activations = rows * batch * (4 * config.intermediate + config.heads * shape.entries(tokens)) * itemsize
    return weight_bytes(config, itemsize) + kv_bytes(config, shape, tokens, itemsize, batch) + adaptor + logits + activations


def tokens_per_iteration(acceptance: float, gamma: float) -> float:
    """Expected tokens of an iteration when each drafted token is accepted with probability `acceptance`, independently
    (arXiv 2211.17192): (1 - a^(gamma + 1)) / (1 - a), the correction or bonus token included."""
    return gamma + 1 if acceptance >= 1 else (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def speedup(tokens_per_iteration: float, gamma: float, draft_ms: float, verify_ms: float, step_ms: float) -> float:
    """Predicted speed-up: tokens per iteration / (gamma * t_d / t_t + t_verify / t_t), mechanism section of the paper."""
    return tokens_per_iteration / ((gamma * draft_ms + verify_ms) / step_ms)
