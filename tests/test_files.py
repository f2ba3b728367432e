"""Atomic writing: the old file or the whole new one, and nothing that is not a plain file is ever replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from masw.errors import UsageError
from masw.files import check_writable, replacing


def put(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def test_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    put(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), replacing(path) as partial:
        partial.write_text("half", encoding="utf-8")
        raise ZeroDivisionError
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_neighbour_called_partial_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "a.json.partial"
    other.write_text("mine", encoding="utf-8")
    put(tmp_path / "a.json", "new")
    assert other.read_text() == "mine"


def test_links_stay_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old", encoding="utf-8")
    link.symlink_to(real)
    put(link, "new")
    assert link.is_symlink() and real.read_text() == "new"


def test_pipes_and_folders_are_refused_and_survive(tmp_path: Path) -> None:
    """The input of a bug: a trace to a device node replaced the node. A pipe is the same kind of thing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    through = tmp_path / "link"
    through.symlink_to(pipe)
    for path in (pipe, through, tmp_path):
        with pytest.raises(UsageError):
            put(path, "new")
        with pytest.raises(UsageError):
            check_writable(path)
    assert pipe.is_fifo() and through.is_symlink()


def test_check_before_a_run(tmp_path: Path) -> None:
    document = tmp_path / "report.txt"
    document.write_text("text", encoding="utf-8")
    with pytest.raises(UsageError, match="input itself"):
        check_writable(document, not_over=str(document))
    with pytest.raises(UsageError, match="not a folder"):
        check_writable(document / "t.jsonl")
    with pytest.raises(UsageError, match="empty path"):
        check_writable(Path(""))
    check_writable(tmp_path / "new" / "t.jsonl", not_over="-")
    assert document.read_text() == "text"
