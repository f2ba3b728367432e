"""Trains an EAGLE head on its target's features: smooth L1 to the feature, plus a share of the distance to the target's distribution
(arXiv 2401.15077, section 4.2). Every row of text is read with the target's own features (teacher forcing), with uniform noise on
them, so that the head learns to go on from its own imperfect ones.

The folder of a run (see masw.trainloop) also gets best.safetensors, the head with the best held-out agreement, and head.safetensors,
the head as it was last saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from masw.config import MemoryShape
from masw.data import Texts
from masw.decoder import Decoder
from masw.dense import DenseMemory
from masw.distil import NOTHING, Passes, Score, head_loss
from masw.eagle import EagleHead, EagleInfo, before, fused
from masw.errors import Cancelled, MaswError, UsageError
from masw.heldout import digest
from masw.provenance import provenance
from masw.trainloop import Listener, RunFolder, caught_signals, checked, learning_rate, matmul_parameters, matmul_rate

FORMAT = 1
RIDGE = 0.01  # of the mean square of what fc reads
HEAD_FILE = "head.safetensors"


class EagleConfig(BaseModel):
    """A recipe. Build it with `eagle_recipe`, which turns a bad value into a UsageError of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str  # name of the target, kept in the head's file
    length: int = Field(512, ge=16, le=131_072)  # tokens of a row
    rows: int = Field(2, ge=1)  # of a step
    tokens: int = Field(1_000_000, ge=1)  # of the whole recipe
    regression: float = Field(1.0, ge=0)  # weight of the smooth L1 distance between features (mean over H)
    kl: float = Field(0.1, ge=0)  # weight of the distance to the target's distribution (nats a token)
    noise: float = Field(0.1, ge=0)  # features are shifted by up to so much, uniformly
    lr: float = Field(3e-5, gt=0, le=1)  # the paper's; 1e-4 already undoes the linear start (docs/LOG.md)
    min_lr: float = Field(0.05, ge=0, le=1)  # share of lr at the end of the cosine
    warmup_steps: int = Field(20, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.5, gt=0)
    fit_tokens: int = Field(16_384, ge=0)  # fc starts as the best linear predictor on the first so many tokens; 0: random
    seed: int = Field(0, ge=0)
    checkpoint_s: float = Field(300.0, gt=0)
    checkpoint_steps: int = Field(0, ge=0)  # 0: by time alone
    eval_tokens: int = Field(100_000, ge=0)  # tokens between measurements; 0: never

    @property
    def step_tokens(self) -> int:
        return self.length * self.rows

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.step_tokens)


_FREE = ("checkpoint_s", "checkpoint_steps")  # what may differ between a run and its continuation


def eagle_recipe(**fields: Any) -> EagleConfig:
    """An EagleConfig; raises UsageError with the first bad value."""
    return checked(EagleConfig, **fields)


@dataclass(frozen=True)
class EagleResult:
    head: EagleHead
    step: int
    steps: int  # of the whole recipe
    tokens: int
    folder: Path
    measure: dict[str, Any]  # the last measurement


def train_eagle(
    config: EagleConfig,
    target: Decoder,
    texts: Texts,
    held: Tensor | None,
    folder: Path,
    *,
    listener: Listener | None = None,
    max_steps: int | None = None,
    max_seconds: float | None = None,
) -> EagleResult:
    """Runs the recipe to its end, or for `max_steps` or `max_seconds` of it, going on from the folder's checkpoint.

    `held` [n, T] are rows that are only measured on. Raises Cancelled after SIGINT or SIGTERM, when the checkpoint is written, and
    MaswError at a loss that is not finite, when the last good checkpoint stays.
    """
    began = time.monotonic()
    run = _Run(config, target, texts, held, RunFolder(folder, listener))  # with the fit, which takes its share of the time
    with caught_signals() as caught:
        return run.go(caught, max_steps, None if max_seconds is None else max_seconds - (time.monotonic() - began))


class HeadPass:
    """Target and head over whole rows at once, and how far apart they are."""

    def __init__(self, target: Decoder) -> None:
        self.target = target
        self._passes = Passes(target)
        self._memory = DenseMemory(MemoryShape(), dtype=target.dtype, group=target.config.group)

    def loss(
        self, head: EagleHead, tokens: Tensor, config: EagleConfig, noise: torch.Generator | None = None
    ) -> tuple[Tensor, float, Score]:
        """The loss of `tokens` [B, T], its smooth L1 part, and the sums of the rest (agreement: with the target's argmax)."""
        target = self.target
        with torch.no_grad():
            hidden = self._passes.hidden(tokens, MemoryShape(), None)  # [B, T, H]
            features = target.normed(hidden)
            given = before(features)
            if noise is not None and config.noise:
                shift = torch.rand(given.shape, generator=noise, dtype=torch.float32) * 2 - 1
                given = given + (shift * config.noise).to(given)
        predicted = head(target, tokens, given, self._memory)
        exact = torch.promote_types(target.dtype, torch.float32)
        regression = F.smooth_l1_loss(target.normed(predicted).to(exact), features.to(exact))
        # The last token of a row has no next one to name; the head is judged by the target's distribution, not by the text.
        ours, theirs, labels = predicted[:, :-1].flatten(0, 1), hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        distance, score = head_loss(target, ours, theirs, labels, kl=1.0, total=float(len(labels)))
        return config.regression * regression + config.kl * distance, float(regression.detach()), score

    @torch.no_grad()
    def fit(self, head: EagleHead, rows: list[Tensor]) -> None:
        """Sets fc to the ridge regression from what it reads to the target's hidden state at unit size, over `rows` of [T] tokens:
        a head whose layer adds nothing is then the best linear one."""
        c, target = self.target.config, self.target
        gram = torch.zeros(2 * c.hidden, 2 * c.hidden, dtype=torch.float64, device=target.device)
        cross = torch.zeros(2 * c.hidden, c.hidden, dtype=torch.float64, device=target.device)
        for row in rows:
            tokens = row[None].to(target.device)
            hidden = self._passes.hidden(tokens, MemoryShape(), None)
            x = fused(target, tokens, before(target.normed(hidden)))[0].double()  # [T, 2H]
            gram += x.T @ x
            cross += x.T @ F.rms_norm(hidden[0].double(), (c.hidden,), None, c.norm_eps)
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        head.fc.copy_(torch.linalg.solve(gram, cross).T)

    @torch.no_grad()
    def measure(
        self, head: EagleHead, held: Tensor, config: EagleConfig, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """{set, n, agreement, nll, kl, regression} over rows `held` [n, T], one at a time; without noise."""
        total, regression = NOTHING, 0.0
        for row in held.to(self.target.device).split(1):
            if stop():
                break
            _, part, found = self.loss(head, row, config)
            total, regression = total + found, regression + part / len(held)
        means = total.means()
        found_means = {key: round(means[key], 4) for key in ("agreement", "nll", "kl")}
        return {"set": f"text-{held.shape[1]}", "n": total.count, **found_means, "regression": round(regression, 4)}


class _Run:
    def __init__(self, config: EagleConfig, target: Decoder, texts: Texts, held: Tensor | None, folder: RunFolder) -> None:
        if config.length > target.config.max_position:
            raise UsageError(
                f"rows of {config.length:,} tokens are longer than the model's {target.config.max_position:,} positions; "
                "use shorter rows"
            )
        texts.blocks(config.length)  # asked now: a text that is too short must not show later
        self.config, self.target, self.texts, self.held, self.folder = config, target, texts, held, folder
        self.held_digest = digest([] if held is None else [held])
        self.data = [texts.file.sha256[:16]]
        exact = torch.promote_types(target.dtype, torch.float32)
        self.head = EagleHead.copied(target, EagleInfo(config.base), dtype=exact, seed=config.seed).requires_grad_(True)
        self.passes = HeadPass(target)
        if config.fit_tokens and not folder.has_checkpoint:
            count = -(-config.fit_tokens // config.length)
            self.passes.fit(self.head, [torch.from_numpy(texts.row(i, config.length)) for i in range(count)])
        self.optimiser = torch.optim.AdamW(
            self.head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.step, self.best = 0, -1.0
        self.measured: dict[str, Any] = {}
        self.unsaved = False
        self._open()

    @property
    def tokens(self) -> int:
        return self.step * self.config.step_tokens

    def go(self, caught: list[int], max_steps: int | None, max_seconds: float | None) -> EagleResult:
        c = self.config
        started = saved = time.monotonic()
        end = c.steps if max_steps is None else min(c.steps, self.step + max_steps)
        rate = matmul_rate(self.target)
        self.folder.log(
            self.step,
            {
                "kind": "start",
                "tokens": self.tokens,
                "steps": c.steps,
                "all_tokens": c.steps * c.step_tokens,
                "workers": 1,
                "gemm_gflops": round(rate / 1e9),
                **provenance(self.target.device, self.target.dtype),
            },
        )
        while True:
            if self._measure_due():
                self._measure(caught)
            spent = max_seconds is not None and time.monotonic() - started >= max_seconds
            interrupted = bool(caught)
            done = self.step >= end or spent or interrupted
            due = time.monotonic() - saved > c.checkpoint_s or (c.checkpoint_steps and self.step % c.checkpoint_steps == 0)
            if self.unsaved and (done or due):
                self._save()
                saved = time.monotonic()
            if interrupted:
                raise Cancelled(f"stopped at step {self.step:,} of {c.steps:,}; the same command goes on from {self.folder.path}")
            if done:
                return EagleResult(self.head, self.step, c.steps, self.tokens, self.folder.path, self.measured)
            self._advance(rate)

    def _advance(self, rate: float) -> None:
        c, started = self.config, time.monotonic()
        rows = [self.texts.row(self.step * c.rows + i, c.length) for i in range(c.rows)]
        tokens = torch.stack([torch.from_numpy(row) for row in rows]).to(self.target.device)
        lr = learning_rate(self.step, self.step / c.steps, top=c.lr, least=c.min_lr, warmup=c.warmup_steps)
        noise = torch.Generator().manual_seed(c.seed * 1_000_003 + self.step)  # of the step, so that any step can be made again
        self.optimiser.zero_grad(set_to_none=True)
        loss, regression, found = self.passes.loss(self.head, tokens, c, noise)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise self.folder.diverged("loss", self.step)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.head.parameters(), c.clip))
        if not math.isfinite(norm):
            raise self.folder.diverged("gradient", self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.step, self.unsaved = self.step + 1, True
        per_s = c.step_tokens / (time.monotonic() - started)
        means = found.means()
        self.folder.log(
            self.step,
            {
                "kind": "step",
                "tokens": self.tokens,
                "loss": round(value, 4),
                "regression": round(regression, 4),
                **{key: round(means[key], 4) for key in ("kl", "nll", "agreement")},
                "lr": round(lr, 7),
                "grad_norm": round(norm, 4),
                "tokens_per_s": round(per_s, 1),
                "floor_share": round(step_flops(self.target, self.head) * per_s / rate, 3),
                "eta_s": round((c.steps - self.step) * c.step_tokens / per_s),
            },
        )

    def _measure_due(self) -> bool:
        """Before the first step, after the last, and where a multiple of `eval_tokens` was passed; once each."""
        every, tokens = self.config.eval_tokens, self.tokens
        if not every or self.held is None or self.measured.get("tokens") == tokens:
            return False
        return self.step in (0, self.config.steps) or tokens // every > (tokens - self.config.step_tokens) // every

    def _measure(self, caught: list[int]) -> None:
        """An interrupt ends it without a result: the resumed run measures at the same step."""
        assert self.held is not None
        started = time.monotonic()
        row = self.passes.measure(self.head, self.held, self.config, lambda: bool(caught))
        if caught:
            return
        better = row["agreement"] > self.best
        self.best = max(self.best, row["agreement"])
        self.measured = {"tokens": self.tokens, "agreement": row["agreement"], "rows": [row]}
        self.unsaved = True
        seconds = round(time.monotonic() - started, 1)
        self.folder.log(self.step, {"kind": "measure", **self.measured, "best": better, "seconds": seconds})
        if better:
            self._write_head("best.safetensors")

    # ---- the folder

    def _open(self) -> None:
        wanted = {"format": FORMAT, "method": "eagle", "data": self.data}
        wanted |= self.config.model_dump(mode="json", exclude=set(_FREE))
        defaults = {name: field.default for name, field in EagleConfig.model_fields.items()}
        self.folder.claim(wanted, defaults, first=True)
        self.folder.restore(self.target.device, self._take_state)
        self.folder.cut_log(self.step)

    def _take_state(self, state: dict[str, Any]) -> None:
        self.folder.check_held(state.get("held"), self.held_digest)
        self.head.load_state_dict(state["head"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.best, self.measured = state["step"], state["best"], state["measured"]

    def _save(self) -> None:
        """Checkpoint and head, each whole or not at all."""
        self.folder.save(
            {
                "format": FORMAT,
                "step": self.step,
                "head": {name: p.detach() for name, p in self.head.named_parameters()},
                "optimiser": self.optimiser.state_dict(),
                "best": self.best,
                "measured": self.measured,
                "held": self.held_digest,
            }
        )
        self._write_head(HEAD_FILE)
        self.unsaved = False

    def _write_head(self, name: str) -> None:
        try:
            self.head.save(
                self.folder.path / name,
                tokens=self.tokens,
                trained=provenance(self.target.device, self.target.dtype),
                data=self.data,
                step=self.step,
                recipe=self.config.model_dump(mode="json"),
                measure=self.measured,
            )
        except UsageError as error:  # the request was fine, the disk is not
            raise MaswError(str(error)) from None


def step_flops(target: Decoder, head: EagleHead) -> int:
    """FLOPs of training a token, attention apart: the target's forward and the head's logits forward and back to the hidden state, 2
    a parameter each; fc and layer 6 a parameter."""
    vocabulary = target.config.vocab * target.config.hidden
    return 2 * matmul_parameters(target) + 4 * vocabulary + 6 * sum(p.numel() for p in head.parameters() if p.dim() > 1)
