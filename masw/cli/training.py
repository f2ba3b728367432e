"""What the commands that train share: progress on standard error, and an end in order on Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from masw.errors import Cancelled, UsageError


class Display:
    """Progress with ETA on standard error: a bar on a terminal, a line now and then elsewhere. Keeps what a summary needs."""

    EVERY_S = 60.0

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.last: dict[str, Any] = {}  # line of the last step
        self.tokens, self.seconds = 0, 0.0  # trained in this session
        self._bar: Any = None
        self._told = -self.EVERY_S

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    def line(self, line: dict[str, Any]) -> None:
        if line["kind"] == "start":
            self._open(line)
        elif line["kind"] == "step":
            self._step(line)
        else:
            self._measure(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _open(self, line: dict[str, Any]) -> None:
        from tqdm import tqdm

        how = f"going on from step {line['step']:,}" if line["step"] else "starting"
        workers = f", {line['workers']} workers" if line["workers"] > 1 else ""
        note(
            f"{how}: {line['steps']:,} steps, {line['all_tokens']:,} tokens on {line['device']} ({line['dtype']}{workers}, "
            f"GEMM {line['gemm_gflops']:,} GFLOP/s)"
        )
        self._done = line["tokens"]
        self._bar = tqdm(
            total=line["all_tokens"], initial=line["tokens"], unit="tok", unit_scale=True, file=sys.stderr, disable=None
        )

    def _step(self, line: dict[str, Any]) -> None:
        tokens = line["tokens"] - self._done
        self._done = line["tokens"]
        self.tokens, self.seconds, self.last = self.tokens + tokens, self.seconds + tokens / line["tokens_per_s"], line
        self.losses.append(line["loss"])
        self._bar.update(tokens)
        self._bar.set_postfix_str(f"loss {self.loss:.3f}, {line['floor_share']:.2f} of the floor", refresh=False)
        now = time.monotonic()
        if self._bar.disable and now - self._told >= self.EVERY_S:
            self._told = now
            note(
                f"step {line['step']:,}, {line['tokens']:,} tokens: loss {self.loss:.3f}, {line['tokens_per_s']:,.0f} tokens/s "
                f"({line['floor_share']:.2f} of the floor), {hours(line['eta_s'])} left"
            )

    def _measure(self, line: dict[str, Any]) -> None:
        from tqdm import tqdm

        best = ", the best so far" if line["best"] else ""
        with tqdm.external_write_mode(file=sys.stderr):
            note(f"{line['tokens']:,} tokens: held-out agreement {line['agreement']:.4f}{best} ({line['seconds']:.0f} s)")

    @property
    def loss(self) -> float:
        """Mean of the last steps: single steps differ in window, stride and kind of row."""
        recent = self.losses[-20:]
        return sum(recent) / len(recent)


def hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def note(text: str) -> None:
    typer.echo(f"masw: {text}", err=True)


@contextmanager
def interruptible(said: str = "interrupted outside a training step; the same command goes on") -> Iterator[None]:
    """SIGTERM is as good as Ctrl-C, and both are the one line `said`; a training itself answers them with a checkpoint."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        raise Cancelled(said) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def token_count(option: str) -> Callable[[str], int]:
    """The parser of an option that counts tokens as stages do: 300000, 300k or 1.5m. Its errors name the option."""

    def parse(text: str) -> int:
        from masw.stages import amount

        try:
            return amount(str(text))  # a default comes as a number
        except ValueError:
            raise UsageError(f"{option} takes a number of tokens like 300000, 300k or 1.5m, not '{text}'") from None

    return parse
