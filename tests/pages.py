"""The app's pages without a browser, in this process: for tests of what they say and do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("plotly")

import streamlit as st
from streamlit.testing.v1 import AppTest

MAIN = Path(__file__).parents[1] / "app" / "main.py"
TEXT = "The committee met on Monday and wrote down what it found. " * 12


@contextmanager
def app_of(pair: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    """An app with an engine room of its own; the machine's rates are made up, since measuring them takes seconds."""
    from masw import service

    monkeypatch.setenv("MASW_APP_PAIR", pair)
    monkeypatch.setenv("MASW_APP_DTYPE", "fp32")
    monkeypatch.setattr(service, "machine", lambda device: service.cost.Rates(1e10, 1e11))
    st.cache_resource.clear()
    yield AppTest.from_file(str(MAIN), default_timeout=120)
    from parts.frame import room

    room().close()
    st.cache_resource.clear()


def html(app: AppTest) -> str:
    return "".join(e.proto.body for e in app.get("html"))


def run_until(app: AppTest, condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert not app.exception
        time.sleep(0.1)
        app.run()


def pasted(app: AppTest, tokens: int = 24, text: str = TEXT) -> AppTest:
    app.run()
    app.session_state["source"] = "Paste"
    app.session_state["tokens"] = tokens
    app.session_state["W"] = 32
    app.run()
    app.text_area(key="pasted").set_value(text)
    return app.run()
