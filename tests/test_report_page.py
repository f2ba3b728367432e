"""The report's page with every kind of figure on it, in a browser: nothing is said on the console, the step-through steps, axe is content.

The page is made from outputs without a kernel; how notebooks get onto it is tested in test_report_run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from masw import figures as F
from masw.config import MemoryShape
from masw.figures.base import Drawn
from masw.report import display, html
from masw.trace import Trace
from tests.browser import Opened, axe_source, file_address, opened
from tests.test_figures import RECORDED, of_many, of_rows

WORDS = ["The", "agreement", "was", "signed", "in", "March", "by", "both", "parties", "."]


def written(folder: Path, name: str, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of one notebook that shows `drawn` and a card, a number, a table, code and printed text."""
    shown: list[Any] = []

    def keep(data: dict[str, Any], raw: bool = True, metadata: dict[str, Any] | None = None) -> None:
        shown.append(nbformat.v4.new_output("display_data", data=data, metadata=metadata or {}))

    monkeypatch.setattr("IPython.display.display", keep)
    display.environment_card({"mode": "trace", "pair": "smollm2", "text": "a long parameter " * 9})
    display.headline("kept", 0.5, "share", n=3)
    display.show(*drawn)
    printed = nbformat.v4.new_output("stream", text="one long line that a narrow page cannot hold without scrolling it " * 2)
    about = nbformat.v4.new_markdown_cell("# A title\n\n## Part\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n`code`, [back](#contents)")
    cell = nbformat.v4.new_code_cell("x = 1  # " + "a comment " * 20, outputs=[printed, *shown])
    entry = {"name": "01_a", "title": "A title", "summary": "What it is.", "status": "ok", "seconds": 1.0, "error": ""}
    entry |= {"parameters": {"mode": "trace"}, "headlines": [display.headline_record("kept", 0.5, "share", n=3)]}
    environment = {"masw": "0.1.0", "commit": "abc", "device": "CPU", "torch": "2"}
    record = {"title": "masw report", "created": "today", "environment": environment, "notebooks": [entry]}
    path = folder / f"{name}.html"
    path.write_text(html.page(record, {"01_a": nbformat.v4.new_notebook(cells=[about, cell])}), encoding="utf-8")
    return path


def stepping() -> list[Drawn]:
    trace = Trace.load(RECORDED["smollm2-masw"])
    return [
        F.slot_birth(WORDS, MemoryShape(1, 4, 4)),
        F.kv_map(trace, rows=24, play=True),
        F.token_strip(trace, limit=60, steps=True),
    ]


def drawn_page(path: Path, **options: Any) -> Iterator[Opened]:
    with opened(file_address(path), **options) as seen:
        seen.wait("document.documentElement.dataset.figures === 'drawn'", 300)
        yield seen
        assert seen.said == [], "the console is not silent"
        assert seen.requests == [file_address(path)]


@pytest.fixture
def steps_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    yield from drawn_page(written(tmp_path, "steps", stepping(), monkeypatch))


@pytest.fixture(params=[(1280, False), (390, True)], ids=["light", "dark"])
def whole_page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    names = ("none", "full", "window", "masw", "lookup")
    traces = {name: Trace.load(RECORDED[f"smollm2-{name}"]) for name in names}
    every = [*stepping(), *of_many(traces), *of_rows("light"), F.memory_content(MemoryShape(4, 256, 8), 1000)]
    width, dark = request.param
    yield from drawn_page(written(tmp_path, "whole", every, monkeypatch), width=width, dark=dark)


SHOWN = "(n) => document.querySelectorAll('.plot')[n]._fullLayout.sliders[0].active"
FRAMES = "(n) => document.querySelectorAll('.plot')[n]._transitionData._frames.length"


def test_previous_and_next_move_by_one_frame(steps_page: Opened) -> None:
    page = steps_page.page
    page.set_default_timeout(120_000)
    jump = """([n, i]) => { Plotly.animate(document.querySelectorAll(".plot")[n], [String(i)],
      { mode: "immediate", frame: { duration: 0, redraw: true }, transition: { duration: 0 } }); }"""

    def at(number: int, frame: int) -> None:
        steps_page.wait(f"({SHOWN})({number}) === {frame}", 60)

    for number in range(3):
        plot = page.locator(".plot").nth(number)
        back, ahead = (plot.locator(f'.updatemenu-button[role=button][aria-label="{name}"]') for name in ("previous", "next"))
        last = page.evaluate(FRAMES, number) - 1
        assert page.evaluate(SHOWN, number) in (0, last)
        page.evaluate(jump, [number, 3])  # as the slider does
        at(number, 3)
        ahead.click()
        at(number, 4)
        ahead.click()
        at(number, 5)
        back.click()
        at(number, 4)
        back.focus()  # the keyboard alone, and the focus outlives the redraw
        page.keyboard.press("Enter")
        at(number, 3)
        page.keyboard.press(" ")
        at(number, 2)
        page.evaluate(jump, [number, last])
        at(number, last)
        back.click()
        at(number, last - 1)


# Figures whose axes have too little height to be read, or whose axis titles leave the drawing.
CRAMPED = """[...document.querySelectorAll('.plot')].filter((p) => p._fullLayout._has('cartesian')).flatMap((p) => {
  const box = p.getBoundingClientRect(), titles = [...p.querySelectorAll('[class$=title]')].map((t) => t.getBoundingClientRect());
  const cut = titles.some((t) => t.left < box.left - 1 || t.right > box.right + 1 || t.top < box.top - 1 || t.bottom > box.bottom + 4);
  return p._fullLayout._size.h < 220 || cut ? [`${p.closest('figure').id}: ${p._fullLayout._size.h} px, cut: ${cut}`] : [];
})"""


def test_axe_finds_nothing_serious_and_the_console_is_silent(whole_page: Opened, axe: str) -> None:
    page = whole_page.page
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run()).violations.filter(v => ['serious', 'critical'].includes(v.impact))")
    said = [f"{v['id']}: {v['help']}: {[(n['html'][:200], n['failureSummary'][:300]) for n in v['nodes'][:3]]}" for v in found]
    assert not said, "\n".join(said)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CRAMPED) == []
    fills = page.evaluate(
        "[...document.querySelectorAll('.plot')].flatMap((p) => p.data).flatMap((t) => t.cells?.fill.color ?? [])"
    )
    dark = page.evaluate("document.documentElement.dataset.theme === 'dark'")
    assert fills and set(fills) == {"#15181c" if dark else "#ffffff"}  # cells lie on the page's own paper


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))
