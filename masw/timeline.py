"""What a trace says happened, step by step: the state of the draft's memory, and the fate of every token. Pure, no torch.

A *step* is what changes the draft's memory: a prefill chunk, a draft forward (or a copied token), or the settling of a round (accept
rule, rollback, commit). Works on partial traces: what was not recorded is not invented.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from masw.config import MemoryShape
from masw.trace import Event, Trace

STATES = ("sink", "slot", "selected", "window", "tentative", "evicted")  # of a cache entry
FATES = ("prompt", "accepted", "rejected", "correction", "bonus", "target", "pending")  # of a token


@dataclass(frozen=True)
class Step:
    """The draft's memory after one step."""

    index: int
    kind: str  # prefill | draft | settle
    round: int
    at_ms: float
    tokens: int  # raw tokens held, accepted or not
    final: int  # of them accepted for good
    slots: int  # slots held
    evicted: int  # raw tokens that left the window for good
    selected: int  # exact prompt entries that were chosen to stay
    bytes: int  # KV bytes held


@dataclass(frozen=True)
class Token:
    """One drafted or emitted token."""

    step: int  # at which it was proposed (drafts) or emitted (corrections, bonus and target tokens)
    round: int
    position: int
    id: int
    fate: str  # see FATES
    p: float | None = None  # the target's probability
    q: float | None = None  # the draft's

    @property
    def accept(self) -> float | None:
        """min(1, p / q): the probability with which the sampled rule keeps it."""
        if self.p is None or self.q is None:
            return None
        return min(1.0, self.p / self.q) if self.q > 0 else 1.0


def shape_of(trace: Trace) -> MemoryShape | None:
    """The draft's memory; None when no model drafts. Fields of later methods that a shape does not have are left out."""
    raw = trace.header.get("memory")
    known = {f.name for f in fields(MemoryShape)}
    return None if raw is None else MemoryShape(**{k: v for k, v in raw.items() if k in known})


def entry_bytes(trace: Trace) -> int | None:
    """Bytes of one draft KV entry over all layers, from the header's prediction for a full cache."""
    kv, settings = trace.header.get("draft_kv"), trace.header.get("settings", {})
    total = int(trace.header.get("prompt_tokens", 0)) + int(settings.get("max_new_tokens", 0))
    return round(kv["full_bytes"] / total) if kv and total else None


def steps(trace: Trace) -> list[Step]:
    """Every step in order. Counts come from the events alone: prefill + read - rollback; materialise; select; evict."""
    found: list[Step] = []
    shape = shape_of(trace)
    tokens = final = slots = evicted = selected = held = 0
    drafting = False  # a token of this round has been proposed: what was read before it is final
    for e in trace.events:
        if e.who == "draft":
            held = e.bytes if e.kind in ("prefill", "materialise", "select", "evict", "draft", "rollback") and e.bytes else held
            if e.kind == "materialise":
                slots += e.count
            elif e.kind == "evict":
                evicted += e.count
            elif e.kind == "select":
                selected += e.count
            elif e.kind == "rollback":
                tokens -= e.count
                slots = shape.slots(tokens) if shape else 0
            elif e.kind == "prefill":
                tokens += e.count
                final = tokens
            elif e.kind == "draft":
                tokens += int(e.data.get("read", 0))
                final = final if drafting else tokens
                drafting = True
        elif e.kind == "emit":
            drafting, final = False, tokens
        kind = {"prefill": "prefill", "draft": "draft"}.get(e.kind) if e.who == "draft" else None
        kind = "settle" if e.kind == "emit" else kind
        if kind:
            found.append(Step(len(found), kind, e.round, e.at_ms, tokens, final, slots, evicted, selected, held))
    return found


def raw_state(token: int, step: Step, shape: MemoryShape) -> str | None:
    """State of raw token `token`'s entry after `step`; None before it was written (or after it was rolled back)."""
    if token >= step.tokens:
        return None
    if token >= step.final:
        return "tentative"
    if shape.window is None:
        return "window"
    if token < shape.sinks:
        return "sink"
    return "evicted" if token < shape.sinks + step.evicted else "window"


def slot_state(number: int, step: Step, shape: MemoryShape) -> str | None:
    """State of slot `number` = 1, 2, ... after `step`."""
    if number > step.slots or not shape.stride:
        return None
    return "tentative" if number * shape.stride > step.final else "slot"


def sees(query: int, slot_query: bool, key: int, slot_key: bool, shape: MemoryShape) -> bool:
    """The visibility table (arXiv 2608.30252, section 3): whether a row at position `query` sees the entry at position `key`.

    Positions: i for raw x_i, tau for a slot. `masw.policies.visible` computes the same from stamps, for tensors.
    """
    if slot_key:
        return key <= query
    if key > query or (slot_query and key == query):
        return False
    if shape.window is None or key < shape.sinks:
        return True
    return key >= query - shape.window if slot_query else key > query - shape.window


def interleaved(tokens: int, shape: MemoryShape) -> list[tuple[int, bool]]:
    """Rows of `tokens` raw tokens in order: (position, is a slot)."""
    rows: list[tuple[int, bool]] = []
    for i in range(tokens):
        rows.append((i, False))
        if shape.stride and (i + 1) % shape.stride == 0:
            rows.append((i + 1, True))
    return rows


def state_at(position: int, is_slot: bool, held: int, shape: MemoryShape) -> str:
    """State of an entry once `held` raw tokens are accepted, from the shape alone."""
    if is_slot:
        return "slot"
    if shape.window is None:
        return "window"
    if position < shape.sinks:
        return "sink"
    return "evicted" if position < held - shape.window else "window"


def state_count(shape: MemoryShape, tokens: int) -> dict[str, int]:
    """How many entries of each state `tokens` accepted tokens have left."""
    sinks = min(tokens, shape.sinks) if shape.window is not None else 0
    window = shape.entries(tokens) - sinks - shape.slots(tokens)
    return {"sink": sinks, "window": window, "slot": shape.slots(tokens), "evicted": tokens - sinks - window}


def readers(token: int, shape: MemoryShape) -> range:
    """Numbers m of the slots that read raw token `token` while it was in their window: those with tau_m in (token, token + W].

    Sinks are read by every later slot; the range then covers the first W positions only, like any other token's.
    """
    if not shape.stride or shape.window is None:
        return range(0)
    return range(token // shape.stride + 1, (token + shape.window) // shape.stride + 1)


def fates(trace: Trace) -> list[Token]:
    """Every drafted and emitted token: of each round the accepted drafts, the refused ones, then what the target added."""
    found: list[Token] = []
    proposed: list[tuple[int, Event]] = []  # (step, draft event) of the round that is going on
    index = -1
    verdict: dict[str, Event] = {}
    for e in trace.events:
        if (e.who == "draft" and e.kind in ("prefill", "draft")) or e.kind == "emit":
            index += 1
        if e.who == "draft" and e.kind == "draft":
            proposed.append((index, e))
        elif e.kind in ("accept", "reject"):
            verdict[e.kind] = e
        elif e.kind == "emit":
            found.extend(_round(index, e, proposed, verdict))
            proposed, verdict = [], {}
    found.extend(Token(step, e.round, e.position, int(e.data["token"]), "pending", None, e.data.get("q")) for step, e in proposed)
    return found


def _round(step: int, emit: Event, proposed: Sequence[tuple[int, Event]], verdict: dict[str, Event]) -> Iterator[Token]:
    judged: list[tuple[str, float | None]] = []
    for kind, fate in (("accept", "accepted"), ("reject", "rejected")):
        if kind in verdict:
            judged += [(fate, p) for p in verdict[kind].data.get("p") or [None] * verdict[kind].count]
    judged += [("pending", None)] * (len(proposed) - len(judged))  # drafted after an end token: never judged
    for (at, e), (fate, p) in zip(proposed, judged, strict=False):
        yield Token(at, e.round, e.position, int(e.data["token"]), fate, p, e.data.get("q"))
    roles = emit.data.get("roles") or ["target"] * emit.count
    for offset, (token, role) in enumerate(zip(emit.data["tokens"], roles, strict=False)):
        if role != "accepted":
            yield Token(step, emit.round, emit.position + offset, int(token), role)
