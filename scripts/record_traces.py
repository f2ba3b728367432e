"""Records the runs that ship in data/traces: the notebooks' figures with no model. Made from data/samples/guide.md alone.

    python scripts/record_traces.py                                   # smollm2, every method of the table
    python scripts/record_traces.py --pair qwen2.5-coder --methods none,full,masw

Each method's run becomes `PAIR-METHOD.jsonl`; rejections and where their corrections stand become `PAIR-failures.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from masw import documents, prompts
from masw.devices import resolve_dtype
from masw.engine import Settings
from masw.failures import failures
from masw.files import replacing
from masw.methods import METHODS, MemoryOptions
from masw.provenance import provenance
from masw.session import RunOptions, Session, data_folder
from masw.zoo import load_pair

SAMPLE = "guide.md"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=data_folder() / "traces")
    parser.add_argument("--tokens", type=int, default=96, help="length of the answer")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, default=8)
    parser.add_argument("--dtype", default="fp32", help="fp32: greedy outputs of all methods are the same, token by token")
    args = parser.parse_args(argv)

    device = torch.device("cpu")
    session = Session(load_pair(args.pair, device=device, dtype=resolve_dtype(args.dtype, device)))
    target = session.pair.target
    document = documents.read(str(data_folder() / "samples" / SAMPLE))
    prompt = prompts.build(target.tokenizer, document, "summarize", None, session.context_limit - args.tokens)
    base = RunOptions(
        memory=MemoryOptions(args.sinks, args.window, args.stride),
        settings=Settings(args.tokens, args.gamma, eos_ids=target.eos_ids),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    session.warm_up(args.gamma)
    # The first run reads the prompt for the target; the others share it. `none` leads, so its trace has the whole prefill.
    missed: list[dict[str, Any]] = []
    for method in sorted(args.methods.split(","), key=lambda m: m != "none"):
        run = session.run(prompt.ids, replace(base, method=method))
        for _ in run:
            pass
        path = args.out / f"{args.pair}-{method}.jsonl"
        run.save(path)
        s = run.summary()
        missed += [{"method": method, **row} for row in failures(run.trace, prompt.ids)]
        print(
            f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {s.rounds} rounds, {s.tokens_per_iteration:.2f} tokens/iteration"
        )
    write(args.out / f"{args.pair}-failures.json", {"rows": missed}, device, target.decoder.dtype)


def write(path: Path, content: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    made = {"provenance": {"made_by": "scripts/record_traces.py", "sample": SAMPLE, **provenance(device, dtype)}, **content}
    with replacing(path) as partial:
        partial.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
