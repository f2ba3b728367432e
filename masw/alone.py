"""One process at a time for what a long command writes: two that append to the same run would each undo the other's checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from masw.errors import UsageError
from masw.store import cache_root


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the file or folder `path`, which need not exist yet. Raises UsageError when another process of this user and machine does.

    The lock lies in masw's cache, not beside the result; the system drops it with the process, however that ends. Where the cache cannot
    be written nothing is held.
    """
    real = os.path.realpath(path)
    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:24]
    lock = filelock.FileLock(cache_root() / "locks" / f"out-{name}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UsageError(f"another masw is writing to {path}; wait for it, stop it, or name another --out") from None
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()
