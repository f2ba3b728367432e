"""What reading a document gives, and how much it may cost."""

from __future__ import annotations

from dataclasses import dataclass

from masw.errors import UsageError


class PasswordNeeded(UsageError):
    """The file is encrypted; with the right password it can be read."""


class EncodingNeeded(UsageError):
    """No encoding fits the bytes, or not the one that was named; with the right one they may be text."""


def plural(count: int, noun: str) -> str:
    """`1 page`, `1,200 pages`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Limits:
    """Refusals and cuts that keep one file from taking the machine."""

    file_bytes: int = 64 * 2**20  # some 16 million tokens of plain text, far beyond any context
    unpacked_bytes: int = 32 * 2**20  # of XML in a DOCX or EPUB: the text of some fifty novels; an XML tree takes ten times that
    pages: int = 2000  # of a PDF; the rest is cut with a warning
    characters: int = 16 * 2**20  # of a parsed document; the rest is cut with a warning
    soft_seconds: float = 14.0  # after which a PDF, DOCX or EPUB ends with what was read until then, with a warning
    seconds: float = 18.0  # after which the parser is ended
    memory_bytes: int = 1280 * 2**20  # address space of the parser's process


LIMITS = Limits()


@dataclass(frozen=True)
class Document:
    """Text with what is known about where it came from. `text` holds no control characters but tab and newline, no surrogates."""

    text: str
    kind: str  # text | markdown | pdf | docx | html | epub
    name: str  # as given
    encoding: str | None = None  # of plain text and HTML; the other kinds carry their own
    detected: str | None = None  # how the encoding was found: given | bom | declared | utf-8 | detected
    pages: int | None = None  # of a PDF, as many as were read; chapters of an EPUB
    title: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_guess(self) -> bool:
        """Whether the encoding was guessed, so that another may fit better."""
        return self.detected == "detected"

    @property
    def characters(self) -> int:
        return len(self.text)

    @property
    def summary(self) -> str:
        """One line, without the warnings: kind, encoding and how it was found, pages, characters."""
        how = {
            "bom": "byte order mark",
            "utf-8": "valid",
            "declared": "declared in it",
            "detected": "detected",
            "given": "as given",
        }
        parts = [{"text": "plain text", "markdown": "Markdown"}.get(self.kind, self.kind.upper())]
        if self.encoding:
            parts.append(f"{self.encoding} ({how[self.detected]})" if self.detected else self.encoding)
        if self.pages is not None:
            parts.append(plural(self.pages, "chapter" if self.kind == "epub" else "page"))
        return ", ".join([*parts, f"{self.characters:,} characters"])
