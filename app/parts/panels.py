"""Drawing: headline numbers, coloured text, figures with their words and tables. No number is computed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import psutil
import streamlit as st

from masw import figures
from masw.figures import COLOURS, GLYPHS, Drawn, token_html
from masw.figures.base import on
from masw.metrics import summarise
from masw.report.display import table_twin
from masw.timeline import FATES, fates
from masw.trace import Trace
from parts.frame import escaped, gib, template

MEANING = {
    "accepted": "accepted draft",
    "rejected": "refused draft",
    "correction": "correction by the target",
    "bonus": "bonus of the target",
    "target": "target alone",
    "pending": "drafted, not judged yet",
}
LATEST = 500  # tokens that a text in progress shows in colour

# What the panels of one run are, in the order in which they are read.
PANELS: dict[str, Callable[[Trace, str], Drawn]] = {
    "Latency": lambda t, look: figures.step_latency(t, template=look),
    "Acceptance by position": lambda t, look: figures.acceptance_by_position({_name(t): t}, template=look),
    "Acceptance over the answer": lambda t, look: figures.rolling_acceptance({_name(t): t}, template=look),
    "Draft memory": lambda t, look: figures.memory_bytes({_name(t): t}, template=look),
    "KV map": lambda t, look: figures.kv_map(t, rows=80, template=look),
    "Tokens": lambda t, look: figures.token_strip(t, limit=240, template=look),
}


def _name(trace: Trace) -> str:
    return str(trace.header.get("method", "run"))


def show(drawn: Drawn, key: str, *, words: bool = True) -> None:
    """A figure, its caption, and the same in words and as a table."""
    # The title becomes a heading of the page: it wraps, a screen reader finds it, and it cannot run into the legend.
    title = str(drawn.figure.layout.title.text or drawn.figure.layout.meta or "")
    st.html(f'<p class="masw-h" role="heading" aria-level="3">{escaped(title[:1].upper() + title[1:])}</p>')
    drawn.figure.update_layout(title=None, meta=title, autosize=True, modebar={"remove": ["lasso2d", "select2d"]})
    st.plotly_chart(drawn.figure, theme=None, key=key, config=dict(figures.CONFIG), alt=drawn.alt)
    if words:
        st.html(f'<p class="masw-facts"><em>{escaped(drawn.caption)}</em></p>{table_twin(drawn.table)}')


def draw(trace: Trace, names: Sequence[str], key: str) -> None:
    """The named panels, two side by side."""
    side_by_side({name: PANELS[name](trace, template()) for name in names}, key)


def side_by_side(drawn: Mapping[str, Drawn], key: str, *, words: bool = True) -> None:
    names = list(drawn)
    for row in range(0, len(names), 2):
        for column, name in zip(st.columns(2), names[row : row + 2], strict=False):
            with column:
                show(drawn[name], f"{key}-{name}", words=words)


def number(value: float | None, form: str = "{:.2f}") -> str:
    return "not measured" if value is None else form.format(value)


def headline(trace: Trace, speedup: float | None = None, peak_bytes: int | None = None, gpu_bytes: int | None = None) -> None:
    """The row of key figures, each with what it means."""
    s = summarise(trace)
    drafts = s.acceptance is not None
    kv = trace.header.get("draft_kv") or {}
    found = [
        ("Tokens", str(len(s.tokens)), "Tokens of the answer so far."),
        ("Tokens/s", number(s.tokens_per_second, "{:.1f}"), "Emitted tokens a second of decoding; prefill does not count."),
        (
            "Speed-up",
            number(speedup, "{:.2f}x"),
            "Tokens a second over those of autoregressive decoding, measured on the same prefill. Run a Race to measure it.",
        ),
        (
            "Tokens/iter",
            number(s.tokens_per_iteration),
            "Emitted tokens for each pass of the target, with the correction or bonus token. 1 is plain decoding.",
        ),
        (
            "Acceptance",
            number(s.acceptance, "{:.0%}") if drafts else "nothing drafted",
            "Share of drafted tokens that the target kept.",
        ),
        (
            "First token",
            number(None if s.ttft_ms is None else s.ttft_ms / 1e3, "{:.2f} s"),
            "Prefill of both models and the first round.",
        ),
        ("Draft step", number(s.draft_ms, "{:.1f} ms") if drafts else "no draft model", "Median time of one drafted token."),
        ("Verify pass", number(s.verify_ms, "{:.1f} ms"), "Median time of one pass of the target over a block."),
        (
            "Draft KV",
            gib(s.draft_kv_bytes) if kv else "no draft model",
            "Live bytes of the draft's memory, measured." if kv else "No draft model reads the document.",
        ),
        (
            "Draft KV, full",
            gib(kv.get("full_bytes")) if kv else "no draft model",
            "An uncompressed cache of the whole run, predicted.",
        ),
        ("Target KV", gib(s.target_kv_bytes), "Live bytes of the target's cache, which is never compressed."),
        (
            "Process",
            gib(peak_bytes if peak_bytes is not None else psutil.Process().memory_info().rss),
            "Resident memory of the whole program: models, caches and page server."
            + (" The most during this run." if peak_bytes is not None else " Now."),
        ),
        ("GPU", gib(gpu_bytes) if gpu_bytes is not None else "no GPU used", "Most GPU memory allocated during the run."),
    ]
    cells(found)


def recorded(trace: Trace) -> None:
    """Headline numbers of a trace from a file, or of a part of one: what only the machine knew then is left out."""
    s = summarise(trace)
    kv = trace.header.get("draft_kv") or {}
    cells(
        [
            ("Tokens", str(len(s.tokens)), "Tokens of the answer up to here."),
            ("Tokens/s", number(s.tokens_per_second, "{:.1f}"), "Emitted tokens a second of decoding."),
            ("Tokens/iter", number(s.tokens_per_iteration), "Emitted tokens for each pass of the target."),
            (
                "Acceptance",
                number(s.acceptance, "{:.0%}") if s.acceptance is not None else "nothing drafted",
                "Share of drafts kept.",
            ),
            ("Verify pass", number(s.verify_ms, "{:.0f} ms"), "Median time of a pass of the target."),
            ("Draft KV", gib(s.draft_kv_bytes) if kv else "no draft model", "Live bytes of the draft's memory."),
        ]
    )


def cells(items: Sequence[tuple[str, str, str]]) -> None:
    with st.container(horizontal=True, gap="small"):
        for label, value, about in items:
            st.metric(label, value, help=about, border=True, width=148)


def key() -> None:
    """What colours and glyphs mean."""
    items = "".join(
        f'<span><span class="masw-t {f}" style="{_paint(f)}">{GLYPHS[f]}</span> {MEANING[f]}</span>'
        for f in FATES
        if f in MEANING
    )
    st.html(f'<div class="masw-key">{items}</div>')


def answer(trace: Trace, pieces: Sequence[str] | None, mode: str, *, latest: int | None = None, refused: bool = True) -> None:
    """The text of a run. mode: `tokens` paints every token by its fate, with `refused` drafts among them; `text` is what was emitted."""
    if mode == "text" and pieces is not None:
        body = escaped("".join(pieces)) or "…"
        st.html(f'<div class="masw-answer plain" role="region" aria-label="Answer" tabindex="0">{body}</div>')
        return
    body = coloured(trace, pieces, latest, refused=refused)
    st.html(f'<div class="masw-answer" role="region" aria-label="Answer, token by token" tabindex="0">{body}</div>')


def coloured(trace: Trace, pieces: Sequence[str] | None, latest: int | None = None, *, refused: bool = True) -> str:
    """HTML of the tokens in order. `pieces`: texts of the emitted ones where they are known whole; else each id's own."""
    texts = trace.header.get("pieces") or {}
    found = fates(trace)
    emitted, out = 0, []
    for token in found:
        counted = token.fate not in ("rejected", "pending")
        # The text of a draft is known once its round is over.
        piece = texts.get(str(token.id), "…" if token.fate == "pending" else f"[{token.id}]")
        if counted:
            piece = pieces[emitted] if pieces is not None and emitted < len(pieces) else piece
            emitted += 1
        if counted or refused:
            out.append((token, piece))
    cut = max(0, len(out) - latest) if latest else 0
    head = f"<em>{cut:,} earlier tokens, then</em> … " if cut else ""
    return head + "".join(_chip(t.fate, piece, _hover(t.fate, t.position, t.p, t.q)) for t, piece in out[cut:]) or "…"


def _chip(fate: str, piece: str, hover: str) -> str:
    """One token: white space around it stays white space, so that the text reads as text."""
    core = piece.strip(" \n")
    lead = piece[: len(piece) - len(piece.lstrip(" \n"))] if core else ""
    trail = piece[len(lead) + len(core) :] if core else ""
    shown = token_html(core if core else piece or "␣", 80)
    breaks = "<br>" * min(2, (lead + trail).count("\n") + (0 if core else piece.count("\n")))
    space = " " if " " in lead else ""
    chip = f'<span class="masw-t {fate}" style="{_paint(fate)}" title="{hover}">{shown}<sup aria-hidden="true">{GLYPHS[fate]}</sup></span>'
    return f"{space}{chip}{' ' if trail else ''}" + (breaks if fate != "rejected" else "") + "<wbr>"


def _paint(fate: str) -> str:
    return f"background:{COLOURS[fate]};color:{on(COLOURS[fate])}"


def _hover(fate: str, position: int, p: float | None, q: float | None) -> str:
    parts = [MEANING[fate], f"position {position:,}"]
    parts += [f"q = {q:.3f}"] if q is not None else []
    parts += [f"p = {p:.3f}"] if p is not None else []
    return ", ".join(parts)
