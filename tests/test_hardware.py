"""Probes: plausible, cheap, and never an exception."""

from __future__ import annotations

import json

import pytest
import torch

from masw import hardware

CPU = torch.device("cpu")


def test_report_without_measures_is_json_and_names_the_machine() -> None:
    found = json.loads(json.dumps(hardware.report(measure=False)))
    assert found["torch"] == torch.__version__
    assert found["cores"] >= 1
    assert 0 < found["memory_available_gib"] <= found["memory_gib"]
    assert isinstance(found["native_bf16"], bool)
    assert not [key for key in found if key.endswith(("_tflops", "_per_s"))]


def test_report_measures_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "measure_gemm", lambda device, dtype: 2e12)
    monkeypatch.setattr(hardware, "measure_bandwidth", lambda device: 20e9)
    found = hardware.report()
    assert found["cpu_gemm_bf16_tflops"] == 2.0
    assert found["cpu_weight_read_gb_per_s"] == 20.0


def test_rates_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < hardware.measure_gemm(CPU, torch.float32, size=128, repeats=2) < 1e15
    monkeypatch.setattr(hardware, "_last_cache_bytes", lambda: 0)
    monkeypatch.setattr(hardware, "available_bytes", lambda: 256 * 2**20)
    assert 1e7 < hardware.measure_bandwidth(CPU, repeats=1) < 1e13


def test_peak_memory_rises_with_use_and_can_be_reset() -> None:
    before = hardware.peak_rss_bytes()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert hardware.peak_rss_bytes() >= held.nbytes
    assert hardware.peak_rss_bytes() >= before
    peak = hardware.peak_rss_bytes()
    del held
    if hardware.reset_peak_rss():
        assert hardware.peak_rss_bytes() <= peak


def test_container_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cgroup", {"memory.max": 1000, "memory.current": 400}.__getitem__)
    assert hardware.total_bytes() == 1000
    assert hardware.available_bytes() == 600
    monkeypatch.setattr(hardware, "_cgroup", lambda name: None)
    assert hardware.available_bytes() > 1000


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("flags : fpu avx2 avx512f avx512_bf16", True),
        ("flags : fpu avx2 amx_bf16 amx_tile", True),
        ("Features : fp asimd bf16", True),
        ("flags : fpu avx2 avx512f", False),
    ],
)
def test_bf16_is_native_only_where_the_processor_multiplies_it(monkeypatch: pytest.MonkeyPatch, flags: str, native: bool) -> None:
    monkeypatch.setattr(hardware, "_lines", lambda path: [flags])
    hardware.cpu_features.cache_clear()
    try:
        assert hardware.native_bf16() is native
        assert hardware.cpu_features()["avx2"] is ("avx2" in flags)
    finally:
        hardware.cpu_features.cache_clear()
