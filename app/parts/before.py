"""What a run will read, take and need, said before it runs."""

from __future__ import annotations

import streamlit as st

from masw.errors import MaswError, plain_words
from masw.service import Ask, Preview
from parts.frame import active, answers, duration, facts, failure, gib, note, room, visitor


def said(ask: Ask) -> Ask | None:
    """Says it; None when the run would be refused."""
    if ask.task == "question" and not ask.question:
        facts("Type a question to see what a run will take.")
        return None
    try:
        with st.spinner("counting tokens", show_time=False):
            found = _previewed(ask)
    except MaswError as error:
        failure(plain_words(error))
        return None
    e = found.estimate
    low, high = duration(e.low_s), duration(e.high_s)
    time_ = high if low == high else f"{low} to {high}"
    arms = f" for {len(ask.arms)} methods" if len(ask.arms) > 1 else ""
    source = "from the rates of an earlier run" if e.measured else "predicted from this machine's rates"
    facts(
        f"{len(found.prompt.ids):,} prompt tokens of {found.context_limit:,} the pair has positions for · {time_}{arms} ({source}) · "
        f"{gib(e.run_bytes)} beside the weights (predicted), {gib(found.free_bytes)} free"
    )
    if found.prompt.notice:
        note(found.prompt.notice)
    if not found.fits:
        failure("the run needs more memory than is free; take a smaller pair, fewer new tokens or a shorter document")
        return None
    return ask


def _previewed(ask: Ask) -> Preview:
    """Counting the tokens of a long document takes a second: once for the same request, and again after a run, whose rates are new."""
    key = (ask, len(answers()), active() is None)
    if st.session_state.get("preview_of") != key:
        st.session_state.preview = room().preview(ask, visitor())
        st.session_state.preview_of = key
    return st.session_state.preview  # type: ignore[no-any-return]
