"""The table of methods: who drafts, and what it remembers. Tests iterate the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from masw.config import MOST_STRIDE, MemoryShape
from masw.errors import UsageError


@dataclass(frozen=True)
class MemoryOptions:
    """The knobs a user may turn. Paper symbols S, W, r."""

    sinks: int = 4
    window: int = 512
    stride: int = 8


@dataclass(frozen=True)
class Method:
    name: str
    title: str  # for tables and menus
    shape: Callable[[MemoryOptions], MemoryShape] | None = None  # what a draft remembers; None: nothing that remembers drafts
    copies: bool = False  # looks up the text itself, before any model does
    head: bool = False  # a head on the target's features drafts, not the pair's draft model

    @property
    def drafts(self) -> bool:
        return self.shape is not None or self.copies

    @property
    def model(self) -> bool:
        """Whether the pair's draft model drafts."""
        return self.shape is not None and not self.head

    def memory(self, options: MemoryOptions) -> MemoryShape | None:
        """The memory of the model or head that drafts, None when neither does."""
        return None if self.shape is None else self.shape(options)


HYBRID = 8  # `hybrid` has a slot where `masw` has this many; what that frees holds exact entries (measured, docs/LOG.md)


def _snapkv(o: MemoryOptions) -> MemoryShape:
    """At the bytes of `masw` when the prompt ends: exact entries instead of slots."""
    return MemoryShape(o.sinks, o.window, budget=o.stride)


def _hybrid(o: MemoryOptions) -> MemoryShape:
    """At the bytes of `masw` when the prompt ends: fewer slots, and exact entries."""
    return MemoryShape(o.sinks, o.window, max(o.stride, min(HYBRID * o.stride, o.window, MOST_STRIDE)), budget=o.stride)


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("none", "autoregressive decoding"),
        Method("full", "draft with its full KV cache", lambda o: MemoryShape()),
        Method("window", "draft with sinks + sliding window", lambda o: MemoryShape(o.sinks, o.window)),
        Method("masw", "draft with sinks + window + memory slots", lambda o: MemoryShape(o.sinks, o.window, o.stride)),
        Method("snapkv", "draft with sinks + window + most attended prompt entries", _snapkv),
        Method("hybrid", "draft with sinks + window + slots + most attended prompt entries", _hybrid),
        Method("eagle", "one-layer head on the target's features (EAGLE)", lambda o: MemoryShape(), head=True),
        Method("lookup", "copies what followed the same words earlier", copies=True),
        Method(
            "full+lookup", "copies where words recur, else a draft with its full KV cache", lambda o: MemoryShape(), copies=True
        ),
        Method(
            "masw+lookup",
            "copies where words recur, else a draft with sinks + window + slots",
            lambda o: MemoryShape(o.sinks, o.window, o.stride),
            copies=True,
        ),
    )
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise UsageError(f"method '{name}' is unknown; use one of {', '.join(METHODS)}")
    return METHODS[name]
