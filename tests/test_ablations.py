"""The ablations script on the tiny pair: every recipe once, nothing twice, and a table that says what was measured."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from masw import ablations, tables
from masw.errors import UsageError
from masw.stages import Stage

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
        fixed = ["--tiny", "--tokens", "700", "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "table.jsonl")]
        return int(script.main([*fixed, "--device", "cpu", "--dtype", "fp32", *options]))

    return run


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return ablations.read(tmp_path / "table.jsonl")


def test_every_recipe_trains_and_is_measured(
    call: Any, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--only", "all") == 0
    lines = results(tmp_path)
    assert [line["recipe"] for line in lines] == list(script.RECIPES)
    for line in lines:
        assert [tokens for tokens, _ in line["curve"]] == [256, 512, 768, 1024]
        assert {"full", "window", "masw"} <= {row["method"] for row in line["rows"]}
        assert {row["set"] for row in line["held_out"]} == {
            f"{kind}-{n}" for kind in ("reconstruction", "text", "answers") for n in (48, 96)
        }
        assert line["provenance"]["torch"]
    rows = ablations.rows(lines)
    assert len({tuple(row) for row in rows}) == 1  # every row has every column
    assert list(dict.fromkeys(row["recipe"] for row in rows)) == ["full", "window", "masw-untrained", *script.RECIPES]
    assert [(row["W"], row["r"]) for row in rows if row["recipe"] == "base"] == [(8, 8), (16, 8), (32, 8)]
    assert all(isinstance(row["agreement at 96"], float) for row in rows if row["recipe"] != "full")
    held = [r for r in lines[0]["held_out"] if r["set"].endswith("-96") and (r["method"], r["window"]) == ("masw", 16)]
    assert len({r["n"] for r in held}) > 1  # kinds have unlike numbers of tokens, each of which counts once
    wanted = sum(r["n"] * r["agreement"] for r in held) / sum(r["n"] for r in held)
    shown_row = next(row for row in rows if (row["recipe"], row["W"]) == ("base", 16))
    assert shown_row["agreement at 96"] == round(wanted, 3)
    curves = ablations.curves(lines)
    assert curves["base"][0]["nll"] != curves["random"][0]["nll"] and len(curves["base"]) == 4
    shown = capsys.readouterr()
    assert shown.out == ablations.markdown(rows)
    assert "predicted at 250 trained tokens/s" in shown.err and "min left of all" in shown.err


def test_what_all_share_is_measured_once(call: Any, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = script.evaluate.predictions
    monkeypatch.setattr(script.evaluate, "predictions", lambda d, v, *rest: read.append(v.method) or real(d, v, *rest))
    assert call("--only", "random,qkv") == 0
    assert read == ["full", "window", "masw", "masw"]
    one, other = ([row for row in line["rows"] if row["method"] != "masw"] for line in results(tmp_path))
    assert one == other


def test_what_is_done_is_not_done_again(call: Any, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("--only", "random") == 0
    first = results(tmp_path)
    made: list[str] = []
    real = script.Lab.result
    monkeypatch.setattr(script.Lab, "result", lambda lab, name, clock: made.append(name) or real(lab, name, clock))
    assert call("--only", "random,base") == 0
    assert made == ["base"] and [line["recipe"] for line in results(tmp_path)] == ["base", "random"]
    assert results(tmp_path)[1] == first[0]
    assert call("--only", "random", "--seed", "2") == 2  # the folder holds another run: nothing is overwritten
    assert results(tmp_path)[1] == first[0]


def test_an_interrupted_recipe_goes_on(call: Any, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        if "base: 512 of" in text:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(script, "say", interrupt)
    assert call("--only", "base") == 130
    assert not (tmp_path / "table.jsonl").exists()
    assert call("--only", "base") == 0
    log = (tmp_path / "runs" / "base" / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines() if '"kind": "start"' in line] == [0, 2]
    assert len(results(tmp_path)) == 1


def test_recipes_have_equal_tokens_and_steps(script: ModuleType) -> None:
    options = script.parse([])
    setting = script.setting_of(options)
    assert script.setting_of(script.parse(["--tokens", "30000"])).tokens == setting.tokens == 32_768
    for name, recipe in script.RECIPES.items():
        stages = [Stage.parse(text) for text in recipe.stages(setting.tokens)]
        assert sum(stage.tokens for stage in stages) == setting.tokens, name
        assert {stage.length * stage.rows for stage in stages} == {2048}, name
        assert sum(stage.steps for stage in stages) == setting.tokens / 2048
    assert not script.RECIPES["base"].fields


def test_the_default_list_answers_each_question_within_its_time(script: ModuleType) -> None:
    kinds = {
        "copied or random": {"base", "random"},
        "short or long": {"short", "long"},
        "PT and SFT": {"pt-sft", "sft", "pt"},
        "mirror": {"base", "qkv"},
        "slot input": {"base", "token", "last"},
        "reconstruction": {"base", "no-reconstruction"},
        "r": {"r4", "base", "r16"},
    }
    assert set().union(*kinds.values()) == set(script.DEFAULT)
    setting = script.setting_of(script.parse([]))
    assert setting.measured("base") == (128, 64, 256)
    shared = setting.shared_seconds(script.DEFAULT, 3, 250.0)
    assert shared + sum(setting.seconds(name, 3, 250.0) for name in script.DEFAULT) < 45 * 60


def test_the_plan_alone(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--plan") == 0
    assert not (tmp_path / "table.jsonl").exists() and not (tmp_path / "runs").exists()
    err = capsys.readouterr().err
    assert "no-reconstruction" in err and "13 recipes of 1,024 tokens" in err


def test_notebooks_read_the_table(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "results_folder", lambda: tmp_path / "results")
    assert tables.ablations("tiny") == ([], {})
    assert call("--only", "random", "--results", str(tmp_path / "results" / "ablations_tiny.jsonl")) == 0
    rows, curves = tables.ablations("tiny")
    assert [row["recipe"] for row in rows] == ["full", "window", "random"] and list(curves) == ["random"]


def test_bad_options(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, phrase in (
        (("--only", "rndom"), "there is no recipe 'rndom'"),
        (("--docs", "0"), "must be above 0"),
        (("--device", "tpu"), "unknown"),
    ):
        assert call(*options) == 2
        assert phrase in capsys.readouterr().err
    for content in ("{", "", '{"type": "header", "schema": 99}\n', '{"type": "line"}\n', "[]\n"):
        (tmp_path / "table.jsonl").write_text(content)
        assert call() == 2 and "is not a table of ablations" in capsys.readouterr().err
        with pytest.raises(UsageError):
            ablations.read(tmp_path / "table.jsonl")
