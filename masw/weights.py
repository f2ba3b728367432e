"""A model folder in the hub's layout -> the decoder's fused tensors, and seeded random weights for shapes without files.

Every fused tensor is allocated first and each checkpoint tensor is copied into its place in it, one shard mapped at a time: the
peak is one model and one shard. Legend: H hidden, D head_dim, I intermediate, V vocabulary.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from masw.config import ModelConfig
from masw.decoder import LayerWeights, Weights
from masw.errors import UsageError
from masw.linear import dense

_UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder; UsageError (one line) if it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path.parent} has no {path.name}; give a folder in the hub's layout") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); fetch the model again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object; fetch the model again")
    return value


def read_config(folder: Path) -> ModelConfig:
    """The shape of the model in `folder`. Raises UsageError for what the decoder does not compute."""
    raw = read_json(folder / "config.json")
    if raw.get("quantization_config"):
        kind = raw["quantization_config"].get("quant_method", "?")
        raise UsageError(f"{folder.name} is quantised ({kind}); use the plain bf16 or fp16 model")
    try:
        return ModelConfig.from_hf(raw)
    except KeyError as error:
        raise UsageError(f"{folder / 'config.json'} lacks {error}; give a folder in the hub's layout") from None


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files that make up the model. Raises UsageError if there are none (pickle files are never read)."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if bad := [name for name in names if Path(name).name != name]:
            raise UsageError(f"{index} points outside its folder ({bad[0]}); use another copy of the model")
        paths = [folder / name for name in names]
    elif (folder / "model.safetensors").exists():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
        if len(paths) > 1:
            raise UsageError(f"{folder} has {len(paths)} safetensors files and no index; give a folder in the hub's layout")
    if missing := [path.name for path in paths if not path.exists()]:
        raise UsageError(f"{folder} lacks {missing[0]} (and {len(missing) - 1} more shards); fetch the model again")
    if not paths:
        unsafe = any(any(folder.glob(pattern)) for pattern in _UNSAFE)
        why = "only pickle weights (.bin, .pt), which are never loaded; convert them to" if unsafe else "no weights; it needs"
        raise UsageError(f"{folder} has {why} safetensors")
    return paths


def parameter_count(folder: Path) -> int:
    """Values in all safetensors of `folder`, from their headers alone."""
    total = 0
    for path in shard_paths(folder):
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    size = 1
                    for n in shard.get_slice(name).get_shape():
                        size *= n
                    total += size
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is damaged ({error}); fetch the model again") from None
    return total


def load_weights(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[str, int, int], None] | None = None,
) -> Weights:
    """Reads the safetensors of `folder` into fused weights on `device` in `dtype`.

    `progress` gets ("loading", values read, values in all). Raises UsageError that names the first missing, unexpected or
    mis-shaped tensor.
    """
    paths = shard_paths(folder)
    weights = _empty(config, device, dtype)
    places = named_tensors(config, weights)
    total, read, missing = sum(t.numel() for t in places.values()), 0, set(places)
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    if name not in places:
                        if name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight"):
                            continue
                        raise UsageError(
                            f"{path.name}: unexpected tensor '{name}' for a {config.family} model; use another model"
                        )
                    value, place = shard.get_tensor(name), places[name]
                    if value.shape != place.shape:
                        raise UsageError(
                            f"tensor '{name}' is {list(value.shape)}, the config says {list(place.shape)}; fetch the model again"
                        )
                    place.copy_(value)
                    missing.discard(name)
                    read += place.numel()
                    if progress:
                        progress("loading", read, total)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is damaged ({error}); fetch the model again") from None
    if missing:
        first = next(name for name in places if name in missing)
        raise UsageError(f"{folder} lacks the tensor '{first}' (and {len(missing) - 1} more); fetch the model again")
    return weights


def random_weights(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> Weights:
    """Seeded weights of the right shape: unit norms, hidden states of order one, logits with a spread of about two.

    A tensor depends on the seed, its own name and the kind of device, not on the other tensors: two models of one width and seed
    share embedding, head and their first layers, so the shallower drafts for the deeper with some luck.
    """
    weights = _empty(config, device, dtype)
    generator = torch.Generator(device=device)
    residual = 0.5  # layers refine the hidden state instead of drowning the embedding
    for name, place in named_tensors(config, weights).items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
            continue
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # the CPU's generator reads 32 bits only
        if name.endswith(".bias"):
            std = 0.1
        elif name in ("lm_head.weight", "model.embed_tokens.weight"):
            std = 2.0 * config.hidden**-0.5 if name == "lm_head.weight" or config.tied else 1.0
        else:
            std = place.shape[1] ** -0.5 * (residual if ".o_proj." in name or ".down_proj." in name else 1.0)
        place.copy_(torch.randn(place.shape, generator=generator, device=device) * std)
    return weights


def _empty(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Allocated, not filled."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    c, qkv = config, config.q_width + 2 * config.kv_width
    layers = [
        LayerWeights(
            attn_norm=new(c.hidden),
            qkv=new(qkv, c.hidden),
            qkv_bias=new(qkv) if c.qkv_bias else None,
            out=new(c.hidden, c.q_width),
            mlp_norm=new(c.hidden),
            gate_up=new(2 * c.intermediate, c.hidden),
            down=new(c.hidden, c.intermediate),
            q_norm=new(c.head_dim) if c.qk_norm else None,
            k_norm=new(c.head_dim) if c.qk_norm else None,
        )
        for _ in range(c.layers)
    ]
    embed = new(c.vocab, c.hidden)
    return Weights(embed=embed, layers=layers, norm=new(c.hidden), head=embed if c.tied else new(c.vocab, c.hidden))


def named_tensors(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Hub name -> the view of the fused tensor where its values belong."""
    c = config
    places = {"model.embed_tokens.weight": weights.embed}
    split = [c.q_width, c.kv_width, c.kv_width]
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        places[f"{prefix}.input_layernorm.weight"] = layer.attn_norm
        for part, view in zip("qkv", dense(layer.qkv).split(split), strict=True):
            places[f"{prefix}.self_attn.{part}_proj.weight"] = view
        if layer.qkv_bias is not None:
            for part, view in zip("qkv", layer.qkv_bias.split(split), strict=True):
                places[f"{prefix}.self_attn.{part}_proj.bias"] = view
        if layer.q_norm is not None and layer.k_norm is not None:
            places[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
            places[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
        places[f"{prefix}.self_attn.o_proj.weight"] = dense(layer.out)
        places[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
        places[f"{prefix}.mlp.gate_proj.weight"], places[f"{prefix}.mlp.up_proj.weight"] = dense(layer.gate_up).chunk(2)
        places[f"{prefix}.mlp.down_proj.weight"] = dense(layer.down)
    places["model.norm.weight"] = weights.norm
    if not c.tied:
        places["lm_head.weight"] = dense(weights.head)
    return places
