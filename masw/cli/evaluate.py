"""`masw eval-adaptor`: how much of an uncompressed draft's acceptance a compact memory keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.errors import Cancelled, UsageError

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
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
) -> None:
    """Measure draft memories on the target's own greedy answers: agreement, tokens per iteration, KL, retention, recovered gap."""
    from dataclasses import asdict

    from tqdm import tqdm

    from masw import cases, evaluate
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
    for path in data:
        cases.rows(path)
    where = resolve_device(device)
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
    sample = chosen[0].prompt if adaptor == "quiet" else ()
    trained = {r: adaptor_for(draft.decoder, draft.name, r, adaptor, sample) for r in steps}
    try:
        table = evaluate.run(
            session,
            tqdm(chosen, unit="case", file=sys.stderr, disable=None),
            wide,
            steps,
            blocks,
            lambda r: trained[r][0] if trained[r][1] or adaptor == "quiet" else None,
            sinks=sinks,
            answer_tokens=answer_tokens,
            weights=kinds,
        )
    except KeyboardInterrupt:
        raise Cancelled("interrupted; the target's answers so far are kept, the same command goes on from them") from None
    if not table:
        raise UsageError("the target answered none of the cases; give other documents")
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
    """'2k,4096' -> [2048, 4096], each once. Raises UsageError with the option's name."""
    found: list[int] = []
    for part in text.lower().split(","):
        part = part.strip()
        factor, digits = (1024, part[:-1]) if part.endswith("k") else (1, part)
        if not digits.isdecimal() or len(digits) > 9 or int(digits) == 0:
            raise UsageError(f"--{name} takes whole numbers like 2k,4096, not '{part}'")
        found.append(int(digits) * factor)
    return list(dict.fromkeys(found))


def _table(table: list[Row], gammas: list[int]) -> str:
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
        start = [row.set, cell(row.context), cell(row.window), cell(row.stride), row.method, row.weights]
        rest = [cell(row.kl), cell(row.retention), cell(row.recovered_gap)]
        lines.append([*start, cell(row.n), cell(row.agreement, 3), *speeds, *rest])
    return columns(lines)
