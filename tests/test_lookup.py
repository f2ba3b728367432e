"""Prompt lookup: what it copies, and that its index follows the accepted text only."""

from __future__ import annotations

import torch

from masw.lookup import LookupDraft
from masw.recorder import Recorder


def propose(drafter: LookupDraft, sequence: list[int], gamma: int = 4) -> list[int]:
    return drafter.propose(sequence, gamma, Recorder({}, torch.device("cpu")), lambda: False).tokens


def test_copies_what_followed_the_longest_match() -> None:
    #            0  1  2  3  4  5  6  7  8
    sequence = [5, 6, 7, 8, 9, 1, 7, 5, 6]
    assert propose(LookupDraft(), sequence) == [7, 8, 9, 1]  # after (5, 6), not after the nearer single 6


def test_prefers_the_latest_of_equal_matches() -> None:
    assert propose(LookupDraft(), [1, 2, 3, 1, 2, 4, 1, 2], gamma=1) == [4]


def test_proposes_nothing_for_new_words_and_stops_at_the_end_of_the_text() -> None:
    assert propose(LookupDraft(), [1, 2, 3]) == []
    assert propose(LookupDraft(), [1]) == []
    assert propose(LookupDraft(), [3, 3], gamma=4) == [3]
    assert propose(LookupDraft(), [1, 2, 1], gamma=0) == []


def test_index_grows_with_the_sequence() -> None:
    drafter = LookupDraft()
    sequence = [1, 2, 3]
    assert propose(drafter, sequence) == []
    sequence += [9, 1, 2]
    assert propose(drafter, sequence, gamma=2) == [3, 9]
    fresh = LookupDraft()
    assert propose(fresh, sequence, gamma=2) == [3, 9]  # the same as an index built at once


def test_short_matches_can_be_left_out() -> None:
    sequence = [5, 6, 7, 8, 9, 1, 7, 5, 6]
    assert propose(LookupDraft(shortest=3), sequence) == []
    assert propose(LookupDraft(shortest=2), sequence) == [7, 8, 9, 1]
