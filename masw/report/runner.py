"""Runs one notebook: papermill in a thread, a kernel that can be ended at any moment, and a plain account of what went wrong."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import masw
from masw.errors import UsageError
from masw.report.extras import RUN, need
from masw.report.library import Source
from masw.report.schema import injected_cell

Status = Literal["ok", "failed", "timeout", "dead", "interrupted"]


@dataclass
class Outcome:
    """One executed notebook; `notebook` holds every cell that ran, `path` is its file."""

    source: Source
    parameters: dict[str, Any]
    status: Status
    seconds: float
    path: Path
    notebook: Any
    error: str = ""  # one line, with the cell


def check_kernel(kernel: str) -> None:
    """Raises UsageError when Jupyter knows no kernel of that name."""
    need(*RUN)
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    manager = KernelSpecManager()
    try:
        spec = manager.get_kernel_spec(kernel)
        program = spec.argv[0] if spec.argv else ""
        if shutil.which(program) is None:
            raise UsageError(
                f"the program of Jupyter's kernel '{kernel}' is not there ({program or 'none is named'}); --kernel NAME"
            )
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise UsageError(
            f"Jupyter's kernel '{kernel}' cannot be read ({' '.join(str(error).split())[:120]}); mend its kernel.json or --kernel NAME"
        ) from None
    except NoSuchKernel:
        there = ", ".join(sorted(manager.find_kernel_specs())) or "none"
        raise UsageError(
            f"Jupyter has no kernel '{kernel}' (there is: {there}); python -m ipykernel install --sys-prefix, or --kernel NAME"
        ) from None


def execute(
    source: Source,
    values: Mapping[str, Any],
    folder: Path,
    *,
    kernel: str = "python3",
    timeout_s: float = 1800.0,
    stop: Callable[[], bool] = lambda: False,
    progress: bool | dict[str, Any] = False,
) -> Outcome:
    """Executes `source` with checked `values` into `folder`/NAME.ipynb, which holds what ran whatever happens.

    `timeout_s` is for the whole notebook. `stop` is asked a few times a second; when it says yes the kernel is ended. `progress`:
    papermill's bar, True or tqdm's options. Never raises for what a cell does.
    """
    need(*RUN)
    import nbformat
    import papermill

    logging.getLogger("papermill").setLevel(logging.CRITICAL + 1)
    path, prepared = folder / f"{source.name}.ipynb", folder / f".{source.name}.input.ipynb"
    nbformat.write(_with_values(source, values), prepared)
    started, died_of, patience = time.monotonic(), "", math.ceil(timeout_s) + 60
    pids: list[int] = []
    raised: list[BaseException] = []
    with open(folder / f".{source.name}.kernel.log", "wb") as log:

        def work() -> None:
            try:
                papermill.execute_notebook(
                    str(prepared),
                    str(path),
                    kernel_name=kernel,
                    kernel_manager_class=_manager_class(pids, log, folder),
                    progress_bar=progress,
                    # One limit alone, `timeout_s`: papermill would give a kernel 60 s to start and a reply's output 4 s to come,
                    # which a busy machine does not keep.
                    start_timeout=patience,
                    iopub_timeout=patience,
                    store_widget_state=False,  # five megabytes of script for each plotly widget
                )
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work, name=f"papermill {source.name}", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            if not died_of and (stop() or time.monotonic() - started > timeout_s):
                died_of = "interrupted" if stop() else "timeout"
            if died_of:
                _kill(pids)  # again until the thread ends: the kernel may still be starting
    seconds = time.monotonic() - started
    tail = _tail(Path(log.name))
    for left in (prepared, Path(log.name)):
        left.unlink(missing_ok=True)
    notebook = nbformat.read(path, as_version=4) if path.exists() else _with_values(source, values)
    _clean(notebook, source, values)
    nbformat.write(notebook, path)
    status, error = _account(died_of, raised[0] if raised else None, notebook, tail, timeout_s)
    return Outcome(source, dict(values), status, seconds, path, notebook, error)


def _with_values(source: Source, values: Mapping[str, Any]) -> Any:
    """The notebook with a cell of values after its `parameters` cell, as papermill would place it; outputs cleared."""
    import nbformat

    notebook = copy.deepcopy(source.notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    at = next((i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])), None)
    if at is not None:
        notebook.cells.insert(
            at + 1,
            nbformat.v4.new_code_cell(
                injected_cell(values, source.schema), id="injected-parameters", metadata={"tags": ["injected-parameters"]}
            ),
        )
    return notebook


def _manager_class(pids: list[int], log: Any, folder: Path) -> Any:
    """A kernel manager whose kernels run this very masw, draw for the report, and are known by process id."""
    from jupyter_client import AsyncKernelManager

    work = folder / ".cwd"  # what a notebook writes by a bare name stays apart from the report
    work.mkdir(exist_ok=True)
    package = str(Path(masw.__file__).parent.parent)

    class Manager(AsyncKernelManager):
        async def _async_launch_kernel(self, kernel_cmd: Any, **kw: Any) -> None:
            env = dict(kw.get("env") or os.environ)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
            env["PLOTLY_RENDERER"] = "plotly_mimetype"  # the figure once, as data; the page brings plotly.js
            env["MASW_REPORT"] = "1"
            env["MASW_REPORT_FROM"] = os.getcwd()  # relative paths in parameters are meant from here
            await super()._async_launch_kernel(kernel_cmd, **{**kw, "env": env, "cwd": str(work), "stderr": log, "stdout": log})
            pids.append(int(self.provisioner.pid))

    return Manager


def _kill(pids: list[int]) -> None:
    for pid in pids:  # a kernel leads its own process group
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def _clean(notebook: Any, source: Source, values: Mapping[str, Any]) -> None:
    """Takes out where on this machine things lay; file names stay."""
    about = notebook.metadata.get("papermill", {})
    for key in ("input_path", "output_path"):
        about[key] = f"{source.name}.ipynb"
    about.pop("environment_variables", None)
    about["parameters"] = dict(values)


def _account(died_of: str, raised: BaseException | None, notebook: Any, tail: str, timeout_s: float) -> tuple[Status, str]:
    where = _place(notebook)
    if died_of == "interrupted":
        return "interrupted", f"interrupted in {where}"
    if died_of == "timeout":
        return "timeout", f"not done after {timeout_s:g} s, in {where}; give it longer with --timeout"
    if raised is None:
        return "ok", ""
    kind = type(raised).__name__
    if kind == "PapermillExecutionError":
        name, value = getattr(raised, "ename", "error"), getattr(raised, "evalue", "")
        said = " ".join(str(value).split())[:300] or _failed_line(getattr(raised, "traceback", ()))
        return "failed", f"{where}: {name}{f': {said}' if said else ''}"
    if kind == "DeadKernelError":
        return "dead", f"the kernel died in {where} (out of memory?){': ' + tail if tail else ''}"
    if isinstance(raised, OSError):
        return "failed", f"cannot write the executed notebook ({raised.strerror or raised})"
    return (
        "dead",
        f"the kernel did not start or answer ({kind}: {' '.join(str(raised).split())[:200]}){': ' + tail if tail else ''}",
    )


def _failed_line(traceback: Sequence[str]) -> str:
    """The line of code that an exception without a message stopped at, from IPython's traceback."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback))
    found = re.findall(r"^-+> *\d+ (.*)$", text, re.M)
    return found[-1].strip()[:200] if found else ""


def _place(notebook: Any) -> str:
    """`cell 7 (Rollback)`: the last code cell that was begun, counted without papermill's own cells, and the heading over it."""
    heading, place, number = "", "the first cell", 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "papermill-error-cell-tag" in tags:
            continue
        if cell.cell_type == "markdown":
            found = [line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")]
            heading = found[-1].strip() if found else heading
        elif cell.cell_type == "code":
            number += "injected-parameters" not in tags
            if cell.metadata.get("papermill", {}).get("status") in ("running", "failed", "completed"):
                place = f"cell {number}" + (f" ({heading})" if heading else "")
            if cell.metadata.get("papermill", {}).get("status") in ("running", "failed"):
                break
    return place


def _tail(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        lines = [line for line in lines if "IPKernelApp] WARNING" not in line]
        return lines[-1].strip()[:200] if lines else ""
    return ""
