"""The forward against transformers: tiny random models of each family, and the real small model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.dense import DenseMemory
from masw.weights import load_weights, read_config
from tests.helpers import (
    CPU,
    FAMILIES,
    memory_for,
    random_tokens,
    reference_frequencies,
    reference_logits,
    tiny_config,
    tiny_decoder,
)

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide enough for logits that differ from each other
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def hub_model(family: str) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON)),
        "llama tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, tie_word_embeddings=True)),
        "llama3": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=None)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**COMMON)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, head_dim=16)),
    }
    model = made[family]().eval()
    with torch.no_grad():  # norms of one and biases of nought would hide a mistake
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="module", params=["llama", "llama tied", "llama3", "mistral", "qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder, Path]:
    """A tiny random model in transformers, and ours from the files that it saved."""
    model = hub_model(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    config = read_config(folder)
    return model, Decoder(config, load_weights(folder, config, CPU, torch.float32)), folder


@torch.no_grad()
def streamed(decoder: Decoder, tokens: Tensor, chunk: int) -> Tensor:
    memory = memory_for(decoder, MemoryShape(), tokens=tokens.shape[1], batch=len(tokens))
    return torch.cat([decoder.logits(decoder.forward(part, memory)) for part in tokens.split(chunk, dim=1)], dim=1)


@pytest.mark.parametrize("chunk", [1, 7, 40, 100], ids=["token by token", "small chunks", "wide chunks", "one prefill"])
def test_logits_equal_transformers(pair: tuple[Any, Decoder, Path], chunk: int) -> None:
    model, decoder, _ = pair
    tokens = random_tokens(100, 97, 1, batch=2)
    with torch.no_grad():
        theirs = model(tokens).logits
    assert float(theirs.std()) > 0.5
    assert float((streamed(decoder, tokens, chunk) - theirs).abs().max()) <= 1e-4


def test_the_families_are_what_they_should_be(pair: tuple[Any, Decoder, Path]) -> None:
    model, decoder, _ = pair
    c = decoder.config
    assert c.family == model.config.model_type
    assert (c.rope_scaling is not None) == (model.config.rope_parameters["rope_type"] == "llama3")
    assert c.qkv_bias == (c.family == "qwen2") and c.qk_norm == (c.family == "qwen3")
    assert decoder.nbytes == sum(p.nbytes for p in model.parameters())


def test_rope_in_bf16_keeps_its_angles_in_fp32(pair: tuple[Any, Decoder, Path]) -> None:
    """bf16 positions beyond 256 would fall together; our error stays within twice that of transformers' own bf16."""
    model, _, folder = pair
    config = read_config(folder)
    ours = Decoder(config, load_weights(folder, config, CPU, torch.bfloat16))
    tokens = random_tokens(400, 97, 2)
    with torch.no_grad():
        exact = model(tokens).logits
        low = type(model).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()(tokens).logits.float()
    error = (streamed(ours, tokens, 400).float() - exact).abs()
    theirs = (low - exact).abs()
    assert float(error.mean()) <= 2 * float(theirs.mean())
    assert float(error.max()) <= 2 * float(theirs.max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fp64_forward_is_the_plain_reference(family: str) -> None:
    """Holds the reference that other tests lean on to the forward that transformers confirms."""
    decoder, tokens = tiny_decoder(tiny_config(family)), random_tokens(50, 61, 3, batch=2)
    torch.testing.assert_close(
        streamed(decoder, tokens, 50), reference_logits(decoder, tokens, MemoryShape()), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("family", ["llama", "llama3"])
def test_rope_frequencies(family: str) -> None:
    config = tiny_config(family)
    from masw.decoder import inverse_frequencies

    torch.testing.assert_close(inverse_frequencies(config, CPU), reference_frequencies(config), rtol=1e-12, atol=0)


@pytest.mark.parametrize("tokens", [4, 33])
def test_a_verify_block_continues_the_memory(tokens: int) -> None:
    """The trap of torch's top-left causal mask: a block over a prefix, few rows and many, sees the whole prefix."""
    decoder, text = tiny_decoder(tiny_config()), random_tokens(80, 61, 4)
    memory = memory_for(decoder, MemoryShape())
    plain = reference_logits(decoder, text, MemoryShape())
    decoder.forward(text[:, : 80 - tokens], memory)
    torch.testing.assert_close(
        decoder.logits(decoder.forward(text[:, 80 - tokens :], memory)), plain[:, 80 - tokens :], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_counted_once(tied: bool) -> None:
    decoder = tiny_decoder(tiny_config(tied=tied))
    tensors = decoder.weights.tensors()
    assert len({id(t) for t in tensors}) == len(tensors)
    assert decoder.nbytes == sum(t.nbytes for t in tensors)
    assert sum(t is decoder.weights.head for t in tensors) == 1


def test_the_dense_pass_needs_no_memory() -> None:
    decoder, tokens = tiny_decoder(tiny_config()), random_tokens(20, 61, 5)
    dense = decoder.logits(decoder.forward(tokens, DenseMemory(MemoryShape(), dtype=torch.float64, group=2)))
    torch.testing.assert_close(dense, reference_logits(decoder, tokens, MemoryShape()), rtol=0, atol=1e-9)


# ---- the real small model

PROMPT = "The harbour town had one library. It stood on the hill above the market, and in winter"


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from masw.zoo import load_pair

    return load_pair("smollm2", CPU, torch.float32)


@pytest.mark.model
def test_smollm2_logits(smollm2: Any) -> None:
    """fp32 equals transformers; our bf16 is as near to it as twice transformers' own bf16 is."""
    from transformers import AutoModelForCausalLM

    model = smollm2.target
    tokens = torch.tensor([model.tokenizer.encode(PROMPT * 6)])
    exact = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    low = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.bfloat16).eval()
    ours_low = Decoder(model.config, load_weights(model.path, model.config, CPU, torch.bfloat16))
    with torch.no_grad():
        reference, rounded = exact(tokens).logits, low(tokens).logits.float()
    for chunk in (tokens.shape[1], 50):
        assert float((streamed(model.decoder, tokens, chunk) - reference).abs().max()) <= 1e-3
        error = (streamed(ours_low, tokens, chunk).float() - reference).abs()
        theirs = (rounded - reference).abs()
        assert float(error.mean()) <= 2 * float(theirs.mean()) and float(error.max()) <= 2 * float(theirs.max())


@pytest.mark.model
@pytest.mark.parametrize("method", ["none", "full", "window", "masw"])
def test_smollm2_greedy_text_is_transformers_generate(smollm2: Any, method: str) -> None:
    from transformers import AutoModelForCausalLM

    from masw.engine import Settings
    from masw.methods import MemoryOptions
    from masw.session import RunOptions, Session

    model = smollm2.target
    prompt = model.tokenizer.encode(PROMPT)
    theirs = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    text = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=list(model.eos_ids))[
        0, len(prompt) :
    ].tolist()
    run = Session(smollm2).run(prompt, RunOptions(method, MemoryOptions(2, 16, 4), Settings(40, eos_ids=model.eos_ids), "none"))
    assert list(run)
    assert run.summary().tokens == text
