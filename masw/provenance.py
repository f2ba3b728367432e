"""Where a number comes from: versions, device, source commit, seed. Goes into every trace and table."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import masw

if TYPE_CHECKING:
    import torch


def provenance(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Of a run on `device` in `dtype`."""
    import torch

    return {
        **versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def versions() -> dict[str, Any]:
    """What holds without a model: no torch is imported for it."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "masw": masw.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "device": _processor(),
    }


@lru_cache
def commit() -> str | None:
    """Commit of the checkout that the package runs from, "+" when files differ from it; None outside a checkout."""
    root = Path(masw.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for args in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
