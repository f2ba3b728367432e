"""Trains an adaptor: mirrored projections only, next-token loss on raw positions only (arXiv 2608.30252, section 4).

One process, or several under `torchrun` (each takes its share of a batch's rows). A run lives in a folder:

    recipe.json, last.pt, log.jsonl   see masw.trainloop
    best.safetensors                  the adaptor with the best held-out agreement so far
    adaptor.safetensors               the adaptor as it was last saved
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from masw.adaptor import Adaptor, AdaptorInfo
from masw.average import Average
from masw.curriculum import Batch, Curriculum
from masw.data import Answers, Texts
from masw.decoder import Decoder
from masw.distil import NOTHING, Passes, Score
from masw.errors import Cancelled, MaswError, UsageError
from masw.heldout import Baselines, HeldOut, digest, measure
from masw.provenance import provenance
from masw.quiet import hush
from masw.recipe import FREE, TrainConfig
from masw.start import Start, randomise, take
from masw.trainee import Trainee
from masw.trainloop import Listener, RunFolder, caught_signals, learning_rate, matmul_parameters, matmul_rate

FORMAT = 1


@dataclass(frozen=True)
class Result:
    adaptor: Adaptor
    step: int
    steps: int  # of the whole recipe
    tokens: int
    folder: Path
    measure: dict[str, Any]  # the last measurement, see `measure`
    stopped_early: bool = False  # by the recipe's patience: the same command has nothing left to do


def train(
    config: TrainConfig,
    decoder: Decoder,
    texts: Texts | None,
    answers: Answers | None,
    held: list[HeldOut],
    folder: Path,
    *,
    separator: list[int],
    listener: Listener | None = None,
    max_steps: int | None = None,
    max_seconds: float | None = None,
    start: Start | None = None,
) -> Result:
    """Runs the recipe to its end, or for `max_steps` or `max_seconds` of it, going on from the folder's checkpoint.

    `start` is the adaptor that `config.init` names; a checkpoint comes before it.

    Raises Cancelled after SIGINT or SIGTERM, when the checkpoint is written, and MaswError at a loss that is not finite, when the
    last good checkpoint stays.
    """
    run = _Run(config, decoder, texts, answers, held, folder, separator, listener, start)
    with caught_signals() as caught:
        return run.go(caught, max_steps, max_seconds)


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        config: TrainConfig,
        decoder: Decoder,
        texts: Texts | None,
        answers: Answers | None,
        held: list[HeldOut],
        folder: Path,
        separator: list[int],
        listener: Listener | None,
        start: Start | None,
    ) -> None:
        if config.init != (start.about["sha256"] if start else ""):
            raise ValueError("the recipe's init is the sha256 of the adaptor that the run starts from")
        self.start = start
        self.config, self.decoder, self.held, self.folder = config, decoder, held, RunFolder(folder, listener)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        longest = max(s.length for s in config.parsed())
        if longest > decoder.config.max_position:
            raise UsageError(
                f"rows of {longest:,} tokens are longer than the model's {decoder.config.max_position:,} positions; "
                "use shorter stages"
            )
        self.curriculum = Curriculum(
            texts,
            answers,
            config.parsed(),
            config.sinks,
            config.windows,
            config.strides,
            separator,
            config.seed,
            config.most_pieces,
            config.score_documents,
        )
        if any(s.rows % self.world for s in self.curriculum.stages):
            raise UsageError(f"the rows of every stage must divide by the {self.world} workers; change the stages")
        self.data = [file.file.sha256[:16] for file in (texts, answers) if file is not None]
        quiet = config.quiet > 0 if start is None else start.adaptor.info.bias
        bias = quiet and not decoder.config.qkv_bias
        info = AdaptorInfo(config.base, config.strides, config.slot_input, config.slot_token, config.mirror, bias)
        torch.manual_seed(config.seed)
        self.adaptor = Adaptor.copied(decoder, info, dtype=torch.promote_types(decoder.dtype, torch.float32))
        if config.random_init:
            randomise(self.adaptor)
        if config.quiet:
            hush(self.adaptor, decoder, self.curriculum.sample().to(decoder.device), config.quiet)
        if start is not None:
            take(self.adaptor, start.adaptor)
        self.adaptor.requires_grad_(True)
        self.average = Average(self.adaptor, config.average) if config.average else None
        self.passes = Passes(decoder, config.attention, checkpoint=config.checkpoint_activations)
        self.eval_passes = Passes(decoder, config.attention)
        self.trainee: nn.Module = Trainee(self.adaptor, self.passes, config.kl, config.hardest, config.match)
        if self.world > 1:
            self.trainee = nn.parallel.DistributedDataParallel(self.trainee)
        self.optimiser = torch.optim.AdamW(
            self.adaptor.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.held_digest = digest([rows for each in held for rows in (each.tokens, each.scored)])
        self.step, self.best, self.since_best, self.measured = 0, -1.0, 0, {}  # type: ignore[var-annotated]
        self.unsaved = False
        self.baselines = Baselines()
        self._open()

    @property
    def result(self) -> Adaptor:
        """What is measured and saved."""
        return self.adaptor if self.average is None else self.average.adaptor

    # ---- the loop

    def go(self, caught: list[int], max_steps: int | None, max_seconds: float | None) -> Result:
        c, curriculum = self.config, self.curriculum
        started = saved = time.monotonic()
        end = min(curriculum.steps, self.step + max_steps) if max_steps is not None else curriculum.steps
        rate = matmul_rate(self.decoder) if self.rank == 0 else 0.0
        if self.rank == 0:
            about = provenance(self.decoder.device, self.decoder.dtype)
            self._log(
                {
                    "kind": "start",
                    "tokens": curriculum.tokens_before(self.step),
                    "steps": curriculum.steps,
                    "all_tokens": curriculum.tokens_before(curriculum.steps),
                    "workers": self.world,
                    "gemm_gflops": round(rate / 1e9),
                    **about,
                }
            )
        while True:
            if self._measure_due():
                self._measure(caught)
            spent = max_seconds is not None and time.monotonic() - started >= max_seconds
            patient = not (c.patience and self.since_best >= c.patience)
            spent, early, interrupted = self._any(spent), self._any(not patient), self._any(bool(caught))
            spent = spent or early
            done = self.step >= end or spent or interrupted
            due = time.monotonic() - saved > c.checkpoint_s or (c.checkpoint_steps and self.step % c.checkpoint_steps == 0)
            if self.rank == 0 and self.unsaved and (done or due):
                self._save()
                saved = time.monotonic()
            if interrupted:
                raise Cancelled(
                    f"stopped at step {self.step:,} of {curriculum.steps:,}; the same command goes on from {self.folder.path}"
                )
            if done:
                tokens = curriculum.tokens_before(self.step)
                early = early and self.step < curriculum.steps
                return Result(self.result, self.step, curriculum.steps, tokens, self.folder.path, self.measured, early)
            self._advance(rate)

    def _advance(self, rate: float) -> None:
        """One step and its line in the log; `rate` is the FLOP/s of a perfect one."""
        curriculum, before = self.curriculum, time.monotonic()
        batch = curriculum.batch(self.step)
        lr = self.learning_rate(self.step)
        total, distance, norm = self._update(batch, lr)
        self.step, self.unsaved = self.step + 1, True
        if self.average is not None:
            self.average.follow(self.adaptor, self.step)
        if self.rank:
            return
        tokens, seconds = curriculum.tokens_before(self.step), time.monotonic() - before
        per_s = batch.tokens.numel() / seconds
        floor = 4 * matmul_parameters(self.decoder) * per_s
        self._log(
            {
                "kind": "step",
                "tokens": tokens,
                **{k: round(v, 4) for k, v in total.means().items()},
                **({"match": round(distance, 5)} if self.config.match else {}),
                "scored": total.count,
                "lr": round(lr, 7),
                "grad_norm": round(norm, 4),
                "length": batch.tokens.shape[1],
                "window": batch.shape.window,
                "stride": batch.shape.stride,
                "kinds": "".join(kind[0] for kind in batch.kinds),
                "tokens_per_s": round(per_s, 1),
                "floor_share": round(floor / rate, 3),
                "eta_s": round((curriculum.tokens_before(curriculum.steps) - tokens) / per_s),
            }
        )

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine over the tokens of the whole recipe."""
        c, before = self.config, self.curriculum.tokens_before
        done = before(step) / before(self.curriculum.steps)
        return learning_rate(step, done, top=c.lr, least=c.min_lr, warmup=c.warmup_steps)

    def _update(self, batch: Batch, lr: float) -> tuple[Score, float, float]:
        """One optimiser step; over all workers' rows the sums of the loss at the LM head and the mean distance behind the layers, and the
        gradient's norm before clipping."""
        rows = slice(self.rank, None, self.world)
        tokens, scored = batch.tokens[rows].to(self.decoder.device), batch.scored[rows].to(self.decoder.device)
        # DDP averages gradients over workers, so each divides by its share of all positions.
        counts = batch.scored.sum(1)
        total = float((counts.clamp(max=self.config.hardest) if self.config.hardest else counts).sum()) / self.world
        found, distance = NOTHING, 0.0
        self.optimiser.zero_grad(set_to_none=True)
        micro = self.config.micro_rows or len(tokens)
        starts = range(0, len(tokens), micro)
        for start in starts:
            last = start == starts[-1]
            with self.trainee.no_sync() if self.world > 1 and not last else _nothing():  # type: ignore[operator]
                mine = slice(start, start + micro)
                share = len(tokens[mine]) / len(tokens)
                loss, part, moved = self.trainee(tokens[mine], scored[mine], batch.shape, total, share)
                found, distance = found + part, distance + share * float(moved)
                loss.backward()  # of a loss that is not a number too: the other workers wait for this one's gradients
        if self._any(not math.isfinite(found.loss + distance)):
            raise self.folder.diverged("loss", self.step)
        norm = float(nn.utils.clip_grad_norm_(self.adaptor.parameters(), self.config.clip))
        if not math.isfinite(norm):
            raise self.folder.diverged("gradient", self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        if self.world > 1:
            found, distance = _summed(found, distance, self.decoder.device)
            distance /= self.world
        return found, distance, norm

    def _any(self, mine: bool) -> bool:
        """Whether any worker says so."""
        if self.world == 1:
            return mine
        flag = torch.tensor(int(mine), device=self.decoder.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    # ---- measuring

    def _measure_due(self) -> bool:
        """Before the first step, after the last, and where a multiple of `eval_tokens` was passed; once each."""
        every, before = self.config.eval_tokens, self.curriculum.tokens_before
        if not every or not self.held or self.measured.get("tokens") == before(self.step):
            return False
        at_end = self.step in (0, self.curriculum.steps)
        return at_end or before(self.step) // every > before(self.step - 1) // every

    def _measure(self, caught: list[int]) -> None:
        """Held-out agreement with the full-KV model; the mean over sets, strides and windows picks the best adaptor.

        An interrupt ends it without a result: the resumed run measures at the same step.
        """
        if self.rank:
            return
        before = time.monotonic()
        rows = measure(
            self.eval_passes,
            self.result,
            self.held,
            self.config.sinks,
            self.config.eval_windows,
            self.config.strides,
            self.baselines,
            lambda: bool(caught),
        )
        if caught:
            return
        mean = sum(r["agreement"] for r in rows if r["method"] == "masw") / max(1, sum(r["method"] == "masw" for r in rows))
        self.measured = {"tokens": self.curriculum.tokens_before(self.step), "agreement": round(mean, 4), "rows": rows}
        better = mean > self.best
        self.best, self.since_best = (mean, 0) if better else (self.best, self.since_best + 1)
        self.unsaved = True
        self._log({"kind": "measure", **self.measured, "best": better, "seconds": round(time.monotonic() - before, 1)})
        if better:
            self._write_adaptor("best.safetensors")

    # ---- the folder

    def _open(self) -> None:
        """Goes on from the checkpoint, or starts the folder."""
        wanted = {"format": FORMAT, "data": self.data, **self.config.model_dump(mode="json", exclude=set(FREE))}
        # A recipe older than one of today's options was made with what is that option's default.
        defaults = {name: field.default for name, field in TrainConfig.model_fields.items()}
        self.folder.claim(wanted, defaults, first=self.rank == 0)
        self.folder.restore(self.decoder.device, self._take_state)
        if self.rank == 0:
            self.folder.cut_log(self.step)

    def _take_state(self, state: dict[str, Any]) -> None:
        self.folder.check_held(state.get("held"), self.held_digest)
        with torch.no_grad():
            for name, parameter in self.adaptor.named_parameters():
                parameter.copy_(state["adaptor"][name])
            for name, parameter in self.average.adaptor.named_parameters() if self.average is not None else ():
                parameter.copy_(state["average"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.best, self.since_best = state["step"], state["best"], state["since_best"]
        self.curriculum.drawn.update(state["drawn"])
        self.measured = state["measured"]
        torch.set_rng_state(state["rng"].cpu())

    def _save(self) -> None:
        """Checkpoint and adaptor, each whole or not at all."""
        state = {
            "format": FORMAT,
            "step": self.step,
            "adaptor": {name: p.detach() for name, p in self.adaptor.named_parameters()},
            "average": None if self.average is None else dict(self.average.adaptor.named_parameters()),
            "optimiser": self.optimiser.state_dict(),
            "drawn": dict(self.curriculum.drawn),
            "rng": torch.get_rng_state(),
            "best": self.best,
            "since_best": self.since_best,
            "measured": self.measured,
            "held": self.held_digest,
        }
        self.folder.save(state)
        self._write_adaptor("adaptor.safetensors")
        self.unsaved = False

    def _write_adaptor(self, name: str) -> None:
        init: dict[str, Any] = {"init": self.start.about} if self.start else {}
        try:
            self.result.save(
                self.folder.path / name,
                q_rank=self.config.q_rank,
                decoder=self.decoder,
                trained=provenance(self.decoder.device, self.decoder.dtype),
                data=self.data,
                step=self.step,
                tokens=self.curriculum.tokens_before(self.step),
                recipe=self.config.model_dump(mode="json"),
                measure=self.measured,
                **init,
            )
        except UsageError as error:  # the request was fine, the disk is not
            raise MaswError(str(error)) from None

    def _log(self, line: dict[str, Any]) -> None:
        self.folder.log(self.step, line)


def _summed(found: Score, distance: float, device: torch.device) -> tuple[Score, float]:
    """Sums over all workers."""
    values = torch.tensor([*asdict(found).values(), distance], dtype=torch.float64, device=device)
    dist.all_reduce(values)
    count, loss, nll, kl, agreed, moved = values.tolist()
    return Score(int(count), loss, nll, kl, int(agreed)), moved


@contextmanager
def _nothing() -> Iterator[None]:
    yield
