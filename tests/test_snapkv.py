"""Selected prompt entries: the attended key is kept, the choice is a naive implementation's, and what follows equals one dense pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from masw import cost
from masw.adaptor import Adaptor
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.errors import UsageError
from masw.memory import Memory
from masw.methods import METHODS, MemoryOptions
from masw.snapkv import OBSERVED, POOL, SnapMemory, attended, most_attended
from tests.helpers import (
    CPU,
    FAMILIES,
    interleaved,
    memory_for,
    random_tokens,
    reference_logits,
    sees,
    tiny_config,
    tiny_decoder,
    trained_adaptor,
    unset_memory_is_nan,
)

EXACT = 1e-9
DECODERS = {family: tiny_decoder(tiny_config(family)) for family in FAMILIES}
LLAMA = DECODERS["llama"]
SHAPES = {
    "snapkv": MemoryShape(2, 8, rollback=6, budget=4),
    "hybrid": MemoryShape(2, 8, 8, rollback=6, budget=4),
    "no sinks": MemoryShape(0, 5, rollback=3, budget=3),
    "a slot in three": MemoryShape(1, 9, 6, 5, budget=2),
    "slots take it all": MemoryShape(1, 8, 4, 5, budget=4),
}


@pytest.fixture(autouse=True)
def _unset_memory_is_nan() -> Iterator[None]:
    with unset_memory_is_nan():
        yield


# ---- the choice, in loops


def naive_choice(q: Tensor, k: Tensor, shape: MemoryShape) -> list[list[int]]:
    """Chosen raw tokens of each KV head. q [N, H, D] and k [N, G, D] of the prompt's rows, slots among them."""
    assert shape.prompt is not None and shape.window is not None
    rows = interleaved(shape.prompt, shape.stride)
    raw = [index for index, (kind, _) in enumerate(rows) if kind == "raw"]
    group, found = q.shape[1] // k.shape[1], []
    for head in range(k.shape[1]):
        votes = [0.0] * len(rows)
        for voter in raw[-OBSERVED:]:
            for query in range(head * group, (head + 1) * group):
                scores = [float(q[voter, query] @ k[key, head]) / math.sqrt(q.shape[2]) for key in range(voter + 1)]
                top = max(scores)
                total = sum(math.exp(s - top) for s in scores)
                for key, score in enumerate(scores):
                    votes[key] += math.exp(score - top) / total
        candidates = range(shape.sinks, shape.prompt - shape.window)
        near = {c: [votes[raw[j]] for j in candidates if abs(j - c) <= POOL // 2] for c in candidates}
        best = sorted(candidates, key=lambda c: (-round(max(near[c]), 12), c))
        found.append(sorted(best[: shape.selected]))
    return found


def reference(
    decoder: Decoder, tokens: Tensor, shape: MemoryShape, adaptor: Adaptor | None, chosen: list[list[list[int]]] | None = None
) -> Tensor:
    """One dense pass [B, T, V]: rows of the prompt see all before them, later rows the table and what was chosen. B is 1."""
    rows, prompt, sizes = interleaved(tokens.shape[1], shape.stride), shape.prompt or 0, decoder.config
    inside = len(interleaved(prompt, shape.stride))

    def seen_of(layer: int, q: Tensor, k: Tensor) -> Tensor:
        choice = naive_choice(q[0, :inside], k[0, :inside], shape)
        if chosen is not None:
            chosen.append(choice)
        seen = torch.zeros(1, sizes.heads, len(rows), len(rows), dtype=torch.bool)
        for head in range(sizes.heads):
            kept = {("raw", j) for j in choice[head // sizes.group]}
            for i, query in enumerate(rows):
                for j, key in enumerate(rows[: i + 1]):
                    held = key in kept or sees(query, key, shape.sinks, shape.window)
                    seen[0, head, i, j] = i < inside or held
        return seen

    return reference_logits(decoder, tokens, shape, adaptor, seen_of)


@torch.no_grad()
def read(decoder: Decoder, memory: Memory, tokens: Tensor, chunk: int = 512) -> Tensor:
    return torch.cat([decoder.logits(decoder.forward(part, memory)) for part in tokens.split(chunk, dim=1)], dim=1)


def prompted(
    shape: MemoryShape, tokens: Tensor, prompt: int, chunk: int = 7, decoder: Decoder = LLAMA
) -> tuple[SnapMemory, Tensor]:
    """A memory that has read and committed a prompt, and its logits."""
    memory, said = memory_for(decoder, shape, tokens=tokens.shape[1], batch=len(tokens)), []
    assert isinstance(memory, SnapMemory)
    memory.prompt_ends(prompt)
    for part in tokens[:, :prompt].split(chunk, dim=1) if prompt else ():
        said.append(read(decoder, memory, part))
        memory.commit()
    return memory, torch.cat(said, dim=1) if said else torch.empty(len(tokens), 0, 61, dtype=torch.float64)


@pytest.mark.parametrize("prompt", [0, 1, 5, 11, 31, 32, 33, 60])
@pytest.mark.parametrize("name", SHAPES)
def test_choice_and_what_follows_are_the_naive_ones(name: str, prompt: int) -> None:
    """Prompts shorter than the window, than the observed queries, and longer; the whole of it in one dense pass."""
    tokens = random_tokens(prompt + 14, 61, prompt + 1)
    memory, logits = prompted(SHAPES[name], tokens, prompt)
    logits = torch.cat([logits, read(LLAMA, memory, tokens[:, prompt:], 3)], dim=1)
    chosen: list[list[list[int]]] = []
    torch.testing.assert_close(logits, reference(LLAMA, tokens, memory.shape, memory.adaptor, chosen), rtol=0, atol=EXACT)
    assert memory.selection is not None and memory.selection[:, 0].tolist() == chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    decoder, tokens = DECODERS[family], random_tokens(50, 61, 4)
    for shape in (SHAPES["snapkv"], SHAPES["hybrid"]):
        memory, logits = prompted(shape, tokens, 40, decoder=decoder)
        logits = torch.cat([logits, read(decoder, memory, tokens[:, 40:], 1)], dim=1)
        torch.testing.assert_close(logits, reference(decoder, tokens, memory.shape, memory.adaptor), rtol=0, atol=EXACT)


@pytest.mark.parametrize("chunk", [1, 5, 32, 60])
def test_the_choice_does_not_depend_on_the_chunks(chunk: int) -> None:
    tokens = random_tokens(60, 61, 7, batch=2)
    for shape in SHAPES.values():
        whole, _ = prompted(shape, tokens, 60, 512)
        memory, _ = prompted(shape, tokens, 60, chunk)
        assert whole.selection is not None and memory.selection is not None
        assert torch.equal(whole.selection, memory.selection)
        alone = [prompted(shape, row[None], 60)[0].selection for row in tokens]  # each row of a batch chooses for itself
        assert torch.equal(torch.cat([s for s in alone if s is not None], dim=1), memory.selection)


@pytest.mark.parametrize("place", [0, 1, 17, 40, 46, 47])
def test_the_planted_key_is_kept(place: int) -> None:
    """A key that the last queries point at: kept in its head, with its neighbours, and not in the other."""
    shape, rows, dim = MemoryShape(2, 10, budget=8, prompt=60), 60, 8
    generator = torch.Generator().manual_seed(place)
    q, k = (torch.randn(1, rows, 2, dim, generator=generator, dtype=torch.float64) * 0.1 for _ in range(2))
    q[:, -OBSERVED:, 0, 0] += 4
    k[:, 2 + place, 0, 0] += 4
    memory = SnapMemory(tiny_config(heads=2, kv_heads=2, layers=1), shape, tokens=70, device=CPU, dtype=torch.float64)
    memory.begin(torch.zeros(1, rows, dtype=torch.long))
    memory.extend(0, q, k, torch.arange(60.0, dtype=torch.float64)[None, :, None, None].expand_as(k))
    memory.end()
    memory.commit()
    assert memory.selection is not None
    kept = memory.selection[0, 0, 0].tolist()
    assert len(kept) == shape.selected == 7 and {2 + place} <= set(kept)
    assert set(range(max(2, place - 1), min(50, place + 6))) <= set(kept)  # three on either side come along
    # Later rows see its value, in the head that chose it.
    rows_q = torch.zeros(1, 1, 2, dim, dtype=torch.float64)
    memory.begin(torch.zeros(1, 1, dtype=torch.long))
    _, values = memory.extend(0, rows_q, rows_q, rows_q)
    assert set(values[0, 0, :, 0].tolist()) >= set(map(float, kept))
    assert values[0, 0, :, 0].tolist().count(float(2 + place)) == 1


def test_pure_functions_by_hand() -> None:
    q, k = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]), torch.tensor([[[[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]]])
    seen = torch.tensor([[True, True, False], [True, True, True]])
    high, low = math.exp(2 / math.sqrt(2)), 1.0
    first, second = high / (high + low), high / (high + 2 * low)
    expected = [first + low / (high + 2 * low), low / (high + low) + second, low / (high + 2 * low)]
    torch.testing.assert_close(attended(q, k, seen)[0, 0], torch.tensor(expected))
    votes = torch.zeros(1, 1, 20)
    votes[0, 0, 10], votes[0, 0, 19] = 2.0, 1.0
    assert most_attended(votes, 3).tolist() == [[[7, 8, 9]]]  # equals by pooling: the earlier ones
    assert most_attended(votes, 9).tolist() == [[[7, 8, 9, 10, 11, 12, 13, 16, 17]]]


# ---- budget and bytes


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("window", [64, 256, 512])
@pytest.mark.parametrize("prompt", [2000, 4095, 8191])
def test_equal_bytes(prompt: int, window: int, stride: int) -> None:
    """At the end of the prompt snapkv and hybrid hold exactly what masw holds, and the equal window too; within one page of 64 later."""
    o, config = MemoryOptions(4, window, stride), tiny_config()
    masw = METHODS["masw"].memory(o)
    assert masw is not None
    equal = MemoryShape(4, window + prompt // stride)
    for name in ("snapkv", "hybrid"):
        shape = MemoryShape(**{**vars(METHODS[name].memory(o)), "prompt": prompt})
        assert shape.entries(prompt) == masw.entries(prompt) == equal.entries(prompt)
        assert (
            cost.kv_bytes(config, shape, prompt, 2)
            == cost.kv_bytes(config, masw, prompt, 2)
            == cost.kv_bytes(config, equal, prompt, 2)
        )
        for tokens in (prompt + 1, prompt + 256):  # masw's slots grow on
            assert masw.entries(tokens) - 256 // stride <= shape.entries(tokens) <= masw.entries(tokens)
            assert masw.entries(tokens) - shape.entries(tokens) <= 64


def test_a_short_prompt_has_nothing_to_select() -> None:
    for name in ("snapkv", "hybrid"):
        shape = MemoryShape(**{**vars(METHODS[name].memory(MemoryOptions(4, 64, 8))), "prompt": 60})
        assert shape.selected == 0 and shape.entries(60) == 60 + shape.slots(60)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_what_the_formulas_say(name: str, batch: int) -> None:
    tokens, config = random_tokens(70, 61, 2, batch), LLAMA.config
    memory = memory_for(LLAMA, MemoryShape(**{**vars(SHAPES[name]), "prompt": 50}), tokens=70, batch=batch)
    shape, entry = memory.shape, cost.kv_entry_bytes(config, 8, batch)
    final, peak = cost.kv_bytes(config, shape, 70, 8, batch), cost.peak_kv_bytes(config, shape, 70, 8, batch)
    assert memory.nbytes == final < peak == final + (50 + shape.slots(50)) * entry
    for start in range(0, 70, 10):
        read(LLAMA, memory, tokens[:, start : start + 10])
        if start < 50:
            assert memory.nbytes == peak and memory.entries == start + 10 + shape.slots(start + 10)
        memory.commit()
        assert memory.nbytes == (peak if start < 40 else final)
        assert memory.live_nbytes == memory.entries * entry == memory.snapshot()[1].nbytes
        assert memory.entries == shape.entries(start + 10)


def test_buffers_grow_for_a_longer_text_than_planned() -> None:
    tokens = random_tokens(120, 61, 3)
    for shape in (SHAPES["snapkv"], SHAPES["hybrid"]):
        memory = memory_for(LLAMA, shape, tokens=4)
        memory.prompt_ends(50)
        logits = [read(LLAMA, memory, tokens[:, :50])]
        memory.commit()
        for part in tokens[:, 50:].split(4, dim=1):
            logits.append(read(LLAMA, memory, part))
            memory.commit()
        plain = reference(LLAMA, tokens, memory.shape, memory.adaptor)
        torch.testing.assert_close(torch.cat(logits, dim=1), plain, rtol=0, atol=EXACT)


# ---- life after the prompt


@st.composite
def plays(draw: st.DrawFn) -> tuple[MemoryShape, int, int, int]:
    window = draw(st.integers(1, 14))
    budget = draw(st.integers(1, 6))
    stride = draw(st.one_of(st.none(), st.integers(budget, window))) if budget <= window else None
    shape = MemoryShape(draw(st.integers(0, 5)), window, stride, draw(st.integers(1, 12)), budget)
    return shape, draw(st.integers(0, 55)), draw(st.integers(1, 40)), draw(st.integers(0, 2**16))


@settings(max_examples=40)
@given(plays())
def test_rejected_drafts_leave_no_trace(case: tuple[MemoryShape, int, int, int]) -> None:
    """Rounds of drafting and rollback after any prompt: bit-identical after a rollback, and in sum one dense pass."""
    shape, prompt, chunk, seed = case
    random, tokens = Random(seed), random_tokens(prompt + 24, 61, seed)
    memory, logits = prompted(shape, tokens, prompt, chunk)
    said, at = [logits], prompt
    while at < tokens.shape[1]:
        if random.random() < 0.2:
            memory = memory.fork()
        before = memory.snapshot()
        block = random_tokens(random.randint(1, shape.rollback), 61, random.randrange(2**30))
        read(LLAMA, memory, block, random.randint(1, 3))
        memory.rollback(block.shape[1])
        after = memory.snapshot()
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        step = min(random.randint(1, 9), tokens.shape[1] - at)
        said.append(read(LLAMA, memory, tokens[:, at : at + step]))
        memory.commit()
        at += step
        assert memory.entries == len(memory.snapshot()[0]) == memory.shape.entries(at) and memory.length == memory.committed == at
    assert torch.equal(memory.tokens(), tokens)
    torch.testing.assert_close(torch.cat(said, dim=1), reference(LLAMA, tokens, memory.shape, memory.adaptor), rtol=0, atol=EXACT)


def test_rollback_within_the_prompt() -> None:
    """A block of the prompt that is taken back and read again: as if it had been read once."""
    tokens = random_tokens(60, 61, 9)
    for shape in (SHAPES["snapkv"], SHAPES["hybrid"]):
        plain, _ = prompted(shape, tokens, 60, 60)
        memory = memory_for(LLAMA, shape, tokens=60)
        memory.prompt_ends(60)
        read(LLAMA, memory, tokens[:, :40])
        memory.commit()
        read(LLAMA, memory, random_tokens(20, 61, 99))
        memory.rollback(20)
        assert memory.length == memory.committed == 40 and memory.entries == 40 + memory.shape.slots(40)
        read(LLAMA, memory, tokens[:, 40:])
        memory.commit()
        for mine, theirs in zip(memory.snapshot(), plain.snapshot(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=EXACT)


def test_forks_are_independent_before_and_after_the_selection() -> None:
    tokens = random_tokens(70, 61, 5)
    for shape in (SHAPES["snapkv"], SHAPES["hybrid"]):
        memory, _ = prompted(shape, tokens[:, :30], 50)
        twin, events = memory.fork(), []
        memory.listener = lambda kind, position, count, log=events: log.append(kind)
        read(LLAMA, twin, random_tokens(20, 61, 8))
        twin.commit()
        assert not events and memory.length == 30 and memory.selection is None and twin.selection is not None
        logits = read(LLAMA, memory, tokens[:, 30:50])
        memory.commit()
        again = memory.fork()
        read(LLAMA, again, random_tokens(15, 61, 1))
        logits = torch.cat([logits, read(LLAMA, memory, tokens[:, 50:])], dim=1)
        plain = reference(LLAMA, tokens, memory.shape, memory.adaptor)[:, 30:]
        torch.testing.assert_close(logits, plain, rtol=0, atol=EXACT)


def test_events() -> None:
    events: list[tuple[str, int, int]] = []
    memory = memory_for(LLAMA, SHAPES["hybrid"], listener=lambda *event: events.append(event))
    memory.prompt_ends(40)
    tokens = random_tokens(50, 61, 1)
    for start in range(0, 40, 20):
        read(LLAMA, memory, tokens[:, start : start + 20])
        memory.commit()
    assert events == [("materialise", 8, 2), ("materialise", 24, 3), ("select", 2, 5), ("evict", 2, 30)]
    events.clear()
    read(LLAMA, memory, tokens[:, 40:45])
    memory.rollback(2)
    memory.commit()
    assert events == [("rollback", 43, 2), ("evict", 32, 3)]
    events.clear()
    read(LLAMA, memory, tokens[:, 43:49])
    assert events == [("materialise", 48, 1)]


# ---- protocol


def test_the_prompt_must_be_known_and_read_on_its_own() -> None:
    memory = memory_for(LLAMA, SHAPES["snapkv"])
    tokens = random_tokens(30, 61, 1)
    with pytest.raises(RuntimeError, match="call prompt_ends first"):
        memory.begin(tokens)
    memory.prompt_ends(20)
    with pytest.raises(ValueError, match="a block of 30 tokens at 0 crosses the end of the prompt at 20"):
        memory.begin(tokens)
    read(LLAMA, memory, tokens[:, :20])
    with pytest.raises(ValueError, match="crosses the end of the prompt"):  # not final yet: nothing is selected
        memory.begin(tokens[:, :1])
    memory.prompt_ends(20)
    with pytest.raises(ValueError, match="20 tokens were read of a prompt that was said to end elsewhere"):
        memory.prompt_ends(25)
    memory.commit()
    with pytest.raises(ValueError, match=r"cannot roll back 1 tokens: 0 of 20 .*20 are final"):
        memory.rollback(1)
    memory.prompt_ends(25)  # the selection is made: what comes is read like an answer
    read(LLAMA, memory, tokens[:, 20:])
    assert memory.shape.prompt == 20


def test_a_plain_memory_does_not_select() -> None:
    with pytest.raises(ValueError, match="SnapMemory"):
        Memory(LLAMA.config, SHAPES["snapkv"], tokens=8, device=CPU, dtype=torch.float64)
    memory = memory_for(LLAMA, MemoryShape(2, 8))
    memory.prompt_ends(5)  # means nothing to it
    assert type(memory) is Memory and memory.shape == MemoryShape(2, 8)
    assert memory_for(LLAMA, SHAPES["hybrid"], adaptor=trained_adaptor(LLAMA)).fork().shape == SHAPES["hybrid"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 8, "budget": 0}, "stride must be 1 to 4,096"),
        ({"window": 8, "budget": 5000}, "stride must be 1 to 4,096"),
        ({"budget": 4}, "a budget needs a window"),
        ({"window": 8, "stride": 2, "budget": 4}, "no denser than one every 4"),
    ],
)
def test_shapes_out_of_range(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        MemoryShape(**options)  # type: ignore[arg-type]
