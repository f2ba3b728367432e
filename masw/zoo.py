"""From the name of a pair to two models that are ready to run; the one door to model files for the rest of masw.

Code that a model brings along is never run, and weights are read from safetensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from masw import hub
from masw.catalogue import (
    DEFAULT_PAIR,
    PRESETS,
    SOURCES,
    PairSpec,
    Preset,
    Reference,
    Source,
    distinct,
    resolve_model,
    resolve_pair,
)
from masw.config import ModelConfig
from masw.convert import read_about
from masw.decoder import Decoder
from masw.errors import UsageError
from masw.packages import Notice, Progress, ProgressBar, print_notice
from masw.store import FileCheck, Status, cache_root, check_quickly, damaged, fetch, locate, obtain, path, status, verify
from masw.tokenizer import AnyTokenizer, ByteTokenizer, Tokenizer, difference
from masw.weights import load_weights, parameter_count, random_weights, read_config

__all__ = [
    "DEFAULT_PAIR",
    "PRESETS",
    "SOURCES",
    "FileCheck",
    "Model",
    "Pair",
    "PairSpec",
    "Preset",
    "Reference",
    "Source",
    "Status",
    "cache_root",
    "estimate_bytes",
    "fetch",
    "free_bytes",
    "load_pair",
    "locate",
    "path",
    "resolve_model",
    "resolve_pair",
    "status",
    "verify",
]

TINY_SEED = 20


@dataclass
class Model:
    """A model ready to run. `path` is None for random weights; `provenance` says where the weights come from, for records."""

    name: str
    decoder: Decoder
    tokenizer: AnyTokenizer
    config: ModelConfig
    eos_ids: tuple[int, ...]
    path: Path | None
    provenance: dict[str, Any]


@dataclass
class Pair:
    name: str
    draft: Model
    target: Model

    @property
    def self_pair(self) -> bool:
        """Draft and target are one model in one set of weights."""
        return self.draft.decoder is self.target.decoder


def estimate_bytes(spec: str, dtype: torch.dtype) -> int | None:
    """Memory for the weights of a pair in `dtype` (bytes; a shared model once); None for a hub model that is not here yet."""
    total = 0
    for model in distinct(resolve_pair(spec)):
        if model.source and model.source.random:
            continue
        folder = locate(model)
        parameters = parameter_count(folder) if folder else model.source.parameters if model.source else None
        if parameters is None:
            return None
        total += parameters * dtype.itemsize
    return total


def free_bytes(device: torch.device) -> int:
    """Memory that a model may still take on `device`, in bytes; on the CPU within the container's own limit."""
    if device.type == "cuda":  # torch keeps what was freed for its next allocations
        return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        return free


def _check_memory(spec: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Raises UsageError if the weights cannot fit; False when their size is not known yet."""
    needed = estimate_bytes(spec, dtype)
    if needed is None:
        return False
    free = free_bytes(device)
    if needed > free:
        half = ", --dtype bf16" if dtype.itemsize > 2 else ""
        raise UsageError(
            f"the weights of {spec} need about {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, {device} has "
            f"{free / 1e9:.1f} GB free; use a smaller pair (smollm2){half}, or close other programs"
        )
    return True


def load_pair(
    spec: str, device: torch.device, dtype: torch.dtype, progress: Progress | None = None, notice: Notice = print_notice
) -> Pair:
    """Fetches what is missing and loads draft and target onto `device` in `dtype`.

    A pair of one model shares its decoder. `progress` as in `fetch`. Raises UsageError for an unknown name, tokenizers that
    differ, or too little memory; MaswError if a model cannot be fetched or is damaged on disk.
    """
    names = resolve_pair(spec)
    for model in distinct(names):
        check_quickly(model)
    known = _check_memory(spec, device, dtype)
    with ProgressBar() as bar:
        show = progress or bar
        folders = {model: obtain(model, show, notice) for model in distinct(names)}
        if not known:
            _check_memory(spec, device, dtype)
        tokenizers = {model: Tokenizer(folder) if folder else ByteTokenizer() for model, folder in folders.items()}
        different = difference(tokenizers[names.draft], tokenizers[names.target]) if len(folders) == 2 else None
        if different:
            raise UsageError(
                f"{names.draft.name} and {names.target.name} have different tokenizers: {different}; use two models of one family"
            )
        loaded: dict[tuple[Path | None, str | None], Model] = {}
        for model, folder in folders.items():
            key = (folder, None if folder else model.name)
            if key not in loaded:
                loaded[key] = _load(model, folder, tokenizers[model], device, dtype, show)
        draft, target = (loaded[f, None if f else m.name] for m, f in ((m, folders[m]) for m in (names.draft, names.target)))
    return Pair(names.name, draft, target)


def _load(
    model: Reference, folder: Path | None, tokenizer: AnyTokenizer, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Model:
    if folder is None:
        assert model.source is not None and model.source.random is not None
        config = model.source.random
        weights = random_weights(config, TINY_SEED, device, dtype)
        provenance: dict[str, Any] = {"model": model.name, "source": "random", "seed": TINY_SEED}
    else:
        config = read_config(folder)
        if tokenizer.size > config.vocab:
            raise UsageError(
                f"{model.name}: {tokenizer.size:,} tokens in the tokenizer, {config.vocab:,} in the model; fetch it again"
            )
        try:
            weights = load_weights(folder, config, device, dtype, lambda what, n, of: progress(f"{what} {model.name}", n, of))
        except UsageError as error:
            if model.source is None or model.source.packaged is None:
                raise
            # masw wrote these files: whatever does not fit in them is damage, not a wrong choice of model.
            raise damaged(model, folder, str(error).partition(";")[0]) from None
        about = read_about(folder)
        provenance = {k: v for k, v in about.items() if k != "files"} if about else hub.provenance(folder)
    provenance = {"name": model.name, **provenance, "loaded_as": str(dtype).removeprefix("torch.")}
    return Model(model.name, Decoder(config, weights), tokenizer, config, tokenizer.eos_ids, folder, provenance)
