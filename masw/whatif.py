"""The memory calculator: KV bytes, step times and speed-up of any shape at any context, predicted. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from masw import cost
from masw.config import MemoryShape, ModelConfig
from masw.errors import UsageError

DTYPES = {"bf16 / fp16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 0.5}  # bytes a number


def _llama(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False, head_dim: int = 128) -> ModelConfig:
    return ModelConfig("llama", 128_256, hidden, layers, heads, 8, head_dim, intermediate, 131_072, 500_000.0, 1e-5, tied)


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> ModelConfig:
    return ModelConfig(
        "qwen2", 151_936, hidden, layers, heads, kv_heads, head_dim, intermediate, 32_768, 1e6, 1e-6, True, qkv_bias=True
    )


# Shapes as their published config.json files give them.
SHAPES: dict[str, ModelConfig] = {
    "Llama 3.2 1B": _llama(2048, 16, 32, 8192, tied=True, head_dim=64),
    "Llama 3.2 3B": _llama(3072, 28, 24, 8192, tied=True),
    "Llama 3.1 8B": _llama(4096, 32, 32, 14_336),
    "Llama 3.1 70B": _llama(8192, 80, 64, 28_672),
    "Qwen2.5 0.5B": _qwen(896, 24, 14, 2, 64, 4864),
    "Qwen2.5 1.5B": _qwen(1536, 28, 12, 2, 128, 8960),
    "SmolLM2 135M": ModelConfig("llama", 49_152, 576, 30, 9, 3, 64, 1536, 8192, 100_000.0, 1e-5, True),
}


@dataclass(frozen=True)
class Setting:
    """What is asked. `bandwidth` is in bytes/s; `acceptance` the chance that a drafted token is kept, given that those before it were."""

    target: ModelConfig
    draft: ModelConfig
    shape: MemoryShape
    gamma: int = 5
    batch: int = 1
    weight_bytes: float = 2.0  # a weight of the target
    draft_weight_bytes: float = 2.0
    kv_bytes: float = 2.0  # a number of either cache
    bandwidth: float = 4.8e12
    acceptance: float = 0.75  # with this memory
    full_acceptance: float = 0.85  # with an uncompressed one

    def __post_init__(self) -> None:
        if self.batch < 1 or self.gamma < 1:
            raise UsageError("batch and gamma must be at least 1")
        if self.bandwidth <= 0:
            raise UsageError("the bandwidth must be above 0")


@dataclass(frozen=True)
class Prediction:
    """At one context length. Bytes over the whole batch; times in ms; speed-ups over plain decoding of the target."""

    context: int
    target_kv: int
    draft_kv_full: int
    draft_kv: int
    target_step_ms: float
    draft_step_full_ms: float
    draft_step_ms: float
    speedup_full: float
    speedup: float

    @property
    def kept(self) -> float:
        return self.draft_kv / self.draft_kv_full

    @property
    def pays(self) -> bool:
        """Compression is faster than an uncompressed draft and than no draft."""
        return self.speedup > max(1.0, self.speedup_full)


def tokens_per_iteration(acceptance: float, gamma: int) -> float:
    """Expected tokens of a round, each draft kept with the same chance: (1 - a^(gamma + 1)) / (1 - a). Leviathan et al. 2023,
    arXiv 2211.17192, equation 1."""
    if acceptance >= 1.0:
        return gamma + 1.0
    return (1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance)


def predict(s: Setting, context: int) -> Prediction:
    """Every step is priced at the bytes it reads; at large batches or on slow processors arithmetic can cost more than that."""

    def kv(config: ModelConfig, entries: int) -> float:
        return cost.kv_entry_bytes(config, 1, s.batch) * s.kv_bytes * entries

    def step_ms(config: ModelConfig, entries: int, weight: float) -> float:
        return (cost.parameters(config) * weight + kv(config, entries)) / s.bandwidth * 1e3

    target_ms = step_ms(s.target, context, s.weight_bytes)
    full_ms = step_ms(s.draft, context, s.draft_weight_bytes)
    compact_ms = step_ms(s.draft, s.shape.entries(context), s.draft_weight_bytes)

    def gain(acceptance: float, draft_ms: float) -> float:
        return cost.speedup(tokens_per_iteration(acceptance, s.gamma), s.gamma, draft_ms, target_ms, target_ms)

    return Prediction(
        context,
        round(kv(s.target, context)),
        round(kv(s.draft, context)),
        round(kv(s.draft, s.shape.capacity(context))),
        target_ms,
        full_ms,
        compact_ms,
        gain(s.full_acceptance, full_ms),
        gain(s.acceptance, compact_ms),
    )


def curve(s: Setting, longest: int, points: int = 40) -> list[Prediction]:
    """Predictions from 1K to `longest` tokens, evenly spaced on a logarithmic axis."""
    low = min(1024, longest)
    ratio = (longest / low) ** (1 / max(1, points - 1))
    return [predict(s, round(low * ratio**i)) for i in range(points)]


def stretches(found: Sequence[Prediction]) -> list[tuple[int, int, bool]]:
    """(first context, last context, does compression pay) of each stretch of a curve."""
    parts: list[tuple[int, int, bool]] = []
    for p in found:
        if parts and parts[-1][2] == p.pays:
            parts[-1] = (parts[-1][0], p.context, p.pays)
        else:
            parts.append((p.context, p.context, p.pays))
    return parts
