"""A clock that all panels of a page follow: slider, play, pause, step by step, speed. One fragment polls, and only while it plays."""

from __future__ import annotations

import time
from collections.abc import Callable

import streamlit as st

TICK_S = 0.4
SPEEDS = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]


def player(key: str, last: int, rate: float, label: Callable[[int], str], draw: Callable[[int], None], what: str) -> None:
    """Calls `draw(position)` for 0 <= position <= last. `rate`: positions a second at speed 1; `label` says what a position is.

    The position starts at the end, so that a page shows the whole run first.
    """
    at, play, since, speed = (f"{key}_{name}" for name in ("at", "play", "since", "speed"))
    st.session_state.setdefault(at, last)
    st.session_state[at] = max(0, min(last, st.session_state[at]))
    playing = bool(st.session_state.get(play))

    def move(by: int) -> None:
        st.session_state[play] = False
        st.session_state[at] = max(0, min(last, st.session_state[at] + by))

    def toggle() -> None:
        st.session_state[play] = not st.session_state.get(play)
        if st.session_state[play] and st.session_state[at] >= last:
            st.session_state[at] = 0
        st.session_state[since] = (time.monotonic(), st.session_state[at])

    def restart() -> None:
        st.session_state[since] = (time.monotonic(), st.session_state[at])

    @st.fragment(run_every=TICK_S if playing else None)
    def body() -> None:
        if bool(st.session_state.get(play)) != playing:
            st.rerun()
        if playing:
            begun, start = st.session_state[since]
            here = min(last, start + int((time.monotonic() - begun) * rate * st.session_state.get(speed, 1.0)))
            st.session_state[at] = here
            st.session_state[play] = here < last
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.button("Start", icon=":material/first_page:", key=f"{key}_first", on_click=move, args=(-last - 1,))
            st.button("Back", icon=":material/chevron_left:", key=f"{key}_back", on_click=move, args=(-1,))
            st.button(
                "Pause" if playing else "Play",
                icon=":material/pause:" if playing else ":material/play_arrow:",
                key=f"{key}_toggle",
                on_click=toggle,
                type="primary",
            )
            st.button("Next", icon=":material/chevron_right:", key=f"{key}_next", on_click=move, args=(1,))
            st.selectbox("Speed", SPEEDS, index=2, format_func="{:g}x".format, key=speed, width=110, on_change=restart)
        position = st.slider(what, 0, max(1, last), key=at, on_change=move, args=(0,))
        st.html(f'<p class="masw-facts" role="status"><strong>{label(min(last, position))}</strong></p>')
        draw(min(last, position))
        if playing and not st.session_state[play]:
            st.rerun()

    body()
