"""The loop: lossless over the table of methods, exact counters with stub networks, ends, limits, cancelling and re-use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from masw.config import MemoryShape
from masw.drafters import Drafter, ModelDraft, Proposal, aligned
from masw.eagle import before
from masw.eagle_draft import EagleDraft
from masw.engine import Settings, Target, generate
from masw.errors import UsageError
from masw.gamma import DRAFT, Choice, Offer
from masw.memory import Memory
from masw.methods import HYBRID, METHODS, MemoryOptions, method_named
from masw.prefill import Progress, Reader
from masw.recorder import Recorder
from masw.verify import Sampling, Verdict
from tests.helpers import (
    CPU,
    OPTIONS,
    Chain,
    Run,
    StopAfter,
    argmax_text,
    chain_draft,
    chain_target,
    drafter_for,
    memory_for,
    noisy,
    random_tokens,
    run,
    tiny_config,
    tiny_decoder,
    with_vocab,
)

TARGET = tiny_decoder(tiny_config(), seed=1)
NOISY = noisy(TARGET, 0.25)
PROMPT = random_tokens(37, 61, 20)[0].tolist()
TEXT = argmax_text(TARGET, PROMPT, 40)
DRAFTING = [name for name, method in METHODS.items() if method.shape]
CASCADES = [name for name, method in METHODS.items() if method.shape and method.copies]
WARM = Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=11)


def held(drafter: Drafter) -> list[int]:
    assert drafter.memory is not None
    return drafter.memory.tokens()[0].tolist()


def reads(result: Run) -> list[list[int]]:
    """Tokens that the draft read in each forward, round by round."""
    events = result.recorder.trace.of("draft")
    return [[e.data["read"] for e in events if e.round == n + 1] for n in range(len(result.rounds))]


def same_as_fresh(drafter: Any) -> None:
    """The draft's memory is what it would be had it read its text token by token, with nothing drafted in between."""
    inner = drafter
    while hasattr(inner, "inner"):
        inner = inner.inner
    memory, decoder, tokens = drafter.memory, inner._decoder, torch.tensor([held(drafter)])
    fresh = memory_for(decoder, memory.shape, adaptor=memory.adaptor)
    inputs: list[Tensor | None] = [None] * tokens.shape[1]
    if isinstance(inner, EagleDraft) and tokens.shape[1]:  # its text comes with the target's own features, whatever was drafted
        features = before(inner._target.normed(TARGET.forward(tokens, memory_for(TARGET, MemoryShape()))))
        inputs = list(inner._head.inputs(inner._target, tokens, features).split(1, dim=1))
    for token, given in zip(tokens.split(1, dim=1), inputs, strict=False):
        decoder.forward(token, fresh, inputs=given)
        fresh.commit()
    (when, kv), (when_fresh, kv_fresh) = memory.snapshot(), fresh.snapshot()
    assert memory.length == memory.committed and torch.equal(when, when_fresh)
    torch.testing.assert_close(kv, kv_fresh, rtol=0, atol=1e-9)


# ---- lossless


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_the_targets_own(method: str, gamma: int) -> None:
    result = run(Target(TARGET, 100), drafter_for(method, NOISY), PROMPT, Settings(40, gamma, chunk=9))
    assert result.tokens == TEXT
    assert result.finish == "length"
    if METHODS[method].drafts:
        assert 0 < result.roles.count("accepted") < sum(len(r.drafted) for r in result.rounds)
    else:
        assert result.roles == ["target"] * 40 and len(result.rounds) == 40


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_of_every_family(method: str, family: str) -> None:
    decoder = tiny_decoder(tiny_config(family), seed=3)
    none = run(Target(decoder, 80), drafter_for("none", decoder), PROMPT, Settings(24))
    result = run(Target(decoder, 80), drafter_for(method, noisy(decoder, 0.25)), PROMPT, Settings(24, 4))
    assert result.tokens == none.tokens


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gamma", [1, 5, 12])
def test_a_full_memory_draft_of_the_target_itself_is_always_accepted(gamma: int, sampling: Sampling) -> None:
    """The sharp probe: verification repairs any draft, but only a perfect one is accepted whole."""
    result = run(Target(TARGET, 100), drafter_for("full", TARGET, sampling=sampling), PROMPT, Settings(40, gamma, sampling))
    assert sum(len(r.drafted) for r in result.rounds) == sum(r.accepted for r in result.rounds) > 0
    assert not result.recorder.trace.of("reject")


@pytest.mark.parametrize("method", ["window", "masw"])
def test_a_compact_draft_of_the_target_itself_is_perfect_while_nothing_has_left_and_no_slot_is_born(method: str) -> None:
    options = MemoryOptions(sinks=2, window=100, stride=90)
    result = run(Target(TARGET, 100), drafter_for(method, TARGET, options=options), PROMPT, Settings(40, 5))
    assert all(r.accepted == len(r.drafted) for r in result.rounds)


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_text_other_seed_other_text(method: str) -> None:
    def sampled(seed: int) -> list[int]:
        sampling = replace(WARM, seed=seed)
        return run(Target(TARGET, 100), drafter_for(method, NOISY, sampling=sampling), PROMPT, Settings(24, 4, sampling)).tokens

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(4)}) == 4


# ---- stub networks: exact tokens and counters


def succ(x: int) -> int:
    return x + 1


def always_wrong(x: int) -> int:
    return x + 2


def wrong_at(*places: int) -> Callable[[int], int]:
    return lambda x: x + 2 if x in places else x + 1


def test_a_draft_that_is_always_right() -> None:
    net, draft = Chain(succ), Chain(succ)
    result = run(chain_target(net), chain_draft(draft), [0], Settings(12, 3))
    assert result.tokens == list(range(1, 13))
    assert [r.tokens for r in result.rounds] == [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]
    assert result.roles == ["accepted", "accepted", "accepted", "bonus"] * 3
    assert net.widths == [4, 4, 4]
    assert not result.recorder.trace.of("reject")
    assert not result.recorder.trace.of("rollback", "draft")


def test_after_a_fully_accepted_block_the_draft_reads_two_tokens() -> None:
    """It has not read its own last token: a hole of one, unless it is fed along with the bonus token."""
    draft = Chain(succ)
    drafter = chain_draft(draft)
    result = run(chain_target(Chain(succ)), drafter, [0], Settings(12, 3))
    assert reads(result) == [[1, 1, 1], [2, 1, 1], [2, 1, 1]]
    assert draft.widths == [1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert held(drafter) == list(range(11))  # all but its last draft and the bonus


def test_a_draft_that_is_never_right() -> None:
    net, draft = Chain(succ), Chain(always_wrong)
    drafter = chain_draft(draft)
    result = run(chain_target(net), drafter, [0], Settings(6, 3))
    assert result.tokens == [1, 2, 3, 4, 5, 6]
    assert result.roles == ["correction"] * 5 + ["target"]  # the last token leaves no room for a draft
    assert [r.drafted for r in result.rounds] == [(2, 4, 6), (3, 5, 7), (4, 6, 8), (5, 7), (6,), ()]
    assert [r.accepted for r in result.rounds] == [0] * 6
    assert reads(result) == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1], [1], []]
    assert [(e.position, e.count) for e in result.recorder.trace.of("rollback", "draft")] == [(1, 2), (2, 2), (3, 2), (4, 1)]
    assert [(e.position, e.count) for e in result.recorder.trace.of("rollback", "target")] == [
        (1, 3),
        (2, 3),
        (3, 3),
        (4, 2),
        (5, 1),
    ]


def test_a_draft_that_is_sometimes_right() -> None:
    drafter = chain_draft(Chain(wrong_at(2, 7)))
    result = run(chain_target(Chain(succ)), drafter, [0], Settings(12, 3))
    assert result.tokens == list(range(1, 13))
    assert [r.drafted for r in result.rounds] == [(1, 2, 4), (4, 5, 6), (9, 10, 11), (9, 10, 11)]
    assert [r.tokens for r in result.rounds] == [(1, 2, 3), (4, 5, 6, 7), (8,), (9, 10, 11, 12)]
    assert [r.roles[-1] for r in result.rounds] == ["correction", "bonus", "correction", "bonus"]
    assert [r.accepted for r in result.rounds] == [2, 3, 0, 3]
    assert reads(result) == [[1, 1, 1], [1, 1, 1], [2, 1, 1], [1, 1, 1]]
    rejects = result.recorder.trace.of("reject")
    assert [(e.position, e.count, e.data["tokens"], e.data["instead"]) for e in rejects] == [
        (3, 1, [4], 3),
        (8, 3, [9, 10, 11], 8),
    ]
    accepts = result.recorder.trace.of("accept")
    assert [(e.position, e.count, e.data["tokens"]) for e in accepts] == [
        (1, 2, [1, 2]),
        (4, 3, [4, 5, 6]),
        (8, 0, []),
        (9, 3, [9, 10, 11]),
    ]


# ---- limits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_max_new_tokens_is_exact(method: str, sampling: Sampling) -> None:
    """1, 2, gamma, gamma + 1 and more: never one too many, never one too few, no draft that could not be used."""
    gamma = 4
    for limit in (1, 2, gamma - 1, gamma, gamma + 1, gamma + 2, 2 * gamma + 1):
        for draft in (NOISY, TARGET):
            result = run(
                Target(TARGET, 60), drafter_for(method, draft, sampling=sampling), PROMPT, Settings(limit, gamma, sampling)
            )
            assert len(result.tokens) == limit and result.finish == "length"
            if sampling.greedy:
                assert result.tokens == TEXT[:limit]
            left = limit
            for r in result.rounds:
                assert len(r.drafted) <= min(gamma, left - 1)
                assert len(r.tokens) <= left
                left -= len(r.tokens)
            assert [r.finish for r in result.rounds] == [None] * (len(result.rounds) - 1) + ["length"]


def test_gamma_larger_than_what_remains() -> None:
    result = run(chain_target(Chain(succ)), chain_draft(Chain(succ)), [0], Settings(3, 10))
    assert result.tokens == [1, 2, 3] and [r.drafted for r in result.rounds] == [(1, 2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens must be at least 1, not 0"),
        ({"gamma": 0}, "gamma must be 1 to 64 drafted tokens, not 0"),
        ({"gamma": 65}, "not 65"),
        ({"chunk": 0}, "at least 1 token, not 0"),
    ],
)
def test_settings_out_of_range(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(**options)  # type: ignore[arg-type]


# ---- the end of the text


def ended(draft: Chain, gamma: int, eos: Sequence[int]) -> tuple[Run, Target, ModelDraft]:
    target, drafter = chain_target(Chain(succ)), chain_draft(draft)
    return run(target, drafter, [0], Settings(20, gamma, eos_ids=tuple(eos))), target, drafter


@pytest.mark.parametrize(
    ("name", "draft", "gamma", "eos", "roles", "discarded"),
    [
        ("inside an accepted block", Chain(succ), 5, [2], ["accepted"] * 2, 3),
        ("last of an accepted block", Chain(succ), 3, [3], ["accepted"] * 3, 0),
        ("as bonus", Chain(succ), 2, [3], ["accepted", "accepted", "bonus"], 0),
        ("as correction", Chain(wrong_at(2)), 4, [3], ["accepted", "accepted", "correction"], 0),
        ("as first token, accepted", Chain(succ), 4, [1], ["accepted"], 3),
        ("as first token, corrected", Chain(always_wrong), 4, [1], ["correction"], 0),
        ("several ids", Chain(succ), 5, [9, 3, 4], ["accepted"] * 3, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_end_token(name: str, draft: Chain, gamma: int, eos: list[int], roles: list[str], discarded: int) -> None:
    """The text stops at the end token, and nothing after it is left in either memory, wherever in a block it falls."""
    result, target, drafter = ended(draft, gamma, eos)
    last = min(eos)
    assert result.tokens == list(range(1, last + 1)), name
    assert result.roles == roles
    assert result.finish == result.rounds[-1].finish == "eos"
    assert len(result.rounds) == 1
    accept = result.recorder.trace.of("accept")[0]
    assert (accept.count, accept.data["discarded"]) == (roles.count("accepted"), discarded)
    assert bool(result.recorder.trace.of("reject")) == (roles[-1] == "correction")
    assert target.memory.tokens()[0].tolist() == list(range(last))  # the end token itself is not read
    assert target.memory.entries == last
    assert held(drafter) == list(range(len(held(drafter)))) and len(held(drafter)) <= last


@pytest.mark.parametrize("method", METHODS)
def test_end_token_of_every_method(method: str) -> None:
    eos = TEXT[17]
    first = TEXT.index(eos)
    target, drafter = Target(TARGET, 100), drafter_for(method, NOISY)
    result = run(target, drafter, PROMPT, Settings(40, 5, eos_ids=(60, eos)))
    assert result.tokens == TEXT[: first + 1] and result.finish == "eos"
    text = PROMPT + result.tokens
    assert target.memory.tokens()[0].tolist() == text[:-1]
    if drafter.memory is not None:
        assert held(drafter) == text[: len(held(drafter))] and len(held(drafter)) < len(text)
        assert drafter.memory.length == drafter.memory.committed


def test_end_token_at_the_very_limit() -> None:
    result = run(chain_target(Chain(succ)), chain_draft(Chain(succ)), [0], Settings(4, 3, eos_ids=(4,)))
    assert result.tokens == [1, 2, 3, 4] and result.finish == "eos"


def test_end_token_in_the_prompt_is_text() -> None:
    result = run(chain_target(Chain(succ)), chain_draft(Chain(succ)), [3, 0], Settings(2, 3, eos_ids=(3, 0)))
    assert result.tokens == [1, 2] and result.finish == "length"


# ---- prompts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(method: str, length: int) -> None:
    prompt = PROMPT[:length]
    result = run(Target(TARGET, 40), drafter_for(method, NOISY), prompt, Settings(12, 3))
    assert result.tokens == argmax_text(TARGET, prompt, 12)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        run(Target(TARGET, 40), drafter_for("none", TARGET), [], Settings(3))


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 512])
@pytest.mark.parametrize("method", METHODS)
def test_prefill_in_chunks(method: str, chunk: int) -> None:
    """Progress adds up for each model; the text does not depend on the chunk; the draft never holds its full KV, unless it selects
    from it when the prompt has ended."""
    drafter, recorder = drafter_for(method, NOISY), Recorder({}, CPU)
    items = list(generate(Target(TARGET, 100), drafter, PROMPT, Settings(9, 3, chunk=chunk), recorder))
    for who in ("target", "draft") if METHODS[method].shape else ("target",):
        seen = [item for item in items if isinstance(item, Progress) and item.who == who]
        assert [p.done for p in seen] == [*range(chunk, 36, chunk), 36] and {p.total for p in seen} == {36}
        events = recorder.trace.of("prefill", who)
        assert [(e.position, e.position + e.count) for e in events] == [
            (p.done - e.count, p.done) for p, e in zip(seen, events, strict=True)
        ]
    assert [t for item in items if not isinstance(item, Progress) for t in item.tokens] == TEXT[:9]
    if drafter.memory is not None and drafter.memory.shape.window is not None:
        most = OPTIONS.sinks + OPTIONS.window + len(PROMPT) // OPTIONS.stride
        held = [e.bytes // drafter.memory.entry_bytes for e in recorder.trace.of("prefill", "draft")]
        if drafter.memory.shape.budget:
            stride = drafter.memory.shape.stride or len(PROMPT)
            assert held[:-1] == [done + done // stride for done in range(chunk, 36, chunk)]
            held = held[-1:]
        assert max(held) <= most


# ---- vocabularies


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=8, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [61, 64, 80])
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_vocabulary_of_another_width(method: str, width: int, sampling: Sampling) -> None:
    """Checkpoints of one tokenizer are padded differently (151,936 and 152,064): smaller and larger than the target's."""
    target, draft = with_vocab(TARGET, 64), with_vocab(TARGET, width)
    settings = Settings(20, 4, sampling)
    result = run(Target(target, 100), drafter_for(method, draft, vocab=64, sampling=sampling), PROMPT, settings)
    if sampling.greedy:
        assert result.tokens == TEXT[:20]
    if method == "full":
        assert all(r.accepted == len(r.drafted) for r in result.rounds) or width == 61  # zero rows of the padding take a share
    if method == "full" and sampling.greedy:
        assert all(r.accepted == len(r.drafted) for r in result.rounds)


def test_aligned() -> None:
    logits = torch.arange(4.0)
    assert aligned(logits, 4) is logits or torch.equal(aligned(logits, 4), logits)
    assert aligned(logits, 2).tolist() == [0, 1]
    assert aligned(logits, 6).tolist() == [0, 1, 2, 3, float("-inf"), float("-inf")]


# ---- cancelling


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_cancel_anywhere_keeps_the_partial_result_and_both_memories(method: str, sampling: Sampling) -> None:
    """Stop at every single question: between prefill chunks, before and between drafted tokens."""
    settings = Settings(12, 4, sampling, chunk=10)
    counter = StopAfter(10**9)
    whole = run(Target(TARGET, 60), drafter_for(method, NOISY, sampling=sampling), PROMPT, settings, counter)
    for calls in range(counter.asked):
        target, drafter = Target(TARGET, 60), drafter_for(method, NOISY, sampling=sampling)
        partial = run(target, drafter, PROMPT, settings, StopAfter(calls))
        assert partial.tokens == whole.tokens[: len(partial.tokens)]
        assert partial.finish == ("length" if len(partial.tokens) == 12 else "cancelled")
        text = PROMPT + partial.tokens
        assert target.memory.tokens()[0].tolist() == text[: target.memory.length] and target.memory.length < len(text)
        if drafter.memory is not None:
            assert held(drafter) == text[: len(held(drafter))]
            same_as_fresh(drafter)
        if partial.finish == "cancelled" and sampling.greedy:  # both can go on from where they stopped
            left = 12 - len(partial.tokens)
            other = drafter if drafter.memory is None or drafter.memory.length < len(text) else drafter_for(method, NOISY)
            rest = run(target, other, text, replace(settings, max_new_tokens=left))
            assert text + rest.tokens == PROMPT + TEXT[:12]


def test_cancelled_prefill_says_nothing() -> None:
    target = Target(TARGET, 60)
    result = run(target, drafter_for("masw", NOISY), PROMPT, Settings(12, 4, chunk=10), StopAfter(2))
    assert result.tokens == [] and result.finish == "cancelled" and target.memory.length == 20
    assert [e.count for e in result.recorder.trace.of("prefill")] == [10, 10]


def test_leaving_the_generator_keeps_the_target_usable() -> None:
    target, drafter = Target(TARGET, 60), drafter_for("masw", NOISY)
    for item in generate(target, drafter, PROMPT, Settings(30, 4), Recorder({}, CPU)):
        if not isinstance(item, Progress):
            break
    assert run(target, drafter_for("masw", NOISY), PROMPT, Settings(30, 4)).tokens == TEXT[:30]


# ---- one target, several runs


def test_a_second_longer_request_on_the_same_target() -> None:
    target = Target(TARGET, 12)
    longer = random_tokens(90, 61, 5)[0].tolist()
    assert run(target, drafter_for("full", NOISY, tokens=4), PROMPT[:5], Settings(6, 3)).tokens == argmax_text(
        TARGET, PROMPT[:5], 6
    )
    assert run(target, drafter_for("masw", NOISY, tokens=4), longer, Settings(20, 3)).tokens == argmax_text(TARGET, longer, 20)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_question_reads_the_document_once(method: str) -> None:
    target = Target(TARGET, 100)
    document, questions = PROMPT[:30], ([1, 2, 3], [1, 2, 9, 9, 4], [])
    for index, question in enumerate(questions):
        prompt = document + question
        result = run(target, drafter_for(method, NOISY), prompt, Settings(8, 3))
        assert result.tokens == argmax_text(TARGET, prompt, 8)
        read = [(e.position, e.count) for e in result.recorder.trace.of("prefill", "target")]
        # the last token of a prompt is read by the first verify pass; what was shared with the run before is kept, unless the
        # drafter has to see its hidden states
        again = METHODS[method].head
        assert read == ([(0, 32)], [(0, 34)] if again else [(32, 2)], [(0, 29)] if again else [])[index]
        assert not any(e.position < 0 for e in result.recorder.trace.of("rollback", "target"))


def test_rewind_keeps_what_is_shared() -> None:
    target = Target(TARGET, 100)
    run(target, drafter_for("none", TARGET), PROMPT, Settings(5))
    assert target.memory.length == len(PROMPT) + 4
    for prompt, left in ((PROMPT, 36), (PROMPT[:20], 19), ([*PROMPT[:10], 60, 60, 60], 10), ([60, *PROMPT], 0)):
        again = Target(TARGET, 100)
        run(again, drafter_for("none", TARGET), PROMPT, Settings(5))
        again.rewind(prompt)
        assert again.memory.length == left
        assert again.memory.tokens()[0].tolist() == prompt[:left]


def test_runs_with_other_settings_do_not_leak_into_each_other() -> None:
    """Sampled, cancelled and ended runs before it change nothing about a run."""
    target = Target(TARGET, 100)
    run(target, drafter_for("full", NOISY, sampling=WARM), PROMPT, Settings(12, 4, WARM))
    run(target, drafter_for("masw", NOISY), PROMPT, Settings(12, 4), StopAfter(9))
    run(target, drafter_for("window", NOISY), PROMPT, Settings(12, 4, eos_ids=(TEXT[3],)))
    assert run(target, drafter_for("none", NOISY), PROMPT, Settings(40)).tokens == TEXT


# ---- drafting switched off for a while


class Sometimes:
    """Proposes nothing in some rounds, as an adaptive gamma at 0 would."""

    def __init__(self, inner: Drafter, skips: set[int]) -> None:
        self.inner, self.skips, self.round = inner, skips, 0
        self.memory: Memory | None = inner.memory
        self.observer = inner.observer

    def reader(self, prompt: Sequence[int], recorder: Recorder, chunk: int) -> Reader | None:
        return self.inner.reader(prompt, recorder, chunk)

    def offers(self, sequence: Sequence[int], recorder: Recorder) -> Sequence[Offer]:
        return self.inner.offers(sequence, recorder)

    def propose(
        self,
        sequence: Sequence[int],
        gamma: int,
        recorder: Recorder,
        stop: Callable[[], bool],
        least: float = 0.0,
        offer: Offer | None = None,
    ) -> Proposal:
        self.round += 1
        return self.inner.propose(sequence, 0 if self.round in self.skips else gamma, recorder, stop, least, offer)

    def settle(self, length: int) -> None:
        self.inner.settle(length)


@pytest.mark.parametrize("method", DRAFTING)
@pytest.mark.parametrize("skipped", [1, 3, 24])
def test_a_draft_that_was_not_fed_catches_up(method: str, skipped: int) -> None:
    """Also after more rounds than the rollback window is long; a full-memory draft of the target itself is again perfect."""
    skips = set(range(2, 2 + skipped))
    drafter = Sometimes(drafter_for(method, TARGET), skips)
    result = run(Target(TARGET, 100), drafter, PROMPT, Settings(40, 3))
    assert result.tokens == TEXT
    assert [len(r.tokens) for r in result.rounds[1 : 1 + skipped]] == [1] * skipped
    assert result.roles.count("target") >= skipped
    first = reads(result)[0]
    kept = result.rounds[0].accepted
    # A head reads all that was accepted again, with the target's features.
    unread_before = kept + 1 if METHODS[method].head else 1 if kept < len(first) else 2
    if not METHODS[method].copies:  # the round after may copy, and the model reads later
        assert reads(result)[1 + skipped][0] == unread_before + skipped
    if method == "full":
        assert all(r.accepted == len(r.drafted) for r in result.rounds)
    same_as_fresh(drafter)


# ---- gamma chosen round by round


class Scripted:
    """Chooses these gammas in turn; remembers what it is told."""

    least = 0.0

    def __init__(self, most: int) -> None:
        self.gammas, self.told = iter([3, 0, 0, 5, 1, 0, 8, *[0] * 18, 4, 4]), []

    def choose(self, room: int, offers: Sequence[Offer] = (DRAFT,)) -> Choice:
        return Choice(min(next(self.gammas, 2), room), offers[0] if offers else DRAFT)

    def learn(
        self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float, offer: Offer = DRAFT
    ) -> None:
        assert 0 <= draft_ms + verify_ms <= round_ms + 1e-6
        self.told.append((drafted, accepted))


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_gamma_of_each_round_is_chosen_and_recorded(method: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also 0 for longer than the rollback window: the draft's memory ends as one that read the text token by token."""
    paces: list[Scripted] = []
    monkeypatch.setattr("masw.engine.Adaptive", lambda most: paces.append(Scripted(most)) or paces[-1])
    drafter, settings = drafter_for(method, NOISY, sampling=sampling), Settings(60, 8, sampling, adaptive=True)
    result = run(Target(TARGET, 120), drafter, PROMPT, settings)
    assert len(result.tokens) == 60
    if sampling.greedy:
        assert result.tokens[:40] == TEXT
    asked = [e.data["gamma"] for e in result.recorder.trace.of("verify")]
    assert asked[:25] == [3, 0, 0, 5, 1, 0, 8, *[0] * 18]
    assert all(len(r.drafted) <= gamma for r, gamma in zip(result.rounds, asked, strict=True))
    assert paces[0].told == [(len(r.drafted), r.accepted) for r in result.rounds]
    if METHODS[method].model:
        assert METHODS[method].copies or [len(r.drafted) for r in result.rounds] == asked
        same_as_fresh(drafter)


@pytest.mark.parametrize("method", METHODS)
def test_adaptive_gamma_is_lossless(method: str) -> None:
    result = run(Target(TARGET, 100), drafter_for(method, NOISY), PROMPT, Settings(40, 8, adaptive=True))
    assert result.tokens == TEXT
    gammas = [e.data["gamma"] for e in result.recorder.trace.of("verify")]
    assert gammas[0] == (8 if method != "none" else 0) and max(gammas) <= 8


# ---- rejected drafts leave no trace


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
def test_after_any_verdicts_memories_are_those_that_read_the_text(
    method: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of random length of which a random part is kept, whatever was right: after each round both memories are fresh ones."""
    random = Random(seed)

    def any_verdict(logits: Tensor, proposal: Proposal, *_: Any) -> tuple[Verdict, list[float]]:
        drafted = len(proposal.tokens)
        return Verdict(random.randint(0, drafted), random.randrange(61), drafted), [0.5] * drafted

    class AnyGamma(Scripted):
        def choose(self, room: int, offers: Sequence[Offer] = (DRAFT,)) -> Choice:
            return Choice(min(random.choice([0, 1, 1, 2, 3, 5, 8]), room), random.choice(list(offers) or [DRAFT]))

    monkeypatch.setattr("masw.engine.judge", any_verdict)
    monkeypatch.setattr("masw.engine.Adaptive", AnyGamma)
    target, drafter, kept = Target(TARGET, 200), drafter_for(method, NOISY), list(PROMPT)
    settings = Settings(60, 8, adaptive=True, chunk=random.randint(3, 40))
    for item in generate(target, drafter, PROMPT, settings, Recorder({}, CPU)):
        if isinstance(item, Progress):
            continue
        kept += item.tokens
        assert target.memory.tokens()[0].tolist() == kept[:-1]
        if drafter.memory is not None:
            assert held(drafter) == kept[: len(held(drafter))]
            same_as_fresh(drafter)
    fresh = memory_for(TARGET, MemoryShape())
    TARGET.forward(target.memory.tokens(), fresh)
    for mine, theirs in zip(target.memory.snapshot(), fresh.snapshot(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    assert len(kept) == len(PROMPT) + 60


# ---- the table of methods


def test_method_table() -> None:
    assert list(METHODS) == ["none", "full", "window", "masw", "snapkv", "hybrid", "eagle", "lookup", *CASCADES]
    assert all(name == method.name and method.title for name, method in METHODS.items())
    options = MemoryOptions(3, 100, 10)
    assert METHODS["full"].memory(options) == MemoryShape()
    assert METHODS["window"].memory(options) == MemoryShape(3, 100)
    assert METHODS["masw"].memory(options) == MemoryShape(3, 100, 10)
    assert METHODS["snapkv"].memory(options) == MemoryShape(3, 100, budget=10)
    assert METHODS["hybrid"].memory(options) == MemoryShape(3, 100, HYBRID * 10, budget=10)
    assert METHODS["none"].memory(options) is None and not METHODS["none"].drafts
    assert METHODS["eagle"].memory(options) == MemoryShape() and METHODS["eagle"].drafts
    assert METHODS["lookup"].memory(options) is None and METHODS["lookup"].drafts
    assert [name for name, method in METHODS.items() if method.model] == ["full", "window", "masw", "snapkv", "hybrid", *CASCADES]
    for name in CASCADES:
        assert METHODS[name].copies and METHODS[name].memory(options) == METHODS[name.split("+")[0]].memory(options)
    with pytest.raises(UsageError) as error:
        method_named("mas")
    assert "\n" not in str(error.value)
    assert method_named("masw") is METHODS["masw"]


def test_drafts_keep_their_own_numbers() -> None:
    """q of a proposal is what each token was drawn from; greedy proposals have none."""
    for sampling in (Sampling(), WARM):
        drafter: Any = drafter_for("full", NOISY, sampling=sampling)
        with torch.no_grad():
            proposal = drafter.propose(PROMPT, 5, Recorder({}, CPU), lambda: False)
        assert len(proposal.tokens) == len(proposal.confidence) == 5 and all(0 < c <= 1 for c in proposal.confidence)
        if sampling.greedy:
            assert proposal.q is None
        else:
            assert proposal.q.shape == (5, 61)
            assert [float(q[t]) for q, t in zip(proposal.q, proposal.tokens, strict=True)] == list(proposal.confidence)
            assert int((proposal.q > 0).sum(1).max()) <= WARM.top_k


@pytest.mark.parametrize("method", DRAFTING)
def test_tokens_read_back_once_a_block_are_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the text, the blocks and the events of drafting one by one, times aside; a block that may end early still does."""
    for settings, stop in ((Settings(24, 4), 10**9), (Settings(24, 4), 14), (Settings(24, 5, least=0.3), 10**9)):
        found = []
        for deferred in (False, True):
            monkeypatch.setattr(ModelDraft, "deferred", deferred)
            drafter = drafter_for(method, NOISY)
            result = run(Target(TARGET, 100), drafter, PROMPT, settings, StopAfter(stop))
            same_as_fresh(drafter)
            events = [(e.round, e.position, e.count, e.bytes, e.data) for e in result.recorder.trace.of("draft")]
            rest = [(e.kind, e.who, e.round, e.position, e.count) for e in result.recorder.trace.events if e.kind != "draft"]
            found.append((result.tokens, [r.drafted for r in result.rounds], rest, events))
        assert found[0][:3] == found[1][:3] and len(found[0][3]) == len(found[1][3]) > 0
        for one, other in zip(found[0][3], found[1][3], strict=True):
            assert one[:4] == other[:4] and one[4] == pytest.approx(other[4])


def test_the_draft_is_asked_for_no_more_than_gamma() -> None:
    drafter = ModelDraft(TARGET, memory_for(TARGET, MemoryShape()), Sampling(), Random(0), 61)
    with torch.no_grad():
        assert drafter.propose(PROMPT, 0, Recorder({}, CPU), lambda: False).tokens == []
    assert drafter.memory.length == 0
