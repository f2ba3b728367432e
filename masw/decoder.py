"""One forward for every Llama-family model and every use: target, draft, verify, prefill and training differ only in the memory.

Legend: B batch, T raw tokens, N rows (raw + slots), H hidden, Q query heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from masw.attention import attend
from masw.config import ModelConfig
from masw.linear import Packed, Weight, dense, linear

if TYPE_CHECKING:
    from masw.memory import Block


@dataclass
class LayerWeights:
    attn_norm: Tensor  # [H]
    qkv: Weight  # [(Q + 2G) * D, H], rows q, k, v
    qkv_bias: Tensor | None  # [(Q + 2G) * D]
    out: Weight  # [H, Q * D]
    mlp_norm: Tensor  # [H]
    gate_up: Weight  # [2 * I, H], rows gate, up
    down: Weight  # [H, I]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]


@dataclass
class Weights:
    embed: Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    head: Weight  # [V, H], the embedding itself when tied

    def tensors(self) -> list[Tensor]:
        """Each distinct tensor once, for bytes and for freezing."""
        found = [self.embed, self.norm]
        if dense(self.head) is not self.embed:
            found.append(dense(self.head))
        for layer in self.layers:
            found.extend(dense(t) for t in vars(layer).values() if t is not None)
        return found

    @property
    def packed_nbytes(self) -> int:
        """Bytes of packed copies, beside the tensors."""
        every = [self.head, *(t for layer in self.layers for t in vars(layer).values())]
        return sum(t.packed_nbytes for t in every if isinstance(t, Packed))


class AnyMemory(Protocol):
    """What the forward needs of a memory: {begin -> extend for each layer -> end}."""

    def begin(self, tokens: Tensor) -> Block: ...
    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...
    def end(self) -> None: ...


class Decoder:
    """Llama, Mistral, Qwen2 and Qwen3 as one functional forward over fused weights."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._inv_freq = inverse_frequencies(config, weights.embed.device)
        _keep_freed_memory()

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embed.dtype

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.weights.tensors()) + self.weights.packed_nbytes

    def forward(
        self, tokens: Tensor, memory: AnyMemory, around: Callable[..., Tensor] | None = None, inputs: Tensor | None = None
    ) -> Tensor:
        """Reads raw `tokens` [B, T] on top of what `memory` holds and writes their keys and values (and due slots) into it.

        `around` calls each layer in place of the loop, so that training can keep a layer's input alone and compute it again.
        `inputs` [B, T, H] stand in for the embeddings of `tokens`, for a head that reads more than them.
        Returns the hidden states [B, T, H] of the raw tokens, in order, before the final norm.
        """
        call = around or _plainly
        block = memory.begin(tokens)
        x = self._embed(block, inputs)  # [B, N, H]
        cos, sin = self._rotation(block.positions)  # [N, 1, D]
        for index in range(len(self.weights.layers)):
            x = call(self._layer, index, x, cos, sin, block, memory)
        memory.end()
        return x if block.raw_rows is None else x.index_select(1, block.raw_rows)

    def _layer(self, index: int, x: Tensor, cos: Tensor, sin: Tensor, block: Block, memory: AnyMemory) -> Tensor:
        """Rows [B, N, H] behind layer `index`."""
        c, w = self.config, self.weights.layers[index]
        h = F.rms_norm(x, (c.hidden,), w.attn_norm, c.norm_eps)
        qk, v = self._project(index, w, h, block)  # [B, N, Q + G, D], [B, N, G, D]
        q, k = rotate(qk, cos, sin).split((c.heads, c.kv_heads), dim=2)
        k, v = memory.extend(index, q, k, v)  # [B, G, K, D]
        x = x + linear(attend(q, k, v, block.mask, causal=block.causal), w.out)
        h = F.rms_norm(x, (c.hidden,), w.mlp_norm, c.norm_eps)
        gate, up = linear(h, w.gate_up).chunk(2, dim=-1)
        x = x + linear(F.silu(gate) * up, w.down)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden states [..., H]."""
        return linear(self.normed(hidden), self.weights.head)

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] behind the final norm: what the LM head multiplies."""
        return F.rms_norm(hidden, (self.config.hidden,), self.weights.norm, self.config.norm_eps)

    def _embed(self, block: Block, inputs: Tensor | None) -> Tensor:
        raw = F.embedding(block.tokens, self.weights.embed) if inputs is None else inputs
        if block.slots is None:
            return raw
        slot = block.slots.adaptor.slot_input(block.slots.sources, self.weights.embed)  # [B, slots, H]
        return torch.cat([raw, slot], dim=1).index_select(1, block.slots.order)

    def _project(self, index: int, w: LayerWeights, h: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, N, Q + G, D] and values [B, N, G, D] of all rows; slot rows take theirs from the mirrored projections."""
        c = self.config
        qkv = linear(h, w.qkv, w.qkv_bias)
        if block.slots is not None:
            rows = block.slots.rows
            slot_q, slot_k, slot_v = block.slots.adaptor.project(index, h.index_select(1, rows))
            if slot_q is None:
                slot_q = qkv[..., : c.q_width].index_select(1, rows)
            qkv = qkv.index_copy(1, rows, torch.cat((slot_q, slot_k, slot_v), dim=-1))
        qk, v = qkv.unflatten(-1, (-1, c.head_dim)).split((c.heads + c.kv_heads, c.kv_heads), dim=2)
        if w.q_norm is not None:
            q, k = qk.split((c.heads, c.kv_heads), dim=2)
            q = F.rms_norm(q, (c.head_dim,), w.q_norm, c.norm_eps)
            k = F.rms_norm(k, (c.head_dim,), w.k_norm, c.norm_eps)
            qk = torch.cat((q, k), dim=2)
        return qk, v

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [N, 1, D] of RoPE; the angles are kept in fp32 (fp64 for an fp64 model) whatever the dtype."""
        exact = torch.promote_types(self.dtype, torch.float32)
        angle = torch.outer(positions.to(exact), self._inv_freq.to(exact))
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), -1)[:, None].to(self.dtype), torch.cat((-sin, sin), -1)[:, None].to(self.dtype)


def _plainly(layer: Callable[..., Tensor], *args: Any) -> Tensor:
    return layer(*args)


def _keep_freed_memory() -> None:
    """Makes glibc keep up to 64 MiB of freed memory instead of handing it back page by page, which costs a prefill a quarter of its
    time: freeing one block of just under 32 MiB raises its threshold. Elsewhere it does nothing."""
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to x [B, N, heads, D]; the sign of the half rotation sits in `sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """RoPE inverse frequencies [D / 2] in fp64, with Llama 3's scaling where the model has it."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device) / config.head_dim
    inv = config.rope_theta**-exponent
    s = config.rope_scaling
    if s is None:
        return inv
    wavelength = 2 * math.pi / inv
    blend = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: long waves, stretched whole; 1: short waves, untouched
    return inv / s.factor * (1 - blend) + inv * blend
