"""`masw report` from command to files: what it writes, what it refuses, and what survives when a notebook goes wrong."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from masw import cli
from masw.errors import UsageError
from masw.report.build import build
from masw.report.library import choose
from masw.report.runner import execute
from tests.browser import file_address, opened

PARAMETERS = """from typing import Literal

mode: Literal["trace", "live"] = "trace"  # recorded traces, or a model
pair: str = "smollm2"  # of a live run
window: int = 64  # W [1..8192]"""
FIGURE = """import json, os, time
from types import SimpleNamespace
import plotly.graph_objects as go
from masw.report import environment_card, headline, show
environment_card({"mode": mode, "pair": pair, "window": window})
frames = [go.Frame(name=str(i), data=[go.Bar(y=[i, window])]) for i in range(3)]
steps = [{"label": str(i), "method": "animate", "args": [[str(i)]]} for i in range(3)]
fig = go.Figure(go.Bar(x=[1, 2], y=[window, 2], name="</script><b>$x$", marker_color="#000000"), frames=frames)
fig.update_layout(xaxis_title="tokens", yaxis_title="bytes", height=360, paper_bgcolor="#ffffff", font_color="#1a1a1a",
                  sliders=[{"steps": steps}])
show(SimpleNamespace(figure=fig, caption="Bytes <of> tokens.", alt="Two bars.", table=[{"tokens": 1, "bytes": window}]))
headline("kept", window / 128, "share", n=3)
headline("step", time.perf_counter(), "ms", kind="timing")
print(os.environ["MASW_REPORT"], os.environ["PLOTLY_RENDERER"])
open("left-over.txt", "w").write("x")"""


def write(folder: Path, name: str, *cells: str, title: str = "A title") -> None:
    made = [nbformat.v4.new_markdown_cell(f"# {title}\n\nWhat *it* is.\n\n## Part one\n\n| a | b |\n|---|---|\n| 1 | 2 |")]
    for cell in cells:
        tags = ["parameters"] if cell.startswith("from typing") else []
        made.append(nbformat.v4.new_code_cell(cell, metadata={"tags": tags}))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), folder / f"{name}.ipynb")


@pytest.fixture
def masw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["masw", "report", *map(str, args)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    write(folder, "01_slots", PARAMETERS, FIGURE, title="How a slot is born")
    write(folder, "02_other", "print('<b>no parameters</b>')", title="Another")
    return folder


@pytest.fixture(scope="module")
def report(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report of two notebooks."""
    sources = choose([], library)
    assert [s.name for s in choose(["1"], library)] == [s.name for s in choose(["01"], library)] == ["01_slots"]
    values = {s.name: s.schema.values({"window": 32} if s.schema.parameters else {}) for s in sources}
    made = build(sources, values, tmp_path_factory.mktemp("reports") / "out")
    assert made.complete, [o.error for o in made.outcomes]
    return made.folder


def test_the_files_of_a_report_and_nothing_else(report: Path) -> None:
    assert {p.name for p in report.iterdir()} == {"report.html", "report.json", "01_slots.ipynb", "02_other.ipynb"}
    assert (report / "report.html").stat().st_size < 6e6 and (report / "01_slots.ipynb").stat().st_size < 100_000


def test_the_side_car_holds_parameters_environment_and_numbers(report: Path) -> None:
    found = json.loads((report / "report.json").read_text())
    first, second = found["notebooks"]
    assert first["parameters"] == {"mode": "trace", "pair": "smollm2", "window": 32} and second["parameters"] == {}
    assert [(h["name"], h["kind"], h["n"]) for h in first["headlines"]] == [("kept", "value", 3), ("step", "timing", None)]
    assert first["headlines"][0]["value"] == 0.25 and first["headlines"][0]["unit"] == "share"
    assert found["environment"]["plotly"] and first["environment"]["masw"] and first["status"] == "ok"
    assert first["summary"] == "What it is."


def test_executed_notebooks_hold_figures_once_and_no_path_of_this_machine(report: Path) -> None:
    text = (report / "01_slots.ipynb").read_text()
    assert text.count("application/vnd.plotly.v1+json") == 2  # the data, and the alt text beside it
    assert (
        "widget-state" not in text
        and str(report.parent) not in text
        and "/tmp" not in text
        and str(Path.home()) + "/" not in text
    )
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.papermill.parameters == {"mode": "trace", "pair": "smollm2", "window": 32}
    printed = [o.text for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"]
    assert printed == ["1 plotly_mimetype\n"]


def test_the_page_brings_plotly_once_and_names_no_other_host(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert page.count("* plotly.js v") == 1
    own = page[: page.index("* plotly.js v")]
    assert "http://" not in own and "https://" not in own.replace("https://plotly.com", "")
    for unwanted in ("require.min.js", "MathJax.js", "cdnjs", "<script src", '<link rel="stylesheet"'):
        assert unwanted not in page.replace("MathJax", "", 0) or unwanted == "MathJax.js"
    assert "default-src 'none'" in page and "&lt;b&gt;no parameters" in page and "\\u003c/script>" in page


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_opens_offline_with_every_figure_drawn(report: Path, width: int, dark: bool) -> None:
    with opened(file_address(report / "report.html"), width=width, dark=dark) as seen:
        page = seen.page
        seen.wait("document.documentElement.dataset.figures === 'drawn'")
        assert seen.errors == seen.said == [] and seen.requests == [file_address(report / "report.html")]
        assert page.evaluate("[...document.querySelectorAll('figure .plot')].every((p) => p.querySelector('.main-svg'))")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => +h.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))
        broken = "[...document.querySelectorAll('a[href^=\"#\"]')].filter((a) => !document.getElementById(a.hash.slice(1)))"
        assert page.evaluate(f"{broken}.length") == 0
        assert page.evaluate("document.querySelector('figure .sr').textContent") == "Two bars."
        shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shown == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
        if dark:  # a sink is black: it needs an outline on a dark page
            assert page.evaluate("document.querySelector('.plot').data[0].marker.line.color") == "#ffffff"
            page.click("#theme")
            seen.wait("document.documentElement.dataset.figures === 'drawn'")
            assert page.evaluate("document.documentElement.dataset.theme") == "light"
            assert page.evaluate("document.querySelector('.plot').layout.paper_bgcolor") == "#ffffff"
        page.evaluate("Plotly.animate(document.querySelector('.plot'), ['2'])")  # frames need no kernel
        seen.wait("document.querySelector('.plot').data[0].y[0] === 2")


# ---- bad input: refused before a kernel starts


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["01_slotz"], "did you mean 01_slots?"),
        (["all", "--out", ""], "--out needs the name of a folder"),
        (["--set", "windw=3"], "did you mean window?"),
        (["--set", "window=wide"], "window takes int"),
        (["02_other", "--set", "window=3"], "no parameter 'window' in 02_other; there are none"),
        (["--mode", "trce"], "did you mean trace?"),
        (["--pair", "smolm2"], "did you mean smollm2"),
        (["--pair", "tiny", "--mode", "trace"], "--pair is for live runs"),
        (["--format", "pdf"], "no format 'pdf'"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--kernel", "nope"], "Jupyter has no kernel 'nope'"),
        (["--params", "missing.yaml"], "cannot read missing.yaml"),
        (["--notebooks", "missing"], "there is no folder of notebooks"),
        (["--out", "/proc/report"], "cannot write into /proc/report"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(masw, library: Path, tmp_path: Path, args: list[str], says: str) -> None:
    given = ["--notebooks", library, "--out", tmp_path / "out", *args]  # of an option given twice the last counts
    names = [args[0]] if not args[0].startswith("--") else []
    code, out, err = masw(*names, *given[:4], *(args[1:] if names else args))
    assert code == 2 and says in err and out == ""
    assert len(err.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_a_broken_notebook_file_is_named(masw, tmp_path: Path) -> None:
    (tmp_path / "01_bad.ipynb").write_text("{")
    code, _, err = masw("--notebooks", tmp_path)
    assert code == 2 and "01_bad.ipynb is not a notebook" in err


def test_every_name_is_looked_at_beside_all(library: Path) -> None:
    with pytest.raises(UsageError, match="no notebook '99'"):
        choose(["all", "99"], library)


def test_a_notebook_of_another_language_is_refused(masw, tmp_path: Path) -> None:
    write(tmp_path, "01_other", "println(1)")
    made = nbformat.read(tmp_path / "01_other.ipynb", as_version=4)
    made.metadata["kernelspec"] = {"name": "julia-9", "display_name": "Julia", "language": "julia"}
    nbformat.write(made, tmp_path / "01_other.ipynb")
    code, _, err = masw("--notebooks", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "01_other.ipynb is a notebook for julia" in err


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ('{"argv": ["/no/such/python"], "display_name": "x", "language": "python"}', "(/no/such/python)"),
        ("{", "cannot be read"),
    ],
)
def test_a_broken_kernel_is_named_before_anything_runs(
    masw, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, says: str
) -> None:
    folder = tmp_path / "jupyter" / "kernels" / "broken"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(spec)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    code, _, err = masw("01", "--notebooks", library, "--out", tmp_path / "out", "--kernel", "broken")
    assert code == 2 and "kernel 'broken'" in err and says in err


def test_a_model_that_cannot_be_had_is_one_line(masw, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from masw.errors import MaswError

    def unreachable(model: object, progress: object) -> None:
        raise MaswError("cannot fetch it")

    monkeypatch.setattr("masw.store.obtain", unreachable)
    code, _, err = masw("01", "--notebooks", library, "--out", tmp_path / "out", "--mode", "live")
    assert code == 3 and "cannot fetch it" in err


# ---- what goes wrong while it runs


def test_a_failing_cell_is_named_and_the_earlier_report_stays(masw, library: Path, tmp_path: Path) -> None:
    write(tmp_path / "nb", "01_fails", "kept = 1\nprint(kept)", "raise ValueError('the <sum> is off')", "print('never')")
    write(tmp_path / "nb", "02_runs", "print('after')")
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("the earlier one")
    code, printed, err = masw("--notebooks", tmp_path / "nb", "--out", out)
    assert code == 3, (code, err)
    assert "01_fails, cell 2 (Part one): ValueError: the <sum> is off" in err.splitlines()[-1]
    assert (out / "report.html").read_text() == "the earlier one" and not (out / "report.json").exists()
    partial = nbformat.read(out / "incomplete" / "01_fails.ipynb", as_version=4)
    assert [o.text for c in partial.cells if c.cell_type == "code" for o in c.outputs if "text" in o] == ["1\n"]
    record = json.loads((out / "incomplete" / "report.json").read_text())
    assert [n["status"] for n in record["notebooks"]] == ["failed", "ok"]
    page = (out / "incomplete" / "report.html").read_text()
    assert "the &lt;sum&gt; is off" in page and "An Exception was encountered" not in page
    assert "incomplete/report.html" in printed and not list(out.glob(".report*"))


def test_an_assertion_without_words_is_told_by_its_line(masw, tmp_path: Path) -> None:
    write(tmp_path / "nb", "01_fails", "kept = 1\nassert kept > 1")
    code, _, err = masw("--notebooks", tmp_path / "nb", "--out", tmp_path / "out")
    assert code == 3 and "cell 1 (Part one): AssertionError: assert kept > 1" in err


def test_a_report_takes_the_place_of_the_earlier_one_as_a_whole(tmp_path: Path) -> None:
    nb, out = tmp_path / "nb", tmp_path / "out"
    write(nb, "01_one", "print(1)")
    write(nb, "02_two", "raise ValueError")
    one, two = choose([], nb)
    assert build([one], {"01_one": {}}, out).complete
    (out / "mine.txt").write_text("kept")
    assert not build([two], {"02_two": {}}, out).complete
    assert (out / "01_one.ipynb").exists() and (out / "incomplete" / "02_two.ipynb").exists()
    write(nb, "02_two", "print(2)")
    assert build(choose(["2"], nb), {"02_two": {}}, out, formats=("ipynb", "json")).complete
    assert {p.name for p in out.iterdir()} == {"02_two.ipynb", "report.json", "mine.txt"}


def test_two_numbers_of_one_name_are_refused(tmp_path: Path) -> None:
    cell = "from masw.report import headline\nheadline('x', 1)\nheadline('x', 2)"
    write(tmp_path / "nb", "01_twice", cell)
    made = build(choose([], tmp_path / "nb"), {"01_twice": {}}, tmp_path / "out")
    assert not made.complete and "two numbers are called 'x'" in made.outcomes[0].error


def test_output_that_comes_long_after_the_reply_is_waited_for(tmp_path: Path) -> None:
    """As on a busy machine: the kernel's reply is there, what its cell printed follows seconds later."""
    late = "import time\nget_ipython().kernel.iopub_thread.schedule(lambda: time.sleep(7))\nprint('late')"
    write(tmp_path, "01_late", late, "raise ValueError('off')")
    made = execute(*choose([], tmp_path), {}, tmp_path)
    assert made.status == "failed" and "cell 2 (Part one): ValueError: off" in made.error
    assert [o.text for c in made.notebook.cells if c.cell_type == "code" for o in c.outputs if "text" in o] == ["late\n"]


def test_timeout_dead_kernel_and_stop_keep_what_ran(tmp_path: Path) -> None:
    write(tmp_path, "01_long", "print('begun')", "import time\ntime.sleep(300)")
    write(tmp_path, "02_dies", "print('begun')", "import os\nos._exit(9)")
    long, dies = choose([], tmp_path)
    begun = time.monotonic()
    late = execute(long, {}, tmp_path, timeout_s=12)
    assert late.status == "timeout" and "cell 2 (Part one)" in late.error and "--timeout" in late.error
    assert late.notebook.cells[1].outputs[0].text == "begun\n" and late.path.exists()
    dead = execute(dies, {}, tmp_path, timeout_s=120)
    assert dead.status == "dead" and "the kernel died in cell 2" in dead.error
    asked = threading.Event()
    threading.Timer(3.0, asked.set).start()
    stopped = execute(long, {}, tmp_path, stop=asked.is_set)
    assert stopped.status == "interrupted" and time.monotonic() - begun < 120
    assert not list(tmp_path.glob(".*.log")) and not list(tmp_path.glob(".*.input.ipynb"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_exits_130_and_leaves_no_kernel(tmp_path: Path, number: int) -> None:
    write(
        tmp_path / "nb",
        "01_long",
        "import os\nopen(os.environ['MARK'], 'w').write(str(os.getpid()))",
        "import time\ntime.sleep(300)",
    )
    mark, out = tmp_path / "mark", tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "masw.cli", "report", "--notebooks", tmp_path / "nb", "--out", out],
        env={**os.environ, "MARK": str(mark)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 90
    while not (mark.exists() and mark.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err.splitlines()[-1], err
    assert {p.name for p in out.iterdir()} == {"incomplete"} and (out / "incomplete" / "01_long.ipynb").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
        time.sleep(2)  # a killed process may take a moment to be reaped
        os.kill(int(mark.read_text()), 0)


# ---- two reports


def edited(report: Path, tmp_path: Path, change: Callable[[dict], None]) -> Path:
    record = json.loads((report / "report.json").read_text())
    change(record["notebooks"][0])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    return other


def test_diff_tells_values_from_timings(masw, report: Path, tmp_path: Path) -> None:
    def slower(entry: dict) -> None:
        entry["headlines"][1]["value"] *= 2

    code, out, _ = masw("diff", report, edited(report, tmp_path, slower))
    assert code == 0 and "(2.00x)" in out and "deterministic values: all equal" in out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e["headlines"][0].update(value=0.26), "kept: 0.25 -> 0.26 share"),
        (lambda e: e["headlines"].pop(0), "kept: 0.25 -> absent"),
        (lambda e: e["headlines"][0].update(unit="%"), "kept"),
        (lambda e: e.update(status="failed"), "status: ok -> failed"),
        (lambda e: e.update(name="03_new"), "03_new  notebook: absent"),
    ],
)
def test_diff_exits_1_when_what_must_repeat_does_not(masw, report: Path, tmp_path: Path, change, says: str) -> None:
    code, out, _ = masw("diff", report, edited(report, tmp_path, change))
    assert code == 1 and says in out and "all equal" not in out


def test_diff_has_a_tolerance_and_json_and_refuses_other_files(masw, report: Path, tmp_path: Path) -> None:
    other = edited(report, tmp_path, lambda e: e["headlines"][0].update(value=0.25000001))
    assert masw("diff", report, other)[0] == 1
    assert masw("diff", report, other, "--tolerance", "1e-6")[0] == 0
    code, out, _ = masw("diff", report, other, "--json")
    assert code == 1 and json.loads(out)["differ"] is True
    (tmp_path / "no.json").write_text("[]")
    for bad, says in (("missing", "cannot read"), ("no.json", "not a report's side-car")):
        code, _, err = masw("diff", report, tmp_path / bad)
        assert code == 2 and says in err


def test_list_tells_parameters(masw, library: Path) -> None:
    code, out, _ = masw("list", "--notebooks", library)
    assert code == 0 and "window: int = 64  W [1..8192]" in out and "01_slots  How a slot is born" in out
    code, out, _ = masw("list", "--notebooks", library, "--json")
    assert json.loads(out)["01_slots"]["parameters"]["window"]["default"] == 64
