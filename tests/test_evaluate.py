"""The measure of an adaptor: it must be what the engine itself does, and its rows what the issue says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from masw import cases, evaluate
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.engine import Settings
from masw.errors import UsageError
from masw.evaluate import Judged, Outcome, Variant, tokens_per_iteration
from masw.methods import MemoryOptions
from masw.session import RunOptions, Session
from masw.tokenizer import ByteTokenizer
from masw.zoo import Model, Pair, load_pair
from tests.helpers import noisy, tiny_config, tiny_decoder, trained_adaptor, with_vocab

TOKENIZER = ByteTokenizer()
WORDS = "the report of the committee on water and roads says that the money was spent in three years "


def model(name: str, decoder: Decoder, eos: tuple[int, ...] = ()) -> Model:
    return Model(name, decoder, TOKENIZER, decoder.config, eos, None, {"name": name, "vocab": decoder.config.vocab, "eos": eos})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))


def target_decoder() -> Decoder:
    return tiny_decoder(tiny_config(vocab=ByteTokenizer.VOCAB, layers=3))


def session(noise: float = 0.02, eos: tuple[int, ...] = (), vocab: int = ByteTokenizer.VOCAB) -> Session:
    """A draft that is often right while it sees everything, and less so with a small memory."""
    target = target_decoder()
    return Session(Pair("test", model("draft", with_vocab(noisy(target, noise), vocab)), model("target", target, eos)))


# ---- exactness


@pytest.mark.parametrize("answer", ["length", "eos early", "eos late"])
@pytest.mark.parametrize("prompt_seed", [0, 1])
def test_tokens_per_iteration_is_the_engines_own(tmp_path: Path, prompt_seed: int, answer: str) -> None:
    """Every method, several gammas: counting agreements gives what the engine measures in a run of its own."""
    prompt = tuple(Random(prompt_seed).choices(range(256), k=90))
    case = cases.Case("set", "1", 90, prompt)
    eos: tuple[int, ...] = ()
    if answer != "length":
        free = cases.answer(session(), case, 40)
        wanted = range(10, 16) if answer == "eos early" else range(30, 40)
        eos = (next(free[i] for i in wanted if free.index(free[i]) == i),)
    pair = session(eos=eos)
    said = cases.answer(pair, case, 40)
    assert (len(said) < 40) == bool(eos)
    draft = pair.pair.draft.decoder
    trained, path = trained_adaptor(draft, noise=0.05), tmp_path / "a.safetensors"
    trained.info = AdaptorInfo("draft", ())  # type: ignore[assignment]
    trained.save(path, dtype=torch.float64)
    trained = Adaptor.load(path, draft, base="draft")
    untrained = Adaptor.copied(draft, AdaptorInfo("draft", ()))
    choices = evaluate.variants([8, 16], [4], 90, untrained, lambda r: trained, 2)
    outcomes = evaluate.judge(draft, choices, case, said, TOKENIZER, ByteTokenizer.VOCAB)
    seen = set()
    for choice, outcome in zip(choices, outcomes, strict=True):
        window = choice.shape.window or 0
        for gamma in (1, 2, 5, 8):
            settings = Settings(40, gamma, eos_ids=eos)
            method = choice.method.split("-")[0]
            adaptor = str(path) if choice.method in ("masw", "hybrid") else "none"
            options = RunOptions(method, MemoryOptions(2, window, choice.stride or 8), settings, adaptor)
            assert options.shape() == choice.shape
            job = pair.run(prompt, options)
            list(job)
            found = job.summary()
            assert found.tokens == said
            assert found.tokens_per_iteration == pytest.approx(tokens_per_iteration(outcome.agree, gamma), abs=1e-12), choice
            seen.add(round(found.tokens_per_iteration or 0, 3))
    assert {c.method for c in choices} == {"full", "window", "window-equal", "masw-untrained", "snapkv", "hybrid", "masw"}
    assert len(seen) > 4  # the draft is neither always nor never right


@pytest.mark.parametrize("vocab", [ByteTokenizer.VOCAB - 30, ByteTokenizer.VOCAB + 30])
def test_a_draft_of_another_width_is_read_as_the_engine_reads_it(vocab: int) -> None:
    pair = session(noise=0.1, vocab=vocab)
    draft = pair.pair.draft.decoder
    if vocab > ByteTokenizer.VOCAB:
        draft.weights.head[ByteTokenizer.VOCAB :] = 5 * draft.weights.head[:30]  # padding that would win
    prompt = tuple(Random(2).choices(range(200), k=60))
    case = cases.Case("set", "1", 60, prompt)
    said = cases.answer(pair, case, 30)
    (outcome,) = evaluate.judge(draft, [Variant("full", MemoryShape(), None, None)], case, said, TOKENIZER, ByteTokenizer.VOCAB)
    job = pair.run(prompt, RunOptions("full", MemoryOptions(), Settings(30, 5), "none"))
    list(job)
    assert job.summary().tokens_per_iteration == tokens_per_iteration(outcome.agree, 5)
    assert 0 < sum(outcome.agree) < 30
    assert outcome.kl == 0


def test_a_perfect_and_a_hopeless_draft() -> None:
    assert tokens_per_iteration([True] * 12, 5) == 6
    assert tokens_per_iteration([True] * 13, 5) == pytest.approx(13 / 3)
    assert tokens_per_iteration([False] * 12, 5) == 1
    assert tokens_per_iteration([True], 5) == tokens_per_iteration([False], 5) == 1


def test_the_full_draft_of_the_target_itself_agrees_with_all_of_it() -> None:
    pair = session(noise=0)
    case = cases.Case("set", "1", 40, tuple(range(40)))
    choices = evaluate.variants(
        [8], [4], 40, Adaptor.copied(pair.pair.draft.decoder, AdaptorInfo("draft", ())), lambda r: None, 2
    )
    said = cases.answer(pair, case, 20)
    found = evaluate.judge(pair.pair.draft.decoder, choices, case, said, TOKENIZER, ByteTokenizer.VOCAB)
    assert all(found[0].agree) and found[0].kl == 0
    assert all(o.kl > 0 and not all(o.agree) for o in found[1:2])


def test_variants_of_a_cell_have_the_same_bytes_and_the_slots_that_there_are() -> None:
    draft = session().pair.draft.decoder
    untrained, quiet, trained = (trained_adaptor(draft, seed=seed) for seed in (1, 2, 3))
    for adaptor in (None, trained):
        found = evaluate.variants([64], [4, 8], 512, untrained, lambda r, a=adaptor: a, 4, quiet)
        for stride in (4, 8):
            cell = {v.method: v for v in found if v.stride == stride}
            sizes = {name: replace(v.shape, prompt=511 if v.shape.budget else None).entries(511) for name, v in cell.items()}
            assert max(sizes.values()) - min(sizes.values()) <= 1  # window-equal counts a slot that the last token would close
            assert cell["hybrid"].adaptor is (adaptor or quiet) and cell["snapkv"].adaptor is None
        without = evaluate.variants([64], [4], 512, untrained, lambda r: None, 4)
        assert next(v for v in without if v.method == "hybrid").adaptor is untrained


# ---- the table


def outcome(agree: str, kl: float = 0.0, planted: str = "") -> Outcome:
    return Outcome([c == "1" for c in agree], kl, [c == "1" for c in planted])


def test_retention_and_recovered_gap() -> None:
    case = cases.Case("s", "1", 64, (1,))
    choices = [
        Variant("full", MemoryShape(), None, None),
        Variant("window", MemoryShape(2, 8), 8, None),
        Variant("masw", MemoryShape(2, 8, 4), 8, 4),
    ]
    rows = evaluate.summarise([Judged.of(case, choices, [outcome("111111"), outcome("000000", 2), outcome("101010", 1)])], [2, 5])
    full, window, masw = rows
    assert (full.tokens_per_iteration, window.tokens_per_iteration[2], masw.tokens_per_iteration[2]) == ({2: 3, 5: 6}, 1, 2)
    assert (full.retention, window.retention, masw.retention) == (1, 1 / 3, 2 / 3)
    assert (full.recovered_gap, window.recovered_gap, masw.recovered_gap) == (None, None, 0.5)
    assert (masw.n, masw.agreement, masw.kl) == (1, 0.5, 1)
    same = evaluate.summarise([Judged.of(case, choices, [outcome("000000")] * 3)], [2])
    assert same[2].recovered_gap is None  # nothing to recover


def test_agreement_of_a_recall_set_is_that_of_the_planted_tokens() -> None:
    choices = [Variant("full", MemoryShape(), None, None)]
    results = [
        Judged.of(cases.Case("recall", i, 64, (1,), "x"), choices, [outcome("1100", planted=p)])
        for i, p in (("1", "10"), ("2", "1"))
    ]
    (row,) = evaluate.summarise(results, [5])
    assert (row.n, row.agreement) == (2, 0.75)


def test_means_are_over_cases_of_one_cell() -> None:
    choices = [Variant("full", MemoryShape(), None, None)]
    results = [
        Judged.of(cases.Case(name, "1", context, (1,)), choices, [outcome(agree)])
        for name, context, agree in (("a", 64, "11"), ("a", 64, "00"), ("a", 96, "11"), ("b", 64, "00"))
    ]
    table = {(r.set, r.context): (r.n, r.agreement) for r in evaluate.summarise(results, [5])}
    assert table == {("a", 64): (2, 0.5), ("a", 96): (1, 1), ("b", 64): (1, 0)}


# ---- cases


def test_answers_are_cached_by_model_and_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.Case("set", "1", 40, tuple(range(40)))
    first = cases.answer(session(), case, 12)
    with monkeypatch.context() as patch:  # not `undo`, which would also give back the user's own cache
        patch.setattr(Session, "run", lambda *_: pytest.fail("decoded again"))
        assert cases.answer(session(), case, 12) == first
    other = Session(Pair("test", *(model("target", tiny_decoder(tiny_config(vocab=258), seed=9), (1,)) for _ in range(2))))
    assert cases.answer(other, case, 12) != first  # same name, other weights
    for path in (cases.cache_root() / "answers").iterdir():
        path.write_text("[1, ")
    assert cases.answer(session(), case, 12) == first


def test_recall_plants_a_fact_far_back() -> None:
    rows = [{"id": str(i), "text": WORDS * 30, "question": ""} for i in range(3)]
    found = cases.recall_cases(rows, TOKENIZER, 1024, 2)
    assert len(found) == 2 and found == cases.recall_cases(rows, TOKENIZER, 1024, 2)
    assert found[0].planted != found[1].planted
    for case in found:
        text = TOKENIZER.decode(list(case.prompt))
        assert case.planted is not None and text.count(case.planted) == 1
        assert len(case.prompt) <= 1024 and text.index(case.planted) < 0.45 * 1024
        said = TOKENIZER.encode(f"It is {case.planted}.")
        spots = cases.planted_positions(TOKENIZER, said, case.planted)
        assert TOKENIZER.decode([said[i] for i in spots]) == case.planted
        assert cases.planted_positions(TOKENIZER, TOKENIZER.encode("I do not know."), case.planted) == []
    with pytest.raises(UsageError, match="no room around a planted fact"):
        cases.recall_cases(rows, TOKENIZER, 200, 2)


def test_long_cases_fill_their_context() -> None:
    rows = [{"id": "short", "text": WORDS, "question": "Who?"}, {"id": "long", "text": WORDS * 9, "question": "Who?"}]
    (case,) = cases.long_cases("set", rows, TOKENIZER, 512, 4)
    assert case.id == "long" and 500 < len(case.prompt) <= 512
    assert "Who?" in TOKENIZER.decode(list(case.prompt))


GOOD = {"text": "some words", "question": "Why?"}
BAD_ROWS = {
    "not JSON": "{",
    "not an object": "[1, 2]",
    "a bare string": '"text"',
    "no text": '{"question": "Why?"}',
    "text is null": '{"text": null}',
    "text is a number": '{"text": 3}',
    "text is a list": '{"text": ["a"]}',
    "question is a list": '{"text": "a", "question": ["b"]}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_named_by_their_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + BAD_ROWS[name] + "\n")
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 3: rows are JSON objects") as error:
        cases.rows(path)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for content, phrase in ((b"", "has no rows"), (b"\n \n", "has no rows"), (b"\xff\xfe\x00", "not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=phrase):
            cases.rows(path)
    for missing in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            cases.rows(missing)


def test_rows_of_either_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    split = "a\u2028b\u0085c"  # characters that str.splitlines takes for line ends, and JSON leaves as they are
    rows = [GOOD, {"_id": 7, "context": split, "input": " Who? "}, {"id": "x", "text": "t", "question": None}]
    path.write_text("\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8", newline="")
    assert cases.rows(path) == [
        {"id": "1", "text": "some words", "question": "Why?"},
        {"id": "7", "text": split, "question": "Who?"},
        {"id": "x", "text": "t", "question": ""},
    ]


def test_numbers_are_finite(tmp_path: Path) -> None:
    """The whole measure on generated rows, every method in it."""
    pair = session()
    rows = [{"id": str(i), "text": WORDS * (8 + i), "question": ""} for i in range(2)]
    chosen = cases.long_cases("set", rows, TOKENIZER, 256, 2)
    table = evaluate.rows(evaluate.judge_all(pair, chosen, [16], [4], lambda r: None, sinks=4, answer_tokens=16), [5, 8])
    assert [r.method for r in table] == ["full", "window", "window-equal", "masw-untrained", "snapkv", "hybrid"]
    assert all(r.n == 2 and math.isfinite(r.kl) and 1 <= r.tokens_per_iteration[5] <= 6 for r in table)


# ---- packed draft weights


def test_packed_weights_are_measured_as_the_engine_drafts_with_them() -> None:
    """The same documents with each kind of weights, in one call; counting agreements gives what a run of its own gives."""
    pair = Session(load_pair("tiny", torch.device("cpu"), torch.bfloat16))
    prompts = [TOKENIZER.encode(f"{index}. " + WORDS * 2) for index in range(2)]
    chosen = [cases.Case("set", str(i), len(prompt), tuple(prompt)) for i, prompt in enumerate(prompts)]
    chosen = [replace(case, context=180) for case in chosen]
    wanted = ("full", "window")
    found = evaluate.judge_all(
        pair, chosen, [16], [4], lambda r: None, sinks=4, answer_tokens=24, methods=wanted, weights=["int8", "int4"]
    )
    table = evaluate.rows(found, [5])
    rows = {(row.method, row.weights): row for row in table}
    assert set(rows) == {(method, kind) for method in wanted for kind in ("plain", "int8", "int4")}
    for (method, kind), row in rows.items():
        speeds = []
        for prompt in prompts:
            job = pair.run(prompt, RunOptions(method, MemoryOptions(4, 16, 4), Settings(24, 5), "none", kind))
            list(job)
            speeds.append(job.summary().tokens_per_iteration or 0)
        assert row.n == 2 and row.tokens_per_iteration[5] == pytest.approx(sum(speeds) / 2), (method, kind)
        full = rows["full", "plain"].tokens_per_iteration[5]
        assert row.retention == pytest.approx(row.tokens_per_iteration[5] / full)
    assert rows["full", "plain"].kl == 0 < rows["full", "int8"].kl < rows["full", "int4"].kl


def test_a_failed_case_holds_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those would keep its KV and logits while the next case is judged."""

    def failing(*args: object) -> object:
        try:
            raise ValueError("first")
        except ValueError:
            raise RuntimeError("out of memory")  # noqa: B904 (a context is what is wanted)

    monkeypatch.setattr(evaluate, "judge", failing)
    case = cases.Case("set", "1", 90, tuple(TOKENIZER.encode(WORDS)))
    ((_, error),) = evaluate.judge_all(session(), [case], [16], [4], lambda r: None, sinks=4, answer_tokens=8)
    assert isinstance(error, RuntimeError) and error.__traceback__ is None and error.__context__ is None


def test_packed_weights_where_there_is_no_kernel_for_them() -> None:
    pair = session()
    chosen = [cases.Case("set", "1", 40, tuple(range(40)))]
    with pytest.raises(UsageError, match="int4 need a bf16 model"):
        list(evaluate.judge_all(pair, chosen, [16], [4], lambda r: None, sinks=4, answer_tokens=8, weights=["int4"]))
