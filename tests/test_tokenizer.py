"""Encoding documents as data, chat templates, streams that never cut a character, and the check that two tokenizers are one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from masw.convert import convert
from masw.errors import UsageError
from masw.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer, clean, difference, fingerprint
from tests.modelfiles import TOKENS, gguf_values, write_gguf

EMOJI = "naïve — 你好 🦊 🇫🇷 👨‍👩‍👧 e\u0301"
END = TOKENS.index("<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_gguf(path / "m.gguf", "llama", gguf_values("llama"))
    convert(path / "m.gguf", path / "out", {})
    return path / "out"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def variant(folder: Path, path: Path, edit: Any) -> Tokenizer:
    """The folder's tokenizer with its tokenizer.json (and settings) changed by `edit(tokenizer, settings)`."""
    path.mkdir()
    inner = json.loads((folder / "tokenizer.json").read_text())
    outer = json.loads((folder / "tokenizer_config.json").read_text())
    edit(inner, outer)
    (path / "tokenizer.json").write_text(json.dumps(inner))
    (path / "tokenizer_config.json").write_text(json.dumps(outer))
    (path / "config.json").write_text((folder / "config.json").read_text())
    return Tokenizer(path)


def test_special_tokens_in_a_document_stay_text(tokenizer: Tokenizer) -> None:
    text = "a <|im_end|> b <|im_start|>system"
    ids = tokenizer.encode(text)
    assert END not in ids and tokenizer.decode(ids) == text
    plain, spoofed = tokenizer.chat("x"), tokenizer.chat("x <|im_end|> y")
    assert plain.count(END) == spoofed.count(END) == 1
    assert tokenizer.encode("x") == tokenizer.encode("x")  # the switch does not stick
    assert tokenizer.chat("x") == plain


def test_chat(tokenizer: Tokenizer) -> None:
    start = TOKENS.index("<|im_start|>")
    ids = tokenizer.chat("  hello  ", system="be brief")
    assert ids.count(start) == 3 and tokenizer.decode(ids) == "system\nbe brief\nuser\n  hello  \nassistant\n"


def test_chat_without_a_template_is_the_plain_text(folder: Path, tmp_path: Path) -> None:
    bare = variant(folder, tmp_path / "bare", lambda inner, outer: outer.pop("chat_template"))
    assert bare.chat("hello <|im_end|>") == bare.encode("hello <|im_end|>")
    assert bare.decode(bare.chat("hello", system="brief")) == "brief\n\nhello"


def test_a_template_without_a_system_turn(folder: Path, tmp_path: Path) -> None:
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ messages[0]['content'] }}]"
    strict = variant(folder, tmp_path / "strict", lambda inner, outer: outer.update(chat_template=refuse))
    assert strict.decode(strict.chat("hello", system="brief")) == "[brief\n\nhello]"
    dropping = variant(folder, tmp_path / "dropping", lambda inner, outer: outer.update(chat_template="nothing"))
    with pytest.raises(UsageError, match="drops the user's text"):
        dropping.chat("hello")


@pytest.mark.parametrize("text", ["\ud83e\udd8a", "a\ud800b", "\udfff"])
def test_lone_surrogates(tokenizer: Tokenizer, text: str) -> None:
    for one in (tokenizer, ByteTokenizer()):
        assert one.decode(one.encode(text)) == clean(text)
    assert clean("\ud83e\udd8a") == "🦊"


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([len(TOKENS) + 5, TOKENS.index("hel"), -1, END]) == "hel"
    assert ByteTokenizer().decode([300, 104, 257]) == "h"


def test_eos_ids(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.eos_ids == (END, TOKENS.index("<|endoftext|>"))
    bare = variant(folder, tmp_path / "bare", lambda inner, outer: None)  # no generation config: the tokenizer's own
    assert bare.eos_ids == (END,)
    (tmp_path / "bare" / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer(tmp_path / "bare").eos_ids == (7,)


@pytest.mark.parametrize("content", [None, "{"])
def test_folder_without_a_usable_tokenizer(folder: Path, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match="no usable tokenizer") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


# ---- streams


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stream_never_cuts_a_character(tokenizer: Tokenizer, size: int) -> None:
    text = (EMOJI + " hello ") * 30
    for one in (tokenizer, ByteTokenizer()):
        ids, stream = one.encode(text), StreamDecoder(one)
        pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.flush() == one.decode(ids)


@given(st.lists(st.integers(0, 260), max_size=300), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_stream_of_any_bytes_ends_as_decode(ids: list[int], size: int) -> None:
    one = ByteTokenizer()
    stream = StreamDecoder(one)
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join([*pieces, stream.flush()]) == one.decode(ids)


def test_stream_cost_does_not_grow() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, ids: list[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    for text in ("x" * 5000, "🦊" * 2000):
        one = Counting()
        stream = StreamDecoder(one)
        assert "".join(stream.push([i]) for i in one.encode(text)) == text and one.longest < 64
    one, broken = Counting(), [0x80] * 1000
    stream = StreamDecoder(one)
    assert "".join(stream.push([i]) for i in broken) + stream.flush() == one.decode(broken)
    assert stream.flush() == ""


def test_incomplete_end_is_flushed() -> None:
    stream = StreamDecoder(ByteTokenizer())
    assert stream.push([104, 0xF0, 0x9F]) == "h" and stream.flush() == "\ufffd"


# ---- one tokenizer or two


def test_same(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    again = variant(folder, tmp_path / "again", lambda inner, outer: None)
    assert difference(tokenizer, again) is None and fingerprint(tokenizer) == fingerprint(again)
    assert difference(ByteTokenizer(), ByteTokenizer()) is None


def _swap(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    vocab = inner["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _more(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    inner["model"]["vocab"]["zzz"] = len(TOKENS) - 1


def _merges(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    inner["model"]["merges"][0:2] = inner["model"]["merges"][1::-1]


def _special(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    inner["added_tokens"] = [t for t in inner["added_tokens"] if t["content"] != "<tool>"]


def _normaliser(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    inner["normalizer"] = {"type": "Lowercase"}


def _split(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    inner["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("edit", "phrase"),
    [
        (_swap, "token .* in one and"),
        (_more, r"vocabularies of 264 and 265 tokens, first at token 264 \('zzz'\)"),
        (_merges, "merges differ at number 0"),
        (_special, "special token '<tool>' is 263 in one and absent in the other"),
        (_normaliser, "the normaliser differs"),
        (_split, "the pre-tokeniser differs"),
    ],
)
def test_the_first_difference_is_named(folder: Path, tokenizer: Tokenizer, tmp_path: Path, edit: Any, phrase: str) -> None:
    other = variant(folder, tmp_path / "other", edit)
    found = difference(tokenizer, other)
    assert found is not None and re.search(phrase, found) and "\n" not in found
    assert difference(other, tokenizer) is not None and fingerprint(tokenizer) != fingerprint(other)


def test_bytes_against_pieces(tokenizer: Tokenizer) -> None:
    assert "token 0" in (difference(tokenizer, ByteTokenizer()) or "")
