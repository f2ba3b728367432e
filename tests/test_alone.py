"""Two processes never write into the same run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from masw.alone import alone
from masw.cli import app
from masw.errors import UsageError

HOLD = """
import sys
from pathlib import Path
from masw.alone import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds tmp_path / "run"."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_until_the_first_one_ends(other: subprocess.Popen[str], tmp_path: Path) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(run)
    for name in (run, link, tmp_path / "x" / ".." / "run"):
        with pytest.raises(UsageError, match="another masw is writing to"), alone(name):
            raise AssertionError
    with alone(tmp_path / "else"):
        pass
    other.kill()  # the system drops its lock
    other.wait()
    with alone(run):
        pass
    with alone(run):  # and a command's own ends with it
        pass


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--pair", "tiny", "--text", "none.jsonl", "--stages", "64x1:64"],
        ["train-eagle", "--pair", "tiny", "--text", "none.jsonl"],
        ["bench", "--pair", "tiny", "--contexts", "64", "--data", "samples"],
        ["bench", "--steps-only", "--shape", "tiny", "--random-weights"],
        ["eval-adaptor", "--pair", "tiny", "--data", "guide.jsonl"],
    ],
)
def test_commands_that_go_on_refuse_a_result_that_another_writes(
    other: subprocess.Popen[str], tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guide.jsonl").write_text('{"id": "a", "text": "' + "word " * 300 + '", "question": "What?"}\n')
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, [*command, "--out", "run"])
    assert isinstance(found.exception, UsageError) and "another masw is writing to run" in str(found.exception)


def test_a_cache_that_cannot_be_written_is_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "file"))
    with alone(tmp_path / "run"):
        pass
