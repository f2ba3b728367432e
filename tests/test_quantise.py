"""Quantised draft weights: close to the original, lossless in the loop, refused where no kernel exists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from masw import quantise
from masw.config import MemoryShape, ModelConfig
from masw.cost import packed_bytes
from masw.decoder import Decoder
from masw.engine import Settings
from masw.errors import UsageError
from masw.linear import dense, linear
from masw.memory import Memory
from masw.methods import MemoryOptions
from masw.quantise import FEW_ROWS, GROUP, RESCORED, Int4, Int4Head, Int8, packable, quantised
from masw.session import RunOptions, Session
from masw.weights import random_weights
from masw.zoo import Pair, load_pair

CPU = torch.device("cpu")
CONFIG = ModelConfig("qwen2", 192, 64, 2, 4, 2, 16, 96, 512, 10000.0, 1e-6, True, qkv_bias=True)


def small(seed: int = 0) -> Decoder:
    return Decoder(CONFIG, random_weights(CONFIG, seed, CPU, torch.bfloat16))


@pytest.mark.parametrize(("pack", "bound"), [(Int8, 1 / 127), (Int4, 1 / 15)])
@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS])
def test_few_rows_stay_within_half_a_step_of_each_weight(pack: type, bound: float, rows: int) -> None:
    """|error| <= sum |x| * step / 2, where a step is `bound` of the widest range that shares a scale, plus bf16 rounding."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(64, 4 * GROUP, generator=generator).bfloat16()
    x = torch.randn(rows, 4 * GROUP, generator=generator).bfloat16()
    exact = x.float() @ weight.float().T
    widest = float(weight.float().max() - weight.float().min())
    allowed = (
        x.float().abs().sum(1, keepdim=True) * (widest * bound / 2 + 0.01 * weight.float().abs().mean()) + 0.02 * exact.abs()
    )
    assert ((linear(x, pack(weight)).float() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("pack", [Int8, Int4])
def test_wide_blocks_use_the_original(pack: type) -> None:
    weight, x, bias = torch.randn(64, 64).bfloat16(), torch.randn(1, FEW_ROWS + 1, 64).bfloat16(), torch.randn(64).bfloat16()
    packed = pack(weight)
    assert torch.equal(linear(x, packed, bias), torch.nn.functional.linear(x, weight, bias))
    assert dense(packed) is weight


def test_int4_is_exact_on_its_own_grid() -> None:
    """Weights that are multiples of the scale come back unchanged: the offset convention is the kernel's."""
    codes = torch.arange(16).repeat(64, 4).float()[:, : 2 * GROUP]
    weight = (codes * 0.5 - 2).bfloat16()
    x = torch.eye(2 * GROUP)[:4].bfloat16()
    torch.testing.assert_close(linear(x, Int4(weight)).float(), weight[:, :4].T.float(), rtol=0, atol=0.02)


def test_shapes_with_batch_and_bias() -> None:
    weight, bias = torch.randn(96, 64).bfloat16(), torch.randn(96).bfloat16()
    assert linear(torch.randn(2, 1, 64).bfloat16(), Int4(weight), bias).shape == (2, 1, 96)
    assert linear(torch.randn(64).bfloat16()[None], Int8(weight)).shape == (1, 96)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_decoder_predicts_much_the_same(kind: str) -> None:
    plain = small()
    packed = quantised(plain, kind)
    assert packed.weights.embed is plain.weights.embed  # nothing but the packed copies is new
    assert packed.nbytes == plain.nbytes + packed.weights.packed_nbytes and packed.weights.packed_nbytes > 0
    tokens = torch.randint(0, CONFIG.vocab, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = []
    with torch.no_grad():
        for decoder in (plain, packed):
            memory = Memory(CONFIG, MemoryShape(), tokens=40, device=CPU, dtype=torch.bfloat16)
            logits.append(torch.cat([decoder.logits(decoder.forward(t, memory)) for t in tokens.split(1, dim=1)], dim=1).float())
    likeness = torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=-1).mean()
    assert likeness > (0.999 if kind == "int8" else 0.97)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="unknown"):
        quantised(small(), "int2")
    wide = Decoder(CONFIG, random_weights(CONFIG, 0, CPU, torch.float32))
    assert not packable(wide) and packable(small())
    with pytest.raises(UsageError, match="use plain"):
        quantised(wide, "int4")
    assert quantised(wide, "plain") is wide


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("tiny", CPU, torch.bfloat16)


@pytest.mark.parametrize("kind", ["auto", "plain", "int8", "int4"])
def test_the_session_drafts_with_them_and_the_output_stays(pair: Pair, kind: str) -> None:
    session = Session(pair)
    prompt = list(b"a report about harbours and the engineers who measured them")
    settings = Settings(max_new_tokens=24, gamma=4)
    reference = session.run(prompt, RunOptions("none", settings=settings))
    list(reference)
    for method in ("full", "masw"):
        job = session.run(prompt, RunOptions(method, MemoryOptions(2, 16, 4), settings, "none", kind))
        list(job)
        difference = session.difference(prompt, job.summary().tokens, reference.summary().tokens)
        assert difference is None or (difference.logit_gap is not None and abs(difference.logit_gap) < 0.1)  # a bf16 near-tie
        assert job.trace.header["draft_weights"] == {"auto": "int4", "plain": "bfloat16"}.get(kind, kind)


def test_a_self_pair_stays_plain_by_itself() -> None:
    session = Session(load_pair("tiny-2", CPU, torch.bfloat16))
    job = session.run([1, 2, 3, 4], RunOptions("full", settings=Settings(max_new_tokens=3)))
    assert job.trace.header["draft_weights"] == "bfloat16"


@pytest.mark.parametrize(("pack", "rows", "part"), [(Int8, 50, 7), (Int4, 208, 64), (Int4Head, 192, 64)])
def test_packing_in_parts_changes_nothing(pack: type, rows: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a large vocabulary is packed some rows at a time, so that its fp32 copy does not set the peak memory."""
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    whole = pack(weight)
    monkeypatch.setattr(quantise, "ROWS_AT_ONCE", part)
    parts = pack(weight)
    assert torch.equal(whole.packed, parts.packed) and torch.equal(whole.scale, parts.scale)
    x = torch.randn(2, 64).to(torch.bfloat16)
    assert torch.equal(linear(x, whole), linear(x, parts))


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_the_int4_head_finds_the_best_tokens_of_the_original(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, 128, generator=generator).bfloat16() for n in (4096, rows))
    exact = torch.nn.functional.linear(x, weight)
    coarse, fine = linear(x, Int4(weight)), linear(x, Int4Head(weight))
    best = exact.topk(RESCORED // 2).indices
    torch.testing.assert_close(fine.gather(1, best), exact.gather(1, best), rtol=0.01, atol=0.05)
    assert (fine != coarse).sum() <= rows * RESCORED  # the others stay as they are
    assert torch.equal(linear(x[:1], Int4Head(weight[:RESCORED])), torch.nn.functional.linear(x[:1], weight[:RESCORED]))


def test_a_vocabulary_that_int4_cannot_pack_gets_an_int8_head() -> None:
    config = replace(CONFIG, vocab=200)
    decoder = quantised(Decoder(config, random_weights(config, 0, CPU, torch.bfloat16)), "int4")
    assert type(decoder.weights.head) is Int8
    assert type(quantised(small(), "int4").weights.head) is Int4Head
    for c, made in ((config, decoder), (CONFIG, quantised(small(), "int4"))):
        assert made.weights.packed_nbytes == packed_bytes(c, "int4")
