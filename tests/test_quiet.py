"""The quiet start: slots that no query looks at leave a draft as good as its window."""

from __future__ import annotations

import pytest
import torch

from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.dense import DenseMemory
from masw.errors import UsageError
from masw.quiet import hush
from masw.session import data_folder
from masw.zoo import load_pair
from tests.helpers import tiny_config, tiny_decoder


def test_deeper_is_closer_to_the_window() -> None:
    """On a model whose queries have a direction in common, as those of trained models have."""
    config = tiny_config("qwen2")
    decoder = tiny_decoder(config)
    for layer in decoder.weights.layers:
        assert layer.qkv_bias is not None
        layer.qkv_bias[: config.q_width] += 4.0
    tokens = torch.randint(0, config.vocab, (1, 96), generator=torch.Generator().manual_seed(3))

    def logits(shape: MemoryShape, adaptor: Adaptor | None) -> torch.Tensor:
        with torch.no_grad():
            return decoder.logits(
                decoder.forward(tokens, DenseMemory(shape, dtype=decoder.dtype, group=config.group, adaptor=adaptor))
            )

    window = logits(MemoryShape(2, 16), None)
    distances = []
    for depth in (0.0, 3.0, 30.0):
        adaptor = Adaptor.copied(decoder, AdaptorInfo("x", ()))
        hush(adaptor, decoder, tokens[0], depth)
        distances.append(float((logits(MemoryShape(2, 16, 4), adaptor) - window).abs().mean()))
    assert distances[2] < distances[1] < distances[0]


@pytest.mark.model
def test_untrained_slots_cost_nothing() -> None:
    """Agreement of smollm2's compact memory with its full one on the guide: quiet slots are no worse than no slots at all."""
    model = load_pair("smollm2", device=torch.device("cpu"), dtype=torch.float32).draft
    text = (data_folder() / "samples" / "guide.md").read_text(encoding="utf-8")
    tokens = torch.tensor([model.tokenizer.encode(text)[:700]])
    group = model.config.group

    def choices(shape: MemoryShape, adaptor: Adaptor | None = None) -> torch.Tensor:
        with torch.no_grad():
            memory = DenseMemory(shape, dtype=torch.float32, group=group, adaptor=adaptor)
            return model.decoder.logits(model.decoder.forward(tokens, memory))[0, 200:].argmax(-1)

    full = choices(MemoryShape())
    copied, quiet = (Adaptor.copied(model.decoder, AdaptorInfo(model.name, (), bias=True)) for _ in range(2))
    hush(quiet, model.decoder, tokens[0])
    shape = MemoryShape(4, 64, 8)
    window, loud, hushed = (
        (choices(s, a) == full).float().mean() for s, a in ((MemoryShape(4, 64), None), (shape, copied), (shape, quiet))
    )
    assert hushed > window - 0.02
    assert loud < window - 0.2


def test_the_copy_is_unchanged_but_for_key_biases() -> None:
    config = tiny_config("llama")
    decoder = tiny_decoder(config)
    plain, quiet = (Adaptor.copied(decoder, AdaptorInfo("x", (), bias=True)) for _ in range(2))
    hush(quiet, decoder, torch.arange(40) % config.vocab)
    assert torch.equal(plain.kv, quiet.kv)
    assert plain.kv_bias is not None and quiet.kv_bias is not None
    assert torch.equal(plain.kv_bias[:, config.kv_width :], quiet.kv_bias[:, config.kv_width :])  # values
    assert not torch.equal(plain.kv_bias[:, : config.kv_width], quiet.kv_bias[:, : config.kv_width])


def test_needs_biases() -> None:
    decoder = tiny_decoder(tiny_config("llama"))
    with pytest.raises(UsageError, match="bias"):
        hush(Adaptor.copied(decoder, AdaptorInfo("x", ())), decoder, torch.arange(20))
