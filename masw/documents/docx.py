"""DOCX -> text, by python-docx: paragraphs and tables in their order, headings and lists marked as in Markdown, notes at the end."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

from masw.documents.archive import Archive
from masw.documents.record import Document, Limits, plural
from masw.errors import UsageError

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
# Elements that wrap content which python-docx then passes over: content controls, accepted changes, smart tags.
_WRAPPERS = tuple(_W + tag for tag in ("sdt", "ins", "moveTo", "smartTag", "customXml"))
_DELETED = tuple(_W + tag for tag in ("del", "moveFrom"))


def read(data: bytes, name: str, archive: Archive, limits: Limits) -> Document:
    """`archive` is `data`, opened. Only XML counts against the limit of unpacked bytes: pictures are never decoded."""
    from docx import Document as open_docx

    archive.check([member for member in archive.members if member.lower().endswith((".xml", ".rels"))])
    if sum(info.file_size for info in archive.members.values()) > 4 * limits.file_bytes:
        raise UsageError(f"{name} unpacks to more than {4 * limits.file_bytes >> 20} MiB; cut it to the part that matters")
    started, cut = time.monotonic(), False
    try:
        opened = open_docx(io.BytesIO(data))
        hidden = _simplify(opened.element.body)
        styles = _marks(opened)
        lines = []
        for block in _blocks(opened.element.body, styles):
            lines.append(block)
            if time.monotonic() - started > limits.soft_seconds:
                cut = True
                break
        notes = list(_notes(opened))
        properties = opened.core_properties.title or None
    except UsageError:
        raise
    except MemoryError:
        raise
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply; export it again") from None
    except Exception as error:  # python-docx lets through whatever zipfile, lxml and its own lookups raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
        raise UsageError(f"{name} is a damaged DOCX ({reason}); open it in a word processor and save it again") from None
    if notes:
        lines += ["## Notes", *notes]
    text = "\n\n".join(lines).replace("\n\n- ", "\n- ")
    title = None if properties == "Word Document" else properties  # python-docx's own filling
    warnings = []
    if hidden:
        warnings.append(f"{plural(hidden, 'hidden piece')} of text left out")
    if cut:
        warnings.append(f"only what could be read in {limits.soft_seconds:g} s is kept, the first {plural(len(lines), 'block')}")
    return Document(text, "docx", name, title=title, warnings=tuple(warnings))


def _simplify(body: Any) -> int:
    """Unwraps content that python-docx would skip, drops deleted and hidden text; the number of hidden runs."""
    for element in list(body.iter(*_DELETED)):
        _replace(element, [])
    for element in list(body.iter(*_WRAPPERS)):
        inner = element.find(f"{_W}sdtContent") if element.tag == f"{_W}sdt" else element
        _replace(element, [] if inner is None else [c for c in inner if not str(c.tag).endswith("Pr")])
    hidden = 0
    for mark in list(body.iter(f"{_W}vanish")):
        run = mark.getparent().getparent()
        if run is not None and run.tag == f"{_W}r" and mark.get(f"{_W}val") not in ("0", "false"):
            hidden += any((t.text or "").strip() for t in run.iter(f"{_W}t"))
            _replace(run, [])
    return hidden


def _replace(element: Any, by: list[Any]) -> None:
    parent = element.getparent()
    if parent is not None:
        at = parent.index(element)
        parent[at : at + 1] = by


def _blocks(container: Any, styles: dict[str | None, str]) -> Iterator[str]:
    """Paragraphs and tables of a body or a cell in their order, from the XML: python-docx's own objects are slow on long tables."""
    for child in container:
        if child.tag == f"{_W}p":
            text = child.text.strip("\n").rstrip()
            if text:
                numbered = child.pPr is not None and child.pPr.numPr is not None
                mark = styles.get(child.style, "") or ("- " if numbered else "")
                yield mark + text.lstrip() if mark else text  # code keeps its indentation
        elif child.tag == f"{_W}tbl":
            rows = [row for row in (_row(tr, styles) for tr in child.tr_lst) if row.strip(" |")]
            if rows:
                yield "\n".join(rows)


def _row(tr: Any, styles: dict[str | None, str]) -> str:
    """A row's cells, each once, where python-docx repeats merged ones."""
    return " | ".join("" if tc.vMerge == "continue" else " ".join(" ".join(_blocks(tc, styles)).split()) for tc in tr.tc_lst)


def _marks(opened: Any) -> dict[str | None, str]:
    """Style -> Markdown's mark for a heading or a list item."""
    marks: dict[str | None, str] = {}
    for style in opened.styles:
        name = style.name or ""
        head, _, level = name.lower().rpartition(" ")
        if head == "heading" and level.isdigit():
            marks[style.style_id] = "#" * max(1, min(6, int(level))) + " "
        elif name == "Title" or name.startswith("List "):
            marks[style.style_id] = "# " if name == "Title" else "- "
    return marks


def _notes(opened: Any) -> Iterator[str]:
    """Footnotes and endnotes, which python-docx does not read, as [n] lines in the order of their file."""
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    for relation in opened.part.rels.values():
        if relation.is_external or not relation.reltype.endswith(("/footnotes", "/endnotes")):
            continue
        for note in etree.fromstring(relation.target_part.blob, parser):
            if note.get(f"{_W}type") is None:  # the separators have one
                text = " ".join("".join(t.text or "" for t in note.iter(f"{_W}t")).split())
                if text:
                    yield f"[{note.get(f'{_W}id')}] {text}"
