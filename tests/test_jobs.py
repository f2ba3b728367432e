"""The queue: order, bounds, cancelling, whose is whose, a worker that dies, visitors who leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from masw.errors import Cancelled, MaswError, UsageError
from masw.jobs import CANCELLED, DONE, FAILED, QUEUED, RUNNING, Job, Jobs, Stop


@dataclass
class Gate:
    """Work that reports what it saw and waits to be let through."""

    name: str = "work"
    fail: BaseException | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    owner: str | None = None

    def __call__(self, stop: Stop, owner: str) -> None:
        self.owner = owner
        self.begun.set()
        while not self.go.wait(0.002) and not stop():
            pass
        if self.fail is not None:
            raise self.fail


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.fixture
def jobs() -> Iterator[Jobs[Gate]]:
    jobs: Jobs[Gate] = Jobs(waiting=2)
    yield jobs
    jobs.close()


def open_gate() -> Gate:
    gate = Gate()
    gate.go.set()
    return gate


def test_one_job_at_a_time_in_the_order_of_arrival(jobs: Jobs[Gate]) -> None:
    visitors = [jobs.visitor() for _ in range(3)]
    gates = [Gate(str(i)) for i in range(3)]
    submitted = [jobs.submit(visitors[0], gates[0])]
    gates[0].begun.wait(5)
    submitted += [jobs.submit(v, g) for v, g in zip(visitors[1:], gates[1:], strict=True)]
    until(lambda: submitted[0].state == RUNNING)
    assert [j.state for j in submitted] == [RUNNING, QUEUED, QUEUED]
    assert [jobs.position(j) for j in submitted] == [0, 1, 2]
    gates[0].go.set()
    assert gates[1].begun.wait(5) and not gates[2].begun.is_set()
    assert jobs.position(submitted[2]) == 1
    for gate in gates:
        gate.go.set()
    until(lambda: all(j.state == DONE for j in submitted))
    assert [g.owner for g in gates] == visitors


def test_the_line_is_bounded_and_each_visitor_has_one_place(jobs: Jobs[Gate]) -> None:
    first = jobs.visitor()
    running = Gate()
    jobs.submit(first, running)
    running.begun.wait(5)
    with pytest.raises(UsageError, match="already have a run going"):
        jobs.submit(first, Gate())
    for _ in range(2):
        jobs.submit(jobs.visitor(), open_gate())
    with pytest.raises(UsageError, match="2 runs are waiting already"):
        jobs.submit(jobs.visitor(), Gate())


def test_a_running_job_is_told_to_stop_and_a_waiting_one_leaves_the_line(jobs: Jobs[Gate]) -> None:
    a, b = jobs.visitor(), jobs.visitor()
    running, waiting = jobs.submit(a, Gate()), jobs.submit(b, Gate())
    running.work.begun.wait(5)
    jobs.cancel(b, waiting.id)
    assert waiting.state == CANCELLED and jobs.position(waiting) == 0 and not waiting.work.begun.is_set()
    jobs.cancel(a, running.id)
    until(lambda: running.state == CANCELLED)


def test_no_visitor_sees_or_cancels_the_job_of_another(jobs: Jobs[Gate]) -> None:
    a, b = jobs.visitor(), jobs.visitor()
    job = jobs.submit(a, Gate())
    assert jobs.find(a, job.id) is job
    assert jobs.find(b, job.id) is None and jobs.of(b) == []
    jobs.cancel(b, job.id)
    jobs.forget(b, job.id)
    assert not job.cancel.is_set() and jobs.of(a) == [job]


def test_ids_are_long_and_a_made_up_visitor_is_not_believed(jobs: Jobs[Gate]) -> None:
    a = jobs.visitor()
    assert len(a) >= 32 and jobs.visitor(a) == a
    assert jobs.visitor("admin") != "admin"
    assert len(jobs.submit(a, open_gate()).id) >= 32


@pytest.mark.parametrize(
    ("failure", "state", "said"),
    [
        (MaswError("no memory for it;\n take less"), FAILED, "no memory for it; take less"),
        (ValueError("odd\nsecond line"), FAILED, "ValueError: odd"),
        (MemoryError(), FAILED, "out of memory (MemoryError); use a shorter context or a smaller pair"),
        (Cancelled("stopped"), CANCELLED, None),
    ],
)
def test_a_failure_is_one_line_and_the_next_job_runs(jobs: Jobs[Gate], failure: Exception, state: str, said: str | None) -> None:
    visitor = jobs.visitor()
    gate = Gate(fail=failure)
    gate.go.set()
    bad = jobs.submit(visitor, gate)
    until(lambda: not bad.active)
    assert (bad.state, bad.error) == (state, said)
    good = jobs.submit(visitor, open_gate())
    until(lambda: good.state == DONE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_is_shown_and_replaced(jobs: Jobs[Gate]) -> None:
    """SystemExit ends a thread and is no Exception: the nearest thing to a crash that leaves the process alive."""
    a, b = jobs.visitor(), jobs.visitor()
    dying = jobs.submit(a, Gate(fail=SystemExit()))
    dying.work.begun.wait(5)
    next_one = jobs.submit(b, open_gate())
    dying.work.go.set()
    until(lambda: not jobs._worker.is_alive() or dying.state == FAILED)
    until(lambda: jobs.of(b)[0].state == DONE)
    assert dying.state == FAILED and "next job runs as usual" in (dying.error or "") and next_one.state == DONE


def test_a_visitor_who_stays_away_is_forgotten_and_the_room_is_told() -> None:
    now = [0.0]
    left: list[str] = []
    jobs: Jobs[Gate] = Jobs(ttl_s=60, on_leave=left.append, clock=lambda: now[0])
    try:
        gone, here = jobs.visitor(), jobs.visitor()
        done = jobs.submit(gone, open_gate())
        until(lambda: done.state == DONE)
        running = jobs.submit(gone, Gate())
        running.work.begun.wait(5)
        now[0] = 50.0
        assert jobs.of(gone) == [done, running]  # being seen keeps him
        now[0] = 100.0
        jobs.of(here)
        assert jobs.find(gone, done.id) is done
        now[0] = 170.0
        assert jobs.of(here) == []
        assert jobs.of(gone) == [] and running.cancel.is_set()
        assert jobs.visitor(gone) != gone
        until(lambda: gone in left)
    finally:
        jobs.close()


def test_only_the_latest_finished_jobs_are_kept() -> None:
    jobs: Jobs[Gate] = Jobs(kept=3)
    try:
        visitor = jobs.visitor()
        made: list[Job[Gate]] = []
        for _ in range(5):
            made.append(jobs.submit(visitor, open_gate()))
            until(lambda: made[-1].state == DONE)
        assert jobs.of(visitor) == made[-3:]
        jobs.forget(visitor, made[-1].id)
        assert jobs.of(visitor) == made[-3:-1]
    finally:
        jobs.close()
