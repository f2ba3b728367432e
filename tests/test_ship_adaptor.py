"""Shipping an adaptor: measured, small, better than the one there, and loadable as before."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from masw.adaptor import Adaptor, AdaptorInfo, read_info
from masw.judged import file_digest
from masw.zoo import load_pair


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ship_adaptor", Path(__file__).parent.parent / "scripts" / "ship_adaptor.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(path: Path, speed: float, adaptor: Path, context: int = 512, full: float = 5.0) -> Path:
    rows = [
        {
            "set": name,
            "context": context,
            "method": method,
            "n": 2,
            "tokens_per_iteration": {"5": s, "8": 9},
            "recovered_gap": gap,
        }
        for name in ("govreport", "qmsum")
        for method, s, gap in (("full", full, None), ("window", 3.0, None), ("masw", speed, (speed - 3) / 2))
    ]
    used = {"file": adaptor.name, "sha256": file_digest(adaptor)}
    path.write_text("a line before\n" + json.dumps({"rows": rows, "provenance": {"adaptors": {"4": used}}}) + "\n")
    return path


@pytest.mark.parametrize("mirror", ["kv", "qkv"])
def test_an_adaptor_is_shipped_with_its_measure(script: ModuleType, tmp_path: Path, mirror: str) -> None:
    decoder = load_pair("tiny-2", torch.device("cpu"), torch.float32).draft.decoder
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny-2", (4, 8), mirror=mirror))
    with torch.no_grad():
        for parameter in adaptor.parameters():
            parameter.mul_(1.25)
    source, out = tmp_path / "a.safetensors", tmp_path / "shipped" / "tiny-2.safetensors"
    adaptor.save(source, tokens=7)

    def ship(*options: str, speed: float = 4.0, of: Path = source, **kwargs: Any) -> int:
        report = measure(tmp_path / "m.json", speed, of, **kwargs)
        return int(script.main([str(source), "--measure", str(report), "--out", str(out), *options]))

    assert ship() == 0
    info, _ = read_info(out)
    assert info.provenance["tokens"] == 7 and len(info.provenance["source"]) == 64
    assert info.provenance["shipped"]["512"] == {
        "tokens_per_iteration": {"full": 5.0, "masw": 4.0, "window": 3.0},
        "recovered_gap": 0.5,
        "cases": 2,
    }
    again = Adaptor.load(out, decoder, base="tiny-2", stride=8)
    for (name, a), b in zip(adaptor.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 if name == "q" else 1e-6)
    before = out.read_bytes()
    assert ship(speed=4.01) == 2  # not better by more than noise
    assert ship(context=1024) == 2  # not comparable
    assert ship(speed=4.5, full=5.5) == 2  # on other answers
    against = measure(tmp_path / "old.json", 4.45, out, full=5.5)
    assert ship("--against", str(against), speed=4.46, full=5.5) == 2
    against = measure(tmp_path / "old.json", 4.45, source, full=5.5)  # not of the file there
    assert ship("--against", str(against), speed=4.6, full=5.5) == 2
    other = tmp_path / "other" / source.name  # the measure of another file, called the same
    adaptor.save(other, tokens=8)
    assert ship(of=other, speed=5.0) == 2
    assert out.read_bytes() == before and len(list(out.parent.iterdir())) == 1
    assert ship(speed=4.1) == 0 and ship("--force", speed=2.0) == 0
    against = measure(tmp_path / "old.json", 4.0, out, full=5.5)
    assert ship("--against", str(against), speed=4.1, full=5.5) == 0


def test_bad_input_is_one_line(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.safetensors"
    assert script.main([str(path), "--measure", "m.json"]) == 2
    assert "no adaptor at" in capsys.readouterr().err
    decoder = load_pair("tiny-2", torch.device("cpu"), torch.float32).draft.decoder
    Adaptor.copied(decoder, AdaptorInfo("tiny-2", (4,))).save(path)
    for content in ("", "{", "[]", '{"rows": []}'):
        (tmp_path / "m.json").write_text(content)
        assert script.main([str(path), "--measure", str(tmp_path / "m.json")]) == 2
        assert "is not what `masw eval-adaptor --json` prints" in capsys.readouterr().err
    rows = [{"method": "masw", "context": 512}]
    report = {"rows": rows, "provenance": {"adaptors": {"4": {"file": path.name}}}, "partial": True}
    (tmp_path / "m.json").write_text(json.dumps(report))
    assert script.main([str(path), "--measure", str(tmp_path / "m.json")]) == 2
    assert "is a partial measure" in capsys.readouterr().err
