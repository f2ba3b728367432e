"""A real browser for the tests of pages, where there is one: Debian's chromium through Playwright (`make browser` installs it)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("MASW_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

AXE = "4.11.0"


@dataclass
class Opened:
    """A page and what it said: console errors, uncaught errors, warnings, and requests for anything but itself."""

    page: Any
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # warnings and traces of the console too
    requests: list[str] = field(default_factory=list)

    def wait(self, expression: str, seconds: float = 180.0) -> None:
        """Until the page's `expression` holds. Asked from here: a page's content security policy may forbid it to poll by itself."""
        until = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < until, f"not within {seconds:g} s: {expression}; {self.errors}"
            time.sleep(0.1)


@contextmanager
def opened(address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Opened]:
    """Opens `address` without a network. Skips the test, with the reason, where Playwright or chromium is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is missing: pip install 'masw[dev]'")
    if CHROMIUM is None:
        pytest.skip("no chromium: make browser (or MASW_CHROMIUM=/path/to/chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=True
            )
            page = context.new_page()
            seen = Opened(page)
            page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
            page.on("console", lambda m: seen.said.append(m.text) if m.type in ("error", "warning", "trace", "assert") else None)
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            page.on("request", lambda r: seen.requests.append(r.url) if not r.url.startswith(("data:", "blob:")) else None)
            page.goto(address, wait_until="commit", timeout=180_000)  # a report is megabytes, and the machine may be busy
            yield seen
        finally:
            browser.close()


def axe_source(folder: Path) -> str:
    """axe-core: the file that MASW_AXE names, else from npm into `folder`. Skips the test, with the reason, where there is neither."""
    path = os.environ.get("MASW_AXE")
    if path:
        return Path(path).read_text(encoding="utf-8")
    if shutil.which("npm") is None:
        pytest.skip("neither MASW_AXE nor npm: no axe-core to check with")
    done = subprocess.run(["npm", "pack", f"axe-core@{AXE}", "--silent"], cwd=folder, capture_output=True, timeout=90)
    archive = next(folder.glob("*.tgz"), None)
    if done.returncode or archive is None:
        pytest.skip("npm cannot fetch axe-core here")
    with tarfile.open(archive) as file:
        member = file.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def file_address(path: Path) -> str:
    return path.resolve().as_uri()
