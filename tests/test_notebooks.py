"""The notebooks as they lie in the repository, and each executed in trace mode: no model, every assertion, bounded size.

Kernels, papermill and the report's page are tested with the report; here the cells run in this process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import IPython.display
import jupytext
import nbformat
import pytest

from masw import lessons, zoo
from masw.errors import UsageError
from masw.lessons import METHODS, Lesson
from masw.report.library import read
from masw.report.schema import parse_cell
from masw.tables import bench_lines, marked, missing, recall, results, speedup_points, trade_off

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
NAMES = [
    "01_slots", "02_eviction", "03_acceptance", "04_rollback_and_losslessness", "05_latency_and_memory", "06_training", "07_paper_report",
]  # fmt: skip
PLOTLY = "application/vnd.plotly.v1+json"
HEADLINE = "application/vnd.masw.headline+json"


def cells(path: Path) -> list[tuple[str, str]]:
    return [(c.cell_type, c.source) for c in jupytext.read(path).cells]


def test_the_seven_are_there() -> None:
    assert [p.stem for p in SOURCES] == NAMES == [p.stem for p in sorted(FOLDER.glob("*.ipynb"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_pairs_are_in_step_and_hold_no_output(path: Path) -> None:
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert [(c.cell_type, c.source) for c in notebook.cells] == cells(path)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert not any(c.outputs or c.execution_count for c in code)
    assert [c for c in code if "parameters" in c.metadata.get("tags", [])] == code[:1]
    assert set(read(path.with_suffix(".ipynb")).schema.parameters) >= {"mode", "pair", "template"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_every_section_shows_takes_away_and_asserts(path: Path) -> None:
    found = cells(path)
    text = "\n".join(source for _, source in found)
    sections = [i for i, (kind, source) in enumerate(found) if kind == "markdown" and source.startswith("## ")]
    assert len(sections) >= 3
    for start, stop in zip(sections, [*sections[1:], len(found)], strict=True):
        part = found[start:stop]
        assert [kind for kind, _ in part] == ["markdown", "code", "markdown", "code"]
        assert "show(" in part[1][1] and "figures." in part[1][1]
        assert part[2][1].startswith("**Takeaway.**")
    assert found[2][1].endswith("\nlesson = start(globals())") and text.count("start(") == 1  # the set-up is one call
    assert "def " not in text and "import torch" not in text and "import plotly" not in text  # no logic inside
    assert parse_cell(found[1][1], path.stem).parameters["mode"].default == "trace"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_runs_in_trace_mode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tiny pair, whose weights are made on the spot, may be loaded."""
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **_: shown.append(bundle))
    real = zoo.load_pair

    def tiny_alone(spec: str, *args: Any, **kwargs: Any) -> Any:
        assert spec == "tiny"
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(zoo, "load_pair", tiny_alone)
    space: dict[str, Any] = {"__name__": "notebook"}
    for kind, source in cells(path):
        if kind == "code":
            exec(compile(source, path.name, "exec"), space)
    figures = [b for b in shown if PLOTLY in b]
    headlines = [b[HEADLINE] for b in shown if HEADLINE in b]
    assert len(figures) >= 3 and headlines
    assert len({h["name"] for h in headlines}) == len(headlines)
    assert len(json.dumps(shown)) < 3_000_000
    assert "ran on: recorded traces" in shown[0]["text/plain"]


@pytest.mark.parametrize("path", [p for p in SOURCES if p.stem[:2] in ("01", "02", "03", "04", "05")], ids=lambda p: p.stem)
def test_runs_live_on_the_tiny_pair(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same cells computed now; what they claim of a trained pair is not asserted of random weights."""
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **_: shown.append(bundle))
    document = tmp_path / "short.md"
    document.write_text("The agreement was signed in March by both parties. " * 12)
    found = cells(path)
    values = {"mode": "live", "pair": "tiny", "window": 64, "tokens": 12, "draws": 500}
    known = parse_cell(found[1][1], path.stem).parameters
    space: dict[str, Any] = {"__name__": "notebook"}
    for index, (kind, source) in enumerate(found):
        if kind == "code":
            exec(compile(source, path.name, "exec"), space)
            if index == 1:
                space |= {k: v for k, v in values.items() if k in known}
            if index == 2:
                space["lesson"].document = str(document)
    assert sum(PLOTLY in b for b in shown) >= 3


@pytest.mark.parametrize(
    ("number", "values"),
    [
        ("02", {"window": 4096}),
        ("02", {"window": 16, "stride": 16}),
        ("02", {"stride": 1}),
        ("02", {"mode": "live", "pair": "tiny", "tokens": 8, "document": "hello"}),
        ("04", {"q": [0.5, 0.295, 0.205], "draws": 500}),
    ],
    ids=str,
)
def test_values_at_the_ends_of_their_ranges(
    number: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Met by a reader: assertions of a notebook failed for parameters that it had declared."""
    monkeypatch.setattr(IPython.display, "display", lambda *_, **__: None)
    path = next(p for p in SOURCES if p.stem.startswith(number))
    if "document" in values:
        (tmp_path / "short.txt").write_text(values["document"])
        values = {**values, "document": "short.txt"}
        monkeypatch.setenv("MASW_REPORT_FROM", str(tmp_path))  # as the report's kernels have it
    space: dict[str, Any] = {"__name__": "notebook"}
    for index, (kind, source) in enumerate(cells(path)):
        if kind == "code":
            exec(compile(source, path.name, "exec"), space)
            space |= values if index == 1 else {}


def test_lessons_refuse_what_they_do_not_have() -> None:
    with pytest.raises(UsageError, match="trace or live"):
        Lesson("both")
    with pytest.raises(UsageError, match='use mode = "live"'):
        Lesson("trace", "qwen-none").traces(["masw"])
    with pytest.raises(UsageError, match="not recorded"):
        Lesson("trace", "nope").buffers()
    assert Lesson("trace").train(5) == [] and results("no-such-table") == []
    assert missing("a")[0]["result"] == "not measured yet"


def test_a_notebook_starts_with_its_own_parameters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **_: shown.append(bundle))
    space: dict[str, Any] = {"other": 1}
    exec('mode: str = "trace"\nwindow: int = 64\ndraws: int = 9\ntemplate: str = "dark"', space)
    lesson = lessons.start(space)
    assert (lesson.mode, lesson.window, lesson.sinks) == ("trace", 64, 4)
    card = shown[0]["application/vnd.masw.environment+json"]
    assert card["parameters"] == {"mode": "trace", "window": 64, "draws": 9, "template": "dark"}
    assert capsys.readouterr().out.startswith("Recorded: traces of the pair smollm2")


def test_a_table_tells_what_cannot_exist_from_what_was_not_measured() -> None:
    nothing = dict.fromkeys(("speedup_predicted", "acceptance", "draft_ms", "draft_kv_ratio", "identical", "largest_logit_gap"))
    nothing |= {"drafted_per_iteration": 0.0, "compared": 0}
    assert {k for k, v in marked({"method": "none", **nothing}).items() if v == "—"} == set(nothing) - {
        "drafted_per_iteration", "compared",
    }  # fmt: skip
    copied = marked({"method": "lookup", **nothing, "draft_ms": 0.1, "identical": 3, "compared": 3})
    assert {k for k, v in copied.items() if v == "—"} == {"acceptance", "draft_kv_ratio", "largest_logit_gap"}
    drafted = {"drafted_per_iteration": 5.0, "identical": 2, "compared": 3}
    assert "—" not in marked({"method": "masw", **nothing, **drafted}).values()
    assert "—" not in marked({"method": "hf", **nothing, **drafted}).values()  # a peer: it exists, nobody measured it
    held = {r["method"]: r["draft KV (bytes)"] for r in trade_off([], Lesson().traces(METHODS))}
    assert held["none"] == held["lookup"] == "—" and held["masw"] < held["full"]


def test_result_tables_become_points() -> None:
    traces = Lesson().traces(METHODS)
    assert {p["method"] for p in speedup_points([], traces)} == set(METHODS) - {"none"}
    line = {"set": "gov", "context": 4096, "method": "masw", "speedup": 1.2, "speedup_quartiles": [1.1, 1.3], "n": 6}
    line |= {"draft_kv_bytes": 10, "draft_ms": 1.0, "tokens_per_iteration": 2.0}
    assert speedup_points([line, {**line, "set": "all"}], traces) == [
        {"method": "masw", "context": 4096, "speed-up": 1.2, "n": 6, "low": 1.1, "high": 1.3}
    ]
    assert trade_off([line], traces)[0]["draft KV (bytes)"] == 10
    recalled = recall("smollm2")
    assert {"full", "window", "masw"} <= {row["method"] for row in recalled} and not recall("tiny")
    assert {row["W"] for row in recalled} == {"—", 256} and "masw-untrained" not in {row["method"] for row in recalled}
    assert all("speedup" in row for pair in ("smollm2", "qwen2.5-coder") for row in bench_lines(pair))
