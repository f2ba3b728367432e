"""Puts a trained adaptor among those that come with masw, if it is measured, small enough, and better than the one there.

    masw eval-adaptor --pair smollm2 --data ... --adaptor runs/NAME/best.safetensors --json > measure.json
    python scripts/ship_adaptor.py runs/NAME/best.safetensors --measure measure.json

The file keeps the provenance of its training and gains the measure: means over sets, windows and strides of what `eval-adaptor`
printed, by context. It is compared with the measure that the adaptor in its place came with, or with a later one of that adaptor
(`--against`), if both are of the same cases.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from masw.adaptor import SHIPPED_BYTES, Adaptor, rank_that_fits, read_info
from masw.errors import MaswError, UsageError
from masw.judged import file_digest
from masw.session import data_folder
from masw.zoo import load_pair


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("adaptor", type=Path, help="file of a training")
    parser.add_argument("--measure", type=Path, required=True, help="what eval-adaptor --json printed for that very file")
    parser.add_argument(
        "--against", type=Path, help="the same of the adaptor that it would replace; default: what that came with"
    )
    parser.add_argument("--out", type=Path, help="default: data/adaptors/BASE.safetensors")
    parser.add_argument("--q-rank", type=int, help="rank of a mirrored Q's difference; default: the largest that fits")
    parser.add_argument("--margin", type=float, default=0.02, help="tokens/iter that it must be better by (default 0.02)")
    parser.add_argument("--force", action="store_true", help="replace a better one")
    options = parser.parse_args(arguments)
    try:
        print(ship(options))
    except MaswError as error:
        print(f"ship: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def ship(options: argparse.Namespace) -> str:
    info, _ = read_info(options.adaptor)
    source = file_digest(options.adaptor)
    found = measured(options.measure, options.adaptor, source)
    out = options.out or data_folder() / "adaptors" / (info.base.replace("/", "--") + ".safetensors")
    if out.exists():
        known = (
            measured(options.against, out, file_digest(out))
            if options.against
            else read_info(out)[0].provenance.get("shipped", {})
        )
        compare(found, known, options.margin, out, options.force)
    decoder = load_pair(info.base, torch.device("cpu"), torch.float32).draft.decoder
    adaptor = Adaptor.load(options.adaptor, decoder, base=info.base)
    rank = rank_that_fits(decoder.config) if options.q_rank is None else options.q_rank
    staged = out.with_name(out.name + ".staged")
    adaptor.save(staged, q_rank=rank if info.mirror == "qkv" else 0, decoder=decoder, shipped=found, source=source)
    size = staged.stat().st_size
    if size >= SHIPPED_BYTES:
        staged.unlink()
        raise UsageError(f"{size / 1e6:.1f} MB is too much to ship ({SHIPPED_BYTES / 1e6:.0f} MB); lower --q-rank")
    staged.replace(out)
    note = f", Q at rank {rank}: measure this file too" if info.mirror == "qkv" else ""
    return f"{out}: {size / 1e6:.1f} MB{note}\n{json.dumps(found)}"


def measured(path: Path, adaptor: Path, source: str | None) -> dict[str, Any]:
    """`source`: sha256 of `adaptor`. {context: {method: tokens/iter at the first gamma}, ...} and the recovered gap of masw."""
    try:
        report = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        rows, used = report["rows"], list(report["provenance"]["adaptors"].values())
        files = {f"{a['file']} ({str(a.get('sha256'))[:12]})" for a in used}
        others = [a for a in used if a.get("sha256") != source]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UsageError(f"{path} is not what `masw eval-adaptor --json` prints") from None
    if report.get("partial"):
        raise UsageError(f"{path} is a partial measure; run eval-adaptor to its end")
    if others or not any(row["method"] == "masw" for row in rows):
        mine = f"{adaptor.name} ({str(source)[:12]})"
        raise UsageError(f"{path} measures {', '.join(sorted(files))}, not {mine}; run eval-adaptor with --adaptor {adaptor}")
    table: dict[str, Any] = {}
    for context in sorted({row["context"] for row in rows}):
        here = [
            row for row in rows if row["context"] == context and row["set"] != "recall" and row.get("weights", "plain") == "plain"
        ]
        methods = {row["method"] for row in here}
        speeds = {m: [next(iter(r["tokens_per_iteration"].values())) for r in here if r["method"] == m] for m in sorted(methods)}
        gaps = [r["recovered_gap"] for r in here if r["method"] == "masw" and r["recovered_gap"] is not None]
        table[str(context)] = {
            "tokens_per_iteration": {method: round(fmean(values), 4) for method, values in speeds.items()},
            "recovered_gap": round(fmean(gaps), 4) if gaps else None,
            "cases": max(row["n"] for row in here),
        }
    return table


def compare(new: dict[str, Any], old: dict[str, Any], margin: float, out: Path, force: bool) -> None:
    """Raises UsageError unless `new` beats `old` on the mean of the contexts that both were measured at."""
    common = sorted(new.keys() & old.keys(), key=int)
    if force or not old:
        return
    if not common:
        raise UsageError(f"{out} was measured at {', '.join(old)}, this one at {', '.join(new)}: measure at the same, or --force")
    for context in common:
        mine, theirs = (table[context]["tokens_per_iteration"] for table in (new, old))
        # No adaptor is part of these, so that on the same answers, windows and strides they are the same.
        if any(abs(mine[m] - theirs[m]) > 0.005 for m in ("full", "window", "window-equal") if m in mine and m in theirs):
            raise UsageError(
                f"{out} was measured on other answers, windows or strides at {context} tokens: measure it as this one with --adaptor {out}, "
                "and pass that as --against; or --force"
            )
    better = [new[c]["tokens_per_iteration"]["masw"] - old[c]["tokens_per_iteration"]["masw"] for c in common]
    if fmean(better) < margin:
        raise UsageError(f"{fmean(better):+.3f} tokens/iter against {out} is not better by {margin}; keep training, or --force")


if __name__ == "__main__":
    sys.exit(main())
