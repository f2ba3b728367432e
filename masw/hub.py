"""The model hub and its cache layout on disk (`models--org--name/snapshots/REVISION`). Weights as safetensors only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from masw.errors import MaswError, UsageError
from masw.packages import FetchError, Progress, ProgressBar, UnavailableError, check_disk
from masw.weights import shard_paths

ALLOWED = ["*.json", "model*.safetensors", "tokenizer.model", "*.jinja"]
REFUSED = ["*/*"]  # copies in other formats sit in folders


def model_folder(folder: Path) -> Path:
    """The folder with config.json: `folder` itself, or the snapshot of a hub cache folder that `main` names (else the newest).

    Raises UsageError if there is no config.json.
    """
    if (folder / "config.json").exists():
        return folder
    snapshots = [p for p in (folder / "snapshots").glob("*") if (p / "config.json").exists()]
    if snapshots:
        try:
            main = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
            if main in snapshots:
                return main
        except OSError:
            pass
        return max(snapshots, key=lambda p: p.stat().st_mtime)
    raise UsageError(f"{folder} has no config.json; give a folder in the hub's layout (config, tokenizer, safetensors)")


def cached(repository: str) -> Path | None:
    """The whole snapshot of `repository` in the hub's own cache; None if there is none or a file is missing."""
    # The environment decides where the cache is when the library is imported; importing it late keeps tests and start-up cheap.
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = model_folder(folder)
        shard_paths(snapshot)
    except MaswError:
        return None
    return snapshot if any((snapshot / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")) else None


def download(repository: str, progress: Progress) -> Path:
    """The snapshot folder of `repository` at its newest revision. Raises UnavailableError or FetchError (one line)."""
    import huggingface_hub
    from huggingface_hub import errors
    from tqdm import tqdm

    class Quiet(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{k: v for k, v in kwargs.items() if k != "name"} | {"disable": True})

    page = f"https://huggingface.co/{repository}"
    try:
        info = huggingface_hub.HfApi().model_info(repository, files_metadata=True, timeout=20)
        wanted = [f for f in info.siblings or [] if "/" not in f.rfilename and f.rfilename.endswith((".json", ".safetensors"))]
        if not any(f.rfilename.endswith(".safetensors") for f in wanted):
            raise FetchError(f"{repository} has no safetensors on the hub; other formats are not loaded, use another model")
        cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
        check_disk(cache, sum(f.size or 0 for f in wanted if not f.rfilename.startswith("consolidated")))
        bars = {} if isinstance(progress, ProgressBar) else {"tqdm_class": Quiet}
        folder = huggingface_hub.snapshot_download(
            repository, revision=info.sha, allow_patterns=ALLOWED, ignore_patterns=REFUSED, **bars
        )
    except MaswError:
        raise
    except errors.GatedRepoError:
        raise UnavailableError(
            f"{repository} needs its licence accepted at {page} and a login (hf auth login); or use --pair qwen2.5-coder"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UnavailableError(f"there is no model {repository} that you may read, neither as a folder nor on the hub") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise UnavailableError(
            f"{repository} is not in the cache and the hub cannot be reached; go online or give a folder"
        ) from None
    except OSError as error:  # HTTP errors of the hub's library are OSErrors too
        raise UnavailableError(_short(repository, error)) from None
    except Exception as error:  # its HTTP client's own errors (no route, bad proxy, timeout) share no public base
        raise UnavailableError(_short(repository, error)) from None
    return Path(folder)


def _short(repository: str, error: Exception) -> str:
    text = str(error).strip()
    reason = text.splitlines()[0][:120] if text else type(error).__name__
    return f"the model hub cannot give {repository} ({reason}); check network and proxy, or give a local model folder"


def recorded_hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 for the large files of a snapshot: the hub's cache names their contents by it."""
    targets = {path.name: path.resolve().name for path in sorted(folder.iterdir()) if path.is_symlink()}
    return {name: blob for name, blob in targets.items() if re.fullmatch(r"[0-9a-f]{64}", blob)}


def provenance(folder: Path) -> dict[str, Any]:
    """Repository and revision of a snapshot in the hub's cache, else the folder's path."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return {"source": "hub", "repository": repository.removeprefix("models--").replace("--", "/"), "revision": folder.name}
    return {"source": "folder", "path": str(folder)}
