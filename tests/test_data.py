"""Training text: what is read, how it is cut, and what each bad file says."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from masw import data
from masw.curriculum import Curriculum
from masw.errors import MaswError, UsageError
from masw.prompts import TASKS
from masw.stages import Stage
from masw.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
WORDS = "the report of the committee on water and roads says that the money was spent in three years "


def silent(_text: str) -> None:
    pass


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def texts(tmp_path: Path, sources: list[str], seed: int = 0) -> data.Texts:
    return data.texts(sources, TOKENIZER, tmp_path / "cache", seed, silent)


def answers(tmp_path: Path, rows: list[dict[str, Any]], seed: int = 0) -> data.Answers:
    return data.answers([write(tmp_path / "sft.jsonl", rows)], TOKENIZER, tmp_path / "cache", seed, silent)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines_become_tokens_with_an_end_token(tmp_path: Path, name: str) -> None:
    file = texts(tmp_path, [write(tmp_path / name, [{"text": "one"}, {"text": "two"}])]).file
    assert file.tokens.tolist() == [*b"one", 257, *b"two", 257]
    assert file.tokens.dtype == np.uint16
    assert file.pieces.tolist() == [[0, 4], [4, 8]]


def test_a_folder_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("second")
    (folder / "a.md").write_text("first")
    (folder / "c.png").write_bytes(b"\x89PNG")
    assert texts(tmp_path, [str(folder)]).file.tokens.tolist() == [*b"first", 257, *b"second", 257]


def test_large_ids_are_kept_in_32_bits(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [70_000 + b for b in text.encode()]

    file = data.texts([write(tmp_path / "a.jsonl", [{"text": "abc"}])], Wide(), tmp_path / "cache", 0, silent).file
    assert file.tokens.dtype == np.uint32
    assert file.piece(0, 0).tolist() == [70_097, 70_098, 70_099, 257]


def test_tokens_are_cached_and_a_changed_source_is_read_again(tmp_path: Path) -> None:
    said: list[str] = []
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])

    def read() -> list[int]:
        file: list[int] = data.texts([path], TOKENIZER, tmp_path / "cache", 0, said.append).file.tokens.tolist()
        return file

    assert read() == read()
    assert len(said) == 1
    write(tmp_path / "a.jsonl", [{"text": "two"}])
    assert read() == [*b"two", 257]
    assert len(said) == 2


def test_an_interrupted_tokenisation_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    monkeypatch.setattr(data, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        texts(tmp_path, [path])
    monkeypatch.undo()
    assert texts(tmp_path, [path]).file.tokens.tolist() == [*b"one", 257]


def test_rows_cover_the_text_once_a_pass_in_an_order_of_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": WORDS * 30}])
    one, same, other = texts(tmp_path, [path], 1), texts(tmp_path, [path], 1), texts(tmp_path, [path], 2)
    blocks = len(one.file.tokens) // 64
    first = [tuple(one.row(i, 64)) for i in range(blocks)]
    flat = one.file.tokens[: blocks * 64].reshape(blocks, 64)
    assert sorted(first) == sorted(map(tuple, flat.tolist()))
    assert first == [tuple(same.row(i, 64)) for i in range(blocks)]
    assert first != [tuple(other.row(i, 64)) for i in range(blocks)]
    assert first != [tuple(one.row(i + blocks, 64)) for i in range(blocks)]


@pytest.mark.parametrize("length", [120, 200, 400, 2000])
def test_an_answer_row_has_the_prompt_of_inference_and_marks_the_answer(tmp_path: Path, length: int) -> None:
    rows = [{"text": WORDS * 5, "question": "Who paid?", "reference": "the state"}]
    row, where = answers(tmp_path, rows).row(0, length)
    assert len(row) == length
    assert bytes(row[where][:-1].tolist()) == b"the state"
    assert row[where][-1] == 257
    after = TASKS["question"].replace("{question}", "Who paid?")
    room = max(0, length - 1 - len(after) - len("the state") - 1)
    assert row[: where.start].tolist() == TOKENIZER.chat((WORDS * 5)[:room] + after)[-where.start :]


def test_an_answer_longer_than_half_a_row_is_cut(tmp_path: Path) -> None:
    rows = [{"text": WORDS, "question": "What?", "answer": WORDS * 9}]
    row, where = answers(tmp_path, rows).row(0, 300)
    assert where == slice(150, 300)
    assert len(row) == 300


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no text to train on"),
        (b"\n\n", "no text to train on"),
        (b'{"text": "  "}\n', "no text to train on"),
        (b'{"text": "one"}\nnot json\n', "line 2"),
        (b'{"text": "one"}\n[1]\n', "line 2"),
        (b'{"body": "one"}\n', "'text'"),
        (b'{"text": 3}\n', "'text'"),
        (b'{"text": "\xff"}\n', "UTF-8"),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        texts(tmp_path, [str(path)])
    assert "\n" not in str(caught.value)


def test_a_torn_gzip_file(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl.gz", [{"text": WORDS * 20}]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="copy the file again"):
        texts(tmp_path, [str(path)])
    path.write_bytes(b"plain")
    with pytest.raises(UsageError, match="copy the file again"):
        texts(tmp_path, [str(path)])


def test_other_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("text\n")
    for source, words in (
        (str(tmp_path / "missing.jsonl"), "check the path"),
        (str(tmp_path / "empty"), "no text files"),
        (str(tmp_path / "a.csv"), "is not training text"),
    ):
        with pytest.raises(UsageError, match=words):
            texts(tmp_path, [source])
    with pytest.raises(UsageError, match="at least one source"):
        texts(tmp_path, [])


def test_a_hub_dataset_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        texts(tmp_path, ["hub:someone/something"])


def test_too_little_text_for_one_row(tmp_path: Path) -> None:
    short = texts(tmp_path, [write(tmp_path / "a.jsonl", [{"text": "few"}])])
    with pytest.raises(UsageError, match="fewer than one row of 64"):
        short.row(0, 64)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    (tmp_path / "file").write_text("")
    with pytest.raises(MaswError, match="cannot keep tokens"):
        data.texts([path], TOKENIZER, tmp_path / "file" / "cache", 0, silent)


# ---- the curriculum


def curriculum(tmp_path: Path, *stages: str, **options: Any) -> Curriculum:
    source = texts(tmp_path, [write(tmp_path / "a.jsonl", [{"text": WORDS * 60}])])
    rows = [{"text": WORDS * 5, "question": "Who?", "reference": f"person {i}"} for i in range(5)]
    known: dict[str, Any] = {"sinks": 2, "windows": (8, 16), "strides": (4, 8), "separator": [10, 10], "seed": 3}
    return Curriculum(source, answers(tmp_path, rows), tuple(map(Stage.parse, stages)), **known | options)


def test_stages_are_parsed_and_counted() -> None:
    assert Stage.parse("384x8:300k:2/1/0") == Stage(384, 8, 300_000, 2, 1, 0)
    assert Stage.parse("64x1:1.5m") == Stage(64, 1, 1_500_000, 0, 1, 0)
    assert Stage.parse("64x1:1.001k").tokens == 1001
    assert Stage(64, 2, 1000).steps == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "384",
        "384x8",
        "ax8:1k",
        "384x8:k",
        "384x8:1k:1/2",
        "384x8:1k:0/0/0",
        "8x1:1k",
        "64x0:1k",
        "64x1:1k:1/-1/1",
        "64x1:inf",
        "64x1:nank",
        "64x1:99.5",
        "128x99999999:1k",
    ],
)
def test_bad_stages(text: str) -> None:
    with pytest.raises(UsageError):
        Stage.parse(text)


@pytest.mark.parametrize("documents", [False, True])
def test_rows_of_answers_score_the_answer_or_all_before_its_end(tmp_path: Path, documents: bool) -> None:
    made = curriculum(tmp_path, "400x2:2k:0/0/1", score_documents=documents)
    rows = [made.answers.row(i, 400) for i in range(2)] if made.answers else []
    for (_, answer), scored in zip(rows, made.batch(0).scored, strict=True):
        # position i says whether token i + 1 is predicted; padding behind the answer never is
        first = 0 if documents else answer.start - 1
        assert scored.nonzero().flatten().tolist() == list(range(first, answer.stop - 1))


def test_reconstruction_rows_score_the_second_copy_only(tmp_path: Path) -> None:
    made = curriculum(tmp_path, "129x4:2k:1/0/0", most_pieces=1)
    batch = made.batch(0)
    half = (129 - 2) // 2
    for row, scored in zip(batch.tokens, batch.scored, strict=True):
        assert row[:half].tolist() == row[half + 2 : 2 * half + 2].tolist()
        # scored[i] is about token i + 1
        assert scored.nonzero().flatten().tolist() == list(range(half + 1, 2 * half + 1))


def test_a_passage_comes_again_in_shuffled_pieces(tmp_path: Path) -> None:
    made = curriculum(tmp_path, "514x8:20k:1/0/0", most_pieces=8)
    rows = made.batch(0).tokens
    assert all(sorted(row[:256].tolist()) == sorted(row[258:].tolist()) for row in rows)
    assert any(row[:256].tolist() != row[258:].tolist() for row in rows)


def test_a_step_is_made_again_from_its_number_and_the_rows_drawn(tmp_path: Path) -> None:
    stages = ("64x3:600:1/1/1", "128x2:800:1/1/1")
    one, two = curriculum(tmp_path, *stages), curriculum(tmp_path, *stages)
    assert [one.stage(s).length for s in range(one.steps)] == [64] * 4 + [128] * 4
    drawn = []
    batches = []
    for step in range(one.steps):
        drawn.append(dict(one.drawn))
        batches.append(one.batch(step))
    two.drawn.update(drawn[5])
    again = two.batch(5)
    assert again.tokens.equal(batches[5].tokens)
    assert again.scored.equal(batches[5].scored)
    assert again.shape == batches[5].shape
    assert one.tokens_before(one.steps) == 4 * 192 + 4 * 256


def test_windows_leave_slots_something_to_do(tmp_path: Path) -> None:
    made = curriculum(tmp_path, "64x1:6k", windows=(16, 32))
    assert {made.batch(step).shape.window for step in range(20)} == {16}
    assert {made.batch(step).shape.stride for step in range(20)} == {4, 8}


def test_stages_without_their_source(tmp_path: Path) -> None:
    only = Stage.parse("64x1:1k:0/0/1")
    with pytest.raises(UsageError, match="question source"):
        Curriculum(None, None, (only,), 2, (8,), (4,), [10], 0)
    with pytest.raises(UsageError, match="text source"):
        Curriculum(None, None, (Stage(64, 1, 100),), 2, (8,), (4,), [10], 0)
