"""The declared parameters of a notebook, and strict checks against them before a kernel starts.

A notebook declares in the one cell tagged `parameters`, one a line:

    window: int = 64  # W: last raw tokens kept exactly [1..8192]
    mode: Literal["trace", "live"] = "trace"  # recorded traces, or a model

Types: int, float, bool, str, Literal[...], list[int|float|str], and `X | None`. A range `[low..high]` at the end of the help is checked.
papermill would only warn about an unknown name and guess at types, so masw checks first and writes the cell of values itself.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from masw.errors import UsageError
from masw.report.extras import need

_SCALARS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_RANGE = re.compile(r"\[\s*(-?[\d.]+)\s*\.\.\s*(-?[\d.]+)?\s*\]\s*$")


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: str  # as written
    default: Any
    help: str = ""
    scalar: str = "str"  # type of the value, or of a list's items
    is_list: bool = False
    optional: bool = False  # None is allowed
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None

    def check(self, value: Any, where: str = "") -> Any:
        """`value` as the notebook is to get it (an int where a float is due becomes one). Raises UsageError."""
        if value is None:
            if self.optional:
                return None
            raise self._refuse(value, where)
        if self.is_list:
            if not isinstance(value, (list, tuple)):
                raise self._refuse(value, where)
            return [self._one(item, where) for item in value]
        return self._one(value, where)

    def read(self, text: str, where: str = "") -> Any:
        """The value that `text` of the command line stands for."""
        if self.optional and text.strip().lower() in ("none", "null", ""):
            return None
        if self.is_list:
            bare = text.strip().removeprefix("[").removesuffix("]")
            items = [item.strip().strip("'\"") for item in bare.split(",")] if bare.strip() else []
            return [self._one(self._parse(item, text, where), where) for item in items]
        return self._one(self._parse(text, text, where), where)

    def _parse(self, item: str, whole: str, where: str) -> Any:
        if self.scalar == "str":
            return item
        word = item.strip().lower()
        if self.scalar == "bool":
            if word in ("true", "yes", "on", "1", "false", "no", "off", "0"):
                return word in ("true", "yes", "on", "1")
            raise self._refuse(whole, where)
        try:
            return int(word.replace("_", "")) if self.scalar == "int" else float(word.replace("_", ""))
        except ValueError:
            raise self._refuse(whole, where) from None

    def _one(self, value: Any, where: str) -> Any:
        kind: Any = _SCALARS[self.scalar]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise self._refuse(value, where)
        if self.choices and value not in self.choices:
            near = get_close_matches(str(value), map(str, self.choices), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{where}{self.name} is one of {', '.join(map(str, self.choices))}, not {_short(value)}{hint}")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            span = f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"
            raise UsageError(f"{where}{self.name} must be {span}, not {_short(value)}")
        return value

    def _refuse(self, value: Any, where: str) -> UsageError:
        example = f"; the default is {self.default!r}"
        return UsageError(f"{where}{self.name} takes {self.annotation}, not {_short(value)}{example}")


@dataclass(frozen=True)
class Schema:
    notebook: str
    parameters: Mapping[str, Parameter]

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults with `given` (typed values) over them. Raises UsageError: unknown (with the nearest name), mistyped, out of range."""
        where = f"{self.notebook}: "
        for name in given:
            if name not in self.parameters:
                raise UsageError(f"{where}no parameter {_short(name)}{did_you_mean(name, self.parameters)}")
        return {p.name: p.check(given[p.name], where) if p.name in given else p.default for p in self.parameters.values()}


def full_name(name: str, known: Iterable[str]) -> str:
    """`name`, or the notebook of `known` whose number it is: `01` and `1` stand for `01_slots`."""
    number = name.zfill(2) if name.isdigit() else None
    return next((full for full in known if full.split("_", 1)[0] == number), name)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    known = list(known)
    near = get_close_matches(str(name), known, 1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known) or 'none'}"


def parse_cell(source: str, notebook: str) -> Schema:
    """The schema that the text of a `parameters` cell declares. Raises UsageError that names the line."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{notebook}: line {error.lineno} of the parameters cell is not Python ({error.msg})") from None
    comments = _comments(source)
    found: dict[str, Parameter] = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None):
            raise UsageError(f"{notebook}: line {node.lineno} of the parameters cell must read `name: type = default  # help`")
        parameter = _parameter(node, comments.get(node.end_lineno or node.lineno, ""), notebook)
        found[parameter.name] = parameter
    return Schema(notebook, found)


def injected_cell(values: Mapping[str, Any], schema: Schema) -> str:
    """Source of the cell that follows the `parameters` cell; values are written as Python literals."""
    lines = [f"{name} = {value!r}" for name, value in values.items() if name in schema.parameters]
    return "\n".join(["# Values of this run, written by `masw report`", *lines])


def parse_sets(items: Iterable[str]) -> dict[str, str]:
    """`--set key=value` items as texts; the key may be NOTEBOOK.key. Raises UsageError."""
    found: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(f"--set takes key=value, not {_short(item)}")
        if key in found:
            raise UsageError(f"--set gives {key} twice; give it once")
        found[key] = value.strip()
    return found


def parse_file(text: str, name: str) -> dict[str, Any]:
    """A YAML file of parameters: a mapping of names to values, a notebook's name to a mapping of its own. Raises UsageError."""
    need("yaml")
    import yaml

    class Loader(yaml.SafeLoader):
        """One that refuses a key that comes twice, of which YAML keeps the last in silence."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
            if twice is not None:
                raise UsageError(f"{name} gives {twice} twice; give it once")
            return super().construct_mapping(node, deep)

    try:
        loaded = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not YAML ({' '.join(str(error).split())[:160]})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"{name} must hold lines `parameter: value`, not a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}  # YAML reads a notebook's number as a number


def resolve(schemas: Mapping[str, Schema], sets: Mapping[str, str], file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Values for each notebook: defaults, under the file, under --set; NOTEBOOK.key beats key.

    A plain key goes to every chosen notebook that declares it; one that none declares is refused.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in schemas}
    known = list(dict.fromkeys(key for schema in schemas.values() for key in schema.parameters))

    def assign(names: Iterable[str], key: str, value: Any, text: bool) -> None:
        for name in names:
            parameter = schemas[name].parameters[key]
            given[name][key] = parameter.read(value, f"{name}: ") if text else parameter.check(value, f"{name}: ")

    def holders(key: str) -> list[str]:
        names = [name for name, schema in schemas.items() if key in schema.parameters]
        if not names:
            raise UsageError(f"no parameter {_short(key)} in {', '.join(schemas)}{did_you_mean(key, known)}")
        return names

    def own(notebook: str) -> str:
        found = full_name(notebook, schemas)
        if found not in schemas:
            raise UsageError(f"no notebook {_short(notebook)} among those chosen{did_you_mean(notebook, schemas)}")
        return found

    for key, value in file.items():
        if not isinstance(value, dict):
            if full_name(key, schemas) in schemas:
                raise UsageError(f"{key} is a notebook: under it belong lines `parameter: value`, not {_short(value)}")
            assign(holders(key), key, value, False)
    for key, value in file.items():
        if isinstance(value, dict):
            full = own(key)
            for inner, inner_value in value.items():
                _own(schemas, full, inner)
                assign([full], inner, inner_value, False)
    for key, text in sorted(sets.items(), key=lambda item: "." in item[0]):
        notebook, dot, inner = key.partition(".")
        if dot:
            full = own(notebook)
            _own(schemas, full, inner)
            assign([full], inner, text, True)
        else:
            assign(holders(key), key, text, True)
    return {name: schema.values(given[name]) for name, schema in schemas.items()}


def _own(schemas: Mapping[str, Schema], notebook: str, key: object) -> None:
    if key not in schemas[notebook].parameters:
        raise UsageError(f"{notebook}: no parameter {_short(key)}{did_you_mean(key, schemas[notebook].parameters)}")


def _parameter(node: ast.AnnAssign, comment: str, notebook: str) -> Parameter:
    name, written = node.target.id, ast.unparse(node.annotation)  # type: ignore[union-attr]
    try:
        default = ast.literal_eval(node.value)  # type: ignore[arg-type]
    except ValueError:
        raise UsageError(f"{notebook}: the default of {name} must be a plain value, not an expression") from None
    kind, optional = node.annotation, False
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        sides = [kind.left, kind.right]
        plain = [s for s in sides if not (isinstance(s, ast.Constant) and s.value is None)]
        if len(plain) != 1:
            raise _unknown_type(notebook, name, written)
        kind, optional = plain[0], True
    choices: tuple[Any, ...] = ()
    is_list = False
    if isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name) and kind.value.id in ("Literal", "list"):
        if kind.value.id == "Literal":
            listed = ast.literal_eval(kind.slice)
            choices = listed if isinstance(listed, tuple) else (listed,)
            kinds = {type(c).__name__ for c in choices}
            scalar = kinds.pop() if len(kinds) == 1 else ""
        else:
            is_list, scalar = True, kind.slice.id if isinstance(kind.slice, ast.Name) else ""
    else:
        scalar = kind.id if isinstance(kind, ast.Name) else ""
    if scalar not in _SCALARS:
        raise _unknown_type(notebook, name, written)
    span = _RANGE.search(comment)
    low, high = (float(span[1]), float(span[2]) if span[2] else None) if span else (None, None)
    parameter = Parameter(name, written, default, comment, scalar, is_list, optional, choices, low, high)
    parameter.check(default, f"{notebook}: the default of ")
    return parameter


def _unknown_type(notebook: str, name: str, written: str) -> UsageError:
    return UsageError(f"{notebook}: {name} is declared {written}; use int, float, bool, str, Literal[...], list[...] or X | None")


def _comments(source: str) -> dict[int, str]:
    """Comment at the end of each line, by line number from 1."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ").strip() for token in tokens if token.type == tokenize.COMMENT}


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 60 else text[:57] + "..."
