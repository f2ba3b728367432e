"""What a visitor can take along: tables, the trace, a page, the notebook's parameters. Made in memory when asked for."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import streamlit as st

from masw import export, figures
from masw.metrics import summarise
from masw.remarks import remarks
from masw.report.display import table_twin
from masw.trace import Trace
from parts.frame import escaped, gib
from parts.panels import PANELS, coloured

MOST_EVENTS = 4_000  # whose tables take a sixth of a second (41 µs an event, measured)


def buttons(trace: Trace, pieces: Sequence[str] | None, key: str) -> None:
    """Downloads of one run. Tables are made at once: what is made on the click is known by a name that lasts for one run of the script,
    and a click while the page is drawn anew would find nothing. What takes long is made on the click all the same: the report, and
    everything of a very long trace."""
    name = f"masw-{trace.header.get('method', 'run')}"
    notebook_help = "Draws the same figures from the trace; papermill can run it."
    at_once = len(trace.events) <= MOST_EVENTS
    with st.container(horizontal=True):
        for label, make, ending, mime, about in (
            ("Trace (.jsonl)", lambda: export.jsonl(trace), ".jsonl", "application/x-ndjson", None),
            ("Tokens (.csv)", lambda: export.tokens_csv(trace), "-tokens.csv", "text/csv", None),
            ("Rounds (.csv)", lambda: export.rounds_csv(trace), "-rounds.csv", "text/csv", None),
            ("Notebook (.ipynb)", lambda: export.notebook(f"{name}.jsonl"), ".ipynb", "application/x-ipynb+json", notebook_help),
            ("Report (.html)", lambda: report({name: trace}, {name: pieces}), ".html", "text/html", None),
        ):
            made = make() if at_once and ending != ".html" else make
            st.download_button(label, made, f"{name}{ending}", mime, key=f"{key}-{ending}", on_click="ignore", help=about)


def report(traces: Mapping[str, Trace], pieces: Mapping[str, Sequence[str] | None]) -> str:
    """One page that opens without a network: numbers, text and every figure of each run. The document itself is not in it."""
    parts, script = [], True
    for name, trace in traces.items():
        s = summarise(trace)
        rows = [
            ("Pair and method", f"{trace.header.get('pair')}, {trace.header.get('method')}"),
            ("Prompt, answer", f"{s.prompt_tokens:,} and {len(s.tokens):,} tokens ({s.finish})"),
            ("Tokens a second in decoding", _said(s.tokens_per_second)),
            ("Tokens per iteration", _said(s.tokens_per_iteration)),
            ("Acceptance", _said(s.acceptance)),
            ("Draft KV, live at the end", gib(s.draft_kv_bytes) if s.draft_kv_bytes else "no draft model"),
        ]
        table = "".join(f"<tr><th scope='row'>{html.escape(k)}</th><td>{escaped(v)}</td></tr>" for k, v in rows)
        parts.append(
            f"<h2>{html.escape(name)}</h2><table>{table}</table>{''.join(f'<p>{escaped(r)}</p>' for r in remarks(trace.header))}"
        )
        parts.append(f"<h3>Answer, token by token</h3><p style='line-height:2'>{coloured(trace, pieces.get(name))}</p>")
        for title, panel in PANELS.items():
            drawn = panel(trace, "light")
            parts.append(f"<h3>{html.escape(title)}</h3>")
            parts.append(drawn.figure.to_html(full_html=False, include_plotlyjs=script, config=dict(figures.CONFIG)))
            parts.append(f"<p><em>{html.escape(drawn.caption)}</em></p><p>{html.escape(drawn.alt)}</p>{table_twin(drawn.table)}")
            script = False
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>masw: report of a run</title><style>"
        "body{font-family:system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}"
        "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left}"
        ".masw-t{border-radius:.25rem;padding:.1rem .2rem}.rejected{text-decoration:line-through}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>masw: report of a run</h1>{''.join(parts)}</body></html>"


def _said(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"
