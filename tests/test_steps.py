"""Passes of shapes with random weights: the filled memory, the rows, what is refused, and the script for GPUs on a CPU."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from masw import cost, steps
from masw.catalogue import SOURCES
from masw.config import MemoryShape
from masw.errors import UsageError
from masw.methods import MemoryOptions
from masw.shapes import SHAPES, resolve_shape
from tests.helpers import memory_for, random_tokens, tiny_config, tiny_decoder
from tests.test_bench import Call, masw  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent
TINY = ["bench", "--steps-only", "--random-weights", "--shape", "tiny-2", "--window", 16, "--stride", 4, "--repeats", 2]
ALL = [MemoryShape(), MemoryShape(4, 16), MemoryShape(4, 16, 4), MemoryShape(0, 8, 8, 5)]


@pytest.mark.parametrize("tokens", [1, 3, 15, 64, 101])
@pytest.mark.parametrize("shape", ALL, ids=str)
def test_a_filled_memory_stands_where_one_that_read_would(shape: MemoryShape, tokens: int) -> None:
    """Same stamps of what is held, same bytes, and the next blocks find the same keys (two sequences at once)."""
    decoder = tiny_decoder(tiny_config())
    read, filled = (memory_for(decoder, shape, tokens=tokens + 30, batch=2) for _ in range(2))
    decoder.forward(random_tokens(tokens, 61, 0, 2), read)
    read.commit()
    filled.fill(tokens)
    for count in (1, 5, 5):
        assert torch.equal(read.snapshot()[0], filled.snapshot()[0])
        assert (read.length, read.committed, read.live_nbytes, read.nbytes) == (
            filled.length, filled.committed, filled.live_nbytes, filled.nbytes
        )  # fmt: skip
        more = random_tokens(count, 61, count, 2)
        for memory in (read, filled):
            hidden = decoder.forward(more, memory)
            assert torch.isfinite(hidden).all()
            memory.rollback(count) if count > 1 else memory.commit()
    with pytest.raises(RuntimeError, match="empty"):
        filled.fill(3)


@pytest.mark.parametrize(("name", "alias"), [(n, n.replace("8b", "8b-instruct").replace("70b", "70b-instruct")) for n in SHAPES])
def test_shapes_have_the_parameters_of_their_models(name: str, alias: str) -> None:
    parameters = cost.weight_bytes(SHAPES[name], 1)
    assert SOURCES[alias].parameters in (0, parameters)
    assert SHAPES[name].max_position == SOURCES[alias].context


def test_a_shape_may_be_a_config_file(tmp_path: Path) -> None:
    raw = {
        "model_type": "llama", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert resolve_shape(str(path)) == resolve_shape(str(tmp_path)) and resolve_shape(str(path)).vocab == 99
    for text in ("{}", "[]", "no", json.dumps({**raw, "hidden_size": None})):
        path.write_text(text)
        with pytest.raises(UsageError):
            resolve_shape(str(path))
    with pytest.raises(UsageError, match=r"did you mean llama-3\.1-8b"):
        resolve_shape("llama-3.1-8")


def test_rows_hold_measured_beside_predicted(masw: Call, tmp_path: Path) -> None:  # noqa: F811
    code, out, err = masw(*TINY, "--contexts", "40,64", "--batch", "1,3", "--out", tmp_path, "--json")
    assert code == 0, err
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [(r["context"], r["batch"], r["kind"]) for r in rows] == [
        (c, b, k) for c in (40, 64) for b in (1, 3) for k in ("full", "window", "masw", "verify")
    ]
    for row in rows:
        assert row["error"] is None and row["ms"] > 0 and row["n"] == 2 and row["over_floor"] == row["ms"] / row["floor_ms"]
        assert row["floor_ms"] == pytest.approx(max(row["bytes_ms"], row["flops_ms"])) and row["peak_memory_bytes"] > 0
        assert row["rows"] == (6 if row["kind"] == "verify" else 1)
        # The buffers also have room for the tokens that are timed.
        assert 0 <= row["kv_bytes"] - row["kv_predicted_bytes"] <= 12 * cost.kv_entry_bytes(SHAPES["tiny-2"], 4, row["batch"])
    head, *lines = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert head["rates"] == {"bytes_per_s": 1e10, "flops_per_s": 1e11} and head["provenance"]["torch"] and len(lines) == 16
    assert len(list(csv.DictReader((tmp_path / "steps.csv").open()))) == 16
    code, out, _ = masw(*TINY, "--contexts", 40, "--methods", "masw,verify", "--out", tmp_path)
    assert code == 0 and out.count("tiny-2") == 2 and "ms/floor" in out


def test_bytes_of_a_bench_bound_what_is_allocated() -> None:
    shape = MemoryShape(4, 16, 4)
    decoder = tiny_decoder(tiny_config(), dtype=torch.float32)
    memory = memory_for(decoder, shape, tokens=64, batch=3)
    assert memory.adaptor is not None
    held = decoder.nbytes + memory.nbytes + sum(p.nbytes for p in memory.adaptor.parameters())  # type: ignore[union-attr]
    need = cost.bench_bytes(decoder.config, shape, 64, 4, batch=3)
    assert held <= need <= 1.2 * held


BAD: list[tuple[list[object], str]] = [
    (["--shape", "lama-3.1-8b"], "did you mean llama-3.1-8b"),
    (["--methods", "lookup"], "'lookup' is no step"),
    (["--batch", "x"], "--batch takes whole numbers"),
    (["--repeats", 0], "--repeats must be at least 1"),
    (["--gamma", 99], "gamma must be"),
    (
        ["--shape", "llama-3.1-70b", "--contexts", "128k", "--batch", 64],
        "llama-3.1-70b verify at 131,072 tokens and batch 64 needs about",
    ),
]


@pytest.mark.parametrize(("more", "says"), BAD, ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else None)
def test_bad_input_is_one_line(masw: Call, tmp_path: Path, more: list[object], says: str) -> None:  # noqa: F811
    code, out, err = masw(*TINY, "--out", tmp_path / "out", *more)
    assert code == 2 and out == "" and says in err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_options_of_the_two_benches_do_not_mix(masw: Call, tmp_path: Path) -> None:  # noqa: F811
    assert masw("bench", "--steps-only", "--shape", "tiny-2", "--out", tmp_path)[0] == 2
    assert masw("bench", "--steps-only", "--random-weights", "--out", tmp_path)[0] == 2
    assert masw("bench", "--shape", "tiny-2", "--out", tmp_path)[0] == 2


def test_what_cannot_fit_may_become_a_row(masw: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(steps, "free_bytes", lambda _: 2**20)
    code, out, err = masw(*TINY, "--contexts", "64,8k", "--batch", 1, "--dtype", "fp32", "--out", tmp_path, "--skip-too-large")
    assert code == 0, err
    assert out.count("needs about") == 3  # the full memory and the verify pass at 8K, and masw's slots


def test_a_row_that_fails_does_not_end_the_run(masw: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    measure = steps._measure

    def failing(plan: steps.Plan, *more: object) -> steps.StepRow:
        if plan.kind == "window":
            raise RuntimeError("broke")
        if plan.context == 64 and plan.kind == "masw":
            signal.raise_signal(signal.SIGINT)
        return measure(plan, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(steps, "_measure", failing)
    code, out, err = masw(*TINY, "--contexts", 40, "--out", tmp_path)
    assert code == 3 and "1 of 4 rows failed, the first with: RuntimeError: broke" in err and out.count("tiny-2") == 4
    code, out, err = masw(*TINY, "--contexts", "40,64", "--out", tmp_path)
    assert code == 130 and "6 of 8 rows are in" in err and len((tmp_path / "steps.jsonl").read_text().splitlines()) == 7


def test_the_gpu_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """Tiny shapes, all else as on a GPU; the table comes last."""
    environment = {
        **os.environ, "PYTHON": sys.executable, "SHAPES": "tiny-2 tiny-4", "CONTEXTS": "64", "BATCH": "1,2", "REPEATS": "1",
        "OUT": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip

    def script(**more: str) -> tuple[list[str], str]:
        command = [ROOT / "scripts" / "gpu_bench.sh", "--window", "32", "--device", "cpu"]
        done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    lines, _ = script()
    assert lines[-1].startswith("no CUDA here") and lines[-2].split()[:5] == ["tiny-4", "verify", "64", "2", "6"]
    assert [line.split()[6] for line in lines if line.startswith("tiny-")][1::2] == ["static"] * 16
    assert sum(line.startswith("tiny-") for line in lines) == 32
    # Out of time: what is done by then is kept and shown, and that is no failure.
    lines, err = script(LIMIT_S="1", REPEATS="40", GRAPHS="0")
    assert "stopped after 1 s; " in err and 1 <= sum(line.startswith("tiny-") for line in lines) < 16
    assert lines[-1].startswith("no CUDA here")


def test_draft_steps_may_read_packed_weights(masw: Call, tmp_path: Path) -> None:  # noqa: F811
    chosen = steps.plans(["smollm2-135m"], ["masw", steps.VERIFY], [64], [1], MemoryOptions(4, 16, 4), 5, "int4")
    assert [plan.weights for plan in chosen] == ["int4", "plain"]  # the target's pass decides the output: never packed
    code, _, err = masw(*TINY, "--contexts", 40, "--out", tmp_path, "--draft-weights", "int3")
    assert code == 2 and "int3" in err


def test_static_shapes_are_measured_beside_the_ordinary_way(masw: Call, tmp_path: Path) -> None:  # noqa: F811
    code, out, err = masw(*TINY, "--contexts", 40, "--out", tmp_path, "--graphs", "--json")
    assert code == 0, err
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [(r["kind"], r["graphs"]) for r in rows] == [
        (kind, way) for kind in ("full", "window", "masw", "verify") for way in (None, "static")
    ]
    assert all(r["error"] is None and r["ms"] > 0 for r in rows)
    code, _, err = masw("bench", "--graphs", "--out", tmp_path)
    assert code == 2 and "--graphs" in err and "belong to --steps-only" in err
    code, _, err = masw(*TINY, "--contexts", 40, "--out", tmp_path, "--limit-s", -1)
    assert code == 2 and "--limit-s takes seconds" in err


def test_no_row_but_the_first_begins_after_the_limit(masw: Call, tmp_path: Path) -> None:  # noqa: F811
    code, out, err = masw(*TINY, "--contexts", 40, "--out", tmp_path, "--limit-s", 1e-9)
    assert code == 0 and out.count("tiny-2") == 1 and "stopped after 1e-09 s; 1 of 4 rows are in" in err
