"""Text <-> token ids: a model folder's own tokenizer, one of plain bytes for the `tiny` pair, and a decoder for streams."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from masw.errors import UsageError

HELD_BACK = "\ufffd"  # what an incomplete character decodes to


class AnyTokenizer(Protocol):
    """What the engine and the command line need of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def chat(self, document_prompt: str, system: str | None = None) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def description(self) -> dict[str, Any]: ...


def clean(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Tokenizer:
    """The tokenizer of a model folder. Documents are data: text that looks like a special token stays text."""

    def __init__(self, folder: Path) -> None:
        # transformers takes a second to import; commands that load no model must not pay for it.
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            self._backend = self._inner.backend_tokenizer
        except Exception as error:  # transformers raises anything from OSError to a bare Exception here
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise UsageError(f"{folder} has no usable tokenizer ({reason}); fetch the model again") from None
        self._specials = tuple(str(t) for t in self._inner.added_tokens_decoder.values())
        self._eos_ids = _eos_ids(folder, self._inner.eos_token_id)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text, the generation config's first."""
        return self._eos_ids

    @property
    def size(self) -> int:
        """Tokens known; a model's vocabulary is at least that large (the rest is padding)."""
        return len(self._inner)

    def encode(self, text: str) -> list[int]:
        """Plain text -> ids; nothing is added around it, and special tokens spelled out in it are read as characters."""
        return self._ids(clean(text), split_special_tokens=True)

    def chat(self, document_prompt: str, system: str | None = None) -> list[int]:
        """`document_prompt` as the user's turn in the model's chat template, up to where the answer begins.

        A model without a template gets the plain text, with the start token that its tokenizer asks for.
        """
        text = clean(document_prompt)
        if not self._inner.chat_template:
            whole = text if system is None else f"{clean(system)}\n\n{text}"
            return self._ids(whole, add_special_tokens=True, split_special_tokens=True)
        # Rendering around a stand-in keeps the template from trimming or reading the document, whose special tokens stay text.
        stand_in = "\x00document\x00"
        before, found, after = self._render(stand_in, system).partition(stand_in)
        if not found:
            raise UsageError("the model's chat template drops the user's text; use another model or a plain prompt")
        if any(token in text for token in self._specials):
            return [*self._ids(before), *self.encode(text), *self._ids(after)]
        return self._ids(before + text + after)  # in one go, so that words at the seams merge as the model knows them

    def _ids(self, text: str, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        # `split_special_tokens` switches the whole tokenizer over, so it is set only where it matters.
        split = split_special_tokens and any(token in text for token in self._specials)
        kwargs = {"split_special_tokens": True} if split else {}
        return list(self._inner(text, add_special_tokens=add_special_tokens, verbose=False, **kwargs)["input_ids"])

    def _render(self, content: str, system: str | None) -> str:
        from jinja2.exceptions import TemplateError

        user = {"role": "user", "content": content}
        try:
            messages = [user] if system is None else [{"role": "system", "content": clean(system)}, user]
            return str(self._inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            if system is None:
                raise UsageError(f"the model's chat template fails ({error}); use another model") from None
            # Some templates know no system turn: its text then leads the user's.
            return self._render(f"{clean(system)}\n\n{content}", None)

    def decode(self, ids: list[int]) -> str:
        """Ids -> text without special tokens; ids beyond the vocabulary (padding) decode to nothing."""
        size = len(self._inner)
        known = [i for i in ids if 0 <= i < size]
        return str(self._inner.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def serialised(self) -> str:
        return str(self._backend.to_str())

    def description(self) -> dict[str, Any]:
        """What makes two tokenizers the same: vocabulary, merges, special ids, normaliser and pre-tokeniser."""
        raw = json.loads(self.serialised())
        specials = {t["content"]: t["id"] for t in raw.get("added_tokens", [])}
        merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"].get("merges", [])]
        return {
            "vocabulary": self._inner.get_vocab(),
            "merges": merges,
            "special tokens": specials,
            "normaliser": raw.get("normalizer"),
            "pre-tokeniser": _essence(raw.get("pre_tokenizer")),
        }


class ByteTokenizer:
    """Ids are UTF-8 bytes, then a start and an end token. Needs no files."""

    BOS, EOS, VOCAB = 256, 257, 258

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self.EOS,)

    @property
    def size(self) -> int:
        return self.VOCAB

    def encode(self, text: str) -> list[int]:
        return list(clean(text).encode())

    def chat(self, document_prompt: str, system: str | None = None) -> list[int]:
        return [self.BOS, *self.encode(document_prompt if system is None else f"{system}\n\n{document_prompt}")]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def description(self) -> dict[str, Any]:
        return {"vocabulary": {f"<{i}>": i for i in range(self.VOCAB)}, "special tokens": {"bos": self.BOS, "eos": self.EOS}}


class StreamDecoder:
    """Text of a growing list of ids, piece by piece, without ever cutting a character in two.

    Only a short tail of ids is decoded for each piece, so a token costs the same late in a text as early. `push` and `flush`
    together give what `decode` gives for all ids at once.
    """

    CONTEXT, LIMIT = 8, 48  # ids kept so that decoding knows what came before; ids after which the tail is cut to them

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._sent = 0  # characters of the decoded tail that are out

    def push(self, ids: list[int]) -> str:
        """Adds `ids`; returns the text that is final now (an incomplete last character waits for its rest)."""
        self._tail.extend(ids)
        text = self._tokenizer.decode(self._tail)
        whole = text.rstrip(HELD_BACK)
        new = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        if len(self._tail) > self.LIMIT and whole == text:
            self._tail = self._tail[-self.CONTEXT :]
            self._sent = len(self._tokenizer.decode(self._tail))
        elif len(self._tail) > 2 * self.LIMIT:  # endless invalid bytes: no character is that long, let them out
            new, self._tail, self._sent = new + self.flush(), [], 0
        return new

    def flush(self) -> str:
        """The rest, an incomplete character as its replacement sign."""
        text = self._tokenizer.decode(self._tail)
        rest, self._sent = text[self._sent :], len(text)
        return rest


def fingerprint(tokenizer: AnyTokenizer) -> str:
    """SHA-256 (hex) of everything that `difference` compares."""
    canonical = json.dumps(tokenizer.description(), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def difference(a: AnyTokenizer, b: AnyTokenizer) -> str | None:
    """One phrase that names the first thing in which two tokenizers differ; None if they give the same ids for every text."""
    if isinstance(a, Tokenizer) and isinstance(b, Tokenizer) and a.serialised() == b.serialised():
        return None  # the usual case, many times faster than comparing piece by piece
    one, two = a.description(), b.description()
    by_id_a = {i: token for token, i in one["vocabulary"].items()}
    by_id_b = {i: token for token, i in two["vocabulary"].items()}
    for i in sorted(by_id_a.keys() & by_id_b.keys()):
        if by_id_a[i] != by_id_b[i]:
            return f"token {i} is {by_id_a[i]!r} in one and {by_id_b[i]!r} in the other"
    if len(by_id_a) != len(by_id_b):
        first = min(by_id_a.keys() ^ by_id_b.keys())
        owner = by_id_a.get(first, by_id_b.get(first))
        return f"vocabularies of {len(by_id_a):,} and {len(by_id_b):,} tokens, first at token {first} ({owner!r})"
    if one.keys() != two.keys():
        return "one reads bytes, the other a vocabulary of text pieces"
    for key in one:
        if key != "vocabulary" and one[key] != two[key]:
            return _first_difference(key, one[key], two[key])
    return None


def _first_difference(key: str, one: Any, two: Any) -> str:
    if isinstance(one, list) and isinstance(two, list):
        at = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        x, y = (items[at] if at < len(items) else "none" for items in (one, two))
        return f"{key} differ at number {at} ({x!r} and {y!r})"
    if isinstance(one, dict) and isinstance(two, dict) and key == "special tokens":
        token = min(one.items() ^ two.items())[0]
        return f"special token {token!r} is {one.get(token, 'absent')} in one and {two.get(token, 'absent')} in the other"
    return f"the {key} differs"


def _essence(node: Any) -> Any:
    """A pre-tokeniser without the settings that shift offsets only and never an id."""
    if isinstance(node, dict):
        return {key: _essence(value) for key, value in node.items() if key != "trim_offsets"}
    return [_essence(value) for value in node] if isinstance(node, list) else node


def _eos_ids(folder: Path, fallback: int | None) -> tuple[int, ...]:
    try:
        raw = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        raw = None
    ids = raw if isinstance(raw, list) else [raw]
    found = [int(i) for i in ids if i is not None] or ([fallback] if fallback is not None else [])
    return tuple(dict.fromkeys(found))
