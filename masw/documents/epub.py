"""EPUB -> text: container -> package -> the chapters of the spine in their order. Absent files are tolerated."""

from __future__ import annotations

import posixpath
import re
import time
import unicodedata
from typing import Any
from urllib.parse import unquote

from masw.documents import html
from masw.documents.archive import Archive
from masw.documents.record import Document, Limits, plural
from masw.documents.text import decode
from masw.errors import UsageError

_CHAPTERS = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
# <title/> or <script/> is whole in XHTML and left open in HTML, where it would swallow the chapter.
_CLOSED = re.compile(
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr)\b)([A-Za-z][\w:-]*)((?:\s[^<>]*?)?)/>"
)


def read(archive: Archive, name: str, limits: Limits) -> Document:
    """UsageError for a book that is locked, broken or without text."""
    members = {_key(member): member for member in archive.members}

    def find(path: str) -> str | None:
        return members.get(_key(path))

    container = find("META-INF/container.xml")
    package = None
    if container is not None:
        roots = [e.get("full-path") for e in _elements(archive.read(container), "rootfile", name)]
        package = next((m for m in (find(unquote(r)) for r in roots if r) if m), None)
    package = package or next((m for m in archive.members if m.lower().endswith(".opf")), None)
    if package is None:
        raise UsageError(f"{name} is an EPUB without its table of contents (package file); copy it again")
    xml = archive.read(package)
    items = {e.get("id"): e for e in _elements(xml, "item", name)}
    base = posixpath.dirname(package)
    wanted = [items[ref] for ref in (e.get("idref") for e in _elements(xml, "itemref", name)) if ref in items]
    chapters, absent, locked = [], 0, _locked(archive, find, name)
    for item in wanted:
        if "nav" in (item.get("properties") or "").split() or (item.get("media-type") or _CHAPTERS[0]) not in _CHAPTERS:
            continue
        href = (item.get("href") or "").partition("#")[0]
        member = find(posixpath.normpath(posixpath.join(base, unquote(href))))
        if member is None:
            absent += 1
        elif _key(member) in locked:
            raise UsageError(f"{name} is locked by its publisher (DRM); give a copy without")
        elif member not in chapters:
            chapters.append(member)
    texts: list[str] = []
    warnings: list[str] = []
    hidden, started = 0, time.monotonic()
    for done, member in enumerate(chapters):
        if (done and time.monotonic() - started > limits.soft_seconds) or sum(map(len, texts)) > limits.characters:
            warnings.append(f"only the first {done:,} of {plural(len(chapters), 'chapter')} were read (a limit of time and size)")
            break
        markup = decode(archive.read(member), name).text
        text, _, count = html.page(_CLOSED.sub(r"<\1\2></\1>", markup))
        hidden += count
        if text:
            texts.append(text)
    title = next((" ".join("".join(e.itertext()).split()) for e in _elements(xml, "title", name)), None)
    if absent:
        warnings.append(f"{plural(absent, 'chapter')} named by the book but not in the file")
    if hidden:
        warnings.append(f"{plural(hidden, 'hidden element')} with text left out")
    return Document("\n\n".join(texts), "epub", name, pages=len(texts), title=title or None, warnings=tuple(warnings))


def _key(path: str) -> str:
    """Names as they are compared: some programs write composed letters in one place and decomposed ones in the other."""
    return unicodedata.normalize("NFC", path).casefold()


def _elements(xml: bytes, tag: str, name: str) -> list[Any]:
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, recover=True)
    try:
        root = etree.fromstring(xml, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise UsageError(f"{name} is a damaged EPUB ({str(error)[:80]}); copy it again") from None
    return [] if root is None else list(root.iter(f"{{*}}{tag}"))


def _locked(archive: Archive, find: Any, name: str) -> set[str]:
    """Members that are encrypted. Fonts often are, by a published scheme; they hold no text."""
    member = find("META-INF/encryption.xml")
    if member is None:
        return set()
    return {_key(unquote(e.get("URI") or "")) for e in _elements(archive.read(member), "CipherReference", name)}
