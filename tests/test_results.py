"""The table of a benchmark: what is kept, what is refused, and the numbers that follow from it, by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from masw.errors import UsageError
from masw.results import Cell, Definition, Table, aggregate, heading, write_tables

DEFINITION = Definition("tiny", "float32", "cpu", 5, 16, 4, 64, 8, "auto", "auto", "auto", {"draft": {"seed": 1}})


def cell(
    method: str, rate: float, *, document: str = "a", repeat: int = 0, session: str = "s", set: str = "x", **more: object
) -> Cell:
    return Cell(
        set, document, 64, repeat, method, session, decode_tokens_per_second=rate, end_to_end_tokens_per_second=rate / 2, **more
    )  # type: ignore[arg-type]


def test_speed_up_is_the_median_of_paired_ratios() -> None:
    found = [
        cell("none", 10), cell("full", 20), cell("none", 5, repeat=1), cell("full", 20, repeat=1),
        cell("none", 20, document="b"), cell("full", 20, document="b"),
    ]  # fmt: skip
    none, full = aggregate(found)
    assert (none.speedup, full.speedup, full.pairs, full.documents, full.n) == (1.0, 2.0, 3, 2, 3)  # ratios 2, 4, 1
    assert full.speedup_quartiles == (1.5, 3.0)
    assert full.speedup_end_to_end == 2.0 and full.decode_tokens_per_second == 20


def test_only_cells_of_one_session_are_paired() -> None:
    found = [cell("none", 10), cell("none", 40, session="later"), cell("full", 20, session="later")]
    line = aggregate(found)[1]
    assert line.speedup == 0.5 and line.pairs == 1 and line.speedup_quartiles is None


def test_sets_stand_alone_and_together() -> None:
    found = [cell("none", 10), cell("full", 20), cell("none", 10, set="y"), cell("full", 40, set="y")]
    lines = {(x.set, x.method): x.speedup for x in aggregate(found)}
    assert lines["x", "full"] == 2 and lines["y", "full"] == 4 and lines["all", "full"] == 3
    assert list(lines) == [("x", "none"), ("x", "full"), ("y", "none"), ("y", "full"), ("all", "none"), ("all", "full")]


def test_acceptance_by_position_is_a_mean_of_those_that_reached_it() -> None:
    found = [
        cell("full", 1, acceptance_by_position=[1.0, 0.5]), cell("full", 1, repeat=1, acceptance_by_position=[0.5]),
        cell("full", 1, repeat=2, error="broke"),
    ]  # fmt: skip
    (line,) = aggregate(found)
    assert line.acceptance_by_position == [0.75, 0.5] and (line.n, line.errors) == (2, 1)


def test_predictions_by_hand() -> None:
    none = cell("none", 10, tokens_per_iteration=1.0, verify_ms=100.0, verify_floor_ms=50.0)
    full = cell(
        "full", 20, tokens_per_iteration=3.0, verify_ms=100.0, draft_ms=10.0, drafted_per_iteration=5.0, acceptance=0.5,
        draft_floor_ms=5.0, verify_floor_ms=50.0, draft_weights="int4",
    )  # fmt: skip
    line = aggregate([none, full])[1]
    assert line.speedup_predicted == pytest.approx(3.0 / ((5 * 10 + 100) / 100))
    assert line.speedup_at_floor == pytest.approx((1 - 0.5**6) / 0.5 / ((5 * 5 + 50) / 50))
    assert aggregate([none])[0].speedup_predicted is None


def test_a_table_is_read_back_and_a_cut_line_dropped(tmp_path: Path) -> None:
    table = Table(tmp_path, DEFINITION)
    table.open_session({"id": "s"})
    table.add(cell("none", 10.123456789))
    table.add(cell("full", 20, error="RuntimeError: broke"))
    with table.path.open("a") as file:
        file.write('{"type": "cell", "set": "x", "docu')
    again = Table(tmp_path, DEFINITION)
    assert [c.method for c in again.cells] == ["none", "full"] and {k[4] for k in again.done} == {"none"}
    assert all(json.loads(line) for line in table.path.read_text().splitlines())
    again.add(cell("full", 20))
    assert [(c.method, c.error) for c in Table(tmp_path, DEFINITION).standing] == [("none", None), ("full", None)]


def test_the_summary_names_the_sessions_that_its_cells_come_from(tmp_path: Path) -> None:
    table = Table(tmp_path, DEFINITION)
    assert heading(table, DEFINITION).keys() == {"definition"}  # nothing ran: nothing was measured
    for name in ("one", "two", "three"):
        table.open_session({"id": name, "provenance": {"commit": name}, "rates": {"bytes_per_s": 1.0}})
        if name != "three":  # a later command that found all cells done
            table.add(cell("none", 10, session=name, document=name))
    for found in (table, Table(tmp_path, DEFINITION)):
        head = heading(found, DEFINITION)
        assert head["provenance"] == {"commit": "two"} and [s["id"] for s in head["sessions"]] == ["one", "two"]


def test_a_failure_stands_until_a_later_run_makes_it_good(tmp_path: Path) -> None:
    table = Table(tmp_path, DEFINITION)
    for text in ("first", "second"):
        table.add(cell("full", 0, error=text))
    assert [c.error for c in table.standing] == ["second"]


@pytest.mark.parametrize(
    "change", [{"gamma": 8}, {"models": {"draft": {"seed": 2}}}, {"pair": "other"}, {"adaptor_sha256": "f" * 64}]
)
def test_another_grid_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    Table(tmp_path, DEFINITION)
    with pytest.raises(UsageError, match=r"another grid .*--out"):
        Table(tmp_path, replace(DEFINITION, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{}\n", "no table\n{}\n", '{"type": "header", "schema": 99}\n', "[]\n"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(UsageError, match="--out"):
        Table(tmp_path, DEFINITION)
    assert (tmp_path / "results.jsonl").read_text() == text


def test_csv_has_what_the_json_lines_have(tmp_path: Path) -> None:
    table = Table(tmp_path, DEFINITION)
    table.add(cell("none", 10, document='a "quoted", name'))
    table.add(cell("full", 20, document='a "quoted", name', acceptance_by_position=[1.0, 0.5]))
    write_tables(table, DEFINITION)
    rows = list(csv.DictReader((tmp_path / "results.csv").open(encoding="utf-8")))
    assert rows[1]["document"] == 'a "quoted", name' and rows[1]["acceptance_by_position"] == "1.0 0.5" and rows[1]["error"] == ""
    head, *lines = map(json.loads, (tmp_path / "summary.jsonl").read_text().splitlines())
    assert head["type"] == "header" and head["schema"] == 1 and [x["method"] for x in lines] == ["none", "full"]
    assert [float(r["speedup"]) for r in csv.DictReader((tmp_path / "summary.csv").open())] == [1.0, 2.0]
