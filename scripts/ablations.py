"""Ablations of the training recipe: named recipes, equal tokens, one results table.

    python scripts/ablations.py                       every recipe on smollm2 (hours on a CPU); the same command goes on
    python scripts/ablations.py --only base,random    some of them
    python scripts/ablations.py --list                what there is
    python scripts/ablations.py --tiny                the tiny pair on generated text: a minute, for tests

Recipes run one after another. Each trains in OUT/NAME like any `masw train` and is then measured like `masw eval-adaptor`. Results
are kept as JSON lines, one a recipe, and as a table in markdown; a recipe that is in the results with the same settings is not run
again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from masw import cases, corpus, evaluate
from masw import train as training
from masw.adaptor import Adaptor
from masw.catalogue import draft_of
from masw.cli.evaluate import numbers
from masw.devices import resolve_device, resolve_dtype
from masw.errors import MaswError, UsageError
from masw.files import replacing
from masw.provenance import provenance
from masw.session import Session
from masw.store import cache_root
from masw.zoo import load_pair

Kinds = tuple[float, float, float]  # shares of reconstruction, text, answers
Part = tuple[int, int, float, Kinds]  # length, rows a step, share of the tokens, kinds

MIXED: tuple[Part, ...] = ((384, 4, 0.3, (3, 1, 0)), (1280, 2, 0.3, (2, 1, 1)), (2048, 2, 0.4, (2, 1, 2)))
PLAIN: tuple[Part, ...] = ((384, 4, 0.3, (0, 1, 0)), (1280, 2, 0.3, (0, 1, 1)), (2048, 2, 0.4, (0, 1, 2)))


@dataclass(frozen=True)
class Recipe:
    """What differs from `base`."""

    about: str
    parts: tuple[Part, ...] = MIXED
    fields: dict[str, Any] = field(default_factory=dict)

    def stages(self, tokens: int, shrink: int = 1) -> tuple[str, ...]:
        """`shrink` divides row lengths, for the tiny pair."""
        return tuple(f"{n // shrink}x{rows}:{round(tokens * share)}:{a}/{b}/{c}" for n, rows, share, (a, b, c) in self.parts)

    @property
    def strides(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.fields.get("strides", (4, 8))
        return found


def one_length(length: int, rows: int) -> tuple[Part, ...]:
    return ((length, rows, 1.0, (2, 1, 1)),)


RECIPES: dict[str, Recipe] = {
    "base": Recipe("mirrored K and V from a copy, mean slot input, r and W drawn for each step, reconstruction, KL 0.7"),
    "random": Recipe("mirrored weights start random, not copied", fields={"random_init": True}),
    "quiet": Recipe("a quiet start: slot scores lowered by 5 nats", fields={"quiet": 5.0}),
    "short": Recipe("rows of 384 tokens only", one_length(384, 4)),
    "long": Recipe("rows of 2,048 tokens only", one_length(2048, 2)),
    "pt-sft": Recipe("plain text, then answers", ((1280, 2, 0.6, (0, 1, 0)), (2048, 2, 0.4, (0, 0, 1)))),
    "pt": Recipe("plain text only", ((1280, 2, 0.6, (0, 1, 0)), (2048, 2, 0.4, (0, 1, 0)))),
    "sft": Recipe("answers only", ((1280, 2, 0.6, (0, 0, 1)), (2048, 2, 0.4, (0, 0, 1)))),
    "no-reconstruction": Recipe("without reconstruction", PLAIN),
    "no-kl": Recipe("next-token loss alone", fields={"kl": 0.0}),
    "qkv": Recipe("a mirrored Q too", fields={"mirror": "qkv"}),
    "qkv-learned": Recipe("a mirrored Q and a learned slot embedding", fields={"mirror": "qkv", "slot_input": "learned"}),
    "token": Recipe("a reserved token as slot input", fields={"slot_input": "token"}),
    "learned": Recipe("a learned slot embedding", fields={"slot_input": "learned"}),
    "r4": Recipe("r = 4 only", fields={"strides": (4,)}),
    "r8": Recipe("r = 8 only", fields={"strides": (8,)}),
    "r16": Recipe("r = 16 only", fields={"strides": (16,)}),
    "w64": Recipe("W = 64 only", fields={"windows": (64,)}),
    "w256": Recipe("W = 256 only", fields={"windows": (256,)}),
}


@dataclass(frozen=True)
class Setting:
    """What all recipes share."""

    pair: str
    tokens: int
    seed: int
    docs: int
    contexts: tuple[int, ...]
    windows: tuple[int, ...]
    answer_tokens: int
    held: tuple[tuple[int, int], ...]
    shrink: int = 1

    def key(self, name: str) -> dict[str, Any]:
        """What a result depends on, as JSON gives it back."""
        recipe = RECIPES[name]
        made = {"stages": recipe.stages(self.tokens, self.shrink), "fields": recipe.fields, **vars(self)}
        return {"recipe": name, **json.loads(json.dumps(made))}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        width = max(map(len, RECIPES))
        print("\n".join(f"{name:{width}}  {recipe.about}" for name, recipe in RECIPES.items()))
        return 0
    try:
        run(options)
    except MaswError as error:
        print(f"ablations: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ablations: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="names, comma-separated (default: all)")
    parser.add_argument("--list", action="store_true", help="print the recipes")
    parser.add_argument("--tiny", action="store_true", help="the tiny pair on generated text")
    parser.add_argument("--pair", default="smollm2", help="pair whose draft is trained (default smollm2)")
    parser.add_argument("--tokens", type=int, default=300_000, help="training tokens of each recipe (default 300000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", type=int, default=2, help="documents of each set and context (default 2)")
    parser.add_argument("--contexts", default="1k,2k,4k", help="prompt lengths of the measure, tokens")
    parser.add_argument("--windows", default="128", help="W of the measure")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with train/ and eval/")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"), help="folder of the trainings")
    parser.add_argument("--results", type=Path, default=Path("docs"), help="folder of ablations.jsonl and ABLATIONS.md")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: as torch decides)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    names = list(RECIPES) if options.only is None else [name.strip() for name in options.only.split(",")]
    for name in names:
        if name not in RECIPES:
            raise UsageError(f"there is no recipe '{name}'; use {', '.join(RECIPES)}")
    if options.tokens < 1 or options.docs < 1 or options.answer_tokens < 2:
        raise UsageError("--tokens and --docs must be at least 1 and --answer-tokens at least 2")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.tiny:
        setting = Setting("tiny", min(options.tokens, 2_000), options.seed, 1, (512,), (16,), 8, ((48, 1),), shrink=8)
        sources, evaluated = tiny_data(options.out / "data")
    else:
        contexts, windows = tuple(numbers("contexts", options.contexts)), tuple(numbers("windows", options.windows))
        held = ((1024, 3), (2048, 3))
        setting = Setting(
            options.pair, options.tokens, options.seed, options.docs, contexts, windows, options.answer_tokens, held
        )
        sources, evaluated = shared_data(options.data)
    for path in evaluated:
        cases.rows(path)
    draft_of(setting.pair)
    results = Results(options.results)
    waiting = [name for name in names if not results.has(setting.key(name))]
    print(f"{len(names) - len(waiting)} of {len(names)} recipes are in {results.path}", flush=True)
    if waiting:
        lab = Lab(setting, sources, evaluated, options.out, options.device, options.dtype)
        for name in waiting:
            results.add(lab.result(name))
    results.write_table()
    print(f"table: {results.table}")


class Lab:
    """Models, text and cases, loaded once."""

    def __init__(
        self, setting: Setting, sources: corpus.Sources, evaluated: list[Path], out: Path, device: str, dtype: str
    ) -> None:
        self.setting, self.out = setting, out
        where = resolve_device(device)
        self.session = Session(load_pair(setting.pair, where, resolve_dtype(dtype, where)))
        tokenizer = self.session.pair.draft.tokenizer
        self.corpus = corpus.load(sources, tokenizer, cache_root() / "tokens", setting.seed, setting.held, say)
        self.cases = list(cases.grid(evaluated, tokenizer, setting.contexts, setting.docs, recall=False))
        if not self.cases:
            raise UsageError("no document fills a context; lower --contexts")

    def result(self, name: str) -> dict[str, Any]:
        """Trains and measures one recipe."""
        setting, recipe, draft = self.setting, RECIPES[name], self.session.pair.draft
        windows = {
            "windows": tuple(max(8, w // setting.shrink) for w in recipe.fields.get("windows", (48, 64, 96, 128, 192, 256)))
        }
        strides = {"strides": tuple(min(8, r) if setting.shrink > 1 else r for r in recipe.strides)}
        config = training.recipe(
            base=draft.name, stages=recipe.stages(setting.tokens, setting.shrink), seed=setting.seed, eval_windows=setting.windows,
            eval_tokens=max(1, setting.tokens // 3), **{**recipe.fields, **windows, **strides},
        )  # fmt: skip
        say(f"{name}: {recipe.about}")
        folder, c, began = self.out / name, self.corpus, time.monotonic()
        done = training.train(config, draft.decoder, c.texts, c.answers, c.held, folder, separator=c.separator, listener=progress)
        trained = done.adaptor.requires_grad_(False)
        shipped = Adaptor.load(folder / "adaptor.safetensors", draft.decoder, base=draft.name)  # as inference would, in bf16
        say(f"{name}: measuring on {len(self.cases)} cases")
        methods = {"window", "masw"} | ({"window-equal", "masw-untrained"} if name == "base" else set())
        rows = evaluate.run(
            self.session, self.cases, setting.windows, config.strides, (5, 8), lambda r: shipped,
            sinks=config.sinks, answer_tokens=setting.answer_tokens, methods=methods,
        )  # fmt: skip
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        return {
            **setting.key(name),
            "about": recipe.about,
            "parameters": sum(p.numel() for p in trained.parameters()),
            "seconds": round(time.monotonic() - began),
            "curve": curve([(line["tokens"], line["nll"]) for line in log if line["kind"] == "step"]),
            "held_out": [{"tokens": m["tokens"], "agreement": m["agreement"]} for m in log if m["kind"] == "measure"],
            "rows": evaluate.as_dicts(rows),
            "provenance": provenance(draft.decoder.device, draft.decoder.dtype),
        }


def curve(points: list[tuple[int, float]], count: int = 24) -> list[tuple[int, float]]:
    """The next-token loss by tokens as means of at most `count` stretches; single steps differ in W, r and kind of row."""
    size = max(1, -(-len(points) // count))
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(stretch[-1][0], round(fmean(loss for _, loss in stretch), 4)) for stretch in stretches]


class Results:
    """JSON lines, one a recipe, and the table made from them."""

    def __init__(self, folder: Path) -> None:
        self.path, self.table = folder / "ablations.jsonl", folder / "ABLATIONS.md"
        self.lines: list[dict[str, Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self.lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line]
        except OSError as error:
            raise MaswError(f"cannot use {folder} ({error.strerror or error}); name another folder with --results") from None
        except ValueError:
            raise UsageError(f"{self.path} is not a results file of this script; move it away") from None

    def has(self, key: dict[str, Any]) -> bool:
        return any(all(line.get(k) == v for k, v in key.items()) for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        self.lines = [known for known in self.lines if known["recipe"] != line["recipe"]] + [json.loads(json.dumps(line))]
        order = list(RECIPES)
        self.lines.sort(key=lambda known: order.index(known["recipe"]) if known["recipe"] in order else len(order))
        with replacing(self.path) as partial:
            partial.write_text("".join(json.dumps(known) + "\n" for known in self.lines), encoding="utf-8")
        self.write_table()

    def write_table(self) -> None:
        self.table.write_text(markdown(self.lines), encoding="utf-8")


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table: means over sets, windows and the recipe's strides."""
    contexts = sorted({row["context"] for line in lines for row in line["rows"]})
    heads = ["recipe", "what differs", "tokens", "next-token loss, first", "last", "held-out agreement"]
    heads += [f"{text} at {context:,}" for context in contexts for text in ("tokens/iter", "recovered gap")]
    table = [heads, ["---"] * len(heads)]
    for method in ("full", "window"):
        cells = [mean(lines[:1], method, context, "tokens_per_iteration") for context in contexts]
        table.append([method, "no slots", *"-" * 4, *(c for cell in cells for c in (cell, "-"))])
    for line in lines:
        cells = [mean([line], "masw", context, key) for context in contexts for key in ("tokens_per_iteration", "recovered_gap")]
        held = f"{line['held_out'][-1]['agreement']:.3f}" if line["held_out"] else "-"
        first, last = line["curve"][0][1], line["curve"][-1][1]
        tokens = line["curve"][-1][0]
        table.append([line["recipe"], line["about"], f"{tokens:,}", f"{first:.2f}", f"{last:.2f}", held, *cells])
    shared = lines[0] if lines else {}
    head = (
        "# Ablations of the training recipe\n\nMade by `python scripts/ablations.py`; every number is in `ablations.jsonl` beside "
        "this file, with provenance. Equal tokens for each recipe. Tokens per iteration at gamma 5 on the target's own greedy "
        "answers, means over sets, windows and the recipe's strides; recovered gap = (masw - window) / (full - window).\n"
    )
    if shared:
        head += (
            f"\nPair {shared['pair']}, {shared['docs']} documents of each set and context, W = "
            f"{', '.join(map(str, shared['windows']))}, answers of at most {shared['answer_tokens']} tokens, seed {shared['seed']}.\n"
        )
    return head + "\n" + "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


def mean(lines: list[dict[str, Any]], method: str, context: int, key: str) -> str:
    found = [row[key] for line in lines for row in line["rows"] if (row["method"], row["context"]) == (method, context)]
    values = [value["5"] if isinstance(value, dict) else value for value in found if value is not None]
    return f"{fmean(values):.2f}" if values else "-"


def shared_data(folder: Path) -> tuple[corpus.Sources, list[Path]]:
    train, measured = folder / "train", folder / "eval"
    names = ("gov-00", "textbooks-science-00", "dialogue-00", "docs-00", "books-00")
    sources = corpus.Sources(
        [str(train / f"pretrain-{name}.jsonl.gz") for name in names],
        [str(train / "sft.jsonl.gz")],
        [str(train / "valid.jsonl.gz")],
        [str(train / "sft-valid.jsonl.gz")],
    )
    return sources, [measured / f"{name}.jsonl" for name in ("govreport", "qmsum", "multinews")]


def tiny_data(folder: Path) -> tuple[corpus.Sources, list[Path]]:
    words = "the report of the committee on water and roads says that the money was spent in three years "
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": str(i), "text": f"{i} {words}" * 12, "question": "Who?", "reference": f"person {i}"} for i in range(3)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = [str(path)]
    return corpus.Sources(source, source, source, source), [path]


def progress(line: dict[str, Any]) -> None:
    if line["kind"] == "measure":
        say(f"  {line['tokens']:,} tokens: held-out agreement {line['agreement']:.4f}")
    elif line["kind"] == "step" and line["step"] % 25 == 0:
        left = line["eta_s"] / 60
        say(f"  {line['tokens']:,} tokens: loss {line['loss']:.3f}, {line['tokens_per_s']:,.0f} tokens/s, {left:.0f} min left")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
