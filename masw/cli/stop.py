"""Ctrl-C as a question that a run asks itself, so that what was made so far is kept."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Stop:
    """Ctrl-C (or SIGTERM) ends the run at the next drafted token, prefill chunk or target forward; a second one ends the process."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Stop:
        self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
