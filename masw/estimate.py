"""What a run will take, before it runs. Predicted from shapes and this machine's rates, or from the last run of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from masw import cost
from masw.config import MemoryShape, ModelConfig
from masw.metrics import summarise
from masw.trace import Trace


@dataclass(frozen=True)
class Rates:
    """Rates of a run that was measured, in ms; None where nothing of the kind happened."""

    target_prefill_ms: float | None  # a prompt token
    draft_prefill_ms: float | None
    decode_ms: float | None  # an emitted token


@dataclass(frozen=True)
class Estimate:
    """Seconds and bytes of a run. `low_s` and `high_s` are equal when they come from a measured run."""

    prefill_s: float
    decode_low_s: float  # every drafted token is accepted
    decode_high_s: float  # none is
    run_bytes: int  # KV caches and activations, beside the weights
    weights_bytes: int
    measured: bool  # rates of an earlier run here, not the formula

    @property
    def low_s(self) -> float:
        return self.prefill_s + self.decode_low_s

    @property
    def high_s(self) -> float:
        return self.prefill_s + self.decode_high_s


def rates(trace: Trace) -> Rates:
    """What a finished run says about the next one."""
    s = summarise(trace)

    def per_token(who: str) -> float | None:
        read = trace.of("prefill", who)
        tokens = sum(e.count for e in read)
        return sum(e.ms for e in read) / tokens if tokens else None

    return Rates(per_token("target"), per_token("draft"), s.decode_ms / len(s.tokens) if s.tokens else None)


def estimate(
    target: ModelConfig,
    draft: ModelConfig,
    shape: MemoryShape | None,
    *,
    prompt: int,
    new_tokens: int,
    gamma: int,
    drafts: bool,
    itemsize: int,
    shared: bool,
    machine: cost.Rates,
    known: Rates | None = None,
    read_already: int = 0,
) -> Estimate:
    """`shape`: the draft's memory, None when no model drafts. `known`: rates of an earlier run of this pair and method.
    `read_already`: prompt tokens whose target KV is there."""
    total = prompt + new_tokens
    known = known or Rates(None, None, None)
    to_read = max(0, prompt - read_already)
    target_ms = known.target_prefill_ms
    prefill_s = (
        target_ms * to_read / 1e3
        if target_ms is not None
        else cost.forward_flops(target, to_read, (prompt + read_already) // 2) / machine.flops_per_s
    )
    if shape is not None:
        keys = min(prompt // 2, shape.entries(prompt))
        prefill_s += (
            known.draft_prefill_ms * prompt / 1e3
            if known.draft_prefill_ms is not None
            else cost.forward_flops(draft, prompt, keys) / machine.flops_per_s
        )
    step_s = cost.step_bytes(target, MemoryShape(), total, itemsize) / machine.bytes_per_s
    draft_s = 0.0 if shape is None else cost.step_bytes(draft, shape, total, itemsize) / machine.bytes_per_s
    round_s = step_s + gamma * draft_s
    weights = cost.weight_bytes(target, itemsize) + (0 if shared or shape is None else cost.weight_bytes(draft, itemsize))
    low, high = (new_tokens * round_s / (gamma + 1 if drafts else 1), new_tokens * round_s)
    if known.decode_ms is not None:
        low = high = new_tokens * known.decode_ms / 1e3
    need = cost.run_bytes(target, draft, shape, total, itemsize, shared=shared)
    return Estimate(prefill_s, low, high, need - weights, weights, known.decode_ms is not None and target_ms is not None)


def together(runs: Sequence[Estimate]) -> Estimate:
    """Several runs one after the other: times add up, and the largest one's memory is needed."""
    return Estimate(
        sum(e.prefill_s for e in runs),
        sum(e.decode_low_s for e in runs),
        sum(e.decode_high_s for e in runs),
        max(e.run_bytes for e in runs),
        max(e.weights_bytes for e in runs),
        all(e.measured for e in runs),
    )
