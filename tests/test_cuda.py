"""What needs a GPU: the loop and the timed passes there. Skipped elsewhere; scripts/gpu_bench.sh runs this file."""

from __future__ import annotations

import pytest
import torch

from masw import cost, steps
from masw.adaptor import Adaptor, AdaptorInfo
from masw.engine import Settings
from masw.graphs import Steps
from masw.methods import METHODS, MemoryOptions
from masw.session import RunOptions, Session
from masw.shapes import resolve_shape
from masw.snapkv import draft_memory
from masw.verify import likeliest
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


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.model and not m.copies])
def test_replayed_graphs_give_the_logits_of_the_ordinary_way(session: Session, method: str) -> None:
    """Drafted and rolled back across slot births and buckets; each pattern is captured once."""
    decoder = session.pair.draft.decoder
    shape = METHODS[method].memory(MemoryOptions(4, 64, 8))
    assert shape is not None
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", ())) if shape.stride else None
    plain, static = (
        draft_memory(decoder.config, shape, tokens=900, device=decoder.device, dtype=decoder.dtype, adaptor=adaptor)
        for _ in range(2)
    )
    text = torch.tensor([PROMPT], device=decoder.device)
    said: list[str] = []
    steps_of = Steps(decoder, static, last=False, note=said.append)
    with torch.no_grad():
        for memory in (plain, static):
            memory.prompt_ends(len(PROMPT))
            decoder.forward(text, memory)
            memory.commit()
        for index in range(60):
            tokens = text[:, index : index + (1, 1, 1, 2, 6)[index % 5]]
            expected = decoder.logits(decoder.forward(tokens, plain))
            torch.testing.assert_close(steps_of(tokens), expected, rtol=1e-3, atol=1e-3)
            for memory in (plain, static):
                memory.rollback(tokens.shape[1] // 2)
                memory.commit()
    assert not said and steps_of.captures


def test_graphs_of_every_step_are_timed() -> None:
    chosen = steps.plans(["tiny-4"], steps.KINDS, [512], [1, 4], MemoryOptions(4, 32, 8), 5, graphs=True)
    rates, cuda = cost.Rates(1e12, 1e14), torch.device("cuda", 0)
    rows = list(steps.run(chosen, {"tiny-4": resolve_shape("tiny-4")}, cuda, torch.bfloat16, rates, stride=8, repeats=2))
    assert [row.graphs for row in rows] == [None, "captured"] * 8 and all(row.error is None and row.ms for row in rows)


def test_the_host_does_not_wait_inside_a_greedy_block(session: Session) -> None:
    """One read-back a block: the steps themselves run under a mode in which every wait of the host is an error."""
    decoder = session.pair.draft.decoder
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", ()))
    shape = METHODS["masw"].memory(MemoryOptions(4, 64, 8))
    assert shape is not None
    memory = draft_memory(decoder.config, shape, tokens=900, device=decoder.device, dtype=decoder.dtype, adaptor=adaptor)
    token = torch.tensor([[3]], device=decoder.device)
    with torch.no_grad():
        for index in range(20):
            torch.cuda.set_sync_debug_mode("error" if index > 9 else "default")
            try:
                token = likeliest(decoder.logits(decoder.forward(token, memory)[:, -1])).view(1, 1)
                memory.commit()
            finally:
                torch.cuda.set_sync_debug_mode("default")
