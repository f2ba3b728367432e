"""The benchmark: a grid of documents, contexts, methods and repeats, run cell by cell into a table (masw.results).

Every cell is on disk before the next one starts, so an interrupted grid goes on where it stood. Within a repeat the methods take
turns on one document, whose KV in the target they share.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import psutil

from masw import cost
from masw.cases import Case, long_cases
from masw.config import MemoryShape
from masw.devices import peak_bytes, reset_peak
from masw.engine import Round, Settings
from masw.errors import UsageError, plain_words
from masw.methods import METHODS, MemoryOptions, method_named
from masw.metrics import Summary
from masw.peers import PEERS, PeerRun, Peers
from masw.provenance import provenance
from masw.results import BASE, Cell, Definition, Key, Table
from masw.session import RunOptions, Session
from masw.zoo import free_bytes

Note = Callable[[str], None]


@dataclass(frozen=True)
class Grid:
    """What is run."""

    definition: Definition
    methods: tuple[str, ...]
    cases: tuple[Case, ...]  # in the order in which they run
    repeats: int

    def options(self, method: str, eos_ids: tuple[int, ...]) -> RunOptions:
        d = self.definition
        settings = Settings(max_new_tokens=d.max_new_tokens, gamma=d.gamma, eos_ids=eos_ids, adaptive=d.adaptive)
        return RunOptions(method, MemoryOptions(d.sinks, d.window, d.stride), settings, d.adaptor, d.draft_weights, d.eagle)

    def __iter__(self) -> Iterator[Key]:
        for case in self.cases:
            for repeat in range(self.repeats):
                for method in self.methods:
                    yield (case.set, case.id, case.context, repeat, method)


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Known methods and peers, each once, `none` among them. Raises UsageError with the nearest names."""
    for name in names:
        if name not in PEERS and name not in METHODS:
            try:
                method_named(name)
            except UsageError as error:
                raise UsageError(f"{error}{_near(name)}; peers: {', '.join(PEERS)}") from None
    return tuple(dict.fromkeys((BASE, *names)))


def runnable(session: Session, methods: Sequence[str], asked: Sequence[str], eagle: str, note: Note) -> tuple[str, ...]:
    """Without rows that need a head that is not here, unless they were `asked` for by name: then UsageError."""
    found = []
    for method in methods:
        if method in METHODS and METHODS[method].head:
            try:
                session.eagle_head(eagle)
            except UsageError as error:
                if method in asked:
                    raise
                note(f"{method} is left out: {error}")
                continue
        found.append(method)
    return tuple(found)


def _near(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [*METHODS, *PEERS], n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def cases(
    data: dict[str, list[dict[str, str]]], session: Session, contexts: Sequence[int], docs: int, max_new_tokens: int
) -> list[Case]:
    """The first `docs` documents of each set that fill a context, short contexts first.

    A prompt has `context` tokens, fewer where the pair would have no positions left for the answer.
    """
    most = session.context_limit - max_new_tokens
    found: list[Case] = []
    for context in sorted(set(contexts)):
        if context > session.context_limit or most < 16:
            raise UsageError(
                f"a context of {context:,} tokens and {max_new_tokens:,} new ones exceed the pair's {session.context_limit:,} "
                "positions; lower --contexts or --max-new-tokens"
            )
        for name, rows in data.items():
            chosen = long_cases(name, rows, session.pair.target.tokenizer, min(context, most), docs)
            found += [replace(case, context=context) for case in chosen]
    return found


class Budget:
    """Seconds that a cell and the rest of the grid will take: the cost model, corrected by the cells that ran."""

    def __init__(self, seconds: dict[Key, float]) -> None:
        self._predicted = dict(seconds)
        self._left = dict(seconds)
        self._ratios: dict[str, list[float]] = {}  # measured over predicted, by method

    def of(self, key: Key) -> float:
        ratios = self._ratios.get(key[4]) or [r for found in self._ratios.values() for r in found]
        return self._predicted[key] * (fmean(ratios[-8:]) if ratios else 2.0)

    def finish(self, key: Key, seconds: float, *, count: bool = True) -> None:
        self._left.pop(key, None)
        if count and self._predicted.get(key):
            self._ratios.setdefault(key[4], []).append(seconds / self._predicted[key])

    @property
    def left_s(self) -> float:
        return sum(self.of(key) for key in self._left)


class Bench:
    """Runs a grid on one session and keeps its table."""

    def __init__(
        self, session: Session, grid: Grid, table: Table, rates: cost.Rates, note: Note, stop: Callable[[], bool]
    ) -> None:
        self._session, self._grid, self._table, self._rates = session, grid, table, rates
        self._note, self._stop = note, stop
        self._peers = Peers(session.pair)
        self._id = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        self._baseline = self._held_beside_weights()

    def check_memory(self) -> None:
        """Refuses a grid whose largest cell does not fit, with the estimate."""
        longest = max(len(case.prompt) for case in self._grid.cases) + self._grid.definition.max_new_tokens
        for method in self._grid.methods:
            if method not in PEERS:
                try:
                    self._session.check_memory(self._options(method), longest)
                except UsageError as error:
                    raise UsageError(f"{method}: {str(error).replace('--max-context', '--contexts')}") from None
        if any(method in PEERS for method in self._grid.methods):
            need = self._peer_bytes(longest, any(PEERS[m].assisted for m in self._grid.methods if m in PEERS))
            free = free_bytes(self._session.pair.target.decoder.device)
            if need > free:
                raise UsageError(
                    f"transformers' own run at {longest:,} tokens needs about {need / 2**30:.1f} GiB beside the weights and "
                    f"{free / 2**30:.1f} GiB are free; lower --contexts or leave out {', '.join(PEERS)}"
                )

    def run(self) -> None:
        """Runs what is missing. Returns early when `stop()` turns true; the cell that was cut is not kept."""
        grid, done = self._grid, self._table.done
        keys = [key for key in grid if key not in done]
        if not keys:
            return
        device, dtype = self._session.pair.target.decoder.device, self._session.pair.target.decoder.dtype
        self._table.open_session({"id": self._id, "provenance": provenance(device, dtype), "rates": asdict(self._rates)})
        budget = Budget({key: self._seconds(key) for key in keys})
        self._session.warm_up(grid.definition.gamma, grid.definition.draft_weights)
        number = 0
        for case in grid.cases:
            missing = {
                r: [m for m in grid.methods if (case.set, case.id, case.context, r, m) not in done] for r in range(grid.repeats)
            }
            if not any(missing.values()):
                continue
            try:
                prefill = self._prefill(case)
            except Exception as error:
                for repeat, methods in missing.items():
                    for method in methods:
                        number += 1
                        self._fail(case, repeat, method, error, budget)
                continue
            reference: list[int] | None = None
            for repeat, methods in missing.items():
                if not methods:
                    continue
                # A repeat that goes on later measures `none` again: only cells of one session are paired.
                order = list(dict.fromkeys((BASE, *methods)))
                if repeat % 2 and reference is not None:
                    order.reverse()
                for method in order:
                    if self._stop():
                        return
                    key = (case.set, case.id, case.context, repeat, method)
                    number += method in methods
                    estimate = f"about {_span(budget.of(key))}, " if key in keys else ""
                    self._note(
                        f"[{number}/{len(keys)}] {case.set} {case.context:,} {case.id} repeat {repeat + 1} {method}: "
                        f"{estimate}{_span(budget.left_s)} left"
                    )
                    start = time.perf_counter()
                    try:
                        cell, tokens = self._cell(case, repeat, method, prefill, reference)
                    except Exception as error:
                        self._fail(case, repeat, method, error, budget)
                        continue
                    if self._stop():
                        return
                    wall = time.perf_counter() - start
                    self._table.add(replace(cell, wall_s=wall))
                    budget.finish(key, wall)
                    if method == BASE:
                        reference = tokens

    # ---- one cell

    def _cell(
        self, case: Case, repeat: int, method: str, prefill: Summary, reference: list[int] | None
    ) -> tuple[Cell, list[int]]:
        device = self._session.pair.target.decoder.device
        gc.collect()
        reset_peak(device)
        cell = Cell(case.set, case.id, case.context, repeat, method, self._id, prompt_tokens=len(case.prompt))
        if method in PEERS:
            cell, tokens = self._peer_cell(case, cell)
        else:
            cell, tokens = self._own_cell(case, cell, prefill)
        cell = replace(cell, peak_memory_bytes=peak_bytes(device))
        if method == BASE or self._stop():
            return cell, tokens
        if reference is not None:
            d = self._session.difference(case.prompt, tokens, reference)
            cell = replace(cell, identical_to_greedy=d is None)
            if d is not None:
                cell = replace(cell, first_difference=d.index, logit_gap=d.logit_gap)
        return cell, tokens

    def _own_cell(self, case: Case, cell: Cell, prefill: Summary) -> tuple[Cell, list[int]]:
        options = self._options(cell.method)
        job = self._session.run(case.prompt, options, self._stop)
        for _ in job:
            pass
        if self._stop():
            return cell, []
        s, header = job.summary(), job.trace.header
        name = _file_name(cell)
        job.trace.save(self._table.folder / "traces" / name)
        # A head on the target's features has it read the prompt again, within this run; all others share what was read.
        again = s.prefill_ms["target"]
        shared_ms = (prefill.prefill_ms["target"] or 0.0) if again is None else 0.0
        drafted = sum(e.count for kind in ("accept", "reject") for e in job.trace.of(kind))
        drafted += sum(int(e.data.get("discarded", 0)) for e in job.trace.of("accept"))
        drafts = job.trace.of("draft")
        # Beside a copier a drafted token costs a step or nothing: only the mean says what drafting took.
        stepped = fmean(e.data["read"] > 0 for e in drafts) if drafts else 0.0
        kv = header.get("draft_kv") or {}
        cell = replace(
            cell,
            new_tokens=len(s.tokens),
            finish=s.finish,
            prefill_draft_ms=s.prefill_ms["draft"],
            prefill_target_ms=shared_ms + (again or 0.0),
            ttft_ms=shared_ms + s.ttft_ms if s.ttft_ms is not None else None,
            decode_ms=s.decode_ms,
            end_to_end_ms=shared_ms + s.end_to_end_ms,
            decode_tokens_per_second=s.tokens_per_second,
            end_to_end_tokens_per_second=1e3 * len(s.tokens) / (shared_ms + s.end_to_end_ms),
            iterations=s.rounds,
            tokens_per_iteration=s.tokens_per_iteration,
            tokens_per_iteration_without_bonus=s.tokens_per_iteration_without_bonus,
            acceptance=s.acceptance,
            acceptance_by_position=[round(share, 4) for share in s.acceptance_by_position],
            drafted_per_iteration=drafted / s.rounds if s.rounds else None,
            draft_ms=fmean(e.ms for e in drafts) if drafts else None,
            verify_ms=s.verify_ms,
            upkeep_ms=s.upkeep_ms,
            draft_weights=header.get("draft_weights"),
            draft_kv_bytes=kv.get("allocated_bytes"),
            draft_kv_predicted_bytes=kv.get("predicted_bytes"),
            draft_kv_ratio=kv["allocated_bytes"] / kv["full_bytes"] if kv else None,
            trace=f"traces/{name}",
        )
        return self._floors(cell, options, stepped), s.tokens

    def _floors(self, cell: Cell, options: RunOptions, stepped: float) -> Cell:
        """The same cell as the cost model sees it; `stepped` is the share of drafted tokens that took a step of a model."""
        target, draft, rates = self._session.pair.target.config, self._session.draft_config(options), self._rates
        size, full, prompt = self._session.pair.target.decoder.dtype.itemsize, MemoryShape(), cell.prompt_tokens or 0
        at = prompt + (cell.new_tokens or 0) // 2
        rows = 1 + round(cell.drafted_per_iteration or 0)
        shape = options.shape(prompt - 1)
        cell = replace(
            cell,
            verify_floor_ms=cost.pass_ms(target, full, at, size, rates, rows=rows),
            prefill_target_floor_ms=cost.prefill_ms(target, full, prompt, size, rates),
            peak_memory_predicted_bytes=self._session.run_bytes(
                options, prompt + self._grid.definition.max_new_tokens, self._baseline
            ),
        )
        if cell.draft_weights is None:  # no model drafts
            return cell if cell.draft_ms is None else replace(cell, draft_floor_ms=0.0)
        if shape is None:
            return cell
        return replace(
            cell,
            draft_floor_ms=stepped * cost.pass_ms(draft, shape, at, size, rates, kind=cell.draft_weights),
            prefill_draft_floor_ms=cost.prefill_ms(draft, shape, prompt, size, rates),
        )

    def _peer_cell(self, case: Case, cell: Cell) -> tuple[Cell, list[int]]:
        d, pair, peer = self._grid.definition, self._session.pair, PEERS[cell.method]
        run = self._peers.run(
            peer, case.prompt, gamma=d.gamma, max_new_tokens=d.max_new_tokens, eos_ids=pair.target.eos_ids, stop=self._stop
        )
        finish = "eos" if run.tokens and run.tokens[-1] in pair.target.eos_ids else "length"
        return replace(cell, finish=finish, **_peer_times(run)), run.tokens

    def _prefill(self, case: Case) -> Summary:
        """Lets the target read the prompt, all of it, whatever it read before; the runs that follow share its KV."""
        self._session.forget()
        job = self._session.run(case.prompt, self._options(BASE), self._stop)
        for step in job:
            if isinstance(step, Round):
                break
        return job.summary()

    def _fail(self, case: Case, repeat: int, method: str, error: Exception, budget: Budget) -> None:
        reason = plain_words(error)
        self._note(f"{method} failed: {reason}")
        cell = Cell(case.set, case.id, case.context, repeat, method, self._id, reason, len(case.prompt))
        self._table.add(cell)
        budget.finish(cell.key, 0.0, count=False)

    def _options(self, method: str) -> RunOptions:
        return self._grid.options(method, self._session.pair.target.eos_ids)

    def _seconds(self, key: Key) -> float:
        """What the cost model says of a cell: every new token through a pass of the target, and what the method reads beside it."""
        pair, d, (_, _, context, _, method) = self._session.pair, self._grid.definition, key
        size = pair.target.decoder.dtype.itemsize
        ms = d.max_new_tokens * cost.pass_ms(pair.target.config, MemoryShape(), context, size, self._rates)
        if method in PEERS or METHODS[method].head:
            ms += cost.prefill_ms(pair.target.config, MemoryShape(), context, size, self._rates)
        if method not in PEERS and (shape := self._options(method).shape(context)) is not None:
            ms += cost.prefill_ms(self._session.draft_config(self._options(method)), shape, context, size, self._rates)
        return ms / 1e3

    def _peer_bytes(self, tokens: int, assisted: bool) -> int:
        """transformers reads a prompt in one piece: its activations grow with it. The weights are ours."""
        target, draft = self._session.pair.target, self._session.pair.draft
        size = target.decoder.dtype.itemsize
        kv = sum(cost.kv_bytes(m.config, MemoryShape(), tokens, size) for m in (target, draft)[: 1 + assisted])
        return kv + tokens * (4 * target.config.intermediate + 4 * target.config.q_width + 4 * target.config.hidden) * size

    def _held_beside_weights(self) -> int:
        """Bytes of libraries and buffers, for the predicted peak of a process on the CPU."""
        pair = self._session.pair
        if pair.target.decoder.device.type != "cpu":
            return 0
        weights = pair.target.decoder.nbytes + (0 if pair.self_pair else pair.draft.decoder.nbytes)
        return max(0, int(psutil.Process().memory_info().rss) - weights)


def _peer_times(run: PeerRun) -> dict[str, Any]:
    """A peer's cell: its prefill is inside its first iteration, so decoding is what comes after that."""
    count, later = len(run.tokens), len(run.tokens) - (run.deliveries[0] if run.deliveries else 0)
    decode_ms = run.total_ms - run.first_ms
    return {
        "new_tokens": count,
        "ttft_ms": run.first_ms,
        "decode_ms": decode_ms,
        "end_to_end_ms": run.total_ms,
        "decode_tokens_per_second": 1e3 * later / decode_ms if later and decode_ms else None,
        "end_to_end_tokens_per_second": 1e3 * count / run.total_ms if count else None,
        "iterations": len(run.deliveries),
        "tokens_per_iteration": count / len(run.deliveries) if run.deliveries else None,
    }


def _file_name(cell: Cell) -> str:
    name, document = (re.sub(r"[^\w.-]+", "_", text)[:60] for text in (cell.set, cell.document))
    return f"{name}-{cell.context}-{document}-{cell.method}-r{cell.repeat}.jsonl"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
