"""How a file's name is shown: short, on one line, with nothing in it that steers a terminal or a page."""

from __future__ import annotations

import unicodedata


def shown(name: str, limit: int = 60) -> str:
    """`name` in at most `limit` characters: its middle is left out, so that the beginning and the extension stay."""
    name = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in name)
    if len(name) <= limit:
        return name
    tail = max(1, limit // 3)
    return f"{name[: limit - tail - 1]}\N{HORIZONTAL ELLIPSIS}{name[-tail:]}"
