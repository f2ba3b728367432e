"""The KV memory of one sequence: buffers, positions, rollback, bytes and events. What to keep is decided in `masw.policies`.

Legend: B batch, T raw tokens of a block, N rows of a block (raw + slots), K keys, G KV heads, D head dim, S sinks, W window,
R ring = W + rollback window, r stride.

Storage of a layer, contiguous so that attention reads one slice without a copy:

    [ ring: last R raw tokens, token j at j % R | sinks: S first raw tokens | selected | slots, append-only ... ]     compact
    [ raw token j at j, or each row at its place in the interleaved sequence ... ]                                    full

The slice ends at a multiple of STEP entries; entries that hold nothing are zero and masked.

The ring is longer than the window by the rollback window: a rejected block overwrites only entries that no accepted token
needs, so `rollback` is a length change. Which entries a row sees follows from stored stamps, never from the place of an entry.

Life of a memory: { begin -> extend for each layer -> end }*, then `rollback(n)` drops the last n raw tokens and `commit()` makes
the rest final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from masw.adaptor import Adaptor, SlotWeights
from masw.attention import FEW_ROWS, TiledMask, block_mask
from masw.config import MemoryShape, ModelConfig
from masw.errors import MaswError
from masw.policies import NEVER, Rows, evicted, expiry, materialise, position, read_until, visible

Listener = Callable[[str, int, int], None]  # (event kind, first position, count)

STEP = 64
"""Keys come in multiples of this on the CPU: a product of a new shape costs a millisecond there, once a forward, for its kernel."""


@dataclass(frozen=True)
class SlotRows:
    """The slot rows of a block."""

    adaptor: Adaptor | SlotWeights
    rows: Tensor  # [n] row of each slot in the interleaved block
    order: Tensor  # [N] gathers the interleaved block from (raw rows, then slot rows)
    sources: Tensor  # [B, n, r] raw tokens that each slot closes


@dataclass(frozen=True)
class Block:
    """One forward's rows, as the decoder needs them."""

    tokens: Tensor  # [B, T]
    positions: Tensor  # [N] RoPE positions
    mask: Tensor | TiledMask | None  # additive, see masw.attention; None: every key is seen
    causal: bool  # plain causal attention over the block alone (an empty full memory)
    raw_rows: Tensor | None  # [T] rows of the raw tokens; None: all rows are raw
    slots: SlotRows | None


@dataclass(frozen=True)
class Layout:
    """Where raw tokens and slots stand among the rows of a block."""

    raw: Tensor  # [T] rows of the raw tokens
    slots: Tensor  # [n] rows of the slots
    order: Tensor  # [N] gathers the block from (raw rows, then slot rows)


@dataclass
class _Pending:
    """A block between begin and end."""

    rows: Rows
    places: Tensor  # [N] storage index of each row
    staged: bool  # too wide for the ring: attention reads a joined copy, the survivors are written after it
    survivors: Tensor | None  # rows that are written, when staged
    live: int  # entries of storage in use after the block


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Host integers as a tensor; the host does not wait for the device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def layout_of(stamps: Sequence[int], device: torch.device) -> Layout:
    """The layout of rows with these stamps."""
    raw, slots = ([row for row, time in enumerate(stamps) if time % 2 == kind] for kind in (1, 0))
    order = [0] * len(stamps)
    for place, row in enumerate([*raw, *slots]):
        order[row] = place
    return Layout(*(on_device(rows, device) for rows in (raw, slots, order)))


def block_of(
    tokens: Tensor,
    rows: Rows,
    times: Tensor,
    mask: Tensor | TiledMask | None,
    causal: bool,
    adaptor: Adaptor | SlotWeights | None,
    history: Tensor,
    layout: Layout | None,
) -> Block:
    """Builds a Block. `history` [B, t] holds all raw tokens up to and including the block's (slots read theirs from it); `layout`
    is that of `times`, None where no slot is born. Nothing here makes the host wait."""
    if not rows.boundaries or adaptor is None:
        return Block(tokens, position(times), mask, causal, None, None)
    assert layout is not None
    closed = position(times.index_select(0, layout.slots))[:, None] + torch.arange(-rows.stride, 0, device=times.device)
    return Block(
        tokens,
        position(times),
        mask,
        causal,
        layout.raw,
        SlotRows(adaptor, layout.slots, layout.order, history[:, closed]),
    )


class Memory:
    """KV memory of B equally long sequences for one decoder. `shape` says what it keeps (`MemoryShape()` keeps everything)."""

    def __init__(
        self,
        config: ModelConfig,
        shape: MemoryShape,
        *,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        batch: int = 1,
        adaptor: Adaptor | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Allocates for `tokens` raw tokens; reading more grows the buffers."""
        if shape.stride is not None and adaptor is None:
            raise ValueError("slots need an adaptor")
        if shape.budget is not None and type(self) is Memory:
            raise ValueError("a memory with a budget selects entries: make a masw.snapkv.SnapMemory")
        self.config, self.shape, self.adaptor, self.listener = config, shape, adaptor, listener
        self.length = 0  # raw tokens held, accepted or not
        self.committed = 0  # raw tokens that are final
        self._furthest = 0  # raw tokens ever held: the ring lacks what was overwritten on the way there
        capacity = shape.capacity(tokens)
        # Zeros: attention reads entries that hold nothing; masked, they still have to be numbers, since 0 * NaN is NaN.
        self._kv = torch.zeros(config.layers, 2, batch, config.kv_heads, capacity, config.head_dim, device=device, dtype=dtype)
        self._born = torch.full((capacity,), NEVER, device=device)
        self._expires = torch.full((capacity,), -1, device=device)
        self._tokens = torch.empty(batch, max(tokens, 1), dtype=torch.long, device=device)
        self._block: _Pending | None = None

    # ---- sizes

    @property
    def ring(self) -> int:
        return 0 if self.shape.window is None else self.shape.window + self.shape.rollback

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all layers: 2 * layers * batch * G * D * itemsize."""
        layers, two, batch, heads, _, dim = self._kv.shape
        return layers * two * batch * heads * dim * self._kv.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self._kv.nbytes

    def prompt_ends(self, tokens: int) -> None:
        """Says that the prompt is the first `tokens` raw tokens. Memories that select entries by it do so when they are final."""

    @property
    def entries(self) -> int:
        """Entries that the accepted and drafted tokens occupy."""
        return self.shape.entries(self.length)

    @property
    def live_nbytes(self) -> int:
        return self.entries * self.entry_bytes

    # ---- a block

    def begin(self, tokens: Tensor) -> Block:
        """Opens a block of raw `tokens` [B, T]; due slots are put between them."""
        if self._block is not None:
            raise RuntimeError("begin called before the previous block ended")
        count = tokens.shape[1]
        if count == 0:
            raise ValueError("a block needs at least one token")
        rows = materialise(self.length, count, self.shape.stride)
        after = self.length + count
        self._reserve(after)
        self._tokens[:, self.length : after] = tokens
        stamps = rows.times()
        times = on_device(stamps, tokens.device)
        layout = layout_of(stamps, tokens.device) if rows.boundaries else None
        live = self._live(after)
        if self.placed(count):
            causal = tokens.is_cuda and self.shape.window is None and self.length == 0 and rows.total > FEW_ROWS
            masked = not causal and (self.shape.window is not None or rows.total > 1 or live > after)
            return self.enter(tokens, rows, times, layout, live, masked=masked, causal=causal)
        places, expires, before = self._places(times), expiry(times, self.shape), self._live(self.length)
        born, ends = torch.cat([self._born[:before], times]), torch.cat([self._expires[:before], expires])
        first, last = 2 * self.shape.sinks, 2 * (after - self.ring)  # stamps of raw tokens in between have no place in the ring
        lasting = [row for row, time in enumerate(stamps) if time % 2 == 0 or time <= first or time > last]
        survivors = on_device(lasting, tokens.device)
        self._born[places[survivors]], self._expires[places[survivors]] = times[survivors], expires[survivors]
        self._block = _Pending(rows, places, True, survivors, live)
        mask = block_mask(self._seen(times, born, ends), self.config.group, self._kv.dtype)
        return block_of(tokens, rows, times, mask, False, self.adaptor, self._tokens, layout)

    def placed(self, count: int) -> bool:
        """Whether each row of a block of `count` raw tokens has a place of its own; else the block is wider than the ring allows."""
        return not self.ring or self.length + count - self.committed <= self.shape.rollback

    def enter(
        self, tokens: Tensor, rows: Rows, times: Tensor, layout: Layout | None, live: int, *, masked: bool, causal: bool = False
    ) -> Block:
        """Opens a block whose rows have places, the first `live` entries being read. All that depends on where the sequence stands comes
        out of the tensor `times`: for the same pattern of rows the same work on the same shapes (masw.graphs replays it)."""
        places, expires = self._places(times), expiry(times, self.shape)
        self._born[places], self._expires[places] = times, expires
        self._block = _Pending(rows, places, False, None, live)
        mask = None
        if masked:
            mask = block_mask(self._seen(times, self._born[:live], self._expires[:live]), self.config.group, self._kv.dtype)
        return block_of(tokens, rows, times, mask, causal, self.adaptor, self._tokens, layout)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the block's k and v [B, N, G, D] of one layer; returns all keys and values [B, G, K, D] to attend to.

        The queries q [B, N, heads, D] are for memories that decide by attention what to keep; this one decides by position.
        """
        block = self._open()
        keys, values = self._kv[layer]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if not block.staged:
            keys.index_copy_(2, block.places, k)
            values.index_copy_(2, block.places, v)
            return keys[:, :, : block.live], values[:, :, : block.live]
        before = self._live(self.length)
        seen = torch.cat([keys[:, :, :before], k], dim=2), torch.cat([values[:, :, :before], v], dim=2)
        rows, places = block.survivors, block.places[block.survivors]
        keys[:, :, places], values[:, :, places] = k[:, :, rows], v[:, :, rows]
        return seen

    def end(self) -> None:
        """Closes the block: its tokens are held, not yet final."""
        block = self._open()
        self._block = None
        self.advance(block.rows)

    def advance(self, rows: Rows) -> None:
        """Counts `rows`, whose keys and values are written, as held."""
        self.length += rows.count
        self._furthest = max(self._furthest, self.length)
        if rows.boundaries:
            self._tell("materialise", rows.boundaries[0], len(rows.boundaries))

    def abandon(self) -> None:
        """Forgets a block that never reached its end. Only a full memory can: it has overwritten nothing for it."""
        if self._block is None:
            return
        if self.shape.window is not None:
            raise RuntimeError("a compact memory cannot abandon a block: make a new one")
        self._block = None
        self._forget(self.length)

    # ---- after a block

    def commit(self) -> None:
        """Makes all held tokens final; what leaves the window is gone for good."""
        before = evicted(self.committed, self.shape)
        gone = evicted(self.length, self.shape) - before
        self.committed = self.length
        if gone:
            self._tell("evict", self.shape.sinks + before, gone)

    def rollback(self, count: int) -> None:
        """Drops the last `count` raw tokens and the slots born among them. A full memory can drop any number."""
        if count == 0:
            return
        limit = self.length
        if self.shape.window is not None:
            limit -= max(self.committed, self._furthest - self.shape.rollback)
        if not 0 < count <= limit:
            raise ValueError(
                f"cannot roll back {count} tokens: {limit} of {self.length} may be dropped ({self.committed} are final)"
            )
        self.length -= count
        self.committed = min(self.committed, self.length)
        self._forget(self.length)
        self._tell("rollback", self.length, count)

    def tokens(self) -> Tensor:
        """Raw tokens held [B, t]."""
        return self._tokens[:, : self.length]

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """Content: stamps [n] in order and keys/values [layers, 2, B, G, n, D] of the entries that later rows may see."""
        live = self._live(self.length)
        born, expires = self._born[:live], self._expires[:live]
        held = ((born <= 2 * self.length) & (expires >= 2 * self.length)).nonzero().flatten()
        held = held[born[held].argsort()]
        return born[held], self._kv[:, :, :, :, held]

    def fork(self, listener: Listener | None = None) -> Self:
        """An independent copy, to continue the same prefix in several ways."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.listener = listener
        twin._kv, twin._born = self._kv.clone(), self._born.clone()
        twin._expires, twin._tokens = self._expires.clone(), self._tokens.clone()
        return twin

    @torch.no_grad()
    def fill(self, tokens: int, seed: int = 0) -> None:
        """Makes an empty memory hold `tokens` final raw tokens with noise for keys and values: for timing, where content does not count."""
        if self.length or self._block is not None:
            raise RuntimeError("only an empty memory can be filled")
        self._reserve(tokens)
        first = 0 if self.shape.window is None else max(self.shape.sinks, tokens - self.ring)
        sinks, slots = min(self.shape.sinks, tokens, first), range(1, self.shape.slots(tokens) + 1)
        stamps = [
            *range(1, 2 * sinks, 2),
            *range(2 * first + 1, 2 * tokens, 2),
            *(2 * m * (self.shape.stride or 0) for m in slots),
        ]
        times = torch.tensor(stamps, device=self._born.device)
        places = self._places(times)
        self._born[places], self._expires[places] = times, expiry(times, self.shape)
        generator = torch.Generator(device=self._kv.device).manual_seed(seed)
        self._kv.normal_(generator=generator)
        self._tokens.zero_()
        self.length = self.committed = self._furthest = tokens

    # ---- inside

    def _open(self) -> _Pending:
        if self._block is None:
            raise RuntimeError("no block is open: call begin first")
        return self._block

    def _seen(self, times: Tensor, born: Tensor, expires: Tensor) -> Tensor:
        """Boolean mask [N, K] of which entry each row reads."""
        reach = None if self.adaptor is None else self.adaptor.info.reach
        return visible(times, born, read_until(born, expires, reach))

    def _tell(self, kind: str, start: int, count: int) -> None:
        if self.listener is not None:
            self.listener(kind, start, count)

    def _live(self, length: int) -> int:
        """Entries of storage in use at `length` raw tokens, unused ring places included."""
        used = (length if self.shape.window is None else self._slots_at) + self.shape.slots(length)
        return used if self._kv.is_cuda else min(-(-used // STEP) * STEP, self._kv.shape[4])

    @property
    def _slots_at(self) -> int:
        """Place of the first slot in a compact memory."""
        return self.ring + self.shape.sinks + self.shape.selected

    def _places(self, times: Tensor) -> Tensor:
        raw = times // 2
        if self.shape.window is None:
            # Entry of the interleaved sequence: the raw tokens before it, and the slots before it.
            return raw if self.shape.stride is None else raw + (raw - 1 + times % 2) // self.shape.stride
        in_ring = torch.where(raw < self.shape.sinks, self.ring + raw, raw % self.ring)
        if self.shape.stride is None:
            return in_ring
        slot = self._slots_at + raw // self.shape.stride - 1
        return torch.where(times % 2 == 0, slot, in_ring)

    def _forget(self, length: int) -> None:
        """Empties every entry that is younger than `length` raw tokens and their slots."""
        self._born.masked_fill_(self._born > 2 * length, NEVER)

    def _reserve(self, tokens: int) -> None:
        """Grows the buffers by at least a half when `tokens` raw tokens would not fit."""
        if tokens > self._tokens.shape[1]:
            self._tokens = _grown(self._tokens, 1, max(tokens, self._tokens.shape[1] * 3 // 2))
        need = self.shape.capacity(tokens)
        have = self._kv.shape[4]
        if need <= have:
            return
        size = max(need, have * 3 // 2)
        try:
            self._kv = _grown(self._kv, 4, size)
        except RuntimeError as error:
            raise MaswError(f"no memory for {size} KV entries ({size * self.entry_bytes / 2**20:.0f} MiB): {error}") from None
        self._born = _grown(self._born, 0, size, NEVER)
        self._expires = _grown(self._expires, 0, size, -1)


def _grown(old: Tensor, dim: int, size: int, fill: int = 0) -> Tensor:
    shape = list(old.shape)
    shape[dim] = size
    new = old.new_full(shape, fill)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new
