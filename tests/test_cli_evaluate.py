"""`masw eval-adaptor` as a user meets it: its rows, what it keeps and goes on from, and one line for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from masw import cases
from masw.adaptor import Adaptor, AdaptorInfo
from masw.catalogue import draft_of
from masw.errors import UsageError
from masw.tokenizer import ByteTokenizer
from masw.zoo import load_pair
from tests.test_cli import masw, one_line  # noqa: F401
from tests.test_data import WORDS, write

Masw = Callable[..., tuple[int, str, str]]

ROW_KEYS = [
    "set", "context", "window", "stride", "method", "weights", "n", "agreement", "tokens_per_iteration", "kl", "retention",
    "recovered_gap",
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))
    path = tmp_path / "reports.jsonl"
    write(path, [{"id": str(i), "text": f"{i} {WORDS}" * 12, "question": "What was spent?"} for i in range(3)])
    return path


SMALL = ("--pair", "tiny", "--docs", 2, "--contexts", "512", "--windows", "16", "--strides", "4,8", "--answer-tokens", 12)


def test_eval_adaptor_prints_the_agreed_object(masw: Masw, rows: Path, tmp_path: Path) -> None:  # noqa: F811
    decoder = load_pair("tiny", torch.device("cpu"), torch.float32).draft.decoder
    Adaptor.copied(decoder, AdaptorInfo("tiny-2", (4, 8))).save(tmp_path / "a.safetensors")
    code, out, _ = masw(
        "eval-adaptor", *SMALL, "--data", rows, "--adaptor", tmp_path / "a.safetensors", "--dtype", "fp32", "--json"
    )
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert list(report) == ["rows", "provenance"]
    assert all(list(row) == ROW_KEYS for row in report["rows"])
    assert [(r["method"], r["window"], r["stride"]) for r in report["rows"]] == [
        ("full", None, None),
        ("window", 16, None),
        ("window-equal", 16, 4),
        ("masw-untrained", 16, 4),
        ("snapkv", 16, 4),
        ("hybrid", 16, 4),
        ("masw", 16, 4),
        ("window-equal", 16, 8),
        ("masw-untrained", 16, 8),
        ("snapkv", 16, 8),
        ("hybrid", 16, 8),
        ("masw", 16, 8),
    ]
    for row in report["rows"]:
        assert (row["set"], row["context"], row["n"]) == ("reports", 512, 2)
        assert list(row["tokens_per_iteration"]) == ["5", "8"] and row["tokens_per_iteration"]["5"] >= 1
    full = report["rows"][0]
    assert (full["kl"], full["retention"]) == (0, 1)
    assert report["provenance"]["adaptors"]["4"]["file"] == "a.safetensors"
    assert {"pair", "docs", "models", "commit", "torch", "dtype", "answer_tokens"} <= report["provenance"].keys()
    code, out, _ = masw("eval-adaptor", *SMALL, "--data", rows, "--data", rows, "--adaptor", "none")
    assert code == 0 and out.splitlines()[0].split()[:7] == ["set", "context", "W", "r", "method", "weights", "n"]
    assert " masw " not in out and "masw-untrained" in out


def test_eval_adaptor_of_a_quiet_start(masw: Masw, rows: Path) -> None:  # noqa: F811
    code, out, _ = masw("eval-adaptor", *SMALL, "--data", rows, "--adaptor", "quiet", "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 0 and {"masw", "masw-untrained"} <= {row["method"] for row in report["rows"]}
    assert all(a["file"] is None and a["bias"] for a in report["provenance"]["adaptors"].values())


def test_eval_adaptor_on_planted_facts(masw: Masw, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The tiny target repeats nothing, so its answer is put into its mouth; without it the recall cases are left out."""
    real = cases.answer

    def answer(session: Any, case: cases.Case, tokens: int) -> list[int]:
        return ByteTokenizer().encode(f"It is {case.planted}.") if case.planted else real(session, case, tokens)

    code, out, _ = masw("eval-adaptor", *SMALL, "--data", rows, "--recall", "--adaptor", "none", "--json")
    assert code == 0 and {row["set"] for row in json.loads(out.splitlines()[-1])["rows"]} == {"reports"}
    monkeypatch.setattr(cases, "answer", answer)
    code, out, _ = masw("eval-adaptor", *SMALL, "--data", rows, "--recall", "--adaptor", "none", "--json")
    found = json.loads(out.splitlines()[-1])["rows"]
    assert code == 0 and {row["set"] for row in found} == {"reports", "recall"}
    assert all(list(row) == ROW_KEYS for row in found)
    assert all(row["n"] == 2 for row in found if row["set"] == "recall")


BAD_MEASURES: list[tuple[tuple[object, ...], str]] = [
    (("--contexts", "2q"), "--contexts takes whole numbers like 2k,4096, not '2q'"),
    (("--contexts", "\u00b2"), "--contexts takes whole numbers"),
    (("--contexts", ""), "--contexts takes whole numbers"),
    (("--contexts", "8k"), "exceed the pair's 8,192 tokens"),
    (("--contexts", "4k"), "no document fills a context of 4,096 tokens"),
    (("--contexts", "100"), "no room"),
    (("--contexts", "230", "--recall"), "no room around a planted fact"),
    (("--windows", "4", "--strides", "8"), "stride 8 is longer than the window 4"),
    (("--gammas", "17"), "rollback window of 16"),
    (("--sinks", -1), "sinks must be"),
    (("--docs", 0), "--docs must be at least 1"),
    (("--draft-weights", "plain,int3"), "draft weights 'int3' are unknown; use some of plain, int8, int4"),
    (("--draft-weights", "int4", "--dtype", "fp32"), "draft weights int4 need a bf16 model"),
    (("--answer-tokens", 1), "--answer-tokens at least 2"),
    (("--adaptor", "nowhere.safetensors"), "no adaptor at"),
    (("--pair", "tinny"), "did you mean tiny"),
    (("--data", "nowhere.jsonl"), "cannot read nowhere.jsonl"),
]


@pytest.mark.parametrize(("options", "phrase"), BAD_MEASURES, ids=[" ".join(map(str, o)) for o, _ in BAD_MEASURES])
def test_bad_measures(masw: Masw, rows: Path, options: tuple[object, ...], phrase: str) -> None:  # noqa: F811
    code, out, err = masw("eval-adaptor", *SMALL, "--data", rows, *options)
    assert code == 2 and phrase in one_line(err), err
    assert out == ""


def test_sets_need_names_of_their_own(masw: Masw, rows: Path, tmp_path: Path) -> None:  # noqa: F811
    for name in (f"other/{rows.name}", "recall.jsonl"):
        twin = tmp_path / name
        twin.parent.mkdir(exist_ok=True)
        twin.write_bytes(rows.read_bytes())
        code, _, err = masw("eval-adaptor", *SMALL, "--data", rows, "--data", twin)
        assert code == 2 and f"two sets would be called '{twin.stem}'" in one_line(err)


def test_an_adaptor_for_another_draft_or_stride_is_refused(masw: Masw, rows: Path, tmp_path: Path) -> None:  # noqa: F811
    pair = load_pair("tiny", torch.device("cpu"), torch.float32)
    path = tmp_path / "a.safetensors"
    for name, strides, phrase in (
        ("tiny-4", (4, 8), "belongs to the draft 'tiny-4'"),
        ("tiny-2", (4,), "trained for stride 4, not 8"),
    ):
        Adaptor.copied(pair.draft.decoder, AdaptorInfo(name, strides)).save(path)
        code, _, err = masw("eval-adaptor", *SMALL, "--data", rows, "--adaptor", path)
        assert code == 2 and phrase in one_line(err)


def test_a_draft_needs_a_name() -> None:
    with pytest.raises(UsageError, match="unknown model"):
        draft_of("nothing-like-it")
