"""Exact shapes of public models, for benchmarks with random weights: latency and memory do not depend on content."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from masw.catalogue import SOURCES
from masw.config import ModelConfig, RopeScaling
from masw.errors import UsageError


def _llama3(hidden: int, layers: int, heads: int, intermediate: int, *, factor: float, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        "llama", 128_256, hidden, layers, heads, 8, 128, intermediate, 131_072, 500_000.0, 1e-5, tied,
        rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192),
    )  # fmt: skip


def _qwen2(hidden: int, layers: int, heads: int, head_dim: int, intermediate: int) -> ModelConfig:
    return ModelConfig("qwen2", 151_936, hidden, layers, heads, 2, head_dim, intermediate, 32_768, 1e6, 1e-6, True, qkv_bias=True)


SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, factor=8.0),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672, factor=8.0),
    "qwen2.5-coder-0.5b": _qwen2(896, 24, 14, 64, 4864),
    "qwen2.5-coder-1.5b": _qwen2(1536, 28, 12, 128, 8960),
    "smollm2-135m": ModelConfig("llama", 49_152, 576, 30, 9, 3, 64, 1536, 8192, 1e5, 1e-5, True),
    **{name: source.random for name, source in SOURCES.items() if source.random is not None},
}


def resolve_shape(name: str) -> ModelConfig:
    """A shape by name, or the hub `config.json` at a path (or in a folder). Raises UsageError with the nearest names."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return ModelConfig.from_hf(raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a model's config.json ({error}); give one of {', '.join(SHAPES)}") from None
    near = difflib.get_close_matches(name, SHAPES, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(SHAPES)}"
    raise UsageError(f"unknown shape '{name}'; {hint} A path to a config.json will do as well")
