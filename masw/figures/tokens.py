"""Tokens on a page. Their text is hostile: it may hold control characters, half characters, markup or LaTeX."""

from __future__ import annotations

import html
import math
import unicodedata
from typing import Any

import plotly.graph_objects as go

from masw.figures.base import COLOURS, GLYPHS, Drawn, canvas, describe_run, empty, legend_entries, on, outline, stepped
from masw.metrics import NOT_APPLICABLE
from masw.timeline import FATES, Token, fates
from masw.trace import Trace

MEANING = {
    "prompt": "prompt",
    "accepted": "accepted draft",
    "rejected": "rejected draft",
    "correction": "correction by the target",
    "bonus": "bonus of the target",
    "target": "target alone",
    "pending": "drafted, not judged",
}
_GLYPH = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\u007f": "␡"}
MOST_FRAMES = 60


def visible(piece: str, limit: int = 40) -> str:
    """The text of a token as plain characters: white space and control characters as glyphs, half and format characters replaced."""
    out = []
    for c in piece[: limit + 1]:
        kind = unicodedata.category(c)
        if c in _GLYPH:
            out.append(_GLYPH[c])
        elif kind == "Cc":
            out.append(chr(0x2400 + ord(c)) if ord(c) < 0x20 else "�")
        elif kind in ("Cs", "Cf", "Co", "Cn"):
            out.append("�")
        elif kind.startswith("Z"):
            out.append("·")
        elif kind.startswith("M") and (not out or out[-1] in "·⏎⇥"):
            out.append("◌" + c)  # a combining mark needs something to stand on
        else:
            out.append(c)
    return "".join(out[:limit]) + ("…" if len(piece) > limit else "")


def token_html(piece: str, limit: int = 40) -> str:
    """The one way a token gets onto a page: `visible`, then escaped for HTML, plotly's markup and LaTeX."""
    text = html.escape(visible(piece, limit), quote=True)
    return text.replace("&quot;", "&#34;").replace("$", "&#36;").replace("`", "&#96;")  # plotly knows few named entities


def piece_of(trace: Trace, token: int) -> str:
    """Text of a token id, `[id]` where the trace does not have it (or it is a special token without text)."""
    return (trace.header.get("pieces") or {}).get(str(token)) or f"[{token}]"


def token_strip(
    trace: Trace, *, columns: int = 80, limit: int = 400, steps: bool = False, first_round: int = 1, template: str = "light"
) -> Drawn:
    """Drafted and emitted tokens in order, by colour and glyph; lines of `columns` characters, `limit` tokens from `first_round` on.

    With `steps` a slider plays the rounds.
    """
    title = "What became of every token"
    found = [t for t in fates(trace) if t.round >= first_round]
    shown = found[:limit]
    if not shown:
        return empty(title, "No token was drafted or emitted yet.", template=template)
    greedy = not trace.header.get("settings", {}).get("sampling", {}).get("temperature")
    prompt = Token(0, 0, 0, -1, "prompt")
    cells: list[tuple[Token, str]] = [(prompt, f"prompt:{int(trace.header.get('prompt_tokens', 0)):,}")]
    cells += [(t, piece_of(trace, t.id)) for t in shown]
    place: list[tuple[int, int, int]] = []  # line, start, width
    line = start = 0
    for _, piece in cells:
        width = len(visible(piece, 18)) + 3
        if start and start + width > columns:
            line, start = line + 1, 0
        place.append((line, start, width))
        start += width
    label = [
        f"{GLYPHS[t.fate]} {'<s>' if t.fate == 'rejected' else ''}{token_html(p, 18)}{'</s>' if t.fate == 'rejected' else ''}"
        for t, p in cells
    ]
    figure = canvas(title, template=template, height=130 + 30 * (line + 1))
    figure.add_bar(
        y=[at[0] for at in place],
        base=[at[1] for at in place],
        x=[at[2] - 0.25 for at in place],
        orientation="h",
        width=0.84,
        marker={
            "color": [COLOURS[t.fate] for t, _ in cells],
            "line": {"width": 1, "color": [outline(t.fate, template) for t, _ in cells]},
        },
        text=label,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"family": "ui-monospace, monospace", "size": 13, "color": [on(COLOURS[t.fate]) for t, _ in cells]},
        hovertext=[_hover(t, p, greedy) for t, p in cells],
        hoverinfo="text",
        customdata=[[t.step, t.round, t.position] for t, _ in cells],
        showlegend=False,
        name="tokens",
    )
    present = [f for f in FATES if any(t.fate == f for t, _ in cells)]
    legend_entries(figure, present, MEANING, template)
    figure.update_xaxes(visible=False, range=[0, columns], fixedrange=True)
    figure.update_yaxes(visible=False, range=[line + 0.5, -0.5], fixedrange=True)
    # Letters shrink with their bars: a page that is narrower had better scroll.
    figure.update_layout(barmode="overlay", margin={"l": 12, "r": 12, "b": 16}, meta={"min_width": 9 * columns})
    if steps:
        _play(figure, [t for t, _ in cells], [at[2] - 0.25 for at in place])
    counts = {f: sum(t.fate == f for t in found) for f in FATES if f != "prompt"}
    said = ", ".join(f"{n} {MEANING[f]}" for f, n in counts.items() if n)
    cut = f" The first {len(shown)} of {len(found)} tokens are drawn." if len(found) > len(shown) else ""
    rule = (
        "Greedy: a draft is kept when it is the target's first choice."
        if greedy
        else "A draft is kept with probability min(1, p/q)."
    )
    table = [_row(t, p) for t, p in cells[1:]]
    return Drawn(
        figure,
        f"Tokens in the order in which they were drafted and judged ({describe_run(trace.header)}). {rule}{cut}",
        f"A strip of {len(shown)} tokens: {said}. Each carries a glyph beside its colour; hover for step, position, p and q.",
        table,
    )


def _play(figure: go.Figure, tokens: list[Token], widths: list[float]) -> None:
    """Frames reveal round after round; they change the bars' lengths alone, which keeps them small."""
    rounds = sorted({t.round for t in tokens if t.round})
    every = math.ceil(len(rounds) / MOST_FRAMES)
    chosen = [*rounds[:-1:every], rounds[-1]]
    frames = [
        go.Frame(data=[go.Bar(x=[w if t.round <= now else None for t, w in zip(tokens, widths, strict=True)])], traces=[0])
        for now in chosen
    ]
    stepped(figure, frames, [str(r) for r in chosen], "round", shown=len(chosen) - 1)


def _hover(t: Token, piece: str, greedy: bool) -> str:
    if t.fate == "prompt":
        return "the prompt; its text is not in the trace"
    lines = [f"<b>{token_html(piece)}</b>  {MEANING[t.fate]}", f"step {t.step}, round {t.round}, position {t.position:,}"]
    if t.q is not None:
        lines.append(f"draft's probability q = {t.q:.4f}")
    if t.p is not None:
        lines.append(f"target's probability p = {t.p:.4f}")
    if t.accept is not None:
        lines.append(f"min(1, p/q) = {t.accept:.4f}" + (" (greedy: the first choice decides)" if greedy else ""))
    return "<br>".join(lines)


def _row(t: Token, piece: str) -> dict[str, Any]:
    drafted = t.fate in ("accepted", "rejected", "pending")
    return {
        "step": t.step,
        "round": t.round,
        "position": t.position,
        "token": visible(piece),
        "id": t.id,
        "fate": MEANING[t.fate],
        "p": NOT_APPLICABLE if t.fate == "pending" else t.p,
        "q": t.q if drafted else NOT_APPLICABLE,
        "min(1, p/q)": t.accept if drafted and t.fate != "pending" else NOT_APPLICABLE,
    }
