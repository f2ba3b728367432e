"""Notebooks 1, 3 and 4 computed now with the small real pair, through the command, and what the side-car then says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from masw import cli
from masw.documents import read_file
from masw.lessons import sample_path


def headlines(folder: Path, name: str) -> dict[str, Any]:
    (notebook,) = [n for n in json.loads((folder / "report.json").read_text())["notebooks"] if n["name"] == name]
    assert notebook["status"] == "ok" and notebook["parameters"]["mode"] == "live" and notebook["parameters"]["pair"] == "smollm2"
    return {h["name"]: h["value"] for h in notebook["headlines"]}


def test_notebooks_live_on_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def report(*args: object) -> None:
        monkeypatch.setattr(sys, "argv", ["masw", "report", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code

    document = tmp_path / "part.md"
    document.write_text(read_file(sample_path()).text[:2500], encoding="utf-8")
    report("01", "--pair", "smollm2", "--out", tmp_path / "one", "--format", "json")
    one = headlines(tmp_path / "one", "01_slots")
    assert one["entries at token 1,000"] == 385 and 0 < one["attention paid to the slot by later tokens"] < 1
    assert one["distance of the keys from the copy"] > 0  # the slots that ship are trained
    short = ("--set", f"document={document}", "--set", "tokens=16")
    report("03", "04", "--pair", "smollm2", *short, "--out", tmp_path / "two", "--format", "json")
    three, four = headlines(tmp_path / "two", "03_acceptance"), headlines(tmp_path / "two", "04_rollback_and_losslessness")
    assert three["methods with the output of none"] == 6 and three["kept at position 1, full"] == 1.0
    assert 1 < three["tokens per iteration, masw"] < 16 / 3  # some drafts are kept, and not all, as those of the full cache are
    assert four["memory identical after rollback"] is True and four["methods identical to greedy decoding"] == 4
    assert four["total variation, accept rule"] < 1e-12 < four["total variation, broken rule"]
