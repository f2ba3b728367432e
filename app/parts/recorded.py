"""Runs that come with masw, for pages that have no run of their own yet. No model is touched."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import streamlit as st

from masw.errors import MaswError
from masw.session import data_folder
from masw.trace import Trace
from parts import panels
from parts.frame import facts


@st.cache_resource(show_spinner=False)
def shipped() -> dict[str, Trace]:
    """name -> trace. Shared by all visitors and only read."""
    found = {}
    for path in sorted((data_folder() / "traces").glob("*.jsonl")):
        with suppress(MaswError):  # other tables of the documentation lie there too
            found[Path(path).stem] = Trace.load(path)
    return found


def first() -> tuple[str, Trace] | None:
    """The one that shows most: masw's own method if there is one."""
    runs = shipped()
    best = sorted(runs, key=lambda n: (runs[n].header.get("method") != "masw", n))
    return (best[0], runs[best[0]]) if best else None


def first_paint() -> None:
    """A recorded run, so that the page shows at once what it is about."""
    found = first()
    if found is None:
        facts("No recorded run came with this installation. Press Run to make one.")
        return
    name, trace = found
    st.subheader("A recorded run")
    facts(
        f"Recorded earlier, shown until you press Run: {name}, {trace.header.get('provenance', {}).get('created', 'date unknown')}."
    )
    panels.recorded(trace)
    panels.key()
    panels.answer(trace, None, "tokens", latest=panels.LATEST)
    panels.draw(trace, ["Latency", "KV map"], "recorded")
