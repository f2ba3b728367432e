"""A file or standard input -> text. UTF-8, and UTF-16/32 where a byte order mark says so."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

from masw.errors import UsageError

LIMIT_BYTES = 64 * 2**20  # some 16 million tokens, far beyond any context

# Longest first: the UTF-32 mark begins with the UTF-16 one.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read(source: str) -> str:
    """Text of the file `source`, or of standard input for "-". Raises UsageError with what to do next."""
    name = "standard input" if source == "-" else source
    try:
        if source == "-" and sys.stdin is None:
            raise UsageError("standard input is closed; give a file, or pipe a document in")
        if source == "-":
            raw = sys.stdin.buffer.read(LIMIT_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                raw = file.read(LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"no file {name}; check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{name} is a folder; name a text file in it") from None
    except PermissionError:
        raise UsageError(f"{name} may not be read by you; change its permissions or choose another file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {name!r}: {getattr(error, 'strerror', None) or error}") from None
    return decode(raw, name)


def decode(raw: bytes, name: str) -> str:
    """Bytes of a document -> text."""
    if len(raw) > LIMIT_BYTES:
        raise UsageError(f"{name} is larger than {LIMIT_BYTES >> 20} MiB; cut it to the part that matters")
    if not raw:
        raise UsageError(f"{name} is empty; give a document with text in it")
    encoding = next((e for mark, e in MARKS if raw.startswith(mark)), "utf-8")
    if encoding == "utf-8" and b"\0" in raw:
        raise UsageError(f"{name} is a binary file (it holds NUL bytes); give plain text in UTF-8")
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        kind = "UTF-8" if encoding.startswith("utf-8") else encoding.upper()
        raise UsageError(f"{name} is not {kind} text (byte {error.start:,}); save it as UTF-8 and try again") from None
    odd = sum(1 for c in text if c < " " and c not in "\t\n\r\f\v\b\x1b")
    if odd > max(16, len(text) // 20):
        raise UsageError(f"{name} is a binary file ({odd:,} control characters); give plain text in UTF-8")
    if not text.strip():
        raise UsageError(f"{name} holds only white space; give a document with text in it")
    return text.replace("\r\n", "\n")
