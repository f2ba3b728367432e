"""Paths of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from masw.errors import UsageError


def folder(option: str) -> Callable[[str], Path]:
    """The parser of an option that names a folder to write into. An empty name, as of a variable that was never set, would mean the
    folder that one stands in."""

    def parse(text: str) -> Path:
        if not str(text).strip():  # a default comes as a path
            raise UsageError(f"{option} needs the name of a folder, and '.' is the one you are in")
        return Path(text)

    return parse
