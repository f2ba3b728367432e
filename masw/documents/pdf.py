"""PDF -> text, by pypdf. Text comes in the order in which the page draws it, which keeps columns apart in most files."""

from __future__ import annotations

import io
import logging
import re
import time

from masw.documents.record import Document, Limits, PasswordNeeded, plural
from masw.errors import UsageError

_HOPELESS = 16  # pages: when as many come out unreadable from the first on, the rest is not tried


def read(data: bytes, name: str, password: str | None, limits: Limits) -> Document:
    """Text of all pages; UsageError for a file that is locked, broken, or without a text layer."""
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its notes on broken files; ours are in the warnings
    started = time.monotonic()
    warnings = []
    try:
        pages, total, title = _open(data, name, password)
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        try:
            pages, total, title = _open(_mended(data), name, password)
        except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{name} is a damaged PDF ({_reason(error)}); copy or export it again") from None
        warnings.append("the PDF is damaged (no index of its parts); what could be found in it was read")
    texts: list[str] = []
    failed = empty = unreadable = characters = 0
    late = False
    for number in range(min(total, limits.pages)):
        # One page is read however long it took to open the file: no page at all would look like a file without text.
        late = number > 0 and time.monotonic() - started > limits.soft_seconds
        if late or characters > limits.characters:
            break
        if number == _HOPELESS and unreadable + failed == number:
            break
        try:
            text = _tidy(pages[number].extract_text())
        except MemoryError:
            raise
        except Exception:  # a parser of broken files raises errors of every kind
            failed += 1
            text = ""
        else:
            empty += not text
            # A font that lost its table of characters gives U+FFFD, or raw glyph numbers among the control characters.
            if sum(c == "\ufffd" or (c < " " and c not in "\n\t") for c in text) > len(text) // 2:
                unreadable += bool(text)
                text = ""
        texts.append(text)
        characters += len(text)
    if not total:
        raise UsageError(f"{name} is a PDF without pages; copy or export it again")
    if not characters:
        if unreadable or failed:
            raise UsageError(
                f"{name} is a PDF with unreadable text ({plural(unreadable + failed, 'page')} damaged or without fonts); "
                "copy or export it again"
            )
        if late:
            raise UsageError(
                f"{name} has no text in what could be read of it in {limits.soft_seconds:g} s ({plural(len(texts), 'page')}); "
                "give the pages that matter as a file of their own, or run it through OCR first"
            )
        raise UsageError(f"{name} has no text layer ({plural(len(texts), 'page')} of images only); run it through OCR first")
    read_pages = len(texts)
    if read_pages < total:
        why = f"a limit of {limits.pages:,} pages" if read_pages == limits.pages else "a limit of time and size"
        warnings.append(f"only the first {read_pages:,} of {total:,} pages were read ({why})")
    for count, what in ((empty, "without a text layer"), (unreadable, "unreadable (fonts missing)"), (failed, "damaged")):
        if count:
            warnings.append(f"{count:,} of {read_pages:,} pages {what}, left out")
    return Document("\n\n".join(t for t in texts if t), "pdf", name, pages=read_pages, title=title, warnings=tuple(warnings))


def _open(data: bytes, name: str, password: str | None):  # type: ignore[no-untyped-def]  # pypdf's own types
    """(pages, their number, title) of an unlocked reader."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        try:
            opened = reader.decrypt("") or (password is not None and reader.decrypt(password))
        except (DependencyError, NotImplementedError) as error:
            raise UsageError(f"{name} is encrypted in a way that cannot be opened ({_reason(error)}); save it without") from None
        if not opened:
            wrong = "another password than the one given" if password is not None else "a password"
            raise PasswordNeeded(f"{name} is encrypted and needs {wrong}; give it with --password")
    title = None
    try:
        title = reader.metadata.title if reader.metadata else None
    except Exception:  # the title is a courtesy
        title = None
    return reader.pages, len(reader.pages), title if isinstance(title, str) else None


def _mended(data: bytes) -> bytes:
    """A file without an index at its end, with one that names its catalog: pypdf then looks for the objects itself."""
    root = b"1 0 R"
    for found in re.finditer(rb"/Type\s*/Catalog", data):
        heads = re.findall(rb"(?:\A|\s)(\d{1,10})\s+(\d{1,5})\s+obj", data[max(0, found.start() - 4096) : found.start()])
        root = b"%s %s R" % heads[-1] if heads else root
    return data + b"\ntrailer\n<</Root " + root + b">>\nstartxref\n0\n%%EOF\n"


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t\xa0]+\n", "\n", text.replace("\r", "\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
