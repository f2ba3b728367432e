"""What a memory shows to whom, and where a slot is born. Pure decisions; the mechanism is in `masw.memory`.

Legend: B batch, T raw tokens, N rows (raw and slot rows interleaved), K keys, S sinks, W window, r stride.

Time. Every row has one integer stamp that orders it among all rows of the interleaved sequence
    raw x_i     2 * i + 1
    slot g_m    2 * tau_m          (tau_m = m * r: after x_{tau-1}, before x_{tau})
and every key has a life [born, expires] in the same unit. A row sees a key when born <= row <= expires:

    key                     born         expires
    raw j < S (sink)        2 * j + 1    never
    raw j                   2 * j + 1    2 * (j + W)     last seen by slot tau = j + W, then by no one
    slot tau                2 * tau      never (an adaptor may not reach that far: `read_until`)

which is the visibility table of the paper (arXiv 2608.30252, section 3):

    query       sees raw keys                      sees slots
    raw x_i     j < S or i - W < j <= i            tau <= i
    slot tau    j < S or tau - W <= j < tau        all up to and including itself

    S = 1, W = 2, r = 2      x0  x1  g2  x2  x3  g4  x4
                        x0   #
                        x1   #   #
                        g2   #   #   #                      sees x_0, x_1 and itself
                        x2   #   #   #   #
                        x3   #   .   #   #   #              x_1 left the window
                        g4   #   .   #   #   #   #
                        x4   #   .   #   .   #   #   #
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from masw.config import MemoryShape

NEVER = 2**62  # a stamp that no row reaches: an empty entry is born then, a sink or a slot expires then


@dataclass(frozen=True)
class Rows:
    """The rows that `count` raw tokens become. Host integers: a decode step has one or two."""

    start: int  # position of the first raw token
    count: int  # raw tokens
    boundaries: tuple[int, ...]  # tau of each slot born among them
    stride: int = 0  # raw tokens that a slot closes

    @property
    def total(self) -> int:
        return self.count + len(self.boundaries)

    def times(self) -> list[int]:
        """Stamp of each row, in sequence order."""
        if not self.boundaries:
            return list(range(2 * self.start + 1, 2 * (self.start + self.count), 2))
        raw = range(2 * self.start + 1, 2 * (self.start + self.count), 2)
        return sorted([*raw, *(2 * tau for tau in self.boundaries)])


def materialise(start: int, count: int, stride: int | None) -> Rows:
    """Which slots are born when raw tokens [start, start + count) are read: those with start < tau <= start + count.

    A slot rides in the forward of the token that closes its stretch (x_{tau-1}), so that t tokens always have floor(t / r)
    slots. It depends on nothing later, so riding with x_{tau} instead would give the same numbers.
    """
    if not stride:
        return Rows(start, count, ())
    first = (start // stride + 1) * stride
    return Rows(start, count, tuple(range(first, start + count + 1, stride)), stride)


def position(times: Tensor) -> Tensor:
    """RoPE position of each stamp: i for raw x_i, tau for a slot (the position of the raw token that follows it)."""
    return times // 2


def expiry(times: Tensor, shape: MemoryShape) -> Tensor:
    """Last stamp that sees each entry."""
    raw = times % 2 == 1
    never = torch.full_like(times, NEVER)
    if shape.window is None:
        return never
    leaves = raw & (times >= 2 * shape.sinks + 1)
    return torch.where(leaves, times - 1 + 2 * shape.window, never)


def read_until(born: Tensor, expires: Tensor, reach: int | None) -> Tensor:
    """Last stamp that reads each entry of a memory: `expires`, for slots at most `reach` raw tokens after their birth (None: no limit).

    The paper reads every slot for ever. An adaptor that never saw slots at such distances makes noise of them (docs/LOG.md), so it
    says how far it was trained to reach; what is out of reach stays stored.
    """
    if reach is None:
        return expires
    return torch.where(born % 2 == 0, torch.minimum(expires, born + 2 * reach), expires)


def visible(rows: Tensor, born: Tensor, expires: Tensor) -> Tensor:
    """Boolean mask [N, K] of which key each row sees; `rows` [N], `born` and `expires` [K] are stamps."""
    column = rows[:, None]
    return (born <= column) & (column <= expires)


def evicted(tokens: int, shape: MemoryShape) -> int:
    """Raw tokens that have left the memory for good once `tokens` tokens are accepted."""
    return 0 if shape.window is None or shape.whole(tokens) else max(0, tokens - shape.window - shape.sinks)
