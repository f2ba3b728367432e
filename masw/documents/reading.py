"""The doors: a file, standard input or bytes -> Document. What needs a parser goes through a process with limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from masw.documents.extract import extract, needs_parser
from masw.documents.names import shown
from masw.documents.record import LIMITS, Document, EncodingNeeded, Limits, PasswordNeeded
from masw.errors import MaswError, UsageError

_ERRORS: dict[str | None, type[UsageError]] = {e.__name__: e for e in (PasswordNeeded, EncodingNeeded)}


def read(source: str) -> str:
    """Text of the file `source`, or of standard input for "-". Raises UsageError with what to do next."""
    return read_file(source).text


def read_file(
    source: str | Path, *, password: str | None = None, encoding: str | None = None, limits: Limits = LIMITS
) -> Document:
    """As `read_bytes`, of a file, or of standard input for "-"."""
    source = str(source)
    name = "standard input" if source == "-" else source
    label = shown(name)
    try:
        if source == "-" and sys.stdin is None:
            raise UsageError("standard input is closed; give a file, or pipe a document in")
        if source == "-":
            data = sys.stdin.buffer.read(limits.file_bytes + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(limits.file_bytes + 1)
    except FileNotFoundError:
        raise UsageError(f"no file {label}; check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{label} is a folder; name a file in it") from None
    except PermissionError:
        raise UsageError(f"{label} may not be read by you; change its permissions or choose another file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {label!r}: {getattr(error, 'strerror', None) or error}") from None
    return read_bytes(data, name, password=password, encoding=encoding, limits=limits)


def read_bytes(
    data: bytes, name: str, *, password: str | None = None, encoding: str | None = None, limits: Limits = LIMITS
) -> Document:
    """Text of a document held in memory. `name` serves messages, and to label plain text as Markdown; content decides the kind.

    `password` opens an encrypted PDF, `encoding` overrides what is found for plain text and HTML. UsageError, in one line with a next
    step, for all that cannot be read, within `limits`; nothing is written to disk.
    """
    if len(data) > limits.file_bytes:
        raise UsageError(f"{shown(name)} is larger than {limits.file_bytes >> 20} MiB; cut it to the part that matters")
    if not needs_parser(data, encoding):
        return extract(data, name, limits=limits)
    return _apart(data, name, password, encoding, limits)


def _apart(data: bytes, name: str, password: str | None, encoding: str | None, limits: Limits) -> Document:
    """`extract` in a process of its own (masw.documents.worker); everything passes through pipes."""
    label = shown(name)
    asked = {"name": name, "password": password, "encoding": encoding, "limits": vars(limits), "bytes": len(data)}
    # -P and PYTHONPATH: this masw and no module of the working directory. -B: not even bytecode is written.
    command = [sys.executable, "-P", "-B", "-X", "utf8", "-m", "masw.documents.worker"]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except OSError as error:
        raise MaswError(
            f"cannot start a process to read {label} ({error.strerror or error}); free some memory and try again"
        ) from None
    try:
        answer, _ = worker.communicate(json.dumps(asked).encode() + b"\n" + data, timeout=limits.seconds)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{label} takes more than {limits.seconds:g} s to read; cut it to the part that matters") from None
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()
    head, _, body = answer.partition(b"\n")
    try:
        said = json.loads(head)
    except ValueError:
        raise UsageError(f"{label} cannot be read: its parser ended early (memory, or a broken file); export it again") from None
    if "error" in said:
        raise _ERRORS.get(said.get("type"), UsageError)(said["error"])
    return Document(text=body.decode("utf-8"), **{**said, "name": name, "warnings": tuple(said["warnings"])})
