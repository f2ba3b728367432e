"""Demonstrations behind the notebooks: attention adds up, distances vanish for copies, rollback is exact, a broken accept rule shows."""

from __future__ import annotations

import pytest
import torch

from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.cost import kv_entry_bytes
from masw.explain import accept_rows, buffers, projection_distance, roll_back, slot_attention, step_times, total_variation
from masw.failures import LONGEST, failures
from masw.trace import Event, Trace
from tests.helpers import tiny_config, tiny_decoder, trained_adaptor

SHAPE = MemoryShape(2, 8, 4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_attention_of_a_slot(family: str) -> None:
    decoder = tiny_decoder(tiny_config(family))
    profile = slot_attention(decoder, trained_adaptor(decoder), [i * 7 % 61 for i in range(40)], SHAPE, 5)
    names = [k["name"] for k in profile["keys"]]
    assert names == ["x0", "x1", *(f"x{i}" for i in range(12, 20)), "g1", "g2", "g3", "g4", "g5"]
    assert sum(k["share"] for k in profile["keys"]) == pytest.approx(1, abs=1e-4)
    assert [r["position"] for r in profile["later"]] == list(range(20, 40)) and all(r["share"] > 0 for r in profile["later"])


def test_distance_from_the_copy() -> None:
    decoder = tiny_decoder(tiny_config())
    same = projection_distance(decoder, Adaptor.copied(decoder, AdaptorInfo("x", ())))
    assert same == [{"layer": i, "key": 0.0, "value": 0.0} for i in range(2)]
    assert all(r["key"] > 0.1 and r["value"] > 0.1 for r in projection_distance(decoder, trained_adaptor(decoder)))


@pytest.mark.parametrize("shape", [SHAPE, MemoryShape(2, 8), MemoryShape(), MemoryShape(4, 16, 8)], ids=str)
@pytest.mark.parametrize("kept", [0, 3, 6])
def test_a_rejection_leaves_no_trace(shape: MemoryShape, kept: int) -> None:
    decoder = tiny_decoder(tiny_config(), dtype=torch.float32)
    ids = [i * 5 % 61 for i in range(107)]
    back = roll_back(decoder, shape, ids[:101], ids[101:], kept)
    assert back.identical and back.continues
    assert back.after == {"tokens": 101 + kept, "slots": shape.slots(101 + kept), "entries": shape.entries(101 + kept)}
    assert [r["moment"] for r in back.rows()] == ["before", "drafted", "after"]


def test_the_accept_rule_is_exact_and_the_broken_one_is_not() -> None:
    rows = accept_rows((0.5, 0.3, 0.2), (0.7, 0.2, 0.1), draws=4000, seed=1)
    assert total_variation(rows, "emitted") < 1e-12
    assert total_variation(rows, "broken") == pytest.approx(0.1)
    assert sum((r["drawn"] - r["p"]) ** 2 / r["p"] for r in rows) * 4000 < 25
    same = accept_rows((0.5, 0.5), (0.5, 0.5), draws=100)
    assert total_variation(same, "emitted") == total_variation(same, "broken") == 0


def test_buffers_are_what_the_formula_says() -> None:
    config = tiny_config()
    rows = buffers(config, {"full": MemoryShape(), "masw": SHAPE}, [64, 4096], torch.float32)
    assert all(r["measured_bytes"] == r["predicted_bytes"] for r in rows) and len(rows) == 4
    assert rows[0]["predicted_bytes"] == 64 * kv_entry_bytes(config, 4)


def test_step_times_have_spread_and_floor() -> None:
    rows = step_times(tiny_decoder(tiny_config()), {"full": MemoryShape(), "masw": SHAPE}, [16, 32], bandwidth=1e9, repeats=3)
    assert [(r["method"], r["context"]) for r in rows] == [("full", 16), ("full", 32), ("masw", 16), ("masw", 32)]
    assert all(0 < r["p10_ms"] <= r["ms"] <= r["p90_ms"] and r["floor_ms"] > 0 for r in rows)


def test_failures_look_back_for_the_correction() -> None:
    prompt = [1, 2, 3, 4, 9, 9, 1, 2, 3]
    events = [
        Event("reject", "engine", 1, 0.0, 9, 1, data={"tokens": [7], "p": [0], "q": [1], "instead": 4}),
        Event("emit", "engine", 1, 0.0, 9, 1, data={"tokens": [4], "roles": ["correction"]}),
        Event("reject", "engine", 2, 0.0, 10, 1, data={"tokens": [7], "p": [0], "q": [1], "instead": 8}),
        Event("emit", "engine", 2, 0.0, 10, 1, data={"tokens": [8], "roles": ["correction"]}),
        Event("reject", "engine", 3, 0.0, 11, 1, data={"tokens": [7], "p": [0], "q": [1], "instead": 5}),
    ]
    found = failures(Trace({}, events), prompt)
    assert found == [
        {"round": 1, "position": 9, "distance": 6, "match": 3},  # x3 follows 1 2 3 as x9 does
        {"round": 2, "position": 10, "distance": None, "match": None},  # never seen
    ]  # the third was cut off before its correction came out
    assert LONGEST == 8
