"""`masw eval-adaptor`: how much of an uncompressed draft's acceptance a compact memory keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.errors import UsageError

if TYPE_CHECKING:
    from masw.evaluate import Row


def eval_adaptor(
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
    recall: Annotated[bool, typer.Option("--recall", help="Also plant a fact far back in each document and ask for it.")] = False,
    adaptor: Annotated[str, typer.Option(help="auto | PATH | none (untrained only).")] = "auto",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
) -> None:
    """Measure draft memories on the target's own greedy answers: agreement, tokens per iteration, KL, retention, recovered gap."""
    from dataclasses import asdict

    from tqdm import tqdm

    from masw import cases, evaluate
    from masw.adaptor import Adaptor, AdaptorInfo
    from masw.config import MemoryShape
    from masw.devices import resolve_device, resolve_dtype
    from masw.provenance import provenance
    from masw.session import Session, adaptor_for
    from masw.zoo import load_pair

    lengths, wide, steps, blocks = (numbers(name, text) for name, text in
        (("contexts", contexts), ("windows", windows), ("strides", strides), ("gammas", gammas)))  # fmt: skip
    for window in wide:
        for stride in steps:
            MemoryShape(sinks, window, stride)
    if docs < 1 or answer_tokens < 2:
        raise UsageError("--docs must be at least 1 and --answer-tokens at least 2")
    for path in data:
        cases.rows(path)
    where = resolve_device(device)
    session = Session(load_pair(pair, device=where, dtype=resolve_dtype(dtype, where)))
    draft, tokenizer = session.pair.draft, session.pair.target.tokenizer
    if max(lengths) + answer_tokens > session.context_limit:
        raise UsageError(
            f"a context of {max(lengths):,} and its answer exceed the pair's {session.context_limit:,} tokens; lower --contexts"
        )
    untrained = Adaptor.copied(draft.decoder, AdaptorInfo(draft.name, ()))
    trained = {r: adaptor_for(draft.decoder, draft.name, r, adaptor) for r in steps}
    chosen = list(cases.grid(data, tokenizer, lengths, docs, recall=recall))
    if not chosen:
        raise UsageError(f"no document fills a context of {min(lengths):,} tokens; lower --contexts or give longer documents")
    results = []
    for case in tqdm(chosen, unit="case", file=sys.stderr, disable=None):
        answer = cases.answer(session, case, answer_tokens)
        if len(answer) < 2 or (case.planted and not cases.planted_positions(tokenizer, answer, case.planted)):
            continue  # the target itself does not say it: nothing to agree with
        shapes = evaluate.variants(
            wide, steps, case.context, untrained, lambda r: trained[r][0] if trained[r][1] else None, sinks
        )
        results.append((case, shapes, evaluate.judge(draft.decoder, shapes, case, answer, tokenizer)))
    if not results:
        raise UsageError("the target answered none of the cases; give other documents")
    table = evaluate.summarise(results, blocks)
    if not as_json:
        typer.echo(_table(table, blocks))
        return
    adaptors = {str(r): {"file": path.name if path else None, **asdict(loaded.info)} for r, (loaded, path) in trained.items()}
    about = {
        **provenance(where, draft.decoder.dtype), "pair": pair, "sinks": sinks, "answer_tokens": answer_tokens, "docs": docs,
        "adaptors": adaptors, "models": {"draft": draft.provenance, "target": session.pair.target.provenance},
    }  # fmt: skip
    typer.echo(json.dumps({"rows": evaluate.as_dicts(table), "provenance": about}))


def numbers(name: str, text: str) -> list[int]:
    """'2k,4096' -> [2048, 4096]. Raises UsageError with the option's name."""
    found = []
    for part in text.lower().split(","):
        part = part.strip()
        factor, digits = (1024, part[:-1]) if part.endswith("k") else (1, part)
        if not digits.isdigit() or int(digits) == 0:
            raise UsageError(f"--{name} takes whole numbers like 2k,4096, not '{part}'")
        found.append(int(digits) * factor)
    return found


def _table(table: list[Row], gammas: list[int]) -> str:
    heads = [
        "set",
        "context",
        "W",
        "r",
        "method",
        "n",
        "agree",
        *(f"tok/iter g{g}" for g in gammas),
        "KL",
        "retention",
        "gap",
        "planted",
    ]

    def cell(value: Any, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)

    lines = [heads]
    for row in table:
        speeds = [cell(row.tokens_per_iteration[g]) for g in gammas]
        start = [row.set, cell(row.context), cell(row.window), cell(row.stride), row.method, cell(row.n), cell(row.agreement, 3)]
        rest = [cell(row.kl), cell(row.retention), cell(row.recovered_gap), cell(row.planted_agreement)]
        lines.append([*start, *speeds, *rest])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
