"""What a training starts from: an adaptor of an earlier run, a copy of the backbone, or random weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from masw.adaptor import Adaptor
from masw.decoder import Decoder
from masw.errors import UsageError


@dataclass(frozen=True)
class Start:
    """An adaptor that a run goes on from instead of a copy of the backbone."""

    adaptor: Adaptor
    about: dict[str, Any]  # file, sha256, and the tokens, step and recipe that it says it was trained with


def start_from(path: Path, decoder: Decoder, base: str) -> Start:
    """Reads the adaptor file `path` for `decoder`. Raises UsageError when it is none, or one for another model."""
    adaptor = Adaptor.load(path, decoder, base=base, dtype=torch.promote_types(decoder.dtype, torch.float32))
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    known = adaptor.info.provenance
    kept: dict[str, Any] = {key: known[key] for key in ("tokens", "step", "data", "recipe", "init") if key in known}
    return Start(adaptor, {"file": path.name, "sha256": digest, **kept})


@torch.no_grad()
def take(adaptor: Adaptor, start: Adaptor) -> None:
    """Copies the weights of `start`; a query side that only `adaptor` has stays the backbone's."""
    mine, theirs = dict(adaptor.named_parameters()), dict(start.named_parameters())
    wanted, found = adaptor.info, start.info
    if wanted.slot_input != found.slot_input or (wanted.slot_input == "token" and wanted.slot_token != found.slot_token):
        raise UsageError(
            f"the adaptor to start from has the slot input {found.slot_input} ({found.slot_token}), "
            f"not {wanted.slot_input} ({wanted.slot_token}); ask for the same"
        )
    if not theirs.keys() <= mine.keys():
        raise UsageError(
            f"the adaptor to start from mirrors {found.mirror}, not {wanted.mirror} alone; use --mirror {found.mirror}"
        )
    for name, parameter in theirs.items():
        mine[name].copy_(parameter)


@torch.no_grad()
def randomise(adaptor: Adaptor) -> None:
    """Mirrored weights at the scale of the copied ones, without their content."""
    for parameter in adaptor.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.std())
