"""The app over a real pair (smollm2) and real documents, and its memory over many runs: minutes. `make test-slow`; -s shows the figures.

MASW_UPLOADS names the folder of documents; without it the guide that comes with masw is uploaded.
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from masw.engine import Settings
from masw.methods import MemoryOptions
from masw.prompts import build
from masw.recorder import Recorder
from masw.session import RunOptions, Session, data_folder
from masw.zoo import load_pair

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("streamlit")
from tests.pages import app_of, html, pasted, run_until  # noqa: E402
from tests.website import CHROMIUM, COUNTED, Site, answering, button, opened, tokens, until, visitor  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FOLDER = Path(os.environ.get("MASW_UPLOADS") or "nowhere")
PATIENCE_S = 900.0


def document(number: str) -> Path:
    return next(FOLDER.glob(f"{number}-*"), data_folder() / "samples" / "guide.md")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(chromium, server) over smollm2 as a visitor starts it."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    site = Site(tmp_path_factory.mktemp("app"), "smollm2", "auto")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser, site
        browser.close()
    site.process.terminate()
    site.process.wait(60)
    assert "Traceback" not in site.log.read_text()


def upload(page: Any, path: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(path)
    page.get_by_text("prompt tokens of").first.wait_for()


def processor_s(site: Site) -> float:
    """Processor time of the server and of the browsers that this test started, which does not depend on who else is busy."""
    mine = [*psutil.Process().children(recursive=True), psutil.Process(site.process.pid)]
    total = 0.0
    for process in {p.pid: p for p in mine}.values():
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def test_first_paint_is_a_recorded_run(real: Any) -> None:
    chromium, site = real
    with visitor(chromium, site) as page:
        for what in ("first visit", "again"):
            begun, worked_s = time.monotonic(), processor_s(site)
            page.goto(site.url)
            page.get_by_role("heading", level=1).wait_for()
            heading_s = time.monotonic() - begun
            page.locator(".masw-answer .masw-t").first.wait_for()
            answer_s = time.monotonic() - begun
            page.locator(".js-plotly-plot .main-svg").first.wait_for()
            worked_s = processor_s(site) - worked_s
            print(
                f"{what}: heading after {heading_s:.1f} s, recorded answer {answer_s:.1f} s, figure {time.monotonic() - begun:.1f} s; "
                f"{worked_s:.1f} s of processor time in server and browser"
            )


def test_a_real_document_is_summarised_watched_and_cancelled(real: Any) -> None:
    chromium, site = real
    with visitor(chromium, site) as page:
        page.set_default_timeout(PATIENCE_S * 1e3)
        opened(page, site, "?source=Upload&tokens=512&W=256&r=8&method=masw")
        upload(page, document("12"))
        page.evaluate(COUNTED)
        button(page, "Run").click()
        answering(page)
        until(page, lambda: page.evaluate("window.seen.length") >= 12, PATIENCE_S)
        seen = page.evaluate("window.seen")
        button(page, "Cancel").click()
        page.get_by_text("Cancelled. What was answered until then is kept").wait_for()
        assert 0 < tokens(page) < 512
        page.locator(".masw-answer .masw-t").first.wait_for()
        said = page.get_by_text("of the decoding time").first.inner_text()
        print(f"{len(seen) - 1} changes of the text in {(seen[-1][0] - seen[0][0]) / 1e3:.1f} s; {said}")
        share = re.search(r"([0-9.]+)%", said)
        assert share is not None and float(share[1]) <= 8.0


def test_a_race_over_a_real_document_says_identical(real: Any) -> None:
    chromium, site = real
    with visitor(chromium, site) as page:
        page.set_default_timeout(PATIENCE_S * 1e3)
        opened(page, site, "race?source=Upload&tokens=24&W=128&r=8")
        upload(page, document("55"))
        button(page, "Race").click()
        table = page.get_by_label("Result of the race")
        table.get_by_text(re.compile("identical|differs")).first.wait_for()
        print(table.inner_text())
        until(page, lambda: table.get_by_text("✓ identical").count() == 3)


def test_recording_takes_a_small_part_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time inside the recorder over the time of the rounds, both wall clock in one thread. Drawing has its own figure above."""
    spent = [0.0]
    real = Recorder.add

    def timed(self: Recorder, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        real(self, *args, **kwargs)
        spent[0] += time.perf_counter() - begun

    session = Session(load_pair("smollm2", torch.device("cpu"), torch.float32))
    model = session.pair.target
    text = (data_folder() / "samples" / "guide.md").read_text(encoding="utf-8")
    prompt = build(model.tokenizer, text, "summarize", None, 1000).ids
    run = session.run(prompt, RunOptions("masw", MemoryOptions(4, 256, 8), Settings(64, 5)))
    monkeypatch.setattr(Recorder, "add", timed)
    steps = iter(run)
    while not run.trace.of("emit"):
        next(steps)
    spent[0], first = 0.0, run.trace.of("emit")[0].ms
    list(steps)
    decode_s = (sum(e.ms for e in run.trace.of("emit")) - first) / 1e3
    print(f"recording: {spent[0] * 1e3:.1f} ms of {decode_s:.1f} s of decoding, {spent[0] / decode_s:.2%}")
    assert spent[0] / decode_s < 0.03  # with drawing at most 8 %


def test_memory_stays_flat_over_fifty_runs_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the page, with all that it draws and keeps of a visitor: after 25 runs, more than are kept, 50 others."""
    process = psutil.Process()
    with app_of("tiny", monkeypatch) as app:
        pasted(app, tokens=16)

        def some(count: int) -> None:
            for i in range(count):
                app.session_state["method"] = ("masw", "full", "window", "lookup")[i % 4]
                app.run()
                app.button(key="run").click().run()
                run_until(app, lambda: app.button(key="cancel").disabled)
                assert "masw-t" in html(app)

        some(25)
        gc.collect()
        before = process.memory_info().rss
        some(50)
        gc.collect()
        growth = process.memory_info().rss - before
    print(f"growth over 50 runs: {growth / 2**20:.1f} MiB")
    assert growth < 100 * 2**20
