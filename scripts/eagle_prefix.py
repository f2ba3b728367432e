"""Acceptance of an EAGLE head against the length of the prefix: the measure behind the paper's motivation figure.

    python scripts/eagle_prefix.py --data FILE.jsonl [--eagle PATH] [--contexts 512,1k,2k,4k] [--docs 3]

The same documents, cut to each length, are summarised greedily through the one loop; every method sees the same prompts. Writes a
header with provenance, then one line a run, to data/results/eagle_prefix.jsonl, and prints means.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from masw import cases
from masw.cli.display import columns
from masw.cli.evaluate import numbers
from masw.devices import resolve_device, resolve_dtype
from masw.engine import Settings
from masw.errors import MaswError, UsageError
from masw.files import check_writable, replacing
from masw.methods import MemoryOptions, method_named
from masw.provenance import provenance
from masw.session import RunOptions, Session, data_folder, eagle_file
from masw.zoo import load_pair, resolve_pair

SCHEMA = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="documents: JSON lines as `masw eval-adaptor` takes them")
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--eagle", default="auto", help="auto | PATH of a head")
    parser.add_argument("--methods", default="eagle", help="rows of the table of methods, comma-separated (default eagle)")
    parser.add_argument("--window", type=int, default=256, help="W of `window` and `masw` (default 256)")
    parser.add_argument("--contexts", default="512,1k,2k,4k", help="prompt lengths, tokens")
    parser.add_argument("--docs", type=int, default=3, help="documents, those that fill the longest prompt (default 3)")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96, help="length of an answer at most, tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=data_folder() / "results" / "eagle_prefix.jsonl")
    options = parser.parse_args(arguments)
    try:
        print(measure(options))
    except MaswError as error:
        print(f"eagle_prefix: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("eagle_prefix: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def measure(options: argparse.Namespace) -> str:
    contexts = sorted(numbers("contexts", options.contexts))
    methods = options.methods.split(",")
    if options.docs < 1:
        raise UsageError(f"--docs must be at least 1, not {options.docs}")
    if any(method_named(name).head for name in methods):
        eagle_file(options.eagle, resolve_pair(options.pair).target.name)
    data = cases.rows(options.data)
    check_writable(options.out, not_over=str(options.data))
    where = resolve_device(options.device)
    session = Session(load_pair(options.pair, device=where, dtype=resolve_dtype(options.dtype, where)))
    tokenizer = session.pair.target.tokenizer
    longest = cases.long_cases(options.data.stem, data, tokenizer, contexts[-1], options.docs)
    if not longest:
        raise UsageError(f"no document fills {contexts[-1]:,} tokens; lower --contexts or give longer documents")
    chosen = [row for row in data if row["id"] in {case.id for case in longest}]
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {
        "type": "header",
        "schema": SCHEMA,
        "pair": options.pair,
        "gamma": options.gamma,
        "new_tokens": options.new_tokens,
        "window": options.window,
        "task": "question" if chosen[0]["question"] else "summarize",
        "documents": [row["id"] for row in chosen],
        "models": {"draft": session.pair.draft.provenance, "target": session.pair.target.provenance},
        "provenance": provenance(where, session.pair.target.decoder.dtype),
    }
    for context in contexts:
        for case in cases.long_cases(options.data.stem, chosen, tokenizer, context, len(chosen)):
            for row, eagle in _runs(session, case, methods, options):
                rows.append(row)
                header["eagle"] = eagle or header.get("eagle")
                print(
                    f"{row['method']} {row['id']} at {context:,}: {row['tokens_per_iteration']:.2f} tokens/iter", file=sys.stderr
                )
    with replacing(options.out) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)), encoding="utf-8")
    return _table(rows, methods, contexts)


def _runs(
    session: Session, case: cases.Case, methods: list[str], options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """A line of each method on one prompt, and what the trace says of the head."""
    settings = Settings(options.new_tokens, options.gamma, eos_ids=session.pair.target.eos_ids)
    memory = MemoryOptions(window=options.window)
    for method in methods:
        job = session.run(list(case.prompt), RunOptions(method, memory, settings, eagle=options.eagle))
        list(job)
        s = job.summary()
        yield (
            {
                "type": "run",
                "set": case.set,
                "id": case.id,
                "context": case.context,
                "prompt_tokens": len(case.prompt),
                "method": method,
                "tokens": len(s.tokens),
                "rounds": s.rounds,
                "finish": s.finish,
                "tokens_per_iteration": s.tokens_per_iteration,
                "tokens_per_iteration_without_bonus": s.tokens_per_iteration_without_bonus,
                "acceptance": s.acceptance,
                "acceptance_by_position": s.acceptance_by_position,
            },
            job.trace.header.get("eagle"),
        )


def _table(rows: list[dict[str, Any]], methods: list[str], contexts: list[int]) -> str:
    lines = [["method", "context", "n", "tok/iter", "acceptance", "first draft kept"]]
    for method in methods:
        for context in contexts:
            these = [row for row in rows if (row["method"], row["context"]) == (method, context)]
            if not these:
                continue
            kept = [row["acceptance"] for row in these if row["acceptance"] is not None]
            first = [row["acceptance_by_position"][0] for row in these if row["acceptance_by_position"]]
            means = [f"{fmean(values):.3f}" if values else "-" for values in (kept, first)]
            lines.append(
                [method, str(context), str(len(these)), f"{fmean(r['tokens_per_iteration'] for r in these):.2f}", *means]
            )
    return columns(lines)


if __name__ == "__main__":
    sys.exit(main())
