"""Parameters of a notebook: what a cell declares, and what is refused before a kernel starts."""

from __future__ import annotations

import pytest

from masw.errors import UsageError
from masw.report.schema import Schema, injected_cell, parse_cell, parse_file, parse_sets, resolve

CELL = '''
"""What this notebook takes."""
from typing import Literal

mode: Literal["trace", "live"] = "trace"  # recorded traces, or a model
pair: str = "smollm2"  # of a live run
window: int = 64  # W: last raw tokens kept [1..8192]
share: float = 0.5  # of the document [0..1]
fast: bool = True
limit: int | None = None  # tokens at most
contexts: list[int] = [256, 512]  # tokens
'''


@pytest.fixture
def schema() -> Schema:
    return parse_cell(CELL, "01_slots")


def test_a_cell_declares_names_types_defaults_help_and_ranges(schema: Schema) -> None:
    p = schema.parameters
    assert list(p) == ["mode", "pair", "window", "share", "fast", "limit", "contexts"]
    assert p["window"].help == "W: last raw tokens kept [1..8192]" and (p["window"].low, p["window"].high) == (1, 8192)
    assert p["mode"].choices == ("trace", "live") and p["limit"].optional and p["contexts"].is_list


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("window", "1_024", 1024),
        ("share", "1", 1.0),
        ("fast", "off", False),
        ("limit", "none", None),
        ("limit", "7", 7),
        ("contexts", "[1, 2]", [1, 2]),
        ("contexts", "3", [3]),
        ("pair", "#ff0000", "#ff0000"),  # papermill would take it for a comment
        ("pair", "a=b", "a=b"),
    ],
)
def test_text_of_the_command_line_becomes_the_declared_type(schema: Schema, key: str, text: str, value: object) -> None:
    got = resolve({"01_slots": schema}, parse_sets([f"{key}={text}"]), {})["01_slots"][key]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (["windw=3"], "did you mean window?"),
        (["window=wide"], "window takes int, not 'wide'"),
        (["window=1.5"], "window takes int"),
        (["window=0"], "window must be 1 to 8192, not 0"),
        (["mode=trce"], "did you mean trace?"),
        (["fast=maybe"], "fast takes bool"),
        (["share=nan"], "share takes float"),
        (["contexts=1,x"], "contexts takes list[int]"),
        (["window"], "--set takes key=value"),
        (["window=1", "window=2"], "twice"),
        (["02_other.window=1"], "no notebook '02_other'"),
        (["01_slots.windw=1"], "did you mean window?"),
    ],
)
def test_wrong_values_are_refused_with_a_next_step(schema: Schema, items: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve({"01_slots": schema}, parse_sets(items), {})
    assert says in str(refused.value) and refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("window: '3'", "window takes int, not '3'"),
        ("window: true", "window takes int, not True"),
        ("contexts: 3", "contexts takes list[int]"),
        ("- window", "must hold lines"),
        ("a: [", "not YAML"),
        ("windw: 3", "did you mean window?"),
        ("01_slots: {windw: 3}", "did you mean window?"),
        ("01_slot: {window: 3}", "did you mean 01_slots?"),
    ],
)
def test_a_wrong_file_is_refused(schema: Schema, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=None) as refused:
        resolve({"01_slots": schema}, {}, parse_file(text, "params.yaml"))
    assert says in str(refused.value)


def test_set_beats_file_and_a_notebooks_own_key_beats_a_plain_one(schema: Schema) -> None:
    other = parse_cell("window: int = 8", "02_other")
    both = {"01_slots": schema, "02_other": other}
    values = resolve(both, parse_sets(["02_other.window=5", "window=4"]), parse_file("window: 3\nshare: 1\n", "p"))
    assert (values["01_slots"]["window"], values["02_other"]["window"], values["01_slots"]["share"]) == (4, 5, 1.0)
    assert values["02_other"] == {"window": 5}  # share goes only where it is declared


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("window = 3", "line 1 of the parameters cell"),
        ("x: dict = {}", "x is declared dict"),
        ("x: int = f()", "must be a plain value"),
        ("x: int = 'a'", "the default of x takes int"),
        ("x: int = ", "not Python"),
    ],
)
def test_a_cell_that_declares_nothing_usable_is_named(cell: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_cell(cell, "nb")
    assert says in str(refused.value)


def test_the_injected_cell_gives_exactly_the_values(schema: Schema) -> None:
    values = schema.values({"pair": 'it\'s "x" \\ \n#', "limit": 3, "contexts": [1]})
    scope: dict[str, object] = {}
    exec(injected_cell(values, schema), scope)
    assert {k: scope[k] for k in values} == values
