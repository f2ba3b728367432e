"""docs/RESULTS.md is what the tables in data/results say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "results_page.py"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_committed_page_is_that_of_the_tables(script: dict[str, Any]) -> None:
    assert script["main"](["--check"]) == 0


def test_a_page_that_is_not_is_told(script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = script["main"]
    main.__globals__["PAGE"] = tmp_path / "RESULTS.md"
    assert main(["--check"]) == 1 and "run scripts/results_page.py" in capsys.readouterr().err
    assert main([]) == 0 and main(["--check"]) == 0


def test_the_readme_keeps_all_but_its_table(script: dict[str, Any]) -> None:
    start, end = script["MARKS"]
    made = script["with_comparison"](f"before\n{start}\nold\n{end}\nafter", "new")
    assert made == f"before\n{start}\n\nnew\n{end}\nafter"
    assert script["with_comparison"](made, "new") == made


def test_means_and_gaps_are_those_of_the_rows(script: dict[str, Any], tmp_path: Path) -> None:
    adaptor = {"file": "a", "provenance": {"tokens": 200, "init": {"tokens": 800}}}
    head = {"pair": "p", "answer_tokens": 8, "adaptors": {"8": adaptor}, "dtype": "fp32", "commit": "c"}
    rows = [head]
    for name, scale in (("govreport", 1.0), ("qmsum", 2.0)):
        for method, window, stride, value in (("full", None, None, 5.0), ("window", 16, None, 2.0), ("masw", 16, 8, 3.5)):
            rows.append({
                "set": name, "context": 64, "window": window, "stride": stride, "method": method, "weights": "plain", "n": 2,
                "agreement": 0.5, "kl": 0.1, "tokens_per_iteration": {"5": scale * value, "8": value},
            })  # fmt: skip
    (tmp_path / "adaptor_p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    text = script["page"](tmp_path)
    assert "| 64 | 16 | 8 | plain | `masw` | 4 | 5.25 | 3.50 | 0.500 | 0.10 | 0.70 | 0.50 |" in text
    assert "GovReport, QMSum: 4 answers of at most 8 tokens; adaptor a, trained on 1,000 tokens" in text
    assert "| 64 | - | - | plain | `full` | 4 | 7.50 | 5.00 | 0.500 | 0.10 | 1.00 |  |" in text


def test_ratios_of_the_core_stand_beside_their_goals(script: dict[str, Any], tmp_path: Path) -> None:
    row = {
        "part": "verify", "what": "verify of 6 tokens", "ours": 220.0, "other": 200.0, "unit": "ms", "ratio": 1.1,
        "quartiles": [1.05, 1.2], "goal": "<= 1.5", "floor": 190.0, "met": True,
    }  # fmt: skip
    bare = row | {"what": "share", "other": None, "quartiles": None, "floor": None, "met": None, "goal": ""}
    where = {"device": "d", "threads": 2, "created": "2026-12-01T00:00", "commit": "c", "transformers": "5"}
    found = {"rows": [row, bare], "machine": {"bytes_per_s": 2e10, "flops_per_s": 1e12}, "provenance": where}
    (tmp_path / "core_p.json").write_text(json.dumps(found))
    text = script["page"](tmp_path)
    assert "| verify of 6 tokens | 220.0 | 200.0 | ms | 190.0 | 1.100 | 1.050 to 1.200 | <= 1.5 | yes |" in text
    assert "| share | 220.0 |  | ms |  | 1.100 |  |  |  |" in text and "20.0 GB/s and 1.00 TFLOP/s measured" in text


def test_no_results_make_a_page_without_tables(script: dict[str, Any], tmp_path: Path) -> None:
    assert "|" not in script["page"](tmp_path)


def test_a_measure_is_kept_and_a_partial_one_refused(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"set": "govreport", "weights": "plain", "n": 1}
    measure = {"rows": [row], "provenance": {"pair": "p", "models": {"draft": 1}}}
    (tmp_path / "m.json").write_text("a line before\n" + json.dumps(measure))
    out = script["keep_measure"](tmp_path / "m.json", tmp_path)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"type": "header", "pair": "p"},
        {"type": "row", **row},
    ]
    (tmp_path / "m.json").write_text(json.dumps(measure | {"partial": True}))
    assert script["main"](["--measure", str(tmp_path / "m.json")]) == 2 and "partial" in capsys.readouterr().err
    assert script["main"](["--measure", str(tmp_path / "none.json")]) == 2 and "is not what" in capsys.readouterr().err
