"""What this machine is and how fast it reads and multiplies. Probes only: nothing here decides or prints."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def cpu_name() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache
def cpu_features() -> dict[str, bool]:
    """Instruction sets that decide how fast a matrix product is."""
    flags = {flag for line in _lines(Path("/proc/cpuinfo")) if line.startswith(("flags", "Features")) for flag in line.split()}
    if not flags:  # not Linux: torch asks the processor itself, where it can
        probe = getattr(torch.cpu, "get_capabilities", dict)
        flags = {name for name, found in probe().items() if found is True}
    return {
        "avx2": "avx2" in flags,
        "avx512": bool(flags & {"avx512f", "avx512_f"}),
        "avx512_bf16": "avx512_bf16" in flags,
        "amx_bf16": "amx_bf16" in flags,
        "arm_bf16": bool(flags & {"bf16", "arm_bf16"}),
    }


def native_bf16() -> bool:
    """Whether the processor multiplies bf16 itself; without it fp32 is faster and bf16 only saves memory."""
    found = cpu_features()
    return found["avx512_bf16"] or found["amx_bf16"] or found["arm_bf16"]


def total_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    limit = _cgroup("memory.max")
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Memory that this process may still take without swapping, within its container's limit."""
    free = int(psutil.virtual_memory().available)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def peak_rss_bytes() -> int:
    """High-water mark of this process's resident memory, since its start or since `reset_peak_rss`. Mapped files count."""
    for line in _lines(_STATUS):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB everywhere but on macOS


def reset_peak_rss() -> bool:
    """Lowers the high-water mark to what is resident now; False where the system cannot."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def measure_gemm(device: torch.device, dtype: torch.dtype, size: int = 1536, repeats: int = 5) -> float:
    """FLOP/s of a [size, size] x [size, size] product: the best of `repeats`."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: torch.mm(a, b), device, repeats)


def measure_bandwidth(device: torch.device, dtype: torch.dtype = torch.bfloat16, repeats: int = 5) -> float:
    """Bytes/s at which one-row linears read their weights, as a decode step does: the best pass of `repeats` over matrices that
    together exceed every cache, each read once a pass."""
    rows, columns = 4096, 2048
    matrix = rows * columns * dtype.itemsize
    budget = max(256 * 2**20, 4 * _last_cache_bytes())
    count = max(2, min(budget, available_bytes() // 4) // matrix)
    weights = [torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(count)]
    x = torch.randn(1, columns, device=device, dtype=dtype)

    def one_pass() -> None:
        for w in weights:
            F.linear(x, w)

    return count * matrix / _fastest(one_pass, device, repeats)


def report(measure: bool = True) -> dict[str, Any]:
    """Everything above for one machine; the keys carry the units. `measure` adds the rates (a few seconds)."""
    found: dict[str, Any] = {
        "masw": _version("masw"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(total_bytes() / 2**30, 1),
        "memory_available_gib": round(available_bytes() / 2**30, 1),
        **cpu_features(),
        "native_bf16": native_bf16(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = properties.name
        found[f"cuda:{index}_memory_gib"] = round(properties.total_memory / 2**30, 1)
        devices.append(torch.device("cuda", index))
    if measure:
        for device in devices:
            found[f"{device}_gemm_bf16_tflops"] = round(measure_gemm(device, torch.bfloat16) / 1e12, 3)
            found[f"{device}_gemm_fp32_tflops"] = round(measure_gemm(device, torch.float32) / 1e12, 3)
            found[f"{device}_weight_read_gb_per_s"] = round(measure_bandwidth(device) / 1e9, 1)
    return found


def _fastest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the quickest call: others on the machine can only slow a call down. One call warms up."""
    sync: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    best = float("inf")
    for attempt in range(repeats + 1):
        sync()
        start = time.perf_counter()
        work()
        sync()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def _last_cache_bytes() -> int:
    """Size of the last-level cache, 32 MiB where it is not told."""
    sizes = [line for index in range(5) for line in _lines(Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size"))]
    return max((int(size[:-1]) * 1024 for size in sizes if size.endswith("K")), default=32 * 2**20)


def _cgroup(name: str) -> int | None:
    """A memory figure of the container in bytes, None outside one or without a limit."""
    text = "".join(_lines(Path("/sys/fs/cgroup") / name)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
