"""Live: a document, a run that can be watched, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st
from parts import before, documents, exports, panels, recorded, settings
from parts.frame import REFRESH_S, active, answers, duration, facts, failure, in_plain_words, note, room, template, visitor

from masw import replay
from masw.jobs import CANCELLED, FAILED, Job
from masw.metrics import summarise
from masw.remarks import remarks
from masw.service import Answer, Ask, View, eta_s, speed_up

SLOW_S = 1.6  # seconds between two figures
WATCHED = ("Latency", "KV map", "Acceptance by position", "Draft memory")
STAGES = {
    "waiting": "in line",
    "loading": "loading the models",
    "reading": "reading the document",
    "decoding": "answering",
    "comparing": "comparing the outputs",
    "done": "done",
}


def page() -> None:
    st.title("Live")
    st.write(
        "A small draft model proposes, a large target checks; the draft remembers the document in a compact memory. Watch both work."
    )
    with st.sidebar:
        st.header("Settings")
        pair = settings.pair()
        method = settings.method(pair)
        arms = None
        with in_plain_words():
            arms = settings.options([method])
    doc = documents.choose()
    task, question = settings.task()
    ready = settings.fetch(pair)
    above, below = st.container(), st.container()
    job = _chosen()
    if job is None:
        with below:  # drawn first: a recorded run shows at once, while the tokens of the document are counted
            recorded.first_paint()
    ask = None
    with above:
        if doc is not None and arms is not None and ready:
            ask = before.said(settings.ask(pair, doc.text, doc.title, task, question, arms))
        _start(ask)
    if job is not None:
        with below:
            if job.active:
                _watch()
                _figures()
            else:
                _finished(job)


def _start(ask: Ask | None) -> None:
    job = active()
    with st.container(horizontal=True):
        again = any(a.work.ask.document == ask.document for a in answers()) if ask else False
        label = "Ask about the same document" if again and ask and ask.task == "question" else "Run"
        if st.button(label, type="primary", disabled=ask is None or job is not None, icon=":material/play_arrow:", key="run"):
            with in_plain_words():
                assert ask is not None
                st.session_state.shown = room().answer(visitor(), ask).id
                st.rerun()
        if st.button("Cancel", disabled=job is None, icon=":material/stop:", key="cancel") and job is not None:
            room().jobs.cancel(visitor(), job.id)
            st.rerun()


def _chosen() -> Job[Answer] | None:
    """The run on the page: the one in progress, else the one picked from the history, else the latest."""
    runs = answers()
    if not runs:
        return None
    running = next((j for j in runs if j.active), None)
    if running is not None:
        return running
    if len(runs) == 1:
        return runs[0]
    names = {j.id: f"{i}. {j.work.ask.arms[0].method}, {j.work.ask.task}, {j.work.ask.title}" for i, j in enumerate(runs, 1)}
    ids = list(names)[::-1]
    wanted = st.session_state.pop("shown", None)
    if wanted in ids:
        st.session_state.history = wanted
    picked = st.selectbox("Your runs", ids, format_func=names.__getitem__, key="history")
    return next(j for j in runs if j.id == picked)


# ---- while it runs


@st.fragment(run_every=REFRESH_S)
def _watch() -> None:
    """The one part of the page that polls fast: stage, progress, numbers, text."""
    with _priced():
        _moment()


def _moment() -> None:
    job = next((j for j in answers() if j.active), None)
    if job is None:
        st.rerun()
    view = job.work.view()
    place = room().jobs.position(job)
    if place:
        st.info(f"Number {place} in line: another run has the model. Yours starts by itself.", icon=":material/hourglass_top:")
        return
    _progress(view)
    if view.arms:
        arm = view.arms[view.current]
        panels.headline(arm.trace)
        panels.key()
        panels.answer(arm.trace, arm.pieces, "tokens", latest=panels.LATEST)


@st.fragment(run_every=SLOW_S)
def _figures() -> None:
    """The figures of a run in progress. Making one takes some 30 ms of the interpreter that the run needs too, so each tick renews one and
    sends the others as they are."""
    job = next((j for j in answers() if j.active), None)
    view = job.work.view() if job is not None else None
    if job is None or view is None or not view.arms or not view.arms[view.current].pieces:
        return
    trace = view.arms[view.current].trace
    if st.session_state.get("drawn_of") != job.id:
        st.session_state.drawn_of, st.session_state.drawn, st.session_state.tick = job.id, {}, 0
    made = st.session_state.drawn
    name = WATCHED[st.session_state.tick % len(WATCHED)]
    with _priced():
        made[name] = panels.PANELS[name](trace, template())
        st.session_state.tick += 1
        panels.side_by_side({n: made[n] for n in WATCHED if n in made}, "live", words=False)


@contextmanager
def _priced() -> Iterator[None]:
    """Adds up the processor time that drawing takes from a run."""
    begun = time.thread_time()
    try:
        yield
    finally:
        job = next((j for j in answers() if j.active), None)
        if job is not None and job.work.stage == "decoding":
            spent = st.session_state.setdefault("drawing_s", {})
            spent[job.id] = spent.get(job.id, 0.0) + time.thread_time() - begun


def _progress(view: View) -> None:
    left = eta_s(view)
    said = STAGES[view.stage] + (
        f", about {duration(left)} left" if left is not None and view.stage in ("reading", "decoding") else ""
    )
    st.html(f'<p class="masw-facts" role="status"><strong>{said}</strong></p>')
    if view.stage == "loading" and view.load:
        what, done, total = view.load
        st.progress(min(1.0, done / total) if total else 0.0, text=what.replace("_", " "))
    if not view.arms:
        return
    arm = view.arms[view.current]
    if view.stage == "reading":
        for who in ("target", "draft"):
            at = arm.progress.get(who)
            if at is not None:
                st.progress(at.done / max(1, at.total), text=f"{who}: {at.done:,} of {at.total:,} tokens read")
    elif view.stage == "decoding":
        most = arm.options.settings.max_new_tokens
        st.progress(min(1.0, len(arm.pieces) / most), text=f"{len(arm.pieces):,} of at most {most:,} tokens")


# ---- afterwards


def _finished(job: Job[Answer]) -> None:
    view = job.work.view()
    if job.state == FAILED:
        failure(f"The run failed: {job.error}")
    elif job.state == CANCELLED:
        note(
            "Cancelled. What was answered until then is kept: it is the target's own."
            if view.arms and view.arms[0].pieces
            else "Cancelled before the first token."
        )
    if not view.arms:
        return
    names = [a.options.method for a in view.arms]
    arm = (
        view.arms[names.index(st.segmented_control("Method shown", names, default=names[-1], required=True, key="arm"))]
        if len(names) > 1
        else view.arms[0]
    )
    if view.shared_tokens and view.prompt is not None and arm is view.arms[0]:
        facts(
            f"The target had read {view.shared_tokens:,} of the {len(view.prompt.ids):,} prompt tokens for an earlier question, "
            f"and read only the rest."
        )
    reference = next((a for a in view.arms if a.options.method == "none" and a.pieces), None)
    gain = speed_up(summarise(arm.trace), summarise(reference.trace)) if reference is not None else None
    panels.headline(arm.trace, gain, peak_bytes=arm.peak_bytes, gpu_bytes=arm.gpu_bytes)
    for said in remarks(arm.trace.header):
        note(said)
    drawing, decoding = st.session_state.get("drawing_s", {}).get(job.id), replay.decode_ms(arm.trace) / 1e3
    if drawing is not None and decoding:
        facts(f"Drawing this page took {drawing / decoding:.1%} of the decoding time (processor time, measured).")
    mode = st.segmented_control("Show", ["tokens", "text"], default="tokens", key="mode", required=True)
    if mode == "tokens":
        panels.key()
    panels.answer(arm.trace, arm.pieces, str(mode))
    exports.buttons(arm.trace, arm.pieces, "live")
    panels.draw(arm.trace, list(panels.PANELS), "done")


page()
