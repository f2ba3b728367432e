"""Evaluation cases: a long prompt and the target's own greedy answer to it, which every draft is then judged on.

Rows are those of GovReport, QMSum and MultiNews (`id`, `text`, `question`) or LongBench-v1's own (`_id`, `context`, `input`). A recall
case plants a fact far back in a real document and asks for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from masw.engine import Settings
from masw.errors import UsageError
from masw.methods import MemoryOptions
from masw.packages import write_json
from masw.prompts import build
from masw.session import RunOptions, Session
from masw.store import cache_root
from masw.tokenizer import AnyTokenizer

RECALL_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """One prompt. `planted` is the text that a recall answer must repeat."""

    set: str
    id: str
    context: int
    prompt: tuple[int, ...]
    planted: str | None = None


def rows(path: Path) -> list[dict[str, str]]:
    """Rows of an evaluation file as {id, text, question}. Raises UsageError with the line for anything else."""
    found = []
    try:
        # Not splitlines: U+2028 and its kin may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} ({getattr(error, 'strerror', None) or 'not UTF-8'}); give a .jsonl file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw: dict[str, Any] = json.loads(line)
            text = raw["text"] if "text" in raw else raw["context"]
            question = raw.get("question") or raw.get("input") or ""
            if not isinstance(text, str) or not isinstance(question, str):
                raise TypeError
            found.append({"id": str(raw.get("id") or raw.get("_id") or number), "text": text, "question": question.strip()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(
                f"{path}, line {number}: rows are JSON objects with text (or context) and, if they ask, a question (or input)"
            ) from None
    if not found:
        raise UsageError(f'{path} has no rows; give JSON lines like {{"text": "...", "question": "..."}}')
    return found


def long_cases(name: str, data: Sequence[dict[str, str]], tokenizer: AnyTokenizer, context: int, docs: int) -> list[Case]:
    """The first `docs` rows whose prompt fills `context` tokens; the document is cut to that length."""
    found: list[Case] = []
    for row in data:
        if len(found) == docs:
            break
        task = "question" if row["question"] else "summarize"
        prompt = build(tokenizer, row["text"], task, row["question"] or None, context)
        if prompt.truncated_tokens:
            found.append(Case(name, row["id"], context, tuple(prompt.ids)))
    return found


def recall_cases(data: Sequence[dict[str, str]], tokenizer: AnyTokenizer, context: int, docs: int) -> list[Case]:
    """A made-up name and number, planted between 10 and 40 % into a document of `context` tokens, and the question for it."""
    found: list[Case] = []
    for row in data:
        if len(found) == docs:
            break
        random = Random(f"{row['id']} {context}")
        place, code = _fact(random)
        sentence = f" Note for the record: the access code of the {place} archive is {code}. "
        question = f"What is the access code of the {place} archive?"
        ids = tokenizer.encode(row["text"])
        if len(ids) < context:
            continue
        room = context - len(build(tokenizer, sentence, "question", question, context).ids) - 8
        if room < 16:
            raise UsageError(f"a context of {context:,} tokens has no room around a planted fact; raise --contexts")
        at = int(room * random.uniform(0.1, 0.4))
        text = tokenizer.decode(ids[:at]) + sentence + tokenizer.decode(ids[at:room])
        prompt = build(tokenizer, text, "question", question, context)
        found.append(Case("recall", row["id"], context, tuple(prompt.ids), code))
    return found


def _fact(random: Random) -> tuple[str, str]:
    syllables = ["bra", "tol", "ven", "kur", "mis", "dal", "or", "pen", "sha", "rin", "gal", "eth"]
    place = "".join(random.sample(syllables, 3)).capitalize()
    return place, "-".join(str(random.randrange(100, 1000)) for _ in range(3))


def answer(session: Session, case: Case, tokens: int, stop: Callable[[], bool] = lambda: False) -> list[int]:
    """The target's greedy answer, from the cache or decoded now (with an uncompressed draft, which changes no token)."""
    target = session.pair.target
    limit = RECALL_TOKENS if case.planted else tokens
    # The name alone is not enough: two folders may be called alike.
    key = json.dumps([target.name, target.provenance, repr(target.config), list(case.prompt), limit], default=str)
    path = cache_root() / "answers" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if path.is_file():
        try:
            return [int(t) for t in json.loads(path.read_text(encoding="utf-8"))]
        except (ValueError, TypeError):
            path.unlink(missing_ok=True)
    settings = replace(Settings(eos_ids=target.eos_ids), max_new_tokens=limit, gamma=8)
    job = session.run(case.prompt, RunOptions("full", MemoryOptions(), settings, "none"), stop)
    for _ in job:
        pass
    found = job.summary()
    if found.finish != "cancelled":
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found.tokens)
    return found.tokens


def planted_positions(tokenizer: AnyTokenizer, tokens: Sequence[int], planted: str) -> list[int]:
    """Which answer tokens spell `planted`; empty when the answer does not hold it."""
    text = tokenizer.decode(list(tokens))
    start = text.find(planted)
    if start < 0:
        return []
    ends = [len(tokenizer.decode(list(tokens[: i + 1]))) for i in range(len(tokens))]
    begins = [0, *ends[:-1]]
    return [i for i, (a, b) in enumerate(zip(begins, ends, strict=True)) if b > start and a < start + len(planted)]


def check_names(data: Sequence[Path]) -> None:
    """Raises UsageError for two files of one name, or one called as the planted facts are: they would be one set."""
    seen = {"recall"}
    for path in data:
        if path.stem in seen:
            raise UsageError(f"two sets would be called '{path.stem}'; rename {path}")
        seen.add(path.stem)


def grid(data: Sequence[Path], tokenizer: AnyTokenizer, contexts: Sequence[int], docs: int, *, recall: bool) -> Iterator[Case]:
    """Cases of all files and contexts, in order. A set is called as its file without the ending; see `check_names`."""
    for path in data:
        read = rows(path)
        for context in contexts:
            yield from long_cases(path.stem, read, tokenizer, context, docs)
            if recall:
                yield from recall_cases(read, tokenizer, context, docs)
