"""Speed and memory of the core as ratios from one run.

The things that are compared take turns, step by step, so that whatever else the machine does falls on both; a ratio is the median of
the paired ratios and stands beside its quartiles. The floor is what the same work costs at the read bandwidth and product rate
measured in this run: bytes / bandwidth for a step, the larger of that and FLOPs / rate for a block.

    python scripts/bench_core.py [--only decode,verify] [--document REPORT.txt|ROWS.jsonl[:ROW]] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import operator
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

from masw import cost, hardware, peers
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.engine import Round, Settings
from masw.linear import linear
from masw.memory import Memory
from masw.metrics import Summary
from masw.prefill import CHUNK
from masw.prompts import build
from masw.provenance import provenance
from masw.quantise import quantised
from masw.session import RunOptions, Session
from masw.zoo import Model, Pair, load_pair

K = TypeVar("K")
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
PROMPT_TOKENS, LONG_TOKENS, DRAFT_TOKENS = 4096, 8192, 2048
GAMMAS = (5, 7)  # blocks whose verify pass is timed
MASW = MemoryShape(sinks=4, window=512, stride=8)
GUIDE = Path(__file__).parent.parent / "data" / "samples" / "guide.md"
PARTS = ("step", "decode", "prefill", "verify", "int4", "speculate", "overhead", "bytes", "peak")


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is ours / other; times in ms, sizes in MB (10^6 bytes)."""

    part: str
    what: str
    ours: float
    other: float | None
    unit: str
    ratio: float
    quartiles: tuple[float, float] | None
    goal: str  # "<= 0.6"
    floor: float | None = None  # of ours, in its unit

    @property
    def met(self) -> bool | None:
        """None: nothing is asked."""
        if not self.goal:
            return None
        sign, limit = self.goal.split()
        compare = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}[sign]
        return bool(compare(self.ratio, float(limit)))


class Bench:
    """Loads each pair once; one method a part. Most parts are about one pair, `name`."""

    def __init__(self, document: str, quick: bool, name: str = "qwen2.5-coder") -> None:
        self.document, self.quick, self.name = document, quick, name
        self.machine = cost.Rates(hardware.measure_bandwidth(CPU, DTYPE), hardware.measure_gemm(CPU, DTYPE))
        self._pairs: dict[str, Pair] = {}

    def pair(self, name: str) -> Pair:
        if name not in self._pairs:
            self._pairs[name] = load_pair(name, CPU, DTYPE)
        return self._pairs[name]

    # ---- parts

    def step(self) -> Iterator[Row]:
        """A decode step after 4K tokens against transformers' forward with its dynamic cache, on the same weights."""
        for model, goal in ((self.pair("smollm2").target, "<= 0.6"), (self.pair(self.name).draft, "<= 1.0")):
            tokens = self._tokens(model, PROMPT_TOKENS)
            ours = {"ours": self._stepper(model.decoder, self._filled(model, tokens), 1)}
            others = {f"transformers {kind}": peers.stepper(model, tokens, kind, CHUNK) for kind in ("sdpa", "eager")}
            times = alternate(ours | others, self._count(24))
            floor = cost.pass_ms(model.config, MemoryShape(), PROMPT_TOKENS, DTYPE.itemsize, self.machine)
            for name in others:
                yield _paired("step", f"{model.name}: decode step / {name}", times["ours"], times[name], goal, floor)

    def prefill(self) -> Iterator[Row]:
        """4K tokens in chunks against the bare matrix products of the same chunks."""
        models = [self.pair("smollm2").target, self.pair(self.name).draft, self.pair(self.name).target]
        for model in models[: 1 if self.quick else 3]:
            tokens = self._tokens(model, PROMPT_TOKENS)
            work: dict[str, Callable[[], object]] = {
                "prefill": partial(self._filled, model, tokens),
                "products": _products(model, PROMPT_TOKENS),
            }
            times = alternate(work, self._count(3), warm_up=False)
            c = model.config
            floor = cost.prefill_ms(c, MemoryShape(), PROMPT_TOKENS, DTYPE.itemsize, self.machine)
            yield _paired(
                "prefill", f"{model.name}: 4K prefill / its linear layers", times["prefill"], times["products"], "", floor
            )

    def decode(self) -> Iterator[Row]:
        """A decode step of both models after 4K tokens against its own floor, bytes / bandwidth."""
        models = {model.name: model for model in (self.pair(self.name).draft, self.pair(self.name).target)}
        work = {n: self._stepper(m.decoder, self._noise(m, PROMPT_TOKENS), 1) for n, m in models.items()}
        times = alternate(work, self._count(24))
        for name, model in models.items():
            floor = cost.pass_ms(model.config, MemoryShape(), PROMPT_TOKENS, DTYPE.itemsize, self.machine)
            yield _paired(
                "decode", f"{name}: decode step at 4K / floor", times[name], [floor] * len(times[name]), "<= 1.8", floor
            )

    def verify(self) -> Iterator[Row]:
        """Verify passes of gamma + 1 tokens against a decode step, all after 4K tokens."""
        model = self.pair(self.name).target
        memory = self._noise(model, PROMPT_TOKENS)
        work = {rows: self._stepper(model.decoder, memory, rows) for rows in (*(gamma + 1 for gamma in GAMMAS), 1)}
        times = alternate(work, self._count(16))
        for gamma in GAMMAS:
            floor = cost.pass_ms(model.config, MemoryShape(), PROMPT_TOKENS, DTYPE.itemsize, self.machine, rows=gamma + 1)
            what = f"{model.name}: verify {gamma + 1} tokens / decode step"
            yield _paired("verify", what, times[gamma + 1], times[1], "<= 1.5", floor)

    def int4(self) -> Iterator[Row]:
        """A draft step after 2K tokens with int4 weights against the same step in bf16."""
        model = self.pair(self.name).draft
        decoders = {"int4": quantised(model.decoder, "int4"), "bf16": model.decoder}
        work = {kind: self._stepper(decoder, self._noise(model, DRAFT_TOKENS), 1) for kind, decoder in decoders.items()}
        times = alternate(work, self._count(24))
        floor = cost.pass_ms(model.config, MemoryShape(), DRAFT_TOKENS, DTYPE.itemsize, self.machine, kind="int4")
        yield _paired("int4", f"{model.name}: int4 draft step at 2K / bf16", times["int4"], times["bf16"], "<= 0.5", floor)

    def speculate(self) -> Iterator[Row]:
        """The whole loop with the full-KV draft against the same loop with no draft, on one document."""
        session = Session(self.pair(self.name))
        new = 48 if self.quick else 128
        pairs = [(self._decode(session, "full", new), self._decode(session, "none", new)) for _ in range(self._count(4))]
        rates = [(_rate(a), _rate(b)) for a, b in pairs]
        iteration = median(float(a.tokens_per_iteration or 0) for a, _ in pairs)
        kind, _ = session.draft_decoder("auto")
        what = f"{self.name}: full-KV {kind} draft, gamma 5 / autoregressive ({iteration:.2f} tokens an iteration)"
        yield _row("speculate", what, [a for a, _ in rates], [b for _, b in rates], "tok/s", ">= 1.6", None)

    def overhead(self) -> Iterator[Row]:
        """Time of a round outside the two models' forwards, as a share of the round."""
        pair = self.pair(self.name)
        session = Session(pair)
        settings = Settings(max_new_tokens=24 if self.quick else 48)
        for method in ("none", "full", "masw"):
            forwards: list[float] = []  # ms of each round
            with timed({pair.target.decoder, session.draft_decoder("auto")[1]}) as spans:
                run = session.run(self._prompt(session), RunOptions(method=method, settings=settings))
                for item in run:
                    if isinstance(item, Round):
                        forwards.append(sum(spans))
                    spans.clear()
            rounds = [event.ms for event in run.trace.of("emit")]
            outside = [whole - inside for whole, inside in zip(rounds, forwards, strict=True)]
            yield _row(
                "overhead", f"{self.name}, {method}: outside the forwards / a round", outside, rounds, "ms", "<= 0.05", None
            )

    def bytes(self) -> Iterator[Row]:
        """Draft KV allocated for 8K tokens, against a full draft KV and against the formula."""
        model = self.pair(self.name).draft
        shape = MASW
        adaptor = Adaptor.copied(model.decoder, AdaptorInfo(model.name, ()))
        memory = Memory(model.config, shape, tokens=LONG_TOKENS, device=CPU, dtype=DTYPE, adaptor=adaptor)
        full = cost.kv_bytes(model.config, MemoryShape(), LONG_TOKENS, DTYPE.itemsize)
        predicted = cost.kv_bytes(model.config, shape, LONG_TOKENS, DTYPE.itemsize)
        for what, other, goal in (("full KV", full, "<= 0.20"), ("the formula", predicted, "= 1.0")):
            ratio = memory.nbytes / other
            yield Row("bytes", f"{model.name}: MASW KV at 8K / {what}", memory.nbytes / 1e6, other / 1e6, "MB", ratio, None, goal)

    def peak(self) -> Iterator[Row]:
        """High-water mark of a fresh process that loads the pair, reads 8K tokens with both and decodes a little."""
        command = [sys.executable, __file__, "--peak-of", self.name]
        done = subprocess.run(command, input=self.document, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the peak memory process failed: {done.stderr.strip().splitlines()[-1:]}")
        peak = float(done.stdout.split()[-1])
        pair = self.pair(self.name)
        kind, baseline = Session(pair).draft_kind("auto"), int(done.stdout.split()[-2])
        predicted = cost.run_bytes(
            pair.target.config, pair.draft.config, MASW, LONG_TOKENS, DTYPE.itemsize, shared=False, kind=kind, baseline=baseline
        )
        yield Row(
            "peak",
            f"{self.name} at 8K: peak memory / 7 GB (floor: predicted)",
            peak / 1e6,
            7e3,
            "MB",
            peak / 7e9,
            None,
            "<= 1.0",
            predicted / 1e6,
        )

    # ---- inside

    def _count(self, repeats: int) -> int:
        return max(2, repeats // 4) if self.quick else repeats

    def _tokens(self, model: Model, count: int) -> list[int]:
        ids = model.tokenizer.encode(self.document)
        return (ids * (count // len(ids) + 1))[:count]

    def _prompt(self, session: Session) -> list[int]:
        return build(session.pair.target.tokenizer, self.document, "summarize", None, PROMPT_TOKENS).ids

    @torch.no_grad()
    def _filled(self, model: Model, tokens: list[int]) -> Memory:
        """A full memory that has read `tokens`."""
        memory = Memory(model.config, MemoryShape(), tokens=len(tokens) + 512, device=CPU, dtype=DTYPE)
        for start in range(0, len(tokens), CHUNK):
            model.decoder.forward(torch.tensor([tokens[start : start + CHUNK]]), memory)
            memory.commit()
        return memory

    def _noise(self, model: Model, tokens: int) -> Memory:
        """A full memory of `tokens` tokens of noise: a step takes as long on it as on text."""
        memory = Memory(model.config, MemoryShape(), tokens=tokens + 512, device=CPU, dtype=DTYPE)
        memory.fill(tokens)
        return memory

    def _stepper(self, decoder: Decoder, memory: Memory, rows: int) -> Callable[[], object]:
        """Reads `rows` tokens and computes the logits of each; the memory then stands where it stood."""
        tokens = memory.tokens()[:, :rows].clone()

        @torch.no_grad()
        def step() -> torch.Tensor:
            logits = decoder.logits(decoder.forward(tokens, memory))
            if rows > 1:
                memory.rollback(rows - 1)
            return logits

        return step

    def _decode(self, session: Session, method: str, new: int) -> Summary:
        # No end tokens: both runs emit the same number of tokens.
        run = session.run(self._prompt(session), RunOptions(method=method, settings=Settings(max_new_tokens=new, gamma=5)))
        for _ in run:
            pass
        return run.summary()


def alternate(work: dict[K, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[K, list[float]]:
    """Times (ms) of each piece of `work`, taken in turns; every second round goes the other way about."""
    times: dict[K, list[float]] = {name: [] for name in work}
    for index in range(repeats + warm_up):
        for name in list(work) if index % 2 else reversed(list(work)):
            start = time.perf_counter()
            work[name]()
            if index >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


@contextmanager
def timed(decoders: set[Decoder]) -> Iterator[list[float]]:
    """Collects the ms of every forward and every product with the LM head."""
    spans: list[float] = []

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            spans.append((time.perf_counter() - start) * 1e3)
            return result

        return call

    for decoder in decoders:
        decoder.forward, decoder.logits = wrap(decoder.forward), wrap(decoder.logits)  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        for decoder in decoders:
            del decoder.forward, decoder.logits


def _products(model: Model, tokens: int) -> Callable[[], None]:
    """The linear layers of a prefill and nothing else."""
    c = model.config
    x, a, m = (torch.randn(1, CHUNK, width, dtype=DTYPE) for width in (c.hidden, c.q_width, c.intermediate))

    @torch.no_grad()
    def products() -> None:
        for _ in range(tokens // CHUNK):
            for w in model.decoder.weights.layers:
                for value, weight in ((x, w.qkv), (a, w.out), (x, w.gate_up), (m, w.down)):
                    linear(value, weight)

    return products


def _rate(summary: Summary) -> float:
    return float(summary.tokens_per_second or 0.0)


def _paired(part: str, what: str, ours: list[float], other: list[float], goal: str, floor: float) -> Row:
    return _row(part, what, ours, other, "ms", goal, floor)


def _row(part: str, what: str, ours: list[float], other: list[float], unit: str, goal: str, floor: float | None) -> Row:
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Row(part, what, median(ours), median(other), unit, median(ratios), (low, high), goal, floor)


def table(rows: list[Row]) -> str:
    head = ("part", "what", "ours", "other", "unit", "floor", "ratio", "quartiles", "goal", "met")
    lines: list[tuple[str, ...]] = [head]
    for r in rows:
        spread = f"{r.quartiles[0]:.3f}-{r.quartiles[1]:.3f}" if r.quartiles else ""
        met = {None: "", True: "yes", False: "NO"}[r.met]
        numbers = ["" if x is None else f"{x:,.1f}" for x in (r.ours, r.other)]
        floor = "" if r.floor is None else f"{r.floor:,.1f}"
        lines.append((r.part, r.what, *numbers, r.unit, floor, f"{r.ratio:.3f}", spread, r.goal, met))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = (0, 1, 4)
    cells = [
        [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))] for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def read_document(spec: str) -> str:
    """A text file, or a row of a JSON lines file with a `text` field (ROWS.jsonl:3; the first row if none is named)."""
    name, _, row = spec.rpartition(":") if spec.rpartition(":")[2].isdigit() else (spec, "", "0")
    text = Path(name).read_text(encoding="utf-8-sig")
    return str(json.loads(text.splitlines()[int(row)])["text"]) if name.endswith(".jsonl") else text


def peak_of(pair_name: str) -> None:
    """Runs in a process of its own: standard input is the document, the last words of standard output are the bytes held before
    the pair was loaded and the peak."""
    baseline = hardware.peak_rss_bytes()
    pair = load_pair(pair_name, CPU, DTYPE)
    session = Session(pair)
    ids = pair.target.tokenizer.encode(sys.stdin.read())
    prompt = (ids * (LONG_TOKENS // len(ids) + 1))[: LONG_TOKENS - 16]
    for _ in session.run(prompt, RunOptions(method="masw", settings=Settings(max_new_tokens=16))):
        pass
    print(baseline, hardware.peak_rss_bytes())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of the core as ratios from one run.")
    parser.add_argument("--only", "--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument(
        "--pair", default="qwen2.5-coder", help="pair of the parts that are about one (goals are those of the default)"
    )
    parser.add_argument("--document", default=str(GUIDE), help="text file, or FILE.jsonl[:ROW] with a text field")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: as torch chooses)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repeats: a look, not a measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peak-of", metavar="PAIR", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak_of:
        peak_of(options.peak_of)
        return 0
    parts = options.only.split(",")
    if unknown := [p for p in parts if p not in PARTS]:
        parser.error(f"part '{unknown[0]}' is unknown; use one of {', '.join(PARTS)}")
    try:
        document = read_document(options.document)
    except (OSError, ValueError, KeyError, IndexError) as error:
        parser.error(f"cannot read the document {options.document}: {error}")
    bench = Bench(document, options.quick, options.pair)
    rows: list[Row] = []
    for part in parts:
        for row in getattr(bench, part)():
            rows.append(row)
            print(f"{row.part}: {row.what}: {row.ratio:.3f}", file=sys.stderr, flush=True)
    rates = (
        f"read bandwidth {bench.machine.bytes_per_s / 1e9:.1f} GB/s, bf16 product {bench.machine.flops_per_s / 1e12:.2f} TFLOP/s"
    )
    if options.json:
        found = [asdict(r) | {"met": r.met} for r in rows]
        print(json.dumps({"rows": found, "machine": asdict(bench.machine), "provenance": provenance(CPU, DTYPE)}))
    else:
        where = provenance(CPU, DTYPE)
        print(
            f"{where['device']}, {where['threads']} threads, torch {where['torch']}, transformers {where['transformers']}; {rates}"
        )
        print(table(rows))
    return 1 if any(r.met is False for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
