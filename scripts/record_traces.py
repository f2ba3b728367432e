"""Records the runs that ship in data/traces: the notebooks' figures with no model. Made from data/samples/guide.md alone.

    python scripts/record_traces.py                                   # smollm2, every method that has what it needs
    python scripts/record_traces.py --pair qwen2.5-coder --methods none,full,masw

Each method's run becomes PAIR-METHOD.jsonl; rejections and where their corrections stand become PAIR-failures.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from masw.failures import failures
from masw.files import replacing
from masw.lessons import SAMPLE, Lesson, recorded_folder, runs_of
from masw.methods import METHODS
from masw.provenance import provenance


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument(
        "--methods", default=",".join(METHODS), help="names, comma-separated; default: all that have what they need"
    )
    parser.add_argument("--out", type=Path, default=recorded_folder())
    parser.add_argument("--tokens", type=int, default=96, help="length of the answer")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--stride", type=int, default=8)
    parser.add_argument("--dtype", default="fp32", help="fp32: greedy outputs of all methods are the same, token by token")
    args = parser.parse_args(argv)

    lesson = Lesson("live", args.pair, args.sinks, args.window, args.stride, args.gamma, args.tokens, args.dtype)
    args.out.mkdir(parents=True, exist_ok=True)
    missed: list[dict[str, Any]] = []
    for method, run in runs_of(lesson.session, args.methods.split(","), lesson.options):
        path = args.out / f"{args.pair}-{method}.jsonl"
        run.trace.save(path)
        s = run.summary()
        missed += [{"method": method, **row} for row in failures(run.trace, run.prompt)]
        print(
            f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {s.rounds} rounds, {s.tokens_per_iteration:.2f} tokens/iteration"
        )
    decoder = lesson.session.pair.target.decoder
    about = {"made_by": "scripts/record_traces.py", "sample": SAMPLE, **provenance(decoder.device, decoder.dtype)}
    write(args.out / f"{args.pair}-failures.json", {"provenance": about, "rows": missed})


def write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
