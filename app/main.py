"""The app of masw: `masw app`, or `streamlit run app/main.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

sys.path[:0] = [p for p in (str(Path(__file__).parent),) if p not in sys.path]

from parts import frame  # noqa: E402

st.set_page_config("masw: drafts with compact memories", str(Path(__file__).with_name("icon.svg")), layout="wide")
chosen = st.navigation(
    [
        st.Page("views/live.py", title="Live", icon=":material/bolt:", default=True),
        st.Page("views/race.py", title="Race", icon=":material/sports_score:"),
        st.Page("views/inspect.py", title="Inspect", icon=":material/search:"),
        st.Page("views/calculator.py", title="Memory calculator", icon=":material/calculate:", url_path="calculator"),
        st.Page("views/explain.py", title="Explain", icon=":material/school:"),
    ],
    position="top",
)
frame.begin()
chosen.run()
