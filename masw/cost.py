"""Bytes and FLOPs from a model's shape alone: what is predicted, beside what is measured. No torch."""

from __future__ import annotations

from masw.config import MemoryShape, ModelConfig


def kv_entry_bytes(config: ModelConfig, itemsize: int, batch: int = 1) -> int:
    """Bytes of one KV entry over all layers: 2 * layers * batch * kv_heads * head_dim * itemsize."""
    return 2 * config.layers * batch * config.kv_width * itemsize


def kv_bytes(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, batch: int = 1) -> int:
    """KV bytes allocated to reach `tokens` raw tokens: (S + W + rollback window + floor(t / r)) entries, or t for a full memory."""
    return shape.capacity(tokens) * kv_entry_bytes(config, itemsize, batch)


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


def step_bytes(config: ModelConfig, shape: MemoryShape, tokens: int, itemsize: int, batch: int = 1) -> int:
    """Bytes that one decode step at `tokens` raw tokens reads: all weights and the live KV entries."""
    return parameters(config) * itemsize + shape.entries(tokens) * kv_entry_bytes(config, itemsize, batch)


def forward_flops(config: ModelConfig, rows: int, keys: int) -> int:
    """FLOPs of a forward of `rows` rows with logits of each: 2 per weight and row, and 4 * q_width per row, key and layer."""
    return 2 * parameters(config) * rows + 4 * config.q_width * rows * keys * config.layers


def run_bytes(
    target: ModelConfig, draft: ModelConfig, shape: MemoryShape | None, tokens: int, itemsize: int, *, shared: bool
) -> int:
    """Memory that a run needs: weights (once when draft and target are one model), both KV caches and prefill activations."""
    weights = weight_bytes(target, itemsize) + (0 if shared or shape is None else weight_bytes(draft, itemsize))
    kv = kv_bytes(target, MemoryShape(), tokens, itemsize)
    if shape is not None:
        kv += kv_bytes(draft, shape, tokens, itemsize)
    chunk = 512
    widest = max(target.intermediate, draft.intermediate)
    # gate/up and their product, the [chunk, keys] mask and one layer's expanded keys and values
    activations = chunk * widest * 4 * itemsize + chunk * tokens * (itemsize + 1) + 2 * tokens * target.q_width * itemsize
    return weights + kv + activations


def speedup(tokens_per_iteration: float, gamma: float, draft_ms: float, verify_ms: float, step_ms: float) -> float:
    """Predicted speed-up: tokens per iteration / (gamma * t_d / t_t + t_verify / t_t), mechanism section of the paper."""
    return tokens_per_iteration / ((gamma * draft_ms + verify_ms) / step_ms)
