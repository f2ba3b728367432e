"""The one loop: draft, verify, accept, roll back. Autoregressive decoding is the same loop with an empty proposal.

Between rounds the target has read all accepted tokens but the last one; a round's verify pass reads that one and the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.drafters import Drafter, Proposal
from masw.errors import UsageError
from masw.gamma import Adaptive, Fixed, Gamma
from masw.memory import Memory
from masw.prefill import CHUNK, Progress, Reader, read_all
from masw.recorder import Recorder
from masw.verify import Sampling, Verdict, accept, accept_greedy, distribution, likeliest


@dataclass(frozen=True)
class Settings:
    """What is asked of a run."""

    max_new_tokens: int = 256
    gamma: int = 5  # drafted tokens per verify pass; at most, when adaptive
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: tuple[int, ...] = ()
    chunk: int = CHUNK  # prefill tokens per forward
    adaptive: bool = False  # gamma is chosen before each round, 0 included: see masw.gamma
    least: float = 0.0  # a block ends once the draft gives it less than this probability; 0: never early

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if not 1 <= self.gamma <= 64:
            raise UsageError(f"gamma must be 1 to 64 drafted tokens, not {self.gamma}")
        if not 0 <= self.least < 1:
            raise UsageError(f"least must be a probability below 1, not {self.least}; 0 never ends a block early")
        if self.chunk < 1:
            raise UsageError(f"a prefill chunk must hold at least 1 token, not {self.chunk}")


@dataclass(frozen=True)
class Round:
    """What one verify pass added to the output."""

    tokens: tuple[int, ...]
    roles: tuple[str, ...]  # see masw.trace.ROLES
    drafted: tuple[int, ...]
    accepted: int  # of `drafted`
    finish: str | None = None  # eos | length: the output is complete


class Target:
    """The verifier: a decoder with its full KV, which several runs over one prompt share."""

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        """Allocates KV for `tokens` tokens (prompt, answer and one block)."""
        self.decoder = decoder
        self.memory = Memory(decoder.config, MemoryShape(), tokens=tokens, device=decoder.device, dtype=decoder.dtype)
        self.hidden: Tensor | None = None  # [len(block), H] of the last verified block, before the final norm

    def rewind(self, prompt: Sequence[int], most: int | None = None) -> None:
        """Keeps what the memory shares with `prompt`, short of its last token (and `most` tokens), and drops the rest."""
        self.memory.abandon()  # a run that was interrupted inside a forward left a block open
        held = self.memory.tokens()[0].tolist()
        limit = min(len(held), len(prompt) - 1, len(held) if most is None else most)
        same = next((i for i in range(limit) if held[i] != prompt[i]), limit)
        self.memory.listener = None
        self.memory.rollback(len(held) - same)

    def verify(self, block: Sequence[int]) -> Tensor:
        """Logits [len(block), V] after each token of `block`."""
        hidden = self.decoder.forward(torch.tensor([list(block)], device=self.decoder.device), self.memory)
        self.hidden = hidden[0]
        return self.decoder.logits(self.hidden)


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    settings: Settings,
    recorder: Recorder,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Progress | Round]:
    """Yields prefill progress, then rounds, until an end token, `max_new_tokens` or `stop()`.

    `stop` is asked before every prefill chunk and every drafted token; what was emitted until then is valid output.
    The last event of the trace is `end` with the reason: eos, length or cancelled.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give a document with at least one word")
    sequence = list(prompt)
    random = Random(settings.sampling.seed)
    observer = drafter.observer
    # Hidden states are not kept: what an observer has not seen is read again.
    target.rewind(prompt, None if observer is None else observer.seen)
    target.memory.listener = recorder.listener("target", lambda: target.memory.live_nbytes)
    if drafter.memory is not None:
        memory = drafter.memory
        memory.listener = recorder.listener("draft", lambda: memory.live_nbytes)

    show = None if observer is None else observer.observe
    readers = [Reader("target", target.decoder, target.memory, prompt[:-1], recorder, settings.chunk, show)]
    draft_reader = drafter.reader(prompt[:-1], recorder, settings.chunk)
    if draft_reader is not None:
        readers.insert(len(readers) if observer is None else 0, draft_reader)
    yield from read_all(readers, stop)

    pace: Gamma = Adaptive(settings.gamma) if settings.adaptive else Fixed(settings.gamma)
    limit = len(prompt) + settings.max_new_tokens
    finish = "cancelled" if any(reader.done < reader.total for reader in readers) else None
    while finish is None:
        recorder.round += 1
        with recorder.span() as whole:
            with recorder.span() as drafting:
                choice = pace.choose(limit - len(sequence) - 1, drafter.offers(sequence, recorder))
                least = max(settings.least, pace.least)
                proposal = drafter.propose(sequence, choice.gamma, recorder, stop, least, choice.offer)
            if stop():
                drafter.settle(len(sequence))  # it may have read the last token; that is accepted text
                finish = "cancelled"
                break
            with recorder.span() as verifying:
                logits = target.verify([sequence[-1], *proposal.tokens])
            rows, held = 1 + len(proposal.tokens), target.memory.live_nbytes
            recorder.add("verify", "target", len(sequence) - 1, rows, ms=verifying.ms, nbytes=held, gamma=choice.gamma)
            verdict, p = judge(logits, proposal, settings.sampling, random)
            emitted = [*proposal.tokens[: verdict.accepted], verdict.token]
            ended = next((i for i, token in enumerate(emitted) if token in settings.eos_ids), None)
            if ended is not None:
                emitted, finish = emitted[: ended + 1], "eos"
            elif len(sequence) + len(emitted) >= limit:
                finish = "length"
            accepted = min(verdict.accepted, len(emitted))
            roles = ("accepted",) * accepted + (_last_role(verdict),) * (len(emitted) - accepted)
            cut = len(emitted) <= verdict.accepted
            _record_verdict(recorder, len(sequence), proposal, verdict, accepted, cut, p)
            sequence.extend(emitted)
            target.memory.rollback(target.memory.length - (len(sequence) - 1))
            target.memory.commit()
            if observer is not None and target.hidden is not None:
                observer.observe(target.hidden[: len(emitted)])
            drafter.settle(len(sequence) - 1)
        pace.learn(len(proposal.tokens), accepted, drafting.ms, verifying.ms, whole.ms, choice.offer)
        recorder.add("upkeep", "engine", len(sequence) - len(emitted), 0, ms=whole.ms - drafting.ms - verifying.ms)
        recorder.add("emit", "engine", len(sequence) - len(emitted), len(emitted), ms=whole.ms, tokens=emitted, roles=list(roles))
        yield Round(tuple(emitted), roles, tuple(proposal.tokens), accepted, finish)
    recorder.add("end", "engine", len(sequence), len(sequence) - len(prompt), reason=finish)


def judge(logits: Tensor, proposal: Proposal, sampling: Sampling, random: Random) -> tuple[Verdict, list[float]]:
    """Applies the accept rule to target logits [gamma + 1, V]; also returns p of each drafted token (softmax when greedy)."""
    gamma = len(proposal.tokens)
    if sampling.greedy:
        verdict = accept_greedy(likeliest(logits).tolist(), proposal.tokens)
        p = logits[:gamma].softmax(-1, dtype=torch.float32)[range(gamma), proposal.tokens].tolist() if gamma else []
        return verdict, p
    probabilities = distribution(logits, sampling)
    q = proposal.q
    if q is None:  # copied, not drawn: all of q lies on the token itself
        q = torch.zeros_like(probabilities[:gamma])
        q[range(gamma), proposal.tokens] = 1.0
    verdict = accept(probabilities, q, proposal.tokens, [random.random() for _ in range(gamma + 1)])
    return verdict, probabilities[range(gamma), proposal.tokens].tolist() if gamma else []


def _last_role(verdict: Verdict) -> str:
    if verdict.gamma == 0:
        return "target"
    return "bonus" if verdict.bonus else "correction"


def _record_verdict(
    recorder: Recorder, position: int, proposal: Proposal, verdict: Verdict, accepted: int, ended: bool, p: list[float]
) -> None:
    """Accept and reject events. When an accepted token `ended` the output, tokens drafted after it are neither (`discarded`)."""
    if verdict.gamma == 0:
        return
    tokens, q, n = proposal.tokens, list(proposal.confidence), accepted
    unjudged = verdict.gamma - n if ended else 0
    recorder.add("accept", "engine", position, n, tokens=tokens[:n], p=p[:n], q=q[:n], discarded=unjudged)
    if not ended and n < verdict.gamma:
        recorder.add(
            "reject", "engine", position + n, verdict.gamma - n, tokens=tokens[n:], p=p[n:], q=q[n:], instead=verdict.token
        )
