"""Two reports side by side: what must be equal and is not, and how the timings moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from masw.report.display import number_text

_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One number of two reports; `kind` is value, predicted, timing, parameter, status or notebook."""

    notebook: str
    name: str
    kind: str
    a: Any
    b: Any
    unit: str = ""

    @property
    def deterministic(self) -> bool:
        return self.kind in ("value", "predicted", "status", "notebook")

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        ratio = ""
        if _number(self.a) and _number(self.b) and self.a:
            ratio = f"  ({self.b / self.a:.2f}x)" if self.kind == "timing" else f"  (by {self.b - self.a:+.6g})"
        return f"{self.notebook}  {self.name}: {_shown(self.a, self.kind)} -> {_shown(self.b, self.kind)}{unit}{ratio}"


def compare(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float = 0.0) -> list[Difference]:
    """What differs between two side-cars, in the order of the first. `tolerance`: relative, for deterministic floats.

    Timings are listed wherever both reports have them, equal or not: they hardly ever are.
    """
    found: list[Difference] = []
    ours, theirs = ({n["name"]: n for n in report["notebooks"]} for report in (a, b))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            found.append(Difference(name, "notebook", "notebook", name in ours or _ABSENT, name in theirs or _ABSENT))
            continue
        one, two = ours[name], theirs[name]
        if one["status"] != two["status"]:
            found.append(Difference(name, "status", "status", one["status"], two["status"]))
        for key in dict.fromkeys([*one["parameters"], *two["parameters"]]):
            left, right = one["parameters"].get(key, _ABSENT), two["parameters"].get(key, _ABSENT)
            if left != right:
                found.append(Difference(name, key, "parameter", left, right))
        numbers = [{h["name"]: h for h in entry["headlines"]} for entry in (one, two)]
        for key in dict.fromkeys([*numbers[0], *numbers[1]]):
            left, right = (n.get(key) for n in numbers)
            known = left or right or {}
            va, vb = (_ABSENT if h is None else h["value"] for h in (left, right))
            kind = known["kind"] if left is None or right is None or left["kind"] == right["kind"] else "value"
            unit = known.get("unit") or ""
            if kind == "timing" or not _same(va, vb, tolerance) or (left and right and left.get("unit") != right.get("unit")):
                found.append(Difference(name, key, kind, va, vb, unit))
    return found


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if _number(a) and _number(b):
        return bool(a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=0.0))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any, kind: str) -> str:
    if value is _ABSENT:
        return "absent"
    if kind == "timing" or isinstance(value, bool) or value is None:
        return number_text(value)
    return repr(value) if isinstance(value, float) else str(value)
