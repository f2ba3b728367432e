"""Shapes of models and memories: what is read from a hub config, what is refused and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from masw.config import ROLLBACK_WINDOW, MemoryShape, ModelConfig, RopeScaling
from masw.errors import UsageError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in names}


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    message = str(error.value)
    assert "\n" not in message and message
    assert error.value.exit_code == 2
    return message


# ---- models


def test_llama() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config == ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072, 500000.0, 1e-5, False)
    assert (config.group, config.q_width, config.kv_width) == (4, 4096, 1024)
    assert config.rope_scaling is None and not config.qkv_bias and not config.qk_norm


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": {**without(LLAMA3, "rope_type"), "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "rope_scaling": None},
    ],
    ids=["rope_scaling", "rope_scaling with type", "rope_parameters", "both"],
)
def test_llama3_rope_scaling_in_old_and_new_files(rope: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**without(LLAMA, "rope_theta"), **rope})
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 500000.0


@pytest.mark.parametrize(
    "rope",
    [{"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, {"rope_scaling": None}, {"rope_parameters": None}],
)
def test_plain_rope(rope: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**without(LLAMA, "rope_theta"), **rope})
    assert config.rope_scaling is None and config.rope_theta == 10000.0


def test_qwen2() -> None:
    raw = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "tie_word_embeddings": True}
    config = ModelConfig.from_hf(raw)
    assert config.qkv_bias and not config.qk_norm and config.tied
    assert config.max_position == 131072  # the window is switched off
    assert ModelConfig.from_hf({**raw, "use_sliding_window": True}).max_position == 4096


def test_qwen3() -> None:
    config = ModelConfig.from_hf({**LLAMA, "model_type": "qwen3", "head_dim": 64, "attention_bias": False})
    assert config.qk_norm and not config.qkv_bias
    assert config.head_dim == 64 and config.q_width == 32 * 64 != config.hidden


@pytest.mark.parametrize(("window", "limit"), [(4096, 4096), (None, 131072), (262144, 131072)])
def test_mistral_is_exact_within_its_sliding_window(window: int | None, limit: int) -> None:
    assert ModelConfig.from_hf({**LLAMA, "model_type": "mistral", "sliding_window": window}).max_position == limit


def test_optional_fields() -> None:
    config = ModelConfig.from_hf(without(LLAMA, "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "hidden_act"))
    assert config.kv_heads == config.heads == 32 and config.group == 1 and not config.tied
    assert ModelConfig.from_hf({**LLAMA, "head_dim": None, "num_key_value_heads": None}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported; use a llama"),
        ({"model_type": None}, "is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"mlp_bias": True}, "biases"),
        ({"attention_bias": True}, "biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope scaling 'dynamic'"),
    ],
)
def test_what_the_forward_does_not_compute_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        ModelConfig.from_hf({**LLAMA, **change})
    assert words in one_line(error)


# ---- memories


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": -1}, "sinks must be 0 to 1024, not -1"),
        ({"sinks": 1025}, "not 1025"),
        ({"window": 0}, "window must be 1 to 1,048,576 tokens, not 0"),
        ({"window": 1_048_577}, "not 1048577"),
        ({"window": 8, "stride": 0}, "stride must be 1 to 4,096 tokens, not 0"),
        ({"window": 8192, "stride": 4097}, "not 4097"),
        ({"window": 8, "stride": 9}, "use a stride of at most 8"),
        ({"rollback": 0}, "at least 1 token, not 0"),
    ],
)
def test_memory_shapes_out_of_range(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError) as error:
        MemoryShape(**options)
    assert words in one_line(error)


def test_memory_shapes_at_the_edge_of_the_range() -> None:
    MemoryShape(1024, 1_048_576, 4096, 1)
    MemoryShape(0, 1, 1)
    assert MemoryShape().rollback == ROLLBACK_WINDOW == 16


@pytest.mark.parametrize("sinks", [0, 1, 4, 9])
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("stride", [None, 1, 2, 8])
def test_entries_counted_one_by_one(sinks: int, window: int, stride: int | None) -> None:
    if stride is not None and stride > window:
        return
    shape = MemoryShape(sinks, window, stride)
    for tokens in range(60):
        raw = sum(j < sinks or j >= tokens - window for j in range(tokens))
        slots = sum(stride is not None and tau % stride == 0 for tau in range(1, tokens + 1))
        assert shape.entries(tokens) == raw + slots
        assert shape.slots(tokens) == slots
        assert shape.capacity(tokens) == sinks + window + 16 + slots >= shape.entries(tokens)


def test_entries_of_a_full_memory() -> None:
    assert [MemoryShape().entries(t) for t in (0, 1, 100)] == [0, 1, 100] == [MemoryShape().capacity(t) for t in (0, 1, 100)]
    assert MemoryShape(sinks=4).entries(100) == 100


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        (MemoryShape(4, 512), 16),
        (MemoryShape(4, 512, 8), 14),  # 14 + 2 slots
        (MemoryShape(4, 512, 4), 12),  # 12 + 3
        (MemoryShape(4, 512, 1), 8),  # a slot a token
        (MemoryShape(4, 512, 8, rollback=4), 3),
    ],
)
def test_a_block_and_its_slots_fit_the_rollback_window(shape: MemoryShape, most: int) -> None:
    for gamma in range(1, most + 1):
        shape.check_block(gamma)
    for gamma in (most + 1, 64):
        with pytest.raises(UsageError) as error:
            shape.check_block(gamma)
        message = one_line(error)
        assert f"gamma {gamma} " in message and f"use a gamma of at most {most}" in message


def test_a_full_memory_takes_any_block() -> None:
    MemoryShape().check_block(64)


@pytest.mark.parametrize("stride", range(1, 18))
def test_the_limit_covers_the_worst_place_for_a_block(stride: int) -> None:
    """No block that is let through has more rows than the rollback window, wherever it starts."""
    shape = MemoryShape(4, 512, stride)
    for gamma in range(1, 17):
        worst = max(sum((start + n) % stride == 0 for n in range(1, gamma + 1)) for start in range(stride)) + gamma
        try:
            shape.check_block(gamma)
            assert worst <= shape.rollback
        except UsageError:
            assert worst > shape.rollback
