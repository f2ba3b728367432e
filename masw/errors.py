"""Errors that a user can act on. The command line prints them as one line and exits with `exit_code`."""

from __future__ import annotations


class MaswError(Exception):
    """A failure whose message is one plain line: what is wrong (with the offending numbers) and what to do next."""

    exit_code = 3  # the run failed


class UsageError(MaswError):
    """The request itself is wrong: a bad option, file or combination. Nothing was started."""

    exit_code = 2


class Cancelled(MaswError):
    """The caller asked to stop; what was produced up to then is kept by the caller."""

    exit_code = 130


def plain_words(error: BaseException) -> str:
    """One line for any failure: a MaswError's own, the remedy for lack of memory, else kind and first line."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:300] if lines else type(error).__name__
    if isinstance(error, MaswError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError) or "allocate memory" in reason or "out of memory" in reason.lower():
        return f"out of memory ({reason}); use a shorter context or a smaller pair"
    return f"{type(error).__name__}: {reason}"
