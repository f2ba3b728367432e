"""Writing a file so that it is either the old one or the whole new one. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from masw.errors import UsageError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a fresh temporary name beside `path`; what was written there takes the place of `path` when the block ends well.

    Symbolic links are followed, so that a link stays a link. Anything but a regular file (a device, a pipe, a folder) is refused before
    a byte is written: renaming over it would remove it. OSError passes through; the temporary file never stays.
    """
    real = Path(os.path.realpath(path))
    refuse_special(real, path)
    handle, name = tempfile.mkstemp(prefix=f".{real.name[:80]}.", suffix=".partial", dir=real.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        os.chmod(partial, real.stat().st_mode & 0o777 if real.exists() else 0o666 & ~_umask())
        refuse_special(real, path)
        os.replace(partial, real)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def refuse_special(real: Path, shown: Path) -> None:
    """Raises UsageError when `real` exists and is not a regular file."""
    if real.is_dir():
        raise UsageError(f"{shown} is a folder; name a file in it")
    if os.path.lexists(real) and not real.is_file():
        raise UsageError(f"{shown} is not a regular file; name a file that may be written")


def check_writable(path: Path, *, not_over: str | None = None) -> None:
    """Finds out before a long run whether `path` can be written; `not_over` is the input, which it must not replace."""
    if not path.name:
        raise UsageError("an empty path cannot be written; name a file")
    real = Path(os.path.realpath(path))
    refuse_special(real, path)
    if not_over and not_over != "-" and os.path.realpath(not_over) == str(real):
        raise UsageError(f"{path} is the input itself; name another file to write")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=real.parent):
            pass
    except OSError as error:
        folder = next((p for p in real.parents if os.path.lexists(p)), real.parent)
        what = f"{folder} is a file, not a folder" if folder.is_file() else error.strerror or str(error)
        raise UsageError(f"cannot write {path} ({what}); choose another path") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
