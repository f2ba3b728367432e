"""Writes the trace while a run goes on; always on. Times are wall clock; on CUDA each timed span waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from masw.trace import Event, Trace


class Recorder:
    """Stamps events with the round and the time. `watch` adds a memory: its slots, evictions and rollbacks become events."""

    def __init__(self, header: dict[str, Any], device: torch.device) -> None:
        self.trace = Trace(header)
        self.round = 0
        self._sync: Callable[[], None] | None = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
        self.begin()

    def begin(self) -> None:
        """Sets the clock of the events to 0."""
        self._start = self.now()

    def now(self) -> float:
        """Milliseconds, after the device has caught up."""
        if self._sync is not None:
            self._sync()
        return time.perf_counter() * 1e3

    @property
    def elapsed_ms(self) -> float:
        return time.perf_counter() * 1e3 - self._start

    def add(self, kind: str, who: str, position: int, count: int, *, ms: float = 0.0, nbytes: int = 0, **data: Any) -> None:
        at = time.perf_counter() * 1e3 - self._start
        self.trace.events.append(Event(kind, who, self.round, at, position, count, ms, nbytes, data))

    def listener(self, who: str, held: Callable[[], int]) -> Callable[[str, int, int], None]:
        """What a memory calls; `held` gives its KV bytes."""

        def listen(kind: str, position: int, count: int) -> None:
            self.add(kind, who, position, count, nbytes=held())

        return listen

    @contextmanager
    def span(self) -> Iterator[Span]:
        span = Span()
        begin = self.now()
        yield span
        span.ms = self.now() - begin


class Span:
    """A measured duration, set when its block ends."""

    ms = 0.0
