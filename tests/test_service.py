"""What a page may ask: an answer that grows, cancelled and shared runs, the race's comparison, previews, and memory that stays flat."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from masw import service, store
from masw.cost import Rates
from masw.engine import Settings
from masw.errors import UsageError
from masw.estimate import estimate, rates
from masw.jobs import CANCELLED, DONE, FAILED, Job
from masw.methods import MemoryOptions
from masw.metrics import summarise
from masw.service import Answer, Ask, Room, eta_s, shapes, speed_up
from masw.session import RunOptions, Session
from masw.verify import Sampling
from masw.zoo import load_pair

DOCUMENT = "The committee met on Monday and wrote down what it found. " * 30
MEMORY = MemoryOptions(2, 32, 4)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setattr(service, "machine", lambda device: Rates(1e10, 1e11))
    room = Room(device="cpu", dtype="fp32")
    yield room
    room.close()


def options(method: str = "masw", new: int = 24, **kwargs: Any) -> RunOptions:
    return RunOptions(method, MEMORY, Settings(new, 4, Sampling(**kwargs)), "none")


def ask(*arms: RunOptions, document: str = DOCUMENT, question: str | None = None) -> Ask:
    return Ask("tiny", document, "a report", "question" if question else "summarize", question, arms or (options(),))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def done(job: Job[Any]) -> Answer:
    until(lambda: not job.active)
    assert (job.state, job.error) == (DONE, None)
    return job.work  # type: ignore[no-any-return]


def test_an_answer_is_the_targets_own_and_its_pieces_are_its_text(room: Room) -> None:
    answer = done(room.answer(room.jobs.visitor(), ask()))
    view = answer.view()
    (arm,) = view.arms
    assert view.stage == "done" and arm.finished and view.prompt is not None
    pair = load_pair("tiny", torch.device("cpu"), torch.float32)
    run = Session(pair).run(view.prompt.ids, options("none"))
    list(run)
    tokens = run.summary().tokens
    assert summarise(arm.trace).tokens[: len(tokens)] == tokens
    assert len(arm.pieces) == len(summarise(arm.trace).tokens)
    assert arm.text == pair.target.tokenizer.decode(summarise(arm.trace).tokens)
    assert arm.peak_bytes and arm.gpu_bytes is None
    drafted = {t for kind in ("accept", "reject") for e in arm.trace.of(kind) for t in e.data["tokens"]}
    assert {str(t) for t in drafted} <= arm.trace.header["pieces"].keys()


def test_arms_share_the_target_prefill_and_are_compared_with_the_autoregressive_one(room: Room) -> None:
    arms = [options(m) for m in ("none", "masw", "window", "lookup")]
    view = done(room.answer(room.jobs.visitor(), ask(*arms))).view()
    first, *others = view.arms
    assert first.trace.of("prefill", "target") and not any(a.trace.of("prefill", "target") for a in others)
    assert all(a.compared and a.difference is None for a in others) and not first.compared
    assert len({tuple(summarise(a.trace).tokens) for a in view.arms}) == 1
    assert speed_up(summarise(others[0].trace), summarise(first.trace)) is not None


def test_sampled_arms_are_not_compared(room: Room) -> None:
    arms = [options(m, temperature=1.0, seed=3) for m in ("none", "masw")]
    view = done(room.answer(room.jobs.visitor(), ask(*arms))).view()
    assert not any(a.compared for a in view.arms)


def test_a_second_question_does_not_read_the_document_again(room: Room) -> None:
    visitor = room.jobs.visitor()
    first = done(room.answer(visitor, ask(question="Who met?"))).view()
    preview = room.preview(ask(question="When did it meet?"), visitor)
    second = done(room.answer(visitor, ask(question="When did it meet?"))).view()
    assert first.prompt is not None and second.prompt is not None
    assert first.shared_tokens == 0
    assert second.shared_tokens >= len(DOCUMENT)
    assert sum(e.count for e in second.arms[0].trace.of("prefill", "target")) < 100
    fresh = room.preview(ask(question="When did it meet?"), room.jobs.visitor())
    assert preview.estimate.prefill_s < fresh.estimate.prefill_s


def test_the_same_question_again_reads_nothing(room: Room) -> None:
    visitor = room.jobs.visitor()
    done(room.answer(visitor, ask()))
    view = done(room.answer(visitor, ask())).view()
    assert view.prompt is not None and view.shared_tokens == len(view.prompt.ids) - 1


def test_nothing_of_one_visitors_document_serves_another(room: Room) -> None:
    """A prefill that is quick because someone else read the same document would tell so."""
    done(room.answer(room.jobs.visitor(), ask()))
    assert done(room.answer(room.jobs.visitor(), ask())).view().shared_tokens == 0


def test_cancelling_keeps_the_part_that_is_there(room: Room) -> None:
    visitor = room.jobs.visitor()
    job = room.answer(visitor, ask(options(new=4000)))
    answer = job.work
    assert isinstance(answer, Answer)
    until(lambda: bool(answer.arms) and len(answer.arms[0].pieces) > 8)
    room.jobs.cancel(visitor, job.id)
    until(lambda: not job.active)
    arm = answer.view().arms[0]
    assert job.state == CANCELLED and summarise(arm.trace).finish == "cancelled"
    assert 8 < len(arm.pieces) == len(summarise(arm.trace).tokens) < 4000
    done(room.answer(visitor, ask()))  # and the next one runs


def test_cancelling_in_the_middle_of_a_prefill(room: Room) -> None:
    visitor = room.jobs.visitor()
    slow = RunOptions("full", MEMORY, Settings(8, 4, chunk=1), "none")
    job = room.answer(visitor, ask(slow))
    answer = job.work
    assert isinstance(answer, Answer)
    until(lambda: bool(answer.arms) and "target" in answer.arms[0].progress)
    room.jobs.cancel(visitor, job.id)
    until(lambda: not job.active)
    view = answer.view()
    assert job.state == CANCELLED and not view.arms[0].pieces
    progress = view.arms[0].progress["target"]
    assert 0 < progress.done < progress.total
    # The next preview counts as read what was read, and no more.
    assert view.prompt is not None and room._shared(visitor, "tiny", view.prompt.ids) == progress.done


def test_a_view_does_not_change_while_the_run_goes_on(room: Room) -> None:
    visitor = room.jobs.visitor()
    job = room.answer(visitor, ask(options(new=600)))
    answer = job.work
    assert isinstance(answer, Answer)
    until(lambda: bool(answer.arms) and len(answer.arms[0].pieces) > 4)
    view = answer.view()
    events, pieces = len(view.arms[0].trace.events), len(view.arms[0].pieces)
    assert (eta_s(view) or 0) > 0
    until(lambda: len(answer.arms[0].pieces) > pieces)
    assert (len(view.arms[0].trace.events), len(view.arms[0].pieces)) == (events, pieces)
    room.jobs.cancel(visitor, job.id)
    until(lambda: not job.active)


def test_what_can_be_refused_is_refused_before_the_line(room: Room) -> None:
    visitor = room.jobs.visitor()
    with pytest.raises(UsageError, match="no document yet"):
        room.answer(visitor, ask(document=" \n"))
    with pytest.raises(UsageError, match="rollback window of 16"):
        room.answer(visitor, ask(RunOptions("masw", MEMORY, Settings(8, 40))))
    with pytest.raises(UsageError, match="unknown model or pair"):
        room.answer(visitor, Ask("nonesuch", DOCUMENT, "x", "summarize", None, (options(),)))
    with pytest.raises(UsageError, match="a question was given"):
        room.answer(visitor, Ask("tiny", DOCUMENT, "x", "summarize", "Why?", (options(),)))
    assert room.jobs.of(visitor) == []


def test_a_model_that_is_not_here_is_said_to_be_missing(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "locate", lambda model: None)
    with pytest.raises(UsageError, match="not on this machine; fetch them first"):
        room.answer(room.jobs.visitor(), Ask("smollm2", DOCUMENT, "x", "summarize", None, (options(),)))


def test_a_run_that_breaks_is_shown_and_the_next_one_is_right(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = room.jobs.visitor()
    expected = done(room.answer(visitor, ask())).view().arms[0].text
    with monkeypatch.context() as patch:
        patch.setattr("masw.engine.Target.verify", lambda self, block: 1 / 0)
        job = room.answer(visitor, ask())
        until(lambda: not job.active)
    assert job.state == FAILED and job.error == "ZeroDivisionError: division by zero"
    assert done(room.answer(visitor, ask())).view().arms[0].text == expected


def test_the_preview_counts_what_is_cut_and_says_where_its_figures_come_from(room: Room) -> None:
    visitor = room.jobs.visitor()
    long = "a" * 9000
    found = room.preview(ask(options(new=100), document=long), visitor)
    assert found.context_limit == 8192 and len(found.prompt.ids) == 8092
    assert found.prompt.truncated_tokens == 9000 - (8092 - (len(room.preview(ask(), visitor).prompt.ids) - len(DOCUMENT)))
    assert not found.estimate.measured and 0 < found.estimate.low_s < found.estimate.high_s and found.fits
    done(room.answer(visitor, ask(options(new=100))))
    later = room.preview(ask(options(new=100)), visitor)
    assert later.estimate.measured and later.estimate.low_s == later.estimate.high_s


def test_a_loaded_pair_is_out_of_sight_of_garbage_collections(room: Room) -> None:
    done(room.answer(room.jobs.visitor(), ask()))
    assert gc.get_freeze_count() > 10_000
    begun = time.thread_time()
    gc.collect()
    assert time.thread_time() - begun < 0.1


def test_estimates_follow_the_formula() -> None:
    found = shapes("tiny")
    assert found is not None
    draft, target = found
    common: dict[str, Any] = {"prompt": 1000, "new_tokens": 100, "gamma": 4, "itemsize": 4, "shared": False}
    machine = Rates(1e9, 1e12)
    plain = estimate(target, draft, None, drafts=False, machine=machine, **common)
    drafted = estimate(target, draft, options().shape(), drafts=True, machine=machine, **common)
    assert plain.decode_low_s == plain.decode_high_s
    assert drafted.decode_low_s < plain.decode_low_s < drafted.decode_high_s
    assert drafted.prefill_s > plain.prefill_s and drafted.run_bytes > plain.run_bytes
    assert drafted.weights_bytes > plain.weights_bytes
    again = estimate(target, draft, None, drafts=False, machine=machine, read_already=1000, **common)
    assert again.prefill_s == 0.0


def test_rates_of_a_run_are_per_token(room: Room) -> None:
    trace = done(room.answer(room.jobs.visitor(), ask())).view().arms[0].trace
    found, s = rates(trace), summarise(trace)
    assert found.target_prefill_ms == pytest.approx((s.prefill_ms["target"] or 0) / (s.prompt_tokens - 1))
    assert found.decode_ms == pytest.approx(s.decode_ms / len(s.tokens))


def test_memory_stays_flat_over_many_runs(room: Room) -> None:
    visitors = [room.jobs.visitor() for _ in range(3)]
    process = psutil.Process()

    def some(count: int) -> None:
        for i in range(count):
            done(room.answer(visitors[i % 3], ask(options(("masw", "full", "window")[i % 3], new=16))))

    some(10)
    gc.collect()
    before = process.memory_info().rss
    some(50)
    gc.collect()
    assert process.memory_info().rss - before < 100 * 2**20
