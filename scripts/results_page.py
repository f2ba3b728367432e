"""Writes docs/RESULTS.md, and the README's table of methods, from data/results, so that no number there is typed by hand.

python scripts/results_page.py [--measure FILE.json] [--check]

--measure  first keeps what `masw eval-adaptor --json` printed as data/results/adaptor_PAIR.jsonl, in place of the older measure
--check    writes nothing, exits with 1 where page and table are not those of data/results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from masw.adaptor import AdaptorInfo
from masw.errors import UsageError
from masw.files import replacing

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, README = ROOT / "data" / "results", ROOT / "docs" / "RESULTS.md", ROOT / "README.md"
MARKS = "<!-- made by scripts/results_page.py -->", "<!-- end -->"  # around the README's table
PAIR = "qwen2.5-coder"  # of that table
SETS = {
    "govreport": "GovReport", "govreport_packed": "GovReport (packed)", "qmsum": "QMSum", "multinews": "MultiNews",
    "multinews_packed": "MultiNews (packed)", "recall": "recall",
}  # fmt: skip
MEASURED = ("full", "window", "window-equal", "snapkv", "hybrid", "masw-untrained", "masw")

HEAD = """# Results

Made by `python scripts/results_page.py` from the tables in `data/results`; [BENCH.md](BENCH.md) and [TRAINING.md](TRAINING.md) define
their columns and say how to make them. Tokens/iter are means and include the target's own token; decoding and end to end are medians of
ratios to `none`, in brackets each set's; "as `none`" counts outputs equal to the autoregressive one. Packed sets are several documents of
a set joined, since single ones are too short. One document a set is an indication and no result: n stands at every table. Machines
differ from table to table, and so do masw itself (by the commit that is named; before 2bdaa7f a method with `lookup` copied behind three
recurring tokens, since it behind two) and the adaptors that shipped when a table was made: compare within a table.
"""


def page(results: Path) -> str:
    parts = [HEAD, *grids(results), *adaptors(results), *core(results), *steps(results), *heads(results)]
    return "\n".join(parts)


def comparison(results: Path) -> str:
    """Methods by contexts: the default pair's grids in one table."""
    cells: dict[str, dict[int, str]] = {}
    count: dict[int, int] = {}
    for path in results.glob(f"bench-{PAIR}-*.jsonl"):
        head, *lines = read(path)
        if head["definition"]["adaptive"]:
            continue
        together = {line["context"] for line in lines if line["set"] == "all"}
        for line in lines:
            context = line["context"]
            if line["set"] != "all" and context in together:
                continue
            count[context] = max(count.get(context, 0), line["documents"])
            iteration, decoding, whole = line["tokens_per_iteration"], line["speedup"], line["speedup_end_to_end"]
            cells.setdefault(line["method"], {})[context] = f"{number(iteration)}, {times(decoding)}, {times(whole)}"
    contexts = sorted(count)
    shown = sorted((m for m in cells if m != "none"), key=lambda m: (m.startswith("hf"), m))
    body = [[f"`{m}`", *(cells[m].get(c, "-") for c in contexts)] for m in shown]
    return table(["method", *(f"{c:,} (n = {count[c]})" for c in contexts)], body)


def with_comparison(readme: str, block: str) -> str:
    """`readme` with the text between its marks replaced."""
    before, rest = readme.split(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{block}\n{MARKS[1]}{rest.split(MARKS[1], 1)[1]}"


def keep_measure(path: Path, results: Path) -> Path:
    """The table of a measure. Raises UsageError for a file that is none, or a partial one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        rows, about = found["rows"], {k: v for k, v in found["provenance"].items() if k != "models"}
        packed = "-int4" if any(row["weights"] == "int4" for row in rows) else ""
        out = results / f"adaptor_{about['pair'].replace('/', '--')}{packed}.jsonl"
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UsageError(f"{path} is not what `masw eval-adaptor --json` prints") from None
    if found.get("partial"):
        raise UsageError(f"{path} is a partial measure; run eval-adaptor to its end")
    lines = [{"type": "header", **about}, *({"type": "row", **row} for row in rows)]
    with replacing(out) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return out


def grids(results: Path) -> Iterator[str]:
    """A table for each pair and context, shortest context first."""
    yield "## Methods side by side\n"
    found = []
    for path in results.glob("bench-*.jsonl"):
        head, *lines = read(path)
        for context in sorted({line["context"] for line in lines}):
            rows = [line for line in lines if line["context"] == context]
            found.append((head["definition"]["pair"], context, head["definition"]["adaptive"], path.name, head, rows))
    for pair, context, adaptive, name, head, lines in sorted(found, key=lambda f: f[:4]):
        about, sets = head["definition"], named({line["set"] for line in lines})
        together = "all" if "all" in {line["set"] for line in lines} else sets[0]
        chosen = [line for line in lines if line["set"] == together]
        documents = max(line["documents"] for line in chosen)
        yield f"### {pair}, {context:,} tokens{', adaptive gamma' if adaptive else ''}\n"
        settings = [
            f"{documents} document{'s' if documents > 1 else ''}",
            f"at most {about['max_new_tokens']} new tokens",
            f"gamma {'chosen, at most ' if adaptive else ''}{about['gamma']}",
            f"S = {about['sinks']}, W = {about['window']}, r = {about['stride']}",
            f"adaptor {about['adaptor']}, draft weights {about['draft_weights']}, {about['dtype']}, batch 1",
        ]
        yield f"{', '.join(map(title, sets))}: {', '.join(settings)}; {machine(head)} (`{name}`).\n"
        several = f" ({' / '.join(map(title, sets))})" if len(sets) > 1 else ""
        head_row = [
            "method", "tokens/iter", f"decoding over `none`{several}", "end to end", "draft step, ms (floor)", "verify, ms (floor)",
            "draft KV kept", "as `none`",
        ]  # fmt: skip
        by_set = {(line["set"], line["method"]): line for line in lines}
        body = []
        for line in sorted(chosen, key=lambda r: (r["method"] != "none", -(r["speedup"] or 0))):
            each = [times(by_set.get((s, line["method"]), {}).get("speedup")) for s in sets]
            spread = f" ({' / '.join(each)})" if len(sets) > 1 and line["method"] != "none" else ""
            same = "" if not line["compared"] else f"{line['identical']} of {line['compared']}"
            body.append([
                f"`{line['method']}`", number(line["tokens_per_iteration"]), f"{times(line['speedup'])}{spread}",
                times(line["speedup_end_to_end"]), floored(line["draft_ms"], line["draft_floor_ms"]),
                floored(line["verify_ms"], line["verify_floor_ms"]), share(line["draft_kv_ratio"]), same,
            ])  # fmt: skip
        yield table(head_row, body)


def adaptors(results: Path) -> Iterator[str]:
    """What draft memories are worth on the target's own answers: means over the sets."""
    yield "## Draft memories on the target's own answers\n"
    yield (
        "Teacher-forced (`masw eval-adaptor`), mean over sets. Gap: (method - window) / (full - window) of those means; retention: over "
        "`full`. `window-equal` has as many entries as `masw`.\n"
    )
    for path in sorted(results.glob("adaptor_*.jsonl")):
        head, *rows = read(path)
        for name, chosen in (
            ("", [r for r in rows if r["set"] != "recall"]),
            ("recall", [r for r in rows if r["set"] == "recall"]),
        ):
            if not chosen:
                continue
            packed = any(r["weights"] != "plain" for r in chosen)
            answers = sum(r["n"] for r in chosen if r["method"] == "full" and r["weights"] == "plain")
            used = head["adaptors"].values()
            files = ", ".join(sorted({a["file"] for a in used}))
            tokens = " and ".join(
                f"{t:,}" for t in sorted({AdaptorInfo("", (), provenance=a["provenance"]).tokens_seen for a in used})
            )
            sets = ", ".join(map(title, named({r["set"] for r in chosen})))
            yield f"### {head['pair']}{', recall' if name else ''}{', packed draft weights too' if packed else ''}\n"
            yield (
                f"{'A made-up code far back in the document; agreement is that of its tokens' if name else sets}: {answers} answers of "
                f"at most {head['answer_tokens']} tokens; adaptor {files}, trained on {tokens} tokens; {head['dtype']}, commit "
                f"{head['commit']} (`{path.name}`).\n"
            )
            columns = [
                "context",
                "W",
                "r",
                "weights",
                "method",
                "n",
                "tokens/iter, gamma 5",
                "gamma 8",
                "agreement",
                "KL",
                "retention",
                "gap",
            ]
            yield table(columns, list(_memories(chosen)))


def _memories(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    keys = {(r["context"], r["window"], r["stride"], r["weights"], r["method"]) for r in rows}
    means: dict[Any, dict[str, Any]] = {}
    for key in keys:
        same = [r for r in rows if (r["context"], r["window"], r["stride"], r["weights"], r["method"]) == key]
        means[key] = {
            "n": sum(r["n"] for r in same),
            **{g: fmean(r["tokens_per_iteration"][g] for r in same) for g in ("5", "8")},
            **{k: fmean(r[k] for r in same) for k in ("agreement", "kl")},
        }
    order = sorted(keys, key=lambda k: (k[0], k[3] != "plain", k[1] or 0, k[2] or 0, MEASURED.index(k[4])))
    for key in order:
        context, window, stride, weights, method = key
        mean = means[key]
        full, alone = means.get((context, None, None, weights, "full")), means.get((context, window, None, weights, "window"))
        retention = mean["5"] / full["5"] if full else None
        room = full["5"] - alone["5"] if full and alone else 0.0
        gap = (mean["5"] - alone["5"]) / room if alone and room and method not in ("full", "window") else None
        yield [
            f"{context:,}", dash(window), dash(stride), weights, f"`{method}`", str(mean["n"]), number(mean["5"]), number(mean["8"]),
            f"{mean['agreement']:.3f}", f"{mean['kl']:.2f}", number(retention), number(gap),
        ]  # fmt: skip


def core(results: Path) -> Iterator[str]:
    """What `make bench-core` printed: ratios of the core's parts, each pair of times from one run."""
    for path in sorted(results.glob("core_*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        where = machine({"provenance": found["provenance"], "rates": found["machine"]})
        yield "## The core beside its floors\n"
        yield (
            f"`make bench-core`, batch 1: what is compared takes turns, and a ratio is the median of the paired ones. {where}; "
            f"transformers {found['provenance']['transformers']} (`{path.name}`).\n"
        )
        body = [
            [
                r["what"], number(r["ours"], 1), number(r["other"], 1), r["unit"], number(r["floor"], 1), number(r["ratio"], 3),
                " to ".join(number(q, 3) for q in r["quartiles"] or ()), r["goal"], {True: "yes", False: "no"}.get(r["met"], ""),
            ]
            for r in found["rows"]
        ]  # fmt: skip
        yield table(["what", "ours", "other", "unit", "floor", "ratio", "quartiles", "goal", "met"], body)


def steps(results: Path) -> Iterator[str]:
    yield "## Single passes\n"
    yield "Random weights, memories filled with noise (`masw bench --steps-only`); median, quartiles, floor: bytes / bandwidth, predicted.\n"
    for path in sorted(results.glob("steps-*.jsonl")):
        head, *rows = read(path)
        about = head["options"]
        yield f"### {rows[0]['shape']}, {rows[0]['weights']} weights\n"
        yield f"S = {about['sinks']}, W = {about['window']}, r = {about['stride']}; {machine(head)} (`{path.name}`).\n"
        body = [
            [
                f"{r['context']:,}", f"`{r['kind']}`", number(r["ms"], 1), " to ".join(number(q, 1) for q in r["ms_quartiles"]),
                number(r["floor_ms"], 1), number(r["over_floor"]), f"{r['kv_bytes'] / 1e6:.1f}", str(r["n"]),
            ]
            for r in rows if r["error"] is None
        ]  # fmt: skip
        yield table(["context", "step", "ms", "quartiles", "floor, ms", "over floor", "KV, MB", "n"], body)


def heads(results: Path) -> Iterator[str]:
    """Acceptance of the EAGLE head against the length of the prefix."""
    path = results / "eagle_prefix.jsonl"
    if not path.exists():
        return
    head, *rows = read(path)
    yield "## An EAGLE head against the length of the prefix\n"
    yield f"{head['eagle']['tokens']:,} training tokens only: it must run, and says little about EAGLE (`{path.name}`).\n"
    body = []
    for context in sorted({r["context"] for r in rows}):
        same = [r for r in rows if r["context"] == context]
        body.append(
            [f"{context:,}", str(len(same)), *(number(fmean(r[k] for r in same)) for k in ("tokens_per_iteration", "acceptance"))]
        )
    yield table(["prefix", "n", "tokens/iter", "acceptance"], body)


# ---- cells


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def title(name: str) -> str:
    return SETS.get(name, name)


def named(sets: set[str]) -> list[str]:
    """Sets in the order of SETS, then any others; `all` is none."""
    known = list(SETS)
    return sorted(sets - {"all"}, key=lambda s: (known.index(s) if s in known else len(known), s))


def machine(head: dict[str, Any]) -> str:
    where, rates = head["provenance"], head["rates"]
    measured = f"{rates['bytes_per_s'] / 1e9:.1f} GB/s and {rates['flops_per_s'] / 1e12:.2f} TFLOP/s measured"
    earlier = sorted({s["provenance"]["commit"] for s in head.get("sessions", [])} - {where["commit"]})
    others = f" (some cells: {', '.join(earlier)})" if earlier else ""
    return f"{where['device']}, {where['threads']} threads, {measured}, {where['created'][:10]}, commit {where['commit']}{others}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def floored(ms: float | None, floor: float | None) -> str:
    return "-" if ms is None else number(ms, 0) if floor is None else f"{ms:.0f} ({floor:.0f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes docs/RESULTS.md and the README's table of methods from data/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where they are not those of the tables")
    parser.add_argument("--measure", type=Path, help="keep this output of masw eval-adaptor --json in data/results first")
    options = parser.parse_args(argv)
    if options.measure:
        try:
            print(f"kept {keep_measure(options.measure, RESULTS).name}")
        except UsageError as error:
            print(f"results_page: {error}", file=sys.stderr)
            return 2
    readme = README.read_text(encoding="utf-8")
    wanted = {PAGE: page(RESULTS), README: with_comparison(readme, comparison(RESULTS))}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if options.check:
        for path in stale:
            print(f"{path.name} is not that of the tables in data/results; run scripts/results_page.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        with replacing(path) as partial:
            partial.write_text(wanted[path], encoding="utf-8")
    print(f"wrote {', '.join(path.name for path in stale) or 'nothing: all is as the tables say'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
