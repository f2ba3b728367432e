"""Demonstrations of the mechanism on a loaded model: what the notebooks show live, and what scripts/record_explained.py records.

Legend: N rows (raw tokens, then slots) of a dense pass, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from masw import cost
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape, ModelConfig
from masw.decoder import Decoder
from masw.dense import DenseMemory
from masw.errors import UsageError
from masw.linear import dense
from masw.memory import Memory
from masw.policies import materialise, visible
from masw.verify import accept, accept_probability, residual


class _AttentionProbe(DenseMemory):
    """A dense pass that adds up what every row attends to, over layers and heads."""

    def __init__(self, decoder: Decoder, shape: MemoryShape, adaptor: Adaptor, tokens: int) -> None:
        super().__init__(shape, dtype=decoder.dtype, group=decoder.config.group, adaptor=adaptor)
        rows = materialise(0, tokens, shape.stride)
        self.times = torch.tensor([*range(1, 2 * tokens, 2), *(2 * tau for tau in rows.boundaries)])
        self.seen = visible(self.times, self.times, self.ends(self.times))
        self.total = torch.zeros(len(self.times), len(self.times))
        self.layers = 0

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        keys = k[0].float().repeat_interleave(group, dim=1)  # [N, H, D]
        scores = torch.einsum("nhd,khd->hnk", q[0].float(), keys) / math.sqrt(q.shape[-1])
        self.total += scores.masked_fill(~self.seen, float("-inf")).softmax(-1).mean(0)
        self.layers += 1
        return super().extend(layer, q, k, v)


@torch.no_grad()
def slot_attention(decoder: Decoder, adaptor: Adaptor, tokens: Sequence[int], shape: MemoryShape, slot: int) -> dict[str, Any]:
    """Profile for `masw.figures.slot_attention`: what slot number `slot` attends to and which raw tokens attend to it; means over
    layers and heads. One dense pass over `tokens`."""
    assert shape.stride is not None
    probe = _AttentionProbe(decoder, shape, adaptor, len(tokens))
    decoder.forward(torch.tensor([list(tokens)], device=decoder.device), probe)
    mean, tau, row = probe.total / probe.layers, slot * shape.stride, len(tokens) + slot - 1
    keys = []
    for column in probe.seen[row].nonzero().flatten().tolist():
        is_slot, position = column >= len(tokens), int(probe.times[column]) // 2
        kind = "slot" if is_slot else "sink" if position < shape.sinks else "window"
        name = f"g{position // shape.stride}" if is_slot else f"x{position}"
        keys.append({"name": name, "kind": kind, "position": position, "share": round(float(mean[row, column]), 6)})
    later = [{"position": i, "share": round(float(mean[i, row]), 6)} for i in range(tau, len(tokens))]
    return {"slot": slot, "position": tau, "stride": shape.stride, "keys": keys, "later": later}


@torch.no_grad()
def projection_distance(decoder: Decoder, adaptor: Adaptor) -> list[dict[str, Any]]:
    """Rows {layer, key, value}: Frobenius norm of (mirrored - frozen) over that of the frozen projection."""
    c, rows = decoder.config, []
    for index, layer in enumerate(decoder.weights.layers):
        frozen = dense(layer.qkv)[c.q_width :].float().chunk(2)
        ours = adaptor.kv[index].float().chunk(2)
        far = [float((a - b).norm() / b.norm()) for a, b in zip(ours, frozen, strict=True)]
        rows.append({"layer": index, "key": round(far[0], 6), "value": round(far[1], 6)})
    return rows


@dataclass(frozen=True)
class RolledBack:
    """What a rejection did to a memory."""

    before: dict[str, int]  # tokens, slots, entries: once the pending token was read
    drafted: dict[str, int]  # after the whole block
    after: dict[str, int]  # after the rollback
    dropped_slots: int
    identical: bool  # stamps, keys and values equal those of a memory that never saw the rejected tokens, bit for bit
    continues: bool  # and so do the logits of the next token

    def rows(self) -> list[dict[str, Any]]:
        return [{"moment": name, **getattr(self, name)} for name in ("before", "drafted", "after")]


@torch.no_grad()
def roll_back(
    decoder: Decoder, shape: MemoryShape, prompt: Sequence[int], block: Sequence[int], kept: int, adaptor: Adaptor | None = None
) -> RolledBack:
    """Reads `prompt`, then a drafted `block` token by token, rejects all but its first `kept` tokens, and compares with a memory that
    read only what was kept. Both read in the same steps, so nothing may differ by a single bit."""
    if shape.stride is not None and adaptor is None:
        adaptor = Adaptor.copied(decoder, AdaptorInfo("demonstration", ()))
    total = len(prompt) + len(block) + 1

    def reader() -> Memory:
        memory = Memory(
            decoder.config,
            shape,
            tokens=total,
            device=decoder.device,
            dtype=decoder.dtype,
            adaptor=adaptor if shape.stride else None,
        )
        for start in range(0, len(prompt), 64):
            _read(decoder, memory, prompt[start : start + 64])
            memory.commit()
        return memory

    ours, theirs = reader(), reader()
    before = _count(ours)
    for i, token in enumerate(block):
        _read(decoder, ours, [token])
        if i < kept:
            _read(decoder, theirs, [token])
    drafted = _count(ours)
    ours.rollback(len(block) - kept)
    after = _count(ours)
    a, b = ours.snapshot(), theirs.snapshot()
    same = all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    follow = [_read(decoder, memory, [block[-1]]) for memory in (ours, theirs)]
    return RolledBack(before, drafted, after, drafted["slots"] - after["slots"], same, torch.equal(*follow))


def _read(decoder: Decoder, memory: Memory, tokens: Sequence[int]) -> Tensor:
    return decoder.logits(decoder.forward(torch.tensor([list(tokens)], device=decoder.device), memory)[:, -1])


def _count(memory: Memory) -> dict[str, int]:
    return {"tokens": memory.length, "slots": memory.shape.slots(memory.length), "entries": memory.entries}


def check_distributions(p: Sequence[float], q: Sequence[float]) -> None:
    """Raises UsageError unless p and q are distributions over one toy vocabulary of 2 to 26 tokens."""
    if len(p) != len(q) or not 2 <= len(p) <= 26:
        raise UsageError(f"p and q need as many values as each other, 2 to 26, not {len(p)} and {len(q)}")
    for name, values in (("p", p), ("q", q)):
        if min(values) < 0 or abs(sum(values) - 1) > 1e-9:
            raise UsageError(f"{name} must be probabilities that add up to 1, not {list(values)} with the sum {sum(values):g}")


def accept_rows(p: Sequence[float], q: Sequence[float], draws: int = 20_000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows for `masw.figures.accept_rule`: what one round emits on a toy vocabulary A, B, C, ...

    emitted: the accept rule, exactly. broken: the same rule with its correction drawn from p instead of the residual, exactly.
    drawn: share of `draws` seeded runs of `masw.verify.accept` itself. Raises UsageError for what are no distributions.
    """
    check_distributions(p, q)
    target, draft = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    kept = draft * accept_probability(target, draft)
    refused = 1 - kept.sum()
    emitted, broken = kept + refused * residual(target, draft), kept + refused * target
    random, counts = Random(seed), [0] * len(p)
    both = torch.stack((target, target))
    for _ in range(draws):
        token = _pick(q, random.random())
        verdict = accept(both, draft[None], [token], [random.random(), random.random()])
        counts[token if verdict.accepted else verdict.token] += 1
    return [
        {"token": chr(65 + i), "p": p[i], "q": q[i], "emitted": float(emitted[i]), "broken": float(broken[i]),
         "drawn": counts[i] / draws, "n": draws}
        for i in range(len(p))
    ]  # fmt: skip


def chi_square(rows: Sequence[Mapping[str, Any]]) -> tuple[float, int, float]:
    """Of the drawn shares against p: the statistic, its degrees of freedom (tokens that p allows, less one), and the share of seeds that
    would give as much or more."""
    possible = [row for row in rows if row["p"] > 0]
    statistic = sum((row["drawn"] - row["p"]) ** 2 / row["p"] for row in possible) * rows[0]["n"]
    freedom = len(possible) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return statistic, freedom, float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


def _pick(weights: Sequence[float], u: float) -> int:
    total = 0.0
    for i, weight in enumerate(weights):
        total += weight
        if u < total:
            return i
    return len(weights) - 1


def total_variation(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Half the sum of |row[key] - row["p"]|."""
    return sum(abs(row[key] - row["p"]) for row in rows) / 2


def buffers(
    config: ModelConfig, shapes: Mapping[str, MemoryShape], contexts: Sequence[int], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Rows for `masw.figures.memory_by_context`, with the bytes of really allocated buffers beside the formula. Costs no time: fresh
    pages are not touched."""
    entry, rows = cost.kv_entry_bytes(config, dtype.itemsize), []
    for name, shape in shapes.items():
        adaptor = Adaptor(config, AdaptorInfo("size", ()), dtype=dtype, device=torch.device("meta")) if shape.stride else None
        for tokens in contexts:
            memory = Memory(config, shape, tokens=tokens, device=torch.device("cpu"), dtype=dtype, adaptor=adaptor)
            predicted = shape.capacity(tokens) * entry
            rows.append(
                {"method": name, "context": tokens, "entries": shape.capacity(tokens), "predicted_bytes": predicted,
                 "share of full": shape.capacity(tokens) / tokens, "measured_bytes": memory.nbytes}
            )  # fmt: skip
            del memory
    return rows


@torch.no_grad()
def step_times(
    decoder: Decoder,
    shapes: Mapping[str, MemoryShape],
    contexts: Sequence[int],
    *,
    bandwidth: float,
    repeats: int = 9,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows for `masw.figures.latency_by_context`: a decode step after reading `contexts` random tokens, measured, beside the floor of
    the bytes it reads at `bandwidth` bytes/s. Slots use a plain copy of the projections: times do not depend on what they say."""
    rows, random = [], Random(seed)
    adaptor = Adaptor.copied(decoder, AdaptorInfo("timing", ()))
    for name, shape in shapes.items():
        longest = max(contexts) + repeats + 2
        memory = Memory(
            decoder.config,
            shape,
            tokens=longest,
            device=decoder.device,
            dtype=decoder.dtype,
            adaptor=adaptor if shape.stride else None,
        )
        for context in sorted(contexts):
            while memory.length < context:
                count = min(512, context - memory.length)
                decoder.forward(torch.tensor([[random.randrange(decoder.config.vocab) for _ in range(count)]]), memory)
                memory.commit()
            times = []
            for i in range(repeats + 1):
                started = time.perf_counter()
                _read(decoder, memory, [i])
                times.append((time.perf_counter() - started) * 1e3)
                memory.rollback(1)
            cuts = quantiles(times[1:], n=10, method="inclusive")
            floor = cost.step_bytes(decoder.config, shape, context, decoder.dtype.itemsize) / bandwidth * 1e3
            rows.append(
                {"method": name, "context": context, "ms": round(median(times[1:]), 3), "p10_ms": round(cuts[0], 3),
                 "p90_ms": round(cuts[-1], 3), "n": repeats, "floor_ms": round(floor, 3)}
            )  # fmt: skip
    return rows
