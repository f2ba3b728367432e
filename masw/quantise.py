"""Quantised draft weights for the CPU. A draft's precision never changes the output, only how much of it is accepted.

int8: one scale an output row. int4: a scale and an offset for every 32 inputs; its LM head finds the best tokens in four bits and computes
their logits again from the original rows. Torch's packed kernels read them at up to a few rows,
where a step is bound by the bytes of the weights; wide blocks (prefill) are bound by arithmetic and go through the original
weights, which are kept. Shapes: weight [N, K], x [..., K] -> [..., N].
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from masw.cost import INT4_GROUP, head_in_int4
from masw.decoder import Decoder, LayerWeights, Weights
from masw.errors import UsageError
from masw.linear import Packed, dense

KINDS = ("plain", "int8", "int4")
GROUP = INT4_GROUP
ROWS_AT_ONCE = 4096
RESCORED = 16
FEW_ROWS = 4  # up to here the packed kernels are at least 1.5 times as fast as bf16 (measured with AVX512-BF16)


class Int8(Packed):
    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense, FEW_ROWS)
        self.packed = torch.empty(dense.shape, dtype=torch.int8)
        scales = []
        # In parts: an LM head of 150,000 rows in fp32 would set the peak memory of the whole run.
        for rows, packed in zip(dense.split(ROWS_AT_ONCE), self.packed.split(ROWS_AT_ONCE), strict=True):
            exact = rows.float()
            scale = exact.abs().amax(dim=1).clamp_min(1e-8) / 127
            packed.copy_((exact / scale[:, None]).round().clamp(-127, 127))
            scales.append(scale.to(dense.dtype))
        self.scale = torch.cat(scales)

    def few(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, self.packed, self.scale)

    @property
    def packed_nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes


class Int4(Packed):
    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense, FEW_ROWS)
        parts = [_int4(rows) for rows in dense.split(ROWS_AT_ONCE)]  # as in Int8
        self.packed = torch.cat([packed for packed, _ in parts])
        self.scale = torch.cat([scale for _, scale in parts], dim=1)  # [K / 32, N, 2]

    def few(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scale)

    @property
    def packed_nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes


def _int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and scales [K / 32, n, 2] of weight rows [n, K]."""
    n, inputs = rows.shape
    groups = rows.float().view(n, inputs // GROUP, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8)
    code = ((groups - low) / scale).round().clamp(0, 15).view(n, inputs).to(torch.int32)
    # The kernel computes (code - 8) * scale + offset.
    both = torch.stack((scale.squeeze(-1), (low + 8 * scale).squeeze(-1)), dim=-1)  # [n, K / 32, 2]
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(code, 1), both.transpose(0, 1).contiguous().to(torch.bfloat16)


class Int4Head(Int4):
    """An LM head in four bits whose best tokens are scored again with the original rows.

    The head chooses between near-equal logits, where four bits are too coarse: on 1,024 positions of a report they name another best
    token of Qwen2.5-Coder-0.5B on 7 % of them (int8: 1 %), but the right one was always among the best four. Scoring `RESCORED`
    rows again costs 30 KB of reading and leaves the unquantised argmax.
    """

    def few(self, x: Tensor) -> Tensor:
        logits = super().few(x)
        best = logits.topk(min(RESCORED, logits.shape[1]), sorted=False).indices  # [M, R]
        return logits.scatter_(1, best, torch.bmm(self.dense[best], x[:, :, None]).squeeze(-1))


@torch.no_grad()
def quantised(decoder: Decoder, kind: str) -> Decoder:
    """A decoder over the same weights that reads packed copies at few rows. Raises UsageError where torch has no kernel for it."""
    check_kind(kind)
    if kind == "plain":
        return decoder
    if not packable(decoder):
        raise UsageError(
            f"draft weights {kind} need a bf16 model on the CPU, this one is {decoder.dtype} on {decoder.device}; use plain"
        )
    pack = Int8 if kind == "int8" else Int4
    weights = decoder.weights

    def layer(w: LayerWeights) -> LayerWeights:
        return replace(
            w, qkv=pack(dense(w.qkv)), out=pack(dense(w.out)), gate_up=pack(dense(w.gate_up)), down=pack(dense(w.down))
        )

    head = Int4Head if kind == "int4" and head_in_int4(decoder.config) else Int8
    return Decoder(
        decoder.config, Weights(weights.embed, [layer(w) for w in weights.layers], weights.norm, head(dense(weights.head)))
    )


def check_kind(kind: str) -> None:
    if kind not in (*KINDS, "auto"):
        raise UsageError(f"draft weights '{kind}' are unknown; use auto, {', '.join(KINDS)}")


def packable(decoder: Decoder) -> bool:
    """Whether the packed kernels take this model."""
    c = decoder.config
    widths = (c.hidden, c.q_width, c.intermediate)
    return decoder.device.type == "cpu" and decoder.dtype == torch.bfloat16 and all(width % GROUP == 0 for width in widths)
