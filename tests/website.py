"""The real app for tests: its server, pages in Debian's chromium, and what a person does on them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.pages import TEXT

CHROMIUM = next(
    (p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser", shutil.which("chromium") or "") if p and Path(p).exists()),
    None,
)
ROOT = Path(__file__).parents[1]
WAIT = 240_000  # ms; the machine may be busy
SECRET = "zanzibarquokka"  # a word that must stay on its visitor's page
# Keeps the moments (ms) at which the number of tokens on the page changed, and the numbers.
COUNTED = """() => {
    window.seen = [];
    new MutationObserver(() => {
        const text = document.querySelector('[data-testid=stProgress]')?.textContent ?? '';
        const found = /^([0-9,]+) of at most/.exec(text);
        if (found && found[1] !== window.seen.at(-1)?.[1]) window.seen.push([performance.now(), found[1]]);
    }).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""


class Site:
    """The server and what it printed."""

    def __init__(self, folder: Path, pair: str = "tiny", dtype: str = "fp32") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [
            sys.executable,
            "-m",
            "masw.cli",
            "app",
            "--no-browser",
            "--pair",
            pair,
            "--dtype",
            dtype,
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=self.log.open("w"), stderr=subprocess.STDOUT)
        end = time.monotonic() + 90
        while True:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            try:
                urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2)
                return
            except OSError:
                time.sleep(0.3)


@contextmanager
def visitor(chromium: Any, site: Site, **options: Any) -> Iterator[Any]:
    """A page of a browser of its own."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1400}, **options)
    page = context.new_page()
    with watched(page, site):
        yield page
    context.close()


@contextmanager
def watched(page: Any, site: Site) -> Iterator[None]:
    """Checks at the end that nothing was logged as an error, asked of another host, or put into the address."""
    page.set_default_timeout(WAIT)
    bad: list[str] = []
    # Streamlit looks for its health page below the address of a sub-page first.
    page.on("console", lambda m: bad.append(m.text) if m.type == "error" and "_stcore" not in m.location.get("url", "") else None)
    page.on("pageerror", lambda e: bad.append(str(e)))
    page.on("request", lambda r: bad.append(r.url) if not r.url.startswith((site.url, "data:", "blob:")) else None)
    page.on("framenavigated", lambda f: bad.append(f.url) if SECRET in f.url else None)
    yield
    assert SECRET not in page.url
    assert not bad, bad


def opened(page: Any, site: Site, where: str = "") -> Any:
    page.goto(f"{site.url}/{where}")
    page.get_by_role("heading", level=1).wait_for()
    return page


def paste(page: Any, text: str = TEXT) -> None:
    page.get_by_label("Text of the document").first.fill(text)
    page.keyboard.press("Control+Enter")
    page.get_by_text("prompt tokens of").first.wait_for()


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def answering(page: Any) -> None:
    """Waits until a run in progress shows tokens."""
    page.get_by_text(re.compile(r"^\d+ of at most [\d,]+ tokens")).first.wait_for()


def until(page: Any, condition: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        page.wait_for_timeout(150)


def tokens(page: Any) -> int:
    """The metric `Tokens`."""
    found = page.get_by_test_id("stMetric").filter(has_text=re.compile(r"^Tokens\s*\d")).first
    return int(found.get_by_test_id("stMetricValue").inner_text())
