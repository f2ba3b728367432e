"""The compact memory: streaming with rejected drafts equals one dense pass, and its state is what its events say.

Every test runs with `torch.empty` giving NaN, so that an entry which was never written cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from masw import cost
from masw.adaptor import SLOT_INPUTS, Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.dense import DenseMemory
from masw.memory import Memory
from tests.helpers import (
    CPU,
    FAMILIES,
    memory_for,
    random_tokens,
    reference_logits,
    tiny_config,
    tiny_decoder,
    trained_adaptor,
    unset_memory_is_nan,
)

EXACT = 1e-9
SHAPE = MemoryShape(sinks=2, window=8, stride=4, rollback=6)
SHAPES = {
    "full": MemoryShape(),
    "window": MemoryShape(2, 8, rollback=6),
    "masw": SHAPE,
    "no sinks": MemoryShape(0, 8, 4, 6),
    "sinks > stride": MemoryShape(7, 5, 2, 4),
    "a slot a token": MemoryShape(1, 4, 1, 8),
    "stride = window": MemoryShape(1, 6, 6, 5),
    "window of 1": MemoryShape(0, 1, 1, 2),
    "everything and slots": MemoryShape(stride=4),
}
DECODERS = {family: tiny_decoder(tiny_config(family)) for family in FAMILIES}
LLAMA = DECODERS["llama"]


@pytest.fixture(autouse=True)
def _unset_memory_is_nan() -> Iterator[None]:
    with unset_memory_is_nan():
        yield


@dataclass
class Log:
    """Replays what a memory tells its listener; `read` adds the tokens that a forward brings."""

    stride: int | None
    tokens: int = 0
    evicted: int = 0
    slots: list[int] = field(default_factory=list)
    events: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self, kind: str, position: int, count: int) -> None:
        assert count > 0
        self.events.append((kind, position, count))
        if kind == "materialise":
            assert self.stride is not None
            self.slots.extend(range(position, position + count * self.stride, self.stride))
        elif kind == "rollback":
            assert position == self.tokens - count
            self.tokens = position
            self.slots = [tau for tau in self.slots if tau <= position]
        elif kind == "evict":
            self.evicted += count
        else:
            raise AssertionError(kind)

    @property
    def entries(self) -> int:
        return self.tokens - self.evicted + len(self.slots)


@torch.no_grad()
def read(decoder: Decoder, memory: Memory, tokens: Tensor, chunk: int | None = None) -> Tensor:
    """Logits [B, T, V] of `tokens` [B, T], `chunk` at a time."""
    parts = tokens.split(chunk or max(1, tokens.shape[1]), dim=1)
    out = torch.cat([decoder.logits(decoder.forward(part, memory)) for part in parts], dim=1)
    if isinstance(memory.listener, Log):
        memory.listener.tokens += tokens.shape[1]
    return out


def filled(shape: MemoryShape, count: int, *, chunk: int = 5, seed: int = 3, **options: int) -> tuple[Memory, Tensor]:
    """A memory that has read and committed `count` random tokens, and those tokens."""
    memory = memory_for(LLAMA, shape, listener=Log(shape.stride), **options)  # type: ignore[arg-type]
    tokens = random_tokens(count, 61, seed, options.get("batch", 1))
    for part in tokens.split(chunk, dim=1):
        read(LLAMA, memory, part)
        memory.commit()
    return memory, tokens


def same_content(a: Memory, b: Memory, tolerance: float = 0.0) -> None:
    (when_a, kv_a), (when_b, kv_b) = a.snapshot(), b.snapshot()
    assert torch.equal(when_a, when_b)
    torch.testing.assert_close(kv_a, kv_b, rtol=0, atol=tolerance)


# ---- the test: streaming with rejected drafts equals one dense masked pass


@dataclass(frozen=True)
class Step:
    """One round: accepted tokens come in, a block is drafted in pieces, some of it is kept."""

    fresh: int  # accepted tokens that the memory has not read
    commit_first: bool  # they are final before drafting starts
    gamma: int
    piece: int  # drafted tokens a forward
    kept: int
    fork: bool


@dataclass(frozen=True)
class Case:
    family: str
    shape: MemoryShape
    slot_input: str
    mirror: str
    batch: int
    prompt: int
    chunk: int
    allocated: int  # tokens the buffers start with: small ones must grow
    steps: list[Step]
    seed: int


ROUNDS = 20


@st.composite
def cases(draw: st.DrawFn) -> Case:
    window = draw(st.one_of(st.none(), *[st.integers(1, 20)] * 9))
    if window is None:
        shape = MemoryShape()
    else:
        stride = draw(st.one_of(st.none(), *[st.integers(1, window)] * 5))
        shape = MemoryShape(draw(st.integers(0, 8)), window, stride, draw(st.integers(1, 16)))
    steps = []
    for _ in range(ROUNDS):
        gamma = draw(st.integers(0, min(shape.rollback, 10)))
        fresh = draw(st.sampled_from([1, 1, 1, 1, 2, 2, 2, 3, 7, 25, 40]))
        kept = draw(st.integers(0, gamma))
        steps.append(Step(fresh, draw(st.booleans()), gamma, draw(st.integers(1, 4)), kept, draw(st.integers(0, 9)) == 0))
    return Case(
        draw(st.sampled_from(FAMILIES)),
        shape,
        draw(st.sampled_from(SLOT_INPUTS)),
        draw(st.sampled_from(["kv", "qkv"])),
        draw(st.integers(1, 2)),
        draw(st.integers(0, 70)),
        draw(st.integers(1, 48)),
        draw(st.sampled_from([1, 40, 400])),
        steps,
        draw(st.integers(0, 2**16)),
    )


def play(case: Case) -> int:
    decoder = DECODERS[case.family]
    adaptor = trained_adaptor(decoder, case.slot_input, case.mirror) if case.shape.stride else None
    log = Log(case.shape.stride)
    memory = memory_for(decoder, case.shape, tokens=case.allocated, batch=case.batch, adaptor=adaptor, listener=log)
    total = case.prompt + sum(step.fresh + step.gamma for step in case.steps)
    supply = iter(random_tokens(total, 61, case.seed, case.batch).split(1, dim=1))

    def take(count: int) -> Tensor:
        return torch.cat([next(supply) for _ in range(count)], dim=1) if count else torch.empty(case.batch, 0, dtype=torch.long)

    def check(logits: Tensor, tokens: Tensor) -> None:
        dense = reference_logits(decoder, tokens, case.shape, adaptor)[:, tokens.shape[1] - logits.shape[1] :]
        torch.testing.assert_close(logits, dense, rtol=0, atol=EXACT)

    text = take(case.prompt)
    said = []
    if case.prompt:
        for part in text.split(case.chunk, dim=1):
            said.append(read(decoder, memory, part))
            memory.commit()
    for step in case.steps:
        if step.fork:
            memory = memory.fork(log)
        fresh = take(step.fresh)
        logits = [read(decoder, memory, fresh)]
        if step.commit_first:
            memory.commit()
        before = memory.snapshot()
        drafted = take(step.gamma)
        if step.gamma:
            logits.extend(read(decoder, memory, piece) for piece in drafted.split(step.piece, dim=1))
        heard = torch.cat(logits, dim=1)
        check(heard, torch.cat([text, fresh, drafted], dim=1))
        memory.rollback(step.gamma - step.kept)
        if step.kept == 0:
            after = memory.snapshot()
            assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        memory.commit()
        text = torch.cat([text, fresh, drafted[:, : step.kept]], dim=1)
        said.append(heard[:, : step.fresh + step.kept])

        assert torch.equal(memory.tokens(), text)
        assert memory.length == memory.committed == log.tokens == text.shape[1]
        assert memory.entries == len(memory.snapshot()[0]) == log.entries == case.shape.entries(text.shape[1])
        assert memory.live_nbytes == memory.snapshot()[1].nbytes
    check(torch.cat(said, dim=1), text)  # nothing that was rejected is left in what followed
    return len(case.steps)


def test_streaming_with_rejected_drafts_equals_one_dense_pass() -> None:
    rounds = 0

    @settings(max_examples=110)
    @given(cases())
    def fuzz(case: Case) -> None:
        nonlocal rounds
        rounds += play(case)

    fuzz()
    assert rounds >= 2000


@pytest.mark.parametrize("slot_input", SLOT_INPUTS)
@pytest.mark.parametrize("mirror", ["kv", "qkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_adaptor_streams_as_it_trains(family: str, mirror: str, slot_input: str) -> None:
    """Plain reference, dense pass and streaming, three ways to one set of numbers."""
    decoder, tokens = DECODERS[family], random_tokens(45, 61, 9, batch=2)
    adaptor = trained_adaptor(decoder, slot_input, mirror)
    plain = reference_logits(decoder, tokens, SHAPE, adaptor)
    dense = decoder.logits(
        decoder.forward(tokens, DenseMemory(SHAPE, dtype=decoder.dtype, group=decoder.config.group, adaptor=adaptor))
    )
    torch.testing.assert_close(dense, plain, rtol=0, atol=EXACT)
    for chunk in (1, 7, 45):
        memory = memory_for(decoder, SHAPE, batch=2, adaptor=adaptor)
        torch.testing.assert_close(read(decoder, memory, tokens, chunk), plain, rtol=0, atol=EXACT)


def test_the_mirrored_projections_matter() -> None:
    """The reference tells a trained adaptor from the backbone's own projections: the equalities above are not hollow."""
    tokens = random_tokens(20, 61, 1)
    frozen = Adaptor.copied(LLAMA, AdaptorInfo("tiny", ()))
    same = reference_logits(LLAMA, tokens, SHAPE, frozen)
    moved = reference_logits(LLAMA, tokens, SHAPE, trained_adaptor(LLAMA))
    assert torch.equal(same[:, :4], moved[:, :4])  # no slot yet
    assert (same[:, 4:] - moved[:, 4:]).abs().max() > 0.1


# ---- what is stored


@pytest.mark.parametrize("name", SHAPES)
def test_content_depends_only_on_accepted_tokens(name: str) -> None:
    """Two histories with different rejected drafts end in the same memory."""
    shape, random = SHAPES[name], Random(4)
    tokens = random_tokens(60, 61, 2)
    plain = memory_for(LLAMA, shape, tokens=90)  # neither grows: a sum over more empty keys may be rounded otherwise
    for part in tokens.split(1, dim=1):
        read(LLAMA, plain, part)
        plain.commit()
    for seed in range(3):
        memory = memory_for(LLAMA, shape, tokens=90)
        for index, part in enumerate(tokens.split(1, dim=1)):
            read(LLAMA, memory, part)
            memory.commit()
            gamma = random.randint(0, shape.rollback)
            for draft in random_tokens(gamma, 61, 1000 * seed + index).split(1, dim=1) if gamma else ():
                read(LLAMA, memory, draft)
            memory.rollback(gamma)
        same_content(memory, plain)  # bit for bit: the same forwards read the accepted tokens


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 5, 23, 24, 25, 61])
def test_rollback_leaves_no_trace(name: str, count: int) -> None:
    """Bit-identical before and after, in every layer, whatever was drafted: also across a boundary and the ring's end."""
    shape = SHAPES[name]
    memory, tokens = filled(shape, count, batch=2)
    when, kv = memory.snapshot()
    for gamma in range(1, shape.rollback + 1):
        read(LLAMA, memory, random_tokens(gamma, 61, gamma, batch=2), chunk=3)
        memory.rollback(gamma)
        assert torch.equal(memory.tokens(), tokens)
        after, kv_after = memory.snapshot()
        assert torch.equal(when, after)
        for layer in range(LLAMA.config.layers):
            assert torch.equal(kv[layer], kv_after[layer]), f"layer {layer}"


@pytest.mark.parametrize("name", SHAPES)
def test_the_ring_wraps_many_times(name: str) -> None:
    """Several times round, with blocks that end across the ring's end, and rollbacks after the wrap."""
    shape, tokens = SHAPES[name], random_tokens(200, 61, 8)
    memory, done = memory_for(LLAMA, shape), 0
    plain = reference_logits(LLAMA, tokens, shape, memory.adaptor)
    width = min(3, shape.rollback)
    while done + width <= 200:
        out = read(LLAMA, memory, tokens[:, done : done + width])
        torch.testing.assert_close(out, plain[:, done : done + width], rtol=0, atol=EXACT)
        memory.rollback(1)
        memory.commit()
        done += width - 1
        if width == 1:
            break
    if shape.window is not None and width > 1:
        assert done > 8 * memory.ring


def test_partial_write_into_a_full_ring() -> None:
    """A ring that is exactly full takes a block which overwrites only entries that no row needs any more."""
    ring = 8 + 6
    memory, tokens = filled(SHAPE, ring + SHAPE.sinks, chunk=1)
    more = random_tokens(6, 61, 77)
    out = read(LLAMA, memory, more)  # as wide as the rollback window
    plain = reference_logits(LLAMA, torch.cat([tokens, more], dim=1), SHAPE, memory.adaptor)
    torch.testing.assert_close(out, plain[:, -6:], rtol=0, atol=EXACT)


def test_the_oldest_row_of_a_block_keeps_its_window() -> None:
    """Evicting by the newest position of a block would drop keys that its oldest row needs."""
    shape = MemoryShape(sinks=0, window=4, rollback=4)
    memory, tokens = filled(shape, 20, chunk=1)
    block = random_tokens(4, 61, 5)
    plain = reference_logits(LLAMA, torch.cat([tokens, block], dim=1), shape)[:, -4:]
    out = read(LLAMA, memory, block)
    torch.testing.assert_close(out[:, :1], plain[:, :1], rtol=0, atol=EXACT)
    torch.testing.assert_close(out, plain, rtol=0, atol=EXACT)


@pytest.mark.parametrize("wide", [7, 14, 15, 60])
@pytest.mark.parametrize("drafted", [0, 3, 6])
def test_a_wide_block_after_a_draft(drafted: int, wide: int) -> None:
    """Blocks wider than the rollback window, on top of tokens that are not final, and then a rollback into them."""
    memory, tokens = filled(SHAPE, 33)
    block = random_tokens(drafted + wide + 1, 61, 6)
    everything = torch.cat([tokens, block], dim=1)
    plain = reference_logits(LLAMA, everything, SHAPE, memory.adaptor)
    out = read(LLAMA, memory, block[:, :drafted], 2) if drafted else torch.empty(1, 0, 61, dtype=torch.float64)
    out = torch.cat([out, read(LLAMA, memory, block[:, drafted:-1])], dim=1)
    torch.testing.assert_close(out, plain[:, 33:-1], rtol=0, atol=EXACT)
    memory.rollback(SHAPE.rollback)
    assert len(memory.snapshot()[0]) == memory.entries
    again = read(LLAMA, memory, everything[:, memory.length : -1], 1)
    torch.testing.assert_close(again, plain[:, -1 - SHAPE.rollback : -1], rtol=0, atol=EXACT)
    memory.commit()
    torch.testing.assert_close(read(LLAMA, memory, block[:, -1:]), plain[:, -1:], rtol=0, atol=EXACT)


def test_sinks_stay_the_middle_leaves_slots_stay() -> None:
    """A planted key for each policy: which raw tokens and slots are held after 30 tokens."""
    held = {name: filled(SHAPES[name], 30)[0].snapshot()[0].tolist() for name in ("full", "window", "masw", "no sinks")}
    raw = {name: [when // 2 for when in stamps if when % 2] for name, stamps in held.items()}
    slots = {name: [when // 2 for when in stamps if not when % 2] for name, stamps in held.items()}
    assert raw["full"] == list(range(30)) and slots["full"] == []
    assert raw["window"] == raw["masw"] == [0, 1, *range(22, 30)]
    assert raw["no sinks"] == list(range(22, 30))
    assert slots["masw"] == slots["no sinks"] == list(range(4, 29, 4)) and slots["window"] == []


def test_an_old_slot_never_changes() -> None:
    memory, _ = filled(SHAPE, 20)
    when, kv = memory.snapshot()
    is_slot = when % 2 == 0
    slots = kv[:, :, :, :, is_slot].clone()
    for part in random_tokens(40, 61, 12).split(4, dim=1):
        read(LLAMA, memory, part)
        memory.commit()
    later, kv = memory.snapshot()
    assert torch.equal(kv[:, :, :, :, later % 2 == 0][..., : slots.shape[-2], :], slots)


# ---- sizes


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_match_the_formula(name: str, batch: int) -> None:
    shape, config = SHAPES[name], LLAMA.config
    memory = memory_for(LLAMA, shape, tokens=50, batch=batch)
    assert memory.nbytes == cost.kv_bytes(config, shape, 50, 8, batch)
    assert memory.entry_bytes == cost.kv_entry_bytes(config, 8, batch) == 2 * config.layers * batch * config.kv_width * 8
    read(LLAMA, memory, random_tokens(50, 61, 0, batch), 10)
    assert memory.nbytes == cost.kv_bytes(config, shape, 50, 8, batch)  # reading what was asked for allocates nothing
    assert memory.live_nbytes == memory.entries * memory.entry_bytes == memory.snapshot()[1].nbytes


@pytest.mark.parametrize("name", SHAPES)
def test_a_longer_request_grows_the_buffers(name: str) -> None:
    """A too small buffer is replaced, its content kept, with no growth a token."""
    shape, tokens = SHAPES[name], random_tokens(150, 61, 4)
    memory, sizes = memory_for(LLAMA, shape, tokens=5), set()
    plain = reference_logits(LLAMA, tokens, shape, memory.adaptor)
    out = []
    for part in tokens.split(1, dim=1):
        out.append(read(LLAMA, memory, part))
        memory.commit()
        sizes.add(memory.nbytes)
    torch.testing.assert_close(torch.cat(out, dim=1), plain, rtol=0, atol=EXACT)
    assert memory.nbytes >= cost.kv_bytes(LLAMA.config, shape, 150, 8)
    assert len(sizes) <= 12  # by a half each time, not by one entry


# ---- events


def test_every_change_is_one_event_with_its_count() -> None:
    memory, _ = filled(SHAPE, 11)
    assert isinstance(memory.listener, Log)
    events = memory.listener.events
    events.clear()
    read(LLAMA, memory, random_tokens(6, 61, 1))  # tokens 11..16: boundaries 12 and 16
    assert events == [("materialise", 12, 2)]
    memory.rollback(2)
    assert events[1:] == [("rollback", 15, 2)]
    memory.commit()
    assert events[2:] == [("evict", 3, 4)]  # 11 tokens had lost one (token 2), 15 tokens have lost five
    memory.commit()
    memory.rollback(0)
    assert len(events) == 3  # nothing changed, nothing said


def test_eviction_waits_for_acceptance() -> None:
    """A drafted token never makes an eviction final."""
    memory, _ = filled(SHAPE, 30)
    assert isinstance(memory.listener, Log)
    before = memory.listener.evicted
    read(LLAMA, memory, random_tokens(6, 61, 1), 1)
    memory.rollback(6)
    memory.commit()
    assert memory.listener.evicted == before == 20


# ---- limits and protocol


def test_rollback_limits() -> None:
    memory, _ = filled(SHAPE, 30)
    with pytest.raises(ValueError, match=r"cannot roll back 1 tokens: 0 of 30 .*30 are final"):
        memory.rollback(1)
    read(LLAMA, memory, random_tokens(3, 61, 1))
    with pytest.raises(ValueError, match="cannot roll back 4 tokens: 3 of 33"):
        memory.rollback(4)
    with pytest.raises(ValueError, match="cannot roll back -1"):
        memory.rollback(-1)
    memory.rollback(3)
    read(LLAMA, memory, random_tokens(20, 61, 1))
    with pytest.raises(ValueError, match="cannot roll back 7 tokens: 6 of 50"):
        memory.rollback(7)  # the ring holds 6 tokens beyond the window
    memory.rollback(6)


def test_the_rollback_window_is_not_a_limit_per_call() -> None:
    """Two rollbacks in a row may not reach further back than the ring does: the window would have holes."""
    memory, _ = filled(SHAPE, 30)
    read(LLAMA, memory, random_tokens(20, 61, 1))
    memory.rollback(6)
    with pytest.raises(ValueError, match="cannot roll back"):
        memory.rollback(6)


def test_a_full_memory_rewinds_any_number() -> None:
    memory, tokens = filled(MemoryShape(), 40)
    plain = reference_logits(LLAMA, tokens, MemoryShape())
    for count in (1, 17, 22):
        memory.rollback(count)
        length = memory.length
        out = read(LLAMA, memory, tokens[:, length:])
        memory.commit()
        torch.testing.assert_close(out, plain[:, length:], rtol=0, atol=EXACT)
    memory.rollback(40)
    assert memory.entries == memory.length == memory.committed == 0
    torch.testing.assert_close(read(LLAMA, memory, tokens, 9), plain, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", SHAPES)
def test_forks_are_independent(name: str) -> None:
    shape = SHAPES[name]
    memory, tokens = filled(shape, 25)
    held = memory.snapshot()
    twin = memory.fork()
    assert twin.listener is None
    for branch, seed in ((twin, 1), (memory, 2)):
        more = random_tokens(12, 61, seed)
        plain = reference_logits(LLAMA, torch.cat([tokens, more], dim=1), shape, memory.adaptor)
        torch.testing.assert_close(read(LLAMA, branch, more, 1), plain[:, 25:], rtol=0, atol=EXACT)
        branch.commit()
        if branch is twin:
            assert torch.equal(held[1], memory.snapshot()[1]) and torch.equal(memory.tokens(), tokens)


def test_protocol_errors() -> None:
    memory = memory_for(LLAMA, SHAPE)
    rows = torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="call begin first"):
        memory.extend(0, rows, rows, rows)
    with pytest.raises(RuntimeError, match="call begin first"):
        memory.end()
    with pytest.raises(ValueError, match="at least one token"):
        memory.begin(torch.empty(1, 0, dtype=torch.long))
    memory.begin(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(RuntimeError, match="before the previous block ended"):
        memory.begin(torch.zeros(1, 1, dtype=torch.long))
    memory.extend(0, rows, rows, rows)
    memory.end()
    with pytest.raises(RuntimeError, match="call begin first"):
        memory.end()


def test_slots_need_an_adaptor() -> None:
    with pytest.raises(ValueError, match="slots need an adaptor"):
        Memory(LLAMA.config, SHAPE, tokens=8, device=CPU, dtype=torch.float64)


def test_an_empty_memory() -> None:
    memory = memory_for(LLAMA, SHAPE)
    memory.commit()
    memory.rollback(0)
    when, kv = memory.snapshot()
    assert memory.entries == len(when) == kv.shape[4] == memory.live_nbytes == 0
