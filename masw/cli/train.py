"""`masw train`: an adaptor for a draft, from text on disk; stopped anywhere, the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.alone import alone
from masw.cli.paths import folder
from masw.cli.training import Display, interruptible, note, token_count
from masw.errors import Cancelled, MaswError, UsageError

if TYPE_CHECKING:
    import torch

    from masw.corpus import Sources
    from masw.train import Result

SOURCE = "a .jsonl or .jsonl.gz file, a folder of text, hub:OWNER/NAME[:SPLIT], or a folder of tokens. Repeatable."


def train(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(parser=folder("--out"), metavar="runs/NAME", help="Folder of the run; it goes on where it stopped.")
    ],
    pair: Annotated[str | None, typer.Option(help="Preset or DRAFT:TARGET whose draft is to get an adaptor.")] = None,
    base: Annotated[str | None, typer.Option(help="The draft itself: a name, a hub id or a folder.")] = None,
    text: Annotated[list[str], typer.Option(metavar="SRC", help=f"Plain text, rows with `text`: {SOURCE}")] = [],  # noqa: B006
    answers: Annotated[
        list[str], typer.Option(metavar="SRC", help="Questions about long documents, rows with `text`, `question`, `reference`.")
    ] = [],  # noqa: B006
    valid: Annotated[list[str], typer.Option(metavar="SRC", help="Plain text that is only measured on.")] = [],  # noqa: B006
    valid_answers: Annotated[list[str], typer.Option(metavar="SRC", help="Questions that are only measured on.")] = [],  # noqa: B006
    stages: Annotated[
        str,
        typer.Option(
            help="Comma-separated LENGTHxROWS:TOKENS[:RECONSTRUCTION/TEXT/ANSWERS]: rows of LENGTH tokens, ROWS a step, TOKENS in "
            "all (k, m), drawn from the three kinds in these shares."
        ),
    ] = "384x8:300k:2/1/0,1280x2:300k:1/1/0,2048x1:400k:1/2/1",
    mirror: Annotated[str, typer.Option(help="Which projections of the slots train: kv (as in the paper) | qkv.")] = "kv",
    slot_input: Annotated[
        str,
        typer.Option(
            help="What a slot reads: mean (of the r embeddings it closes) | last (of them) | token (a reserved one) | learned."
        ),
    ] = "mean",
    slot_token: Annotated[int, typer.Option(help="The reserved token's id, or the one a learned embedding starts from.")] = 0,
    kl: Annotated[
        float, typer.Option(help="Share of the distance to the same model with its full KV in the loss; 0: next token only.")
    ] = 0.7,
    match: Annotated[
        float,
        typer.Option(
            help="Weight of the distance to the full KV behind every layer, beside the loss at the LM head; 0: at the head alone."
        ),
    ] = 0.0,
    hardest: Annotated[
        int, typer.Option(help="Loss positions of a row: those that slots have moved furthest from the full KV; 0: all.")
    ] = 0,
    score_documents: Annotated[
        bool, typer.Option("--score-documents", help="Rows with an answer: loss on the document and the question too.")
    ] = False,
    pieces: Annotated[int, typer.Option(help="A reconstructed passage comes again in up to so many shuffled pieces.")] = 8,
    strides: Annotated[str, typer.Option(help="r, one drawn for each step: 4,8.")] = "4,8",
    windows: Annotated[str, typer.Option(help="W, one drawn for each step (at most a quarter of the row).")] = (
        "48,64,96,128,192,256"
    ),
    sinks: Annotated[int, typer.Option(help="S.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate at the top of the cosine.")] = 3e-3,
    min_lr: Annotated[float, typer.Option(help="Share of it at the end.")] = 0.05,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 20,
    average: Annotated[
        float,
        typer.Option(help="Decay of a moving average of the weights, which is measured and saved; 0: the weights themselves."),
    ] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Norm that gradients are cut to.")] = 1.0,
    micro_rows: Annotated[int, typer.Option(help="Rows of one backward pass, for less memory; 0: all of the step's.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the order of text, of W and r, and of random weights.")] = 0,
    random_init: Annotated[bool, typer.Option("--random-init", help="Start from random weights (ablation).")] = False,
    quiet: Annotated[
        float,
        typer.Option(help="Nats by which the scores of slots start lowered, so that untrained ones do no harm; 0: the copy."),
    ] = 0.0,
    init: Annotated[
        Path | None, typer.Option(metavar="FILE.safetensors", help="Start from this adaptor, not a copy of the backbone.")
    ] = None,
    q_rank: Annotated[
        int, typer.Option(help="With --mirror qkv: files hold Q as a difference of this rank from the backbone's; 0: whole.")
    ] = 0,
    eval_rows: Annotated[
        str, typer.Option(help="Held-out rows of each kind: LENGTHxROWS in tokens, comma-separated.")
    ] = "1024x3,2048x3",
    eval_tokens: Annotated[
        int, typer.Option(parser=token_count("--eval-tokens"), metavar="TOKENS", help="Tokens between measurements; 0: never.")
    ] = 100_000,
    eval_windows: Annotated[str, typer.Option(help="W that is measured.")] = "128",
    patience: Annotated[int, typer.Option(help="Stop after so many measurements without a better one; 0: never.")] = 0,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 5.0,
    max_minutes: Annotated[float | None, typer.Option(help="Stop, with a checkpoint, this long after the start.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop, with a checkpoint, after so many more steps.")] = None,
    token_cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps the tokenised text. Default: in masw's own cache.")
    ] = None,
    attention: Annotated[str, typer.Option(help="Kernel: auto | tiled (CPU) | mask | flex (GPU).")] = "auto",
    checkpoint_activations: Annotated[
        bool,
        typer.Option("--checkpoint-activations", help="Compute each layer again in the backward pass: less memory, more time."),
    ] = False,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as torch decides.")] = 0,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the frozen backbone: auto | bf16 | fp32. The adaptor trains in fp32.")] = "auto",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events into the run's folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, last on standard output.")] = False,
) -> None:
    """Train the mirrored projections of a draft's memory slots. The backbone stays as it is; the same command goes on."""
    started = time.monotonic()
    with interruptible():
        from masw.adaptor import read_info
        from masw.catalogue import draft_of
        from masw.corpus import Sources, held_rows
        from masw.recipe import recipe
        from masw.stages import check_sources

        if (pair is None) == (base is None):
            raise UsageError("name the draft once: --pair PAIR or --base MODEL")
        if min(max_steps or 0, max_minutes or 0, threads) < 0:
            raise UsageError("--max-steps, --max-minutes and --threads count from zero up")
        # Everything that can be refused is refused before a model is loaded.
        name = draft_of(pair or base or "")
        held = held_rows(eval_rows)
        known = {
            "stages": tuple(part.strip() for part in stages.split(",")), "mirror": mirror, "slot_input": slot_input,
            "slot_token": slot_token, "random_init": random_init, "strides": _whole("strides", strides),
            "windows": _whole("windows", windows), "sinks": sinks, "kl": kl, "match": match, "hardest": hardest,
            "score_documents": score_documents,
            "average": average,
            "most_pieces": pieces, "lr": lr, "min_lr": min_lr,
            "warmup_steps": warmup_steps, "weight_decay": weight_decay, "clip": clip, "micro_rows": micro_rows, "seed": seed,
            "checkpoint_s": checkpoint_minutes * 60, "eval_tokens": eval_tokens, "eval_windows": _whole("eval-windows", eval_windows),
            "patience": patience, "quiet": quiet, "q_rank": q_rank, "attention": attention, "checkpoint_activations": checkpoint_activations,
        }  # fmt: skip
        check_sources(recipe(base=name, **known).parsed(), bool(text), bool(answers))
        if init is not None:
            read_info(init)
        if q_rank and mirror != "qkv":
            raise UsageError("--q-rank is about a mirrored Q; add --mirror qkv")
        if int(os.environ.get("RANK", "0")) == 0:
            context.with_resource(alone(out))
        sources = Sources(text, answers, valid, valid_answers)
        job = _Job(name, sources, held, known, out, init, token_cache, threads, device, dtype, tensorboard)
        result, show = job.run(max_steps, None if max_minutes is None else max_minutes * 60, started)
        if result is not None and show is not None:
            typer.echo(json.dumps(_report(result, show)) if as_json else _summary(result, show))


@dataclass(frozen=True)
class _Job:
    """Loads what a training needs and runs this process's part of it."""

    name: str
    sources: Sources
    held: list[tuple[int, int]]
    known: dict[str, Any]  # the recipe, but for the base and what it starts from
    out: Path
    init: Path | None
    cache: Path | None
    threads: int
    device: str
    dtype: str
    tensorboard: bool

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    def run(self, max_steps: int | None, max_seconds: float | None, started: float) -> tuple[Result | None, Display | None]:
        """The result, and what was shown on the way; (None, None) in a worker that is not the first."""
        import torch.distributed as dist

        device = self._join()
        finished = False
        try:
            found = self._train(device, max_steps, max_seconds, started)
            finished = True
            return found
        except MaswError as error:
            if self.rank and isinstance(error, Cancelled):  # all of them were told to end, and the first one says it
                raise typer.Exit(error.exit_code) from None
            if self.rank:
                _leave_to_the_first(error.exit_code)
            raise
        finally:
            if dist.is_initialized():
                # The last collective ends with each worker at its own time; one that leaves first can take the other's threads along.
                if finished:
                    dist.barrier()
                dist.destroy_process_group()

    def _join(self) -> torch.device:
        """This worker's device; under torchrun also its place among the workers."""
        import torch
        import torch.distributed as dist

        from masw.devices import resolve_device

        if self.threads:
            torch.set_num_threads(self.threads)
        workers, local = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("LOCAL_RANK", "0")
        device = resolve_device(self.device)
        if workers > 1 and device.type == "cuda":
            device = resolve_device(f"cuda:{local}")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if workers > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return device

    def _train(
        self, device: torch.device, max_steps: int | None, max_seconds: float | None, started: float
    ) -> tuple[Result | None, Display | None]:
        from masw import corpus
        from masw import train as training
        from masw.devices import resolve_dtype
        from masw.recipe import recipe
        from masw.start import start_from
        from masw.store import cache_root
        from masw.zoo import load_pair

        say = note if self.rank == 0 else _quiet
        model = load_pair(self.name, device, resolve_dtype(self.dtype, device)).draft
        longest = max(length for length, _ in self.held)
        if longest > model.config.max_position:
            raise UsageError(
                f"held-out rows of {longest:,} tokens are longer than the model's {model.config.max_position:,} positions; "
                "lower --eval-rows"
            )
        start = None if self.init is None else start_from(self.init, model.decoder, model.name)
        config = recipe(base=model.name, init=start.about["sha256"] if start else "", **self.known)
        read = corpus.load(self.sources, model.tokenizer, self.cache or cache_root() / "tokens", config.seed, self.held, say)
        if config.eval_tokens and not read.held:
            say("nothing is measured on the way, and no best adaptor chosen: name --valid and --valid-answers for that")
        listeners: list[Callable[[dict[str, Any]], None]] = [_tensorboard(self.out)] if self.tensorboard and not self.rank else []
        show = Display()

        def listen(line: dict[str, Any]) -> None:
            for listener in (show.line, *listeners):
                listener(line)

        left = None if max_seconds is None else max(0.0, max_seconds - (time.monotonic() - started))
        try:
            result = training.train(
                config, model.decoder, read.texts, read.answers, read.held, self.out, separator=read.separator,
                listener=listen, max_steps=max_steps, max_seconds=left, start=start,
            )  # fmt: skip
        finally:
            show.close()
        return (result, show) if self.rank == 0 else (None, None)


FIRST_SAYS_S = 20.0


def _leave_to_the_first(code: int) -> None:
    """Of an error that all workers meet the first one speaks. torchrun ends the others as soon as one has left, so none leaves before it;
    returns if the first goes on, and the error is this worker's alone."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(code))
    time.sleep(FIRST_SAYS_S)


def _tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    """A listener that writes scalars by tokens seen."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "--tensorboard needs its package: pip install tensorboard, or read log.jsonl, which has the same"
        ) from None
    writer: Any = None

    def listen(line: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            writer = SummaryWriter(str(folder), purge_step=line["tokens"] + 1)
        if line["kind"] == "step":
            for key in ("loss", "nll", "kl", "agreement", "lr", "grad_norm", "tokens_per_s", "floor_share"):
                writer.add_scalar(f"train/{key}", line[key], line["tokens"])
        elif line["kind"] == "measure":
            for row in line["rows"]:
                name = f"{row['set']}/{row['method']}-W{row['window']}" + (f"-r{row['stride']}" if row["stride"] else "")
                for key in ("agreement", "nll", "kl"):
                    writer.add_scalar(f"{key}/{name}", row[key], line["tokens"])
            writer.add_scalar("held-out/agreement", line["agreement"], line["tokens"])
        writer.flush()

    return listen


def _report(result: Result, show: Display) -> dict[str, Any]:
    """The object that --json prints; null where a thing was not measured."""
    adaptor, best = (result.folder / name for name in ("adaptor.safetensors", "best.safetensors"))
    return {
        "step": result.step,
        "steps": result.steps,
        "tokens": result.tokens,
        "finished": result.step == result.steps or result.stopped_early,
        "stopped_early": result.stopped_early,
        "tokens_per_s": show.tokens_per_s,
        "floor_share": show.last.get("floor_share"),
        "loss": show.loss if show.losses else None,
        "agreement": result.measure.get("agreement"),
        "measure": result.measure.get("rows", []),
        "measured_at_tokens": result.measure.get("tokens"),
        "adaptor": str(adaptor) if adaptor.exists() else None,
        "best": str(best) if best.exists() else None,
    }


def _summary(result: Result, show: Display) -> str:
    """Speed, loss and measure come last."""
    from masw.cli.display import columns

    report = _report(result, show)
    more = "" if report["finished"] else "; the same command goes on"
    if result.stopped_early:
        more = "; stopped early, as --patience asks: the measure grew no better"
    written = f"adaptor: {report['adaptor']}" if report["adaptor"] else "no adaptor was written: there was time for no step"
    lines = [
        written + (f", best: {report['best']}" if report["best"] else ""),
        f"step {result.step:,} of {result.steps:,}, {result.tokens:,} tokens{more}",
    ]
    if result.measure:
        heads = ("held out", "method", "W", "r", "n", "agreement", "nll", "KL")
        cells = [
            [r["set"], r["method"], str(r["window"]), str(r["stride"] or "-"), str(r["n"])]
            + [f"{r[key]:.4f}" for key in ("agreement", "nll", "kl")]
            for r in result.measure["rows"]
        ]
        lines += [columns([heads, *cells])]
    if show.last:
        lines.append(f"{show.tokens_per_s:,.0f} tokens/s ({show.last['floor_share']:.2f} of the floor), loss {show.loss:.4f}")
    if result.measure:
        lines.append(f"held-out agreement {result.measure['agreement']:.4f} at {result.measure['tokens']:,} tokens")
    return "\n".join(lines)


def _whole(option: str, text: str) -> tuple[int, ...]:
    from masw.cli.evaluate import numbers

    return tuple(numbers(option, text))


def _quiet(text: str) -> None:
    """A worker that is not the first."""
