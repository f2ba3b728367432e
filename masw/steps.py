"""Latency and memory of single passes of a model shape with random weights, beside their floors: draft steps of each memory, and the
target's verify pass. Nothing is prefilled: memories are filled with noise, since latency does not depend on content.

A draft step is one forward of one row a sequence with its logits, on a committed memory. Samples are means over stretches of `stride`
steps, so that each has as many slot births as any other; a verify pass is a sample of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

import torch

from masw import cost
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape, ModelConfig
from masw.decoder import Decoder
from masw.devices import peak_bytes, reset_peak
from masw.errors import UsageError, plain_words
from masw.graphs import Steps
from masw.memory import Memory
from masw.methods import METHODS, MemoryOptions
from masw.quantise import quantised
from masw.weights import random_weights
from masw.zoo import free_bytes

VERIFY = "verify"
KINDS = ("full", "window", "masw", VERIFY)  # rows of METHODS whose memory decides by position, and the target's pass
SEED = 20


@dataclass(frozen=True)
class Plan:
    """What one row measures."""

    shape: str
    kind: str
    context: int
    batch: int
    rows: int  # a sequence: 1, or gamma + 1
    memory: MemoryShape
    weights: str = "plain"  # what a draft's step reads: plain | int8 | int4; the target's pass is always plain
    graphs: bool = False  # through static shapes, on CUDA as a replayed graph (masw.graphs)


@dataclass(frozen=True)
class StepRow:
    """Times in ms, sizes in bytes; None where it was not measured, and `error` says why."""

    shape: str
    kind: str
    context: int
    batch: int
    rows: int
    dtype: str
    weights: str  # plain: of that dtype; or int8 | int4
    graphs: str | None  # captured: a replayed CUDA graph; static: the same shapes without one; None: the ordinary path
    ms: float | None
    ms_quartiles: tuple[float, float] | None
    floor_ms: float
    over_floor: float | None  # ms / floor_ms
    read_bytes: int  # what a pass reads, by the formula
    flops: int
    bytes_ms: float  # read_bytes / measured bandwidth
    flops_ms: float  # flops / measured product rate
    kv_bytes: int | None  # allocated
    kv_predicted_bytes: int
    peak_memory_bytes: int | None
    needed_bytes: int  # by the formula: weights, memory, adaptor, activations
    n: int  # samples
    error: str | None = None


def plans(
    shapes: Sequence[str],
    kinds: Sequence[str],
    contexts: Sequence[int],
    batches: Sequence[int],
    options: MemoryOptions,
    gamma: int,
    weights: str = "plain",
    graphs: bool = False,
) -> list[Plan]:
    """Every combination; `weights` are those of draft steps. `graphs`: each also through static shapes, beside it.

    Raises UsageError for a kind that is no step.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"'{kind}' is no step that can be timed alone; use some of {', '.join(KINDS)}")
    found = []
    for shape in shapes:
        for context in contexts:
            for batch in batches:
                for kind in kinds:
                    memory = MemoryShape() if kind == VERIFY else METHODS[kind].memory(options)
                    assert memory is not None
                    memory.check_block(gamma)
                    rows, read = (gamma + 1, "plain") if kind == VERIFY else (1, weights)
                    ways = (False, True)[: 1 + graphs]
                    found += [Plan(shape, kind, context, batch, rows, memory, read, static) for static in ways]
    return found


def needed(plan: Plan, config: ModelConfig, dtype: torch.dtype, repeats: int, stride: int) -> int:
    return cost.packed_bytes(config, plan.weights) + cost.bench_bytes(
        config, plan.memory, plan.context + _room(plan, repeats, stride), dtype.itemsize, rows=plan.rows, batch=plan.batch
    )


def check_fit(
    chosen: Sequence[Plan], configs: dict[str, ModelConfig], device: torch.device, dtype: torch.dtype, repeats: int, stride: int
) -> None:
    """Refuses a run of which any row cannot fit, with the estimate of the largest."""
    free = free_bytes(device)
    plan = max(chosen, key=lambda p: needed(p, configs[p.shape], dtype, repeats, stride))
    need = needed(plan, configs[plan.shape], dtype, repeats, stride)
    if need > free:
        raise UsageError(
            f"{plan.shape} {plan.kind} at {plan.context:,} tokens and batch {plan.batch} needs about {need / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; lower --contexts or --batch, take a smaller --shape, or add --skip-too-large"
        )


def run(
    chosen: Sequence[Plan],
    configs: dict[str, ModelConfig],
    device: torch.device,
    dtype: torch.dtype,
    rates: cost.Rates,
    *,
    stride: int,
    repeats: int,
    limit_s: float = 0.0,
) -> Iterator[StepRow]:
    """Measures plan after plan, one model in memory at a time; what does not fit or fails becomes a row with its reason.

    `limit_s`: no plan but the first begins later than this many seconds after the start; 0: no limit.
    """
    loaded: tuple[str, Decoder] | None = None
    start = time.monotonic()
    for number, plan in enumerate(chosen):
        if number and limit_s and time.monotonic() - start >= limit_s:
            return
        config = configs[plan.shape]
        need = needed(plan, config, dtype, repeats, stride)
        try:
            held = 0
            if loaded is not None and loaded[0] == plan.shape:
                held = loaded[1].nbytes
            else:
                loaded = None
                _collect(device)
            if need - held > (free := free_bytes(device)):
                raise UsageError(f"needs about {need / 2**30:.1f} GiB, {(free + held) / 2**30:.1f} GiB are there")
            if loaded is None:
                loaded = plan.shape, Decoder(config, random_weights(config, SEED, device, dtype))
            yield _measure(plan, loaded[1], rates, need, stride, repeats)
        except Exception as error:
            yield _row(plan, config, dtype, rates, need, error=plain_words(error))
        _collect(device)


@torch.no_grad()
def _measure(plan: Plan, decoder: Decoder, rates: cost.Rates, need: int, stride: int, repeats: int) -> StepRow:
    device, dtype, config = decoder.device, decoder.dtype, decoder.config
    reset_peak(device)
    adaptor = Adaptor.copied(decoder, AdaptorInfo(plan.shape, ())) if plan.memory.stride else None
    memory = Memory(
        config, plan.memory, tokens=plan.context + _room(plan, repeats, stride), device=device, dtype=dtype, batch=plan.batch, adaptor=adaptor
    )  # fmt: skip
    memory.fill(plan.context, SEED)
    tokens = torch.randint(0, config.vocab, (plan.batch, plan.rows), device=device)
    if plan.weights != "plain":
        decoder = quantised(decoder, plan.weights)

    static = Steps(decoder, memory, last=plan.kind != VERIFY) if plan.graphs else None

    def read() -> None:
        if static is not None:
            static(tokens)
            return
        hidden = decoder.forward(tokens, memory)
        decoder.logits(hidden if plan.kind == VERIFY else hidden[:, -1])

    def draft() -> None:
        read()
        memory.commit()

    def verify() -> None:
        read()
        memory.rollback(plan.rows)

    work, steps = (verify, 1) if plan.kind == VERIFY else (draft, stride)
    samples = _timed(work, steps, repeats, device)
    row = _row(plan, config, dtype, rates, need, samples, memory.nbytes, peak_bytes(device))
    return row if static is None else replace(row, graphs="captured" if static.captures else "static")


def _timed(work: Callable[[], None], steps: int, repeats: int, device: torch.device) -> list[float]:
    """Means over stretches of `steps` calls, in ms; the first stretch warms up. The device is waited for at the end of a stretch only."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() * 1e3

    samples = []
    for _ in range(repeats + 1):
        start = now()
        for _ in range(steps):
            work()
        samples.append((now() - start) / steps)
    return samples[1:]


def _room(plan: Plan, repeats: int, stride: int) -> int:
    """Tokens that a measurement adds."""
    return plan.rows if plan.kind == VERIFY else stride * (repeats + 1)


def _row(
    plan: Plan,
    config: ModelConfig,
    dtype: torch.dtype,
    rates: cost.Rates,
    need: int,
    samples: Sequence[float] = (),
    kv: int | None = None,
    peak: int | None = None,
    error: str | None = None,
) -> StepRow:
    size, batch = dtype.itemsize, plan.batch
    read = cost.step_bytes(config, plan.memory, plan.context, size, batch, plan.weights)
    flops = cost.forward_flops(config, plan.rows * batch, plan.memory.entries(plan.context))
    floor = cost.pass_ms(config, plan.memory, plan.context, size, rates, rows=plan.rows, batch=batch, kind=plan.weights)
    ms = median(samples) if samples else None
    low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (0.0, 0.0, 0.0)
    return StepRow(
        plan.shape,
        plan.kind,
        plan.context,
        batch,
        plan.rows,
        str(dtype).removeprefix("torch."),
        plan.weights,
        "static" if plan.graphs else None,
        ms,
        (low, high) if len(samples) > 1 else None,
        floor,
        None if ms is None else ms / floor,
        read,
        flops,
        1e3 * read / rates.bytes_per_s,
        1e3 * flops / rates.flops_per_s,
        kv,
        cost.kv_bytes(config, plan.memory, plan.context, size, batch),
        peak,
        need,
        len(samples),
        error,
    )


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
