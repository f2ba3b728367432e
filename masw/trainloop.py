"""What every training shares: a checked recipe, a folder that it goes on from, signals, and the learning rate.

recipe.json   what was asked; a resumed run must ask the same
last.pt       parameters, optimiser, position; replaced atomically
log.jsonl     one line a step or measurement; cut back to the checkpoint when a run resumes
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ValidationError

from masw.decoder import Decoder
from masw.errors import MaswError, UsageError
from masw.files import replacing
from masw.linear import dense
from masw.packages import write_json

Listener = Callable[[dict[str, Any]], None]  # gets every line of the log
Recipe = TypeVar("Recipe", bound=BaseModel)


def checked(kind: type[Recipe], **fields: Any) -> Recipe:
    """A recipe; raises UsageError with the first bad value."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise UsageError(
            f"{where.replace('_', ' ')}: {first['msg'].removeprefix('Value error, ')} (got {first.get('input')!r:.80})"
        ) from None


def learning_rate(step: int, done: float, *, top: float, least: float, warmup: int) -> float:
    """Linear warm-up, then a cosine from `top` to its share `least`; `done` is the share of the recipe's tokens before `step`."""
    if step < warmup:
        return top * (step + 1) / warmup
    return top * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done)))


class RunFolder:
    """The folder of a run. Raises MaswError where the disk fails, with what is kept, and UsageError for another run's folder."""

    def __init__(self, path: Path, listener: Listener | None = None) -> None:
        self.path, self._listener = path, listener

    def claim(self, wanted: dict[str, Any], defaults: dict[str, Any], *, first: bool) -> None:
        """Makes the folder, or checks that its recipe is `wanted`; `defaults` fill in what an older recipe had no option for.

        Only the `first` of several workers writes.
        """
        path = self.path / "recipe.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if path.exists():
                found = defaults | json.loads(path.read_text(encoding="utf-8"))
                other = [key for key in wanted if found.get(key) != wanted[key]]
                if other:
                    raise UsageError(
                        f"{self.path} holds a run with another {other[0].replace('_', ' ')} "
                        f"({found.get(other[0])}, not {wanted[other[0]]}); name another run"
                    )
            elif first:
                write_json(path, wanted)
        except OSError as error:
            raise disk_error(error, self.path) from None
        except (ValueError, TypeError):
            raise UsageError(f"{path} is not a recipe that masw wrote; name another run") from None

    @property
    def has_checkpoint(self) -> bool:
        return (self.path / "last.pt").exists()

    def restore(self, device: torch.device, take: Callable[[dict[str, Any]], None]) -> None:
        """Hands the checkpoint, where there is one, to `take`."""
        path = self.path / "last.pt"
        if not self.has_checkpoint:
            return
        try:
            take(torch.load(path, map_location=device, weights_only=True))
        except MaswError:  # it can be read, and belongs to another request
            raise
        except Exception as error:  # torch.load raises a dozen kinds for a damaged file
            raise MaswError(
                f"the checkpoint {path} cannot be read ({type(error).__name__}); delete it to start the run anew"
            ) from None

    def check_held(self, known: str | None, mine: str) -> None:
        """Raises UsageError when the run was measured on other held-out rows until now; `known` None: a checkpoint that does not say."""
        if known is not None and known != mine:
            raise UsageError(
                f"{self.path} was measured on other held-out rows, so that its best so far cannot be compared; "
                "name the same validation text and --eval-rows, or another run"
            )

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint, whole or not at all."""
        path = self.path / "last.pt"
        try:
            with replacing(path) as partial, partial.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
        except (OSError, RuntimeError) as error:
            raise disk_error(error, self.path) from None

    def log(self, step: int, line: dict[str, Any]) -> None:
        line = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), **line}
        try:
            with (self.path / "log.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise disk_error(error, self.path) from None
        if self._listener is not None:
            self._listener(line)

    def cut_log(self, step: int) -> None:
        """Drops lines that are younger than the checkpoint, and a torn last line."""
        path = self.path / "log.jsonl"
        try:
            if not path.exists():
                return
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    break
            with replacing(path) as partial:
                partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        except OSError as error:
            raise disk_error(error, self.path) from None

    def diverged(self, what: str, step: int) -> MaswError:
        kept = "its last good checkpoint stays" if self.has_checkpoint else "no checkpoint was written yet"
        return MaswError(
            f"the {what} is not a number at step {step + 1:,}; {kept} in {self.path}: lower the learning rate and start anew"
        )


def disk_error(error: Exception, folder: Path) -> MaswError:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error).splitlines()[0][:160]
    return MaswError(
        f"cannot write to {folder} ({reason}); the last checkpoint there is whole: free some space and run the same command"
    )


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second one takes its usual course."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(number: int, _frame: Any) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def matmul_parameters(decoder: Decoder) -> int:
    """Parameters that every token is multiplied with: all matrices, the embedding only as the head."""
    w = decoder.weights
    return dense(w.head).numel() + sum(
        dense(t).numel() for layer in w.layers for t in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )


def matmul_rate(decoder: Decoder, rows: int = 512) -> float:
    """FLOP/s of the model's widest linear on `rows` rows, the pace that a perfect step would keep."""
    weight = dense(decoder.weights.layers[0].gate_up)
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    best = math.inf
    for _ in range(6):
        before = time.perf_counter()
        F.linear(x, weight)
        if weight.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - before)
    return 2 * rows * weight.numel() / best
