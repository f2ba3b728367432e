"""Inspect: any trace, step by step, with all panels in step; two runs against each other."""

from __future__ import annotations

import streamlit as st
from parts import exports, panels, recorded
from parts.frame import answers, escaped, facts, failure, in_plain_words, note
from parts.player import player

from masw import replay
from masw.errors import MaswError, UsageError, plain_words
from masw.metrics import summarise
from masw.remarks import remarks
from masw.trace import Trace

LIMIT = 32 * 2**20  # bytes of an uploaded trace
NOTHING = "nothing"
UPLOADED = "uploaded trace"


def page() -> None:
    st.title("Inspect")
    st.write("Step through a recorded run. Every panel shows the moment that the slider points at.")
    runs = _runs()
    if not runs:
        facts("There is no trace yet: run something on the Live page, or upload a .jsonl file that `masw run --trace` wrote.")
        return
    names = list(runs)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        first = st.selectbox("Run", names, key="run_a", persist_state="session")
        second = st.selectbox(
            "Pinned beside it", [NOTHING, *(n for n in names if n != first)], key="run_b", persist_state="session"
        )
        grain = st.segmented_control(
            "Stop after every", ["round", "step"], default="round", key="grain", bind="query-params", required=True
        )
    shown = st.pills(
        "Panels", ["Answer", *panels.PANELS], selection_mode="multi", key="panels", bind="query-params",
        default=["Answer", "Latency", "Acceptance by position", "Draft memory", "KV map"],
    )  # fmt: skip
    traces = {first: runs[first]} | ({second: runs[second]} if second != NOTHING else {})
    stops = {n: (replay.rounds if grain == "round" else replay.moments)(t) for n, t in traces.items()}
    stops = {n: found for n, found in stops.items() if found}
    if not stops:
        facts("This trace holds no step to stop at.")
        return
    for name, trace in traces.items():
        for said in remarks(trace.header):
            note(f"{name}: {said}" if len(traces) > 1 else said)

    def label(position: int) -> str:
        said = [found[min(position, len(found) - 1)].label for found in stops.values()]
        return escaped(" | ".join(said))

    def draw(position: int) -> None:
        for column, (name, found) in zip(st.columns(len(stops)), stops.items(), strict=True):
            part = replay.until(traces[name], found[min(position, len(found) - 1)].events)
            with column, in_plain_words():
                if len(stops) > 1:
                    st.html(f"<h3>{escaped(name)}</h3>")
                panels.recorded(part)
                if "Answer" in shown:
                    panels.answer(part, None, "tokens", latest=panels.LATEST)
                wanted = [p for p in panels.PANELS if p in shown]
                if len(stops) > 1:
                    for panel in wanted:
                        panels.draw(part, [panel], f"inspect-{name}")
                else:
                    panels.draw(part, wanted, f"inspect-{name}")

    panels.key()
    player("inspect", max(len(found) for found in stops.values()) - 1, 2.0, label, draw, "Step")
    exports.buttons(traces[first], None, "inspect")


def _check(trace: Trace) -> None:
    """Raises UsageError where an event or the header lacks what masw writes."""
    try:
        replay.rounds(trace)
        summarise(trace)
        remarks(trace.header)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(
            f"the uploaded trace lacks what masw writes ({plain_words(error)}); record it again with masw run --trace"
        ) from None


def _runs() -> dict[str, Trace]:
    """Every trace there is: uploaded, of this visitor, shipped."""
    found: dict[str, Trace] = {}
    file = st.file_uploader("A trace of your own (.jsonl)", type=["jsonl"], key="trace_file")
    if file is not None:
        data = file.getvalue()
        try:
            if len(data) > LIMIT:
                raise MaswError(f"the trace is larger than {LIMIT >> 20} MiB; record a shorter run")
            trace = Trace.parse(data.decode("utf-8", "replace"), "the uploaded file")
            _check(trace)
            found[UPLOADED] = trace
            if st.session_state.get("uploaded") != file.file_id:  # a new file is what its owner wants to see
                st.session_state.uploaded, st.session_state.run_a = file.file_id, UPLOADED
                st.session_state.pop("inspect_at", None)
            if trace.truncated:
                note("The file ends in the middle of a line; what comes before it is shown.")
        except MaswError as error:
            failure(plain_words(error))
    for number, job in enumerate(answers(), 1):
        for arm in job.work.view().arms:
            if arm.trace.events:
                found[f"your run {number}, {arm.options.method}"] = arm.trace
    return found | {f"recorded: {name}": trace for name, trace in recorded.shipped().items()}


page()
