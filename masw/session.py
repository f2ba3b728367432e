"""A loaded pair and what it takes to run methods on it. The command line, notebooks and the app all start here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import masw
from masw import cost
from masw.adaptor import Adaptor, AdaptorInfo, read_info
from masw.cascade import CascadeDraft
from masw.config import MemoryShape, ModelConfig
from masw.decoder import Decoder
from masw.drafters import Drafter, ModelDraft, NoDraft
from masw.eagle import HOW, EagleHead, read_head
from masw.eagle_draft import EagleDraft
from masw.engine import Round, Settings, Target, generate
from masw.errors import UsageError
from masw.lookup import LookupDraft
from masw.memory import Memory
from masw.methods import MemoryOptions, method_named
from masw.metrics import Summary, first_difference, summarise
from masw.prefill import Progress
from masw.provenance import provenance
from masw.quantise import packable, quantised
from masw.quiet import hush
from masw.recorder import Recorder
from masw.snapkv import draft_memory
from masw.tokenizer import AnyTokenizer
from masw.trace import Trace
from masw.zoo import Pair, free_bytes

ADAPTORS = ("auto", "none", "quiet")  # what is not the path of an adaptor, see `adaptor_for`
SAMPLE = 512  # prompt tokens that show where a draft's queries point


@dataclass(frozen=True)
class RunOptions:
    """Everything that decides a run, beside pair and prompt."""

    method: str = "masw"
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    settings: Settings = field(default_factory=Settings)
    adaptor: str = "auto"  # auto | none | quiet | path of a safetensors file, see `adaptor_for`
    draft_weights: str = "auto"  # auto | plain | int8 | int4, see `masw.quantise`
    eagle: str = "auto"  # auto | path of a head for the method eagle, see `eagle_file`

    def shape(self, prompt: int | None = None) -> MemoryShape | None:
        """The draft model's memory, None when none drafts. Raises UsageError for a block that does not fit it.

        `prompt`: tokens after which a memory with a budget selects, where known.
        """
        shape = method_named(self.method).memory(self.memory)
        if shape is None:
            return None
        shape.check_block(self.settings.gamma)
        return shape if shape.budget is None else replace(shape, prompt=prompt)


@dataclass(frozen=True)
class Difference:
    """Where two outputs part, and how close the target was there."""

    index: int  # of the emitted token
    ours: int | None  # token ids; None: that output had ended
    reference: int | None
    logit_gap: float | None  # target's logit of its own choice minus that of ours; None when an output had ended


class Session:
    """Runs methods on one pair; runs over one prompt share the target's KV, so each document is read by it once."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._target: Target | None = None
        self._packed: dict[str, Decoder] = {}
        self._heads: dict[Path, EagleHead] = {}

    @property
    def context_limit(self) -> int:
        """Tokens (prompt + answer) that both models have positions for."""
        return min(self.pair.target.config.max_position, self.pair.draft.config.max_position)

    def draft_config(self, options: RunOptions) -> ModelConfig:
        """Shape of what drafts: the pair's draft, or one layer of the target for a head."""
        target = self.pair.target.config
        return replace(target, layers=1) if method_named(options.method).head else self.pair.draft.config

    def run_bytes(self, options: RunOptions, tokens: int, baseline: int = 0) -> int:
        """Memory that a run needs in all, by the formula; `baseline` is what the process holds without models."""
        method, target = method_named(options.method), self.pair.target
        kind = self.draft_kind(options.draft_weights) if method.model else "plain"
        return cost.run_bytes(
            target.config,
            self.draft_config(options),
            options.shape(),
            tokens,
            target.decoder.dtype.itemsize,
            shared=self.pair.self_pair or method.head,  # a head's few own weights do not count
            kind=kind,
            baseline=baseline,
        )

    def check_memory(self, options: RunOptions, tokens: int) -> None:
        """Refuses a run whose KV caches and activations do not fit what is free; the message has the estimate."""
        target = self.pair.target
        need = self.run_bytes(options, tokens) - target.decoder.nbytes  # weights are loaded already
        if method_named(options.method).model:
            need -= 0 if self.pair.self_pair else self.pair.draft.decoder.nbytes
            packed = self._packed.get(self.draft_kind(options.draft_weights))
            need -= 0 if packed is None else packed.weights.packed_nbytes
        need -= self.held_bytes(tokens)
        free = free_bytes(target.decoder.device)
        if need > free:
            raise UsageError(
                f"a context of {tokens:,} tokens needs about {need / 2**30:.1f} GiB beside the weights and {free / 2**30:.1f} GiB are free; "
                "lower --max-context or --max-new-tokens, or take a smaller pair"
            )

    def held_bytes(self, tokens: int) -> int:
        """Of the target's KV for `tokens` tokens what is allocated already: all of it after a run as long, else nothing (it grows into
        a buffer of its own)."""
        target = self.pair.target
        wanted = cost.kv_bytes(target.config, MemoryShape(), tokens, target.decoder.dtype.itemsize)
        return wanted if self._target is not None and self._target.memory.nbytes >= wanted else 0

    def run(self, prompt: Sequence[int], options: RunOptions, stop: Callable[[], bool] = lambda: False) -> Run:
        """Prepares one run; iterate over it to make it happen."""
        shape = options.shape(len(prompt) - 1)  # the last token of a prompt is read by the first round
        total = len(prompt) + options.settings.max_new_tokens
        if total > self.context_limit:
            raise UsageError(
                f"prompt and answer have {total:,} tokens, the pair has positions for {self.context_limit:,}; "
                "shorten the document or lower --max-new-tokens"
            )
        self.check_memory(options, total)
        target = self._target_for(total)
        settings = options.settings
        draft = self.pair.draft
        method = method_named(options.method)
        kind, decoder = (None, draft.decoder) if shape is None or method.head else self.draft_decoder(options.draft_weights)
        drafter: Drafter = LookupDraft() if method.copies else NoDraft()
        header: dict[str, Any] = {
            "pair": self.pair.name,
            "method": options.method,
            "prompt_tokens": len(prompt),
            "settings": {**asdict(settings), "eos_ids": list(settings.eos_ids)},
            "memory": None if shape is None else asdict(shape),
            "draft_weights": kind,
            "models": {"draft": draft.provenance, "target": self.pair.target.provenance},
            "provenance": provenance(target.decoder.device, target.decoder.dtype),
        }
        if shape is not None:
            config, device, dtype, adaptor = draft.config, draft.decoder.device, draft.decoder.dtype, None
            head: EagleHead | None = None
            if method.head:
                head, file = self.eagle_head(options.eagle)
                config, device, dtype = head.config, target.decoder.device, target.decoder.dtype
                header["draft_weights"] = str(dtype).removeprefix("torch.")
                header["eagle"] = {"file": file.name, **asdict(head.info)}
            if shape.stride is not None:
                # A memory with a budget has fewer slots than the stride r it was asked for: those of an adaptor for r, each over more tokens.
                stride = shape.budget or shape.stride
                adaptor, found = adaptor_for(draft.decoder, draft.name, stride, options.adaptor, prompt)
                header["adaptor"] = {
                    "file": found.name if found else None,
                    "choice": options.adaptor if options.adaptor in ADAPTORS else "file",
                    "longest_row": adaptor.info.longest_row,
                    "reach": adaptor.info.reach,
                    **asdict(adaptor.info),
                }
            memory = draft_memory(config, shape, tokens=total, device=device, dtype=dtype, adaptor=adaptor)
            # Two streams of numbers, so that the accept rule's are independent of the draft's.
            random, vocab = Random(settings.sampling.seed + 1), self.pair.target.config.vocab
            if head is not None:
                drafter = EagleDraft(head, target.decoder, memory, settings.sampling, random, vocab)
            else:
                drafter = ModelDraft(decoder, memory, settings.sampling, random, vocab)
                if method.copies:
                    drafter = CascadeDraft(drafter)
            header["draft_kv"] = {
                "allocated_bytes": memory.nbytes,
                "predicted_bytes": cost.kv_bytes(config, shape, total, dtype.itemsize),
                "peak_bytes": cost.peak_kv_bytes(config, shape, total, dtype.itemsize),
                "full_bytes": cost.kv_bytes(config, MemoryShape(), total, dtype.itemsize),
            }
        return Run(self.pair, target, drafter, list(prompt), options, header, stop)

    def held(self) -> list[int]:
        """Tokens that the target's memory holds."""
        return [] if self._target is None else self._target.memory.tokens()[0].tolist()

    def forget(self) -> None:
        """Drops the document that the target's memory holds; the buffers stay for the next one."""
        if self._target is not None:
            memory = self._target.memory
            memory.abandon()
            memory.listener = None
            memory.rollback(memory.length)

    def difference(self, prompt: Sequence[int], ours: list[int], reference: list[int]) -> Difference | None:
        """First token in which two outputs for `prompt` differ, with the target's logit gap there; None when they are the same."""
        index = first_difference(ours, reference)
        if index is None:
            return None
        a = ours[index] if index < len(ours) else None
        b = reference[index] if index < len(reference) else None
        gap = None
        if a is not None and b is not None:
            prefix = [*prompt, *reference[:index]]
            target = self._target_for(len(prefix) + 1)
            target.rewind(prefix)
            with torch.no_grad():
                logits = target.verify(prefix[target.memory.length :])[-1].float()
            gap = float(logits[b] - logits[a])
        return Difference(index, a, b, gap)

    @torch.no_grad()
    def warm_up(self, gamma: int, draft_weights: str | None = "auto") -> None:
        """Runs each kind of forward once on throw-away memories, so that a first run is not timed with set-up costs.

        `draft_weights` None: no draft model will run.
        """
        forwards = [(self.pair.target.decoder, (1, gamma + 1))]
        if draft_weights is not None:
            forwards.append((self.draft_decoder(draft_weights)[1], (1, 2)))
        for decoder, widths in forwards:
            memory = Memory(decoder.config, MemoryShape(), tokens=64, device=decoder.device, dtype=decoder.dtype)
            for width in widths:
                decoder.logits(decoder.forward(torch.zeros(1, width, dtype=torch.long, device=decoder.device), memory))

    def draft_kind(self, kind: str) -> str:
        """What `kind` of draft weights means here. auto: int4 for a draft of its own where the kernels take it.

        A model that drafts for itself stays as it is: the pair is there to show what compressing the memory costs, and nothing else.
        """
        if kind == "auto":
            return "int4" if packable(self.pair.draft.decoder) and not self.pair.self_pair else "plain"
        return kind

    def draft_decoder(self, kind: str) -> tuple[str, Decoder]:
        """The draft in the weights asked for, packed once a session; see `draft_kind`."""
        plain, kind = self.pair.draft.decoder, self.draft_kind(kind)
        if kind == "plain":
            return str(plain.dtype).removeprefix("torch."), plain
        if kind not in self._packed:
            self._packed[kind] = quantised(plain, kind)
        return kind, self._packed[kind]

    def eagle_head(self, choice: str) -> tuple[EagleHead, Path]:
        """The head that `choice` names (see `eagle_file`) and its file; read once a session."""
        target = self.pair.target
        path = eagle_file(choice, target.name)
        if path not in self._heads:
            self._heads[path] = EagleHead.load(path, target.decoder, base=target.name)
        return self._heads[path], path

    def _target_for(self, tokens: int) -> Target:
        if self._target is None:
            self._target = Target(self.pair.target.decoder, tokens)
        return self._target


class Run:
    """One run: an iterable of progress and rounds, a trace that grows with it, and a summary at any time."""

    def __init__(
        self,
        pair: Pair,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        options: RunOptions,
        header: dict[str, Any],
        stop: Callable[[], bool],
    ) -> None:
        self._pair, self._target, self._drafter = pair, target, drafter
        self.prompt, self.options, self._stop = prompt, options, stop
        self._recorder = Recorder(header, target.decoder.device)

    def __iter__(self) -> Iterator[Progress | Round]:
        self._recorder.begin()  # what happens between preparing a run and running it, a warm-up say, is not its time
        return generate(self._target, self._drafter, self.prompt, self.options.settings, self._recorder, self._stop)

    @property
    def trace(self) -> Trace:
        return self._recorder.trace

    def summary(self) -> Summary:
        return summarise(self.trace)

    def save(self, path: Path) -> None:
        """Writes the trace, with the text of its tokens."""
        name_pieces(self.trace, self._pair.target.tokenizer)
        self.trace.save(path)


def name_pieces(trace: Trace, tokenizer: AnyTokenizer) -> None:
    """Adds the text of each drafted and emitted token id to the header (`pieces`), so that figures need no tokenizer.

    The prompt's text is not in it. Cheap to call again while the trace grows.
    """
    pieces: dict[str, str] = trace.header.setdefault("pieces", {})
    for event in trace.events:
        if event.kind in ("draft", "emit", "reject"):
            data = event.data
            for token in (*data.get("tokens", ()), *(data[k] for k in ("token", "instead") if k in data)):
                if str(token) not in pieces:
                    pieces[str(token)] = tokenizer.decode([token])


def data_folder() -> Path:
    """Samples, adaptors and traces: inside an installed package, beside it in a checkout."""
    package = Path(masw.__file__).parent
    return package / "_data" if (package / "_data").is_dir() else package.parent / "data"


def shipped_adaptors() -> list[Path]:
    """Adaptor files that come with masw."""
    return sorted((data_folder() / "adaptors").glob("*.safetensors"))


def eagle_file(choice: str, base: str) -> Path:
    """The file of the head for the target `base`. auto: the one that comes with masw; anything else is a path."""
    if choice != "auto":
        read_head(Path(choice), base)
        return Path(choice)
    for path in sorted((data_folder() / "eagle").glob("*.safetensors")):
        if read_head(path)[0].base == base:
            return path
    raise UsageError(f"no eagle head for the target '{base}' comes with masw; {HOW} and pass --eagle PATH, or another --method")


def adaptor_file(base: str, stride: int, choice: str) -> Path | None:
    """The file that `adaptor_for` takes for the draft `base`; None where the slots are untrained."""
    if choice not in ADAPTORS:
        return Path(choice)
    for path in shipped_adaptors() if choice == "auto" else ():
        info, _ = read_info(path)
        if info.base == base and (not info.strides or stride in info.strides):
            return path
    return None


def adaptor_for(decoder: Decoder, base: str, stride: int, choice: str, sample: Sequence[int] = ()) -> tuple[Adaptor, Path | None]:
    """The adaptor that `choice` names, and the file it came from (None: untrained).

    auto: the one shipped for this draft and stride, else quiet. none: a plain copy of the backbone's projections, as the paper starts
    from. quiet: that copy with slots that nothing looks at, so that the draft is as good as its window (masw.quiet); `sample` is text
    that shows where queries point. Anything else is a path.
    """
    path = adaptor_file(base, stride, choice)
    if path is not None:
        return Adaptor.load(path, decoder, base=base, stride=stride), path
    if choice == "none" or not sample:
        return Adaptor.copied(decoder, AdaptorInfo(base, ())), None
    quiet = Adaptor.copied(decoder, AdaptorInfo(base, (), bias=not decoder.config.qkv_bias))
    hush(quiet, decoder, torch.tensor(sample[:SAMPLE], device=decoder.device))
    return quiet, None
