"""What every page starts with: the engine room, the visitor, styles, and text that is safe to put on a page."""

from __future__ import annotations

import atexit
import html
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from masw.cli.display import safe
from masw.errors import MaswError, plain_words
from masw.jobs import Job
from masw.service import Answer, Fetch, Room

COOKIE = "masw_visitor"
REFRESH_S = 0.4  # seconds between two looks at the text and numbers of a run in progress

STYLE = """
<style>
.masw-answer { line-height: 1.9; font-size: 1.02rem; overflow-wrap: anywhere; max-height: 32rem; overflow-y: auto;
  border: 1px solid rgba(128,128,128,.45); border-radius: .5rem; padding: .75rem .9rem; }
.masw-answer.plain { white-space: pre-wrap; }
.masw-t { border-radius: .25rem; padding: .08rem .18rem; margin: 0 1px; }
.masw-t sup { font-size: .62em; margin-left: .12em; }
.masw-t.rejected { text-decoration: line-through; }
.masw-key { display: flex; flex-wrap: wrap; gap: .5rem 1rem; font-size: .85rem; margin: .25rem 0 .5rem; }
.masw-note { border-left: 4px solid #E69F00; padding: .35rem .75rem; margin: .35rem 0; overflow-wrap: anywhere; }
.masw-doc { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow-y: auto; font-size: .88rem;
  border: 1px solid rgba(128,128,128,.45); border-radius: .5rem; padding: .6rem .8rem; margin: 0; }
.masw-sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.masw-table summary { cursor: pointer; font-size: .88rem; }
.masw-scroll { overflow-x: auto; max-height: 20rem; }
.masw-scroll table, table.masw { border-collapse: collapse; font-size: .85rem; }
.masw-scroll td, .masw-scroll th, table.masw td, table.masw th {
  border: 1px solid rgba(128,128,128,.45); padding: .15rem .5rem; text-align: left; }
[data-testid="stMetricValue"], [data-testid="stMetricValue"] * { font-size: 1.2rem;
  white-space: normal; overflow: visible; line-height: 1.25; }
[data-testid="stMetricLabel"] * { white-space: normal; }
[data-testid="stMetric"] { padding: .5rem .7rem; }
[data-testid="stMetric"] > div { padding: 0; }
.stMainBlockContainer { padding-top: 4.5rem; }
.masw-h { font-size: 1.02rem; font-weight: 600; margin: .5rem 0 -.5rem; }
.masw-facts { overflow-wrap: anywhere; font-size: .93rem; margin: 0; }
/* The dark theme's primary colour is light enough to be read as text on black; on a ground of that colour, white is not (3:1). */
[data-testid="stBaseButton-primary"]:enabled, [data-testid="stBaseButton-primary"]:enabled *,
[data-testid="stMultiSelect"] [data-tag], [data-testid="stMultiSelect"] [data-tag] * { color: light-dark(#fff, #000); }
[data-testid="stBaseButton-primary"]:enabled:is(:hover, :active) {
  background-color: light-dark(#005a8e, #6bb6e3); border-color: light-dark(#005a8e, #6bb6e3); }
</style>
"""

# Streamlit makes an entry in the history for each widget that is bound to the address, clears the address before it leaves a page, and
# forgets settings and document of a page that Back returns to. Here an entry is a page, with the settings it was left with, and Back does
# what the page's own link does. A page from before a reload is Streamlit's: it reads the settings from the address.
HISTORY = """
(() => {
  if (window.maswHistory) return;
  window.maswHistory = true;
  const push = history.pushState.bind(history), replace = history.replaceState.bind(history);
  const seen = new Set([location.pathname]);
  let page = location.pathname, leaving = false, awaited = null;
  function written(write, state, unused, address) {
    const to = new URL(address ?? "", location.href), same = to.pathname === location.pathname;
    if (same && !to.search && leaving) return;
    if (awaited !== null && to.pathname !== awaited) return;
    (same ? replace : write)(state, unused, address);
    if (!same || to.search) leaving = false;
    page = to.pathname;
    seen.add(page);
  }
  history.replaceState = (...entry) => written(replace, ...entry);
  history.pushState = (...entry) => written(push, ...entry);
  addEventListener("keydown", () => { awaited = null; }, true);
  addEventListener("click", (event) => {
    if (!event.isTrusted) return;
    awaited = null;
    const link = event.target.closest("a[href]");
    if (link && link.origin === location.origin && link.pathname !== page) leaving = true;
  }, true);
  addEventListener("popstate", (event) => {
    if (location.pathname === page) return;
    page = location.pathname;
    const link = [...document.querySelectorAll('a[data-testid^="stTopNav"]')].find((a) => a.pathname === page);
    if (!link || !seen.has(page)) return;
    event.stopImmediatePropagation();
    leaving = true;
    awaited = page;
    link.click();
  }, true);
})();
"""


@st.cache_resource(show_spinner=False)
def room() -> Room:
    """One engine room for all visitors: one model, one worker, one queue."""
    made = Room(
        device=os.environ.get("MASW_APP_DEVICE", "auto"),
        dtype=os.environ.get("MASW_APP_DTYPE", "auto"),
        ttl_s=float(os.environ.get("MASW_APP_TTL_S", "1800")),
    )
    kept = weakref.ref(made)

    def end() -> None:
        if (left := kept()) is not None:
            left.close()

    atexit.register(end)  # a run that goes on in a thread while Python ends would abort the whole program
    return made


def visitor() -> str:
    """This browser's id. A cookie of this session alone brings it back after a reload; an id that was not issued here is replaced."""
    if "visitor" not in st.session_state:
        st.session_state.visitor = room().jobs.visitor(st.context.cookies.get(COOKIE))
    return str(st.session_state.visitor)


def begin() -> None:
    """Styles, the cookie and the history's manners, at the head of each run of the script."""
    script = f'document.cookie = "{COOKIE}={visitor()}; path=/; SameSite=Strict";{HISTORY}'
    st.html(f"{STYLE}<script>{script}</script>", unsafe_allow_javascript=True)


def template() -> str:
    """light or dark, as the page is."""
    return "dark" if st.context.theme.type == "dark" else "light"


def escaped(text: str) -> str:
    """Any text as HTML that stays text: no markup, no LaTeX, no control, format or surrogate characters."""
    return html.escape(safe(text)).replace("$", "&#36;")


def note(text: str) -> None:
    """A remark. Never markdown: it may quote a document or a file name."""
    st.html(f'<p class="masw-note">{escaped(text)}</p>')


def facts(text: str) -> None:
    st.html(f'<p class="masw-facts">{escaped(text)}</p>')


def failure(text: str) -> None:
    st.html(f'<p class="masw-note" role="alert" style="border-color:#D55E00"><strong>✗</strong> {escaped(text)}</p>')


@contextmanager
def in_plain_words() -> Iterator[None]:
    """An error becomes one line on the page, never a traceback. Streamlit's own control flow passes through (no Exception)."""
    try:
        yield
    except MaswError as error:
        failure(plain_words(error))
    except Exception as error:
        if type(error).__module__.startswith("streamlit.runtime.scriptrunner"):  # rerun and stop
            raise
        failure(f"{plain_words(error)}; reload the page, and choose other settings if it happens again")


def answers() -> list[Job[Answer]]:
    """This visitor's runs that have something to show, oldest first."""
    return [j for j in room().jobs.of(visitor()) if isinstance(j.work, Answer)]  # type: ignore[misc]


def active() -> Job[Answer | Fetch] | None:
    return next((j for j in room().jobs.of(visitor()) if j.active), None)


def duration(seconds: float) -> str:
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def gib(count: float | None) -> str:
    if count is None:
        return "not measured"
    if count < 2**20:
        return f"{count / 2**10:,.1f} KiB"
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"
