"""Where notebooks get their data: recorded files (no model) or a live run, behind the same calls.

mode "trace" reads data/traces, which scripts/record_traces.py and scripts/record_explained.py made. mode "live" loads the pair.
Torch is imported only where something is computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from masw.config import MemoryShape
from masw.errors import UsageError
from masw.failures import failures
from masw.tables import read_lines
from masw.timeline import shape_of
from masw.trace import Trace

if TYPE_CHECKING:
    from masw.explain import RolledBack
    from masw.session import Run, RunOptions, Session

SAMPLE = "guide.md"
METHODS = ("none", "full", "window", "masw", "lookup")
SLOT, SAMPLE_TOKENS = 16, 200  # the slot whose attention is shown, and the tokens of the sample that are read for it
SHOWN = MemoryShape(4, 64, 8)  # its memory: short enough that every key gets a bar
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass
class Lesson:
    """Data of one notebook. `mode` is trace or live; `document` a text file, empty for the sample."""

    mode: str = "trace"
    pair: str = "smollm2"
    sinks: int = 4
    window: int = 256
    stride: int = 8
    gamma: int = 5
    tokens: int = 96
    dtype: str = "fp32"
    document: str = ""
    seed: int = 0
    _traces: dict[str, Trace] = field(default_factory=dict, repr=False)
    _missed: list[dict[str, Any]] = field(default_factory=list, repr=False)
    _parts: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in ("trace", "live"):
            raise UsageError(f"mode is trace or live, not {self.mode!r}")

    @property
    def shape(self) -> MemoryShape:
        return MemoryShape(self.sinks, self.window, self.stride)

    @property
    def source(self) -> str:
        """Where the data come from, in a line or two."""
        if self.mode == "live":
            return f"Live: computed now with the pair {self.pair} on {Path(self.document or SAMPLE).name}."
        made = self._part("provenance")
        theirs = shape_of(self.traces(["masw"])["masw"])
        aside = "" if theirs == self.shape else ", whatever this notebook's parameters say"
        size = "" if theirs is None else f" Their memory: S {theirs.sinks}, W {theirs.window}, r {theirs.stride}{aside}."
        return (
            f"Recorded: traces of the pair {self.pair} on {SAMPLE}; no model is loaded.{size}\n"
            f"Made {made['created'][:10]} on {made['device']} with masw {made['masw']}, commit {made['commit']}."
        )

    # ---- runs

    def traces(self, methods: Sequence[str] = METHODS) -> dict[str, Trace]:
        """A trace of each method on the same prompt; methods that were not recorded are left out."""
        missing = [m for m in methods if m not in self._traces]
        if self.mode == "trace":
            for method in missing:
                path = recorded_folder() / f"{self.pair}-{method}.jsonl"
                if path.is_file():
                    self._traces[method] = Trace.load(path)
            if not any(m in self._traces for m in methods):
                raise UsageError(f'no trace of {self.pair} with {", ".join(methods)} is recorded; use mode = "live"')
        elif missing:
            for method, run in runs_of(self.session, missing, self.options, from_where_asked(self.document)):
                self._traces[method] = run.trace
                self._missed += [{"method": method, **row} for row in failures(run.trace, run.prompt)]
        return {m: self._traces[m] for m in methods if m in self._traces}

    def failures(self) -> list[dict[str, Any]]:
        """Rows for `masw.figures.failure_distance`, of the methods that were run or recorded."""
        if self.mode == "trace":
            return list(_read(f"{self.pair}-failures.json")["rows"])
        return self._missed

    @cached_property
    def session(self) -> Session:
        """The loaded pair (live mode)."""
        import torch

        from masw.devices import resolve_dtype
        from masw.session import Session
        from masw.zoo import load_pair

        device = torch.device("cpu")
        return Session(load_pair(self.pair, device, resolve_dtype(self.dtype, device)))

    @cached_property
    def options(self) -> RunOptions:
        from masw.engine import Settings
        from masw.methods import MemoryOptions
        from masw.session import RunOptions
        from masw.verify import Sampling

        settings = Settings(self.tokens, self.gamma, Sampling(seed=self.seed), self.session.pair.target.eos_ids)
        return RunOptions(memory=MemoryOptions(self.sinks, self.window, self.stride), settings=settings)

    # ---- what scripts/record_explained.py records

    def _part(self, name: str) -> Any:
        """One part of what is recorded; computed when it is first asked for in live mode."""
        if self.mode == "trace" and not self._parts:
            self._parts = _read(f"{self.pair}-explained.json")
        elif self.mode == "live" and name not in self._parts:
            self._parts |= explained(self.session, "auto", parts=(name,))  # the slots that runs have
        return self._parts[name]

    def attention(self) -> dict[str, Any]:
        """Profile for `masw.figures.slot_attention`."""
        return dict(self._part("attention"))

    def distance(self) -> tuple[list[dict[str, Any]], str]:
        """Rows for `masw.figures.projection_distance`, and which adaptor they are of."""
        return self._part("distance"), self._part("adaptor")

    def buffers(self) -> list[dict[str, Any]]:
        """Rows for `masw.figures.memory_by_context`, measured beside predicted."""
        return list(self._part("buffers"))

    def latency(self) -> list[dict[str, Any]]:
        """Rows for `masw.figures.latency_by_context`."""
        return list(self._part("latency"))

    def entry_bytes(self) -> int:
        """Bytes of one KV entry of the draft."""
        return int(self._part("entry_bytes"))

    # ---- demonstrations, quick enough to be computed in both modes

    def roll_back(self, read: int = 1001, drafted: int = 7, kept: int = 4) -> RolledBack:
        """Rejects a draft on purpose. trace: on the tiny pair, random weights that are made on the spot; live: on the pair's draft."""
        import torch

        from masw.explain import roll_back
        from masw.zoo import load_pair

        live = self.mode == "live"
        draft = self.session.pair.draft if live else load_pair("tiny", torch.device("cpu"), torch.float32).draft
        ids = draft.tokenizer.encode(sample_text())
        return roll_back(draft.decoder, self.shape, ids[:read], ids[read : read + drafted], kept)

    def training(self) -> dict[str, list[dict[str, Any]]]:
        """Recorded training logs by name (both modes): see docs/TRAINING.md for their lines."""
        found = sorted(recorded_folder().glob(f"training-{self.pair}-*.jsonl"))
        return {p.stem.removeprefix(f"training-{self.pair}-"): read_lines(p) for p in found}

    def train(self, seconds: float = 120.0) -> list[dict[str, Any]]:
        """Trains the pair's draft for `seconds` on the first three quarters of the sample, measured on the rest; the lines of its log.
        Live mode only."""
        if self.mode != "live":
            return []
        import tempfile

        from masw import corpus
        from masw import train as training
        from masw.recipe import recipe

        draft = self.session.pair.draft
        log: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="masw-lesson-") as name:
            folder = Path(name)
            config = recipe(
                base=draft.name, stages=("256x2:200k:1/1/0",), windows=(48, 64), strides=(8,), eval_windows=(48,), quiet=5.0,
                eval_tokens=4096, warmup_steps=4, seed=self.seed,
            )  # fmt: skip
            text, parts = sample_text(), [folder / "text", folder / "held-out"]
            cut = text.index("\n\n", len(text) * 3 // 4)
            for part, content in zip(parts, (text[:cut], text[cut:]), strict=True):
                part.mkdir()
                (part / SAMPLE).write_text(content, encoding="utf-8")
            sources = corpus.Sources(text=(str(parts[0]),), valid=(str(parts[1]),))
            read = corpus.load(sources, draft.tokenizer, folder / "tokens", self.seed, ((256, 2),), lambda _: None)
            training.train(
                config, draft.decoder, read.texts, read.answers, read.held, folder / "run", separator=read.separator,
                listener=log.append, max_seconds=seconds,
            )  # fmt: skip
        return log


def start(space: Mapping[str, Any]) -> Lesson:
    """The set-up of a notebook, given its `globals()` after the cell of parameters: shows the card of the environment with every
    parameter, says where the data come from, and returns the lesson that those parameters ask for."""
    from masw.report import environment_card

    parameters = {name: space[name] for name in space["__annotations__"]}  # the cell declares each with its type
    known = {f.name for f in fields(Lesson) if not f.name.startswith("_")}
    lesson = Lesson(**{name: value for name, value in parameters.items() if name in known})
    environment_card(parameters, dtype={"fp32": "float32", "bf16": "bfloat16"}[lesson.dtype])
    print(lesson.source)
    return lesson


def runs_of(session: Session, methods: Sequence[str], options: RunOptions, document: str = "") -> Iterator[tuple[str, Run]]:
    """Runs `methods` one after the other on one prompt (a summary of `document`, by default the sample) and names their tokens.

    `none` leads where it is asked for, so that its trace has the target's whole prefill; the others share it. A method that lacks
    what it needs (a head that nobody trained) is left out.
    """
    from masw import documents, prompts
    from masw.session import name_pieces

    target = session.pair.target
    text = documents.read(document or str(sample_path()))
    prompt = prompts.build(target.tokenizer, text, "summarize", None, session.context_limit - options.settings.max_new_tokens)
    session.warm_up(options.settings.gamma)
    for method in sorted(methods, key=lambda m: m != "none"):
        try:
            run = session.run(prompt.ids, replace(options, method=method))
        except UsageError as error:
            if "no eagle head" in str(error):
                continue
            raise
        for _ in run:
            pass
        name_pieces(run.trace, target.tokenizer)
        yield method, run


PARTS = ("attention", "distance", "entry_bytes", "buffers", "latency")


def explained(session: Session, adaptor: str = "none", longest: int = 4096, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """What the notebooks show of the draft beside runs: provenance, the adaptor's name and the `parts` asked for (attention of a slot,
    distances of the projections, bytes of an entry, buffers, step times up to `longest` tokens)."""
    import torch

    from masw import cost, explain, hardware
    from masw.provenance import provenance
    from masw.session import adaptor_for

    draft = session.pair.draft
    decoder, dtype = draft.decoder, draft.decoder.dtype
    ids = draft.tokenizer.encode(sample_text())[:SAMPLE_TOKENS]
    chosen, path = adaptor_for(decoder, draft.name, SHOWN.stride or 8, adaptor, ids)
    what = "the untrained copy" if path is None else f"{path.name}, trained on {chosen.info.tokens_seen:,} tokens"
    short, compact = MemoryShape(4, 256), MemoryShape(4, 256, 8)

    def latency() -> list[dict[str, Any]]:
        contexts = [c for c in CONTEXTS if c <= min(longest, draft.config.max_position - 64)]
        bandwidth = hardware.measure_bandwidth(torch.device("cpu"), dtype)
        return explain.step_times(
            decoder, {"full": MemoryShape(), "masw": compact, "window": short}, contexts, bandwidth=bandwidth
        )

    sizes = {"full": MemoryShape(), "masw r 4": MemoryShape(4, 256, 4), "masw r 8": compact, "window": short}
    make: dict[str, Callable[[], Any]] = {
        "attention": lambda: {**explain.slot_attention(decoder, chosen, ids, SHOWN, SLOT), "note": f"Adaptor: {what}."},
        "distance": lambda: explain.projection_distance(decoder, chosen),
        "entry_bytes": lambda: cost.kv_entry_bytes(draft.config, dtype.itemsize),
        "buffers": lambda: explain.buffers(draft.config, sizes, CONTEXTS, dtype),
        "latency": latency,
    }
    about = {"provenance": {"sample": SAMPLE, **provenance(decoder.device, dtype)}, "adaptor": what}
    return {**about, **{name: make[name]() for name in parts if name in make}}


def from_where_asked(document: str) -> str:
    """The path of a document as the person who asked for a report meant it: a kernel works in a folder of its own."""
    return str(Path(os.environ.get("MASW_REPORT_FROM", "."), document)) if document else ""


def recorded_folder() -> Path:
    from masw.session import data_folder

    return data_folder() / "traces"


def recorded_pairs() -> list[str]:
    """Pairs whose runs come with masw."""
    return sorted(path.name.removesuffix("-explained.json") for path in recorded_folder().glob("*-explained.json"))


def sample_path() -> Path:
    from masw.session import data_folder

    return data_folder() / "samples" / SAMPLE


def sample_text() -> str:
    return sample_path().read_text(encoding="utf-8")


def _read(name: str) -> dict[str, Any]:
    path = recorded_folder() / name
    if not path.is_file():
        raise UsageError(f'{name} is not recorded; use mode = "live"')
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
