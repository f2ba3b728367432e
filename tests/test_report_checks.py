"""What is refused of a report before a kernel starts because values do not go together, on masw's own notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from masw.errors import UsageError
from masw.report.checks import check
from masw.report.library import choose
from masw.report.schema import parse_file, parse_sets, resolve


def checked(names: list[str], *sets: str, file: str = "") -> dict[str, dict[str, Any]]:
    schemas = {s.name: s.schema for s in choose(names)}
    return check(schemas, resolve(schemas, parse_sets(sets), parse_file(file, "params.yaml")))


@pytest.mark.parametrize(
    ("names", "sets", "says"),
    [
        (["3"], ["window=64"], "03_acceptance: window is for live runs, and the recorded ones have their own; add --mode live"),
        (["4"], ["document=x.txt"], "document is for live runs"),
        (["1", "4"], ["04.tokens=8"], "04_rollback_and_losslessness: tokens is for live runs"),
        (["2"], ["pair=nopair"], "no runs of nopair are recorded (there are: smollm2"),
        (["1"], ["window=16", "stride=64"], "01_slots: stride 64 is longer than the window 16"),
        (["1"], ["text="], "text needs at least one word"),
        (["4"], ["p=[0.5,0.6]"], "not 2 and 3"),
        (["4"], ["p=[]", "q=[]"], "2 to 26"),
        (["4"], ["p=[1.5,-0.3,-0.2]"], "p must be probabilities that add up to 1"),
        (["4"], ["q=[0.5,0.3,0.1]"], "q must be probabilities that add up to 1, not [0.5, 0.3, 0.1] with the sum 0.9"),
    ],
)
def test_values_that_do_not_go_together(names: list[str], sets: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        checked(names, *sets)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "no file"), (b"", "the file is empty"), (b"\x7fELF\x02\x01\x01" + bytes(64), "a program")]
)
def test_a_document_that_cannot_be_read(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "document.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        checked(["2"], "mode=live", "pair=tiny", f"document={path}")
    assert says in str(refused.value) and str(refused.value).startswith("02_eviction: ")


def test_a_plain_value_goes_to_the_notebooks_that_use_it() -> None:
    """Notebook 3 shows recorded runs, whose window is what it is; notebook 1 draws from the parameter."""
    values = checked(["1", "3"], "window=64")
    assert values["01_slots"]["window"] == 64 and values["03_acceptance"]["window"] == 256
    live = checked(["1", "3"], "window=64", "mode=live", "pair=tiny")
    assert {v["window"] for v in live.values()} == {64}


def test_a_number_stands_for_its_notebook_in_parameters_too() -> None:
    for sets, file in ((["01.window=64"], ""), (["1.window=64"], ""), ([], "01: {window: 64}"), ([], "1: {window: 64}")):
        assert checked(["1", "2"], *sets, file=file)["01_slots"]["window"] == 64
    with pytest.raises(UsageError, match="01_slots is a notebook"):
        checked(["1"], file="01_slots: 3")
    with pytest.raises(UsageError, match=r"params.yaml gives window twice"):
        checked(["1"], file="window: 64\nwindow: 65")
