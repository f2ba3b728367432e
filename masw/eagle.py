"""An EAGLE-1 style head (arXiv 2401.15077): one decoder layer on the target's features, with the target's embedding and LM head.

Row j reads token x_j and the feature of the token before it, and predicts the feature of x_j:

    feature f_j = final norm of the target's hidden state behind x_j        [H], what the target's LM head multiplies
    row j:  fc([norm(embedding x_j) ; f_{j-1}]) -> one layer over rows 0..j -> hidden -> its own f_j -> LM head -> x_{j+1}

with f_{-1} = 0. This is the paper's pairing (the feature of a token beside the embedding of the next one), numbered by the token that
is embedded, so that a head reads the same tokens as any other draft. The paper has no norm on the embedding; it is here since small
models' embeddings are a tenth the size of their features.

Legend: B batch, T tokens, H hidden.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from masw.config import ModelConfig
from masw.decoder import AnyMemory, Decoder, LayerWeights, Weights
from masw.errors import UsageError
from masw.files import replacing
from masw.linear import dense

FORMAT = 1
HOW = "train one with `masw train-eagle`"


@dataclass(frozen=True)
class EagleInfo:
    """What a head's file says about itself."""

    base: str  # name of the target whose features it reads
    tokens: int = 0  # trained on; 0: untrained
    provenance: dict[str, Any] = field(default_factory=dict)  # commit, data hash, recipe, measure


class EagleHead(nn.Module):
    """fc [H, 2H] and one layer of the target's shape; embedding, final norm and LM head are the target's own, and frozen."""

    def __init__(self, config: ModelConfig, info: EagleInfo, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.info = replace(config, layers=1), info
        c, qkv = config, config.q_width + 2 * config.kv_width
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (c.hidden,), "qkv": (qkv, c.hidden), "out": (c.hidden, c.q_width), "mlp_norm": (c.hidden,),
            "gate_up": (2 * c.intermediate, c.hidden), "down": (c.hidden, c.intermediate),
        }  # fmt: skip
        if c.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if c.qk_norm:
            shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
        self.fc = nn.Parameter(torch.empty(c.hidden, 2 * c.hidden, dtype=dtype, device=device))
        self.layer = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for name, shape in shapes.items()}
        )

    @staticmethod
    @torch.no_grad()
    def copied(target: Decoder, info: EagleInfo, *, dtype: torch.dtype | None = None, seed: int = 0) -> EagleHead:
        """The untrained head: a random fc, and the target's last layer with its two outputs at zero, so that it adds nothing yet."""
        c = target.config
        head = EagleHead(c, info, dtype=dtype or target.dtype, device=target.device)
        for name, parameter in head.layer.items():
            parameter.copy_(torch.zeros(()) if name in ("out", "down") else dense(getattr(target.weights.layers[-1], name)))
        generator = torch.Generator().manual_seed(seed)
        head.fc.copy_(torch.randn(head.fc.shape, generator=generator, dtype=torch.float64) * (2 * c.hidden) ** -0.5)
        return head.requires_grad_(False)

    def decoder(self, target: Decoder) -> Decoder:
        """The head as a decoder of one layer over the target's embedding, final norm and LM head; it wants `inputs`."""
        dtype, w = target.dtype, target.weights
        layer: dict[str, Any] = {"qkv_bias": None, **{name: p.to(dtype) for name, p in self.layer.items()}}
        return Decoder(self.config, Weights(w.embed, [LayerWeights(**layer)], w.norm, w.head))

    def inputs(self, target: Decoder, tokens: Tensor, before: Tensor) -> Tensor:
        """Layer input [B, T, H] of `tokens` [B, T] and the features `before` them [B, T, H]."""
        return F.linear(fused(target, tokens, before), self.fc.to(target.dtype))

    def forward(self, target: Decoder, tokens: Tensor, before: Tensor, memory: AnyMemory) -> Tensor:
        """Predicted hidden states [B, T, H] behind `tokens` [B, T], to be normed like the target's own."""
        return self.decoder(target).forward(tokens, memory, inputs=self.inputs(target, tokens, before))

    def save(self, path: Path, *, dtype: torch.dtype = torch.bfloat16, tokens: int | None = None, **provenance: Any) -> None:
        """Writes a safetensors file under a temporary name and renames it."""
        info = replace(
            self.info,
            tokens=self.info.tokens if tokens is None else tokens,
            provenance={**self.info.provenance, **provenance},
        )
        about = {"version": FORMAT, "info": asdict(info), "shape": _shape(self.config)}
        tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in self.named_parameters()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                save_file(tensors, partial, {"format": "pt", "masw-eagle": json.dumps(about)})
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"cannot write the eagle head to {path}: {getattr(error, 'strerror', None) or error}; "
                "free some space or choose another path"
            ) from None

    @staticmethod
    def load(path: Path, target: Decoder, *, base: str, dtype: torch.dtype | None = None) -> EagleHead:
        """Reads a head for `target`. Raises UsageError when it was made for another model or shape."""
        info, shape = read_head(path, base)
        if shape != _shape(target.config):
            raise UsageError(
                f"eagle head {path.name} has the shape {shape}, the target '{base}' has {_shape(target.config)}; {HOW} for it"
            )
        head = EagleHead(target.config, info, dtype=dtype or target.dtype, device=target.device)
        with safe_open(path, framework="pt", device="cpu") as file, torch.no_grad():
            names = dict(head.named_parameters())
            if set(file.keys()) != set(names):
                wrong = sorted(set(file.keys()) ^ set(names))
                raise UsageError(f"eagle head {path.name} lacks or has extra tensors ({', '.join(wrong)}); train it again")
            for name, parameter in names.items():
                stored = file.get_tensor(name)
                if stored.shape != parameter.shape:
                    raise UsageError(
                        f"eagle head {path.name}: {name} is {list(stored.shape)}, expected {list(parameter.shape)}; train it again"
                    )
                parameter.copy_(stored)
        return head.requires_grad_(False)


def fused(target: Decoder, tokens: Tensor, before: Tensor) -> Tensor:
    """What fc reads [B, T, 2H]: normed embeddings of `tokens` [B, T] beside the features `before` them [B, T, H]."""
    c = target.config
    embedded = F.rms_norm(F.embedding(tokens, target.weights.embed), (c.hidden,), None, c.norm_eps)
    return torch.cat((embedded, before), dim=-1)


def before(features: Tensor) -> Tensor:
    """Features [B, T, H] of the tokens before those that `features` belong to: zero for the first."""
    return torch.cat((torch.zeros_like(features[:, :1]), features[:, :-1]), dim=1)


def read_head(path: Path, base: str | None = None) -> tuple[EagleInfo, dict[str, Any]]:
    """Metadata of a head's file, without its weights. Raises UsageError for anything else, and for a head of another target than
    `base`."""
    if not path.is_file():
        raise UsageError(f"no eagle head at {path}; {HOW} and pass its .safetensors file, or choose another --method")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            raw = json.loads((file.metadata() or {})["masw-eagle"])
        if raw["version"] != FORMAT:
            raise UsageError(f"eagle head {path.name} has format {raw['version']}, this masw reads format {FORMAT}; update masw")
        info = EagleInfo(**raw["info"])
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise UsageError(f"{path} is not an eagle head that masw wrote; {HOW} and pass its .safetensors file") from None
    if base is not None and info.base != base:
        raise UsageError(f"eagle head {path.name} belongs to the target '{info.base}', not '{base}'; {HOW} for '{base}'")
    return info, raw["shape"]


def _shape(config: ModelConfig) -> dict[str, Any]:
    names = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "qkv_bias", "qk_norm")
    return {name: getattr(config, name) for name in names}
