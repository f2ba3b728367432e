"""Records what notebooks show of a draft beside runs, with no model later: PAIR-explained.json and training-PAIR-NAME.jsonl.

    python scripts/record_explained.py --adaptor runs/smollm2/best.safetensors --log copy=runs/smollm2/log.jsonl

`--adaptor none` is the untrained copy. A log is thinned to its start, its measures and every fourth step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from record_traces import write

from masw.files import replacing
from masw.lessons import Lesson, explained, recorded_folder

EVERY = 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--adaptor", default="none")
    parser.add_argument("--longest", type=int, default=8000, help="longest context whose step is timed")
    parser.add_argument("--log", action="append", default=[], metavar="NAME=log.jsonl")
    parser.add_argument("--only-logs", action="store_true")
    parser.add_argument("--out", type=Path, default=recorded_folder())
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for item in args.log:
        name, _, source = item.partition("=")
        lines = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip()]
        kept = [r for r in lines if r["kind"] != "step" or r["step"] % EVERY == 0]
        path = args.out / f"training-{args.pair}-{name}.jsonl"
        with replacing(path) as partial:
            partial.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {len(kept)} of {len(lines)} lines")
    if not args.only_logs:
        path = args.out / f"{args.pair}-explained.json"
        write(path, explained(Lesson("live", args.pair).session, args.adaptor, args.longest))
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
