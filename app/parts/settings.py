"""The settings of a run. Every widget is bound to the address, so that a link restores them; no text of a document is among them."""

from __future__ import annotations

import os

import streamlit as st

from masw.catalogue import PRESETS, SOURCES
from masw.engine import Settings
from masw.jobs import CANCELLED
from masw.methods import METHODS, MemoryOptions
from masw.service import Ask, Fetch, methods, present
from masw.session import RunOptions, shipped_adaptors
from masw.verify import Sampling
from parts.frame import active, facts, failure, gib, in_plain_words, note, room, visitor

# No format_func on a bound widget: the address would hold what it shows, and not the option.
TASKS = {"Summarise": "summarize", "Ask a question": "question", "Continue the text": "continue"}
WEIGHTS = ["auto", "plain", "int8", "int4"]


def pairs() -> list[str]:
    """The presets, led by the pair that the app was started with."""
    mine = os.environ.get("MASW_APP_PAIR", "")
    first = [mine] if mine and mine not in PRESETS else []
    return [*first, *PRESETS]


def default_pair() -> str:
    mine = os.environ.get("MASW_APP_PAIR", "")
    if mine:
        return mine
    return next((name for name in ("qwen2.5-coder", "smollm2") if present(name)), "tiny")


def adaptors() -> dict[str, str]:
    """label -> what a run is given."""
    extra = [p for p in os.environ.get("MASW_APP_ADAPTORS", "").split(os.pathsep) if p]
    found = {"auto": "auto", "quiet": "quiet", "none": "none"}
    paths = [*map(str, shipped_adaptors()), *extra]
    names = [os.path.basename(path) for path in paths]
    for name, path in zip(names, paths, strict=True):  # every training calls its best one best.safetensors
        found[os.path.join(os.path.basename(os.path.dirname(path)), name) if names.count(name) > 1 else name] = path
    return found


def pair() -> str:
    names = pairs()
    chosen = st.selectbox(
        "Model pair",
        names,
        index=names.index(default_pair()),
        key="pair",
        bind="query-params",
        help="Draft and target. `tiny` is random weights and answers with noise: it shows the mechanism in a second.",
    )
    preset = PRESETS.get(chosen)
    if preset is not None:
        facts(f"{SOURCES[preset.draft].title} drafts for {SOURCES[preset.target].title}: {preset.note}")
    return str(chosen)


def method(pair: str) -> str:
    names = methods(pair)
    chosen = st.selectbox(
        "Method",
        names,
        index=names.index("masw"),
        key="method",
        bind="query-params",
        help="Who drafts, and what the draft remembers of the document.",
    )
    facts(METHODS[chosen].title)
    return str(chosen)


def options(chosen: list[str]) -> tuple[RunOptions, ...]:
    """Widgets of everything else; one RunOptions for each method. Raises UsageError for values that do not fit each other."""
    shapes = [METHODS[m] for m in chosen]
    drafting, remembers = any(m.drafts for m in shapes), any(m.model for m in shapes)
    memories = [m.shape(MemoryOptions()) for m in shapes if m.shape is not None]
    compact, slots = any(m.window is not None for m in memories), any(m.stride is not None for m in memories)
    new = st.slider("New tokens, at most", 8, 1024, 128, 8, key="tokens", bind="query-params")
    gamma = st.slider(
        "γ: drafted tokens a round", 1, 16, 5, key="gamma", bind="query-params", disabled=not drafting,
        help="The target checks all of them in one pass. A block and the slots in it must fit the rollback window of 16 tokens.",
    )  # fmt: skip
    adaptive = st.toggle(
        "Choose γ each round, up to this", key="auto", bind="query-params", disabled=not drafting,
        help="Each round drafts as many tokens as pay on the times and the acceptance of the rounds before, none where none do. A method "
        "that can draft or copy takes what has paid more.",
    )  # fmt: skip
    with st.expander("The draft's memory", expanded=True):
        stride = st.select_slider(
            "r: raw tokens a slot", [2, 4, 8, 16, 32], 8, key="r", bind="query-params", disabled=not compact,
            help="One memory slot is written after every r tokens, and stays.",
        )  # fmt: skip
        window = st.select_slider(
            "W: window, tokens", [16, 32, 64, 128, 256, 512, 1024, 2048, 4096], 512, key="W", bind="query-params", disabled=not compact,
            help="The last W tokens are kept exactly.",
        )  # fmt: skip
        sinks = st.slider(
            "S: sinks, tokens",
            0,
            64,
            4,
            key="S",
            bind="query-params",
            disabled=not compact,
            help="The first S tokens are kept exactly.",
        )
        names = adaptors()
        adaptor = st.selectbox(
            "Adaptor", list(names), key="adaptor", bind="query-params", disabled=not slots,
            help="Trained mirrored projections of the slots. auto: the one shipped for this draft, else slots that nothing looks at.",
        )  # fmt: skip
        weights = st.selectbox(
            "Draft weights", WEIGHTS, key="weights", bind="query-params", disabled=not remembers,
            help="A quantised draft is faster and never changes the output.",
        )  # fmt: skip
    with st.expander("Sampling"):
        temperature = st.slider("Temperature", 0.0, 2.0, 0.0, 0.1, key="temperature", bind="query-params", help="0 is greedy.")
        top_p = st.slider(
            "Top-p", 0.05, 1.0, 1.0, 0.05, key="top_p", bind="query-params", disabled=temperature == 0,
            help="Draw from the likeliest tokens that together reach p.",
        )  # fmt: skip
        seed = int(st.number_input("Seed", 0, 2**31 - 1, 0, key="seed", bind="query-params", disabled=temperature == 0))
    settings = Settings(new, gamma, Sampling(float(temperature), 0, float(top_p), seed), adaptive=adaptive)
    memory = MemoryOptions(sinks, int(window), int(stride))
    return tuple(RunOptions(m, memory, settings, names[adaptor], str(weights)) for m in chosen)


def task() -> tuple[str, str | None]:
    """(task, question). The question is text of the visitor's and stays out of the address."""
    chosen = st.segmented_control(
        "Task", list(TASKS), default="Summarise", key="task", bind="query-params", required=True, width="stretch"
    )
    if TASKS[str(chosen)] != "question":
        return TASKS[str(chosen)], None
    return "question", st.text_input("Question about the document", key="question", persist_state="session") or None


def fetch(name: str) -> bool:
    """Whether the pair is here; if not, offers to fetch it and shows how far that is."""
    if present(name):
        return True
    job = active()
    if job is not None and isinstance(job.work, Fetch):
        _fetching()
        return False
    sources = {SOURCES[a] for a in (PRESETS[name].draft, PRESETS[name].target)} if name in PRESETS else set()
    size = f" ({gib(sum(s.download_bytes for s in sources))} to download)" if sources else ""
    facts(f"The models of {name} are not on this machine{size}.")
    last = next((j for j in reversed(room().jobs.of(visitor())) if isinstance(j.work, Fetch)), None)
    if last is not None and last.work.pair == name:
        if last.error:
            failure(last.error)
        elif last.state == CANCELLED:
            facts("Fetching was stopped. What was fetched stays, and the next fetch goes on from there.")
    if st.button(f"Fetch {name}", key="fetch", icon=":material/download:"):
        with in_plain_words():
            room().fetch(visitor(), name)
            st.rerun()
    return False


@st.fragment(run_every=0.5)
def _fetching() -> None:
    job = active()
    if job is None or not isinstance(job.work, Fetch):  # done, and another window of the visitor's may already run something
        st.rerun()
    what, done, total = job.work.load or ("waiting in line", 0, 0)
    st.progress(min(1.0, done / total) if total else 0.0, text=f"{what}: {gib(done)} of {gib(total)}" if total else what)
    for said in job.work.notes[-1:]:
        note(said)
    if st.button("Stop fetching", key="stop_fetch"):
        room().jobs.cancel(visitor(), job.id)


def ask(pair: str, document: str, title: str, task: str, question: str | None, arms: tuple[RunOptions, ...]) -> Ask:
    return Ask(pair, document, title, task, question, arms)
