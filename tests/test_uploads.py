"""Real, tricky files, where a folder of them is named by MASW_UPLOADS: each gives what a reader would expect, in time and in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from masw.documents import EncodingNeeded, PasswordNeeded, read_file, shown
from masw.errors import UsageError

FOLDER = Path(os.environ.get("MASW_UPLOADS") or "nowhere")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="MASW_UPLOADS names no folder")


@dataclass(frozen=True)
class Read:
    """Kind, phrases in their order, characters at least, phrases that must be absent, what a warning says, the encoding."""

    kind: str
    present: tuple[str, ...] = ()
    at_least: int = 1
    absent: tuple[str, ...] = ()
    warning: str = ""
    encoding: str | None = None


@dataclass(frozen=True)
class Refused:
    phrase: str
    error: type[UsageError] = UsageError


MOJIBAKE = ("\ufffd", "â€", "Ã©", "Ä±")
EXPECTED: dict[str, Read | Refused] = {
    "01": Read("pdf", ("Preemption and the Federal Food, Drug, and", "Congressional Research Service"), 110_000),
    "02": Refused("PDF with unreadable text"),
    "03": Read("text", ("plain text file",), 1000),
    "04": Read("pdf", ("Lorem ipsum dolor sit amet",), 500),
    "06": Read("pdf", ("حَبيبي", "habibi")),
    "08": Refused("--password", PasswordNeeded),
    "10": Read("pdf", ("pdf encryption test",)),
    "11": Refused("no text layer"),
    "12": Read("pdf", ("VICKSBURG", "Johnston is coming"), 10_000),
    "14": Read("pdf", ("Hello world",)),
    "20": Read("docx", ("Common Programming Concepts", "fn main()"), 50_000),
    "21": Read("docx", ("Lorem ipsum", "Text before Table Between Text after", "Donec semper"), 100),
    "30": Read("epub", ("# Department of Energy",), 150_000),
    "32": Read("epub", ("草枕", "夏目漱石", "山路を登り"), 7000, ("やまみち",)),
    "40": Read("html", ("The Virtual Table Mechanism Of SQLite", "CREATE VIRTUAL TABLE"), 60_000, ("toggle_div", "antiRobot", "Purchase")),
    "41": Read("html", ("Summary", "Revenue rose & costs fell by 3%."), 20, ("alert", "Ignore", "ignore", "<"), "1 hidden element"),
    "50": Read("text", ("山路を登り",), 7000, MOJIBAKE, encoding="cp932"),
    "52": Read("text", ("# Title: Alice's Adventures in Wonderland",), 29_000, MOJIBAKE, encoding="utf-16"),
    "54": Read("text", ("’", "“", "”"), 57_000, MOJIBAKE, encoding="cp1252"),
    "55": Read("text", ("MOLIÈRE", "NÉ LE", "FÉVRIER"), 3000, MOJIBAKE, encoding="cp1252"),
    "56": Read("text", ("بالموازاة مع ذلك",), 800, MOJIBAKE, encoding="cp1256"),
    "58": Read("text", ("維基大典",), 300, MOJIBAKE, encoding="big5"),
    "59": Read("text", ("역사적 예수",), 200, MOJIBAKE, encoding="cp949"),
    "61": Read("text", ("ελληνική",), 500, MOJIBAKE, encoding="cp1253"),
    "62": Read("text", ("1\n00:00:06,500",), 800, ("\ufeff",), encoding="utf-8"),
    "70": Refused("the file is empty"),
    "71": Refused("only white space"),
    "72": Read("text", ("Alice",), 7900, ("\0",), "control characters removed"),
    "74": Read("text", ("Alice",), 58_000),
    "75": Read("text", ("titlealice",), 20_000),
    "77": Refused("not a text file"),
    "78": Refused("over the limit"),
    "79": Read("markdown", ("# Title", "Body text.")),
}  # fmt: skip
FILES = sorted(p for p in FOLDER.glob("[0-9][0-9]-*")) if FOLDER.is_dir() else []


@pytest.mark.parametrize("path", FILES, ids=lambda p: shown(p.name, 40))
def test_upload(path: Path) -> None:
    expected = EXPECTED[path.name[:2]]
    begin = time.monotonic()
    if isinstance(expected, Refused):
        with pytest.raises(expected.error, match=expected.phrase) as caught:
            read_file(path)
        assert not isinstance(caught.value, EncodingNeeded | PasswordNeeded) or expected.error is not UsageError
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    else:
        found = read_file(path)
        assert found.kind == expected.kind and found.characters >= expected.at_least
        at = 0
        for phrase in expected.present:
            at = found.text.find(phrase, at)
            assert at >= 0, phrase
        assert not [phrase for phrase in expected.absent if phrase in found.text]
        assert expected.warning in " ".join(found.warnings)
        assert expected.encoding is None or found.encoding == expected.encoding
    assert time.monotonic() - begin < 20


def test_the_locked_file_opens_with_its_password() -> None:
    [path] = FOLDER.glob("08-*")
    assert read_file(path, password="openpassword").text.strip()


def test_memory_of_the_largest() -> None:
    """Peak of the parsers' processes, seen from a fresh process, since this one may have had other children.

    Its own peak is read from /proc: the kernel counts the process that it was forked from into ru_maxrss.
    """
    pytest.importorskip("resource")
    if not Path("/proc/self/status").exists():
        pytest.skip("peaks are read from /proc")
    script = (
        "import sys, resource; from masw.documents import read_file; from masw.errors import UsageError\n"
        "for path in sys.argv[1:]:\n"
        "    try: read_file(path)\n"
        "    except UsageError: pass\n"
        "own = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
    )
    paths = sorted(FILES, key=lambda p: p.stat().st_size)[-6:] + list(FOLDER.glob("78-*"))
    done = subprocess.run([sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 1.5 * 2**30  # kilobytes on Linux
