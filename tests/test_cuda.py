"""What needs a GPU: the loop and the timed passes there. Skipped elsewhere; scripts/gpu_bench.sh runs this file."""

from __future__ import annotations

import pytest
import torch

from masw import cost, steps
from masw.engine import Settings
from masw.methods import METHODS, MemoryOptions
from masw.session import RunOptions, Session
from masw.shapes import resolve_shape
from masw.zoo import load_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
PROMPT = [1 + i * 7 % 250 for i in range(700)]  # longer than a chunk


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(load_pair("tiny", torch.device("cuda", 0), torch.float32))


def _tokens(session: Session, method: str) -> list[int]:
    job = session.run(PROMPT, RunOptions(method, MemoryOptions(4, 64, 8), Settings(max_new_tokens=48)))
    for _ in job:
        pass
    return job.summary().tokens


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.head])
def test_output_is_the_targets_own(session: Session, method: str) -> None:
    assert session.difference(PROMPT, _tokens(session, method), _tokens(session, "none")) is None


def test_every_pass_is_timed() -> None:
    chosen = steps.plans(["tiny-4"], steps.KINDS, [64, 512], [1, 4], MemoryOptions(4, 32, 8), 5)
    rates, cuda = cost.Rates(1e12, 1e14), torch.device("cuda", 0)
    rows = list(steps.run(chosen, {"tiny-4": resolve_shape("tiny-4")}, cuda, torch.bfloat16, rates, stride=8, repeats=2))
    assert len(rows) == len(chosen) and all(row.error is None and row.ms for row in rows)
