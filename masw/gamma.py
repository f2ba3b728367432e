"""How many tokens to draft in a round: fixed, or chosen on what the rounds before it cost and brought. Pure numbers, no torch.

The choice is made before anything of the round is drafted, from earlier rounds alone; within the block, `least` may end it behind a
token that the draft itself is unsure of. For any gamma so chosen the accept rule emits tokens of the target's distribution given the
text so far, hence the output keeps it however gamma varies. (Times decide too, so
a seed no longer fixes a sampled text; a greedy one is the target's own in any case.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from masw.cost import tokens_per_iteration
from masw.errors import UsageError

MOST = 8  # drafted tokens at most with `--gamma auto`
MEMORY = 0.9  # weight that a judged token keeps from one drafting round to the next
FADING = 0.98  # and from one plain round to the next: old evidence against drafting fades, so that it is tried again
PRIOR = 0.8  # acceptance before anything was judged, worth one token
SHARE = 0.02  # of all time may go into drafting that turns out slower than plain decoding,
GRACE = 4.0  # beside this many plain rounds at the start
RECHECK = 64  # drafting rounds after which a plain one is measured again: it gets slower as the text grows
LONGEST_GAP = 256  # plain rounds after which one token is drafted anyway, so that a draft's memory never has much to catch up
MOST_LEAST = 0.9  # a block may always go on while the draft is surer than this
SAMPLES = 9  # latest measurements of a kind, whose median counts


class Gamma(Protocol):
    """Asked before a round, told after it."""

    def choose(self, room: int) -> int:
        """Tokens to draft in the next round, 0 to `room`."""
        ...

    @property
    def least(self) -> float:
        """The probability of being accepted whole below which a block is not worth another drafted token."""
        ...

    def learn(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float) -> None:
        """What the round brought: `accepted` of `drafted` tokens and one of the target's own."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same in every round."""

    gamma: int
    least: float = 0.0

    def choose(self, room: int) -> int:
        return min(self.gamma, room)

    def learn(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float) -> None:
        """Nothing to learn."""


def best(most: int, acceptance: float, draft_ms: float, verify_ms: dict[int, float]) -> int:
    """The gamma of 0..most with the most expected tokens per ms: E(gamma) / (gamma * t_d + t_v(gamma + 1)).

    E as in arXiv 2211.17192, `verify_ms` by rows of the pass, as far as measured. Among equals the smallest.
    """

    def rate(gamma: int) -> float:
        return tokens_per_iteration(acceptance, gamma) / max(1e-9, gamma * draft_ms + between(verify_ms, gamma + 1))

    return max(range(most + 1), key=lambda gamma: (rate(gamma), -gamma))


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
class Adaptive:
    """`best` on running estimates, with a ledger: time lost against plain decoding stays below SHARE of all, beside the GRACE.

    The first round drafts, the second is plain; then both costs are known. Where drafting does not pay it stops. Its memory is fed when it
    resumes: a drafter reads all it has missed in one block.
    """

    most: int = MOST
    _draft: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # ms a drafted token
    _verify: dict[int, deque[float]] = field(default_factory=dict)  # ms a pass, by rows
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # ms a round without a draft
    _kept: float = 0.0  # fading count of accepted tokens
    _judged: float = 0.0  # and of judged ones
    _lost_ms: float = 0.0  # what drafting has cost beyond plain decoding of as many tokens; never negative
    _all_ms: float = 0.0
    _emitted: int = 0
    _drafting: int = 0  # drafting rounds since the last plain one
    _idle: int = 0  # plain rounds since the last drafting one

    @property
    def acceptance(self) -> float:
        """Estimated probability that a drafted token is accepted."""
        return (self._kept + PRIOR) / (self._judged + 1)

    def choose(self, room: int) -> int:
        most = min(self.most, room)
        if most == 0 or (self._draft and not self._plain) or self._drafting >= RECHECK:
            return 0
        if not self._draft:  # also where a drafter was asked and had nothing to propose
            return most
        if self._idle >= LONGEST_GAP:
            return 1
        if self._lost_ms > GRACE * median(self._plain) + SHARE * self._all_ms:
            return 0
        times = {rows: median(found) for rows, found in self._verify.items()}
        return best(most, self.acceptance, median(self._draft), times)

    @property
    def least(self) -> float:
        """One more token costs t_d and saves, if all goes well, the time that a token takes: worth it down to the ratio of the two."""
        if not self._draft or not self._emitted:
            return 0.0
        return min(MOST_LEAST, median(self._draft) * self._emitted / self._all_ms)

    def learn(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float) -> None:
        self._all_ms += round_ms
        self._emitted += accepted + 1
        self._verify.setdefault(drafted + 1, deque(maxlen=SAMPLES)).append(verify_ms)
        if drafted == 0:
            self._plain.append(round_ms)
            self._drafting, self._idle = 0, self._idle + 1
            self._kept, self._judged = self._kept * FADING, self._judged * FADING
            return
        self._draft.append(draft_ms / drafted)
        self._drafting, self._idle = self._drafting + 1, 0
        # Tokens behind the first refusal were not judged.
        self._kept = self._kept * MEMORY + accepted
        self._judged = self._judged * MEMORY + min(accepted + 1, drafted)
        if self._plain:
            self._lost_ms = max(0.0, self._lost_ms + round_ms - (accepted + 1) * median(self._plain))


def parse(text: str) -> tuple[int, bool]:
    """'5' -> (5, False); 'auto' -> (MOST, True). Raises UsageError for anything else."""
    if text == "auto":
        return MOST, True
    try:
        return int(text), False
    except ValueError:
        raise UsageError(f"gamma must be auto or 1 to 64 drafted tokens, not '{text}'") from None
