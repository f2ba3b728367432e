"""Static steps: the same logits and the same memory as the ordinary way, whatever is drafted and rolled back. No graph is captured here."""

from __future__ import annotations

from random import Random

import pytest
import torch

from masw.graphs import Steps, bucket
from masw.methods import METHODS, MemoryOptions
from masw.snapkv import SnapMemory
from tests.helpers import memory_for, random_tokens, tiny_config, tiny_decoder, unset_memory_is_nan

EXACT = 1e-9
DECODER = tiny_decoder(tiny_config())
SHAPED = [name for name, method in METHODS.items() if method.model and not method.copies]


def reads(method: str, prompt: int, tokens: int, batch: int = 1):  # type: ignore[no-untyped-def]
    """Two memories of a method that have read the same prompt."""
    shape = METHODS[method].memory(MemoryOptions(2, 9, 4))
    assert shape is not None
    made = [memory_for(DECODER, shape, tokens=tokens, batch=batch) for _ in range(2)]
    text = random_tokens(prompt, 61, 1, batch)
    for memory in made:
        memory.prompt_ends(prompt)
        for part in text.split(17, dim=1):
            DECODER.forward(part, memory)
            memory.commit()
    return made


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("method", SHAPED)
def test_static_steps_give_the_logits_of_the_ordinary_way(method: str, last: bool) -> None:
    """Blocks of one to six tokens, kept or rolled back in part, over a buffer that grows: logits, content and events."""
    with unset_memory_is_nan(), torch.no_grad():
        plain, static = reads(method, 41, 60, batch=2)
        steps, random, told = Steps(DECODER, static, last=last), Random(4), ([], [])
        for memory, events in ((plain, told[0]), (static, told[1])):
            memory.listener = lambda *event, log=events: log.append(event)
        for index in range(60):
            count = random.choice([1, 1, 1, 2, 6])
            tokens = random_tokens(count, 61, index, 2)
            hidden = DECODER.forward(tokens, plain)
            expected = DECODER.logits(hidden[:, -1] if last else hidden)
            torch.testing.assert_close(steps(tokens), expected, rtol=0, atol=EXACT)
            if index % 3 == 0:  # these stay, whatever comes next
                plain.commit()
                static.commit()
            drop = random.randint(0, min(count, plain.length - plain.committed))
            for memory in (plain, static):
                memory.rollback(drop)
                memory.commit()
            assert torch.equal(plain.tokens(), static.tokens()) and plain.length == static.length
        for mine, theirs in zip(static.snapshot(), plain.snapshot(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=EXACT)
        assert told[0] == told[1] and told[0]
        grew = static._kv.shape[4] > memory_for(DECODER, static.shape, tokens=60)._kv.shape[4]
        assert grew == (static.shape.capacity(static.length) > static.shape.capacity(60)) == (method not in ("window", "snapkv"))
        assert 2 < len(steps) < 30  # a pattern is made once


def test_a_block_without_places_is_read_as_ever() -> None:
    """A prompt's chunks: wider than the ring allows, or before entries are selected."""
    shape = METHODS["snapkv"].memory(MemoryOptions(2, 9, 4))
    assert shape is not None
    tokens = random_tokens(120, 61, 5)
    for kind in (shape, METHODS["masw"].memory(MemoryOptions(2, 9, 4))):
        assert kind is not None
        plain, static = (memory_for(DECODER, kind, tokens=130) for _ in range(2))
        steps = Steps(DECODER, static)
        for memory in (plain, static):
            memory.prompt_ends(100)
        with torch.no_grad():
            for part in (tokens[:, :100], tokens[:, 100:101], tokens[:, 101:]):
                expected = DECODER.logits(DECODER.forward(part, plain)[:, -1])
                torch.testing.assert_close(steps(part), expected, rtol=0, atol=EXACT)
                plain.commit()
                static.commit()
        assert len(steps) == 1  # the single token: 19 are again more than there are places for
        assert not isinstance(static, SnapMemory) or static.selection is not None


def test_where_no_graph_can_be_captured_steps_run_and_it_is_said_once() -> None:
    if torch.cuda.is_available():
        pytest.skip("here one can")
    plain, static = reads("masw", 30, 60)
    said: list[str] = []
    steps = Steps(DECODER, static, capture=True, note=said.append)
    with torch.no_grad():
        for index in range(9):
            tokens = random_tokens(1, 61, index)
            expected = DECODER.logits(DECODER.forward(tokens, plain)[:, -1])
            torch.testing.assert_close(steps(tokens), expected, rtol=0, atol=EXACT)
            plain.commit()
            static.commit()
    assert len(said) == 1 and "CUDA graphs cannot be captured here" in said[0] and "\n" not in said[0] and not steps.captures


def test_buckets() -> None:
    assert [bucket(n, 10**9) for n in (1, 64, 65, 1000, 1024, 1025, 4097)] == [64, 64, 128, 1024, 1024, 1152, 4608]
    assert bucket(65, 100) == 100  # no more than there is
    for n in range(1, 40_000, 37):
        assert n <= bucket(n, 10**9) <= n + max(64, n / 8)
    assert len({bucket(n, 10**9) for n in range(4096, 131_072)}) <= 41  # eight a doubling
