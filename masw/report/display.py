"""What a notebook shows: a figure with caption and table twin, a headline number, the card of its environment.

Everything is emitted as display data of the cell, so that the executed notebook alone holds the whole record: the figure once (as
plotly's own mimetype, which Jupyter draws and the report's HTML draws without storing plotly in the notebook), its caption and table as
HTML, and each number under a mimetype of ours that the side-car is read from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, Protocol, get_args

from masw.report.extras import need

PLOTLY_MIME = "application/vnd.plotly.v1+json"
HEADLINE_MIME = "application/vnd.masw.headline+json"
ENVIRONMENT_MIME = "application/vnd.masw.environment+json"
# "Share chart" would upload the data; the logo links to a site.
PLOTLY_CONFIG = {"displaylogo": False, "showSendToCloud": False, "responsive": True}
MAX_ROWS = 400  # of a table twin in a page; the figure's own data stay whole

Kind = Literal["value", "timing", "predicted"]


class Drawn(Protocol):
    """A figure of `masw.figures` with what makes it readable without seeing it."""

    @property
    def figure(self) -> Any: ...  # plotly.graph_objects.Figure
    @property
    def caption(self) -> str: ...
    @property
    def alt(self) -> str: ...
    @property
    def table(self) -> Any: ...  # pandas.DataFrame, rows as mappings, or (columns, rows)


def show(*drawn: Drawn) -> None:
    """Shows figures with caption, alt text and a table twin that folds out, in Jupyter as in the report's HTML."""
    need("IPython", "plotly")
    from IPython.display import display

    for one in drawn:
        bundle = {PLOTLY_MIME: figure_json(one.figure), "text/plain": f"[figure] {one.alt}"}
        display(bundle, raw=True, metadata={PLOTLY_MIME: {"masw": {"alt": one.alt}}})
        below = f'<p class="masw-caption">{escape(one.caption)}</p>{table_twin(one.table)}'
        display(
            {"text/html": below, "text/plain": one.caption}, raw=True, metadata={"text/html": {"masw": {"below_figure": True}}}
        )


def headline(
    name: str,
    value: Any,
    unit: str = "",
    kind: Kind = "value",
    n: int | None = None,
    spread: Any = None,
    note: str = "",
) -> None:
    """Shows a number that the report's JSON side-car keeps under `name`, unique in its notebook.

    `kind`: "value" repeats exactly with the same parameters; "timing" depends on the machine's mood; "predicted" comes from a formula.
    `value`: int, float, bool, str or None (shown as "not measured"); arrays of one element and numpy scalars are unwrapped. `n`: how many
    measurements; `spread`: e.g. (p10, p90). Raises ValueError for anything that would not survive as JSON.
    """
    need("IPython")
    from IPython.display import display

    record = headline_record(name, value, unit, kind, n, spread, note)
    text = headline_text(record)
    marked = f'<p class="masw-headline" data-kind="{kind}">{escape(text)}</p>'
    display({HEADLINE_MIME: record, "text/html": marked, "text/plain": text}, raw=True)


def environment_card(parameters: Mapping[str, Any], *, device: str = "cpu", dtype: str = "float32") -> None:
    """Shows versions, device, dtype, seed, commit and parameters at the head of a notebook; the side-car keeps them."""
    need("IPython")
    from IPython.display import display

    record = environment_record(parameters, device, dtype)
    source = "recorded traces, no model" if parameters.get("mode") == "trace" else parameters.get("pair") or "live"
    rows = [
        ("ran on", source),
        *((k, v) for k, v in record.items() if k not in ("parameters", "seed")),
        *record["parameters"].items(),
    ]
    facts = f"masw {record['masw']}" + (f" ({record['commit']})" if record["commit"] else "") + f", {record['device']}"
    text = "\n".join(f"{k}: {v}" for k, v in rows)
    cells = "".join(f'<tr><th scope="row">{escape(str(k))}</th><td>{escape(str(v))}</td></tr>' for k, v in rows)
    card = (
        f'<details class="masw-card"><summary><b>Ran on {escape(str(source))}</b>; {escape(facts)}; parameters</summary>'
        f"<table><tbody>{cells}</tbody></table></details>"
    )
    display({ENVIRONMENT_MIME: record, "text/html": card, "text/plain": text}, raw=True)


# ---- records, without IPython


def figure_json(figure: Any) -> dict[str, Any]:
    """A plotly figure (frames included) as the object that Jupyter's plotly renderer and plotly.js take."""
    made: dict[str, Any] = json.loads(figure.to_json())
    made["config"] = PLOTLY_CONFIG
    return made


def headline_record(
    name: str, value: Any, unit: str = "", kind: str = "value", n: int | None = None, spread: Any = None, note: str = ""
) -> dict[str, Any]:
    if not name or not isinstance(name, str):
        raise ValueError(f"a headline needs a name, not {name!r}")
    if kind not in get_args(Kind):
        raise ValueError(f"kind is one of {', '.join(get_args(Kind))}, not {kind!r}")
    record = {"name": name, "value": _plain(value, name), "unit": unit, "kind": kind, "n": None if n is None else int(n)}
    if spread is not None:
        record["spread"] = [_plain(v, name) for v in spread] if isinstance(spread, Iterable) else _plain(spread, name)
    if note:
        record["note"] = note
    return record


def headline_text(record: Mapping[str, Any]) -> str:
    """`tokens per iteration: 2.31 (n = 64, timing)`."""
    shown = value_text(record)
    aside = [] if record.get("n") is None else [f"n = {record['n']:,}"]
    if record.get("spread") is not None:
        spread = record["spread"]
        parts = [value_text({**record, "value": v}) for v in (spread if isinstance(spread, list) else [spread])]
        aside.append(" to ".join(parts) if len(parts) == 2 else "spread " + ", ".join(parts))
    if record["kind"] != "value":
        aside.append(record["kind"])
    if record.get("note"):
        aside.append(record["note"])
    return f"{record['name']}: {shown}" + (f" ({', '.join(aside)})" if aside else "")


def value_text(record: Mapping[str, Any]) -> str:
    """The value of a headline with its unit; a share as a percentage, as figures show it (the side-car keeps the share)."""
    value, unit = record["value"], record.get("unit") or ""
    if value is None or isinstance(value, (bool, str)):
        return number_text(value)
    return f"{number_text(100.0 * value)} %" if unit == "share" else f"{number_text(value)} {unit}".rstrip()


def number_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not measured"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def environment_record(parameters: Mapping[str, Any], device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    from masw.provenance import provenance, versions

    if parameters.get("mode") == "trace":
        found = versions()  # nothing is computed: the traces say what they were recorded on
    else:
        import torch

        found = provenance(torch.device(device), getattr(torch, dtype.removeprefix("torch.")))
    return {**found, "seed": parameters.get("seed"), "parameters": {k: _plain(v, k) for k, v in parameters.items()}}


def table_twin(table: Any) -> str:
    """The data of a figure as an HTML table that folds out; long ones are cut, and say so."""
    columns, rows = columns_rows(table)
    head = "".join(f'<th scope="col">{escape(str(c))}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(v))}</td>" for v in row) + "</tr>" for row in rows[:MAX_ROWS])
    cut = f" (the first {MAX_ROWS:,} of {len(rows):,} rows)" if len(rows) > MAX_ROWS else ""
    return (
        f'<details class="masw-table"><summary>Table of this figure{cut}</summary><div class="masw-scroll" tabindex="0" role="region" '
        f'aria-label="Table of the figure above"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )


def columns_rows(table: Any) -> tuple[list[Any], list[Sequence[Any]]]:
    """Columns and rows of a DataFrame, of rows given as mappings, or of a pair (columns, rows)."""
    if hasattr(table, "itertuples"):
        return list(table.columns), list(table.itertuples(index=False, name=None))
    if isinstance(table, tuple) and len(table) == 2:
        return list(table[0]), [tuple(row) for row in table[1]]
    rows = list(table)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [tuple(row.get(c) for c in columns) for row in rows]


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "not measured"
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    return number_text(value) if isinstance(value, (bool, int, float)) else str(value)


def _plain(value: Any, name: str) -> Any:
    """A value as JSON keeps it: numpy and torch scalars unwrapped, not-a-number as None. Raises ValueError for the rest."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v, name) for v in value]
    raise ValueError(f"{name}: {type(value).__name__} is not a number, text, truth value or list of those")
