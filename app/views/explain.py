"""Explain: the mechanism in eight steps, with the figures of the notebooks."""

from __future__ import annotations

import streamlit as st
from parts import panels, recorded
from parts.frame import facts, template

from masw import figures, whatif
from masw.config import MemoryShape
from masw.whatif import SHAPES, Setting

SMALL = MemoryShape(2, 6, 4)  # small enough to be drawn entry by entry
TEXT = "The draft keeps the first words , the last words , and one slot for every four between ."
WORDS = TEXT.split()


def page() -> None:
    st.title("Explain")
    st.write(
        "How a strong draft works with a compact memory, in eight steps. Each has a notebook that goes further: "
        "`jupyter lab notebooks` opens them."
    )
    look = template()
    found = recorded.first()
    runs = recorded.shipped()

    _step(
        1,
        "A long document makes drafting slow",
        "05_latency_and_memory",
        "A draft model proposes tokens one at a time, and for each it reads its whole cache. The cache grows with the document, "
        "so a strong draft gets slower and slower: on a long document it costs nearly as much as it saves. The curves price the "
        "bytes that one step of a 3B draft reads (predicted, 4,800 GB/s).",
    )
    s = Setting(SHAPES["Llama 3.1 8B"], SHAPES["Llama 3.2 3B"], MemoryShape(4, 512, 8), batch=16)
    rows = [
        {"method": name, "context": p.context, "ms": value}
        for p in whatif.curve(s, 131_072, 16)
        for name, value in (("draft, full", p.draft_step_full_ms), ("draft, compact", p.draft_step_ms))
    ]
    panels.show(
        figures.sweep(
            rows, "context", "ms", x_title="context (tokens)", y_title="time of a draft step, batch 16 (ms)", template=look
        ),
        "explain-1",
    )

    _step(
        2,
        "Draft, then verify",
        "04_rollback_and_losslessness",
        "The draft proposes a few tokens; the target checks all of them in one pass. What it agrees with is kept (✓), the first "
        "disagreement is replaced by the target's own token (↻) and the rest is dropped (✗). When everything was kept the "
        "target adds a bonus token (+). The output is the target's own, whatever the draft proposes.",
    )
    if found is not None:
        panels.key()
        panels.answer(found[1], None, "tokens", latest=120)
    else:
        facts("A run on the Live page shows it.")

    _step(
        3,
        "Keep the beginning and the end",
        "02_eviction",
        "The draft keeps the first S tokens (sinks, where much attention rests) and the last W tokens (the window) exactly. "
        "What lies between leaves the memory. That alone is cheap, and forgets the document.",
    )
    panels.show(figures.slot_birth(WORDS, SMALL, template=look), "explain-3")

    _step(
        4,
        "A slot for every r tokens",
        "01_slots",
        "After every r tokens a memory slot goes through the model like a token. It reads the window, the sinks and the earlier "
        "slots, and its keys and values stay for good. Its key and value projections are mirrored: a copy that alone is "
        "trained. It takes the position of the token that follows, so positions repeat and no later token moves.",
    )
    panels.show(figures.slot_sources(MemoryShape(4, 64, 8), 400, template=look), "explain-4")

    _step(
        5,
        "Who sees whom",
        "01_slots",
        "A token sees the sinks, its window and all slots before it. A slot sees the same, so slots form a chain: what one has "
        "read, the next can pass on.",
    )
    panels.show(figures.visibility_mask(SMALL, len(WORDS), pieces=WORDS, template=look), "explain-5")

    _step(
        6,
        "The memory over a run",
        "02_eviction",
        "During prefill slots appear and raw tokens leave; during decoding the window slides on. Nothing that is kept ever "
        "changes.",
    )
    if found is not None:
        panels.show(figures.kv_map(found[1], rows=70, template=look), "explain-6")

    _step(
        7,
        "Take back what was refused",
        "04_rollback_and_losslessness",
        "Refused tokens and the slots born among them leave the memory again, bit for bit: a rollback window of 16 tokens keeps "
        "what the sliding window would have dropped too early. How far a block gets says how good the draft is.",
    )
    traces = {str(t.header.get("method")): t for t in runs.values() if t.header.get("method") in ("full", "masw", "window")}
    if traces:
        panels.show(figures.acceptance_by_position(traces, template=look), "explain-7")

    _step(
        8,
        "When it pays",
        "05_latency_and_memory",
        "A draft pays when it is fast for what it gets right: tokens per iteration over the time of its γ steps and one verify "
        "pass. A compact memory makes the steps cheaper and the guesses worse. On short prompts and small models the cache is a "
        "small part of a step, and an uncompressed draft is the better choice.",
    )
    traces = {
        str(t.header.get("method")): t
        for t in runs.values()
        if t.header.get("pair") == (found[1].header.get("pair") if found else None)
    }
    panels.show(figures.speedup_curve(figures.speedup_rows(traces), template=look), "explain-8")
    facts("The memory calculator has the same question for other models, contexts and machines.")


def _step(number: int, title: str, notebook: str, text: str) -> None:
    st.header(f"{number}. {title}")
    st.write(text)
    facts(f"Notebook: notebooks/{notebook}.ipynb")


page()
