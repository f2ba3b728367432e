"""Every notebook, executed on recorded traces and, three of them, live with smollm2; the report of them all in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from masw.report.build import Report, build
from masw.report.library import Source, choose, folder_of_notebooks
from tests.browser import file_address, opened

NAMES = sorted(path.stem for path in folder_of_notebooks().glob("*.ipynb"))
LIVE = [name for name in NAMES if name[:2] in ("01", "03", "04")]
# Live runs are cut to what proves that they work; a notebook takes those it declares.
SMALL = {"max_new_tokens": 8, "prompt_tokens": 192, "context": 192, "tokens": 192, "window": 32, "gamma": 3}
pytestmark = pytest.mark.skipif(not NAMES, reason="no notebooks in this checkout")


def run(names: list[str], out: Path, wanted: dict[str, Any]) -> Report:
    sources = choose(names, folder_of_notebooks())
    values = {s.name: s.schema.values({k: v for k, v in wanted.items() if fits(s, k, v)}) for s in sources}
    made = build(sources, values, out, timeout_s=240)
    assert made.complete, [f"{o.source.name}: {o.error}" for o in made.outcomes if o.error]
    return made


def fits(source: Source, key: str, value: Any) -> bool:
    return key in source.schema.parameters and source.schema.parameters[key].scalar == type(value).__name__


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run([], tmp_path_factory.mktemp("trace") / "out", {"mode": "trace"})


@pytest.mark.parametrize("name", NAMES)
def test_sources_are_paired_stripped_and_declare_a_mode(name: str) -> None:
    import jupytext

    folder = folder_of_notebooks()
    stripped = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    assert all(not c.outputs and c.execution_count is None for c in stripped.cells if c.cell_type == "code")
    script = jupytext.read(folder / f"{name}.py")
    cells: Callable[[Any], list[tuple[str, str]]] = lambda n: [(c.cell_type, c.source) for c in n.cells]  # noqa: E731
    assert cells(script) == cells(stripped), f"jupytext --sync notebooks/{name}.ipynb"
    (source,) = choose([name], folder)
    assert source.title != name and source.schema.parameters["mode"].choices == ("trace", "live")
    assert source.schema.parameters["mode"].default == "trace" and "pair" in source.schema.parameters


@pytest.mark.parametrize("name", NAMES)
def test_trace_mode_of_each(traced: Report, name: str) -> None:
    record = json.loads((traced.folder / "report.json").read_text())
    entry = next(n for n in record["notebooks"] if n["name"] == name)
    assert entry["status"] == "ok" and entry["parameters"]["mode"] == "trace"
    assert entry["environment"] is not None, "no environment card"
    assert entry["headlines"] and all(
        h["unit"] is not None and h["kind"] in ("value", "timing", "predicted") for h in entry["headlines"]
    )
    assert (traced.folder / f"{name}.ipynb").stat().st_size < 3e6
    text = (traced.folder / f"{name}.ipynb").read_text()
    assert "application/vnd.plotly.v1+json" in text and str(Path.home()) + "/" not in text


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_report_of_all_opens_offline(traced: Report, width: int, dark: bool) -> None:
    page = traced.folder / "report.html"
    assert page.stat().st_size < 15e6
    with opened(file_address(page), width=width, dark=dark) as seen:
        seen.wait("document.documentElement.dataset.figures === 'drawn'")
        assert seen.errors == [] and seen.requests == [file_address(page)]
        assert (
            seen.page.evaluate(
                "[...document.querySelectorAll('figure .plot')].filter((p) => !p.querySelector('.main-svg')).length"
            )
            == 0
        )
        assert seen.page.evaluate("document.querySelectorAll('article').length") == len(NAMES)
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        alts = seen.page.evaluate("[...document.querySelectorAll('figure .sr')].map((e) => e.textContent)")
        assert alts and "Figure without a description." not in alts


@pytest.mark.model
@pytest.mark.skipif(not LIVE, reason="no notebooks in this checkout")
def test_live_with_smollm2(tmp_path: Path) -> None:
    made = run(LIVE, tmp_path / "out", {"mode": "live", "pair": "smollm2", **SMALL})
    record = json.loads((made.folder / "report.json").read_text())
    for entry in record["notebooks"]:
        assert entry["parameters"]["mode"] == "live" and entry["headlines"]
        assert entry["environment"]["dtype"] and entry["seconds"] < 240
