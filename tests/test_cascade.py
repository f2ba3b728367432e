"""The cascade: copies first, and a model that catches up with what was copied."""

from __future__ import annotations

import torch

from masw.cascade import CascadeDraft
from masw.drafters import ModelDraft
from masw.recorder import Recorder
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

    fresh = [*repeating, 1, 2]  # nothing of three tokens recurs: the model reads all it has missed, then drafts
    proposal = drafter.propose(fresh, 3, recorder, STOP)
    assert proposal.tokens == model.propose(fresh, 3, recorder, STOP).tokens
    assert drafter.memory.length == len(fresh) + 2 and drafter.memory.committed == len(fresh)
