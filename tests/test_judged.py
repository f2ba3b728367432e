"""An interrupted measure: what is done is printed and kept, a case that fails costs no other, and nothing is computed twice."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from masw import cases, evaluate, judged
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.errors import UsageError
from masw.evaluate import Judged, Outcome
from masw.snapkv import SnapMemory
from tests.helpers import tiny_config, tiny_decoder, trained_adaptor
from tests.test_cli import masw, one_line  # noqa: F401
from tests.test_data import WORDS, write

Masw = Callable[..., tuple[int, str, str]]


# ---- one pass over a prompt serves every budget


@pytest.mark.parametrize("stride", [None, 8])
@pytest.mark.parametrize("chunk", [16, 200])
def test_a_taken_prompt_is_a_read_one(stride: int | None, chunk: int) -> None:
    decoder = tiny_decoder(tiny_config())
    adaptor = trained_adaptor(decoder) if stride else None
    ids = torch.tensor([Random(3).choices(range(decoder.config.vocab), k=90)])
    options: dict[str, Any] = {"tokens": 96, "device": decoder.device, "dtype": decoder.dtype, "adaptor": adaptor}

    def read(memory: SnapMemory, last: bool) -> SnapMemory:
        memory.prompt_ends(90)
        for start in range(0, 90, chunk):
            decoder.forward(ids[:, start : start + chunk], memory)
            if last or start + chunk < 90:
                memory.commit()
        return memory

    reader = read(SnapMemory(decoder.config, MemoryShape(0, 8, stride, budget=8), **options), last=False)
    for shape in (MemoryShape(2, 16, stride, budget=4), MemoryShape(4, 32, stride, budget=2)):
        taken, mine = SnapMemory(decoder.config, shape, **options), SnapMemory(decoder.config, shape, **options)
        taken.take_prompt(reader)
        read(mine, last=True)
        assert torch.equal(taken.selection, mine.selection) and taken.selection.numel() > 0  # type: ignore[arg-type,union-attr]
        assert taken.nbytes == mine.nbytes and taken.committed == mine.committed == 90
        for a, b in zip(taken.snapshot(), mine.snapshot(), strict=True):
            assert torch.equal(a, b)
        more = ids[:, :5]
        assert torch.equal(decoder.forward(more, taken), decoder.forward(more, mine))
        with pytest.raises(ValueError, match="a prompt is taken by a new memory"):
            taken.take_prompt(reader)
    other = SnapMemory(decoder.config, MemoryShape(2, 16, 16, budget=4), **{**options, "adaptor": trained_adaptor(decoder)})
    with pytest.raises(ValueError, match="other slots"):
        other.take_prompt(reader)


def test_a_prompt_is_read_no_oftener_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 windows and 2 strides: one whole pass for `full` and all of snapkv, one a stride for hybrid, one for each of the rest."""
    decoder = tiny_decoder(tiny_config())
    untrained, trained = Adaptor.copied(decoder, AdaptorInfo("tiny", ())), trained_adaptor(decoder)
    choices = evaluate.variants([64, 128], [4, 8], 512, untrained, lambda r: trained, 4)
    case = cases.Case("set", "1", 512, tuple(Random(1).choices(range(decoder.config.vocab), k=512)))
    read: Counter[str] = Counter()
    real = Decoder.forward

    def forward(self: Decoder, tokens: torch.Tensor, memory: Any, *rest: Any) -> torch.Tensor:
        read["prompt" if tokens.shape[1] > 32 else "answer"] += tokens.shape[1]
        return real(self, tokens, memory, *rest)

    monkeypatch.setattr(Decoder, "forward", forward)
    answer = [1, 2, 3, 4, 5, 6]
    known = evaluate.Known()

    def judge() -> list[Outcome]:
        read.clear()
        return evaluate.judge(decoder, choices, case, answer, None, decoder.config.vocab, known)  # type: ignore[arg-type]

    first = judge()
    assert len(choices) == 23
    # full and snapkv 1 (not 5), hybrid 2 (not 4), window 2, masw-untrained 4, masw 4, window-equal 2: of its four windows of 192, 128,
    # 256 and 192 tokens one is that of `window`, two are the same.
    assert read == {"prompt": 15 * 511, "answer": 21 * len(answer)}
    again = judge()
    # What needs no adaptor is known by now: hybrid, masw and masw-untrained are left.
    assert read == {"prompt": 10 * 511, "answer": 12 * len(answer)}
    assert again == first


# ---- the file


def some(name: str = "s", agree: str = "101") -> Judged:
    return Judged(name, 64, "1", [("full", None, None, "plain", Outcome([c == "1" for c in agree], 0.25, [True]))])


def test_a_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    first, second = (cases.Case("s", "1", 64, (i, 2, 3)) for i in (1, 2))
    definition = {"pair": "tiny", "windows": (8, 16)}
    file = judged.JudgedFile(path, definition)
    file.add(first, some())
    file.add(second, Judged("s", 64, "2", []))
    again = judged.JudgedFile(path, definition)
    assert again.get(first) == some() and again.get(second) == Judged("s", 64, "2", [])
    assert again.get(cases.Case("s", "1", 64, (1, 2))) is None
    whole = path.read_text()
    path.write_text(whole[:-20])  # cut by a crash in the second case
    cut = judged.JudgedFile(path, definition)
    assert cut.get(first) == some() and cut.get(second) is None
    cut.add(second, Judged("s", 64, "2", []))
    assert path.read_text() == whole
    with pytest.raises(UsageError, match="another windows"):
        judged.JudgedFile(path, {**definition, "windows": [8]})
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "content", ["{\n", "[]\n", '{"type": "header", "schema": 9, "definition": {}}\n', "x", '{"type": "case"}\n', "\xff"]
)
def test_other_files_are_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(content, encoding="latin-1")
    for use in (judged.check, lambda p: judged.JudgedFile(p, {})):
        with pytest.raises(UsageError, match="is not a file of cases"):
            use(path)
    assert path.read_text(encoding="latin-1") == content


# ---- the command


@pytest.fixture
def call(masw: Masw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Masw:  # noqa: F811
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))
    rows = write(tmp_path / "reports.jsonl", [{"id": str(i), "text": f"{i} {WORDS}" * 12, "question": "Why?"} for i in range(3)])
    small = ("--docs", 3, "--contexts", "512", "--windows", "16", "--strides", "8", "--answer-tokens", 6, "--adaptor", "none")

    def run(*options: object) -> tuple[int, str, str]:
        return masw("eval-adaptor", "--pair", "tiny", *small, "--data", rows, *options)

    return run


def at_case(monkeypatch: pytest.MonkeyPatch, number: int, what: Callable[[], object]) -> list[str]:
    """`what()` happens when the `number`-th case of a command is judged; the list gets the ids of all that are."""
    seen: list[str] = []
    real = evaluate.judge

    def judge(decoder: Any, choices: Any, case: cases.Case, *rest: Any) -> Any:
        seen.append(case.id)
        if len(seen) == number:
            what()
        return real(decoder, choices, case, *rest)

    monkeypatch.setattr(evaluate, "judge", judge)
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_what_is_done_and_the_command_goes_on(
    call: Masw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    out_file = tmp_path / "cases.jsonl"
    with monkeypatch.context() as patch:
        at_case(patch, 3, lambda: os.kill(os.getpid(), number))
        code, out, err = call("--json", "--out", out_file)
    assert code == 130
    assert "interrupted with 2 of 3 cases measured" in one_line(err) and str(out_file) in one_line(err)
    report = json.loads(out.splitlines()[-1])
    assert report["partial"] and all(row["partial"] and row["n"] == 2 for row in report["rows"])
    seen = at_case(monkeypatch, 0, lambda: None)
    code, out, err = call("--json", "--out", out_file)
    assert code == 0 and seen == ["2"] and "2 of 3 cases are in" in err
    whole = json.loads(out.splitlines()[-1])
    assert "partial" not in whole and all("partial" not in row and row["n"] == 3 for row in whole["rows"])
    code, out, _ = call("--json")
    assert json.loads(out.splitlines()[-1])["rows"] == whole["rows"]  # as if it had never been interrupted
    assert len(seen) == 4


def test_an_interrupt_without_a_file(call: Masw, monkeypatch: pytest.MonkeyPatch) -> None:
    at_case(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, out, err = call()
    assert code == 130 and "1 (partial)" in out
    assert "interrupted with 1 of 3 cases measured" in one_line(err) and "--out FILE.jsonl" in one_line(err)


def test_a_case_that_fails_costs_no_other(call: Masw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("can't allocate memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as patch:
        at_case(patch, 1, fail)
        code, out, err = call("--json", "--out", tmp_path / "cases.jsonl")
    assert code == 3
    assert "1 of 3 cases failed (reports, 512 tokens, 0: out of memory" in one_line(err)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert all(row["partial"] and row["n"] == 2 for row in rows)
    seen = at_case(monkeypatch, 0, lambda: None)
    code, out, _ = call("--json", "--out", tmp_path / "cases.jsonl")
    assert code == 0 and seen == ["0"]
    assert all(row["n"] == 3 for row in json.loads(out.splitlines()[-1])["rows"])


def test_a_file_of_another_measure_is_refused(call: Masw, tmp_path: Path) -> None:
    out_file = tmp_path / "cases.jsonl"
    assert call("--out", out_file)[0] == 0
    before = out_file.read_text()
    for options, phrase in ((("--sinks", 3), "another sinks"), (("--adaptor", "quiet"), "another adaptor")):
        code, out, err = call("--out", out_file, *options)
        assert code == 2 and phrase in one_line(err) and out == ""
    (tmp_path / "words.txt").write_text("words")
    code, _, err = call("--out", tmp_path / "words.txt")
    assert code == 2 and "is not a file of cases" in one_line(err)
    assert out_file.read_text() == before and (tmp_path / "words.txt").read_text() == "words"
    code, _, _ = call("--out", out_file, "--docs", 2, "--gammas", "2")  # fewer cases, other gammas: the same cases serve
    assert code == 0
