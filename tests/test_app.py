"""Logic of the pages over the `tiny` pair, without a browser; `masw app` itself; exports, replays and the calculator's numbers."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from masw import export, replay, whatif
from masw.config import MemoryShape
from masw.gamma import Adaptive
from masw.metrics import summarise
from masw.trace import Event, Trace
from masw.whatif import SHAPES, Setting

pytest.importorskip("streamlit")
pytest.importorskip("plotly")

from streamlit.testing.v1 import AppTest

from tests.pages import MAIN, TEXT, app_of, html, pasted, run_until


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    with app_of("tiny", monkeypatch) as app:
        yield app


def test_first_paint_needs_no_model(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("masw.service.load_pair", lambda *a: pytest.fail("a model was loaded"))
    app.run()
    assert not app.exception and app.title[0].value == "Live"
    assert not app.button(key="run").disabled and app.button(key="cancel").disabled


@pytest.mark.parametrize("page", ["race", "inspect", "calculator", "explain"])
def test_every_page_draws_without_a_model(app: AppTest, page: str) -> None:
    app.run()
    app.switch_page(f"views/{page}.py").run()
    assert not app.exception and app.title[0].value


def test_adaptors_of_one_name_are_told_apart(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["runs/one/best.safetensors", "runs/two/best.safetensors", "runs/one/other.safetensors"]
    monkeypatch.setenv("MASW_APP_ADAPTORS", os.pathsep.join(paths))
    app.run()
    offered = app.selectbox(key="adaptor").options
    assert {os.path.join("one", "best.safetensors"), os.path.join("two", "best.safetensors"), "other.safetensors"} <= set(offered)


@pytest.mark.parametrize("spoil", ["event", "header"])
def test_an_uploaded_trace_that_lacks_something_is_one_line(app: AppTest, spoil: str) -> None:
    header = {"type": "header", "schema": 1, "adaptor": "x" if spoil == "header" else None}
    event = {"type": "event", "kind": "emit", "who": "target", "round": 1, "at_ms": 1.0, "position": 1, "count": 1}
    app.run()
    app.switch_page("views/inspect.py").run()
    app.file_uploader[0].upload(
        "bad.jsonl", (json.dumps(header) + "\n" + json.dumps(event) + "\n").encode(), "application/json"
    ).run()
    assert not app.exception and "the uploaded trace lacks what masw writes" in html(app)


def test_what_a_run_takes_is_said_before_it(app: AppTest) -> None:
    pasted(app)
    shown = html(app)
    assert f"{len(TEXT.strip()):,} characters" in shown or f"{len(TEXT):,} characters" in shown
    assert "prompt tokens of 8,192" in shown and "predicted" in shown and "free" in shown


def test_a_run_ends_with_its_answer_numbers_figures_and_downloads(app: AppTest) -> None:
    pasted(app)
    app.button(key="run").click().run()
    run_until(app, lambda: bool(app.get("download_button")))
    assert not app.exception
    metrics = {m.label: m.value for m in app.metric}
    assert metrics["Tokens"] == "24" and metrics["Speed-up"] == "not measured"
    assert "masw-t" in html(app) and "random weights" in html(app)
    assert len(app.get("plotly_chart")) == 6
    assert len(app.get("download_button")) >= 4


def test_a_second_question_says_what_was_not_read_again(app: AppTest) -> None:
    pasted(app)
    app.session_state["task"] = "Ask a question"
    app.run()
    app.text_input(key="question").set_value("Who met?").run()
    app.button(key="run").click().run()
    run_until(app, lambda: bool(app.get("download_button")))
    app.text_input(key="question").set_value("When?").run()
    assert app.button(key="run").label == "Ask about the same document"
    app.button(key="run").click().run()
    run_until(app, lambda: "for an earlier question" in html(app))


def test_gamma_can_be_left_to_the_run(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("masw.engine.Adaptive", lambda most: made.append(most) or Adaptive(most))
    app.query_params["auto"] = "true"
    app.query_params["method"] = "masw+lookup"
    pasted(app)
    assert app.toggle(key="auto").value
    app.button(key="run").click().run()
    run_until(app, lambda: bool(app.get("download_button")))
    assert not app.exception and made == [5]


def test_an_odd_combination_is_one_line_on_the_page(app: AppTest) -> None:
    pasted(app)
    app.session_state["gamma"] = 16
    app.run()
    assert not app.exception and "does not fit the rollback window of 16" in html(app)
    assert app.button(key="run").disabled


def test_a_failing_run_is_one_line_on_the_page(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    pasted(app)
    with monkeypatch.context() as patch:
        patch.setattr("masw.engine.Target.verify", lambda self, block: 1 / 0)
        app.button(key="run").click().run()
        run_until(app, lambda: "The run failed" in html(app))
    assert "division by zero" in html(app) and not app.exception
    app.button(key="run").click().run()
    run_until(app, lambda: bool(app.get("download_button")))


def test_hostile_text_stays_text(app: AppTest) -> None:
    app.run()
    app.session_state["source"] = "Paste"
    app.run()
    app.text_area(key="pasted").set_value(
        "x <script>alert(1)</script> $\\LaTeX$ \u202e \x00 <img src=x onerror=alert(1)> " * 9
    ).run()
    assert not app.exception
    assert "<script>alert" not in html(app) and "<img" not in html(app) and "$\\LaTeX" not in html(app)


def test_a_race_compares_the_arms_and_says_identical(app: AppTest) -> None:
    pasted(app)
    app.switch_page("views/race.py").run()
    app.session_state["source"] = "Paste"
    app.session_state["tokens"] = 16
    app.run()
    app.text_area(key="pasted").set_value(TEXT).run()
    app.button(key="race").click().run()
    run_until(app, lambda: "Result of the race" in html(app))
    shown = html(app)
    assert (
        shown.count("✓ identical") == 3
        and "the reference" in shown
        and "not measured" not in shown.split("</table>")[0].split("<tbody>")[-1]
    )
    app.switch_page("views/live.py").run()  # the same run, whose plain decoding was measured
    assert {m.label: m.value for m in app.metric}["Speed-up"].endswith("x")


def test_a_race_says_before_it_what_all_its_methods_take(app: AppTest) -> None:
    pasted(app, text="a" * 9000)
    app.switch_page("views/race.py").run()
    app.session_state["source"] = "Paste"
    app.run()
    app.text_area(key="pasted").set_value("a" * 9000).run()
    shown = html(app)
    assert "prompt tokens of 8,192" in shown and "for 4 methods" in shown and "do not fit the context and are cut" in shown


NONSENSE = {
    "": {
        "pair": "evil", "method": "<script>", "tokens": "-5", "gamma": "999", "r": "3", "W": "abc", "S": "1e9", "adaptor": "../../etc/passwd",
        "weights": "int1", "temperature": "99", "top_p": "nan", "seed": "-1", "task": "$x$", "source": "zzz",
    },
    "race": {"methods": "nonesuch", "tokens": "inf", "task": "", "source": "Upload,Paste"},
    "inspect": {"grain": "year", "panels": "nothing"},
    "calculator": {"target": "x", "draft": "", "context": "7", "batch": "0", "cgamma": "-1", "kv": "fp1", "machine": "abacus",
                   "bandwidth": "-3", "a": "7", "af": "x"},
}  # fmt: skip


@pytest.mark.parametrize("where", list(NONSENSE))
def test_a_link_with_nonsense_opens_the_page(app: AppTest, where: str) -> None:
    for name, value in NONSENSE[where].items():
        app.query_params[name] = value
    app.run()
    if where:
        app.switch_page(f"views/{where}.py").run()
    assert not app.exception and app.title[0].value
    shown = html(app)
    assert "<script>alert" not in shown and "Error" not in shown


EXTREMES = [
    {"tokens": 1024, "gamma": 16, "r": 32, "W": 4096, "S": 64},
    {"tokens": 8, "gamma": 1, "r": 2, "W": 16, "S": 0},
    {"tokens": 8, "gamma": 15, "r": 2, "W": 16, "S": 64},
    {"method": "lookup", "gamma": 16, "tokens": 16},
    {"method": "none", "tokens": 8, "temperature": 2.0, "top_p": 0.05, "seed": 2**31 - 1},
    {"method": "snapkv", "tokens": 8, "W": 4096, "r": 2},
    {"method": "masw+lookup", "tokens": 8, "weights": "int4", "W": 16, "r": 32},
    {"method": "full+lookup", "tokens": 24, "gamma": 16, "auto": True},
]


@pytest.mark.parametrize("chosen", EXTREMES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()))
def test_extreme_settings_run_or_are_refused_in_words(app: AppTest, chosen: dict[str, object]) -> None:
    pasted(app, tokens=8)
    for name, value in chosen.items():
        app.session_state[name] = value
    app.run()
    assert not app.exception
    if app.button(key="run").disabled:
        assert 'role="alert"' in html(app)
        return
    app.button(key="run").click().run()
    if chosen.get("tokens") == 1024:
        app.button(key="cancel").click().run()
    run_until(app, lambda: app.button(key="cancel").disabled)
    assert "The run failed" not in html(app)


def test_a_document_replaced_in_the_middle_of_a_run_does_not_change_it(app: AppTest) -> None:
    pasted(app, tokens=400)
    app.button(key="run").click().run()
    app.text_area(key="pasted").set_value("Quite another text. " * 20).run()
    assert app.button(key="run").disabled and not app.exception
    app.text_area(key="pasted").set_value("").run()
    assert not app.exception
    run_until(app, lambda: app.button(key="cancel").disabled)
    from parts import frame

    (job,) = frame.room().jobs.of(app.session_state.visitor)
    assert job.state == "done" and job.work.ask.document.strip() == TEXT.strip()


def test_a_very_long_document_is_counted_cut_and_run(app: AppTest) -> None:
    pasted(app, tokens=8, text="word and more words, \n" * 100_000)
    assert "do not fit the context and are cut" in html(app) and not app.button(key="run").disabled
    app.button(key="run").click().run()
    run_until(app, lambda: bool(app.get("download_button")))


def test_a_pair_that_is_not_here_is_offered(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("masw.store.locate", lambda model: None)
    app.run()
    app.session_state["pair"] = "smollm2"
    app.run()
    assert not app.exception and "not on this machine" in html(app)
    assert app.button(key="fetch").label == "Fetch smollm2" and app.button(key="run").disabled


# ---- the command


def test_a_busy_port_is_one_line() -> None:
    from masw.cli import app as cli

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli, ["app", "--port", str(port)])
        assert f"port {port} on 127.0.0.1 cannot be used" in str(result.exception) and "try --port" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "nonesuch"], "unknown model or pair"),
        (["--host", "no.such.host.invalid"], "is unknown"),
        (["--dtype", "fp7"], "dtype"),
    ],
)
def test_bad_options_of_the_app_are_refused(arguments: list[str], message: str) -> None:
    from masw.cli import app as cli

    result = CliRunner().invoke(cli, ["app", *arguments])
    assert result.exit_code != 0 and message in str(result.exception)


def test_the_server_is_told_to_keep_to_itself() -> None:
    import tomllib

    config = tomllib.loads((MAIN.parent / ".streamlit" / "config.toml").read_text())
    assert config["server"]["address"] == "127.0.0.1" and config["server"]["fileWatcherType"] == "none"
    assert config["browser"]["gatherUsageStats"] is False and config["client"]["toolbarMode"] == "minimal"
    assert config["client"]["showErrorDetails"] == "none"
    assert config["runner"]["postScriptGC"] is False  # measured: with it a run took several times as long


# ---- pure parts


def trace_of(rounds: int = 3) -> Trace:
    events = [Event("prefill", "target", 0, 10.0, 0, 9, 10.0, 90), Event("prefill", "draft", 0, 15.0, 0, 9, 5.0, 40)]
    at = 15.0
    for n in range(1, rounds + 1):
        position = 10 + 2 * (n - 1)
        events += [
            Event("draft", "draft", n, at + 1, position, 1, 1.0, 41, {"token": 5, "q": 0.5, "read": 1}),
            Event("verify", "target", n, at + 3, position - 1, 2, 2.0, 99),
            Event("accept", "engine", n, at + 3, position, 1, data={"tokens": [5], "p": [0.6], "q": [0.5], "discarded": 0}),
            Event("upkeep", "engine", n, at + 4, position, 0, 1.0),
            Event("emit", "engine", n, at + 4, position, 2, 4.0, data={"tokens": [5, 6], "roles": ["accepted", "bonus"]}),
        ]
        at += 4.0
    events.append(Event("end", "engine", rounds, at, 10, 2 * rounds, data={"reason": "length"}))
    total = 10 + 2 * rounds
    header = {
        "pair": "tiny",
        "method": "full",
        "prompt_tokens": 10,
        "settings": {"max_new_tokens": 2 * rounds},
        "memory": {"sinks": 0, "window": None, "stride": None, "rollback": 16},
        "draft_kv": {"allocated_bytes": 4 * total, "predicted_bytes": 4 * total, "full_bytes": 4 * total},
        "pieces": {"5": "=1+1", "6": " b"},
    }
    return Trace(header, events)


def test_a_replay_stops_after_every_step_and_at_any_time() -> None:
    trace = trace_of()
    assert len(replay.moments(trace)) == 2 + 3 * 3 and len(replay.rounds(trace)) == 1 + 3
    assert replay.moments(trace)[-1].events == replay.rounds(trace)[-1].events == len(trace.events)
    assert replay.decode_ms(trace) == 12.0
    for clock, tokens in ((0.0, 0), (3.9, 0), (4.0, 2), (11.9, 4), (12.0, 6), (99.0, 6)):
        assert len(summarise(replay.at(trace, clock)).tokens) == tokens
    assert summarise(replay.at(trace, 99.0)).finish == "length" and summarise(replay.at(trace, 1.0)).finish == "unfinished"
    assert "2 tokens emitted" in replay.rounds(trace)[1].label


def test_exports_open_and_hold_what_happened() -> None:
    trace = trace_of()
    tokens = list(csv.DictReader(io.StringIO(export.tokens_csv(trace))))
    assert [t["fate"] for t in tokens] == ["accepted", "bonus"] * 3
    assert tokens[0]["text"] == "'=1+1"  # a spreadsheet must not run it
    rounds = list(csv.DictReader(io.StringIO(export.rounds_csv(trace))))
    assert [(r["emitted"], r["round_ms"], r["draft_kv_bytes"], r["target_kv_bytes"]) for r in rounds] == [
        ("2", "4.0", "41", "99")
    ] * 3
    again = Trace.parse(export.jsonl(trace))
    assert again.events == trace.events and again.header == trace.header


def test_the_exported_notebook_runs_on_the_exported_trace(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    trace_of().save(tmp_path / "t.jsonl")
    book = nbformat.reads(export.notebook(str(tmp_path / "t.jsonl")), as_version=4)
    nbformat.validate(book)
    code = [c.source for c in book.cells if c.cell_type == "code"]
    assert book.cells[1].metadata.tags == ["parameters"]
    scope: dict[str, Any] = {}
    for source in code[:2]:
        exec(source, scope)
    for source in code[2:]:
        assert eval(source.removeprefix("show(").removesuffix(")"), scope).caption


def test_a_draft_whose_text_is_not_known_yet_shows_no_number(app: AppTest) -> None:
    app.run()
    from parts import panels

    trace = trace_of(1)
    trace.events.append(Event("draft", "draft", 2, 30.0, 12, 1, 1.0, 41, {"token": 77, "q": 0.5, "read": 1}))
    assert 'pending"' in panels.coloured(trace, None) and "[77]" not in panels.coloured(trace, None)


def test_the_html_report_stands_alone(app: AppTest) -> None:
    app.run()
    from parts import exports

    page = exports.report({"run": trace_of()}, {"run": None})
    assert page.startswith("<!doctype html>") and "Plotly.newPlot" in page
    assert 'src="http' not in page and "cdn." not in page.split("plotly.js v")[0]
    assert "&#x27;" in page or "=1+1" in page
    assert "<script>alert" not in exports.report({"<script>alert(1)</script>": trace_of()}, {})


def setting(**kwargs: Any) -> Setting:
    return Setting(SHAPES["Llama 3.1 8B"], SHAPES["Llama 3.2 3B"], MemoryShape(4, 512, 8), **kwargs)


def test_the_calculator_agrees_with_the_formulas() -> None:
    p = whatif.predict(setting(batch=2), 32768)
    assert p.draft_kv_full == 2 * 2 * 28 * 8 * 128 * 2 * 32768
    assert p.draft_kv == 2 * 2 * 28 * 8 * 128 * 2 * (4 + 512 + 16 + 4096)
    assert p.draft_step_ms < p.draft_step_full_ms
    assert whatif.tokens_per_iteration(0.0, 5) == 1.0 and whatif.tokens_per_iteration(1.0, 5) == 6.0
    assert whatif.tokens_per_iteration(0.5, 2) == pytest.approx(1.75)


def test_the_calculator_says_where_compression_pays() -> None:
    """Equal acceptance: it pays as soon as it is smaller. Useless slots: it never does."""
    assert [s[2] for s in whatif.stretches(whatif.curve(setting(acceptance=0.85), 2**20))][-1] is True
    assert all(not s[2] for s in whatif.stretches(whatif.curve(setting(acceptance=0.0), 2**20)))
    curve = whatif.curve(setting(), 2**20)
    assert curve[0].context == 1024 and curve[-1].context == 2**20
    stretches = whatif.stretches(curve)
    assert stretches[0][0] == 1024 and stretches[-1][1] == 2**20
    assert [a[2] for a in stretches[1:]] == [not a[2] for a in stretches[:-1]]


def test_a_config_of_another_kind_is_refused(app: AppTest) -> None:
    """What the calculator is given may be anything."""
    from masw.config import ModelConfig
    from masw.errors import UsageError

    with pytest.raises(UsageError, match="not supported"):
        ModelConfig.from_hf(json.loads('{"model_type": "bert"}'))
