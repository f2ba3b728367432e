"""`masw eval-adaptor`: how much of an uncompressed draft's acceptance a compact memory keeps."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.alone import alone
from masw.cli.training import hours, interruptible, note
from masw.errors import Cancelled, MaswError, UsageError, plain_words

if TYPE_CHECKING:
    from masw.cases import Case
    from masw.evaluate import Judged, Row
    from masw.judged import JudgedFile


def eval_adaptor(
    context: typer.Context,
    data: Annotated[
        list[Path], typer.Option(help="Evaluation rows (JSON lines: text, question; or LongBench's own). Repeatable.")
    ],
    pair: Annotated[str, typer.Option(help="Preset or DRAFT:TARGET.")] = "smollm2",
    docs: Annotated[int, typer.Option(help="Documents per file and context, those that fill it.")] = 4,
    contexts: Annotated[str, typer.Option(help="Prompt lengths, tokens: 2k,4k,8k.")] = "2k",
    windows: Annotated[str, typer.Option(help="W: 128,256,512.")] = "256",
    strides: Annotated[str, typer.Option(help="r: 4,8.")] = "8",
    sinks: Annotated[int, typer.Option(help="S.")] = 4,
    gammas: Annotated[str, typer.Option(help="Drafted tokens per verify pass; retention is taken at the first.")] = "5,8",
    answer_tokens: Annotated[int, typer.Option(help="Length of the target's greedy answer at most.")] = 128,
    recall: Annotated[
        bool,
        typer.Option(
            "--recall", help="Also plant a fact far back in each document and ask for it; agreement there is that of its tokens."
        ),
    ] = False,
    adaptor: Annotated[
        str, typer.Option(help="auto | PATH | none (untrained only) | quiet (untrained, made quiet on the first prompt).")
    ] = "auto",
    draft_weights: Annotated[
        str, typer.Option(help="plain | int8 | int4, or several: each method once more with each, beside plain.")
    ] = "plain",
    out: Annotated[
        Path | None, typer.Option(help="Keep each measured case in this .jsonl file; the same command goes on from it.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
) -> None:
    """Measure draft memories on the target's own greedy answers: agreement, tokens per iteration, KL, retention, recovered gap."""
    from dataclasses import asdict

    from masw import cases, evaluate, judged
    from masw.adaptor import read_info
    from masw.config import MemoryShape
    from masw.devices import resolve_device, resolve_dtype
    from masw.provenance import provenance
    from masw.quantise import KINDS
    from masw.session import Session, adaptor_for
    from masw.zoo import load_pair

    lengths, wide, steps, blocks = (numbers(name, text) for name, text in
        (("contexts", contexts), ("windows", windows), ("strides", strides), ("gammas", gammas)))  # fmt: skip
    for window in wide:
        for stride in steps:
            for gamma in blocks:
                MemoryShape(sinks, window, stride).check_block(gamma)
    if docs < 1 or answer_tokens < 2:
        raise UsageError(f"--docs must be at least 1 and --answer-tokens at least 2, not {docs} and {answer_tokens}")
    kinds = [kind.strip() for kind in draft_weights.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"draft weights '{unknown[0]}' are unknown; use some of {', '.join(KINDS)}")
    if adaptor not in ("auto", "none", "quiet"):
        read_info(Path(adaptor))
    data = list(dict.fromkeys(data))
    cases.check_names(data)
    for path in data:
        cases.rows(path)
    if out is not None:
        judged.check(out)
        context.with_resource(alone(out))
    where = resolve_device(device)
    with interruptible(
        f"interrupted while the models of {pair} were fetched or loaded; what was fetched is kept, nothing was lost"
    ):
        session = Session(load_pair(pair, device=where, dtype=resolve_dtype(dtype, where)))
    draft, tokenizer = session.pair.draft, session.pair.target.tokenizer
    longest = max(answer_tokens, cases.RECALL_TOKENS if recall else 0)
    if max(lengths) + longest > session.context_limit:
        raise UsageError(
            f"a context of {max(lengths):,} and its answer exceed the pair's {session.context_limit:,} tokens; lower --contexts"
        )
    chosen = list(cases.grid(data, tokenizer, lengths, docs, recall=recall))
    if not chosen:
        raise UsageError(f"no document fills a context of {min(lengths):,} tokens; lower --contexts or give longer documents")
    for kind in kinds:
        session.draft_decoder(kind)  # packed now: where that cannot be done is told before anything is measured
    first = chosen[0]
    trained = {r: adaptor_for(draft.decoder, draft.name, r, adaptor, first.prompt if adaptor == "quiet" else ()) for r in steps}
    models = {"draft": draft.provenance, "target": session.pair.target.provenance}
    kept = None
    if out is not None:
        files = {str(r): judged.file_digest(path) or adaptor for r, (_, path) in trained.items()}
        kept = judged.JudgedFile(out, {
            "pair": pair, "models": models, "dtype": str(draft.decoder.dtype), "sinks": sinks, "windows": wide, "strides": steps,
            "answer_tokens": answer_tokens, "draft_weights": kinds, "adaptor": files, "first_case": [first.set, first.context, first.id],
        })  # fmt: skip
    progress = Progress(chosen, kept)

    def measure(waiting: list[Case]) -> Iterator[tuple[Case, Judged | Exception]]:
        return evaluate.judge_all(
            session, waiting, wide, steps, lambda r: trained[r][0] if trained[r][1] or adaptor == "quiet" else None,
            sinks=sinks, answer_tokens=answer_tokens, weights=kinds, sample=first.prompt,
        )  # fmt: skip

    ended = progress.run(measure)
    table = evaluate.summarise(progress.done, blocks)
    if not table and ended is None:
        raise UsageError("the target answered none of the cases; give other documents")
    partial = progress.partial
    if as_json:
        adaptors = {
            str(r): {"file": path.name if path else None, "sha256": judged.file_digest(path), **asdict(a.info)}
            for r, (a, path) in trained.items()
        }
        about = {
            **provenance(where, draft.decoder.dtype), "pair": pair, "sinks": sinks, "answer_tokens": answer_tokens, "docs": docs,
            "adaptors": adaptors, "models": models,
        }  # fmt: skip
        missing = {"partial": True} if ended is not None else {}
        typer.echo(json.dumps({"rows": evaluate.as_dicts(table, partial), "provenance": about, **missing}))
    elif table:
        typer.echo(_table(table, blocks, partial))
    if ended is not None:
        raise ended


class Progress:
    """The cases of a measure: those that are done, with progress and ETA on standard error, and how it ended."""

    EVERY_S = 60.0

    def __init__(self, chosen: list[Case], kept: JudgedFile | None) -> None:
        self._chosen, self._kept = chosen, kept
        self._found = {case: known for case in chosen if kept is not None and (known := kept.get(case)) is not None}
        if kept is not None and self._found:
            note(f"{len(self._found)} of {len(chosen)} cases are in {kept.path}")

    @property
    def done(self) -> list[Judged]:
        return [self._found[case] for case in self._chosen if case in self._found]

    @property
    def partial(self) -> set[tuple[str, int]]:
        """Sets and contexts that lack cases."""
        return {(case.set, case.context) for case in self._chosen if case not in self._found}

    def run(self, measure: Callable[[list[Case]], Iterator[tuple[Case, Judged | Exception]]]) -> MaswError | None:
        """Measures what is not done, a case at a time. A case that fails does not stop the others.

        Returns the error that the command ends with, once what was measured is printed; None when every case is done.
        """
        from tqdm import tqdm

        waiting = [case for case in self._chosen if case not in self._found]
        work = sum(len(case.prompt) for case in waiting)  # cases differ in length, and time goes with it
        began, told, read, failed = time.monotonic(), time.monotonic(), 0, list[str]()
        try:
            with interruptible(), tqdm(total=work, unit="tok", unit_scale=True, file=sys.stderr, disable=None) as bar:
                for case, found in measure(waiting):
                    if isinstance(found, Exception):
                        failed.append(f"{case.set}, {case.context:,} tokens, {case.id}: {plain_words(found)}")
                        note(f"a case failed ({failed[-1]})")
                    else:
                        self._found[case] = found
                        if self._kept is not None:
                            self._kept.add(case, found)
                    bar.update(len(case.prompt))
                    read += len(case.prompt)
                    now = time.monotonic()
                    if bar.disable and now - told >= self.EVERY_S:
                        told = now
                        left = hours((now - began) / read * (work - read))
                        note(f"{len(self._found)} of {len(self._chosen)} cases, {left} left")
        except Cancelled:
            return Cancelled(f"interrupted with {len(self._found)} of {len(self._chosen)} cases measured; {self._goes_on()}")
        except MaswError as error:  # the file cannot be written: the next case would fare no better
            return error
        if failed:
            return MaswError(f"{len(failed)} of {len(self._chosen)} cases failed ({failed[0]}); {self._goes_on()}")
        return None

    def _goes_on(self) -> str:
        if self._kept is not None:
            return f"they are in {self._kept.path}, the same command goes on from there"
        return "the target's answers so far are kept, and with --out FILE.jsonl the next command keeps the measured cases too"


def numbers(name: str, text: str) -> list[int]:
    """'2k,4096' -> [2048, 4096], each once. Raises UsageError with the option's name."""
    found: list[int] = []
    for part in text.lower().split(","):
        part = part.strip()
        factor, digits = (1024, part[:-1]) if part.endswith("k") else (1, part)
        if not digits.isdecimal() or len(digits) > 9 or int(digits) == 0:
            raise UsageError(f"--{name} takes whole numbers like 2k,4096, not '{part}'")
        found.append(int(digits) * factor)
    return list(dict.fromkeys(found))


def _table(table: list[Row], gammas: list[int], partial: set[tuple[str, int]]) -> str:
    from masw.cli.display import columns

    heads = [
        "set",
        "context",
        "W",
        "r",
        "method",
        "weights",
        "n",
        "agree",
        *(f"tok/iter g{g}" for g in gammas),
        "KL",
        "retention",
        "gap",
    ]

    def cell(value: Any, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    lines = [heads]
    for row in table:
        speeds = [cell(row.tokens_per_iteration[g]) for g in gammas]
        n = f"{row.n} (partial)" if (row.set, row.context) in partial else str(row.n)
        start = [row.set, cell(row.context), cell(row.window), cell(row.stride), row.method, row.weights]
        rest = [cell(row.kl), cell(row.retention), cell(row.recovered_gap)]
        lines.append([*start, n, cell(row.agreement, 3), *speeds, *rest])
    return columns(lines)
