"""Exact prompt entries, chosen by attention: SnapKV (arXiv 2404.14469), alone or beside memory slots.

The last OBSERVED queries of the prompt vote: for each layer and KV head, their softmax attention is summed over those queries and the
head's query group, max-pooled so that a key brings its neighbours along, and the most attended tokens between sinks and window are
kept for good. What is kept follows from the prompt alone, so nothing that is drafted or rolled back later can change it.

Legend: B batch, G KV heads, H query heads, D head dim, n queries, K keys, t prompt tokens, C candidates, m selected.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from masw.adaptor import Adaptor
from masw.config import MemoryShape, ModelConfig
from masw.memory import Block, Listener, Memory
from masw.policies import NEVER, expiry, materialise

OBSERVED = 32  # last prompt queries that vote (paper: 16 to 64)
POOL = 7  # width of the max-pooling over token positions (paper: 5 to 7)


def attended(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Attention that each key gets [B, G, K], summed over queries and query group. q [B, n, H, D]; k [B, G, K, D]; seen [n, K]."""
    batch, rows, _, dim = q.shape
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(batch, rows, k.shape[1], -1, dim).permute(0, 2, 3, 1, 4)  # [B, G, H / G, n, D]
    scores = (grouped.flatten(2, 3).to(exact) @ k.to(exact).mT).unflatten(2, (-1, rows)) / math.sqrt(dim)  # [B, G, H / G, n, K]
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).sum(dim=(2, 3))


def most_attended(votes: Tensor, count: int) -> Tensor:
    """Indices [B, G, count], ascending, of the candidates with the highest pooled `votes` [B, G, C].

    Pooling makes neighbours tie by design; among equals the earlier one wins, whatever the chunks the prompt was read in.
    """
    pooled = torch.nn.functional.max_pool1d(votes, POOL, stride=1, padding=POOL // 2)
    return pooled.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values


class SnapMemory(Memory):
    """A compact memory that reads the prompt whole, and keeps of it what its end attends to.

    Until the prompt is final it stands on a full memory (its slots included, if it has any), which holds what every row sees; then the
    chosen entries, sinks, window and slots move into the compact buffers and the full memory is freed. So bytes peak at
    `MemoryShape.peak`, at the end of the prompt, and fall to those of `MemoryShape.capacity`.

    All chosen entries are born when the prompt ends and never expire: every later row sees them, so that one count and one stamp serve
    all layers and heads, though each holds other tokens. Tokens still in the window are no candidates: nothing is held twice.
    """

    def __init__(self, config: ModelConfig, shape: MemoryShape, *, tokens: int, **options: Any) -> None:
        super().__init__(config, shape, tokens=tokens, **options)
        self.selection: Tensor | None = None  # [layers, B, G, m] positions of the chosen tokens, once chosen
        self._whole: Memory | None = None  # the prompt, while it goes on
        self._queries = self._kv.new_zeros(0)  # [layers, B, OBSERVED, H, D]; query of token j at j - (prompt - OBSERVED)
        self._rows: Tensor | None = None  # raw rows of the open block
        self._planned, self._options = tokens, options
        if shape.prompt == 0:
            self.selection = torch.empty(*self._heads, 0, dtype=torch.long, device=self._kv.device)

    def prompt_ends(self, tokens: int) -> None:
        """Plans the selection. Once it is made a longer prompt changes nothing: the rest of it is read like an answer."""
        if self.selection is not None or tokens == self.shape.prompt:
            return
        if self.length:
            raise ValueError(f"{self.length} tokens were read of a prompt that was said to end elsewhere: make a new memory")
        options = {**self._options, "listener": self.listener}
        self.__init__(self.config, replace(self.shape, prompt=tokens), tokens=self._planned, **options)  # type: ignore[misc]

    def take_prompt(self, reader: SnapMemory) -> None:
        """Takes the prompt that `reader` has read whole and not yet committed, as if it had been read here and committed.

        So one pass over a prompt serves many budgets. Both have the same stride and adaptor; `reader` stays as it is.
        """
        whole = reader._whole
        if whole is None or whole.length != reader.shape.prompt or self.length or self.selection is not None:
            raise ValueError("a prompt is taken by a new memory, from one that has read all of it and not committed")
        if reader.shape.stride != self.shape.stride or reader.adaptor is not self.adaptor:
            raise ValueError("a prompt that was read with other slots cannot be taken")
        self.prompt_ends(whole.length)
        self._whole, self._queries, self.length = whole, reader._queries, whole.length
        self.commit()

    def whole_prompt(self) -> Memory:
        """A copy of the full memory that the prompt is read with, while it is not yet committed whole."""
        if self._whole is None:
            raise RuntimeError("the prompt was not begun or is already selected from")
        twin = self._whole.fork()
        twin.commit()
        return twin

    @property
    def _heads(self) -> tuple[int, int, int]:
        layers, _, batch, heads, _, _ = self._kv.shape
        return layers, batch, heads

    # ---- sizes

    @property
    def nbytes(self) -> int:
        return super().nbytes + (self._whole.nbytes if self._whole is not None else 0)

    @property
    def entries(self) -> int:
        return super().entries if self._whole is None else self._whole.entries

    # ---- a block: of the prompt, or as in any compact memory

    def begin(self, tokens: Tensor) -> Block:
        if self.shape.prompt is None:
            raise RuntimeError("a memory that selects has to know where the prompt ends: call prompt_ends first")
        if self.selection is not None:
            return super().begin(tokens)
        if self.length + tokens.shape[1] > self.shape.prompt:
            raise ValueError(
                f"a block of {tokens.shape[1]} tokens at {self.length} crosses the end of the prompt at {self.shape.prompt}: "
                "read the prompt on its own, and commit it"
            )
        if self._whole is None:
            shape, options = MemoryShape(stride=self.shape.stride), {**self._options, "listener": self._tell}
            self._whole = Memory(self.config, shape, tokens=self.shape.prompt, **options)
            layers, batch, _ = self._heads
            self._queries = self._kv.new_zeros(layers, batch, OBSERVED, self.config.heads, self.config.head_dim)
        block = self._whole.begin(tokens)
        self._rows = block.raw_rows
        return block

    def placed(self, count: int) -> bool:
        return self.selection is not None and super().placed(count)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._whole is None:
            return super().extend(layer, q, k, v)
        assert self.shape.prompt is not None
        raw = q if self._rows is None else q.index_select(1, self._rows)
        start = self.length - (self.shape.prompt - OBSERVED)  # place of the block's first query
        if start + raw.shape[1] > 0:
            self._queries[layer, :, max(start, 0) : start + raw.shape[1]] = raw[:, max(-start, 0) :]
        return self._whole.extend(layer, q, k, v)

    def end(self) -> None:
        if self._whole is None:
            return super().end()
        self._whole.end()
        self.length = self._whole.length

    def abandon(self) -> None:
        if self._whole is None:
            return super().abandon()
        self._whole.abandon()

    # ---- after a block

    def commit(self) -> None:
        if self._whole is not None:
            self._whole.commit()
            if self._whole.committed != self.shape.prompt:
                self.committed = self._whole.committed
                return
            self._select(self._whole)
            self._whole = None
            self._queries = self._queries.new_zeros(0)
            if self.shape.selected:
                self._tell("select", self.shape.sinks, self.shape.selected)
        super().commit()

    def rollback(self, count: int) -> None:
        if self._whole is None:
            return super().rollback(count)
        self._whole.rollback(count)
        self.length, self.committed = self._whole.length, self._whole.committed

    def tokens(self) -> Tensor:
        return super().tokens() if self._whole is None else self._whole.tokens()

    def snapshot(self) -> tuple[Tensor, Tensor]:
        return super().snapshot() if self._whole is None else self._whole.snapshot()

    def fork(self, listener: Listener | None = None) -> SnapMemory:
        twin = super().fork(listener)
        twin._queries = self._queries.clone()
        twin._whole = None if self._whole is None else self._whole.fork(twin._tell)
        return twin

    # ---- inside

    def _select(self, whole: Memory) -> None:
        """Fills the compact buffers from the prompt."""
        shape, total, device = self.shape, whole.length, self._kv.device
        assert shape.window is not None
        self._reserve(total)
        # Sinks, window and slots go where they would be had they come one by one.
        raw = (*range(min(shape.sinks, total)), *range(max(shape.sinks, total - shape.window), total))
        slots = materialise(0, total, shape.stride).boundaries
        times = torch.tensor([*(2 * j + 1 for j in raw), *(2 * tau for tau in slots)], device=device)
        places = self._places(times)
        self._kv[:, :, :, :, places] = whole._kv[:, :, :, :, whole._places(times)]
        self._born[places], self._expires[places] = times, expiry(times, shape)
        self._tokens[:, :total] = whole.tokens()
        self.length = self._furthest = total

        first, last = self.ring + shape.sinks, self._slots_at
        self._born[first:last], self._expires[first:last] = 2 * total, NEVER
        self.selection = torch.empty(*self._heads, shape.selected, dtype=torch.long, device=device)
        if not shape.selected:
            return
        voters = torch.arange(max(0, total - OBSERVED), total, device=device)
        born = whole._born[: whole._live(total)]
        seen = born <= 2 * voters[:, None] + 1  # what each voter's own row saw: the prompt up to itself
        candidates = torch.arange(shape.sinks, total - shape.window, device=device)
        entries = whole._places(2 * candidates + 1)
        for layer, (keys, values) in enumerate(whole._kv):
            queries = self._queries[layer, :, OBSERVED - len(voters) :]
            votes = attended(queries, keys[:, :, : len(born)], seen)[..., entries]  # [B, G, C]
            chosen = most_attended(votes, shape.selected)
            self.selection[layer] = candidates[chosen]
            index = entries[chosen][..., None].expand(-1, -1, -1, keys.shape[-1])  # [B, G, m, D]
            self._kv[layer, 0, :, :, first:last] = keys.gather(2, index)
            self._kv[layer, 1, :, :, first:last] = values.gather(2, index)


def draft_memory(
    config: ModelConfig,
    shape: MemoryShape,
    *,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    batch: int = 1,
    adaptor: Adaptor | None = None,
    listener: Listener | None = None,
) -> Memory:
    """The memory of a shape, for whatever a draft is to remember. Arguments as of `Memory`."""
    kind = Memory if shape.budget is None else SnapMemory
    return kind(config, shape, tokens=tokens, device=device, dtype=dtype, batch=batch, adaptor=adaptor, listener=listener)
