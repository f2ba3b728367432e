"""The measure of an adaptor: how well a draft's memory predicts the target's own greedy answer.

Teacher-forced and exact in the greedy case: a memory's content depends on accepted tokens only, so the draft's argmax after each
answer prefix decides every round. Tokens per iteration follow from the agreements by counting; the engine gives the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from types import MappingProxyType

import torch
from torch import Tensor

from masw import cases
from masw.adaptor import Adaptor, AdaptorInfo
from masw.cases import Case, planted_positions
from masw.config import MOST_STRIDE, MemoryShape
from masw.decoder import Decoder
from masw.drafters import aligned
from masw.memory import Memory
from masw.methods import METHODS, MemoryOptions
from masw.prefill import CHUNK
from masw.session import Session, adaptor_for
from masw.snapkv import SnapMemory, draft_memory
from masw.tokenizer import AnyTokenizer
from masw.verify import likeliest


@dataclass(frozen=True)
class Variant:
    """One draft memory that is measured."""

    method: str  # full | window | window-equal | snapkv | hybrid | masw-untrained | masw
    shape: MemoryShape
    window: int | None  # as asked for: `window-equal` has a longer one, of as many entries as masw
    stride: int | None
    adaptor: Adaptor | None = None
    weights: str = "plain"  # what the draft's steps read: plain | int8 | int4


@dataclass(frozen=True)
class Row:
    """Means over n cases. `kl` in nats per token against the full-KV draft; `agreement` of a recall set counts the planted
    tokens alone, all else the whole answer."""

    set: str
    context: int
    window: int | None
    stride: int | None
    method: str
    weights: str  # what the draft's steps read: plain | int8 | int4
    n: int
    agreement: float
    tokens_per_iteration: dict[int, float]  # by gamma
    kl: float
    retention: float | None  # tokens per iteration over that of `full` with plain weights, at the first gamma
    recovered_gap: float | None  # (this - window) / (full - window), both plain, at the first gamma; None where full is no better


def variants(
    windows: Sequence[int],
    strides: Sequence[int],
    context: int,
    untrained: Adaptor,
    trained: Callable[[int], Adaptor | None],
    sinks: int,
    quiet: Adaptor | None = None,
) -> list[Variant]:
    """The draft memories of one context, all of a window and stride of as many bytes but `window`.

    `trained(r)` is the adaptor for stride r, None when there is none: `hybrid` then has the slots of `quiet`, or of `untrained`.
    """
    found = [Variant("full", MemoryShape(), None, None)]
    for window in windows:
        found.append(Variant("window", MemoryShape(sinks, window), window, None))
        for stride in strides:
            slots = MemoryShape(sinks, window, stride)
            found.append(Variant("window-equal", MemoryShape(sinks, window + context // stride), window, stride))
            found.append(Variant("masw-untrained", slots, window, stride, untrained))
            adaptor, options = trained(stride), MemoryOptions(sinks, window, stride)
            for method, slot in (("snapkv", None), ("hybrid", adaptor or quiet or untrained)):
                shape = METHODS[method].memory(options)
                assert shape is not None
                found.append(Variant(method, shape, window, stride, slot))
            if adaptor is not None:
                found.append(Variant("masw", slots, window, stride, adaptor))
    return found


class Prompt:
    """One prompt and the draft memories that have read it. Memories that read it whole, with the same slots or with none, share one
    pass: `full` and every budget of `snapkv`, every budget of `hybrid` of one stride."""

    def __init__(self, decoder: Decoder, ids: Sequence[int], answer: Sequence[int]) -> None:
        """As in the engine the last token is left to the first draft, and ids that only the target has read as the draft's last."""
        self._decoder, self._read = decoder, len(ids) - 1
        sequence = torch.tensor([[*ids, *answer[:-1]]], device=decoder.device).clamp_max(decoder.config.vocab - 1)
        self._ids, self.rest = sequence[:, : self._read], sequence[:, self._read :]
        self._tokens = sequence.shape[1]
        self._whole: dict[tuple[int | None, int], SnapMemory] = {}  # by stride and adaptor

    def memory(self, variant: Variant) -> Memory:
        """A memory of its own that has read the prompt."""
        shape = variant.shape
        if not self._read or (shape.window is not None and shape.budget is None):
            memory = self._new(shape, variant.adaptor)
            self._feed(memory)
            return memory
        key = shape.stride, id(variant.adaptor)
        if key not in self._whole:
            # Never asked to select, so its own budget is the least that there is.
            least = MemoryShape(0, shape.stride or 1, shape.stride, budget=shape.stride or MOST_STRIDE)
            reader = self._new(least, variant.adaptor)
            assert isinstance(reader, SnapMemory)
            self._feed(reader, commit_last=False)
            self._whole[key] = reader
        reader = self._whole[key]
        if shape.budget is None:
            return reader.whole_prompt()
        memory = self._new(shape, variant.adaptor)
        assert isinstance(memory, SnapMemory)
        memory.take_prompt(reader)
        return memory

    def _new(self, shape: MemoryShape, adaptor: Adaptor | None) -> Memory:
        d = self._decoder
        return draft_memory(d.config, shape, tokens=self._tokens, device=d.device, dtype=d.dtype, adaptor=adaptor)

    def _feed(self, memory: Memory, commit_last: bool = True) -> None:
        memory.prompt_ends(self._read)
        for start in range(0, self._read, CHUNK):
            self._decoder.forward(self._ids[:, start : start + CHUNK], memory)
            if commit_last or start + CHUNK < self._read:
                memory.commit()


@torch.no_grad()
def predictions(decoder: Decoder, variant: Variant, prompt: Prompt, vocab: int) -> Tensor:
    """Draft logits [answer, vocab] for each answer token, after the prompt and the answer before it.

    `vocab` is the width of the target's: as in the engine, logits are cut or padded to it. Packed weights serve a row or two: the
    answer is then read token by token, as the engine drafts. `prompt` was made for `decoder`.
    """
    memory, rest, logits = prompt.memory(variant), prompt.rest, []
    for part in rest.split(rest.shape[1] if variant.weights == "plain" else 1, dim=1):
        logits.append(decoder.logits(decoder.forward(part, memory)[0]))
        memory.commit()
    return aligned(torch.cat(logits), vocab)


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
    planted: list[bool]  # of the tokens that repeat the planted fact

    @property
    def agreement(self) -> float:
        return fmean(self.planted or self.agree)


Answered = tuple[Case, tuple[int, ...]]  # a case and the answer that drafts are judged on


@dataclass
class Known:
    """What measures of one draft on the same cases share: whatever does not depend on an adaptor."""

    beliefs: dict[Answered, Tensor] = field(default_factory=dict)  # of the full-KV draft: log-probabilities [answer, vocab]
    outcomes: dict[tuple[Answered, MemoryShape, str], Outcome] = field(default_factory=dict)


def judge(
    decoder: Decoder,
    choices: Sequence[Variant],
    case: Case,
    answer: Sequence[int],
    tokenizer: AnyTokenizer,
    vocab: int,
    known: Known | None = None,
    packed: Mapping[str, Decoder] = MappingProxyType({}),
) -> list[Outcome]:
    """Outcomes of all variants on one case; the first variant must be `full`, the reference of the KL. `vocab`: the target's.

    What `known` holds of this case is not computed again. `packed`: the draft in the other weights that variants name.
    """
    known = known or Known()
    case_key = case, tuple(answer)
    wanted = torch.tensor(list(answer), device=decoder.device)
    spots = planted_positions(tokenizer, answer, case.planted) if case.planted else []
    prompts = {kind: Prompt(d, case.prompt, answer) for kind, d in {"plain": decoder, **packed}.items()}
    found = []
    for variant in choices:
        key = case_key, variant.shape, variant.weights
        if variant.adaptor is None and key in known.outcomes:
            found.append(known.outcomes[key])
            continue
        logits = predictions(packed.get(variant.weights, decoder), variant, prompts[variant.weights], vocab)
        beliefs = logits[:, : decoder.config.vocab].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        reference = known.beliefs.setdefault(case_key, beliefs)
        kl = (reference.exp() * (reference - beliefs)).sum(-1).mean()
        agree = (likeliest(logits) == wanted).tolist()
        found.append(Outcome(agree, float(kl), [agree[i] for i in spots]))
        if variant.adaptor is None:
            known.outcomes[key] = found[-1]
    return found


@dataclass(frozen=True)
class Judged:
    """A case, and the outcome of each draft (method, window, stride, weights) on it; none where the target's own answer is nothing to
    judge by."""

    set: str
    context: int
    id: str
    found: list[tuple[str, int | None, int | None, str, Outcome]]

    @staticmethod
    def of(case: Case, choices: Sequence[Variant], outcomes: Sequence[Outcome]) -> Judged:
        found = [(c.method, c.window, c.stride, c.weights, o) for c, o in zip(choices, outcomes, strict=True)]
        return Judged(case.set, case.context, case.id, found)


def rows(found: Iterable[tuple[Case, Judged | Exception]], gammas: Sequence[int]) -> list[Row]:
    """The table of what `judge_all` found; raises the first exception among it."""
    results = []
    for _, judged in found:
        if isinstance(judged, Exception):
            raise judged
        results.append(judged)
    return summarise(results, gammas)


def judge_all(
    session: Session,
    chosen: Sequence[Case],
    windows: Sequence[int],
    strides: Sequence[int],
    trained: Callable[[int], Adaptor | None],
    *,
    sinks: int,
    answer_tokens: int,
    methods: Container[str] | None = None,
    known: Known | None = None,
    weights: Sequence[str] = ("plain",),
    sample: Sequence[int] = (),
) -> Iterator[tuple[Case, Judged | Exception]]:
    """Judges `chosen` cases one by one; a case that fails gives its exception. `trained(r)` as in `variants`; a case that the target
    itself gets wrong has no outcomes.

    `methods` leaves out all others but `full`, which the rest is compared with. `known` is kept from one measure to the next, where
    only the adaptor differs. `weights`: each method also with these draft weights; plain ones, the reference, come first in any case.
    `sample` are the tokens on which slots of `hybrid` are made quiet (default: the first case's). Raises UsageError where weights cannot
    be packed.
    """
    draft, target = session.pair.draft, session.pair.target
    untrained = Adaptor.copied(draft.decoder, AdaptorInfo(draft.name, ()))
    kinds = list(dict.fromkeys(("plain", *weights)))
    packed = {kind: session.draft_decoder(kind)[1] for kind in kinds[1:]}
    quiet: list[Adaptor] = []

    def one(case: Case) -> Judged:
        said = cases.answer(session, case, answer_tokens)
        if len(said) < 2 or (case.planted and not planted_positions(target.tokenizer, said, case.planted)):
            return Judged.of(case, (), ())
        if not quiet and (methods is None or "hybrid" in methods):
            quiet.append(adaptor_for(draft.decoder, draft.name, strides[0], "quiet", sample or chosen[0].prompt)[0])
        choices = variants(windows, strides, case.context, untrained, trained, sinks, quiet[0] if quiet else None)
        choices = [c for c in choices if c.method == "full" or methods is None or c.method in methods]
        choices = [replace(choice, weights=kind) for kind in kinds for choice in choices]
        outcomes = judge(draft.decoder, choices, case, said, target.tokenizer, target.config.vocab, known, packed)
        return Judged.of(case, choices, outcomes)

    for case in chosen:
        found: Judged | Exception
        try:
            found = one(case)
        except Exception as error:  # out of memory for one context must not cost the others
            error.__context__ = None
            found = error.with_traceback(None)  # whose frames would hold that memory while the next case is judged
        yield case, found


def summarise(results: Iterable[Judged], gammas: Sequence[int]) -> list[Row]:
    """Means by set, context and variant, then retention and recovered gap."""
    cells: dict[tuple[str, int, str, int | None, int | None, str], list[Outcome]] = {}
    for judged in results:
        for method, window, stride, weights, outcome in judged.found:
            cells.setdefault((judged.set, judged.context, method, window, stride, weights), []).append(outcome)
    speed = {key: {g: fmean(tokens_per_iteration(o.agree, g) for o in found) for g in gammas} for key, found in cells.items()}
    table = []
    for key, found in cells.items():
        name, context, method, window, stride, weights = key
        mine = speed[key][gammas[0]]
        full = speed[name, context, "full", None, None, "plain"][gammas[0]]
        base = speed.get((name, context, "window", window, None, "plain"), {}).get(gammas[0])
        table.append(
            Row(
                name,
                context,
                window,
                stride,
                method,
                weights,
                len(found),
                fmean(o.agreement for o in found),
                speed[key],
                fmean(o.kl for o in found),
                mine / full,
                (mine - base) / (full - base) if base is not None and full > base and stride is not None else None,
            )
        )
    return table


def as_dicts(table: Sequence[Row], partial: Container[tuple[str, int]] = ()) -> list[dict[str, object]]:
    """Rows as JSON objects; gammas become strings, and rows of the sets and contexts in `partial` say so."""
    return [
        {
            **asdict(row),
            "tokens_per_iteration": {str(g): v for g, v in row.tokens_per_iteration.items()},
            **({"partial": True} if (row.set, row.context) in partial else {}),
        }
        for row in table
    ]
