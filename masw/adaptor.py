"""The adaptor: mirrored K/V projections of the slot rows, the only trained weights (arXiv 2608.30252, section 3)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from masw.config import ModelConfig
from masw.decoder import Decoder
from masw.errors import UsageError
from masw.files import replacing
from masw.linear import dense
from masw.stages import Stage

FORMATS = (1, 2)
"""1: every tensor whole. 2: `q` as a low-rank difference from the backbone's own, q = backbone + q_up @ q_down."""

SLOT_INPUTS = ("mean", "last", "token", "learned")
"""Input of a slot: the mean of the r raw embeddings that it closes, the embedding of the last of them, a reserved token's, or a
vector of its own."""

LOW_RANK = frozenset({"q_up", "q_down"})

SHIPPED_BYTES = 16_000_000  # an adaptor that comes with masw is smaller than this


REACH = 4
"""Slots are read for so many of the longest rows that their adaptor was trained on. Qwen2.5-Coder-0.5B, rows of 2,048 tokens, W = 256, r = 8,
one report: at 32K tokens/iter of 1.03 with all 4,096 slots, 2.13 with the last 1,024, 1.88 with none; at 16K 2.00, 2.09, 2.18."""


@dataclass(frozen=True)
class AdaptorInfo:
    """What an adaptor file says about itself."""

    base: str  # name of the draft model that it was copied from
    strides: tuple[int, ...]  # r that it was trained for; empty: untrained, serves any
    slot_input: str = "mean"  # one of SLOT_INPUTS
    slot_token: int = 0  # the reserved token, for slot_input == "token"
    mirror: str = "kv"  # kv, or qkv: slot rows have their own query projection too
    bias: bool = False  # slot rows have K/V biases though the backbone has none (masw.quiet)
    provenance: dict[str, Any] = field(default_factory=dict)  # commit, data hash, tokens seen, recipe, measure

    @property
    def tokens_seen(self) -> int:
        """Tokens of its own training and of those that it started from."""
        return sum(tokens for about in self._runs() if isinstance(tokens := about.get("tokens"), int))

    @cached_property  # asked for in every pass
    def longest_row(self) -> int | None:
        """Tokens of the longest row of its own training and of those that it started from, in the stages that each had begun; None where
        its file does not say."""
        found = [0]
        for about in self._runs():
            recipe, seen, begun = about.get("recipe"), about.get("tokens"), 0
            stages = recipe.get("stages") if isinstance(recipe, dict) else None
            for text in stages if isinstance(stages, list | tuple) else ():
                try:
                    stage = Stage.parse(str(text))
                except UsageError:  # of another version, or made up
                    continue
                if not isinstance(seen, int) or begun < seen:
                    found.append(stage.length)
                begun += stage.steps * stage.length * stage.rows
        return max(found) or None

    def _runs(self) -> Iterator[dict[str, Any]]:
        """What is noted of its own training, then of the one it started from, and so on. A file may come from anywhere and say anything."""
        about: Any = self.provenance
        while isinstance(about, dict):
            yield about
            about = about.get("init")

    @property
    def reach(self) -> int | None:
        """Raw tokens after its birth that a slot is read: REACH times the longest row; None (as in the paper) where that is not known."""
        return None if self.longest_row is None else REACH * self.longest_row

    def __post_init__(self) -> None:
        if self.slot_input not in SLOT_INPUTS:
            raise UsageError(f"slot input '{self.slot_input}' is unknown; use {', '.join(SLOT_INPUTS)}")
        if self.mirror not in ("kv", "qkv"):
            raise UsageError(f"mirror '{self.mirror}' is unknown; use kv or qkv")


class Adaptor(nn.Module):
    """Per layer W_K,g and W_V,g (and W_Q,g with mirror qkv), with biases where the backbone has them.

    Weights are [layers, width, hidden], width = 2 * kv_width for kv; starts as a copy of the backbone's own projections.
    """

    def __init__(self, config: ModelConfig, info: AdaptorInfo, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.info = config, info
        rows = 2 * config.kv_width
        self.kv = nn.Parameter(torch.empty(config.layers, rows, config.hidden, dtype=dtype, device=device))
        self.kv_bias = _optional(config.qkv_bias or info.bias, (config.layers, rows), dtype, device)
        wide = info.mirror == "qkv"
        self.q = _optional(wide, (config.layers, config.q_width, config.hidden), dtype, device)
        self.q_bias = _optional(wide and config.qkv_bias, (config.layers, config.q_width), dtype, device)
        self.slot_embedding = _optional(info.slot_input == "learned", (config.hidden,), dtype, device)

    @staticmethod
    @torch.no_grad()
    def copied(decoder: Decoder, info: AdaptorInfo, *, dtype: torch.dtype | None = None) -> Adaptor:
        """The untrained adaptor: slot rows go through the backbone's own projections. Training in fp32 passes `dtype`."""
        c = decoder.config
        adaptor = Adaptor(c, info, dtype=dtype or decoder.dtype, device=decoder.device)
        for index, layer in enumerate(decoder.weights.layers):
            adaptor.kv[index].copy_(dense(layer.qkv)[c.q_width :])
            if adaptor.q is not None:
                adaptor.q[index].copy_(dense(layer.qkv)[: c.q_width])
            if adaptor.kv_bias is not None:
                adaptor.kv_bias[index].copy_(torch.zeros(()) if layer.qkv_bias is None else layer.qkv_bias[c.q_width :])
            if adaptor.q_bias is not None and layer.qkv_bias is not None:
                adaptor.q_bias[index].copy_(layer.qkv_bias[: c.q_width])
        if adaptor.slot_embedding is not None:
            adaptor.slot_embedding.copy_(decoder.weights.embed[info.slot_token])
        return adaptor.requires_grad_(False)

    def slot_input(self, sources: Tensor, embed: Tensor) -> Tensor:
        """Input embedding of slots [B, n, H]; `sources` [B, n, r] are the raw tokens that each one closes."""
        return _slot_input(self.info, self.slot_embedding, sources, embed)

    def project(self, layer: int, h: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Mirrored q (None: the backbone's), k and v of slot rows; h [B, n, H], each result [B, n, width]."""
        return _project(layer, h, self.kv, self.kv_bias, self.q, self.q_bias)

    def unbound(self, dtype: torch.dtype) -> SlotWeights:
        """The same weights cast once and cut into layers. For training: the gradient of `kv[layer]` is a tensor as large as all
        layers together, for every layer."""
        layers = (_unbind(w, dtype) for w in (self.kv, self.kv_bias, self.q, self.q_bias))
        return SlotWeights(self.info, self.slot_embedding, *layers)

    def serves(self, stride: int) -> bool:
        return not self.info.strides or stride in self.info.strides

    def save(
        self,
        path: Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        q_rank: int = 0,
        decoder: Decoder | None = None,
        **provenance: Any,
    ) -> None:
        """Writes a safetensors file under a temporary name and renames it.

        With `q_rank` a mirrored Q is written as its difference from the Q of `decoder`, the backbone, cut to that rank.
        """
        tensors = {name: p.detach() for name, p in self.named_parameters()}
        version = FORMATS[0]
        if q_rank and self.q is not None:
            if decoder is None:
                raise ValueError("a low-rank Q is a difference from the backbone's: pass the decoder")
            version = FORMATS[1]
            up, down, error = low_rank(tensors.pop("q") - _backbone_q(decoder, self.q.dtype), q_rank)
            tensors |= {"q_up": up, "q_down": down}
            provenance = {**provenance, "q_rank": up.shape[2], "q_rank_error": round(error, 4)}
        info = replace(self.info, provenance={**self.info.provenance, **provenance})
        shape = {"layers": self.config.layers, "kv_width": self.config.kv_width, "hidden": self.config.hidden}
        metadata = {"format": "pt", "masw": json.dumps({"version": version, "info": asdict(info), "shape": shape})}
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                save_file(tensors, partial, metadata)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"cannot write the adaptor to {path}: {getattr(error, 'strerror', None) or error}; free some space or choose another path"
            ) from None

    @staticmethod
    def load(path: Path, decoder: Decoder, *, base: str, stride: int | None = None, dtype: torch.dtype | None = None) -> Adaptor:
        """Reads an adaptor for `decoder`. Raises UsageError when it was made for another model, shape or stride."""
        info, shape = read_info(path)
        c = decoder.config
        if info.base != base:
            raise UsageError(
                f"adaptor {path.name} belongs to the draft '{info.base}', not '{base}'; pass --adaptor none or one made for '{base}'"
            )
        mine = {"layers": c.layers, "kv_width": c.kv_width, "hidden": c.hidden}
        if shape != mine:
            raise UsageError(
                f"adaptor {path.name} has the shape {shape}, the draft '{base}' has {mine}; train one for this draft"
            )
        adaptor = Adaptor(c, info, dtype=dtype or decoder.dtype, device=decoder.device)
        if stride is not None and not adaptor.serves(stride):
            trained = ", ".join(map(str, info.strides))
            raise UsageError(
                f"adaptor {path.name} was trained for stride {trained}, not {stride}; pass --stride {info.strides[0]} or --adaptor none"
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            names, found = dict(adaptor.named_parameters()), set(file.keys())
            low = found >= LOW_RANK
            whole = found - LOW_RANK | {"q"} if low else found
            if whole != set(names):
                raise UsageError(f"adaptor {path.name} lacks or has extra tensors ({sorted(whole ^ set(names))}); train it again")
            with torch.no_grad():
                for name, parameter in names.items():
                    if low and name == "q":
                        parameter.copy_(_low_rank_q(file.get_tensor("q_up"), file.get_tensor("q_down"), decoder, path.name))
                        continue
                    stored = file.get_tensor(name)
                    if stored.shape != parameter.shape:
                        raise UsageError(
                            f"adaptor {path.name}: {name} is {list(stored.shape)}, expected {list(parameter.shape)}; train it again"
                        )
                    parameter.copy_(stored)
        return adaptor.requires_grad_(False)


@dataclass(frozen=True)
class SlotWeights:
    """An adaptor's weights layer by layer; see `Adaptor.unbound`."""

    info: AdaptorInfo
    slot_embedding: Tensor | None
    kv: Sequence[Tensor] | None
    kv_bias: Sequence[Tensor] | None
    q: Sequence[Tensor] | None
    q_bias: Sequence[Tensor] | None

    def slot_input(self, sources: Tensor, embed: Tensor) -> Tensor:
        return _slot_input(self.info, self.slot_embedding, sources, embed)

    def project(self, layer: int, h: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        assert self.kv is not None
        return _project(layer, h, self.kv, self.kv_bias, self.q, self.q_bias)


Layers = Tensor | Sequence[Tensor]


def _slot_input(info: AdaptorInfo, learned: Tensor | None, sources: Tensor, embed: Tensor) -> Tensor:
    if info.slot_input == "mean":
        return F.embedding(sources, embed).mean(dim=2)
    if info.slot_input == "last":
        return F.embedding(sources[:, :, -1], embed)
    row = embed[info.slot_token] if learned is None else learned.to(embed.dtype)
    return row.expand(*sources.shape[:2], -1)


def _project(
    layer: int, h: Tensor, kv: Layers, kv_bias: Layers | None, q: Layers | None, q_bias: Layers | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    bias = None if kv_bias is None else kv_bias[layer].to(h.dtype)
    k, v = F.linear(h, kv[layer].to(h.dtype), bias).chunk(2, dim=-1)
    if q is None:
        return None, k, v
    return F.linear(h, q[layer].to(h.dtype), None if q_bias is None else q_bias[layer].to(h.dtype)), k, v


def _unbind(weight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    return None if weight is None else weight.to(dtype).unbind(0)


def _low_rank_q(up: Tensor, down: Tensor, decoder: Decoder, name: str) -> Tensor:
    """The backbone's Q plus up @ down, in fp32 (fp64 for an fp64 model)."""
    c, rank = decoder.config, up.shape[-1]
    if up.shape != (c.layers, c.q_width, rank) or down.shape != (c.layers, rank, c.hidden):
        raise UsageError(
            f"adaptor {name}: q_up is {list(up.shape)} and q_down {list(down.shape)}, expected "
            f"{[c.layers, c.q_width, rank]} and {[c.layers, rank, c.hidden]}; train it again"
        )
    wide = torch.promote_types(decoder.dtype, torch.float32)
    return _backbone_q(decoder, wide) + up.to(decoder.device, wide) @ down.to(decoder.device, wide)


def _backbone_q(decoder: Decoder, dtype: torch.dtype) -> Tensor:
    """The backbone's query projections [layers, q_width, hidden]."""
    return torch.stack([dense(layer.qkv)[: decoder.config.q_width].to(dtype) for layer in decoder.weights.layers])


@torch.no_grad()
def low_rank(difference: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Best factors up [L, m, k] and down [L, k, n] of each layer of `difference` [L, m, n], k at most `rank`, and what they
    miss: the Frobenius norm of the rest over that of the whole."""
    wide = difference.to(torch.promote_types(difference.dtype, torch.float32))
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    root = s[:, :rank].sqrt()  # both factors at one scale, so that rounding hurts neither more
    missed = float(s[:, rank:].square().sum().sqrt() / s.square().sum().sqrt().clamp_min(torch.finfo(s.dtype).tiny))
    return u[:, :, :rank] * root[:, None], root[:, :, None] * v[:, :rank], missed


def rank_that_fits(config: ModelConfig, limit: int = SHIPPED_BYTES) -> int:
    """Largest rank of Q's difference at which a bf16 adaptor file stays under `limit` bytes; 0 when none does."""
    vectors = 2 * config.kv_width + config.q_width  # biases, whether there are any or not
    others = 2 * (config.layers * (2 * config.kv_width * config.hidden + vectors) + config.hidden) + 65_536  # metadata
    return max(0, min(config.hidden, (limit - others) // (2 * config.layers * (config.q_width + config.hidden))))


def read_info(path: Path) -> tuple[AdaptorInfo, dict[str, int]]:
    """Metadata of an adaptor file, without its weights. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(f"no adaptor at {path}; pass --adaptor none or the path of a .safetensors file that masw wrote")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            raw = json.loads((file.metadata() or {})["masw"])
        info = raw["info"]
        if raw["version"] not in FORMATS:
            known = " and ".join(map(str, FORMATS))
            raise UsageError(f"adaptor {path.name} has format {raw['version']}, this masw reads formats {known}; update masw")
        return AdaptorInfo(**{**info, "strides": tuple(info["strides"])}), raw["shape"]
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise UsageError(f"{path} is not an adaptor that masw wrote; pass --adaptor none or another file") from None


def _optional(wanted: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) if wanted else None
