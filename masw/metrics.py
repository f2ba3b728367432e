"""Headline numbers of a trace. Pure: the command line, notebooks, report and app all print these.

Definitions. tokens per iteration = emitted tokens / target verify passes (with the correction or bonus token; `without_bonus`
counts accepted drafts only). Acceptance = accepted / drafted. Decode time is the sum of all rounds, from the end of prefill to the
last emitted token; end-to-end time is prefill + decode. TTFT = prefill + first round, as measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import median

from masw.trace import Trace

NOT_APPLICABLE = "—"  # in a table: a number that cannot exist in this row; None is one that was not measured


@dataclass(frozen=True)
class Summary:
    """All times in ms, all sizes in bytes; None where nothing of the kind happened."""

    tokens: list[int]
    finish: str
    rounds: int
    prompt_tokens: int
    prefill_ms: dict[str, float | None]  # draft, target
    ttft_ms: float | None
    decode_ms: float
    end_to_end_ms: float
    tokens_per_second: float | None  # decode only
    tokens_per_iteration: float | None
    tokens_per_iteration_without_bonus: float | None
    acceptance: float | None
    acceptance_by_position: list[float]  # share of blocks that reached and kept position 1, 2, ... of those that drafted it
    draft_ms: float | None  # a drafted token, median
    verify_ms: float | None  # a verify pass, median
    upkeep_ms: float | None  # a round's remainder, median
    draft_kv_bytes: int | None  # live at the end
    target_kv_bytes: int | None


def summarise(trace: Trace) -> Summary:
    """Works on partial traces too (a cancelled run, a cut file)."""
    emits, verifies, drafts = trace.of("emit"), trace.of("verify"), trace.of("draft")
    tokens = [token for e in emits for token in e.data["tokens"]]
    prefill = {
        who: sum(e.ms for e in trace.of("prefill", who)) if trace.of("prefill", who) else None for who in ("draft", "target")
    }
    decode_ms = sum(e.ms for e in emits)
    read = trace.of("prefill")
    prefill_ms = read[-1].at_ms if read else 0.0
    judged = blocks(trace)
    kept, drafted = sum(a for a, _ in judged), sum(d for _, d in judged)
    rounds = len(emits)
    end = trace.of("end")
    return Summary(
        tokens=tokens,
        finish=str(end[-1].data["reason"]) if end else "unfinished",
        rounds=rounds,
        prompt_tokens=int(trace.header.get("prompt_tokens", 0)),
        prefill_ms=prefill,
        ttft_ms=prefill_ms + emits[0].ms if emits else None,
        decode_ms=decode_ms,
        end_to_end_ms=prefill_ms + decode_ms,
        tokens_per_second=len(tokens) / decode_ms * 1e3 if decode_ms else None,
        tokens_per_iteration=len(tokens) / rounds if rounds else None,
        tokens_per_iteration_without_bonus=kept / rounds if rounds and judged else None,
        acceptance=kept / drafted if drafted else None,
        acceptance_by_position=_by_position(judged),
        draft_ms=median(e.ms for e in drafts) if drafts else None,
        verify_ms=median(e.ms for e in verifies) if verifies else None,
        upkeep_ms=median(e.ms for e in trace.of("upkeep")) if trace.of("upkeep") else None,
        draft_kv_bytes=_last_bytes(trace, "draft"),
        target_kv_bytes=_last_bytes(trace, "target"),
    )


def blocks(trace: Trace) -> list[tuple[int, int]]:
    """(accepted, drafted) of each judged block, in order."""
    whole = {e.round for e in trace.of("emit")}  # a cut file may end between a verdict and its tokens
    refused = {e.round: e.count for e in trace.of("reject")}
    return [(e.count, e.count + refused.get(e.round, 0)) for e in trace.of("accept") if e.round in whole]


def wilson(kept: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share `kept` / `n`, 95 % by default; (0, 1) without observations."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = kept / n, z * z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def _by_position(judged: list[tuple[int, int]]) -> list[float]:
    longest = max((drafted for _, drafted in judged), default=0)
    shares = []
    for position in range(1, longest + 1):
        reached = [accepted >= position for accepted, drafted in judged if drafted >= position]
        shares.append(sum(reached) / len(reached))
    return shares


def _last_bytes(trace: Trace, who: str) -> int | None:
    held = [e.bytes for e in trace.events if e.who == who and e.bytes]
    return held[-1] if held else None


def first_difference(ours: list[int], reference: list[int]) -> int | None:
    """Index of the first token that differs, None when one is a prefix of the other and neither stopped early by itself."""
    for index, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(reference) else min(len(ours), len(reference))
