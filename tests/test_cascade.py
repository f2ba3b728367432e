"""Cheaper blocks: copies first, with a model that catches up with what was copied; and blocks that end early."""

from __future__ import annotations

from math import prod

import pytest
import torch

from masw.cascade import CascadeDraft
from masw.drafters import ModelDraft
from masw.gamma import DRAFT as DRAFTED
from masw.gamma import Offer
from masw.recorder import Recorder
from masw.verify import Sampling
from tests.helpers import drafter_for, noisy, random_tokens, tiny_config, tiny_decoder

DRAFT = noisy(tiny_decoder(tiny_config(), seed=1), 0.25)
TEXT = random_tokens(12, 61, 3)[0].tolist()
STOP = lambda: False  # noqa: E731


@torch.no_grad()
def test_copies_where_the_text_repeats_and_drafts_elsewhere() -> None:
    recorder = Recorder({}, torch.device("cpu"))
    drafter = drafter_for("full+lookup", DRAFT)
    model = drafter_for("full", DRAFT)
    assert isinstance(drafter, CascadeDraft) and isinstance(model, ModelDraft)

    repeating = [*TEXT, *TEXT[:3]]
    assert drafter.propose(repeating, 4, recorder, STOP).tokens == TEXT[3:7]
    assert drafter.memory.length == 0  # the model was not asked
    drafter.settle(len(repeating))
    assert drafter.memory.length == 0

    fresh = [*repeating, 1, 2]  # nothing of two tokens recurs: the model reads all it has missed, then drafts
    proposal = drafter.propose(fresh, 3, recorder, STOP)
    assert proposal.tokens == model.propose(fresh, 3, recorder, STOP).tokens
    assert drafter.memory.length == len(fresh) + 2 and drafter.memory.committed == len(fresh)


def test_offers_what_it_prefers_first() -> None:
    recorder = Recorder({}, torch.device("cpu"))
    drafter = drafter_for("full+lookup", DRAFT)
    text = [5, 6, 7, 8]
    assert drafter.offers(text, recorder) == (DRAFTED,)
    assert drafter.offers([*text, 6], recorder) == (DRAFTED, Offer(True, 1))  # one token recurs by chance
    assert drafter.offers([*text, 6, 7], recorder) == (Offer(True, 2), DRAFTED)
    assert drafter.propose([*text, 6, 7], 1, recorder, STOP, offer=Offer(True, 2)).tokens == [8]
    with torch.no_grad():
        drafted = drafter.propose([*text, 6, 7], 1, recorder, STOP, offer=DRAFTED).tokens
        assert drafted == drafter_for("full", DRAFT).propose([*text, 6, 7], 1, recorder, STOP).tokens


@torch.no_grad()
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_a_block_ends_once_it_is_not_likely_enough(sampling: Sampling) -> None:
    """The token that takes the product of q below `least` is still proposed: dropping it would bend the distribution."""
    recorder = Recorder({}, torch.device("cpu"))
    whole = drafter_for("full", DRAFT, sampling=sampling).propose(TEXT, 8, recorder, STOP)
    products = [prod(whole.confidence[: i + 1]) for i in range(8)]
    for least in (0.0, products[0] * 1.01, products[2] * 1.01, products[2]):
        expected = next((i + 1 for i, product in enumerate(products) if product < least), 8)
        cut = drafter_for("full", DRAFT, sampling=sampling).propose(TEXT, 8, recorder, STOP, least)
        assert cut.tokens == whole.tokens[:expected] and len(cut.confidence) == expected
        assert cut.q is None or cut.q.shape[0] == expected
