"""`--device` and `--dtype` -> torch objects; peak memory of this process there."""

from __future__ import annotations

import torch

from masw import hardware
from masw.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def resolve_device(name: str) -> torch.device:
    """auto: the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" and device.index is None:
        return device
    if device.type != "cuda":
        raise UsageError(f"device '{name}' is unknown; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise UsageError(f"device '{name}' was asked for and torch {torch.__version__} sees no CUDA here; use --device cpu")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise UsageError(f"device '{name}' does not exist: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bf16 where the device multiplies it natively, else fp32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or hardware.native_bf16() else torch.float32
    if name not in DTYPES:
        raise UsageError(f"dtype '{name}' is unknown; use auto, {' or '.join(DTYPES)}")
    return DTYPES[name]


def peak_bytes(device: torch.device) -> int:
    """High-water mark of memory: of the GPU on CUDA, of the whole process on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else hardware.peak_rss_bytes()


def reset_peak(device: torch.device) -> None:
    """Lowers the mark to what is held now, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        hardware.reset_peak_rss()
