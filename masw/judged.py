"""What drafts made of evaluation cases, kept on disk case by case: an interrupted measure goes on where it stopped.

FILE.jsonl: a header (what makes its cases comparable), then a line a case. A line cut by a crash is dropped when the file is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from masw.cases import Case
from masw.errors import MaswError, UsageError
from masw.evaluate import Judged, Outcome
from masw.files import check_writable, replacing

SCHEMA = 1


def check(path: Path) -> None:
    """Finds out before a model is loaded whether `path` can be written and is such a file. Raises UsageError."""
    check_writable(path)
    if path.exists():
        _read(path)


class JudgedFile:
    """Judged cases by the prompt that they are of."""

    def __init__(self, path: Path, definition: dict[str, Any]) -> None:
        """Opens or creates `path`. Raises UsageError when it holds another measure or cannot be written."""
        self.path, self.found = path, dict[str, Judged]()
        check_writable(path)
        wanted = json.loads(json.dumps(definition, default=str))
        lines: list[str] = []
        if path.exists():
            head, cases, lines = _read(path)
            other = [key for key in wanted if head["definition"].get(key) != wanted[key]]
            if other:
                raise UsageError(
                    f"{path} holds a measure with another {other[0].replace('_', ' ')}: its cases would not compare; "
                    "choose another --out"
                )
            self.found = {line["prompt"]: _judged(line) for line in cases}
        header = json.dumps({"type": "header", "schema": SCHEMA, "definition": wanted})
        try:
            with replacing(path) as partial:
                partial.write_text("".join(line + "\n" for line in lines or [header]), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path} ({error.strerror or error}); choose another --out") from None

    def get(self, case: Case) -> Judged | None:
        return self.found.get(_digest(case))

    def add(self, case: Case, judged: Judged) -> None:
        """Appends a case. Raises MaswError where the disk fails; the cases before it stay."""
        self.found[_digest(case)] = judged
        outcomes = [
            {
                "method": m,
                "window": w,
                "stride": r,
                "weights": k,
                "agree": _bits(o.agree),
                "kl": o.kl,
                "planted": _bits(o.planted),
            }
            for m, w, r, k, o in judged.found
        ]
        about = {"set": judged.set, "context": judged.context, "id": judged.id, "prompt": _digest(case)}
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"type": "case", **about, "outcomes": outcomes}) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise MaswError(
                f"cannot write {self.path} ({error.strerror or error}); the cases in it are whole: free some space and run the "
                "same command"
            ) from None


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Header and cases, and their lines as they stand."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        *whole, _torn = lines  # every whole line ends in a newline
        head, *cases = [json.loads(line) for line in whole]
        if head["type"] != "header" or head["schema"] != SCHEMA or not isinstance(head["definition"], dict):
            raise ValueError
        for case in cases:
            _judged(case)
        return head, cases, whole
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{path} is not a file of cases of this masw (schema {SCHEMA}); move it away or choose another --out"
        ) from None


def _judged(line: dict[str, Any]) -> Judged:
    found = [
        (o["method"], o["window"], o["stride"], o["weights"], Outcome(_flags(o["agree"]), float(o["kl"]), _flags(o["planted"])))
        for o in line["outcomes"]
    ]
    line["prompt"].encode()
    return Judged(line["set"], line["context"], line["id"], found)


def _bits(flags: list[bool]) -> str:
    return "".join("1" if flag else "0" for flag in flags)


def _flags(bits: str) -> list[bool]:
    return [bit == "1" for bit in bits]


def _digest(case: Case) -> str:
    return hashlib.sha256(json.dumps([case.set, list(case.prompt)]).encode()).hexdigest()[:24]


def file_digest(path: Path | None) -> str | None:
    """sha256 of a file, None of none."""
    if path is None:
        return None
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
