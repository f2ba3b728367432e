"""What a notebook shows, as records: figures once, numbers that survive as JSON, text escaped."""

from __future__ import annotations

import json
import sys

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from masw.errors import UsageError
from masw.report import display
from masw.report.extras import need


class Sheet:
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4]), frames=[go.Frame(data=[go.Scatter(y=[1, 2])], name="0")])
    caption = "Bytes <against> tokens"
    alt = "A rising line."
    table = pd.DataFrame({"tokens": [1, 2], "bytes": [3.5, np.nan]})


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    found: list[tuple[dict, dict]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw=True, metadata=None: found.append((data, metadata or {})))
    return found


def test_show_stores_the_figure_once_with_alt_caption_and_table(shown) -> None:
    display.show(Sheet())
    (figure, about), (below, _) = shown
    assert about[display.PLOTLY_MIME]["masw"]["alt"] == "A rising line."
    assert figure[display.PLOTLY_MIME]["config"]["showSendToCloud"] is False
    assert len(figure[display.PLOTLY_MIME]["frames"]) == 1 and "text/html" not in figure
    assert "Bytes &lt;against&gt; tokens" in below["text/html"] and '<th scope="col">tokens</th>' in below["text/html"]
    assert "<td>not measured</td>" in below["text/html"]  # not-a-number is not shown as a number
    assert len(json.dumps(shown)) < 20_000


def test_headlines_unwrap_scalars_and_refuse_the_rest() -> None:
    made = display.headline_record("kept", np.float32(0.5), "share", n=np.int64(3), spread=(0.4, np.float64("nan")))
    assert made == {"name": "kept", "value": 0.5, "unit": "share", "kind": "value", "n": 3, "spread": [0.4, None]}
    assert display.headline_text(made) == "kept: 50 % (n = 3, 40 % to not measured)"
    assert display.headline_record("x", float("inf"))["value"] is None
    assert display.headline_text(display.headline_record("x", None, kind="timing")) == "x: not measured (timing)"
    with pytest.raises(ValueError, match="kind is one of"):
        display.headline_record("x", 1, kind="guess")
    with pytest.raises(ValueError, match="dict is not a number"):
        display.headline_record("x", {})


def test_tables_come_as_frames_mappings_or_columns_and_rows() -> None:
    wanted = (["a", "b"], [(1, 2)])
    assert display.columns_rows(pd.DataFrame({"a": [1], "b": [2]})) == wanted
    assert display.columns_rows([{"a": 1, "b": 2}]) == wanted
    assert display.columns_rows((["a", "b"], [[1, 2]])) == wanted
    long = display.table_twin((["i"], [(i,) for i in range(1000)]))
    assert "the first 400 of 1,000 rows" in long and long.count("<tr>") == 401


def test_the_card_says_what_it_ran_on_and_escapes(shown) -> None:
    display.environment_card({"mode": "trace", "seed": 3, "pair": "<i>"})
    data, _ = shown[0]
    record = data[display.ENVIRONMENT_MIME]
    assert record["seed"] == 3 and record["parameters"]["mode"] == "trace" and record["torch"]
    assert "recorded traces, no model" in data["text/html"] and "<i>" not in data["text/html"]


def test_a_missing_extra_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match=r"pip install 'masw\[notebooks\]'"):
        need("masw_no_such_module")


def test_importing_the_report_pulls_in_no_extra() -> None:
    import subprocess

    extras = ("IPython", "plotly", "papermill", "yaml", "torch")
    code = f"import sys, masw.report, masw.report.schema; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
