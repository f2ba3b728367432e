"""A zip file that may be hostile: which document it is, and its members within a limit of unpacked bytes."""

from __future__ import annotations

import io
import zipfile
import zlib

from masw.documents.record import Limits
from masw.errors import UsageError


class Archive:
    """Members by name. Sizes are checked before anything is unpacked; zipfile never gives more than a member's stated size."""

    def __init__(self, data: bytes, name: str, limits: Limits) -> None:
        self.name, self._limits = name, limits
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError) as error:
            raise UsageError(f"{name} is a damaged zip-based file ({str(error)[:80]}); copy or export it again") from None
        self.members = {info.filename: info for info in self._zip.infolist()}
        self._unpacked = 0

    def kind(self) -> str:
        """docx | epub; UsageError for any other archive."""
        if "META-INF/container.xml" in self.members or self._is("mimetype", b"application/epub+zip"):
            return "epub"
        if "word/document.xml" in self.members or self._is("[Content_Types].xml", b"wordprocessingml.document.main+xml"):
            return "docx"
        for what, mark in (("an Excel workbook", "xl/workbook.xml"), ("a PowerPoint file", "ppt/presentation.xml")):
            if mark in self.members:
                raise UsageError(f"{self.name} is {what}, which is not read here; save its text as .docx, .pdf or plain text")
        if self._is("mimetype", b"application/vnd.oasis.opendocument"):
            raise UsageError(f"{self.name} is an OpenDocument file, which is not read here; save it as .docx or .pdf")
        raise UsageError(f"{self.name} is a zip archive without a document; unpack it and give one of its files")

    def _is(self, member: str, content: bytes) -> bool:
        info = self.members.get(member)
        return info is not None and info.file_size < 2**20 and content in self.read(member)

    def check(self, members: list[str] | None = None) -> None:
        """Refuses before unpacking where `members` (or all) state more bytes than allowed."""
        total = sum(i.file_size for n, i in self.members.items() if members is None or n in members)
        if total > self._limits.unpacked_bytes:
            raise UsageError(
                f"{self.name} unpacks to {total / 2**20:,.0f} MiB, over the limit of {self._limits.unpacked_bytes >> 20}; "
                "cut it to the part that matters"
            )

    def read(self, member: str) -> bytes:
        """Content of one member; UsageError when it is broken or the sum of what was unpacked passes the limit."""
        info = self.members[member]
        self._unpacked += info.file_size
        if self._unpacked > self._limits.unpacked_bytes:
            raise UsageError(
                f"{self.name} unpacks to more than {self._limits.unpacked_bytes >> 20} MiB; cut it to the part that matters"
            )
        if info.flag_bits & 1:
            raise UsageError(f"{self.name} is protected by a password; save it without one")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UsageError(f"{self.name} is packed in an unusual way; export it again")
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, NotImplementedError) as error:
            raise UsageError(f"{self.name} is damaged ({str(error)[:80] or 'cut short'}); copy or export it again") from None
