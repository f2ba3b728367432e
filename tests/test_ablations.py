"""The ablations script on the tiny pair: every recipe once, nothing twice, and a table that says what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from masw.curriculum import Stage

SCRIPT = Path(__file__).parent.parent / "scripts" / "ablations.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablations", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablations"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))

    def run(*options: str) -> int:
        fixed = ["--tiny", "--tokens", "700", "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "docs")]
        return int(script.main([*fixed, "--device", "cpu", "--dtype", "fp32", *options]))

    return run


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "docs" / "ablations.jsonl").read_text().splitlines()]


def test_every_recipe_trains_and_is_measured(call: Any, script: ModuleType, tmp_path: Path) -> None:
    assert call() == 0
    lines = results(tmp_path)
    assert [line["recipe"] for line in lines] == list(script.RECIPES)
    for line in lines:
        assert line["curve"] and line["held_out"][0]["tokens"] == 0 and len(line["held_out"]) >= 2
        assert {"full", "window", "masw"} <= {row["method"] for row in line["rows"]}
        assert line["provenance"]["torch"]
    table = (tmp_path / "docs" / "ABLATIONS.md").read_text()
    assert all(f"| {name} | " in table for name in ["full", "window", *script.RECIPES])
    assert len({row.count("|") for row in table.splitlines() if row.startswith("|")}) == 1


def test_what_is_done_is_not_done_again(call: Any, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("--only", "random") == 0
    first = results(tmp_path)
    made: list[str] = []
    real = script.Lab.result
    monkeypatch.setattr(script.Lab, "result", lambda lab, name: made.append(name) or real(lab, name))
    assert call("--only", "random,base") == 0
    assert made == ["base"] and [line["recipe"] for line in results(tmp_path)] == ["base", "random"]
    assert results(tmp_path)[1] == first[0]
    assert call("--only", "random", "--seed", "2") == 2  # the folder holds another run: nothing is overwritten
    assert results(tmp_path)[1] == first[0]


def test_an_interrupted_recipe_goes_on(call: Any, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    def interrupt(line: dict[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(script, "progress", interrupt)
    assert call("--only", "base") == 130
    assert not (tmp_path / "docs" / "ablations.jsonl").exists()
    assert call("--only", "base") == 0
    log = (tmp_path / "runs" / "base" / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines() if '"kind": "start"' in line] == [0, 2]
    assert len(results(tmp_path)) == 1


def test_recipes_have_equal_tokens(script: ModuleType) -> None:
    for name, recipe in script.RECIPES.items():
        stages = [Stage.parse(text) for text in recipe.stages(300_000)]
        assert sum(stage.tokens for stage in stages) == 300_000, name
        assert max(stage.length * stage.rows for stage in stages) <= 4096
    assert not script.RECIPES["base"].fields


def test_bad_options(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, phrase in (
        (("--only", "rndom"), "there is no recipe 'rndom'"),
        (("--docs", "0"), "must be at least 1"),
        (("--device", "tpu"), "unknown"),
    ):
        assert call(*options) == 2
        assert phrase in capsys.readouterr().err
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "docs" / "ablations.jsonl").write_text("{")
    assert call() == 2 and "is not a results file" in capsys.readouterr().err
    assert call("--list") == 0 and "no-reconstruction" in capsys.readouterr().out
