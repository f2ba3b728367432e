"""Memory calculator: what a draft's memory weighs, what a step costs and when compression pays. Predicted, for any shape."""

from __future__ import annotations

import json

import streamlit as st
from parts import panels
from parts.frame import escaped, facts, failure, gib, template

from masw import figures, whatif
from masw.config import MemoryShape, ModelConfig
from masw.errors import MaswError, UsageError, plain_words
from masw.figures.base import log_axes
from masw.whatif import DTYPES, SHAPES, Prediction, Setting

OWN = "config.json below"
CONTEXTS = [2**i for i in range(10, 21)]
BANDWIDTHS = {
    "2-core server, 20": 20.0,
    "laptop, 100": 100.0,
    "desktop GPU, 1,000": 1000.0,
    "A100 80 GB, 2,039": 2039.0,
    "H100 SXM, 3,350": 3350.0,
    "H200, 4,800": 4800.0,
}


def page() -> None:
    st.title("Memory calculator")
    st.write(
        "Bytes and times of any pair at any context. Everything on this page is predicted: bytes from the shapes, times from the "
        "bytes that a step reads."
    )
    with st.sidebar:
        st.header("Models")
        target = _model("Target", "target", "Llama 3.1 8B")
        draft = _model("Draft", "draft", "Llama 3.2 3B")
        st.header("Settings")
        context = st.select_slider("Context, tokens", CONTEXTS, 32768, format_func=_k, key="context", bind="query-params")
        batch = int(st.number_input("Batch, sequences", 1, 1024, 1, key="batch", bind="query-params"))
        gamma = st.slider("γ: drafted tokens a round", 1, 16, 5, key="cgamma", bind="query-params")
        stride = st.select_slider("r: raw tokens a slot", [2, 4, 8, 16, 32, 64], 8, key="cr", bind="query-params")
        window = st.select_slider("W: window, tokens", [64, 128, 256, 512, 1024, 2048, 4096], 512, key="cW", bind="query-params")
        sinks = st.slider("S: sinks, tokens", 0, 64, 4, key="cS", bind="query-params")
        weights = st.selectbox("Target weights", list(DTYPES), key="tw", bind="query-params")
        draft_weights = st.selectbox("Draft weights", list(DTYPES), key="dw", bind="query-params")
        cache = st.selectbox("KV caches", list(DTYPES), key="kv", bind="query-params")
        preset = st.selectbox(
            "Memory bandwidth, GB/s",
            list(BANDWIDTHS),
            index=5,
            key="machine",
            bind="query-params",
            help="What a step's time is priced at: data sheets, or `masw doctor` for this machine.",
        )
        bandwidth = st.number_input(
            "Another bandwidth, GB/s (0: as above)", 0.0, 100_000.0, 0.0, key="bandwidth", bind="query-params"
        )
        accepted = st.slider(
            "Acceptance with the compact memory",
            0.0,
            1.0,
            0.75,
            0.01,
            key="a",
            bind="query-params",
            help="Chance that a drafted token is kept. Measure it with a Race; it is an assumption here.",
        )
        full = st.slider("Acceptance with an uncompressed draft", 0.0, 1.0, 0.85, 0.01, key="af", bind="query-params")
    if target is None or draft is None:
        return
    try:
        setting = Setting(
            target, draft, MemoryShape(sinks, int(window), int(stride)), gamma, batch, DTYPES[weights], DTYPES[draft_weights],
            DTYPES[cache], (bandwidth or BANDWIDTHS[preset]) * 1e9, accepted, full,
        )  # fmt: skip
        here, found = whatif.predict(setting, int(context)), whatif.curve(setting, CONTEXTS[-1])
    except MaswError as error:
        failure(plain_words(error))
        return
    _numbers(here, setting)
    _verdict(found, here)
    _figures(setting, found)


def _model(label: str, key: str, default: str) -> ModelConfig | None:
    names = [*SHAPES, OWN]
    chosen = st.selectbox(label, names, index=names.index(default), key=key, bind="query-params")
    if chosen != OWN:
        return SHAPES[chosen]
    file = st.file_uploader(f"config.json of the {label.lower()}", type=["json"], key=f"{key}_file")
    if file is None:
        facts("Drop a config.json of a llama, mistral, qwen2 or qwen3 model here.")
        return None
    try:
        raw = json.loads(file.getvalue()[: 2**20].decode("utf-8", "replace"))
        if not isinstance(raw, dict):
            raise UsageError("config.json does not hold an object; take the one beside the model's weights")
        return ModelConfig.from_hf(raw)
    except (ValueError, KeyError, TypeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else "cannot be read"
        failure(f"config.json {what}; take the one beside the model's weights")
    except MaswError as error:
        failure(plain_words(error))
    return None


def _numbers(p: Prediction, s: Setting) -> None:
    found = [
        ("Target KV", gib(p.target_kv), "Of the whole batch at this context. Never compressed."),
        ("Draft KV, full", gib(p.draft_kv_full), "An uncompressed draft's cache."),
        ("Compact KV", gib(p.draft_kv), "S + W + rollback window + t / r entries."),
        ("Kept", f"{p.kept:.1%}", "Compact over full."),
        (
            "Target step",
            f"{p.target_step_ms:.2f} ms",
            "Weights and cache over the bandwidth; a verify pass reads the same bytes.",
        ),
        ("Draft step, full", f"{p.draft_step_full_ms:.2f} ms", "A drafted token with an uncompressed cache."),
        ("Compact step", f"{p.draft_step_ms:.2f} ms", "A drafted token with the compact memory."),
        ("Speed-up, full", f"{p.speedup_full:.2f}x", "Over plain decoding, at the assumed acceptance."),
        ("Compact gain", f"{p.speedup:.2f}x", "Speed-up of the compact memory over plain decoding, at the assumed acceptance."),
    ]
    st.subheader(f"At {_k(p.context)} tokens, batch {s.batch}, predicted")
    panels.cells(found)


def _verdict(found: list[Prediction], here: Prediction) -> None:
    parts = []
    for low, high, pays in whatif.stretches(found):
        span = f"from {_k(low)} to {_k(high)} tokens" if low != high else f"at {_k(low)} tokens"
        parts.append(f"{span} it {'pays' if pays else 'does not pay'}")
    longer = "" if here.draft_kv < here.draft_kv_full else " At this context the compact memory is not even smaller."
    st.html(
        f'<p class="masw-note"><strong>Compression of the draft:</strong> {escaped("; ".join(parts))}. '
        f"It pays where its speed-up is above that of an uncompressed draft and above 1.{longer}</p>"
    )


def _figures(s: Setting, found: list[Prediction]) -> None:
    look = template()
    contexts = [p.context for p in found]
    size = [
        {"method": name, "context": p.context, "predicted_bytes": value}
        for p in found
        for name, value in (("target", p.target_kv), ("draft, full", p.draft_kv_full), ("draft, compact", p.draft_kv))
    ]
    steps = [
        {"method": name, "context": p.context, "ms": value}
        for p in found
        for name, value in (
            ("target", p.target_step_ms),
            ("draft, full", p.draft_step_full_ms),
            ("draft, compact", p.draft_step_ms),
        )
    ]
    gains = [
        {"method": name, "context": p.context, "speed-up": value}
        for p in found
        for name, value in (("full", p.speedup_full), ("masw", p.speedup))
    ]
    memory = figures.memory_by_context(size, template=look)
    latency = figures.sweep(steps, "context", "ms", x_title="context (tokens)", y_title="time of one step (ms)", template=look)
    speed = figures.sweep(
        gains, "context", "speed-up", x_title="context (tokens)", y_title="speed-up over plain decoding", template=look
    )
    speed.figure.add_hline(1.0, line={"dash": "dot", "color": "#888888"})
    for drawn in (latency, speed):
        log_axes(drawn.figure, contexts)
    for row in ((memory, latency), (speed,)):
        for column, drawn in zip(st.columns(2), row, strict=False):
            with column:
                panels.show(drawn, f"calc-{drawn.alt[:40]}")


def _k(tokens: int) -> str:
    return f"{tokens / 2**20:.3g}M" if tokens >= 2**20 else f"{tokens / 1024:.3g}K"


page()
