"""A moving average of the weights that train: steps of one or two rows jump about, their mean does not."""

from __future__ import annotations

import copy

import torch

from masw.adaptor import Adaptor


class Average:
    """Exponential moving average of an adaptor's weights over its steps (Polyak and Juditsky 1992; on by `average` of the recipe).

    The plain mean of the first 1 / (1 - decay) steps and the start, exponential from there on, so that an early average is no copy of
    the start.
    """

    def __init__(self, adaptor: Adaptor, decay: float) -> None:
        self.adaptor = copy.deepcopy(adaptor).requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def follow(self, adaptor: Adaptor, step: int) -> None:
        """Takes in the weights behind step number `step`, counted from 1."""
        rate = max(1 - self._decay, 1 / (step + 1))
        for mine, theirs in zip(self.adaptor.parameters(), adaptor.parameters(), strict=True):
            mine.lerp_(theirs, rate)
