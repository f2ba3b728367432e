"""The accept rule: the output of a round has the target's distribution, by enumeration, by a grid of uniforms and by chi-square.

Legend: p target, q draft, gamma drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from masw.config import MemoryShape
from masw.engine import Settings, Target
from masw.errors import UsageError
from masw.gamma import DRAFT, Choice, Offer
from masw.methods import METHODS, MemoryOptions
from masw.verify import Sampling, Verdict, accept, accept_greedy, accept_probability, distribution, draw, likeliest, residual
from tests.helpers import drafter_for, noisy, reference_logits, run, tiny_config, tiny_decoder

Context = tuple[int, ...]
Rule = Callable[[Tensor, Tensor], Tensor]  # (p, q) of the refused position -> what replaces the token


def tables(
    sampling: Sampling, vocab: int, gamma: int, kind: str, seed: int = 0
) -> tuple[dict[Context, Tensor], dict[Context, Tensor]]:
    """p and q (fp64) after every context of up to gamma tokens."""
    generator = torch.Generator().manual_seed(seed)

    def logits() -> Tensor:
        return torch.randn(vocab, generator=generator, dtype=torch.float64) * 2

    p: dict[Context, Tensor] = {}
    q: dict[Context, Tensor] = {}
    for length in range(gamma + 1):
        for context in itertools.product(range(vocab), repeat=length):
            target, draft = logits(), logits()
            if kind == "equal":
                draft = target
            elif kind == "disjoint":
                half = torch.arange(vocab) < vocab // 2
                target, draft = target.masked_fill(half, float("-inf")), draft.masked_fill(~half, float("-inf"))
            elif kind == "nested":  # q is p cut down and scaled: the residual lives on what q lacks
                draft = target.masked_fill(torch.arange(vocab) == 0, float("-inf"))
            elif kind == "nearly equal":  # rounding leaves next to nothing of the residual
                draft = target + 1e-12 * draft
            p[context], q[context] = distribution(target, sampling), distribution(draft, sampling)
    return p, q


def exact_round(p: dict[Context, Tensor], q: dict[Context, Tensor], vocab: int, gamma: int, replace: Rule) -> Tensor:
    """Distribution [V^(gamma + 1)] of the first gamma + 1 tokens: one round, continued by the target where it emitted fewer."""
    out: Counter[Context] = Counter()

    def extend(prefix: Context, mass: float) -> None:
        if len(prefix) == gamma + 1:
            out[prefix] += mass  # type: ignore[assignment]
            return
        for token in range(vocab):
            if p[prefix][token] > 0:
                extend((*prefix, token), mass * float(p[prefix][token]))

    for block in itertools.product(range(vocab), repeat=gamma):
        mass = math.prod(float(q[block[:i]][x]) for i, x in enumerate(block))
        if mass == 0:
            continue
        for kept, token in enumerate(block):
            here = block[:kept]
            keep = float(accept_probability(p[here], q[here])[token])
            if keep < 1:
                for other, share in enumerate(replace(p[here], q[here]).tolist()):
                    if share > 0:
                        extend((*here, other), mass * (1 - keep) * share)
            mass *= keep
        extend(block, mass)
    return torch.tensor([out[key] for key in itertools.product(range(vocab), repeat=gamma + 1)], dtype=torch.float64)


def target_alone(p: dict[Context, Tensor], vocab: int, gamma: int) -> Tensor:
    sequences = itertools.product(range(vocab), repeat=gamma + 1)
    return torch.tensor([math.prod(float(p[s[:i]][x]) for i, x in enumerate(s)) for s in sequences], dtype=torch.float64)


def total_variation(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.7),
    "hot": Sampling(temperature=3.0),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "all three": Sampling(temperature=0.9, top_k=3, top_p=0.9),
}
KINDS = ("different", "equal", "disjoint", "nested", "nearly equal")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("vocab", "gamma"), [(4, 1), (4, 2), (4, 3)])
def test_total_variation_of_a_round(vocab: int, gamma: int, name: str, kind: str) -> None:
    p, q = tables(SAMPLINGS[name], vocab, gamma, kind)
    out = exact_round(p, q, vocab, gamma, residual)
    assert float(out.sum()) == pytest.approx(1, abs=1e-9)
    assert total_variation(out, target_alone(p, vocab, gamma)) <= 1e-6


@pytest.mark.parametrize("name", ["temperature", "hot", "top-k", "all three"])
def test_the_enumeration_catches_broken_rules(name: str) -> None:
    """Drawing the replacement from p, or from a softmax of the residual, and a q of before top-k: each shows."""
    p, q = tables(SAMPLINGS[name], 4, 2, "different")
    exact = target_alone(p, 4, 2)
    assert total_variation(exact_round(p, q, 4, 2, lambda p, q: p), exact) > 1e-3
    assert total_variation(exact_round(p, q, 4, 2, lambda p, q: (p - q).clamp_min(0).softmax(0)), exact) > 1e-3


def test_q_must_be_what_the_token_was_drawn_from() -> None:
    """Judging with the q of before top-k a token that was drawn after it changes the output."""
    narrow, wide = Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0)
    p, drawn_from = tables(narrow, 4, 1, "different")
    _, judged_with = tables(wide, 4, 1, "different")
    out: Counter[int] = Counter()
    for token, mass in enumerate(drawn_from[()].tolist()):
        keep = float(accept_probability(p[()], judged_with[()])[token])
        out[token] += mass * keep  # type: ignore[assignment]
        for other, share in enumerate(residual(p[()], judged_with[()]).tolist()):
            out[other] += mass * (1 - keep) * share  # type: ignore[assignment]
    assert total_variation(torch.tensor([out[t] for t in range(4)], dtype=torch.float64), p[()]) > 1e-3


# ---- accept() follows accept_probability, residual and draw


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_accept_on_a_grid_of_uniforms(name: str, kind: str) -> None:
    """For every block that can be drafted and a grid of uniforms: kept below the threshold, the right row for the replacement."""
    vocab, gamma = 4, 2
    p, q = tables(SAMPLINGS[name], vocab, gamma, kind, seed=3)
    grid = [0.0, 0.01, 0.2, 0.45, 0.7, 0.93, 1 - 2**-53]
    for block in itertools.product(range(vocab), repeat=gamma):
        if any(q[block[:i]][x] == 0 for i, x in enumerate(block)):
            continue
        rows = [block[:i] for i in range(gamma + 1)]
        target, draft = torch.stack([p[r] for r in rows]), torch.stack([q[r] for r in rows[:-1]])
        for uniforms in itertools.product(grid, repeat=gamma + 1):
            kept = 0
            while kept < gamma and uniforms[kept] < float(accept_probability(target[kept], draft[kept])[block[kept]]):
                kept += 1
            last = target[gamma] if kept == gamma else residual(target[kept], draft[kept])
            verdict = accept(target, draft, block, uniforms)
            assert verdict == Verdict(kept, draw(last, uniforms[gamma]), gamma)
            assert verdict.bonus == (kept == gamma)
            assert target[kept][verdict.token] > 0  # the target can always say what was emitted


def test_accept_with_nothing_drafted_is_a_draw_from_the_target() -> None:
    p = torch.tensor([[0.25, 0.5, 0.25]])
    assert [accept(p, p[:0], [], [u]).token for u in (0.0, 0.24, 0.26, 0.74, 0.76, 0.999)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("best", "drafted", "expected"),
    [
        ([5, 6, 7], [5, 6], Verdict(2, 7, 2)),
        ([5, 6, 7], [5, 9], Verdict(1, 6, 2)),
        ([5, 6, 7], [9, 6], Verdict(0, 5, 2)),  # what matches after a miss does not count
        ([5], [], Verdict(0, 5, 0)),
    ],
)
def test_accept_greedy(best: list[int], drafted: list[int], expected: Verdict) -> None:
    assert accept_greedy(best, drafted) == expected


def test_accept_greedy_is_accept_on_one_hot_distributions() -> None:
    for best in itertools.product(range(3), repeat=3):
        for drafted in itertools.product(range(3), repeat=2):
            p, q = torch.eye(3)[list(best)], torch.eye(3)[list(drafted)]
            for u in (0.0, 0.5, 1 - 2**-53):
                assert accept(p, q, drafted, [u] * 3) == accept_greedy(best, drafted)


# ---- draw, accept_probability, residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_never_returns_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    ends = [0.0, 2**-53, 1e-9, 0.5, 1 - 1e-9, 1 - 2**-53]
    vectors = [[0, 0.5, 0, 0.5, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1e-30, 0, 1e-38, 0]]
    for values in vectors:
        p = torch.tensor(values, dtype=dtype)
        for u in [*ends, *torch.linspace(0, 1 - 2**-53, 101, dtype=torch.float64).tolist()]:
            assert p[draw(p, u)] > 0
    large = torch.zeros(50_000, dtype=dtype)
    large[::7] = torch.rand(len(large[::7]), generator=torch.Generator().manual_seed(0)).to(dtype)
    large /= large.sum()
    for u in ends:
        assert large[draw(large, u)] > 0


def test_draw_gives_each_token_its_share() -> None:
    p = torch.tensor([0.1, 0.0, 0.2, 0.7], dtype=torch.float64)
    counts = Counter(draw(p, (i + 0.5) / 1000) for i in range(1000))
    assert [counts[t] for t in range(4)] == [100, 0, 200, 700]


def test_accept_probability() -> None:
    p, q = torch.tensor([0.2, 0.5, 0.0, 0.3, 0.0]), torch.tensor([0.4, 0.25, 0.1, 0.0, 0.0])
    torch.testing.assert_close(accept_probability(p, q), torch.tensor([0.5, 1.0, 0.0, 1.0, 0.0]))
    tiny = torch.tensor([1e-42, 1 - 1e-42])
    assert accept_probability(tiny, tiny).isfinite().all()


def test_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    torch.testing.assert_close(residual(p, q), torch.tensor([1.0, 0.0, 0.0]))  # a softmax would give every token a share
    assert torch.equal(residual(p, p), p)  # zero mass: no division by it
    torch.testing.assert_close(
        residual(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])), torch.tensor([0.5, 0.5, 0.0])
    )


# ---- distributions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n in SAMPLINGS if n != "greedy"])
def test_distribution_is_what_transformers_samples_from(name: str, dtype: torch.dtype) -> None:
    """Temperature, then top-k, then top-p, as `generate` orders its warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    sampling = SAMPLINGS[name]
    logits = (torch.randn(64, 50, generator=torch.Generator().manual_seed(7)) * 3).to(dtype)
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.to(torch.promote_types(dtype, torch.float32)))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    ours = distribution(logits, sampling)
    torch.testing.assert_close(ours, scores.softmax(-1), rtol=1e-5, atol=1e-7)
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(ours > 0, scores > float("-inf"))


def test_distribution_by_hand() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()

    def of(**options: float) -> list[float]:
        return [round(x, 4) for x in distribution(logits, Sampling(**{"temperature": 1.0, **options})).tolist()]  # type: ignore[arg-type]

    assert of() == [0.5, 0.3, 0.15, 0.05]
    assert of(top_k=2) == [0.625, 0.375, 0, 0]
    assert of(top_k=99) == of()
    assert of(top_p=0.49) == [1, 0, 0, 0]  # the first token always stays
    assert of(top_p=0.51) == [0.625, 0.375, 0, 0]
    assert of(top_k=2, top_p=0.6) == [1, 0, 0, 0]  # top-p is of what top-k left: 0.625 reaches it
    assert of(temperature=0.5) == [round(x / 0.365, 4) for x in (0.25, 0.09, 0.0225, 0.0025)]
    assert of(temperature=0.0) == [1, 0, 0, 0]


def test_the_lowest_temperature_does_not_overflow() -> None:
    logits = torch.tensor([[10.0, 30.0, -200.0], [0.0, -1.0, float("-inf")]])
    assert distribution(logits, Sampling(temperature=1e-4)).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_padded_logits_get_no_probability(sampling: Sampling) -> None:
    logits = torch.tensor([1.0, 0.5, 0.2, float("-inf"), float("-inf")])
    p = distribution(logits, sampling)
    assert p[3:].tolist() == [0, 0] and float(p.sum()) == pytest.approx(1)
    torch.testing.assert_close(p[:3], distribution(logits[:3], sampling))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": 101.0},
        {"temperature": 1e-300},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_sampling_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UsageError) as error:
        Sampling(**options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value) and str(next(iter(options.values()))) in str(error.value)


def test_sampling_at_the_edge_of_the_range() -> None:
    assert Sampling().greedy and Sampling(0.0, 0, 1.0, 2**63 - 1).greedy
    assert not Sampling(temperature=100.0, top_k=10**9, top_p=1e-9).greedy


# ---- the whole loop


class Streak:
    """A gamma that depends on what was accepted before: one more than that, or none after a refusal."""

    least = 0.0

    def __init__(self, most: int) -> None:
        self.next = 1

    def choose(self, room: int, offers: Sequence[Offer] = (DRAFT,)) -> Choice:
        return Choice(min(self.next, room), offers[0] if offers else DRAFT)

    def learn(
        self, drafted: int, accepted: int, draft_ms: float, verify_ms: float, round_ms: float, offer: Offer = DRAFT
    ) -> None:
        self.next = accepted + 1 if drafted == 0 or accepted else 0


# The prompt's end recurs and what followed it is likely again, so that there is something to copy; most of it leaves the window, so
# that entries are selected.
TABLE = [(name, Sampling(temperature=1.3, top_k=6, top_p=0.97), {}, [1, 4, 2, 4, 1, 4, 2], 2, 800) for name in METHODS]
VARIANTS: list[tuple[str, Sampling, dict[str, Any]]] = [
    ("full", Sampling(temperature=1.0), {}),
    ("full", Sampling(temperature=0.8, top_k=4), {}),
    ("full", Sampling(temperature=1.1, top_p=0.8), {}),
    ("eagle", Sampling(temperature=0.9, top_k=5, top_p=0.95), {}),
    ("snapkv", Sampling(temperature=2.0), {}),
    ("full", Sampling(temperature=1.0), {"adaptive": True}),
    ("full", Sampling(temperature=1.0), {"least": 0.4}),
]


@pytest.mark.parametrize(
    ("method", "sampling", "more", "prompt", "window", "runs"),
    [*TABLE, *((*row, [1, 4, 2], 1, 2000) for row in VARIANTS)],
    ids=str,
)
def test_chi_square_of_the_whole_loop(
    method: str,
    sampling: Sampling,
    more: dict[str, Any],
    prompt: list[int],
    window: int,
    runs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafting, verifying and drawing with tiny models, seed after seed: the counts are those of the target alone. Every row of METHODS."""
    monkeypatch.setattr("masw.engine.Adaptive", Streak)
    vocab, options = 7, MemoryOptions(0, window, 1)
    decoder = tiny_decoder(tiny_config(vocab=vocab, layers=1), seed=2)
    draft = noisy(decoder, 0.3)
    first = distribution(reference_logits(decoder, torch.tensor([prompt]), MemoryShape())[0, -1], sampling)
    expected = {}
    for x in range(vocab):
        second = distribution(reference_logits(decoder, torch.tensor([[*prompt, x]]), MemoryShape())[0, -1], sampling)
        expected.update({(x, y): float(first[x] * second[y]) * runs for y in range(vocab)})

    target, counts, accepted, drafted, copied = Target(decoder, 16), Counter[Sequence[int]](), 0, 0, 0
    for seed in range(runs):
        one = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=97 * seed)
        drafter = drafter_for(method, draft, sampling=one, options=options, tokens=16)
        result = run(target, drafter, prompt, Settings(3, gamma=2, sampling=one, **more))
        counts[tuple(result.tokens[:2])] += 1
        accepted += sum(r.accepted for r in result.rounds)
        drafted += sum(len(r.drafted) for r in result.rounds)
        copied += sum(event.data["read"] == 0 for event in result.recorder.trace.of("draft"))
    row = METHODS[method]
    if not row.drafts:
        assert drafted == 0
    else:
        assert (0.1 if row.copies else 0.2) < accepted / drafted < 0.9  # both branches of the rule are at work
        assert (copied > 0) == row.copies and (copied < drafted) == (row.shape is not None)
    if row.shape is not None and (shape := row.shape(options)).budget is not None and window > 1:
        assert replace(shape, prompt=len(prompt) - 1).selected > 0
    assert all(expected[pair] > 0 for pair in counts)
    common = [pair for pair, mean in expected.items() if mean >= 5]
    rest = sum(expected.values()) - sum(expected[pair] for pair in common)
    statistic = sum((counts[pair] - expected[pair]) ** 2 / expected[pair] for pair in common)
    freedom = len(common) - 1
    if rest >= 5:
        statistic += (runs - sum(counts[pair] for pair in common) - rest) ** 2 / rest
        freedom += 1
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal; 3.3 sigma is one in two thousand
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_likeliest_token_is_the_first_of_equal_ones(dtype: torch.dtype) -> None:
    """bf16 logits tie often; draft and target must break a tie alike, and as transformers does (argmax)."""
    logits = torch.randint(0, 9, (5, 4001), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(likeliest(logits), logits.argmax(-1))
    assert likeliest(logits).tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert int(likeliest(logits[0])) == int(likeliest(logits)[0])
