"""Steps of one shape on one memory: static tensors that are filled in place, and on CUDA a graph that is captured once and replayed.

A step on a fast GPU is bound by the launches of its kernels. A CUDA graph launches all of them at once, but it repeats the very same
work on the very same addresses. So all that changes from step to step (tokens, stamps, and what follows from them: positions, places,
who sees what) has to come out of tensors that stay, and the keys that are read are rounded up to a bucket; entries beyond the live
ones are masked. The forward is the decoder's own.

Legend: B batch, T raw tokens of a block, N rows of a block (raw + slots), V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from masw.decoder import Decoder
from masw.memory import STEP, Block, Memory, layout_of, on_device
from masw.policies import Rows, materialise

Pattern = tuple[int, tuple[int, ...], int]  # raw tokens, slots born after which of them, keys read
WARM_UP = 2  # runs before a capture: libraries choose their kernels and workspaces then


def bucket(entries: int, capacity: int) -> int:
    """Keys that are read for `entries` live ones: at most an eighth more (or STEP), so that a growing memory needs few graphs."""
    step = max(STEP, 1 << max(0, entries.bit_length() - 4))
    return min(-(-entries // step) * step, capacity)


class StaticStep:
    """A block of one pattern, as a memory for `Decoder.forward`: begins from its own tensors, and ends without having moved."""

    def __init__(self, decoder: Decoder, memory: Memory, rows: Rows, keys: int, *, last: bool) -> None:
        """`rows` is any block of the pattern. `last`: logits of the last token only."""
        self.tokens = torch.zeros(memory.tokens().shape[0], rows.count, dtype=torch.long, device=decoder.device)  # [B, T]
        self.times = torch.zeros(rows.total, dtype=torch.long, device=decoder.device)  # [N]
        self.logits: Tensor | None = None  # [B, V] or [B, T, V] after `run`
        self._decoder, self._memory, self._rows, self._keys, self._last = decoder, memory, rows, keys, last
        self._layout = layout_of(rows.times(), decoder.device)

    def fill(self, tokens: Tensor, rows: Rows) -> None:
        """Says which tokens come, and where the sequence stands."""
        self.tokens.copy_(tokens, non_blocking=True)
        self.times.copy_(on_device(rows.times(), self.times.device), non_blocking=True)

    def run(self) -> None:
        """One pass over what was filled in. Run again it does the same once more: a memory that does not advance is overwritten."""
        hidden = self._decoder.forward(self.tokens, self)
        self.logits = self._decoder.logits(hidden[:, -1] if self._last else hidden)

    def begin(self, tokens: Tensor) -> Block:
        memory, layout = self._memory, self._layout
        memory._tokens.index_copy_(1, self.times.index_select(0, layout.raw) // 2, tokens)
        return memory.enter(tokens, self._rows, self.times, layout, self._keys, masked=True)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._memory.extend(layer, q, k, v)

    def end(self) -> None:
        self._memory._block = None


class Steps:
    """Reads blocks through static steps, one a pattern. A block that a memory cannot place (a prompt's chunk) is read as ever."""

    def __init__(
        self,
        decoder: Decoder,
        memory: Memory,
        *,
        last: bool = True,
        capture: bool | None = None,
        note: Callable[[str], None] = lambda text: print(f"masw: {text}", file=sys.stderr),
    ) -> None:
        """`last`: logits of a block's last token only. `capture`: replay graphs; None: on CUDA. Where capturing fails, `note` is told
        once and steps run uncaptured."""
        self._decoder, self._memory, self._last, self._note = decoder, memory, last, note
        self.captures = decoder.device.type == "cuda" if capture is None else capture
        self._steps: dict[Pattern, tuple[StaticStep, Callable[[], None]]] = {}
        self._addresses: tuple[int, ...] = ()
        self._pool: Any = None  # memory that all graphs share: they never run at the same time

    def __len__(self) -> int:
        """Patterns so far."""
        return len(self._steps)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Reads raw `tokens` [B, T] as `Decoder.forward` does. Returns logits [B, V] after the last, or [B, T, V]: good until the
        next call."""
        memory, count = self._memory, tokens.shape[1]
        if not memory.placed(count):
            hidden = self._decoder.forward(tokens, memory)
            return self._decoder.logits(hidden[:, -1] if self._last else hidden)
        rows = materialise(memory.length, count, memory.shape.stride)
        step, run = self._step(rows)
        step.fill(tokens, rows)
        run()
        memory.advance(rows)
        assert step.logits is not None
        return step.logits

    def _step(self, rows: Rows) -> tuple[StaticStep, Callable[[], None]]:
        memory = self._memory
        memory._reserve(rows.start + rows.count)
        addresses = tuple(t.data_ptr() for t in (memory._kv, memory._born, memory._expires, memory._tokens))
        if addresses != self._addresses:  # the buffers grew: what was captured writes to the old ones
            self._steps.clear()
            self._addresses = addresses
        keys = bucket(memory._live(rows.start + rows.count), memory._kv.shape[4])
        pattern = (rows.count, tuple(tau - rows.start for tau in rows.boundaries), keys)
        if pattern not in self._steps:
            step = StaticStep(self._decoder, memory, rows, keys, last=self._last)
            self._steps[pattern] = step, self._captured(step, rows) if self.captures else step.run
        return self._steps[pattern]

    def _captured(self, step: StaticStep, rows: Rows) -> Callable[[], None]:
        """What replays `step`, or runs it where capturing failed."""
        try:
            step.fill(step.tokens, rows)  # any tokens: what this writes is written again before it is read
            side = torch.cuda.Stream(self._decoder.device)
            side.wait_stream(torch.cuda.current_stream(self._decoder.device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    step.run()
            torch.cuda.current_stream(self._decoder.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                step.run()
            self._pool = graph.pool()
        except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
            self.captures = False
            self._memory._block = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._note(f"CUDA graphs cannot be captured here ({reason}); steps run without them")
            return step.run
        return graph.replay
