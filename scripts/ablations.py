"""Ablations of the training recipe: named recipes, equal tokens, one results table.

    python scripts/ablations.py                       the plan with its predicted time, then every recipe; the same command goes on
    python scripts/ablations.py --plan                the plan alone
    python scripts/ablations.py --only base,random    some of them
    python scripts/ablations.py --tiny                the tiny pair on generated text: a minute, for tests

Recipes run one after another, the most asked for first. Each trains in OUT/NAME like any `masw train`, is then measured on held-out rows
of several lengths as training measures, and on the target's own answers like `masw eval-adaptor`. Results are kept as JSON lines, one a
recipe, in data/results/ablations_PAIR.jsonl, which notebooks 06 and 07 show; a recipe that is there with the same settings is not run
again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from masw import ablations, cases, corpus, data, evaluate, heldout
from masw import train as training
from masw.adaptor import Adaptor, AdaptorInfo
from masw.alone import alone
from masw.catalogue import draft_of
from masw.cli.evaluate import numbers
from masw.devices import resolve_device, resolve_dtype
from masw.distil import Passes
from masw.errors import MaswError, UsageError
from masw.files import replacing
from masw.provenance import provenance, versions
from masw.recipe import TrainConfig
from masw.recipe import recipe as recipe_of
from masw.session import Session
from masw.store import cache_root
from masw.zoo import load_pair

Kinds = tuple[float, float, float]  # shares of reconstruction, text, answers
Part = tuple[int, float, Kinds]  # length of rows, share of the tokens, kinds

STEP_TOKENS = 2048  # of every step of every recipe, whatever its rows' length: equal tokens are equal steps
MIXED: tuple[Part, ...] = ((512, 0.25, (2, 1, 1)), (1024, 0.25, (2, 1, 1)), (2048, 0.5, (2, 1, 1)))
PLAIN: tuple[Part, ...] = ((512, 0.25, (0, 1, 1)), (1024, 0.25, (0, 1, 1)), (2048, 0.5, (0, 1, 1)))
TEXT: Part = (1024, 0.5, (0, 1, 0))
GAMMAS = (5, 8)
FORWARD_SHARE = 1 / 3  # of the time of a trained token: reading one without teacher and backward pass
THINNED = 12  # every twelfth document of the training data: some millions of tokens, more than any budget here


@dataclass(frozen=True)
class Recipe:
    """What differs from `base`: mirrored K and V, copied; mean slot input; r = 8; W drawn for each step; KL 0.7."""

    about: str
    parts: tuple[Part, ...] = MIXED
    fields: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int, ...] = ()  # of its measure, beside those of all recipes
    extra: bool = False  # beyond the list that is run by default

    def stages(self, tokens: int, shrink: int = 1) -> tuple[str, ...]:
        """`shrink` divides row lengths, for the tiny pair."""
        step = STEP_TOKENS // shrink
        return tuple(
            f"{n // shrink}x{STEP_TOKENS // n}:{round(tokens * share / step) * step}:{a}/{b}/{c}"
            for n, share, (a, b, c) in self.parts
        )

    @property
    def strides(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.fields.get("strides", (8,))
        return found


RECIPES: dict[str, Recipe] = {
    "base": Recipe("copied K and V, mean slot input, r = 8, rows of 512 to 2,048, with reconstruction", windows=(64, 256)),
    "random": Recipe("mirrored weights start random, not copied", fields={"random_init": True}),
    "short": Recipe("rows of 512 tokens only", ((512, 1.0, (2, 1, 1)),)),
    "long": Recipe("rows of 2,048 tokens only", ((2048, 1.0, (2, 1, 1)),)),
    "pt-sft": Recipe("plain text, then answers (PT + SFT)", (TEXT, (2048, 0.5, (0, 0, 1)))),
    "sft": Recipe("answers only (SFT)", ((1024, 0.5, (0, 0, 1)), (2048, 0.5, (0, 0, 1)))),
    "pt": Recipe("plain text only (PT)", (TEXT, (2048, 0.5, (0, 1, 0)))),
    "no-reconstruction": Recipe("text and answers, without reconstruction", PLAIN),
    "qkv": Recipe("a mirrored Q too", fields={"mirror": "qkv"}),
    "token": Recipe("a reserved token as slot input", fields={"slot_input": "token"}),
    "last": Recipe("the last token that a slot closes as its input", fields={"slot_input": "last"}),
    "r4": Recipe("r = 4", fields={"strides": (4,)}),
    "r16": Recipe("r = 16", fields={"strides": (16,)}),
    "learned": Recipe("a learned slot embedding", fields={"slot_input": "learned"}, extra=True),
    "qkv-learned": Recipe(
        "a mirrored Q and a learned slot embedding", fields={"mirror": "qkv", "slot_input": "learned"}, extra=True
    ),
    "quiet": Recipe("a quiet start: slot scores lowered by 5 nats", fields={"quiet": 5.0}, extra=True),
    "last-quiet": Recipe(
        "the last token as input, slot scores lowered by 2 nats", fields={"slot_input": "last", "quiet": 2.0}, extra=True
    ),
    "last-qkv": Recipe("the last token as input, a mirrored Q too", fields={"slot_input": "last", "mirror": "qkv"}, extra=True),
    "last-match": Recipe(
        "the last token as input, and the distance behind every layer", fields={"slot_input": "last", "match": 30.0}, extra=True
    ),
    "last-qkv-match": Recipe(
        "the last token as input, a mirrored Q, and the distance behind every layer",
        fields={"slot_input": "last", "mirror": "qkv", "match": 30.0},
        extra=True,
    ),
    "no-kl": Recipe("next-token loss alone", fields={"kl": 0.0}, extra=True),
    "r4-8": Recipe("r = 4 or 8, drawn for each step: one adaptor for both", fields={"strides": (4, 8)}, extra=True),
    "w64": Recipe("W = 64 in training", fields={"windows": (64,)}, windows=(64,), extra=True),
    "w256": Recipe("W = 256 in training", fields={"windows": (256,)}, windows=(256,), extra=True),
}
DEFAULT = [name for name, recipe in RECIPES.items() if not recipe.extra]


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

    def measured(self, name: str) -> tuple[int, ...]:
        """W of the measure of a recipe."""
        return tuple(dict.fromkeys((*self.windows, *(max(8, w // self.shrink) for w in RECIPES[name].windows))))

    def read_once(self, files: int) -> int:
        """Tokens that a draft reads for one memory's measure: held-out rows of three kinds, and each case with its answer."""
        judged = files * self.docs * sum(context + self.answer_tokens for context in self.contexts)
        return 3 * sum(length * rows for length, rows in self.held) + judged

    def seconds(self, name: str, files: int, rate: float) -> float:
        """Predicted time of a recipe at `rate` trained tokens/s, without what all share."""
        memories = len(self.measured(name)) * len(RECIPES[name].strides) * (2 if name == "base" else 1)
        return (self.tokens + FORWARD_SHARE * memories * self.read_once(files)) / rate

    def shared_seconds(self, names: Sequence[str], files: int, rate: float) -> float:
        """Predicted time of what recipes share: the full cache and each window, and the target's answers."""
        windows = len({w for name in names for w in self.measured(name)})
        return FORWARD_SHARE * (2 + windows) * self.read_once(files) / rate


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
    except MaswError as error:
        print(f"ablations: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ablations: interrupted; finished recipes are kept, the same command goes on", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help=f"names, comma-separated, or `all` (default: {','.join(DEFAULT)})")
    parser.add_argument("--plan", action="store_true", help="print the recipes and their predicted time, and stop")
    parser.add_argument("--tiny", action="store_true", help="the tiny pair on generated text")
    parser.add_argument("--pair", default="smollm2", help="pair whose draft is trained (default smollm2)")
    parser.add_argument(
        "--tokens", type=int, default=32_768, help="training tokens of each recipe, rounded up to steps (default 32768)"
    )
    parser.add_argument(
        "--rate", type=float, default=250.0, help="trained tokens/s that the plan assumes (default 250, one core)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docs", type=int, default=1, help="documents of each set and context (default 1)")
    parser.add_argument("--contexts", default="2k", help="prompt lengths of the measure on answers, tokens (default 2k)")
    parser.add_argument("--windows", default="128", help="W of the measure (default 128)")
    parser.add_argument("--held", default="512x2,2048x1,4096x1", help="LENGTHxROWS of the held-out rows, of each kind")
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--data", type=Path, help="folder with train/ and eval/; not with --tiny")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"), help="folder of the trainings")
    parser.add_argument("--results", type=Path, help="the table (default data/results/ablations_PAIR.jsonl)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: as torch decides)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    names = {None: DEFAULT, "all": list(RECIPES)}.get(options.only) or [name.strip() for name in options.only.split(",")]
    for name in names:
        if name not in RECIPES:
            raise UsageError(f"there is no recipe '{name}'; use {', '.join(RECIPES)}")
    if options.tokens < 1 or options.docs < 1 or options.answer_tokens < 2 or not options.rate > 0:
        raise UsageError("--tokens, --docs and --rate must be above 0 and --answer-tokens at least 2")
    if options.data is None and not options.tiny and not options.plan:
        raise UsageError("--data names the folder with train/ and eval/ (docs/TRAINING.md); --tiny needs none, --plan neither")
    if options.threads:
        torch.set_num_threads(options.threads)
    setting = setting_of(options)
    draft_of(setting.pair)
    table = ablations.Table(
        options.results or Path(__file__).parents[1] / "data" / "results" / f"ablations_{setting.pair}.jsonl",
        # Folders of this machine are nobody else's: a path is told by its last part.
        {
            "command": " ".join(["python scripts/ablations.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
            "pair": setting.pair,
            **versions(),
        },
    )
    files = 1 if options.tiny else len(SETS)
    waiting = [name for name in names if not table.has(setting.key(name))]
    clock = Clock({name: setting.seconds(name, files, options.rate) for name in waiting})
    shared = setting.shared_seconds(waiting, files, options.rate) if waiting else 0.0
    say(f"{len(names) - len(waiting)} of {len(names)} recipes are in {table.path}")
    for name, seconds in clock.predicted.items():
        say(f"  {name:18} {seconds / 60:5.1f} min predicted  {RECIPES[name].about}")
    if waiting:
        total = (shared + sum(clock.predicted.values())) / 60
        say(
            f"{len(waiting)} recipes of {setting.tokens:,} tokens: {total:.0f} min predicted at {options.rate:,.0f} trained tokens/s, "
            f"{shared / 60:.1f} of them for what all share; loading and tokenising come on top"
        )
    if options.plan:
        return
    if waiting:
        sources, evaluated = tiny_data(options.out / "data") if options.tiny else shared_data(options.data, options.out / "data")
        for path in evaluated:
            cases.rows(path)
        with alone(options.out), alone(table.path):  # which each recipe replaces as a whole
            table.reread()
            lab = Lab(setting, sources, evaluated, options.out, options.device, options.dtype)
            for name in waiting:
                with clock.timing(name):
                    table.add(lab.result(name, clock), list(RECIPES))
    print(ablations.markdown(ablations.rows(table.lines)), end="")


def setting_of(options: argparse.Namespace) -> Setting:
    if options.tiny:
        tokens = rounded(min(options.tokens, 2_048), STEP_TOKENS // 8 * 4)
        return Setting("tiny", tokens, options.seed, 1, (512,), (16,), 8, ((48, 1), (96, 1)), shrink=8)
    return Setting(
        options.pair,
        rounded(options.tokens, STEP_TOKENS * 4),
        options.seed,
        options.docs,
        tuple(numbers("contexts", options.contexts)),
        tuple(numbers("windows", options.windows)),
        options.answer_tokens,
        tuple(corpus.held_rows(options.held)),
    )


def rounded(tokens: int, unit: int) -> int:
    """Up to a multiple of `unit`, so that quarters are whole steps and every recipe has exactly as many tokens."""
    return -(-tokens // unit) * unit


class Clock:
    """Predicted times of recipes, corrected by what the finished ones took."""

    def __init__(self, predicted: dict[str, float]) -> None:
        self.predicted, self._waiting = predicted, dict(predicted)
        self._expected = self._took = 0.0
        self._began = time.monotonic()

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        self._began = time.monotonic()
        expected = self._waiting.pop(name)
        yield
        self._expected += expected
        self._took += time.monotonic() - self._began

    def left(self, current: float) -> str:
        """Time to the end of all, `current` seconds of it for the recipe that runs now."""
        pace = self._took / self._expected if self._expected else 1.0
        return f"{(max(0.0, current) + pace * sum(self._waiting.values())) / 60:.0f} min left of all"


class Lab:
    """Models, text and cases, loaded once, and what their measures share."""

    def __init__(
        self, setting: Setting, sources: corpus.Sources, evaluated: list[Path], out: Path, device: str, dtype: str
    ) -> None:
        self.setting, self.out, self.files = setting, out, len(evaluated)
        where = resolve_device(device)
        self.session = Session(load_pair(setting.pair, where, resolve_dtype(dtype, where)))
        tokenizer = self.session.pair.draft.tokenizer
        self.corpus = corpus.load(sources, tokenizer, cache_root() / "tokens", setting.seed, setting.held, say)
        self.cases = list(cases.grid(evaluated, tokenizer, setting.contexts, setting.docs, recall=False))
        if not self.cases:
            raise UsageError("no document fills a context; lower --contexts")
        self.passes = Passes(self.session.pair.draft.decoder)
        self.baselines, self.known = heldout.Baselines(), evaluate.Known()

    def result(self, name: str, clock: Clock) -> dict[str, Any]:
        """Trains and measures one recipe."""
        setting, recipe, draft = self.setting, RECIPES[name], self.session.pair.draft
        windows = tuple(max(8, w // setting.shrink) for w in recipe.fields.get("windows", (64, 128, 256)))
        strides = tuple(min(8, r) if setting.shrink > 1 else r for r in recipe.strides)
        config = recipe_of(
            base=draft.name, stages=recipe.stages(setting.tokens, setting.shrink), seed=setting.seed, warmup_steps=4,
            eval_tokens=0, **{**recipe.fields, "windows": windows, "strides": strides},
        )  # fmt: skip
        say(f"{name}: {recipe.about}")
        folder, c, began = self.out / name, self.corpus, time.monotonic()

        def progress(line: dict[str, Any]) -> None:
            if line["kind"] == "step":
                rate = line["tokens_per_s"]
                rest = (setting.tokens - line["tokens"]) / rate + setting.seconds(name, self.files, rate) - setting.tokens / rate
                say(
                    f"  {name}: {line['tokens']:,} of {setting.tokens:,} tokens, loss {line['nll']:.3f}, "
                    f"{rate:,.0f} tokens/s, {clock.left(rest)}"
                )

        training.train(config, draft.decoder, c.texts, c.answers, [], folder, separator=c.separator, listener=progress)
        shipped = Adaptor.load(folder / "adaptor.safetensors", draft.decoder, base=draft.name)  # as inference would, in bf16
        say(f"  {name}: measuring")
        measured = setting.measured(name)
        held = self.held_out(shipped, "masw", config, measured)
        methods = {"window", "masw"}
        if name == "base":
            methods.add("masw-untrained")
            untrained = Adaptor.copied(draft.decoder, AdaptorInfo(draft.name, ()))
            held += [row for row in self.held_out(untrained, "masw-untrained", config, measured) if row["method"] != "window"]
        found = evaluate.judge_all(
            self.session, self.cases, measured, config.strides, lambda r: shipped,
            sinks=config.sinks, answer_tokens=setting.answer_tokens, methods=methods, known=self.known,
        )  # fmt: skip
        rows = evaluate.rows(found, GAMMAS)
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        say(f"  {name}: done")
        return {
            **setting.key(name),
            "about": recipe.about,
            "parameters": sum(p.numel() for p in shipped.parameters()),
            "seconds": round(time.monotonic() - began),
            "curve": curve([(line["tokens"], line["nll"]) for line in log if line["kind"] == "step"]),
            "held_out": held,
            "rows": evaluate.as_dicts(rows),
            "provenance": provenance(draft.decoder.device, draft.decoder.dtype),
        }

    def held_out(self, adaptor: Adaptor, method: str, config: TrainConfig, windows: tuple[int, ...]) -> list[dict[str, Any]]:
        """Rows of `masw.heldout.measure` under the name `method`."""
        found = heldout.measure(self.passes, adaptor, self.corpus.held, config.sinks, windows, config.strides, self.baselines)
        return [{**row, "method": method if row["method"] == "masw" else row["method"]} for row in found]


def curve(points: list[tuple[int, float]], count: int = 24) -> list[tuple[int, float]]:
    """The next-token loss by tokens as means of at most `count` stretches; single steps differ in W and kind of row."""
    size = max(1, -(-len(points) // count))
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(stretch[-1][0], round(fmean(loss for _, loss in stretch), 4)) for stretch in stretches]


SETS = ("govreport", "qmsum", "multinews")
TRAINED = ("gov-00", "textbooks-science-00", "dialogue-00", "docs-00", "books-00")


def shared_data(folder: Path, out: Path) -> tuple[corpus.Sources, list[Path]]:
    """Sources under `folder`, training text thinned into `out`."""
    train, measured = folder / "train", folder / "eval"
    sources = corpus.Sources(
        [str(thinned([train / f"pretrain-{name}.jsonl.gz" for name in TRAINED], ("text",), out / "text.jsonl"))],
        [str(thinned([train / "sft.jsonl.gz"], ("text", "question", "reference"), out / "answers.jsonl"))],
        [str(train / "valid.jsonl.gz")],
        [str(train / "sft-valid.jsonl.gz")],
    )
    return sources, [measured / f"{name}.jsonl" for name in SETS]


def thinned(files: list[Path], fields: tuple[str, ...], path: Path) -> Path:
    """Every `THINNED`-th row of each file, always the same ones: tokenising all of them would take longer than the trainings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as stream:
        for file in files:
            for number, row in enumerate(data.documents(str(file), fields)):
                if number % THINNED == 0:
                    stream.write(json.dumps({key: row[key] for key in fields}) + "\n")
    return path


def tiny_data(folder: Path) -> tuple[corpus.Sources, list[Path]]:
    words = "the report of the committee on water and roads says that the money was spent in three years "
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": str(i), "text": f"{i} {words}" * 12, "question": "Who?", "reference": f"person {i}"} for i in range(3)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = [str(path)]
    return corpus.Sources(source, source, source, source), [path]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
