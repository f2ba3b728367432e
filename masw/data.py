"""Training text: JSON lines, text folders or hub datasets -> token files on disk -> fixed-length rows in a seeded order.

Everything is tokenised once, into flat files of uint16 or uint32 that are mapped, not read. The order of rows is a function of
the seed and of how many were drawn, so a position is one integer and a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from masw.errors import MaswError, UsageError
from masw.packages import locked, write_json
from masw.prompts import TASKS
from masw.tokenizer import AnyTokenizer, fingerprint

FORMAT = 1
DOCUMENT_CHARS = 400_000  # of one document of a question row that are tokenised: more than any training length
TEXT_SUFFIXES = (".txt", ".md", ".rst")

Notice = Callable[[str], None]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenFile:
    """Documents as one flat array. `pieces` [documents, k + 1] are offsets: k pieces a document (1: text; 4: see `Answers`)."""

    tokens: npt.NDArray[Any]
    pieces: npt.NDArray[np.int64]
    sha256: str  # of sources, tokenizer and format

    def piece(self, document: int, index: int) -> Ids:
        a, b = self.pieces[document, index : index + 2]
        return self.tokens[a:b].astype(np.int64)


class Texts:
    """Plain documents, packed end to end and cut into rows of any length."""

    def __init__(self, file: TokenFile, seed: int) -> None:
        self.file, self.seed = file, seed

    def blocks(self, length: int) -> int:
        """Rows of `length` tokens in one pass. Raises UsageError when there is not one."""
        found = len(self.file.tokens) // length
        if found == 0:
            raise UsageError(
                f"the training text has {len(self.file.tokens):,} tokens, fewer than one row of {length:,}; add text"
            )
        return found

    def row(self, index: int, length: int) -> Ids:
        """The `index`-th row of `length` tokens in this seed's order; each pass over the text has an order of its own."""
        blocks = self.blocks(length)
        epoch, place = divmod(index, blocks)
        start = _shuffled(self.seed, epoch, blocks, place) * length
        return self.file.tokens[start : start + length].astype(np.int64)


class Answers:
    """Questions about long documents. Pieces: the frame before the document, the document, the frame behind it, the answer."""

    def __init__(self, file: TokenFile, seed: int) -> None:
        self.file, self.seed = file, seed

    def row(self, index: int, length: int) -> tuple[Ids, slice]:
        """A prompt and its answer in exactly `length` tokens, and where the answer lies.

        The document is cut at its end to fit; a short one leaves padding behind the answer, which nothing before it sees.
        """
        count = len(self.file.pieces)
        epoch, place = divmod(index, count)
        document = _shuffled(self.seed, epoch, count, place)
        head, text, tail, answer = (self.file.piece(document, i) for i in range(4))
        answer = answer[: length // 2]
        room = length - len(head) - len(tail) - len(answer)
        if room < 0:
            tail = tail[-room:]  # a question longer than half a row: its end stays, with the frame that opens the answer
            room = 0
        row = np.concatenate([head, text[:room], tail, answer])[:length]
        end = len(row)
        return np.pad(row, (0, length - end), constant_values=row[-1]), slice(end - len(answer), end)


def texts(sources: list[str], tokenizer: AnyTokenizer, cache: Path, seed: int, notice: Notice) -> Texts:
    """Plain text from `sources`; see `documents`."""
    eos = tokenizer.eos_ids[:1]

    def pieces(row: dict[str, Any]) -> list[list[int]]:
        return [[*tokenizer.encode(row["text"]), *eos]]

    return Texts(_tokenised("text", [], sources, ("text",), pieces, tokenizer, cache, notice), seed)


def answers(sources: list[str], tokenizer: AnyTokenizer, cache: Path, seed: int, notice: Notice) -> Answers:
    """Rows with `text`, `question` and `reference` (or `answer`) from `sources`, in the prompt that inference uses."""
    eos = tokenizer.eos_ids[:1]

    def pieces(row: dict[str, Any]) -> list[list[int]]:
        head, tail = frame(tokenizer, row["question"])
        return [head, tokenizer.encode(row["text"][:DOCUMENT_CHARS]), tail, [*tokenizer.encode(row["reference"]), *eos]]

    fields = ("text", "question", "reference")
    return Answers(_tokenised("answers", frame(tokenizer, "?"), sources, fields, pieces, tokenizer, cache, notice), seed)


def frame(tokenizer: AnyTokenizer, question: str) -> tuple[list[int], list[int]]:
    """Tokens before and behind the document in the prompt of task `question`."""
    behind_it = TASKS["question"].replace("{question}", question.strip())
    one, two = (tokenizer.chat(word + behind_it) for word in ("A", "7"))
    before = _common(one, two)
    behind = _common(one[before:][::-1], two[before:][::-1])
    return one[:before], one[len(one) - behind :]


def documents(source: str, fields: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl or .jsonl.gz file, of a folder's text files, or of `hub:OWNER/NAME[:SPLIT]`."""
    if source.startswith("hub:"):
        rows = _hub(source)
    elif Path(source).is_dir():
        rows = _folder(Path(source))
    else:
        rows = _json_lines(Path(source))
    for number, row in enumerate(rows, 1):
        if "reference" in fields and "reference" not in row and "answer" in row:
            row = {**row, "reference": row["answer"]}
        missing = [f for f in fields if not isinstance(row.get(f), str)]
        if missing:
            raise UsageError(f"{source}, row {number}: no text in the field '{missing[0]}'; rows need {', '.join(fields)}")
        if all(row[f].strip() for f in fields):
            yield row


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise UsageError(f"{path} is not training text; give a .jsonl or .jsonl.gz file, a folder of text, or hub:OWNER/NAME")
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UsageError(f'{path}, line {number} is not a JSON object; rows look like {{"text": "..."}}')
                yield row
    except FileNotFoundError:
        raise UsageError(f"no training text at {path}; check the path") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path} behind line {number} ({reason}); copy the file again") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 behind line {number} ({error.reason}); save it as UTF-8") from None
    except ValueError as error:
        raise UsageError(f"{path}, line {number} is not JSON ({error}); mend or drop that line") from None


def _folder(path: Path) -> Iterator[dict[str, Any]]:
    from masw.documents import read

    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file())
    if not found:
        raise UsageError(f"{path} holds no text files ({', '.join(TEXT_SUFFIXES)}); give another folder")
    for file in found:
        yield {"id": str(file.relative_to(path)), "text": read(str(file))}


def _hub(source: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(f"{source} needs the package `datasets`: run `pip install datasets`, or give a .jsonl file") from None
    name, _, split = source.removeprefix("hub:").partition(":")
    try:
        yield from datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the package raises dozens of kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"cannot load the dataset {name} ({reason[0][:160]}); check its name, the network, and the split"
        ) from None


def _tokenised(
    kind: str,
    extra: Any,
    sources: list[str],
    fields: tuple[str, ...],
    pieces: Callable[[dict[str, Any]], list[list[int]]],
    tokenizer: AnyTokenizer,
    cache: Path,
    notice: Notice,
) -> TokenFile:
    """The token file of `sources`, from the cache where it is there; `extra` is what else the tokens depend on.

    One source may be such a token folder itself, brought along from another machine.
    """
    if not sources:
        raise UsageError(f"no training {kind} was named; give at least one source")
    ready = [s for s in sources if (Path(s) / "meta.json").is_file() and (Path(s) / "pieces.npy").is_file()]
    if ready and len(sources) > 1:
        raise UsageError(f"{ready[0]} holds tokens, which do not mix with other sources; name it alone")
    if ready:
        return _opened(Path(ready[0]), kind, tokenizer)
    key = hashlib.sha256(
        json.dumps([FORMAT, kind, extra, fingerprint(tokenizer), [_content(s) for s in sources]]).encode()
    ).hexdigest()
    folder = cache / f"{kind}-{key[:16]}"
    try:
        with locked(cache / f"{kind}-{key[:16]}.lock", "this training text", notice):
            if not (folder / "meta.json").exists():
                notice(f"tokenising {kind} from {', '.join(Path(s).name for s in sources)} (once)")
                folder.mkdir(parents=True, exist_ok=True)
                about = {"format": FORMAT, "kind": kind, "key": key, "tokenizer": fingerprint(tokenizer)}
                _write(folder, sources, fields, pieces, about)
        return _mapped(folder, key)
    except OSError as error:
        raise MaswError(
            f"cannot keep tokens in {cache} ({error.strerror or error}); free some space or name another cache folder"
        ) from None


def _opened(folder: Path, kind: str, tokenizer: AnyTokenizer) -> TokenFile:
    """Tokens that were made elsewhere, if they are whole and fit this use."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if (meta["format"], meta["kind"]) != (FORMAT, kind):
            raise UsageError(
                f"{folder} holds tokens of {meta['kind']} (format {meta['format']}), not of {kind}; name another folder"
            )
        if meta["tokenizer"] != fingerprint(tokenizer):
            raise UsageError(f"{folder} was tokenised for another model; tokenise the text anew for this one")
        return _mapped(folder, meta["key"])
    except (KeyError, TypeError, ValueError, OSError):
        raise UsageError(f"{folder} does not hold whole tokens of this masw; copy it again, or name the text itself") from None


def _mapped(folder: Path, key: str) -> TokenFile:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r", shape=(meta["tokens"],))
    return TokenFile(tokens, np.load(folder / "pieces.npy"), key)


def _write(
    folder: Path,
    sources: list[str],
    fields: tuple[str, ...],
    pieces: Callable[[dict[str, Any]], list[list[int]]],
    about: dict[str, Any],
) -> None:
    """Streams documents to disk as uint32, narrows to uint16 where every id fits; meta.json comes last and vouches for all."""
    offsets, done, top = [], 0, 0
    wide = folder / "tokens.partial"
    with wide.open("wb") as stream:
        for source in sources:
            for row in documents(source, fields):
                parts = pieces(row)
                lengths = np.cumsum([0, *map(len, parts)]) + done
                flat = np.array([t for part in parts for t in part], dtype=np.uint32)
                top = max(top, int(flat.max(initial=0)))
                stream.write(flat.tobytes())
                offsets.append(lengths)
                done = int(lengths[-1])
    if not done:
        wide.unlink()
        raise UsageError(f"{', '.join(sources)} holds no text to train on; give documents with text in them")
    dtype = "uint16" if top < 2**16 else "uint32"
    if dtype == "uint16":
        source_tokens = np.memmap(wide, dtype=np.uint32, mode="r")
        with (folder / "narrow.partial").open("wb") as stream:
            for start in range(0, done, 1 << 24):
                stream.write(source_tokens[start : start + (1 << 24)].astype(np.uint16).tobytes())
        os.replace(folder / "narrow.partial", wide)
    os.replace(wide, folder / "tokens.bin")
    np.save(folder / "pieces.npy", np.array(offsets, dtype=np.int64))
    write_json(folder / "meta.json", {**about, "dtype": dtype, "tokens": done, "documents": len(offsets)})


def _content(source: str) -> str:
    """What identifies a source: the hash of a file, names and sizes of a folder's files, the id of a hub dataset."""
    path = Path(source)
    if source.startswith("hub:"):
        return source
    if path.is_dir():
        return json.dumps(
            [[str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(path.rglob("*")) if p.is_file()]
        )
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise UsageError(f"no training text at {path}; check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror or error}); check its permissions") from None


_orders: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}


def _shuffled(seed: int, epoch: int, count: int, place: int) -> int:
    key = (seed, epoch, count)
    if key not in _orders:
        if len(_orders) > 16:
            _orders.clear()
        _orders[key] = np.random.default_rng(key).permutation(count)
    return int(_orders[key][place])


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
