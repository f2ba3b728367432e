"""One worker for many visitors: a bounded queue of jobs, cancelled by an event, found again by an unguessable id.

A model is used by one thread at a time, so jobs wait in line. Whoever draws a page reads what a job has come to and never waits for
it. A job belongs to the visitor who submitted it: no call hands it to another one. Nothing here knows what a job computes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from masw.errors import Cancelled, UsageError, plain_words

QUEUED, RUNNING, DONE, CANCELLED, FAILED = "queued", "running", "done", "cancelled", "failed"
Stop = Callable[[], bool]
DIED = "the worker stopped in the middle of this job; what it had until then is shown, and the next job runs as usual"


class Work(Protocol):
    """What a job does. It keeps its own record of how far it is; `owner` is the visitor it works for."""

    def __call__(self, stop: Stop, owner: str) -> None:
        """Runs to the end, or returns soon after `stop()` turns true with what there is."""
        ...


W = TypeVar("W", bound=Work)


@dataclass(eq=False)
class Job(Generic[W]):
    """A piece of work and where it stands. Times are of `time.monotonic`, in seconds."""

    work: W
    owner: str
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    state: str = QUEUED
    error: str | None = None  # one plain line, when failed
    created: float = 0.0
    started: float | None = None
    finished: float | None = None
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def active(self) -> bool:
        return self.state in (QUEUED, RUNNING)


class Jobs(Generic[W]):
    """The queue and its worker. All methods may be called from any thread and return at once."""

    def __init__(
        self,
        *,
        waiting: int = 8,
        kept: int = 20,
        ttl_s: float = 1800.0,
        on_leave: Callable[[str], None] = lambda owner: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`waiting`: jobs in the queue at most. `kept`: finished jobs of a visitor that are remembered. `ttl_s`: seconds after which
        a visitor who was not seen is forgotten with all jobs; `on_leave` is then called with the visitor's id, in the worker."""
        self._waiting, self._kept, self._ttl, self._clock, self._on_leave = waiting, kept, ttl_s, clock, on_leave
        self._lock = threading.Condition()
        self._queue: deque[Job[W]] = deque()
        self._jobs: dict[str, list[Job[W]]] = {}  # visitor -> jobs, oldest first
        self._seen: dict[str, float] = {}
        self._running: Job[W] | None = None
        self._closed = False
        self._left: list[str] = []
        with self._lock:
            self._worker = self._start()

    # ---- visitors

    def visitor(self, known: str | None = None) -> str:
        """The id of a visitor: `known` when it was issued here and is still remembered, else a new one nobody can guess."""
        with self._lock:
            self._tidy()
            owner = known if known is not None and known in self._seen else secrets.token_urlsafe(24)
            self._seen[owner] = self._clock()
            self._jobs.setdefault(owner, [])
            return owner

    # ---- jobs

    def submit(self, owner: str, work: W) -> Job[W]:
        """Puts `work` in line. Raises UsageError when the line is full or this visitor already has a job in it."""
        with self._lock:
            self._tidy()
            if any(job.active for job in self._jobs.get(owner, [])):
                raise UsageError("you already have a run going; cancel it, or wait until it is done")
            if len(self._queue) >= self._waiting:
                raise UsageError(f"{len(self._queue)} runs are waiting already; try again in a few minutes")
            job = Job(work, owner, created=self._clock())
            self._seen[owner] = self._clock()
            self._jobs.setdefault(owner, []).append(job)
            self._queue.append(job)
            self._lock.notify_all()
            return job

    def of(self, owner: str) -> list[Job[W]]:
        """This visitor's jobs, oldest first. Asking counts as being seen."""
        with self._lock:
            if owner in self._seen:
                self._seen[owner] = self._clock()
            self._tidy()
            return list(self._jobs.get(owner, []))

    def find(self, owner: str, job_id: str) -> Job[W] | None:
        """The job with that id if it is this visitor's own."""
        return next((job for job in self.of(owner) if secrets.compare_digest(job.id.encode(), job_id.encode())), None)

    def position(self, job: Job[W]) -> int:
        """Jobs that come first: 0 while running or finished, 1 for the next in line, and so on."""
        with self._lock:
            return self._queue.index(job) + 1 if job in self._queue else 0

    def cancel(self, owner: str, job_id: str) -> None:
        """Takes a waiting job out of the line at once; a running one ends at its next drafted token or prefill chunk."""
        job = self.find(owner, job_id)
        if job is None:
            return
        with self._lock:
            job.cancel.set()
            if job in self._queue:
                self._queue.remove(job)
                job.state, job.finished = CANCELLED, self._clock()

    def forget(self, owner: str, job_id: str) -> None:
        """Drops a finished job and all it holds."""
        job = self.find(owner, job_id)
        with self._lock:
            if job is not None and not job.active:
                self._jobs[owner].remove(job)

    def close(self) -> None:
        """Cancels everything and ends the worker."""
        with self._lock:
            self._closed = True
            for job in [*self._queue, *([self._running] if self._running else [])]:
                job.cancel.set()
            self._queue.clear()
            self._lock.notify_all()
        self._worker.join(timeout=60)

    # ---- inside

    def _start(self) -> threading.Thread:
        worker = threading.Thread(target=self._loop, name="masw-worker", daemon=True)
        worker.start()
        return worker

    def _tidy(self) -> None:
        """Replaces a worker that died, and forgets visitors who left. Called with the lock held."""
        if not self._worker.is_alive() and not self._closed:
            if self._running is not None:
                self._running.state, self._running.error, self._running.finished = FAILED, DIED, self._clock()
                self._running = None
            self._worker = self._start()
        now = self._clock()
        for owner in [o for o, seen in self._seen.items() if now - seen > self._ttl]:
            for job in self._jobs[owner]:
                job.cancel.set()
                if job in self._queue:
                    self._queue.remove(job)
            del self._seen[owner], self._jobs[owner]
            self._left.append(owner)
        for jobs in self._jobs.values():
            while len(jobs) > self._kept and not jobs[0].active:
                del jobs[0]

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._tidy()
                if self._closed:
                    return
                left, self._left = self._left, []
                job = self._queue.popleft() if self._queue else None
                if job is None and not left:
                    self._lock.wait(timeout=min(5.0, self._ttl))
                    continue
                if job is not None:
                    job.state, job.started, self._running = RUNNING, self._clock(), job
            for owner in left:
                self._on_leave(owner)
            if job is not None:
                self._run(job)

    def _run(self, job: Job[W]) -> None:
        state, error = DONE, None
        try:
            job.work(job.cancel.is_set, job.owner)
            if job.cancel.is_set():
                state = CANCELLED
        except Cancelled:
            state = CANCELLED
        except Exception as failure:  # the next job must not pay for it; the page shows one line
            state, error = FAILED, plain_words(failure)
        with self._lock:
            job.error, job.finished, job.state = error, self._clock(), state
            self._running = None
