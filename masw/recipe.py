"""The recipe of a training: every option with its default and bounds. It is kept in the run's folder and in the adaptor file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from masw.config import MemoryShape
from masw.stages import Stage
from masw.trainloop import checked


class TrainConfig(BaseModel):
    """A recipe. Build it with `recipe`, which turns a bad value into a UsageError of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    base: str  # name of the draft model, kept in the adaptor file
    stages: tuple[str, ...] = ("384x8:300k:2/1/0", "1280x2:300k:1/1/0", "2048x1:400k:1/2/1")  # see Stage.parse
    mirror: Literal["kv", "qkv"] = "kv"
    slot_input: Literal["mean", "last", "token", "learned"] = "mean"
    slot_token: int = Field(0, ge=0)
    random_init: bool = False  # ablation: mirrored weights start random, not copied
    quiet: float = Field(0.0, ge=0, le=100)  # nats by which slot scores start lowered (masw.quiet); 0: the paper's plain copy
    strides: tuple[int, ...] = (4, 8)
    windows: tuple[int, ...] = (48, 64, 96, 128, 192, 256)
    sinks: int = Field(4, ge=0)
    kl: float = Field(0.7, ge=0, le=1)  # share of the distance to the full-KV model in the loss
    match: float = Field(0.0, ge=0, le=1000)  # weight of the distance to the full-KV model behind every layer (masw.trainee)
    hardest: int = Field(0, ge=0)  # loss positions of a row, those furthest from the full-KV model; 0: all
    score_documents: bool = False  # rows of answers: loss on document and question too, not on the answer alone
    most_pieces: int = Field(8, ge=1)  # reconstruction: the second copy comes in up to so many shuffled pieces
    lr: float = Field(3e-3, gt=0, le=1)
    min_lr: float = Field(0.05, ge=0, le=1)  # share of lr at the end of the cosine
    warmup_steps: int = Field(20, ge=0)
    average: float = Field(
        0.0, ge=0, lt=1
    )  # decay of a moving average of the weights, which is measured and saved; 0: the weights themselves
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0)
    micro_rows: int = Field(0, ge=0)  # rows of one backward pass; 0: all rows of the batch
    seed: int = Field(0, ge=0)
    checkpoint_s: float = Field(300.0, gt=0)
    checkpoint_steps: int = Field(0, ge=0)  # 0: by time alone
    eval_tokens: int = Field(100_000, ge=0)  # tokens between measurements; 0: never
    eval_windows: tuple[int, ...] = (128,)
    patience: int = Field(0, ge=0)  # stop after so many measurements without a better one; 0: never
    init: str = ""  # sha256 of the adaptor file that the run starts from; empty: a copy of the backbone
    q_rank: int = Field(0, ge=0)  # adaptor files hold a mirrored Q as a difference of this rank; 0: whole
    attention: Literal["auto", "tiled", "mask", "flex"] = "auto"  # kernel, see masw.dense.DenseMemory
    checkpoint_activations: bool = False  # compute each layer again in the backward pass: less memory, a third more time

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if not self.stages or not self.strides or not self.windows:
            raise ValueError("stages, strides and windows each need at least one value")
        if self.init and (self.random_init or self.quiet):
            raise ValueError("a run starts from an adaptor, or from random or quiet weights, not both")
        if self.hardest and not self.kl:
            raise ValueError("hardest positions are those far from the full-KV model, which kl 0 leaves out; give kl a share")
        self.parsed()
        for window in (*self.windows, *self.eval_windows):
            for stride in self.strides:
                MemoryShape(self.sinks, window, stride)
        return self

    def parsed(self) -> tuple[Stage, ...]:
        return tuple(Stage.parse(s) for s in self.stages)


# What may differ between a run and its continuation: nothing that the loss depends on.
FREE = ("checkpoint_s", "checkpoint_steps", "patience", "q_rank", "attention", "checkpoint_activations")


def recipe(**fields: Any) -> TrainConfig:
    """A TrainConfig; raises UsageError with the first bad value."""
    return checked(TrainConfig, **fields)
