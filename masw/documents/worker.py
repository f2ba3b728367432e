"""The parser's process: one document from standard input, its text to standard output. Started by masw.documents.reading.

In: a JSON line (name, password, encoding, limits, bytes), then the bytes. Out: a JSON line (the fields of Document, or error), then the
text in UTF-8. The process bounds its own memory and processor time, and may not write files at all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from masw.documents.extract import extract
from masw.documents.names import shown
from masw.documents.record import Limits
from masw.errors import MaswError


def main() -> None:
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    asked = json.loads(sys.stdin.buffer.readline())
    limits = Limits(**asked["limits"])
    _confine(limits)
    data = sys.stdin.buffer.read(asked["bytes"])
    if len(data) < asked["bytes"]:
        return  # the caller is gone
    said, text = answer(data, asked["name"], asked["password"], asked["encoding"], limits)
    sys.stdout.buffer.write(json.dumps(said).encode() + b"\n" + text.encode("utf-8"))
    sys.stdout.buffer.flush()


def answer(data: bytes, name: str, password: str | None, encoding: str | None, limits: Limits) -> tuple[dict[str, Any], str]:
    """(what the first line says, the text); whatever goes wrong becomes an error in words."""
    label = shown(name)
    try:
        document = extract(data, name, password=password, encoding=encoding, limits=limits)
    except MaswError as error:
        return {"error": str(error), "type": type(error).__name__}, ""
    except MemoryError:
        return {"error": f"{label} needs more than {limits.memory_bytes >> 20} MiB to read; cut it to the part that matters"}, ""
    except RecursionError:
        return {"error": f"{label} is nested too deeply to read; export it again"}, ""
    except ImportError as error:
        return {"error": f"{label} needs the package {error.name}, which is not installed; run `pip install masw` again"}, ""
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:100]
        return {"error": f"{label} cannot be read ({type(error).__name__}: {reason}); export it again, or save its text"}, ""
    return {k: v for k, v in vars(document).items() if k not in ("text", "name")}, document.text


def _end_with(caller: int) -> None:
    """Ends this process once its caller is gone: nobody is left to read the answer or to stop the clock."""
    while os.getppid() == caller:
        time.sleep(0.5)
    os._exit(3)


def _confine(limits: Limits) -> None:
    """Where the system has such limits; elsewhere the caller's clock alone bounds this process."""
    try:
        import resource
    except ImportError:
        return
    cpu = int(limits.seconds) + 2
    wanted = {"RLIMIT_AS": limits.memory_bytes, "RLIMIT_CPU": cpu, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, value in wanted.items():
        with suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


if __name__ == "__main__":
    main()
