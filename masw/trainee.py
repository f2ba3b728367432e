"""What is trained: the adaptor and its loss, as one module that DistributedDataParallel can wrap.

The loss has a term at the LM head (masw.distil) and, if asked for, one behind every layer: how far the memory has moved what the next layer
reads from what it reads with the full KV. A layer's slots are told at once what they lack, where the term at the head reaches them
only through all layers above.

Legend: B rows, T raw tokens, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from masw.adaptor import Adaptor
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.distil import Passes, Score, hardest, head_loss


class Trainee(nn.Module):
    """The adaptor with its loss."""

    def __init__(self, adaptor: Adaptor, passes: Passes, kl: float, most: int = 0, match: float = 0.0) -> None:
        """`kl` and `most` (loss positions of a row, 0: all): see `distil.head_loss` and `distil.hardest`; `match`: weight of the term
        behind every layer."""
        super().__init__()
        self.adaptor, self._passes, self._kl, self._most, self._match = adaptor, passes, kl, most, match

    def forward(
        self, tokens: Tensor, scored: Tensor, shape: MemoryShape, total: float, share: float = 1.0
    ) -> tuple[Tensor, Score, Tensor]:
        """Loss over `total` positions at the LM head, and `share` (of a step's rows) of the term behind the layers.

        tokens [B, T], scored [B, T - 1]. Returns the loss, its sums at the head, and the mean distance behind the layers (0: not asked for).
        """
        at = scored.nonzero(as_tuple=True)
        teacher, layers = None, LayerDistance(self._passes.decoder) if self._match else None
        if self._kl or layers:
            with torch.no_grad():
                full = self._passes.hidden(tokens, MemoryShape(), None, layers.full if layers else None)
            teacher = full[at] if self._kl else None
        through = self._passes.hidden(tokens, shape, self.adaptor, layers.memory if layers else None)
        hidden, labels = through[at], tokens[:, 1:][at]
        if self._most and teacher is not None:
            kept = hardest(self._passes.decoder, hidden, teacher, at[0], self._most)
            hidden, teacher, labels = hidden[kept], teacher[kept], labels[kept]
        loss, found = head_loss(self._passes.decoder, hidden, teacher, labels, kl=self._kl, total=total)
        distance = loss.new_zeros(()) if layers is None else layers.mean()
        return loss + self._match * share * distance, found, distance.detach()


class LayerDistance:
    """Mean over raw positions and layers of |s - t|^2 / |t|^2: t is what the next layer reads of the full-KV pass, behind its norm, and s
    what it reads of the pass through the memory. The last layer is left out, since the LM head's term judges it."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._theirs: dict[int, Tensor] = {}
        self._parts: list[Tensor] = []

    def full(self, layer: int, rows: Tensor) -> None:
        """Keeps the full-KV pass's hidden states [B, T, H] behind `layer`."""
        if layer + 1 < self._decoder.config.layers:
            self._theirs[layer] = self._read(layer, rows)

    def memory(self, layer: int, rows: Tensor) -> None:
        """Compares those of the pass through the memory; after the whole pass of `full`."""
        if layer in self._theirs:
            theirs = self._theirs.pop(layer)
            exact = torch.promote_types(theirs.dtype, torch.float32)
            moved = (self._read(layer, rows) - theirs).to(exact).square().sum(-1)
            self._parts.append((moved / theirs.to(exact).square().sum(-1).clamp_min(1e-12)).mean())

    def mean(self) -> Tensor:
        """0 for a model of one layer."""
        return torch.stack(self._parts).mean() if self._parts else torch.zeros((), device=self._decoder.device)

    def _read(self, layer: int, rows: Tensor) -> Tensor:
        c, norm = self._decoder.config, self._decoder.weights.layers[layer + 1].attn_norm
        return F.rms_norm(rows, (c.hidden,), norm, c.norm_eps)
