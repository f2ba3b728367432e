"""`make bench-core` on the tiny pair: every part runs, each row has its floor, and a word that is no part is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from masw import hardware

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_core.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_core", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_core"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "measure_bandwidth", lambda *_: 1e10)
    monkeypatch.setattr(hardware, "measure_gemm", lambda *_: 1e11)


def test_parts_that_are_about_one_pair(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["decode", "verify", "int4", "overhead", "bytes", "peak"]
    script.main(["--only", ",".join(parts), "--pair", "tiny", "--quick", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    assert [row["what"] for row in rows[:5]] == [
        "tiny-2: decode step at 4K / floor", "tiny-4: decode step at 4K / floor", "tiny-4: verify 6 tokens / decode step",
        "tiny-4: verify 8 tokens / decode step", "tiny-2: int4 draft step at 2K / bf16",
    ]  # fmt: skip
    assert [row["goal"] for row in rows[:5]] == ["<= 1.8", "<= 1.8", "<= 1.5", "<= 1.5", "<= 0.5"]
    for row in rows[:5]:
        assert row["ours"] > 0 and row["floor"] > 0 and row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
    for row in rows[:2]:
        assert row["other"] == row["floor"]
    assert rows[-1]["part"] == "peak" and rows[-1]["ours"] > 0 and rows[-1]["floor"] > 0  # floor: predicted


def test_an_unknown_part_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        script.main(["--only", "decode,verfy"])
    assert leaving.value.code == 2
    assert "part 'verfy' is unknown" in capsys.readouterr().err.splitlines()[-1]
