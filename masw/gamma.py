"""How many tokens to draft in a round, and from what: fixed, or chosen on what the rounds before it cost and brought. Pure numbers, no
torch.

The choice is made before anything of the round is drafted, from the text so far and earlier rounds alone; within the block, `least` may
end it behind a token that the draft itself is unsure of. For any gamma so chosen the accept rule emits tokens of the target's
distribution given the text so far, hence the output keeps it however gamma varies. (Times decide too, so a seed no longer fixes a
sampled text; a greedy one is the target's own in any case.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from masw.cost import tokens_per_iteration
from masw.errors import UsageError

MOST = 8  # drafted tokens at most with `--gamma auto`
MEMORY = 0.9  # weight that a judged token keeps from one drafting round to the next
FADING = 0.98  # and from one plain round to the next: old evidence against drafting fades, so that it is tried again
PRIOR = 0.8  # acceptance of a model's token before anything was judged, worth one token
COPIED = {1: 0.3, 2: 0.5, 3: 0.6}
"""And of a copied one, by the tokens before it that recur; COPIED_MORE behind more of them. What prompt lookup had on 21 answers of
the two CPU pairs to reports, meetings and news (docs/LOG.md): 0.5, 1.2 and 1.5 accepted tokens of a block, 3 behind four and more."""
COPIED_MORE = 0.7
SHARE = 0.02  # of all time may go into drafting, by a model and by copies each, that turns out slower than plain decoding,
GRACE = 4.0  # beside this many plain rounds at the start
RECHECK = 64  # drafting rounds after which a plain one is measured again: it gets slower as the text grows
LONGEST_GAP = 256  # plain rounds after which one token is drafted anyway, so that a draft's memory never has much to catch up
MOST_LEAST = 0.9  # a block may always go on while the draft is surer than this
SAMPLES = 9  # latest measurements of a kind, whose median counts


@dataclass(frozen=True)
class Offer:
    """A way to draft the next block."""

    copied: bool = False  # from the text, at no cost; else drafted, token by token
    match: int = 0  # of a copy: tokens before it that recur

    @property
    def prior(self) -> float:
        """Acceptance of its tokens before anything was judged."""
        return COPIED.get(self.match, COPIED_MORE) if self.copied else PRIOR


DRAFT = Offer()


@dataclass(frozen=True)
class Choice:
    gamma: int  # tokens to draft; 0: none
    offer: Offer = DRAFT  # how


class Gamma(Protocol):
    """Asked before a round, told after it."""

    def choose(self, room: int, offers: Sequence[Offer] = (DRAFT,)) -> Choice:
        """Tokens to draft in the next round, 0 to `room`, in one of the ways that a drafter `offers`, the one that it prefers first."""
        ...

    @property
    def least(self) -> float:
        """The probability of being accepted whole below which a block is not worth another drafted token."""
        ...

    def learn(
        self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float, offer: Offer = DRAFT
    ) -> None:
        """What the round brought: `accepted` of `drafted` tokens and one of the target's own."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same in every round."""

    gamma: int
    least: float = 0.0

    def choose(self, room: int, offers: Sequence[Offer] = (DRAFT,)) -> Choice:
        return Choice(min(self.gamma, room), offers[0] if offers else DRAFT)

    def learn(
        self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float, offer: Offer = DRAFT
    ) -> None:
        """Nothing to learn."""


def rate(gamma: int, acceptance: float, draft_ms: float, verify_ms: dict[int, float]) -> float:
    """Expected tokens per ms of a round: E(gamma) / (gamma * t_d + t_v(gamma + 1)), E as in arXiv 2211.17192, `verify_ms` by rows of the
    pass, as far as measured."""
    return tokens_per_iteration(acceptance, gamma) / max(1e-9, gamma * draft_ms + between(verify_ms, gamma + 1))


def best(most: int, acceptance: float, draft_ms: float, verify_ms: dict[int, float]) -> int:
    """The gamma of 0..most with the highest `rate`, among equals the smallest."""
    return max(range(most + 1), key=lambda gamma: (rate(gamma, acceptance, draft_ms, verify_ms), -gamma))


def between(measured: dict[int, float], rows: int) -> float:
    """Time of a pass of `rows` rows, on the line through the nearest measured counts; never less than a shorter pass takes."""
    known = sorted(measured)
    if rows in measured or len(known) == 1:
        return measured.get(rows, measured[known[0]])
    above = next((i for i, count in enumerate(known) if count > rows), len(known) - 1)
    low, high = known[max(0, above - 1)], known[max(1, above)]
    slope = max(0.0, (measured[high] - measured[low]) / (high - low))
    return measured[low] + slope * (rows - low)


@dataclass
class _Judged:
    """Fading counts of tokens from one kind of offer."""

    kept: float = 0.0
    judged: float = 0.0

    def fade(self, share: float) -> None:
        self.kept, self.judged = self.kept * share, self.judged * share


@dataclass
class Adaptive:
    """The offer and gamma of the highest `rate` on running estimates, with a ledger: time lost against plain decoding stays below SHARE
    of all, beside the GRACE.

    The first round drafts, the second is plain; then both costs are known. Where drafting does not pay it stops. Its memory is fed when it
    resumes: a drafter reads all it has missed in one block.
    """

    most: int = MOST
    _draft: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # ms a token of the model's
    _verify: dict[int, deque[float]] = field(default_factory=dict)  # ms a pass, by rows
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # ms a round without a draft
    _found: defaultdict[Offer, _Judged] = field(default_factory=lambda: defaultdict(_Judged))
    _lost_ms: defaultdict[bool, float] = field(default_factory=lambda: defaultdict(float))
    """What drafting has cost beyond plain decoding of as many tokens, by whether it was copying; never negative."""
    _all_ms: float = 0.0
    _emitted: int = 0
    _drafting: int = 0  # drafting rounds since the last plain one
    _idle: int = 0  # rounds since the model's last

    def acceptance(self, offer: Offer = DRAFT) -> float:
        """Estimated probability that a token so drafted is accepted."""
        found = self._found[offer]
        return (found.kept + offer.prior) / (found.judged + 1)

    def choose(self, room: int, offers: Sequence[Offer] = (DRAFT,)) -> Choice:
        most = min(self.most, room)
        if most == 0 or (self._drafting and not self._plain) or self._drafting >= RECHECK:
            return Choice(0)
        if DRAFT in offers and not self._draft:  # also where a drafter was asked and had nothing to propose
            return Choice(most)
        if DRAFT in offers and self._idle >= LONGEST_GAP:
            return Choice(1)
        if not self._plain:
            return Choice(most, offers[0]) if offers else Choice(0)
        bearable = GRACE * median(self._plain) + SHARE * self._all_ms
        times = {rows: median(found) for rows, found in self._verify.items()}
        chosen, highest = Choice(0), rate(0, 0.0, 0.0, times)
        for offer in offers:
            if self._lost_ms[offer.copied] > bearable:
                continue
            costs = self.acceptance(offer), 0.0 if offer.copied else median(self._draft), times
            gamma = best(most, *costs)
            if (found := rate(gamma, *costs)) > highest:
                chosen, highest = Choice(gamma, offer), found
        return chosen

    @property
    def least(self) -> float:
        """One more token costs t_d and saves, if all goes well, the time that a token takes: worth it down to the ratio of the two."""
        if not self._draft or not self._emitted:
            return 0.0
        return min(MOST_LEAST, median(self._draft) * self._emitted / self._all_ms)

    def learn(
        self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float, offer: Offer = DRAFT
    ) -> None:
        self._all_ms += round_ms
        self._emitted += accepted + 1
        self._verify.setdefault(drafted + 1, deque(maxlen=SAMPLES)).append(verify_ms)
        for other, found in self._found.items():
            if drafted == 0 or other != offer:
                found.fade(FADING)
        self._idle = 0 if drafted and not offer.copied else self._idle + 1
        if drafted == 0:
            self._plain.append(round_ms)
            self._drafting = 0
            return
        if not offer.copied:
            self._draft.append(draft_ms / drafted)
        self._drafting += 1
        mine = self._found[offer]
        mine.fade(MEMORY)
        mine.kept += accepted
        mine.judged += min(accepted + 1, drafted)  # tokens behind the first refusal were not judged
        if self._plain:
            lost = self._lost_ms[offer.copied] + round_ms - (accepted + 1) * median(self._plain)
            self._lost_ms[offer.copied] = max(0.0, lost)


def parse(text: str) -> tuple[int, bool]:
    """'5' -> (5, False); 'auto' -> (MOST, True). Raises UsageError for anything else."""
    if text == "auto":
        return MOST, True
    try:
        return int(text), False
    except ValueError:
        raise UsageError(f"gamma must be auto or 1 to 64 drafted tokens, not '{text}'") from None
