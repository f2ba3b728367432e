"""Small documents of each kind, built in memory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence


def pdf(*contents: bytes, catalog: bytes = b"", xobjects: bytes = b"", more: Mapping[int, bytes] | None = None) -> bytes:
    """A PDF with one page for each content stream, Helvetica as /F1, and a correct cross-reference table.

    Objects 1 to 3 are catalog, pages and font; `more` adds objects by number (from 100).
    """
    objects: dict[int, bytes] = {}
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(contents)))
    objects[1] = b"<< /Type /Catalog /Pages 2 0 R " + catalog + b" >>"
    objects[2] = b"<< /Type /Pages /Kids [ %s ] /Count %d >>" % (kids, len(contents))
    objects[3] = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    for i, content in enumerate(contents):
        resources = b"<< /Font << /F1 3 0 R >> /XObject << " + xobjects + b" >> >>"
        objects[4 + 2 * i] = b"<< /Type /Page /Parent 2 0 R /MediaBox [ 0 0 600 800 ] /Contents %d 0 R /Resources %s >>" % (
            5 + 2 * i,
            resources,
        )
        objects[5 + 2 * i] = stream(content)
    objects |= dict(more or {})
    out, places = io.BytesIO(), {}
    out.write(b"%PDF-1.4\n")
    for number, body in objects.items():
        places[number] = out.tell()
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 1\n0000000000 65535 f \n")
    for number, place in places.items():
        out.write(b"%d 1\n%010d 00000 n \n" % (number, place))
    out.write(b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (max(objects) + 1, start))
    return out.getvalue()


def stream(content: bytes, head: bytes = b"") -> bytes:
    return b"<< %s /Length %d >>\nstream\n%s\nendstream" % (head, len(content), content)


def line(text: str, x: int = 50, y: int = 700) -> bytes:
    """A content stream that writes one line."""
    return b"BT /F1 12 Tf %d %d Td (%s) Tj ET\n" % (x, y, text.encode("cp1252"))


def encrypted(data: bytes, password: str, algorithm: str = "AES-256") -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.encrypt(user_password=password, owner_password="owner", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def zipped(members: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def docx(body: str | None = None) -> bytes:
    """A DOCX with a heading, a table between paragraphs and a list; or with `body` as the XML of its body."""
    from docx import Document
    from docx.oxml import parse_xml
    from docx.oxml.ns import nsdecls

    document = Document()
    if body is None:
        document.core_properties.title = "Minutes"
        document.add_heading("Harbour report", 1)
        document.add_paragraph("Before the table.")
        table = document.add_table(rows=2, cols=2)
        for cell, text in zip(table._cells, ("Year", "Ships", "1901", "42"), strict=True):
            cell.text = text
        document.add_paragraph("After the table.")
        document.add_paragraph("first item", style="List Bullet")
        document.add_paragraph("second item", style="List Bullet")
    else:
        for element in parse_xml(f"<w:body {nsdecls('w')}>{body}</w:body>"):
            document.element.body.insert(-1, element)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


CONTAINER = (
    '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0"><rootfiles>'
    '<rootfile full-path="OPS/package.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def epub(
    chapters: Mapping[str, str],
    spine: Sequence[str] | None = None,
    absent: Sequence[str] = (),
    more: Mapping[str, str | bytes] = {},
) -> bytes:
    """An EPUB of `chapters` (file name -> body of the XHTML) read in the order of `spine`; `absent` are named but not there."""
    from urllib.parse import quote

    names = [*chapters, *absent]
    items = "".join(f'<item id="i{i}" href="{quote(n)}" media-type="application/xhtml+xml"/>' for i, n in enumerate(names))
    refs = "".join(f'<itemref idref="i{names.index(n)}"/>' for n in (spine or names))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f"<dc:title>A Book</dc:title></metadata><manifest>{items}</manifest><spine>{refs}</spine></package>"
    )
    pages = {
        f"OPS/{n}": f'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>{b}</body></html>'
        for n, b in chapters.items()
    }
    return zipped(
        {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OPS/package.opf": package, **pages, **more}
    )
