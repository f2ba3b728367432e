"""A document of any common kind -> text. Plain text, Markdown, PDF, DOCX, HTML and EPUB, told apart by their content.

Bytes stay in memory. What is not plain UTF-8 or marked text is parsed in a separate process with a time and a memory limit, which
receives the bytes through a pipe; nothing touches the disk. Every refusal is a UsageError of one line.
"""

from masw.documents.names import shown
from masw.documents.reading import read, read_bytes, read_file
from masw.documents.record import LIMITS, Document, EncodingNeeded, Limits, PasswordNeeded
from masw.documents.text import ENCODINGS

__all__ = [
    "ENCODINGS",
    "LIMITS",
    "Document",
    "EncodingNeeded",
    "Limits",
    "PasswordNeeded",
    "read",
    "read_bytes",
    "read_file",
    "shown",
]
