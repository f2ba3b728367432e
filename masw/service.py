"""What a page may ask of masw: a document and settings -> an answer that can be watched while it is made.

`Room` owns the loaded pair, the tokenizers for previews and the queue; `Answer` and `Fetch` are the work of a job. Both keep plain
records that other threads read; nothing here draws. Documents live in memory alone and are never written or logged.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from masw import cost, hardware, prompts, store
from masw.catalogue import distinct, resolve_pair
from masw.config import ModelConfig
from masw.devices import resolve_device, resolve_dtype
from masw.errors import Cancelled, UsageError
from masw.estimate import Estimate, Rates, estimate, rates, together
from masw.jobs import Job, Jobs, Stop
from masw.methods import METHODS, Method, method_named
from masw.metrics import Summary, summarise
from masw.prefill import Progress
from masw.prompts import Prompt
from masw.session import Difference, Run, RunOptions, Session, eagle_file
from masw.tokenizer import AnyTokenizer, ByteTokenizer, StreamDecoder, Tokenizer
from masw.trace import Trace
from masw.weights import read_config
from masw.zoo import free_bytes, load_pair


@dataclass(frozen=True)
class Ask:
    """What a visitor wants. Several `arms` share one target prefill and are timed one after the other."""

    pair: str
    document: str = field(repr=False)
    title: str
    task: str
    question: str | None
    arms: tuple[RunOptions, ...]


@dataclass
class Arm:
    """One run of an answer: its trace grows while it is made. The header's `pieces` hold the text of each token id on its own."""

    options: RunOptions
    trace: Trace
    pieces: list[str] = field(default_factory=list)  # text of the emitted tokens, one for each; "" until a character is whole
    progress: dict[str, Progress] = field(default_factory=dict)
    peak_bytes: int | None = None  # resident memory of the process, high-water mark
    gpu_bytes: int | None = None  # None: no GPU
    difference: Difference | None = None  # from the autoregressive arm
    compared: bool = False  # whether `difference` was looked for
    finished: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class View:
    """A moment of an answer, safe to read while it goes on."""

    stage: str  # see Answer.stage
    load: tuple[str, int, int] | None  # what is loaded or fetched, bytes done and in all
    prompt: Prompt | None
    shared_tokens: int  # of the prompt that the target had read already
    arms: tuple[Arm, ...]
    current: int  # arm that runs


class Answer:
    """A job that answers one Ask. Arms with `none` are the reference for the others (greedy only)."""

    def __init__(self, ask: Ask, room: Room) -> None:
        self.ask, self._room = ask, room
        self.stage = "waiting"  # waiting | loading | reading | decoding | comparing | done
        self.load: tuple[str, int, int] | None = None
        self.prompt: Prompt | None = None
        self.shared_tokens = 0
        self.arms: list[Arm] = []

    def view(self) -> View:
        arms = tuple(replace(a, trace=_copy(a.trace), pieces=a.pieces[:], progress=dict(a.progress)) for a in self.arms)
        return View(self.stage, self.load, self.prompt, self.shared_tokens, arms, max(0, len(arms) - 1))

    def __call__(self, stop: Stop, owner: str) -> None:
        def loading(what: str, done: int, total: int) -> None:
            self.load = (what, done, total)
            if stop():
                raise Cancelled("cancelled while the models were loaded")

        self.stage = "loading"
        session = self._room.session(self.ask.pair, owner, loading)
        model, first = session.pair.target, self.ask.arms[0]
        limit = session.context_limit - max(a.settings.max_new_tokens for a in self.ask.arms)
        self.prompt = prompts.build(model.tokenizer, self.ask.document, self.ask.task, self.ask.question, limit)
        self.load = None
        self._room.warm(
            session, {(a.settings.gamma, a.draft_weights if method_named(a.method).model else None) for a in self.ask.arms}
        )
        for options in self.ask.arms:
            if stop():
                return
            settings = replace(options.settings, eos_ids=model.eos_ids)
            self._decode(session, replace(options, settings=settings), stop, first=options is first)
        self._compare(session, stop)
        self.stage = "done"

    def _decode(self, session: Session, options: RunOptions, stop: Stop, *, first: bool) -> None:
        assert self.prompt is not None
        hardware.reset_peak_rss()
        device = session.pair.target.decoder.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        run = session.run(self.prompt.ids, options, stop)
        arm = Arm(options, run.trace)
        self.arms.append(arm)
        self.stage = "reading"
        try:
            self._follow(run, arm, session.pair.target.tokenizer, first=first)
            self._room.hold(session.held())
        finally:
            arm.peak_bytes = hardware.peak_rss_bytes()
            if device.type == "cuda":
                arm.gpu_bytes = int(torch.cuda.max_memory_allocated(device))
            arm.finished = True
        self._room.learn(self.ask.pair, options, run.trace)

    def _follow(self, run: Run, arm: Arm, tokenizer: AnyTokenizer, *, first: bool) -> None:
        stream, seen = StreamDecoder(tokenizer), 0
        texts: dict[str, str] = run.trace.header.setdefault("pieces", {})
        for step in run:
            if isinstance(step, Progress):
                if first and step.who == "target" and "target" not in arm.progress:
                    self.shared_tokens = step.start
                arm.progress[step.who] = step
                continue
            self.stage = "decoding"
            if first and not seen and "target" not in arm.progress:
                self.shared_tokens = len(run.prompt) - 1
            seen += len(step.tokens)
            for token in {*step.tokens, *step.drafted}:
                if str(token) not in texts:
                    texts[str(token)] = tokenizer.decode([token])
            arm.pieces.extend(stream.push([token]) for token in step.tokens)
        rest = stream.flush()
        if rest and arm.pieces:
            arm.pieces[-1] += rest

    def _compare(self, session: Session, stop: Stop) -> None:
        """Looks for the first token in which each greedy arm differs from the autoregressive one."""
        assert self.prompt is not None
        reference = next((a for a in self.arms if a.options.method == "none"), None)
        if reference is None or stop() or not reference.options.settings.sampling.greedy:
            return
        self.stage = "comparing"
        tokens = summarise(reference.trace).tokens
        for arm in self.arms:
            if arm is not reference and arm.options.settings.sampling.greedy:
                arm.difference = session.difference(self.prompt.ids, summarise(arm.trace).tokens, tokens)
                arm.compared = True


class Fetch:
    """A job that brings a pair onto this machine."""

    def __init__(self, pair: str) -> None:
        self.pair = pair
        self.load: tuple[str, int, int] | None = None
        self.notes: list[str] = []

    def __call__(self, stop: Stop, owner: str) -> None:
        def progress(what: str, done: int, total: int) -> None:
            self.load = (what, done, total)
            if stop():
                raise Cancelled("cancelled; what was fetched stays, and the next fetch goes on from there")

        store.fetch(self.pair, progress, self.notes.append)


@dataclass(frozen=True)
class Preview:
    """What a run will read, take and need, before it runs."""

    prompt: Prompt
    context_limit: int
    estimate: Estimate
    free_bytes: int
    held_bytes: int = 0  # of the run's KV, allocated by an earlier run

    @property
    def fits(self) -> bool:
        return self.estimate.run_bytes - self.held_bytes <= self.free_bytes


class Room:
    """The engine room behind all pages: one loaded pair, one queue, previews."""

    def __init__(self, *, waiting: int = 8, ttl_s: float = 1800.0, device: str = "auto", dtype: str = "auto") -> None:
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self._session: Session | None = None
        self._tenant: str | None = None  # visitor whose document the target's memory holds
        self._held: list[int] = []  # what the target has read of it, and its answer
        self._warm: set[tuple[int, str | None]] = set()
        self._rates: dict[tuple[str, str, str], Rates] = {}
        self._preview_lock = threading.Lock()
        self._tokenizers: dict[str, AnyTokenizer] = {}
        settle()
        self.jobs: Jobs[Answer | Fetch] = Jobs(waiting=waiting, ttl_s=ttl_s, on_leave=self._on_leave)

    # ---- for pages

    def answer(self, owner: str, ask: Ask) -> Job[Answer | Fetch]:
        """Puts an Ask in line. Raises UsageError for what can be refused at once."""
        prompts.check_task(ask.task, ask.question)
        for options in ask.arms:
            options.shape()
        if not ask.document.strip():
            raise UsageError("there is no document yet; upload one, paste text, or take the sample")
        if not present(ask.pair):
            raise UsageError(f"the models of {ask.pair} are not on this machine; fetch them first")
        return self.jobs.submit(owner, Answer(ask, self))

    def fetch(self, owner: str, pair: str) -> Job[Answer | Fetch]:
        resolve_pair(pair)
        return self.jobs.submit(owner, Fetch(pair))

    def preview(self, ask: Ask, owner: str) -> Preview:
        """Tokens, what is cut, predicted seconds and bytes, of all arms together. Raises UsageError as a run would."""
        configs = shapes(ask.pair)
        if configs is None:
            raise UsageError(f"the models of {ask.pair} are not on this machine; fetch them first")
        context = min(c.max_position for c in configs)
        with self._preview_lock:
            limit = context - max(a.settings.max_new_tokens for a in ask.arms)
            prompt = prompts.build(self._tokenizer(ask.pair), ask.document, ask.task, ask.question, limit)
            read = self._shared(owner, ask.pair, prompt.ids)
            found = []
            for options in ask.arms:
                found.append(self._estimate(ask.pair, configs, options, len(prompt.ids), read))
                read = len(prompt.ids) - 1  # the first arm reads for all
        session = self._session
        loaded = session is not None and session.pair.name == resolve_pair(ask.pair).name
        held = session.held_bytes(len(prompt.ids) + context - limit) if session is not None and loaded else 0
        return Preview(prompt, context, together(found), free_bytes(self.device), held)

    def _estimate(
        self, pair: str, configs: tuple[ModelConfig, ModelConfig], options: RunOptions, prompt: int, read_already: int
    ) -> Estimate:
        (draft, target), method = configs, method_named(options.method)
        return estimate(
            target,
            replace(target, layers=1) if method.head else draft,
            options.shape(prompt - 1),
            prompt=prompt,
            new_tokens=options.settings.max_new_tokens,
            gamma=options.settings.gamma,
            drafts=method.drafts,
            itemsize=self.dtype.itemsize,
            shared=method.head or len(distinct(resolve_pair(pair))) == 1,
            machine=machine(self.device),
            known=self._rates.get(_kind(pair, options)),
            read_already=read_already,
        )

    def close(self) -> None:
        self.jobs.close()

    # ---- for the worker

    def session(self, pair: str, owner: str, progress: Any) -> Session:
        """The loaded pair. Another visitor's document never stays in the target's memory."""
        if self._session is None or self._session.pair.name != resolve_pair(pair).name:
            self._session, self._warm = None, set()
            torch.set_num_threads(min(torch.get_num_threads(), max(1, hardware.cores() - 1)))  # the page needs a core
            self._session = Session(load_pair(pair, self.device, self.dtype, progress, lambda text: None))
            settle()
            self._held = []
        elif self._tenant != owner:
            self._session.forget()
            self._held = []
        self._tenant = owner
        return self._session

    def warm(self, session: Session, kinds: set[tuple[int, str | None]]) -> None:
        for kind in kinds - self._warm:
            session.warm_up(*kind)
            self._warm.add(kind)

    def hold(self, tokens: list[int]) -> None:
        """Notes what the target has read now, all of a prompt or as much as there was before a cancel."""
        self._held = tokens

    def learn(self, pair: str, options: RunOptions, trace: Trace) -> None:
        """Keeps the rates of a run for the next estimate; what this one did not do keeps its older figure."""
        new, old = rates(trace), self._rates.get(_kind(pair, options), Rates(None, None, None))
        self._rates[_kind(pair, options)] = Rates(
            new.target_prefill_ms or old.target_prefill_ms,
            new.draft_prefill_ms or old.draft_prefill_ms,
            new.decode_ms or old.decode_ms,
        )

    def _on_leave(self, owner: str) -> None:
        if owner == self._tenant and self._session is not None:
            self._session.forget()
            self._tenant, self._held = None, []

    def _shared(self, owner: str, pair: str, prompt: list[int]) -> int:
        """Tokens of `prompt` whose target KV is there already."""
        session = self._session
        if session is None or self._tenant != owner or session.pair.name != resolve_pair(pair).name:
            return 0
        return next(
            (i for i, (a, b) in enumerate(zip(prompt, self._held, strict=False)) if a != b), min(len(prompt), len(self._held))
        )

    def _tokenizer(self, pair: str) -> AnyTokenizer:
        """Of the target, for previews alone: the worker has its own, so neither waits for the other."""
        if pair not in self._tokenizers:
            folder = store.locate(resolve_pair(pair).target)
            self._tokenizers[pair] = Tokenizer(folder) if folder else ByteTokenizer()
            settle()
        return self._tokenizers[pair]


def settle() -> None:
    """Takes what is loaded out of sight of later garbage collections. A page server may collect after every run of a page, with the
    interpreter locked; over torch, transformers and their tables that takes half a second each time, which the model then lacks."""
    gc.unfreeze()  # what was loaded before and is gone now is collected first
    gc.collect()
    gc.freeze()


def present(pair: str) -> bool:
    """Whether both models are on this machine."""
    return all((m.source and m.source.random) or store.locate(m) for m in distinct(resolve_pair(pair)))


def methods(pair: str) -> list[str]:
    """Methods that can run on this pair: one that drafts with a head needs its file."""
    target = resolve_pair(pair).target.name

    def there(method: Method) -> bool:
        try:
            return not method.head or bool(eagle_file("auto", target))
        except UsageError:
            return False

    return [name for name, method in METHODS.items() if there(method)]


def shapes(pair: str) -> tuple[ModelConfig, ModelConfig] | None:
    """Draft and target, None when a model is not on this machine."""
    if not present(pair):
        return None
    spec = resolve_pair(pair)
    found = []
    for model in (spec.draft, spec.target):
        folder = None if model.source and model.source.random else store.locate(model)
        found.append(read_config(folder) if folder else model.source.random if model.source else None)
    draft, target = found
    return None if draft is None or target is None else (draft, target)


@lru_cache
def machine(device: torch.device) -> cost.Rates:
    """Measured once, in a second or two."""
    kind = torch.bfloat16 if device.type == "cuda" or hardware.native_bf16() else torch.float32
    return cost.Rates(hardware.measure_bandwidth(device, kind, 2), hardware.measure_gemm(device, kind, 1024, 2))


def speed_up(ours: Summary, reference: Summary) -> float | None:
    """Ratio of tokens per second in decoding."""
    if not ours.tokens_per_second or not reference.tokens_per_second:
        return None
    return ours.tokens_per_second / reference.tokens_per_second


def eta_s(view: View, known: Sequence[float] = ()) -> float | None:
    """Seconds that the arm in progress still needs, from its own rates so far; None before there are any."""
    if not view.arms or view.prompt is None:
        return None
    arm = view.arms[view.current]
    settings = arm.options.settings
    now = rates(arm.trace)
    done = len(arm.pieces)
    if done and now.decode_ms is not None:
        return (settings.max_new_tokens - done) * now.decode_ms / 1e3
    left = 0.0
    for who, per_token in (("target", now.target_prefill_ms), ("draft", now.draft_prefill_ms)):
        at = arm.progress.get(who)
        if at is not None and per_token is not None:
            left += (at.total - at.done) * per_token / 1e3
    return left if arm.progress else None


def _copy(trace: Trace) -> Trace:
    """A moment of a trace that grows: the events are frozen records, so their list is all there is to copy."""
    return Trace({**trace.header, "pieces": dict(trace.header.get("pieces", {}))}, trace.events[:])


def _kind(pair: str, options: RunOptions) -> tuple[str, str, str]:
    return pair, options.method, options.draft_weights
