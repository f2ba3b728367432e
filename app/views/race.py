"""Race: the same document and prefill for several methods, timed one after the other, then replayed side by side on one clock."""

from __future__ import annotations

import math

import streamlit as st
from parts import before, documents, exports, panels, recorded, settings
from parts.frame import (
    REFRESH_S,
    active,
    answers,
    duration,
    escaped,
    facts,
    failure,
    gib,
    in_plain_words,
    note,
    room,
    template,
    visitor,
)
from parts.player import player

from masw import figures, replay
from masw.jobs import CANCELLED, FAILED, Job
from masw.methods import METHODS
from masw.metrics import summarise
from masw.remarks import remarks
from masw.service import Answer, Arm, eta_s, methods, speed_up
from masw.trace import Trace

TICK_MS = 100
REFERENCE = "none"


def page() -> None:
    st.title("Race")
    st.write(
        "Plain decoding of the target and any drafts on one document: timed one after the other, so that none slows another, "
        "then replayed side by side."
    )
    with st.sidebar:
        st.header("Settings")
        pair = settings.pair()
        chosen = st.multiselect(
            "Methods beside plain decoding",
            [m for m in methods(pair) if m != REFERENCE],
            default=["full", "masw", "lookup"],
            key="methods",
            bind="query-params",
            help="All share the target's prefill; each draft reads the document once.",
        )
        arms = None
        with in_plain_words():
            arms = settings.options([REFERENCE, *chosen])
    doc = documents.choose()
    task, question = settings.task()
    ready = settings.fetch(pair)
    job = active()
    ask = None
    if doc is not None and arms is not None and ready and chosen:
        ask = before.said(settings.ask(pair, doc.text, doc.title, task, question, arms))
    with st.container(horizontal=True):
        if st.button("Race", type="primary", disabled=ask is None or job is not None, icon=":material/sports_score:", key="race"):
            with in_plain_words():
                assert ask is not None
                room().answer(visitor(), ask)
                st.rerun()
        if st.button("Cancel", disabled=job is None, icon=":material/stop:", key="cancel") and job is not None:
            room().jobs.cancel(visitor(), job.id)
            st.rerun()
    races = [j for j in answers() if len(j.work.ask.arms) > 1]
    if job is not None and isinstance(job.work, Answer):  # models being fetched have their own progress above
        _watch()
    elif races:
        _result(races[-1])
    else:
        _recorded()


@st.fragment(run_every=REFRESH_S)
def _watch() -> None:
    job = next((j for j in answers() if j.active), None)
    if job is None:
        st.rerun()
    place = room().jobs.position(job)
    if place:
        st.info(f"Number {place} in line: another run has the model. Yours starts by itself.", icon=":material/hourglass_top:")
        return
    view, wanted = job.work.view(), job.work.ask.arms
    for number, options in enumerate(wanted):
        arm = view.arms[number] if number < len(view.arms) else None
        name, most = options.method, options.settings.max_new_tokens
        if arm is None:
            st.progress(0.0, text=f"{name}: {view.stage if number == len(view.arms) and not view.arms else 'waits for its turn'}")
        elif not arm.pieces:
            read = list(arm.progress.values())
            now = read[-1] if read else None
            st.progress(
                now.done / max(1, now.total) if now else 0.0, text=f"{name}: {now.who if now else 'models'} reading the document"
            )
        else:
            left = eta_s(view) if number == view.current and not arm.finished else None
            about = f", about {duration(left)} left" if left else ""
            st.progress(
                min(1.0, len(arm.pieces) / most), text=f"{name}: {len(arm.pieces)} tokens{' (done)' if arm.finished else about}"
            )
    if view.arms:
        panels.answer(view.arms[view.current].trace, view.arms[view.current].pieces, "text")


def _result(job: Job[Answer]) -> None:
    view = job.work.view()
    if job.state == FAILED:
        failure(f"The race failed: {job.error}")
    elif job.state == CANCELLED:
        note("Cancelled. The arms that ran until then are shown.")
    arms = [a for a in view.arms if a.pieces]
    if arms:
        _show({a.options.method: a.trace for a in arms}, {a.options.method: a for a in arms})
        traces = {a.options.method: a.trace for a in arms}
        st.download_button(
            "Report of all arms (.html)", lambda: exports.report(traces, {a.options.method: a.pieces for a in arms}), "masw-race.html",
            "text/html", key="race-html", on_click="ignore",
        )  # fmt: skip


def _recorded() -> None:
    """Recorded runs of one prompt, when such came along: the page shows a race before the first one was run."""
    runs = recorded.shipped()
    groups: dict[tuple[object, ...], dict[str, Trace]] = {}
    for trace in runs.values():
        key = (trace.header.get("pair"), trace.header.get("prompt_tokens"), str(trace.header.get("settings")))
        groups.setdefault(key, {})[str(trace.header.get("method"))] = trace
    best = max(groups.values(), key=len, default={})
    best = {m: best[m] for m in METHODS if m in best}
    if len(best) > 1 and REFERENCE in best:
        st.subheader("A recorded race")
        facts("Recorded earlier, shown until you press Race.")
        _show(best, {})
    else:
        facts("Press Race to time the methods on this document.")


def _show(traces: dict[str, Trace], arms: dict[str, Arm]) -> None:
    _table(traces, arms)
    st.subheader("Side by side, on one clock")
    facts("The clock starts when the prompt has been read. Each text grows as it did when it was measured.")
    longest = max(replay.decode_ms(t) for t in traces.values())
    last = max(1, math.ceil(longest / TICK_MS))

    def draw(position: int) -> None:
        clock = longest if position == last else position * TICK_MS
        for row in range(0, len(traces), 2):
            for column, (name, trace) in zip(st.columns(2), list(traces.items())[row : row + 2], strict=False):
                part = replay.at(trace, clock)
                s = summarise(part)
                done = len(s.tokens) == len(summarise(trace).tokens)
                with column:
                    st.html(
                        f"<p class='masw-facts'><strong>{name}</strong>: {len(s.tokens)} tokens{', done ✓' if done else ''}</p>"
                    )
                    panels.answer(part, arms[name].pieces if name in arms else None, "tokens", latest=200, refused=False)

    player(
        "race",
        last,
        1000 / TICK_MS,
        lambda p: f"{min(p * TICK_MS, longest) / 1e3:.1f} s of {longest / 1e3:.1f} s",
        draw,
        "Clock (tenths of a second)",
    )
    panels.key()
    st.subheader("Why")
    look = template()
    drawn = [
        figures.speedup_curve(figures.speedup_rows(traces), template=look),
        figures.latency_parts(traces, template=look),
        figures.acceptance_by_position(traces, template=look),
        figures.rolling_acceptance(traces, template=look),
    ]
    for row in range(0, len(drawn), 2):
        for column, index in zip(st.columns(2), (row, row + 1), strict=True):
            with column:
                panels.show(drawn[index], f"race-{index}")


def _table(traces: dict[str, Trace], arms: dict[str, Arm]) -> None:
    reference = summarise(traces[REFERENCE]) if REFERENCE in traces else None
    heads = [
        "method",
        "tokens",
        "tokens/s",
        "speed-up",
        "tokens/iter",
        "acceptance",
        "draft reads the document",
        "draft KV, live",
        "output",
    ]
    rows = []
    for name, trace in traces.items():
        s = summarise(trace)
        gain = speed_up(s, reference) if reference is not None else None
        read = s.prefill_ms["draft"]
        rows.append(
            [
                name,
                f"{len(s.tokens)} ({s.finish})",
                panels.number(s.tokens_per_second, "{:.2f}"),
                panels.number(gain, "{:.2f}x"),
                panels.number(s.tokens_per_iteration),
                panels.number(s.acceptance, "{:.0%}") if s.acceptance is not None else "-",
                "-" if read is None else f"{read / 1e3:.2f} s",
                gib(s.draft_kv_bytes) if s.draft_kv_bytes else "-",
                _same(name, trace, arms.get(name), traces.get(REFERENCE)),
            ]
        )
    head = "".join(f"<th scope='col'>{h}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(c)}</td>" for c in row) + "</tr>" for row in rows)
    what = "race" if arms else "recorded race"
    st.html(
        f"<div class='masw-scroll' tabindex='0' role='region' aria-label='Result of the {what}'><table class='masw'>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    facts(
        "Speed-up: tokens a second in decoding over those of plain decoding (none), measured on the same prefill. n = 1 run of each."
    )
    for said in dict.fromkeys(r for t in traces.values() for r in remarks(t.header)):
        note(said)


def _same(name: str, trace: Trace, arm: Arm | None, reference: Trace | None) -> str:
    if name == REFERENCE:
        return "the reference"
    if arm is not None and not arm.compared:
        return "sampled: same distribution, not compared" if arm.options.settings.sampling.temperature else "not compared"
    if arm is not None and arm.difference is not None:
        d = arm.difference
        gap = "one output had ended" if d.logit_gap is None else f"logit gap there {d.logit_gap:.4f}"
        return f"differs first at token {d.index + 1} ({gap})"
    if arm is None and (reference is None or summarise(trace).tokens != summarise(reference).tokens):
        return "differs"
    return "✓ identical"


page()
