"""Finding notebooks and reading what they declare, before anything runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import masw
from masw.errors import UsageError
from masw.report.extras import need
from masw.report.schema import Schema, did_you_mean, full_name, parse_cell


@dataclass(frozen=True)
class Source:
    """A notebook as it lies in the library: never executed, nothing but its cells."""

    name: str
    title: str
    summary: str  # the first paragraph under the title
    notebook: Any  # nbformat.NotebookNode
    schema: Schema
    sha256: str  # of its code and text, outputs and metadata apart


def folder_of_notebooks() -> Path:
    """masw's own notebooks: inside an installed package, beside it in a checkout."""
    package = Path(masw.__file__).parent
    inside = package / "_notebooks"
    return inside if inside.is_dir() else package.parent / "notebooks"


def choose(names: Iterable[str], folder: Path | None = None) -> list[Source]:
    """The notebooks of these names in the folder's order; none or `all`: every one. Raises UsageError for an unknown name."""
    folder = folder_of_notebooks() if folder is None else folder
    if not folder.is_dir():
        raise UsageError(f"there is no folder of notebooks at {folder}; name one with --notebooks")
    files = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not files:
        raise UsageError(f"no notebooks (.ipynb) in {folder}; name another folder with --notebooks")
    wanted = [name.removesuffix(".ipynb") for name in names]
    resolved = {name: full_name(name, files) for name in wanted if name != "all"}
    for name, full in resolved.items():
        if full not in files:
            raise UsageError(f"no notebook '{name}'{did_you_mean(name, files)}")
    every = not wanted or "all" in wanted
    return [read(path) for stem, path in files.items() if every or stem in resolved.values()]


def read(path: Path) -> Source:
    """Raises UsageError for a file that is no notebook or whose parameters cell cannot be read."""
    need("nbformat")
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # json, validation and reader errors have no base in common
        raise UsageError(f"{path.name} is not a notebook ({' '.join(str(error).split())[:120]})") from None
    language = notebook.metadata.get("kernelspec", {}).get("language") or notebook.metadata.get("language_info", {}).get("name")
    if language not in (None, "python"):
        raise UsageError(f"{path.name} is a notebook for {language}, and reports run Python; leave it out")
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) > 1:
        raise UsageError(f"{path.name} has {len(cells)} cells tagged `parameters`; it may have one")
    schema = parse_cell(cells[0].source, path.stem) if cells else Schema(path.stem, {})
    title, summary = _title(notebook, path.stem)
    text = "\x00".join(f"{cell.cell_type}\x01{cell.source}" for cell in notebook.cells)
    return Source(path.stem, title, summary, notebook, schema, hashlib.sha256(text.encode()).hexdigest())


def _title(notebook: Any, name: str) -> tuple[str, str]:
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        lines = cell.source.strip().splitlines()
        if lines and lines[0].startswith("# "):
            rest = "\n".join(lines[1:]).strip().split("\n\n", 1)[0]
            return _plain(lines[0][2:]), _plain(rest)
    return name, ""


def _plain(markdown: str) -> str:
    """One line of text without its marks."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"[*`]", "", markdown)).split())
