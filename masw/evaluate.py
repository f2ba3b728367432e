"""The measure of an adaptor: how well a draft's memory predicts the target's own greedy answer.

Teacher-forced and exact in the greedy case: a memory's content depends on accepted tokens only, so the draft's argmax after each
answer prefix decides every round. Tokens per iteration follow from the agreements by counting; the engine gives the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
from torch import Tensor

from masw.adaptor import Adaptor
from masw.cases import Case, planted_positions
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.memory import Memory
from masw.prefill import CHUNK
from masw.tokenizer import AnyTokenizer


@dataclass(frozen=True)
class Variant:
    """One draft memory that is measured."""

    method: str  # full | window | window-equal | masw-untrained | masw
    shape: MemoryShape
    window: int | None  # as asked for: `window-equal` has a longer one, of as many entries as masw
    stride: int | None
    adaptor: Adaptor | None = None


@dataclass(frozen=True)
class Row:
    """Means over n cases. `kl` in nats per token against the full-KV draft."""

    set: str
    context: int
    window: int | None
    stride: int | None
    method: str
    n: int
    agreement: float
    tokens_per_iteration: dict[int, float]  # by gamma
    kl: float
    retention: float | None  # tokens per iteration over that of `full`, at the first gamma
    recovered_gap: float | None  # (masw - window) / (full - window), at the first gamma
    planted_agreement: float | None = None


def variants(
    windows: Sequence[int],
    strides: Sequence[int],
    context: int,
    untrained: Adaptor,
    trained: Callable[[int], Adaptor | None],
    sinks: int,
) -> list[Variant]:
    """The draft memories of one context. `trained(r)` is the adaptor for stride r, None when there is none."""
    found = [Variant("full", MemoryShape(), None, None)]
    for window in windows:
        found.append(Variant("window", MemoryShape(sinks, window), window, None))
        for stride in strides:
            slots = MemoryShape(sinks, window, stride)
            found.append(Variant("window-equal", MemoryShape(sinks, window + context // stride), window, stride))
            found.append(Variant("masw-untrained", slots, window, stride, untrained))
            adaptor = trained(stride)
            if adaptor is not None:
                found.append(Variant("masw", slots, window, stride, adaptor))
    return found


@torch.no_grad()
def predictions(decoder: Decoder, variant: Variant, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Draft logits [len(answer), V] for each answer token, after the prompt and the answer before it."""
    sequence = torch.tensor([[*prompt, *answer[:-1]]], device=decoder.device)
    total, read = sequence.shape[1], len(prompt) - 1
    memory = Memory(
        decoder.config, variant.shape, tokens=total, device=decoder.device, dtype=decoder.dtype, adaptor=variant.adaptor
    )
    for start in range(0, read, CHUNK):
        decoder.forward(sequence[:, start : min(start + CHUNK, read)], memory)
        memory.commit()
    return decoder.logits(decoder.forward(sequence[:, read:], memory)[0])


def tokens_per_iteration(agree: Sequence[bool], gamma: int) -> float:
    """Emitted tokens / verify passes of greedy speculative decoding with these agreements."""
    done = passes = 0
    while done < len(agree):
        block = min(gamma, len(agree) - done - 1)
        kept = next((i for i in range(block) if not agree[done + i]), block)
        done += kept + 1
        passes += 1
    return len(agree) / passes


@dataclass(frozen=True)
class Outcome:
    """One variant on one case."""

    agree: list[bool]
    kl: float
    planted: list[bool]


def judge(
    decoder: Decoder, choices: Sequence[Variant], case: Case, answer: Sequence[int], tokenizer: AnyTokenizer
) -> list[Outcome]:
    """Outcomes of all variants on one case; the first variant must be `full`, the reference of the KL."""
    wanted = torch.tensor(list(answer), device=decoder.device)
    spots = planted_positions(tokenizer, answer, case.planted) if case.planted else []
    reference: Tensor | None = None
    found = []
    for variant in choices:
        logits = predictions(decoder, variant, case.prompt, answer).float()
        beliefs = logits.log_softmax(-1)
        reference = beliefs if reference is None else reference
        kl = (reference.exp() * (reference - beliefs)).sum(-1).mean()
        agree = (logits.argmax(-1) == wanted).tolist()
        found.append(Outcome(agree, float(kl), [agree[i] for i in spots]))
    return found


def summarise(results: Sequence[tuple[Case, Sequence[Variant], Sequence[Outcome]]], gammas: Sequence[int]) -> list[Row]:
    """Means by set, context and variant, then retention and recovered gap."""
    cells: dict[tuple[str, int, str, int | None, int | None], list[Outcome]] = {}
    for case, choices, outcomes in results:
        for variant, outcome in zip(choices, outcomes, strict=True):
            cells.setdefault((case.set, case.context, variant.method, variant.window, variant.stride), []).append(outcome)
    speed = {key: {g: fmean(tokens_per_iteration(o.agree, g) for o in found) for g in gammas} for key, found in cells.items()}
    table = []
    for (name, context, method, window, stride), found in cells.items():
        mine = speed[name, context, method, window, stride][gammas[0]]
        full = speed[name, context, "full", None, None][gammas[0]]
        base = speed.get((name, context, "window", window, None), {}).get(gammas[0])
        planted = [ok for o in found for ok in o.planted]
        table.append(
            Row(
                name,
                context,
                window,
                stride,
                method,
                len(found),
                fmean(fmean(o.agree) for o in found),
                speed[name, context, method, window, stride],
                fmean(o.kl for o in found),
                mine / full,
                (mine - base) / (full - base) if base is not None and full > base and method.startswith("masw") else None,
                fmean(planted) if planted else None,
            )
        )
    return table


def as_dicts(table: Sequence[Row]) -> list[dict[str, object]]:
    """Rows as JSON objects; gammas become strings."""
    return [{**asdict(row), "tokens_per_iteration": {str(g): v for g, v in row.tokens_per_iteration.items()}} for row in table]
