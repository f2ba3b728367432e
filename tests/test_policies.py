"""Who sees whom, and where slots are born: the stamps of masw.policies against the paper's table, cell by cell."""

from __future__ import annotations

import pytest
import torch

from masw.config import MemoryShape
from masw.policies import evicted, expiry, materialise, position, visible
from tests.helpers import interleaved, sees, table_mask

SHAPES = [
    (sinks, window, stride)
    for sinks in (0, 1, 2, 5, 11)
    for window in (1, 2, 3, 7, 12, 40)
    for stride in (None, 1, 2, 3, 5, 7, 12)
    if stride is None or stride <= window
]
TOKENS = 29


@pytest.mark.parametrize(("sinks", "window", "stride"), SHAPES)
def test_visibility_is_the_papers_table(sinks: int, window: int, stride: int | None) -> None:
    """All pairs of rows of one sequence; shapes with S > r, S = 0, r = 1, r = W and windows beyond the end among them."""
    shape = MemoryShape(sinks, window, stride)
    times = torch.tensor(materialise(0, TOKENS, stride).times())
    assert torch.equal(visible(times, times, expiry(times, shape)), table_mask(TOKENS, sinks, window, stride))


def test_the_drawn_mask() -> None:
    """The example in the module's docstring: S = 1, W = 2, r = 2."""
    drawn = ["#......", "##.....", "###....", "####...", "#.###..", "#.####.", "#.#.###"]
    times = torch.tensor(materialise(0, 5, 2).times())
    mask = visible(times, times, expiry(times, MemoryShape(1, 2, 2)))
    assert ["".join("#" if cell else "." for cell in row) for row in mask.tolist()] == drawn


def test_a_full_memory_is_causal() -> None:
    times = torch.tensor(materialise(0, 9, None).times())
    for shape in (MemoryShape(), MemoryShape(sinks=4)):
        assert torch.equal(visible(times, times, expiry(times, shape)), torch.ones(9, 9).tril().bool())


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("start", range(10))
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_a_slot_rides_with_the_token_that_closes_its_stretch(start: int, count: int, stride: int | None) -> None:
    """Blocks of any cut give the rows of the whole sequence: each boundary once, right after x_{tau-1}."""
    whole = interleaved(start + count, stride)
    before = len(interleaved(start, stride))
    rows = materialise(start, count, stride)
    expected = whole[before:]
    assert rows.total == len(expected)
    assert list(rows.boundaries) == [at for kind, at in expected if kind == "slot"]
    assert rows.times() == [2 * at + 1 if kind == "raw" else 2 * at for kind, at in expected]
    assert position(torch.tensor(rows.times())).tolist() == [at for _, at in expected]


def test_a_slot_has_the_position_of_the_token_that_follows_it() -> None:
    """Positions repeat; no later token moves."""
    times = torch.tensor(materialise(0, 7, 3).times())
    assert position(times).tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("sinks", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_evicted_counts_what_no_later_row_sees(sinks: int, window: int) -> None:
    shape = MemoryShape(sinks, window)
    for tokens in range(40):
        # the earliest row still to come is the slot at the boundary `tokens`
        gone = [j for j in range(tokens) if not sees(("slot", tokens), ("raw", j), sinks, window)]
        assert evicted(tokens, shape) == len(gone)
        assert gone == list(range(sinks, sinks + len(gone)))
        assert tokens - len(gone) == shape.entries(tokens)
    assert evicted(40, MemoryShape()) == 0


def test_no_token_leaves_before_a_slot_has_read_it() -> None:
    """What leaves the window is in a slot: r <= W is enough, which MemoryShape demands."""
    for sinks, window, stride in SHAPES:
        if stride is None:
            continue
        for j in range(TOKENS - stride):
            closing = (j // stride + 1) * stride
            assert sees(("slot", closing), ("raw", j), sinks, window)
