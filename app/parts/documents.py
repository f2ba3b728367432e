"""The document of a visitor: uploaded, pasted or the sample. It stays in this session's memory."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from masw import documents
from masw.errors import MaswError, plain_words
from masw.session import data_folder
from parts.frame import escaped, facts, failure, note

SHOWN = 4000  # characters of the preview
KINDS = ["txt", "md", "pdf", "docx", "html", "htm", "epub"]


@dataclass(frozen=True)
class Doc:
    title: str
    text: str
    summary: str
    warnings: tuple[str, ...] = ()


def sample() -> Doc:
    found = documents.read_file(data_folder() / "samples" / "guide.md")
    return Doc("the guide (sample)", found.text, found.summary)


def choose() -> Doc | None:
    """The widgets of the document; None while there is nothing to read, or nothing that can be read."""
    source = st.segmented_control(
        "Document", ["Sample", "Upload", "Paste"], default="Sample", key="source", bind="query-params", width="stretch"
    )
    st.session_state.setdefault("kept", {})
    if source == "Upload":
        doc = _upload()
    elif source == "Paste":
        text = st.text_area(
            "Text of the document",
            height=180,
            key="pasted",
            persist_state="session",
            placeholder="Paste a long text. It stays in this session's memory.",
        )
        doc = _read("pasted text", text.encode("utf-8", "surrogatepass"), None, None) if text.strip() else None
    else:
        doc = sample()
    if doc is not None:
        _preview(doc)
    return doc


def _replaced() -> None:
    """A file that its visitor removed or replaced is gone; one that is out of sight, on another page, is kept."""
    st.session_state.kept.pop("upload", None)


def _upload() -> Doc | None:
    file = st.file_uploader(
        f"Text, Markdown, PDF, DOCX, HTML or EPUB, at most {documents.LIMITS.file_bytes >> 20} MiB",
        type=None,
        key="upload",
        on_change=_replaced,
        help="Told apart by its content, not by its name. The file is read in memory and never written to disk.",
    )
    if file is None:
        return st.session_state.kept.get("upload")
    data = file.getvalue()
    encoding = st.selectbox(
        "Encoding",
        ["as found", *documents.ENCODINGS],
        key="encoding",
        help="Of plain text and HTML. Choose another one when the preview shows wrong letters.",
    )
    password = None
    if st.session_state.get("wants_password") == file.file_id:
        password = st.text_input("Password of the PDF", type="password", key="password") or None
    try:
        doc = _read(file.name, data, password, None if encoding == "as found" else encoding)
    except MaswError as error:
        said = plain_words(error).replace("; give it with --password", "; type it below and press Enter")
        failure(said)
        if "password" in said and st.session_state.get("wants_password") != file.file_id:
            st.session_state.wants_password = file.file_id
            st.rerun()
        return None
    st.session_state.kept["upload"] = doc
    return doc


@st.cache_data(show_spinner="reading the document", max_entries=8, ttl=1800, scope="session")
def _read(name: str, data: bytes, password: str | None, encoding: str | None) -> Doc:
    found = documents.read_bytes(data, name, password=password, encoding=encoding)
    return Doc(documents.shown(name), found.text, found.summary, found.warnings)


def _preview(doc: Doc) -> None:
    facts(f"{doc.title}: {doc.summary}")
    for warning in doc.warnings:
        note(warning)
    with st.expander("What was read"):
        cut = f"\n… {len(doc.text) - SHOWN:,} further characters" if len(doc.text) > SHOWN else ""
        st.html(f'<pre class="masw-doc" tabindex="0" aria-label="Text of the document">{escaped(doc.text[:SHOWN])}{cut}</pre>')
