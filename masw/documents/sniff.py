"""First bytes -> what a file is. Names are not looked at."""

from __future__ import annotations

import re

# Common files that hold no text for us, by their first bytes, and what to do about each.
OTHERS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "an old Word or a password-protected Office file",
        "save it as .docx without a password",
    ),
    (b"{\\rtf", "an RTF document", "save it as .docx or plain text"),
    (b"\x89PNG\r\n", "a PNG image", "give a document with text in it"),
    (b"\xff\xd8\xff", "a JPEG image", "give a document with text in it"),
    (b"GIF8", "a GIF image", "give a document with text in it"),
    (b"II*\0", "a TIFF image", "give a document with text in it"),
    (b"MM\0*", "a TIFF image", "give a document with text in it"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"\xfd7zXZ\0", "an xz archive", "unpack it first"),
    (b"BZh", "a bzip2 archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", "unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it first"),
    (b"\x7fELF", "a program", "give a document with text in it"),
    (b"%!PS", "a PostScript file", "convert it to PDF"),
)

_PDF = re.compile(rb"(?:\A|[\r\n])\s*%PDF-\d")
_TAGS = re.compile(
    r"\A\ufeff?\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->)[\s\S]){0,2000}-->\s*)*(?:<!doctype\s+html|<html[\s>]|<head[\s>]|<body[\s>])",
    re.I,
)


def packed(data: bytes) -> str | None:
    """pdf | zip, or None for what may be text."""
    head = data[:1024]
    if head.startswith(b"%PDF-") or (_PDF.search(head) and b" obj" in data):
        return "pdf"
    return "zip" if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) else None


def other(data: bytes) -> tuple[str, str] | None:
    """(what it is, what to do) for a file of a kind that is not read here. "BZh" alone may begin a text, hence the NUL test."""
    for magic, what, remedy in OTHERS:
        if data.startswith(magic) and (not magic.isascii() or magic.startswith((b"{", b"%")) or b"\0" in data[:4096]):
            return what, remedy
    return None


def is_html(text: str) -> bool:
    """Whether text is a whole HTML page. A fragment is not: Markdown may begin with a tag or a comment."""
    return _TAGS.match(text[:8192]) is not None
