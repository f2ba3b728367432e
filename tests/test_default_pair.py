"""The default pair for real (1.6 GB to fetch): lossless in fp32, and its draft worth having. `make test-slow`."""

from __future__ import annotations

import pytest
import torch

from masw.engine import Settings
from masw.methods import METHODS, MemoryOptions
from masw.prompts import build
from masw.session import RunOptions, Session, data_folder
from masw.zoo import DEFAULT_PAIR, load_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def guide() -> str:
    return (data_folder() / "samples" / "guide.md").read_text(encoding="utf-8")


def test_every_method_gives_the_targets_own_greedy_output(guide: str) -> None:
    session = Session(load_pair(DEFAULT_PAIR, CPU, torch.float32))
    model = session.pair.target
    prompt = build(model.tokenizer, guide, "summarize", None, 900).ids
    settings = Settings(max_new_tokens=40, gamma=5, eos_ids=model.eos_ids)
    outputs = {}
    for method in (name for name, row in METHODS.items() if not row.head):  # no head comes with this pair
        job = session.run(prompt, RunOptions(method, MemoryOptions(4, 128, 8), settings))
        list(job)
        outputs[method] = job.summary()
    for method, found in outputs.items():
        difference = session.difference(prompt, found.tokens, outputs["none"].tokens)
        assert difference is None, (method, difference)
    assert outputs["full"].tokens_per_iteration > 2.0


def test_int4_keeps_most_of_the_drafts_acceptance(guide: str) -> None:
    session = Session(load_pair(DEFAULT_PAIR, CPU, torch.bfloat16))
    model = session.pair.target
    prompt = build(model.tokenizer, guide, "summarize", None, 2000).ids
    settings = Settings(max_new_tokens=96, gamma=5, eos_ids=model.eos_ids)
    found = {}
    for kind in ("plain", "int4"):
        job = session.run(prompt, RunOptions("full", settings=settings, draft_weights=kind))
        list(job)
        found[kind] = job.summary().tokens_per_iteration or 0.0
    assert found["int4"] >= 0.8 * found["plain"]  # one prompt and 96 tokens: a coarse guard, not a measurement
