"""The choice of gamma on stubs: near the best fixed one where drafting pays, near plain decoding where it does not, and back again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from masw.errors import UsageError
from masw.gamma import (
    DRAFT,
    GRACE,
    LONGEST_GAP,
    MOST,
    MOST_LEAST,
    SHARE,
    Adaptive,
    Choice,
    Fixed,
    Gamma,
    Offer,
    best,
    between,
    parse,
)


@dataclass
class Machine:
    """A run with known costs: `acceptance(round)` of each drafted token, ms a draft step, ms a verify pass by rows, noise."""

    acceptance: Callable[[int], float]
    draft_ms: float
    verify_ms: Callable[[int], float]
    noise: float = 0.0
    catch_up_ms: float = 0.05  # a token that the draft has missed
    seed: int = 0
    gammas: list[int] = field(default_factory=list)
    tokens: int = 0
    ms: float = 0.0

    def run(self, gamma: Gamma, rounds: int) -> float:
        """Tokens per ms."""
        random, missed = Random(self.seed), 0
        for index in range(rounds):
            block = gamma.choose(64).gamma
            kept = 0
            while kept < block and random.random() < self.acceptance(index):
                kept += 1
            factor = 1 + self.noise * random.random()
            draft = (block * self.draft_ms + (missed * self.catch_up_ms if block else 0)) * factor
            verify = self.verify_ms(block + 1) * factor
            gamma.learn(block, kept, draft, verify, draft + verify)
            missed = 0 if block else missed + 1
            self.gammas.append(block)
            self.tokens += kept + 1
            self.ms += draft + verify
        return self.tokens / self.ms


def flat(rows: int) -> float:
    return 10 + 0.2 * rows


def steep(rows: int) -> float:
    return 10 * rows


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("acceptance", "draft_ms"), [(0.95, 0.5), (0.8, 1.0), (0.6, 2.0), (0.85, 5.0), (0.3, 0.1)])
def test_near_the_best_fixed_gamma(acceptance: float, draft_ms: float, seed: int, noise: float) -> None:
    def speed(gamma: Gamma) -> float:
        return Machine(lambda _: acceptance, draft_ms, flat, noise, seed=seed).run(gamma, 400)

    assert speed(Adaptive()) >= 0.9 * max(speed(Fixed(g)) for g in range(MOST + 1))


@pytest.mark.parametrize("rounds", [32, 128, 1000])
@pytest.mark.parametrize(
    ("acceptance", "draft_ms", "verify"),
    [(0.0, 1.0, flat), (0.0, 9.0, flat), (0.1, 3.0, flat), (0.9, 10.0, flat), (0.9, 0.0, steep)],
)
def test_never_meaningfully_below_plain_decoding(
    acceptance: float, draft_ms: float, verify: Callable[[int], float], rounds: int
) -> None:
    """What drafting loses is the grace, the share, and the one round that went over them."""
    for seed in range(5):
        machine = Machine(lambda _: acceptance, draft_ms, verify, 0.1, seed=seed)
        machine.run(Adaptive(), rounds)
        plain_ms = machine.tokens * verify(1) * 1.05  # noise adds a twentieth on average
        worst_round = MOST * draft_ms + verify(MOST + 1)
        assert machine.ms <= (plain_ms + GRACE * verify(1) + worst_round) / (1 - SHARE) * 1.03


def test_drafting_resumes_when_it_pays_again() -> None:
    """A stretch of hopeless text in between: drafting stops, is tried from time to time, and comes back."""
    machine = Machine(lambda i: 0.0 if 100 <= i < 500 else 0.9, 1.0, flat)
    machine.run(Adaptive(), 900)
    assert min(machine.gammas[20:60]) >= 4
    stopped = machine.gammas[120:500]
    assert 0 < sum(g > 0 for g in stopped) < 0.2 * len(stopped)
    wasted = sum(g * 1.0 + flat(g + 1) - flat(1) for g in stopped)  # nothing is accepted there
    assert wasted <= 0.03 * len(stopped) * flat(1)
    longest, run = 0, 0
    for g in stopped:
        run = 0 if g else run + 1
        longest = max(longest, run)
    assert longest <= LONGEST_GAP
    back = next(i for i in range(500, 900) if machine.gammas[i] >= 4)
    assert back <= 500 + LONGEST_GAP and sum(machine.gammas[back + 20 :]) / len(machine.gammas[back + 20 :]) >= 4


def test_a_draft_that_never_pays_is_still_fed() -> None:
    """Even a draft as slow as its target reads along: one token at least every LONGEST_GAP rounds."""
    machine = Machine(lambda _: 0.9, 20.0, flat)
    machine.run(Adaptive(), 1000)
    drafted = [i for i, g in enumerate(machine.gammas) if g]
    assert drafted and max(b - a for a, b in zip(drafted, [*drafted[1:], 1000], strict=True)) <= LONGEST_GAP + 1


def test_first_rounds_measure_both_ways() -> None:
    pace = Adaptive()
    assert pace.choose(3).gamma == 3 and Adaptive().choose(0).gamma == 0
    pace.learn(3, 3, 3.0, 12.0, 15.0)
    assert pace.choose(8).gamma == 0
    pace.learn(0, 0, 0.0, 10.0, 10.0)
    assert pace.choose(8).gamma == 8 and pace.choose(2).gamma == 2
    for _ in range(64):
        assert pace.choose(8).gamma > 0
        pace.learn(8, 8, 8.0, 12.0, 20.0)
    assert pace.choose(8).gamma == 0  # what a plain round takes is looked at again


def test_a_drafter_with_nothing_to_propose() -> None:
    """Prompt lookup without a match yet: it is asked again."""
    pace = Adaptive()
    for _ in range(300):
        assert pace.choose(8).gamma == 8
        pace.learn(0, 0, 0.01, 10.0, 10.0)
    pace.learn(8, 8, 0.01, 12.0, 12.0)
    assert pace.choose(8).gamma == 8
    assert Fixed(5).choose(8).gamma == 5 and Fixed(5).choose(2).gamma == 2


def test_best_by_hand() -> None:
    assert best(8, 0.0, 1.0, {1: 10.0}) == 0
    assert best(8, 1.0, 1.0, {1: 10.0}) == 8
    assert best(8, 0.9, 10.0, {1: 10.0}) == 0
    assert best(4, 0.5, 0.0, {1: 10.0, 5: 10.0}) == 4
    # E(1) = 1.5 in 12 ms beats 1 in 10 ms and E(2) = 1.75 in 14.1 ms
    assert best(2, 0.5, 1.0, {1: 10.0, 2: 11.0, 3: 12.1}) == 1
    assert best(3, 0.5, 0.0, {1: 10.0, 2: 20.0}) == 0


def test_between() -> None:
    measured = {1: 10.0, 5: 14.0, 9: 30.0}
    assert [between(measured, rows) for rows in (1, 3, 5, 7, 9, 11)] == [10, 12, 14, 22, 30, 38]
    assert between({4: 7.0}, 1) == between({4: 7.0}, 9) == 7
    assert between({3: 12.0, 5: 14.0}, 1) == 10
    assert between({1: 12.0, 5: 11.0}, 9) == 12  # noise: a wider pass is not faster


def test_parse() -> None:
    assert parse("auto") == (MOST, True) and parse("5") == (5, False)
    for text in ("", "fast", "1.5"):
        with pytest.raises(UsageError, match="gamma must be auto or 1 to 64"):
            parse(text)


def test_a_block_goes_on_while_a_token_saves_more_than_it_costs() -> None:
    """Time a token takes 10 ms / 2 tokens: a drafted token of 1 ms is worth it down to a chance of 1 in 5."""
    gamma = Adaptive()
    assert gamma.least == 0.0 == Fixed(5).least
    gamma.learn(3, 1, draft_ms=3.0, verify_ms=7.0, round_ms=10.0)
    assert gamma.least == pytest.approx(0.2)
    for _ in range(50):
        gamma.learn(1, 0, draft_ms=9.0, verify_ms=1.0, round_ms=10.0)
    assert gamma.least == MOST_LEAST


# ---- several ways to draft


COPY = Offer(copied=True, match=2)


def mixed(
    model: float, copies: float, allowed: tuple[Offer, ...] = (COPY, DRAFT), rounds: int = 2000, seed: int = 0
) -> tuple[Adaptive, list[tuple[Offer, int]], float]:
    """A text where every second round may copy: the pace, its choices, tokens per ms. A model's token takes 2 ms, a pass 10."""
    pace, random, choices, tokens, ms = Adaptive(), Random(seed), [], 0, 0.0
    for index in range(rounds):
        choice = pace.choose(64, [o for o in allowed if index % 2 or not o.copied])
        acceptance, kept = copies if choice.offer.copied else model, 0
        while kept < choice.gamma and random.random() < acceptance:
            kept += 1
        drafting, verifying = 0.0 if choice.offer.copied else 2.0 * choice.gamma, flat(choice.gamma + 1)
        pace.learn(choice.gamma, kept, drafting, verifying, drafting + verifying, choice.offer)
        choices.append((choice.offer, choice.gamma))
        tokens, ms = tokens + kept + 1, ms + drafting + verifying
    return pace, choices, tokens / ms


def test_copies_and_drafts_are_judged_apart() -> None:
    """A model that is mostly wrong is left, while copies that are right go on, and the other way round."""
    _, choices, fast = mixed(model=0.1, copies=0.8)
    assert sum(o.copied for o, g in choices if g) > 800
    assert fast > 0.95 * mixed(model=0.1, copies=0.8, allowed=(COPY,))[2] > 1.5 / flat(1)

    _, choices, fast = mixed(model=0.8, copies=0.02)
    assert sum(not o.copied for o, g in choices if g) > 1700
    assert fast > 0.95 * mixed(model=0.8, copies=0.02, allowed=(DRAFT,))[2] > 1.5 / flat(1)


def test_the_better_of_two_offers_is_taken() -> None:
    _, choices, _ = mixed(model=0.7, copies=0.7)
    assert sum(o.copied for o, g in choices[1::2] if g) > 900  # as good, and free
    _, choices, _ = mixed(model=0.9, copies=0.2)
    assert sum(not o.copied for o, g in choices[1::2] if g) > 900


def test_without_an_offer_nothing_is_drafted() -> None:
    pace = Adaptive()
    assert pace.choose(8, ()).gamma == 0
    pace.learn(0, 0, 0.0, 10.0, 10.0)
    assert pace.choose(8, (COPY,)) == Choice(8, COPY)
    assert Fixed(5).choose(8, (COPY, DRAFT)) == Choice(5, COPY)


def test_a_model_is_fed_now_and_then_while_copies_pay() -> None:
    pace = Adaptive()
    rounds = []
    for index in range(3 * LONGEST_GAP):
        choice = pace.choose(8, (COPY, DRAFT))
        kept = choice.gamma if choice.offer.copied else 0
        drafting = 0.0 if choice.offer.copied else 4.0 * choice.gamma
        pace.learn(choice.gamma, kept, drafting, 10.0, 10.0 + drafting, choice.offer)
        if choice.gamma and not choice.offer.copied:
            rounds.append(index)
    assert rounds[0] == 0 and len(rounds) > 2 and max(b - a for a, b in pairwise(rounds)) <= LONGEST_GAP + 2
