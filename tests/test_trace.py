"""The one record of a run: its file, its events, the state that follows from them, and the numbers made of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import masw
from masw.engine import Settings, Target
from masw.errors import UsageError
from masw.memory import Memory
from masw.methods import METHODS, MemoryOptions
from masw.metrics import first_difference, summarise
from masw.trace import KINDS, ROLES, SCHEMA, Event, Trace
from masw.verify import Sampling
from tests.helpers import (
    Chain,
    Run,
    StopAfter,
    chain_draft,
    chain_target,
    drafter_for,
    noisy,
    random_tokens,
    run,
    tiny_config,
    tiny_decoder,
)

TARGET = tiny_decoder(tiny_config(), seed=1)
NOISY = noisy(TARGET, 0.25)
PROMPT = random_tokens(37, 61, 20)[0].tolist()
OPTIONS = MemoryOptions(sinks=3, window=9, stride=4)


def recorded(method: str, sampling: Sampling | None = None, stop_after: int = 10**9) -> tuple[Run, Memory | None, Target]:
    sampling = sampling or Sampling()
    target, drafter = Target(TARGET, 100), drafter_for(method, NOISY, sampling=sampling, options=OPTIONS)
    result = run(target, drafter, PROMPT, Settings(40, 5, sampling, chunk=10), StopAfter(stop_after))
    return result, drafter.memory, target


# ---- the file


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(tmp_path: Path, method: str) -> None:
    trace = recorded(method)[0].recorder.trace
    trace.header = {"prompt_tokens": 37, "title": "naïve  \u2028 𝔘", "nested": {"a": [1, None, True]}}
    path = tmp_path / "new" / "run.jsonl"
    trace.save(path)
    again = Trace.load(path)
    assert again.header == trace.header and not again.truncated
    assert len(again.events) == len(trace.events) > 0
    for mine, theirs in zip(trace.events, again.events, strict=True):
        assert (mine.kind, mine.who, mine.round, mine.position, mine.count, mine.bytes, mine.data) == (
            theirs.kind, theirs.who, theirs.round, theirs.position, theirs.count, theirs.bytes, theirs.data,
        )  # fmt: skip
        assert theirs.ms == pytest.approx(mine.ms, abs=1e-4) and theirs.at_ms == pytest.approx(mine.at_ms, abs=1e-4)
    assert list(again.lines()) == list(trace.lines())
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert first["type"] == "header" and first["schema"] == SCHEMA


def some_trace() -> Trace:
    events = [Event("prefill", "target", 0, 1.5, 0, 4, 1.5, 64), Event("emit", "engine", 1, 9.0, 4, 1, 2.0, data={"tokens": [7]})]
    return Trace({"prompt_tokens": 4}, events)


def test_a_cut_last_line_is_dropped_and_noted() -> None:
    """Wherever the file was cut: what is whole is read, and the reader says that something is missing."""
    text = "\n".join(some_trace().lines()) + "\n"
    header, first, second = (len(line) + 1 for line in some_trace().lines())
    for cut in range(header, len(text)):
        trace = Trace.parse(text[:cut])
        whole = (cut >= header + first - 1) + (cut >= header + first + second - 1)  # the line break itself may be missing
        assert len(trace.events) == whole
        assert trace.truncated == (cut not in (header, header + first - 1, header + first, header + first + second - 1))


def test_a_cut_header_is_no_trace() -> None:
    header = next(some_trace().lines())
    for cut in range(len(header)):
        with pytest.raises(UsageError):
            Trace.parse(header[:cut])


def test_garbage_is_refused_with_its_line_number() -> None:
    lines = list(some_trace().lines())
    for garbage in ("nonsense", "3", "[1]", "{}", '{"type": "event"}', '{"type": "event", "kind": "draft"}', '{"type": "other"}'):
        with pytest.raises(UsageError, match=r"notes\.txt is not a masw trace \(line 2\)") as error:
            Trace.parse("\n".join([lines[0], garbage, *lines[1:]]), name="notes.txt")
        assert "\n" not in str(error.value)
        with pytest.raises(UsageError, match=r"line 1\)"):
            Trace.parse("\n".join([garbage, *lines]))
    with pytest.raises(UsageError, match=r"line 1\)"):  # events before a header
        Trace.parse("\n".join(lines[1:]))


@pytest.mark.parametrize("text", ["", "\n\n", "   \n"])
def test_an_empty_file_is_no_trace(text: str) -> None:
    with pytest.raises(UsageError, match="holds no trace header"):
        Trace.parse(text)


def test_two_traces_in_one_file_are_refused() -> None:
    lines = list(some_trace().lines())
    with pytest.raises(UsageError, match=r"line 4\)"):
        Trace.parse("\n".join([*lines, *lines]))


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, "1", None])
def test_another_schema_is_refused(schema: Any) -> None:
    line = json.dumps({"type": "header", "schema": schema})
    with pytest.raises(UsageError, match=f"schema {schema}, this masw reads {SCHEMA}"):
        Trace.parse(line)


def test_fields_of_a_later_minor_version_and_blank_lines_are_skipped() -> None:
    header, *events = some_trace().lines()
    text = "\n\n".join([header, *(json.dumps({**json.loads(line), "later": 1}) for line in events)]) + "\n\n"
    assert Trace.parse(text).events == some_trace().events


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read the trace"):
            Trace.load(path)
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(UsageError, match="line 1"):
        Trace.load(binary)


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    some_trace().save(path)
    before = path.read_bytes()
    broken = some_trace()
    broken.events.append(Event("draft", "draft", 1, 0.0, 0, 1, data={"token": object()}))
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "run.jsonl", tmp_path / "folder"):
        with pytest.raises(UsageError, match=r"cannot write the trace to|is a folder") as error:
            some_trace().save(path)
        assert "\n" not in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


# ---- what the engine writes


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_every_event_is_of_a_known_kind(method: str, sampling: Sampling) -> None:
    result = recorded(method, sampling)[0]
    events = result.recorder.trace.events
    kinds = {e.kind for e in events}
    assert kinds <= set(KINDS)
    assert {role for e in events if e.kind == "emit" for role in e.data["roles"]} <= set(ROLES)
    assert {e.who for e in events} <= {"draft", "target", "engine"}
    assert kinds >= {"prefill", "verify", "upkeep", "emit", "end"}
    if method in ("masw", "hybrid"):
        assert kinds == set(KINDS) - ({"select"} if method == "masw" else set())
    assert [e.at_ms for e in events] == sorted(e.at_ms for e in events)
    assert all(e.ms >= 0 and e.at_ms >= 0 and e.bytes >= 0 and e.count >= 0 and e.position >= 0 for e in events)
    assert [e.round for e in events] == sorted(e.round for e in events)
    assert {e.round for e in events if e.kind == "prefill"} == {0}
    assert events[-1].kind == "end" and events[-1].data == {"reason": "length"} and events[-1].count == 40


def test_kinds_roles_and_fields_are_documented() -> None:
    documented = (Path(masw.__file__).parent.parent / "docs" / "TRACE.md").read_text(encoding="utf-8")
    names = [*KINDS, *ROLES, *Event.__dataclass_fields__]
    fields = {name for method in METHODS for e in recorded(method)[0].recorder.trace.events for name in e.data}
    missing = [name for name in [*names, *sorted(fields)] if f"`{name}`" not in documented]
    assert not missing
    assert f"Schema version: {SCHEMA}." in documented


@pytest.mark.parametrize("stop_after", [10**9, 9, 12, 17])
@pytest.mark.parametrize("method", METHODS)
def test_the_state_is_what_the_trace_says(method: str, stop_after: int) -> None:
    """Replaying the events gives the entries and bytes of both memories, at the end of every round and of the run."""
    result, draft_memory, target = recorded(method, stop_after=stop_after)
    for who, memory in (("draft", draft_memory), ("target", target.memory)):
        if memory is None:
            continue
        stride, tokens, gone, selected, slots, texts = memory.shape.stride, 0, 0, 0, list[int](), PROMPT[:]
        for event in result.recorder.trace.events:
            if event.kind == "emit":
                texts.extend(event.data["tokens"])
                # between rounds: the target has read all but the last token, a draft up to two fewer, a head nothing of the round's,
                # a draft beside a copier nothing of what was copied
                if who == "draft" and METHODS[method].head:
                    drafted = any(e.kind == "draft" and e.round == event.round for e in result.recorder.trace.events)
                    assert tokens == len(texts) - event.count if drafted else tokens < len(texts)
                elif who == "draft" and METHODS[method].copies:
                    assert tokens < len(texts)
                else:
                    assert len(texts) - (1 if who == "target" else 2) <= tokens < len(texts)
                assert tokens - gone + selected + len(slots) == memory.shape.entries(tokens)
            if event.who != who:
                continue
            if event.kind in ("prefill", "verify"):
                tokens += event.count
            elif event.kind == "draft":
                tokens += event.data["read"]
            elif event.kind == "materialise":
                assert stride is not None
                slots.extend(range(event.position, event.position + event.count * stride, stride))
            elif event.kind == "select":
                assert (event.round, event.position, tokens + 10) >= (0, OPTIONS.sinks, len(PROMPT) - 1) and not selected
                selected = event.count
            elif event.kind == "evict":
                assert event.position == OPTIONS.sinks + gone
                gone += event.count
            elif event.kind == "rollback":
                assert event.position + event.count == tokens
                tokens = event.position
                slots = [tau for tau in slots if tau <= tokens]
            if event.kind in ("prefill", "verify", "draft"):
                assert event.bytes == memory.shape.entries(tokens) * memory.entry_bytes
        assert tokens == memory.length
        assert tokens - gone + selected + len(slots) == memory.entries == len(memory.snapshot()[0])
        assert slots == [tau for tau in range(1, tokens + 1) if stride and tau % stride == 0]


def test_times_add_up() -> None:
    """Rounds cover drafting, verifying and upkeep; upkeep is what is left."""
    result, _, _ = recorded("masw")
    trace = result.recorder.trace
    for emit in trace.of("emit"):
        inside = [e for e in trace.events if e.round == emit.round]
        drafts = sum(e.ms for e in inside if e.kind == "draft")
        verify, upkeep = (sum(e.ms for e in inside if e.kind == kind) for kind in ("verify", "upkeep"))
        assert drafts + verify + upkeep <= emit.ms + 1e-6
        assert len([e for e in inside if e.kind == "verify"]) == 1
    assert sum(e.ms for e in trace.of("emit")) <= trace.events[-1].at_ms


# ---- the numbers


def event(kind: str, who: str, round: int, at_ms: float, count: int, ms: float = 0.0, nbytes: int = 0, **data: Any) -> Event:
    return Event(kind, who, round, at_ms, 0, count, ms, nbytes, data)


def hand_written() -> Trace:
    """Three rounds of gamma 3: all kept, one kept, then the end token as the second of a block."""
    return Trace(
        {"prompt_tokens": 10},
        [
            event("prefill", "target", 0, 30.0, 6, 30.0, 600),
            event("prefill", "target", 0, 50.0, 3, 20.0, 900),
            event("prefill", "draft", 0, 60.0, 9, 10.0, 90),
            event("draft", "draft", 1, 62.0, 1, 2.0, 100),
            event("draft", "draft", 1, 63.0, 1, 1.0, 110),
            event("draft", "draft", 1, 67.0, 1, 4.0, 120),
            event("verify", "target", 1, 75.0, 4, 8.0, 1300),
            event("accept", "engine", 1, 75.1, 3, discarded=0),
            event("upkeep", "engine", 1, 75.5, 0, 0.5),
            event("emit", "engine", 1, 75.5, 4, 16.0, tokens=[1, 2, 3, 4], roles=["accepted"] * 3 + ["bonus"]),
            event("draft", "draft", 2, 78.0, 1, 2.0, 130),
            event("verify", "target", 2, 88.0, 4, 10.0, 1700),
            event("accept", "engine", 2, 88.1, 1, discarded=0),
            event("reject", "engine", 2, 88.1, 2, instead=6),
            event("rollback", "draft", 2, 88.2, 1, 0.0, 125),
            event("upkeep", "engine", 2, 88.5, 0, 1.5),
            event("emit", "engine", 2, 88.5, 2, 14.0, tokens=[5, 6], roles=["accepted", "correction"]),
            event("verify", "target", 3, 98.0, 4, 9.0, 2100),
            event("accept", "engine", 3, 98.1, 2, discarded=1),
            event("rollback", "target", 3, 98.2, 3, 0.0, 1800),
            event("upkeep", "engine", 3, 98.5, 0, 1.0),
            event("emit", "engine", 3, 98.5, 2, 10.0, tokens=[7, 8], roles=["accepted"] * 2),
            event("end", "engine", 3, 98.6, 8, reason="eos"),
        ],
    )


def test_summary_of_a_hand_written_trace() -> None:
    s = summarise(hand_written())
    assert s.tokens == [1, 2, 3, 4, 5, 6, 7, 8] and s.finish == "eos" and s.rounds == 3 and s.prompt_tokens == 10
    assert s.prefill_ms == {"draft": 10.0, "target": 50.0}
    assert s.ttft_ms == 60.0 + 16.0 and s.decode_ms == 40.0 and s.end_to_end_ms == 100.0
    assert s.tokens_per_second == 8 / 0.040
    assert s.tokens_per_iteration == 8 / 3 and s.tokens_per_iteration_without_bonus == 6 / 3
    assert s.acceptance == 6 / 8  # the token drafted after the end token was never judged
    assert s.acceptance_by_position == [1.0, 2 / 3, 1 / 2]
    assert s.draft_ms == 2.0 and s.verify_ms == 9.0 and s.upkeep_ms == 1.0
    assert s.draft_kv_bytes == 125 and s.target_kv_bytes == 1800


def test_summary_of_autoregressive_decoding() -> None:
    trace = Trace({}, [event("emit", "engine", n, n * 5.0, 1, 5.0, tokens=[n], roles=["target"]) for n in (1, 2)])
    s = summarise(trace)
    assert s.tokens_per_iteration == 1.0 and s.tokens_per_iteration_without_bonus is None
    assert s.acceptance is None and s.acceptance_by_position == [] and s.draft_ms is None and s.draft_kv_bytes is None
    assert s.prefill_ms == {"draft": None, "target": None} and s.ttft_ms == 5.0 and s.tokens_per_second == 200.0


def test_every_cut_of_a_trace_has_a_summary() -> None:
    """A cancelled run, a file that was cut: the numbers of what is there, none of what is not."""
    whole = hand_written()
    for length in range(len(whole.events)):
        s = summarise(Trace(whole.header, whole.events[:length]))
        assert s.finish == "unfinished"
        assert s.rounds == sum(e.kind == "emit" for e in whole.events[:length])
        assert (s.ttft_ms is None) == (s.rounds == 0) == (s.tokens_per_second is None)
    empty = summarise(Trace({}))
    assert empty.tokens == [] and empty.decode_ms == empty.end_to_end_ms == 0.0 and empty.tokens_per_iteration is None


def test_a_round_that_was_judged_but_not_finished_is_not_counted() -> None:
    """Cut between accept and emit: tokens per iteration are those of whole rounds."""
    whole = hand_written()
    cut = next(i for i, e in enumerate(whole.events) if e.kind == "reject") + 1
    s = summarise(Trace(whole.header, whole.events[:cut]))
    assert s.rounds == 1 and s.tokens_per_iteration == 4.0 and s.tokens_per_iteration_without_bonus == 3.0


def test_summary_of_stub_networks() -> None:
    """Exact counters end to end: 12 tokens in 4 rounds, 8 of 12 drafts kept."""
    drafter = chain_draft(Chain(lambda x: x + 2 if x in (2, 7) else x + 1))
    result = run(chain_target(Chain(lambda x: x + 1)), drafter, [0], Settings(12, 3))
    s = summarise(result.recorder.trace)
    assert s.tokens == list(range(1, 13)) and s.rounds == 4
    assert s.tokens_per_iteration == 3.0 and s.tokens_per_iteration_without_bonus == 2.0
    assert s.acceptance == 8 / 12 and s.acceptance_by_position == [3 / 4, 3 / 4, 2 / 4]


def test_discarded_drafts_do_not_lower_the_acceptance() -> None:
    result = run(chain_target(Chain(lambda x: x + 1)), chain_draft(Chain(lambda x: x + 1)), [0], Settings(20, 5, eos_ids=(2,)))
    s = summarise(result.recorder.trace)
    assert s.acceptance == 1.0 and s.acceptance_by_position == [1.0, 1.0] and s.tokens == [1, 2]


@pytest.mark.parametrize(
    ("ours", "reference", "index"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
        ([], [], None),
        ([], [4], 0),
        ([4], [5], 0),
    ],
)
def test_first_difference(ours: list[int], reference: list[int], index: int | None) -> None:
    assert first_difference(ours, reference) == index
