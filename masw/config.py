"""Frozen records of numbers: the shape of a model and the shape of a draft's memory. No torch, no files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from masw.errors import UsageError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`, a band in between is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Everything that bytes, FLOPs and the forward need, nothing about weights."""

    family: str  # llama | mistral | qwen2 | qwen3
    vocab: int
    hidden: int
    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    intermediate: int
    max_position: int
    rope_theta: float
    norm_eps: float
    tied: bool  # LM head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm on each query and key head (Qwen3)
    rope_scaling: RopeScaling | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @staticmethod
    def from_hf(raw: dict[str, Any]) -> ModelConfig:
        """Reads a hub `config.json`. Raises UsageError for what this forward does not compute."""
        family = str(raw.get("model_type", "?"))
        if family not in ("llama", "mistral", "qwen2", "qwen3"):
            raise UsageError(f"model type '{family}' is not supported; use a llama, mistral, qwen2 or qwen3 model")
        if raw.get("hidden_act", "silu") != "silu":
            raise UsageError(f"activation '{raw['hidden_act']}' is not supported; only silu is")
        if raw.get("mlp_bias") or (raw.get("attention_bias") and family != "qwen2"):
            raise UsageError("models with biases in the MLP or the output projection are not supported; use another model")
        max_position = int(raw.get("max_position_embeddings", 2048))
        sliding = raw.get("sliding_window") if raw.get("use_sliding_window", family == "mistral") else None
        if sliding:
            # Positions past a model's own sliding window would need a second mask; within it the full mask is the same.
            max_position = min(max_position, int(sliding))
        heads = int(raw["num_attention_heads"])
        # transformers 5 keeps rope settings in `rope_parameters`, older files have `rope_theta` and `rope_scaling`.
        rope = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise UsageError(f"rope scaling '{kind}' is not supported; only the plain and the llama3 kind are")
        return ModelConfig(
            family=family,
            vocab=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            intermediate=int(raw["intermediate_size"]),
            max_position=max_position,
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            rope_scaling=RopeScaling(
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
            if kind == "llama3"
            else None,
        )


ROLLBACK_WINDOW = 16  # raw tokens (paper); a drafted block and its slots must fit it
MOST_STRIDE = 4096  # tokens per slot


@dataclass(frozen=True)
class MemoryShape:
    """What a memory keeps: `sinks` first raw tokens, the last `window` raw tokens (None: all of them), and one slot every
    `stride` raw tokens (None: no slots). Paper symbols S, W, r.

    With a `budget` it also keeps exact prompt entries, chosen once where the prompt ends (masw.snapkv): as many as make one entry
    every `budget` prompt tokens together with the slots, so that it then holds what slots of that stride would. Until then it
    holds the whole prompt.
    """

    sinks: int = 0
    window: int | None = None
    stride: int | None = None
    rollback: int = ROLLBACK_WINDOW
    budget: int | None = None  # None: nothing is selected
    prompt: int | None = None  # prompt tokens, which a memory with a budget is told before it reads

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.sinks > 1024:
            raise UsageError(f"sinks must be 0 to 1024, not {self.sinks}")
        if self.window is not None and not 1 <= self.window <= 1_048_576:
            raise UsageError(f"window must be 1 to 1,048,576 tokens, not {self.window}")
        if self.stride is not None and not 1 <= self.stride <= MOST_STRIDE:
            raise UsageError(f"stride must be 1 to 4,096 tokens, not {self.stride}")
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise UsageError(
                f"stride {self.stride} is longer than the window {self.window}: tokens would leave before a slot reads them; "
                f"use a stride of at most {self.window}"
            )
        if self.rollback < 1:
            raise UsageError(f"the rollback window must be at least 1 token, not {self.rollback}")
        if self.budget is not None and not 1 <= self.budget <= MOST_STRIDE:
            raise UsageError(f"stride must be 1 to 4,096 tokens (one entry of the budget each), not {self.budget}")
        if self.budget is not None and (self.window is None or (self.stride or self.budget) < self.budget):
            raise UsageError(f"a budget needs a window, and slots no denser than one every {self.budget} tokens")

    @property
    def selected(self) -> int:
        """Exact prompt entries kept per layer and KV head beside sinks and window: floor(prompt / budget) less the prompt's slots."""
        if self.budget is None or self.window is None or self.prompt is None:
            return 0
        room = self.prompt // self.budget - self.slots(self.prompt)
        return min(room, max(0, self.prompt - self.sinks - self.window))

    def whole(self, tokens: int) -> bool:
        """Whether the memory still holds every token, since the prompt goes on and nothing is selected yet."""
        return self.budget is not None and (self.prompt is None or tokens < self.prompt)

    def entries(self, tokens: int) -> int:
        """Entries held for `tokens` raw tokens: min(t, S) + min(t - S, W) + selected + floor(t / r); all before the selection."""
        if self.whole(tokens):
            return tokens + self.slots(tokens)
        pinned = min(tokens, self.sinks) if self.window is not None else 0
        raw = tokens - pinned
        return pinned + (raw if self.window is None else min(raw, self.window)) + self.selected + self.slots(tokens)

    def slots(self, tokens: int) -> int:
        return tokens // self.stride if self.stride else 0

    def capacity(self, tokens: int) -> int:
        """Entries allocated to reach `tokens` raw tokens: S + W + rollback window + selected + floor(t / r), or t for a full memory."""
        if self.window is None:
            return tokens + self.slots(tokens)
        return self.sinks + self.window + self.rollback + self.selected + self.slots(tokens)

    def peak(self, tokens: int) -> int:
        """Most entries allocated on the way to `tokens`: a memory with a budget has the whole prompt beside its final buffers."""
        prompt = (self.prompt or 0) if self.budget is not None else 0
        return self.capacity(tokens) + prompt + self.slots(prompt)

    def check_block(self, gamma: int) -> None:
        """A drafted block of `gamma` tokens and the slots that may fall into it must fit the rollback window."""
        if self.window is None:
            return
        slots = math.ceil(gamma / self.stride) if self.stride else 0
        if gamma + slots > self.rollback:
            most = max(
                g for g in range(self.rollback + 1) if g + (math.ceil(g / self.stride) if self.stride else 0) <= self.rollback
            )
            raise UsageError(
                f"gamma {gamma} with {slots} slots in a block does not fit the rollback window of {self.rollback}; "
                f"use a gamma of at most {most}"
            )
