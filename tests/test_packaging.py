"""What installs masw says the same thing everywhere: pyproject.toml, constraints, environment.yml, Makefile and README."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_environment_yml_installs_what_pyproject_declares() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    python = next(d.removeprefix("python") for d in conda if d.startswith("python"))
    assert SpecifierSet(python) == SpecifierSet(PROJECT["requires-python"])
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert "--constraint constraints.txt" in pip
    editable = next(line for line in pip if line.startswith("--editable"))
    extras = set(re.search(r"\[(.*)\]", editable)[1].split(","))  # type: ignore[index]
    assert extras == set(PROJECT["optional-dependencies"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"'.[{','.join(PROJECT['optional-dependencies'])}]'" in makefile


def test_torch_is_pinned_once_and_allowed_by_pyproject() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert [p.name for p in pins] == ["torch"]
    pinned = str(pins[0].specifier).removeprefix("==")
    declared = next(Requirement(d) for d in PROJECT["dependencies"] if Requirement(d).name == "torch")
    assert declared.specifier.contains(pinned) and declared.specifier.contains("2.11.0")
    transformers = next(Requirement(d) for d in PROJECT["dependencies"] if Requirement(d).name == "transformers")
    assert transformers.specifier.contains("5.17.0")


def test_readme_commands_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert {"demo", "test"} <= used <= targets
    for link in re.findall(r"\]\(([\w./-]+)\)", readme):
        assert (ROOT / link).exists(), link


def test_readme_lists_every_method_and_preset() -> None:
    from masw.methods import METHODS
    from masw.zoo import PRESETS

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in [*METHODS, *PRESETS]:
        assert f"`{name}`" in readme, name


def test_every_package_is_declared() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "masw").rglob("__init__.py")}
    assert set(tool["packages"]) == found | {"masw._app", "masw._app.parts", "masw._app.views", "masw._data", "masw._notebooks"}
