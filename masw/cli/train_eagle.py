"""`masw train-eagle`: a head for a target's features, from text on disk; stopped anywhere, the same command goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.alone import alone
from masw.cli.paths import folder
from masw.cli.train import SOURCE
from masw.cli.training import Display, interruptible, note, token_count
from masw.errors import UsageError

if TYPE_CHECKING:
    from masw.eagle_train import EagleResult


def train_eagle(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(parser=folder("--out"), metavar="runs/NAME", help="Folder of the run; it goes on where it stopped.")
    ],
    text: Annotated[list[str], typer.Option(metavar="SRC", help=f"Plain text, rows with `text`: {SOURCE}")],
    pair: Annotated[str | None, typer.Option(help="Preset or DRAFT:TARGET whose target is to get a head.")] = None,
    base: Annotated[str | None, typer.Option(help="The target itself: a name, a hub id or a folder.")] = None,
    valid: Annotated[list[str], typer.Option(metavar="SRC", help="Plain text that is only measured on.")] = [],  # noqa: B006
    tokens: Annotated[
        int, typer.Option(parser=token_count("--tokens"), metavar="TOKENS", help="Tokens of the whole recipe.")
    ] = 1_000_000,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a step.")] = 2,
    regression: Annotated[float, typer.Option(help="Weight of the smooth L1 distance to the target's features.")] = 1.0,
    kl: Annotated[float, typer.Option(help="Weight of the distance to the target's distribution.")] = 0.1,
    noise: Annotated[float, typer.Option(help="Features are shifted by up to so much, uniformly.")] = 0.1,
    lr: Annotated[float, typer.Option(help="Learning rate at the top of the cosine.")] = 3e-5,
    min_lr: Annotated[float, typer.Option(help="Share of it at the end.")] = 0.05,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 20,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Norm that gradients are cut to.")] = 0.5,
    fit_tokens: Annotated[
        int,
        typer.Option(
            parser=token_count("--fit-tokens"),
            metavar="TOKENS",
            help="The head starts as the best linear predictor on the first so many tokens; 0: random.",
        ),
    ] = 16_384,
    seed: Annotated[int, typer.Option(help="Seed of the order of text, of noise, and of fc's first weights.")] = 0,
    eval_rows: Annotated[int, typer.Option(help="Held-out rows of --length tokens.")] = 4,
    eval_tokens: Annotated[
        int, typer.Option(parser=token_count("--eval-tokens"), metavar="TOKENS", help="Tokens between measurements; 0: never.")
    ] = 100_000,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 5.0,
    max_minutes: Annotated[float | None, typer.Option(help="Stop, with a checkpoint, this long after the start.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop, with a checkpoint, after so many more steps.")] = None,
    token_cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps the tokenised text. Default: in masw's own cache.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as torch decides.")] = 0,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the frozen target: auto | bf16 | fp32. The head trains in fp32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
) -> None:
    """Train an EAGLE head: one layer that predicts the target's next feature. The target stays as it is; the same command goes on."""
    started = time.monotonic()
    with interruptible():
        from masw.catalogue import resolve_model, target_of
        from masw.eagle_train import eagle_recipe

        if (pair is None) == (base is None):
            raise UsageError("name the target once: --pair PAIR or --base MODEL")
        if min(max_steps or 0, max_minutes or 0, threads) < 0 or eval_rows < 1:
            raise UsageError("--max-steps, --max-minutes and --threads count from zero up, --eval-rows from one")
        # Everything that can be refused is refused before a model is loaded.
        name = target_of(pair or base or "")
        known: dict[str, Any] = {
            "length": length, "rows": rows, "tokens": tokens, "regression": regression, "kl": kl, "noise": noise, "lr": lr,
            "min_lr": min_lr, "warmup_steps": warmup_steps, "weight_decay": weight_decay, "clip": clip, "seed": seed,
            "fit_tokens": fit_tokens,
            "checkpoint_s": checkpoint_minutes * 60, "eval_tokens": eval_tokens,
        }  # fmt: skip
        config = eagle_recipe(base=resolve_model(name).name, **known)
        context.with_resource(alone(out))
        import torch

        from masw import data, eagle_train
        from masw.corpus import HELD_SEED
        from masw.devices import resolve_device, resolve_dtype
        from masw.store import cache_root
        from masw.zoo import load_pair

        if threads:
            torch.set_num_threads(threads)
        where = resolve_device(device)
        model = load_pair(name, where, resolve_dtype(dtype, where)).target
        cache = token_cache or cache_root() / "tokens"
        plain = data.texts(text, model.tokenizer, cache, seed, note)
        held = None
        if valid and eval_tokens:
            unseen = data.texts(valid, model.tokenizer, cache, HELD_SEED, note)
            held = torch.stack([torch.from_numpy(unseen.row(i, length)) for i in range(eval_rows)])
        elif eval_tokens:
            note("nothing is measured on the way, and no best head chosen: name --valid for that")
        left = None if max_minutes is None else max(0.0, max_minutes * 60 - (time.monotonic() - started))
        show = Display()
        try:
            result = eagle_train.train_eagle(
                config, model.decoder, plain, held, out, listener=show.line, max_steps=max_steps, max_seconds=left
            )
        finally:
            show.close()
        typer.echo(json.dumps(_report(result, show)) if as_json else _summary(result, show))


def _report(result: EagleResult, show: Display) -> dict[str, Any]:
    """The object that --json prints; null where a thing was not measured."""
    from masw.eagle_train import HEAD_FILE

    head, best = result.folder / HEAD_FILE, result.folder / "best.safetensors"
    return {
        "base": result.head.info.base,
        "step": result.step,
        "steps": result.steps,
        "tokens": result.tokens,
        "finished": result.step == result.steps,
        "tokens_per_s": show.tokens_per_s,
        "floor_share": show.last.get("floor_share"),
        "loss": show.loss if show.losses else None,
        "agreement": result.measure.get("agreement"),
        "measure": result.measure.get("rows", []),
        "measured_at_tokens": result.measure.get("tokens"),
        "head": str(head) if head.exists() else None,
        "best": str(best) if best.exists() else None,
    }


def _summary(result: EagleResult, show: Display) -> str:
    """Speed, loss and measure come last."""
    report = _report(result, show)
    more = "" if report["finished"] else "; the same command goes on"
    written = f"head: {report['head']}" if report["head"] else "no head was written: there was time for no step"
    lines = [
        written + (f", best: {report['best']}" if report["best"] else ""),
        f"step {result.step:,} of {result.steps:,}, {result.tokens:,} tokens{more}",
    ]
    if show.last:
        lines.append(f"{show.tokens_per_s:,.0f} tokens/s ({show.last['floor_share']:.2f} of the floor), loss {show.loss:.4f}")
    lines += [
        f"held out {row['set']} (n = {row['n']:,}): agreement {row['agreement']:.4f}, KL {row['kl']:.4f}, "
        f"smooth L1 {row['regression']:.4f} at {report['measured_at_tokens']:,} tokens"
        for row in report["measure"]
    ]
    return "\n".join(lines)
