"""Notebooks that a reviewer can re-run: what they show (`display`), what they may be given (`schema`), how they run (`runner`) and what
comes out (`html`, `sidecar`, `diff`). Notebooks call `show`, `headline` and `environment_card`; the command is `masw report`.

Importing this package needs no extras; what needs one says so: pip install 'masw[notebooks]'.
"""

from __future__ import annotations

from masw.report.display import Drawn, environment_card, headline, show

__all__ = ["Drawn", "environment_card", "headline", "show"]
