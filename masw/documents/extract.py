"""Bytes -> Document in this process, without limits of time and memory: the body of the parser's process, and of plain text."""

from __future__ import annotations

from dataclasses import replace

from masw.documents import docx, epub, html, pdf, sniff, text
from masw.documents.archive import Archive
from masw.documents.names import shown
from masw.documents.record import LIMITS, Document, Limits
from masw.errors import UsageError


def extract(
    data: bytes, name: str, *, password: str | None = None, encoding: str | None = None, limits: Limits = LIMITS
) -> Document:
    """Text of a document of any kind. UsageError, and no other, for what cannot be read."""
    label = shown(name)
    if not data:
        raise UsageError(f"{label}: the file is empty; give a document with text in it")
    document = replace(_parsed(data, label, password, encoding, limits), name=name)
    cleaned, notes = text.clean(document.text)
    if len(cleaned) > limits.characters and document.kind not in ("text", "markdown"):
        notes = (*notes, f"only the first {limits.characters:,} of {len(cleaned):,} characters are kept")
        cleaned = cleaned[: limits.characters]
    if text.is_blank(cleaned):
        what = "holds only white space" if document.kind in ("text", "markdown") else f"is {document.kind.upper()} without text"
        raise UsageError(f"{label} {what}; give a document with text in it")
    title = " ".join(text.clean(document.title or "")[0].split())[:300] or None
    return replace(document, text=cleaned, title=title, warnings=(*document.warnings, *notes))


def _parsed(data: bytes, label: str, password: str | None, encoding: str | None, limits: Limits) -> Document:
    packed = sniff.packed(data)
    ignored = () if packed is None or encoding is None else (f"encoding {encoding} not used: the file carries its own",)
    if packed == "pdf":
        found = pdf.read(data, label, password, limits)
    elif packed == "zip":
        archive = Archive(data, label, limits)
        found = docx.read(data, label, archive, limits) if archive.kind() == "docx" else epub.read(archive, label, limits)
    else:
        foreign = sniff.other(data)
        if foreign is not None:
            raise UsageError(f"{label} is {foreign[0]}, not a text file; {foreign[1]}")
        decoded = text.decode(data, label, encoding)
        text.refuse_control(decoded.text, label)
        if sniff.is_html(decoded.text):
            return html.read(decoded, label)
        # Content cannot tell Markdown from plain text, and both are read alike: here alone the name labels.
        kind = "markdown" if label.lower().endswith((".md", ".markdown")) else "text"
        return Document(decoded.text, kind, label, decoded.encoding, decoded.detected, warnings=decoded.warnings)
    return replace(found, warnings=(*found.warnings, *ignored))


def needs_parser(data: bytes, encoding: str | None) -> bool:
    """Whether reading takes more than decoding UTF-8 or marked text, so that it belongs into the parser's process."""
    if encoding is not None or sniff.packed(data) or sniff.other(data) or not text.is_plain(data):
        return True
    return sniff.is_html(text.head(data))
