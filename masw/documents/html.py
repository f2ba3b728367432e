"""HTML -> text, by beautifulsoup4 and lxml: what a reader sees of the page's content. Nothing runs and nothing is fetched.

Scripts, styles, forms, menus and hidden elements are left out; headings, lists, tables and preformatted text keep their shape.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from masw.documents.record import Document, plural
from masw.documents.text import Decoded

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

# Left out always: nothing in them is the page's text. `rt` and `rp` give the reading of a word that stands beside them.
_SILENT = frozenset((
    "script", "style", "template", "noscript", "svg", "canvas", "iframe", "object", "embed", "audio", "video", "map", "head",
    "select", "textarea", "button", "input", "dialog", "datalist", "rt", "rp", "rtc",
))  # fmt: skip
_MENUS = frozenset(("nav", "menu", "form"))
_MENU_WORDS = frozenset(
    (
        "nav",
        "navbar",
        "navigation",
        "menu",
        "mainmenu",
        "submenu",
        "searchmenu",
        "topmenu",
        "sidebar",
        "breadcrumb",
        "breadcrumbs",
    )
)
_MENU_ROLES = frozenset({"navigation", "menu", "menubar", "search", "banner", "contentinfo"})
_HIDDEN = re.compile(
    r"(?:display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?:px|pt|em|%)?\s*(?:;|!|$)|opacity\s*:\s*0(?:\.0+)?\s*(?:;|!|$))",
    re.I,
)
_BLOCKS = frozenset((
    "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "html", "legend", "li", "main",
    "ol", "p", "pre", "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul",
))  # fmt: skip
_INLINE_SPACE = re.compile(r"[ \t\n\r\f\xa0]+")


def read(decoded: Decoded, name: str) -> Document:
    """A page that is decoded already."""
    text, title, hidden = page(decoded.text)
    notes = (f"{plural(hidden, 'hidden element')} with text left out",) if hidden else ()
    return Document(text, "html", name, decoded.encoding, decoded.detected, title=title, warnings=(*decoded.warnings, *notes))


def page(markup: str) -> tuple[str, str | None, int]:
    """(text, title, number of hidden elements left out that had text) of a page."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(re.sub(r"\A\s*<\?xml[^>]*\?>", "", markup.replace("\0", "")), "lxml")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    hidden = _strip(soup)
    return _Writer().write(_content(soup)), title or None, hidden


def _strip(soup: BeautifulSoup) -> int:
    """Takes out what a reader does not see or does not read; the number of hidden elements that had text."""
    from bs4 import Tag

    # A page that is one form, or calls its whole body a menu, is content all the same.
    most = 0.3 * len(soup.get_text())
    hidden = 0
    open_elements: list[Tag] = [soup]
    while open_elements:
        for element in list(open_elements.pop().children):
            if not isinstance(element, Tag):
                continue
            out = element.name in _SILENT
            if not out and _is_hidden(element):
                out = True
                hidden += bool(element.get_text(strip=True))
            if out or ((element.name in _MENUS or _is_menu(element)) and len(element.get_text()) < most):
                element.decompose()
            else:
                open_elements.append(element)
    return hidden


def _is_hidden(element: Tag) -> bool:
    attributes = element.attrs
    if not attributes:
        return False
    style = attributes.get("style")
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or (style is not None and bool(_HIDDEN.search(str(style))))
    )


def _is_menu(element: Tag) -> bool:
    attributes = element.attrs
    if not attributes or element.name in ("html", "body", "main", "article"):
        return False
    words = {str(word).lower() for word in (attributes.get("id", ""), *(attributes.get("class") or ()))}
    return not words.isdisjoint(_MENU_WORDS) or str(attributes.get("role", "")).lower() in _MENU_ROLES


def _content(soup: BeautifulSoup) -> Tag:
    """The page's own `main`, or its single article, where that holds most of the text; else the body."""
    body = soup.body or soup
    for chosen in (soup.find_all("main"), soup.find_all("article")):
        if len(chosen) == 1 and 2 * len(chosen[0].get_text()) > len(body.get_text()):
            return chosen[0]
    return body


class _Writer:
    """Elements -> lines. Blocks are parted by an empty line, list items and table rows by none."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._line: list[str] = []
        self._mark = ""

    def write(self, element: Tag) -> str:
        self._walk(element)
        self._end()
        return re.sub(r"\n\n(?=- )", "\n", "\n\n".join(self._blocks))

    def _end(self) -> None:
        """Closes the current block. Spaces collapse as on a page; a line break stays."""
        lines = [_INLINE_SPACE.sub(" ", line).strip() for line in "".join(self._line).split("\x00")]
        text = "\n".join(lines).strip()
        self._line = []
        if text:
            self._blocks.append(self._mark + text)
            self._mark = ""

    def _walk(self, root: Tag) -> None:
        """Depth first, with a stack of its own: a page may nest its elements deeper than Python nests calls."""
        from bs4 import Tag
        from bs4.element import CData, NavigableString

        stack = [(iter(list(root.children)), False)]  # what is left of an element, and whether it is a block
        while stack:
            child = next(stack[-1][0], None)
            if child is None:
                if stack.pop()[1]:
                    self._end()
                    self._mark = ""
            elif isinstance(child, Tag):
                if not self._whole(child):
                    block = child.name in _BLOCKS
                    if block:
                        self._end()
                        self._mark = self._mark_of(child.name)
                    stack.append((iter(list(child.children)), block))
            elif type(child) in (NavigableString, CData):
                self._line.append(str(child))

    @staticmethod
    def _mark_of(kind: str) -> str:
        return "- " if kind == "li" else "#" * int(kind[1]) + " " if re.fullmatch("h[1-6]", kind) else ""

    def _whole(self, element: Tag) -> bool:
        """Writes an element that is not walked into: a line break, preformatted text, a table of data."""
        if element.name == "br":
            self._line.append("\x00")
            return True
        if element.name == "pre":
            text = element.get_text().strip("\n").rstrip()
        elif element.name == "table" and self._is_data(element):
            rows = [" | ".join(self._cell(cell) for cell in row.find_all(["td", "th"])) for row in element.find_all("tr")]
            caption = [self._cell(c) for c in element.find_all("caption")]
            text = "\n".join(row for row in [*caption, *rows] if row.strip(" |"))
        else:
            return False
        self._end()
        if text:
            self._blocks.append(self._mark + text)
            self._mark = ""
        return True

    @staticmethod
    def _is_data(table: Tag) -> bool:
        """Not a table that only lays out the page: those hold tables, or one cell a row."""
        return table.find("table") is None and any(len(row.find_all(["td", "th"])) > 1 for row in table.find_all("tr"))

    @staticmethod
    def _cell(cell: Tag) -> str:
        return " ".join(_Writer().write(cell).split())
