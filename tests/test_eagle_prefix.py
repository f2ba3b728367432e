"""The measure of acceptance against prefix length, on the seeded random pair."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from masw.eagle import EagleHead, EagleInfo
from masw.zoo import load_pair
from tests.helpers import CPU
from tests.test_data import WORDS, write


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parent.parent / "scripts" / "eagle_prefix.py"
    spec = importlib.util.spec_from_file_location("eagle_prefix", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = load_pair("tiny", CPU, torch.float32).target
    path = tmp_path_factory.mktemp("eagle") / "head.safetensors"
    EagleHead.copied(target.decoder, EagleInfo(target.name)).save(path, tokens=77)
    return path


def test_a_line_a_run_behind_a_header_that_says_all(script: ModuleType, head: Path, tmp_path: Path, capsys) -> None:
    rows = [{"id": name, "text": name + WORDS * n} for name, n in (("short", 1), ("long", 30), ("longer", 40))]
    data, out = write(tmp_path / "set.jsonl", rows), tmp_path / "deep" / "prefix.jsonl"
    fixed = ("--pair", "tiny", "--dtype", "fp32", "--docs", "2", "--new-tokens", "12", "--contexts", "512,1k", "--window", "64")
    assert script.main(["--data", data, "--eagle", str(head), "--methods", "eagle,window", "--out", str(out), *fixed]) == 0
    header, *runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert header["documents"] == ["long", "longer"] and header["eagle"]["tokens"] == 77 and header["provenance"]["torch"]
    assert [(r["context"], r["id"], r["method"]) for r in runs] == [
        (context, name, method) for context in (512, 1024) for name in ("long", "longer") for method in ("eagle", "window")
    ]
    assert all(r["prompt_tokens"] <= r["context"] < r["prompt_tokens"] + 8 and r["tokens"] == 12 for r in runs)
    assert len(capsys.readouterr().out.splitlines()) == 5  # heads, two methods at two lengths


def test_what_cannot_be_measured_is_said_first(script: ModuleType, tmp_path: Path, capsys) -> None:
    data = write(tmp_path / "set.jsonl", [{"id": "a", "text": WORDS}])
    for options, words in (
        (["--pair", "tiny"], "no eagle head for the target 'tiny-4'"),
        (["--pair", "tiny", "--methods", "none"], "no document fills 4,096 tokens"),
        (["--methods", "nonsense"], "method 'nonsense' is unknown"),
        (["--docs", "0"], "--docs must be at least 1"),
    ):
        assert script.main(["--data", data, "--out", str(tmp_path / "out.jsonl"), *options]) == 2
        said = capsys.readouterr().err.strip()
        assert words in said.splitlines()[-1], said
    assert not (tmp_path / "out.jsonl").exists()
