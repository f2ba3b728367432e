"""The optional packages of the report, or one line that says how to get them."""

from __future__ import annotations

from importlib.util import find_spec

from masw.errors import UsageError

RUN = ("papermill", "nbformat", "nbconvert", "nbclient", "jupyter_client", "ipykernel", "plotly", "pandas")


def need(*modules: str) -> None:
    """Raises UsageError when one of `modules` cannot be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UsageError(f"notebooks need {', '.join(missing)}: pip install 'masw[notebooks]'")
