"""A trace at an earlier moment: cut after a step, or at a time of its decoding clock. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from masw.trace import Event, Trace

STEPS = ("prefill", "draft", "verify", "emit")  # kinds of event after which a reader may stop


@dataclass(frozen=True)
class Moment:
    """A place to stop. `events`: how many events lie before it."""

    index: int
    events: int
    event: Event

    @property
    def label(self) -> str:
        e = self.event
        if e.kind == "prefill":
            return f"prefill, {e.who}: {e.position + e.count:,} tokens read"
        said = {"draft": "draft proposes a token", "verify": f"target checks {e.count} rows", "emit": f"{e.count} tokens emitted"}
        return f"round {e.round}: {said[e.kind]}"


def moments(trace: Trace) -> list[Moment]:
    """Every place to stop, in order; the last one is the whole trace."""
    found = [Moment(0, i + 1, e) for i, e in enumerate(trace.events) if e.kind in STEPS]
    found = [Moment(index, m.events, m.event) for index, m in enumerate(found)]
    if found:  # what follows the last step (the end event) belongs to it
        found[-1] = Moment(found[-1].index, len(trace.events), found[-1].event)
    return found


def rounds(trace: Trace) -> list[Moment]:
    """The moments at which a round was over, and the end of prefill before them."""
    every = moments(trace)
    read = [m for m in every if m.event.kind == "prefill"]
    return [Moment(i, m.events, m.event) for i, m in enumerate([*read[-1:], *(m for m in every if m.event.kind == "emit")])]


def until(trace: Trace, events: int) -> Trace:
    """The trace as it was after its first `events` events."""
    return Trace(trace.header, trace.events[:events])


def decode_ms(trace: Trace) -> float:
    """How long decoding took: all rounds, without prefill."""
    return sum(e.ms for e in trace.of("emit"))


def at(trace: Trace, clock_ms: float) -> Trace:
    """The trace as it was `clock_ms` into decoding. The clock starts when the prompt is read, so that arms which share a prefill start
    together."""
    elapsed, last = 0.0, 0
    for index, e in enumerate(trace.events):
        if e.kind == "prefill":
            last = index + 1
        elif e.kind == "emit":
            elapsed += e.ms
            if elapsed > clock_ms:
                break
            last = index + 1
    else:
        last = len(trace.events)
    return until(trace, last)
