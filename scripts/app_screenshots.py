"""Pictures of every page of the app for the documentation: python scripts/app_screenshots.py [PAIR | recorded] [DOCUMENT].

With a pair, Live and Race show runs made here and now on the document (else on the sample guide); `recorded` shows the runs that
come with masw and loads no model. Needs playwright and Debian's chromium. Writes docs/images/*.png.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "images"
WAIT = 600_000  # ms
PAGES = {"live": "", "race": "race", "inspect": "inspect", "calculator": "calculator", "explain": "explain"}
GUIDE = ROOT / "data" / "samples" / "guide.md"


def main(pair: str, document: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = pair != "recorded"
    command = [sys.executable, "-m", "masw.cli", "app", "--no-browser", "--pair", pair if runs else "tiny", "--port", str(port)]
    server = subprocess.Popen(command, env=env)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=2)
                break
            except OSError:
                time.sleep(0.3)
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
            context = browser.new_context(viewport={"width": 1280, "height": 1500})
            if runs:
                run(context, url, document)
            for name, where in PAGES.items():
                if not (runs and name in ("live", "race")):
                    page = page_at(context, url, where)
                    picture(page, name)
                    page.close()
            visitor = context.storage_state()  # the same visitor in other windows sees the same runs
            context.close()
            windows: tuple[tuple[str, int, Literal["dark", "light"]], ...] = (
                ("live-dark", 1280, "dark"),
                ("live-390", 390, "light"),
            )
            for name, width, scheme in windows:
                context = browser.new_context(
                    viewport={"width": width, "height": 1500}, color_scheme=scheme, storage_state=visitor
                )
                picture(page_at(context, url), name, top="Run" if runs and width > 400 else None)
                context.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()


def page_at(context: Any, url: str, where: str = "") -> Any:
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(f"{url}/{where}")
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_timeout(3000)
    return page


def picture(page: Any, name: str, *, top: str | None = None) -> None:
    """Of what the window shows; `top`: the button that is scrolled to its upper edge."""
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    if top is not None:
        page.get_by_role("button", name=top, exact=True).evaluate(
            "e => { e.style.scrollMarginTop = '5rem'; e.scrollIntoView({block: 'start'}) }"
        )
    page.wait_for_timeout(4000)
    page.screenshot(path=OUT / f"{name}.png", timeout=WAIT)
    print(name, (OUT / f"{name}.png").stat().st_size, flush=True)


def upload(page: Any, document: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(document)
    page.get_by_text("prompt tokens of").first.wait_for()


def run(context: Any, url: str, document: Path) -> None:
    """Live during a run and after it, and a race."""
    live = page_at(context, url, "?source=Upload&tokens=48&W=256&r=8")
    upload(live, document)
    live.get_by_role("button", name="Run", exact=True).click()
    live.get_by_text(re.compile(r"^[1-9]\d of at most")).first.wait_for()  # ten tokens or more
    picture(live, "live-running", top="Cancel")
    live.get_by_role("button", name="Trace (.jsonl)").wait_for()
    live.locator(".js-plotly-plot .main-svg").nth(5).wait_for()
    picture(live, "live", top="Run")
    live.close()
    race = page_at(context, url, "race?source=Upload&tokens=24&W=256&r=8")
    upload(race, document)
    race.get_by_role("button", name="Race", exact=True).click()
    race.get_by_label("Result of the race").first.wait_for()
    picture(race, "race")
    race.close()


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", Path(sys.argv[2]) if len(sys.argv) > 2 else GUIDE)
