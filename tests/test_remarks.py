"""What is said beside a run's numbers, from the header of its trace alone."""

from __future__ import annotations

from typing import Any

import pytest

from masw.remarks import remarks

MEMORY = {"sinks": 4, "window": 64, "stride": 8}
TRAINED = {"file": "a.safetensors", "choice": "auto", "strides": [4, 8], "longest_row": 2048, "reach": 8192}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"memory": None, "models": {"draft": {"name": "a"}, "target": {"name": "a"}}}, None),  # nothing is drafted by a model
        ({"memory": MEMORY, "models": {"draft": {"name": "a"}, "target": {"name": "a"}}}, "one model here"),
        ({"memory": MEMORY, "models": {"draft": {"name": "a"}, "target": {"name": "b"}}}, None),
        ({"memory": MEMORY, "adaptor": TRAINED, "prompt_tokens": 8192}, None),
        ({"memory": MEMORY, "adaptor": TRAINED, "prompt_tokens": 8193}, "Slots more than 8,192 tokens back are not read"),
        ({"memory": MEMORY, "adaptor": {**TRAINED, "reach": None, "longest_row": None}, "prompt_tokens": 99_999}, None),
        ({"memory": MEMORY, "adaptor": {"file": None, "choice": "auto", "strides": []}}, "kept quiet"),
        ({"memory": MEMORY, "adaptor": {"file": None, "strides": []}}, "kept quiet"),  # a trace of an older version
        ({"memory": MEMORY, "adaptor": {"file": None, "choice": "none", "strides": []}}, "a plain copy"),
        ({"memory": MEMORY, "eagle": {"file": "h.safetensors", "tokens": 61_000}}, "was trained on 61,000 tokens"),
        ({"memory": MEMORY, "eagle": {"file": "h.safetensors", "tokens": 0}}, "is untrained"),
        ({"memory": MEMORY, "pair": "tiny"}, "random weights"),
        ({}, None),
    ],
)
def test_what_has_to_be_known_is_said(header: dict[str, Any], said: str | None) -> None:
    found = remarks(header)
    assert (not found) if said is None else (len(found) == 1 and said in found[0])


def test_an_eagle_head_on_the_targets_features_is_no_second_copy_of_the_model() -> None:
    model = {"name": "a"}
    header = {"memory": MEMORY, "models": {"draft": model, "target": model}, "eagle": {"file": "h", "tokens": 5}}
    assert remarks(header) == ["The eagle head (h) was trained on 5 tokens."]
