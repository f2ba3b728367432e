"""The real page in Debian's chromium, over the `tiny` pair: what a person does, sees and must never see.

Skipped where chromium or playwright is missing. MASW_UPLOADS names a folder of documents to try, MASW_AXE an `axe.min.js`
(else npm is asked for one).
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from masw.trace import Trace
from tests.browser import axe_source
from tests.pages import TEXT
from tests.test_app import trace_of
from tests.website import CHROMIUM, COUNTED, SECRET, WAIT, Site, answering, button, opened, paste, tokens, until, visitor, watched

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("streamlit")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("app"))
    yield site
    site.process.terminate()
    site.process.wait(30)
    log = site.log.read_text()
    assert "Traceback" not in log and SECRET not in log, log
    assert not [p for p in site.log.parent.rglob("*") if p != site.log], "the app wrote files"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(chromium: Any) -> Iterator[Any]:
    """One browser for most tests: opening a page is cheaper once its scripts are cached."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1400}, accept_downloads=True, bypass_csp=True)
    yield context
    context.close()


@pytest.fixture
def page(context: Any, site: Site) -> Iterator[Any]:
    page = context.new_page()
    with watched(page, site):
        yield page
    page.close()


def test_upload_run_watch_cancel_and_keep_the_part(page: Any, site: Site) -> None:
    opened(page, site, "?source=Upload&tokens=1024&W=32")
    page.locator("input[type=file]").first.set_input_files(
        {"name": f"{SECRET}.txt", "mimeType": "text/plain", "buffer": (TEXT + SECRET).encode()}
    )
    page.get_by_text("prompt tokens of").first.wait_for()
    button(page, "Run").click()
    answering(page)
    before = tokens(page)
    until(page, lambda: tokens(page) > before)  # it grows while it runs
    button(page, "Cancel").click()
    page.get_by_text("Cancelled. What was answered until then is kept").wait_for()
    assert 0 < tokens(page) < 1024
    page.locator(".masw-answer .masw-t").first.wait_for()


def test_a_race_ends_says_identical_and_replays(page: Any, site: Site) -> None:
    opened(page, site, "race?source=Paste&tokens=24&W=32")
    paste_race(page)
    button(page, "Race").click()
    table = page.get_by_label("Result of the race")
    table.get_by_text("✓ identical").first.wait_for()
    until(page, lambda: table.get_by_text("✓ identical").count() == 3)
    assert "the reference" in table.inner_text()
    page.get_by_label("Speed").first.wait_for()
    button(page, "Start").click()
    until(page, lambda: page.get_by_text(re.compile(r"^0\.0 s of")).count() == 1)
    assert page.locator(".masw-answer").first.inner_text() == "…"
    button(page, "Play").click()
    until(page, lambda: page.locator(".masw-answer .masw-t").count() > 0)
    button(page, "Play").wait_for()  # it stops by itself at the end


def paste_race(page: Any) -> None:
    page.get_by_label("Text of the document").first.fill(TEXT)
    page.keyboard.press("Control+Enter")
    page.get_by_text("characters").first.wait_for()


def test_the_scrubber_moves_all_panels(page: Any, site: Site) -> None:
    trace = "\n".join(trace_of(8).lines())
    points = "() => [...document.querySelectorAll('.js-plotly-plot')].map(p => JSON.stringify(p.data.map(d => [d.x, d.y, d.base])).length)"
    opened(page, site, "inspect")
    page.locator("input[type=file]").first.set_input_files(
        {"name": "t.jsonl", "mimeType": "application/json", "buffer": trace.encode()}
    )
    page.get_by_text("round 8: 2 tokens emitted").wait_for()
    until(page, lambda: page.locator(".js-plotly-plot").count() == 4)
    page.wait_for_timeout(500)
    whole, count = page.evaluate(points), tokens(page)
    assert count == 16
    for number in (7, 6, 5, 4):  # a press while the page is being redrawn would be lost
        page.get_by_role("slider").last.focus()
        page.keyboard.press("ArrowLeft")
        page.get_by_text(f"round {number}: 2 tokens emitted").wait_for()
    until(page, lambda: tokens(page) == 8)
    until(page, lambda: len(page.evaluate(points)) == 4 and page.evaluate(points)[0] < whole[0])
    part = page.evaluate(points)
    latency, _, memory, kv_map = range(4)  # acceptance by position stays at 100 % here
    assert part[latency] < whole[latency] and part[memory] < whole[memory] and part[kv_map] < whole[kv_map]
    until(page, lambda: page.locator(".masw-answer .masw-t").count() == 8)
    button(page, "Next").click()
    until(page, lambda: tokens(page) == 10)


def test_a_deep_link_restores_every_setting(page: Any, site: Site) -> None:
    link = "?method=window&gamma=3&r=4&W=64&S=2&tokens=32&weights=int8&temperature=0.5&top_p=0.9&seed=7&task=Continue+the+text&source=Paste"
    opened(page, site, link)
    paste(page)
    side = page.get_by_test_id("stSidebar")
    shown = [s.get_attribute("aria-valuetext") for s in side.get_by_role("slider").all()]
    assert shown[:2] == ["32", "3"] and {"4", "64", "2"} <= set(shown)
    boxes = {i.get_attribute("aria-label"): i.input_value() for i in side.locator("input").all()}
    wanted = {"Method": "window", "Draft weights": "int8", "Temperature": "0.5", "Top-p": "0.9", "Seed": "7"}
    assert {name: boxes.get(name) for name in wanted} == wanted
    for part in ("method=window", "gamma=3", "W=64", "seed=7", "task=Continue", "source=Paste"):
        assert part in page.url


def test_a_reload_finds_the_run_again(page: Any, site: Site) -> None:
    opened(page, site, "?source=Paste&tokens=1024&W=32")
    paste(page)
    button(page, "Run").click()
    answering(page)
    page.reload()
    answering(page)
    button(page, "Cancel").click()
    page.get_by_text("Cancelled. What was answered until then is kept").wait_for()
    page.reload()
    page.get_by_text("Cancelled. What was answered until then is kept").wait_for()


def test_two_browsers_queue_and_do_not_mix(chromium: Any, site: Site) -> None:
    with visitor(chromium, site) as one, visitor(chromium, site) as two:
        for page, name, count in ((one, f"alpha-{SECRET}", 1024), (two, "beta", 16)):
            opened(page, site, f"?source=Upload&tokens={count}&W=32")
            page.locator("input[type=file]").first.set_input_files(
                {"name": f"{name}.txt", "mimeType": "text/plain", "buffer": (TEXT + name).encode()}
            )
            page.get_by_text("prompt tokens of").first.wait_for()
        button(one, "Run").click()
        answering(one)
        button(two, "Run").click()
        two.get_by_text("Number 1 in line").wait_for()
        button(one, "Cancel").click()
        one.get_by_text("Cancelled. What was answered until then is kept").wait_for()
        button(two, "Trace (.jsonl)").wait_for()
        assert SECRET not in two.content() and "beta" not in one.content()
        assert tokens(two) == 16


def test_exports_open(page: Any, site: Site, tmp_path: Path) -> None:
    opened(page, site, "?source=Paste&tokens=24&W=32")
    paste(page)
    button(page, "Run").click()
    until(
        page, lambda: button(page, "Trace (.jsonl)").count() == 1 and tokens(page) == 24
    )  # before, the last visit's run stands there
    got = {}
    for name in ("Trace (.jsonl)", "Tokens (.csv)", "Rounds (.csv)", "Report (.html)"):
        button(page, name).wait_for()
        with page.expect_download() as waiting:
            button(page, name).click()
        got[name] = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(got[name])
    trace = Trace.load(got["Trace (.jsonl)"])
    assert trace.of("end")[0].count == 24 and trace.header["pair"] == "tiny"
    assert sum(r["fate"] != "rejected" for r in csv.DictReader(got["Tokens (.csv)"].open(newline=""))) >= 24
    assert len(list(csv.DictReader(got["Rounds (.csv)"].open()))) == len(trace.of("emit"))
    report, asked = page.context.new_page(), []
    report.on("request", lambda r: asked.append(r.url))
    report.goto(got["Report (.html)"].as_uri())
    report.locator(".js-plotly-plot .main-svg").first.wait_for()
    until(report, lambda: report.locator(".js-plotly-plot .plot-container").count() == 6)
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_dark_and_narrow(chromium: Any, site: Site, width: int, scheme: str) -> None:
    with visitor(chromium, site, color_scheme=scheme) as page:
        page.set_viewport_size({"width": width, "height": 900})
        for where in ("", "race", "inspect", "calculator", "explain"):
            opened(page, site, where)
            page.wait_for_timeout(1500)
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width
            assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= width, where
        until(page, lambda: page.locator(".js-plotly-plot").count() > 0)
        paper = page.evaluate("document.querySelector('.js-plotly-plot').layout.paper_bgcolor")
        assert (paper != "#ffffff") == (scheme == "dark")


def test_keyboard_alone_is_enough(page: Any, site: Site) -> None:
    opened(page, site, "?source=Paste&tokens=16&W=32")
    paste(page)
    page.evaluate("document.activeElement.blur()")
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText || ''").strip().endswith("Run"):
            break
    else:
        pytest.fail("Tab never reached Run")
    assert page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle != 'none' || getComputedStyle(document.activeElement).boxShadow != 'none'"
    )
    page.keyboard.press("Enter")
    button(page, "Trace (.jsonl)").wait_for()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))


def serious(page: Any, axe: str) -> str:
    """What axe finds on the page as it is, one line each."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run()).violations.filter(v => ['serious', 'critical'].includes(v.impact))")
    return "\n".join(f"{v['id']}: {v['help']}: {[n['html'][:160] for n in v['nodes'][:3]]}" for v in found)


SCHEMES = ["light", "dark"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("where", ["", "race", "inspect", "calculator", "explain"])
def test_axe_finds_nothing_serious(page: Any, site: Site, axe: str, where: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    opened(page, site, where)
    if where in ("", "race", "inspect"):  # axe looks past a button that cannot be pressed
        page.locator("[data-testid=stBaseButton-primary]:enabled").first.wait_for()
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert page.evaluate("getComputedStyle(document.querySelector('.stApp')).colorScheme") == scheme
    assert not serious(page, axe)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_serious_after_a_run(chromium: Any, site: Site, axe: str, scheme: str) -> None:
    with visitor(chromium, site, color_scheme=scheme, bypass_csp=True) as page:
        opened(page, site, "?source=Paste&tokens=24&W=32")
        paste(page)
        button(page, "Run").click()
        button(page, "Trace (.jsonl)").wait_for()
        page.locator(".js-plotly-plot .main-svg").nth(5).wait_for()
        assert not serious(page, axe)


def test_a_run_is_looked_at_twice_a_second_and_every_look_shows_what_is_new(chromium: Any, site: Site) -> None:
    """The rate is what the server tells the page to ask at; a busy machine may answer later, so looks are counted and not timed."""
    from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

    scheduled: dict[str, float] = {}
    sent: list[str] = []

    def received(data: Any) -> None:
        message = ForwardMsg.FromString(data)
        if message.WhichOneof("type") == "auto_rerun":
            scheduled[message.auto_rerun.fragment_id] = message.auto_rerun.interval
        element = message.delta.new_element if message.WhichOneof("type") == "delta" else None
        if element is not None and element.WhichOneof("type") == "progress" and " of at most " in element.progress.text:
            sent.append(element.progress.text)

    with visitor(chromium, site) as page:
        page.on("websocket", lambda socket: socket.on("framereceived", received))
        opened(page, site, "?source=Paste&tokens=1024&W=32")
        paste(page)
        page.evaluate(COUNTED)
        button(page, "Run").click()
        button(page, "Trace (.jsonl)").wait_for()
        shown = page.evaluate("window.seen.length")
    assert min(scheduled.values()) <= 0.5, scheduled  # the text and the numbers; figures follow more slowly
    assert len(sent) >= 3 and len(set(sent)) >= len(sent) / 2  # a look has something new to say
    assert shown >= len(set(sent)) / 2, (shown, sent)  # and the page draws it


def test_a_removed_upload_is_gone_and_replacing_it_does_not_disturb_a_run(chromium: Any, site: Site) -> None:
    def upload(name: str, text: str) -> None:
        page.locator("input[type=file]").first.set_input_files({"name": name, "mimeType": "text/plain", "buffer": text.encode()})
        page.locator(".masw-facts", has_text=f"{name}: ").first.wait_for()

    with visitor(chromium, site) as page:
        opened(page, site, "?source=Upload&tokens=256&W=32")
        upload("first.txt", TEXT)
        page.get_by_text("prompt tokens of").first.wait_for()
        button(page, "Run").click()
        answering(page)
        upload("second.txt", "Quite another text. " * 30)
        page.get_by_role("button", name=re.compile("Remove|Delete|Clear")).first.click()
        until(page, lambda: page.get_by_text("prompt tokens of").count() == 0)
        until(page, lambda: page.locator(".masw-facts", has_text=".txt: ").count() == 0 and button(page, "Run").is_disabled())
        button(page, "Trace (.jsonl)").wait_for()
        assert tokens(page) == 256
        page.get_by_role("link", name="Race").click()
        page.get_by_role("heading", level=1, name="Race").wait_for()
        page.go_back()
        page.get_by_role("heading", level=1, name="Live").wait_for()
        button(page, "Trace (.jsonl)").wait_for()
        until(page, lambda: tokens(page) == 256)
        assert page.locator(".masw-facts", has_text=".txt: ").count() == 0


def test_back_and_forward_move_by_pages_and_keep_settings_and_document(chromium: Any, site: Site) -> None:
    """Once Back needed a press for each setting that had been changed, and then came to a page without settings or document."""
    kept = {"tokens=256", "W=32"}

    def at(name: str, path: str, settings: set[str] = kept) -> None:
        page.get_by_role("heading", level=1, name=name).wait_for()
        until(page, lambda: page.url.split("?")[0] == site.url + path and settings <= set(page.url.partition("?")[2].split("&")))
        if settings == kept:
            until(page, lambda: page.get_by_role("slider", name="New tokens, at most").input_value() == "256")
            page.get_by_text("prompt tokens of").first.wait_for()

    with visitor(chromium, site) as page:
        page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 4})  # slow enough for every entry
        opened(page, site, "?source=Paste&tokens=256&W=32")
        before = page.evaluate("history.length")
        paste(page)
        at("Live", "/")
        page.get_by_role("link", name="Race").click()
        at("Race", "/race")
        page.go_back()
        at("Live", "/")
        page.go_forward()
        at("Race", "/race")
        assert page.evaluate("history.length") == before + 1
        assert page.get_by_label("Text of the document").first.input_value() == TEXT
        page.get_by_role("link", name="Explain").click()
        at("Explain", "/explain", set())
        assert not page.url.partition("?")[2]  # settings of other pages stay with them
        page.go_back()
        at("Race", "/race")


def test_back_after_a_reload_reads_the_settings_from_the_address(chromium: Any, site: Site) -> None:
    with visitor(chromium, site) as page:
        opened(page, site, "?tokens=256&W=32")
        page.get_by_role("link", name="Explain").click()
        page.get_by_role("heading", level=1, name="Explain").wait_for()
        page.reload()
        page.get_by_role("heading", level=1, name="Explain").wait_for()
        page.wait_for_timeout(1000)
        page.go_back()
        page.get_by_role("heading", level=1, name="Live").wait_for()
        until(page, lambda: page.get_by_role("slider", name="New tokens, at most").input_value() == "256")


def test_the_server_ends_quietly_in_the_middle_of_a_run(chromium: Any, tmp_path: Path) -> None:
    own = Site(tmp_path)
    context = chromium.new_context()
    page = opened(context.new_page(), own, "?source=Paste&tokens=1024&W=32")
    page.set_default_timeout(WAIT)
    paste(page)
    button(page, "Run").click()
    answering(page)
    own.process.terminate()
    own.process.wait(90)
    context.close()
    said = own.log.read_text()
    assert own.process.returncode == 0 and "terminate called" not in said and "ended with code" not in said, said


@pytest.mark.skipif(not os.environ.get("MASW_UPLOADS"), reason="MASW_UPLOADS names no folder of documents")
def test_every_document_is_read_or_refused_in_words(page: Any, site: Site) -> None:
    files = [p for p in sorted(Path(os.environ["MASW_UPLOADS"]).iterdir()) if p.is_file() and p.name != "README.md"]
    opened(page, site, "?source=Upload")
    for path in files:
        page.locator("input[type=file]").first.set_input_files(path)
        label = path.name if len(path.name) < 30 else path.name[:20]
        until(page, lambda label=label: label[:20] in page.get_by_test_id("stMain").inner_text() and answered(page, label), 40)  # type: ignore[misc]
        assert "Traceback" not in page.content(), path
        assert page.get_by_test_id("stException").count() == 0, path
        remove = page.get_by_role("button", name=re.compile("Remove|Delete|Clear"))
        if remove.count():
            remove.first.click()
            page.wait_for_timeout(300)


def answered(page: Any, label: str) -> bool:
    """A summary line or a refusal, whichever names the file."""
    lines = page.locator(".masw-facts, [role=alert]").all_inner_texts()
    return any(label[:20] in line and ("characters" in line or len(line) > len(label) + 10) for line in lines)
