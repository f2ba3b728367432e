"""A session over the seeded random pair: what it refuses beforehand, what runs share, where two outputs part."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from masw import cost
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.eagle import EagleHead, EagleInfo
from masw.engine import Settings
from masw.errors import UsageError
from masw.methods import METHODS, MemoryOptions
from masw.session import RunOptions, Session, adaptor_for
from masw.verify import Sampling
from masw.zoo import Pair, load_pair
from tests.helpers import CPU, random_tokens

PROMPT = random_tokens(80, 256, 2)[0].tolist()
MEMORY = MemoryOptions(2, 16, 4)


@pytest.fixture(scope="module")
def tiny() -> Pair:
    return load_pair("tiny", CPU, torch.float32)


def options(
    method: str = "masw",
    new: int = 20,
    gamma: int = 4,
    sampling: Sampling | None = None,
    adaptor: str = "none",
    eagle: Path | str = "auto",
) -> RunOptions:
    return RunOptions(method, MEMORY, Settings(new, gamma, sampling or Sampling()), adaptor, eagle=str(eagle))


@pytest.fixture(scope="module")
def head(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eagle head for the tiny target that nobody trained."""
    path = tmp_path_factory.mktemp("eagle") / "head.safetensors"
    EagleHead.copied(tiny.target.decoder, EagleInfo(tiny.target.name)).save(path, tokens=12, data=["x"])
    return path


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_targets_own_output(tiny: Pair, head: Path, method: str) -> None:
    session = Session(tiny)
    reference = session.run(PROMPT, options("none"))
    run = session.run(PROMPT, options(method, eagle=head))
    assert list(reference) and list(run)
    assert run.summary().tokens == reference.summary().tokens and len(run.summary().tokens) == 20
    assert session.difference(PROMPT, run.summary().tokens, reference.summary().tokens) is None


def test_the_header_says_what_was_run(tiny: Pair) -> None:
    run = Session(tiny).run(PROMPT, options())
    header, draft = run.trace.header, tiny.draft.config
    assert (header["pair"], header["method"], header["prompt_tokens"]) == ("tiny", "masw", 80)
    assert header["memory"] == {"sinks": 2, "window": 16, "stride": 4, "rollback": 16, "budget": None, "prompt": None}
    assert header["settings"]["gamma"] == 4 and header["settings"]["sampling"]["temperature"] == 0.0
    kv = header["draft_kv"]
    assert kv["allocated_bytes"] == kv["predicted_bytes"] == cost.kv_bytes(draft, MemoryShape(2, 16, 4), 100, 4)
    assert kv["full_bytes"] == cost.kv_bytes(draft, MemoryShape(), 100, 4)
    assert Session(tiny).run(PROMPT, options("none")).trace.header["memory"] is None


def test_the_header_says_which_head_drafted(tiny: Pair, head: Path) -> None:
    """With its token budget, beside bytes that are those of its one layer."""
    session = Session(tiny)
    header = session.run(PROMPT, options("eagle", eagle=head)).trace.header
    assert header["eagle"] == {"file": "head.safetensors", "base": tiny.target.name, "tokens": 12, "provenance": {"data": ["x"]}}
    one = replace(tiny.target.config, layers=1)
    assert (
        header["draft_kv"]["allocated_bytes"]
        == header["draft_kv"]["predicted_bytes"]
        == cost.kv_bytes(one, MemoryShape(), 100, 4)
    )
    assert header["draft_weights"] == "float32" and "adaptor" not in header
    assert "eagle" not in session.run(PROMPT, options("full")).trace.header
    assert session.eagle_head(str(head))[0] is session.eagle_head(str(head))[0]  # read once


def test_eagle_needs_a_head_for_this_target(tiny: Pair, head: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="no eagle head for the target 'tiny-4' comes with masw; train one with `masw train-eagle`"
    ):
        Session(tiny).run(PROMPT, options("eagle"))
    other = tmp_path / "other.safetensors"
    EagleHead.copied(tiny.draft.decoder, EagleInfo(tiny.draft.name)).save(other)
    with pytest.raises(UsageError, match="belongs to the target 'tiny-2', not 'tiny-4'"):
        Session(tiny).run(PROMPT, options("eagle", eagle=other))
    Adaptor.copied(tiny.draft.decoder, AdaptorInfo(tiny.draft.name, ())).save(other)
    for path, words in ((other, "is not an eagle head that masw wrote"), (tmp_path / "none", "no eagle head at")):
        with pytest.raises(UsageError, match=words) as error:
            Session(tiny).run(PROMPT, options("eagle", eagle=path))
        assert "\n" not in str(error.value)


def test_the_clock_starts_with_the_run_not_when_it_is_prepared(tiny: Pair) -> None:
    job = Session(tiny).run(PROMPT, options())
    time.sleep(0.3)
    begun = time.perf_counter()
    for _ in job:
        pass
    took = (time.perf_counter() - begun) * 1e3
    assert 0 < job.trace.events[0].at_ms <= job.trace.events[-1].at_ms <= took


def test_a_document_that_is_held_already_needs_no_second_place(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    session, total = Session(tiny), len(PROMPT) + 20
    need = session.run_bytes(options(), total) - tiny.target.decoder.nbytes - tiny.draft.decoder.nbytes
    kv = cost.kv_bytes(tiny.target.config, MemoryShape(), total, 4)
    assert session.held_bytes(total) == 0
    for _ in session.run(PROMPT, options()):
        pass
    assert session.held() and session.held_bytes(total) == kv and session.held_bytes(4 * total) == 0
    monkeypatch.setattr("masw.session.free_bytes", lambda _: need - kv)
    session.run(PROMPT, options())
    with pytest.raises(UsageError, match="are free"):
        Session(tiny).run(PROMPT, options())


def test_a_document_longer_than_the_context_is_refused(tiny: Pair) -> None:
    """The draft's limit counts too, not the target's alone."""
    session = Session(tiny)
    assert session.context_limit == min(tiny.draft.config.max_position, tiny.target.config.max_position) == 8192
    with pytest.raises(UsageError, match=r"8,193 tokens, the pair has positions for 8,192") as error:
        session.run([1] * 8173, options())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["snapkv", "hybrid"])
def test_the_header_of_a_memory_that_selects(tiny: Pair, method: str) -> None:
    """Bytes of its buffers after the prompt, and the peak before it: both as measured."""
    small = options(method)
    run = Session(tiny).run(PROMPT, replace(small, settings=replace(small.settings, chunk=10)))
    shape, kv, memory = run.trace.header["memory"], run.trace.header["draft_kv"], run._drafter.memory
    assert memory is not None and (shape["budget"], shape["prompt"]) == (4, 79)
    sizes = {}
    for _ in run:
        sizes[memory.length] = memory.nbytes
    assert {sizes.pop(read) for read in range(10, 79, 10)} == {kv["peak_bytes"]}
    assert set(sizes.values()) == {kv["allocated_bytes"]} == {kv["predicted_bytes"]}  # before it reads, and after the prompt
    slots = cost.kv_bytes(tiny.draft.config, MemoryShape(2, 16, 4), 100, 4)
    assert kv["allocated_bytes"] <= slots < kv["peak_bytes"]


@pytest.mark.parametrize("method", ["window", "masw", "snapkv", "hybrid"])
def test_a_block_that_does_not_fit_the_rollback_window_is_refused(tiny: Pair, method: str) -> None:
    with pytest.raises(UsageError, match="does not fit the rollback window of 16; use a gamma of at most"):
        Session(tiny).run(PROMPT, options(method, gamma=17))
    assert list(Session(tiny).run(PROMPT, options("full", gamma=17)))


@pytest.mark.parametrize("method", ["window", "masw", "snapkv", "hybrid"])
def test_the_largest_block_that_fits_runs(tiny: Pair, method: str) -> None:
    gamma = {"window": 16, "masw": 12, "snapkv": 16, "hybrid": 15}[method]
    run = Session(tiny).run(PROMPT, options(method, new=40, gamma=gamma))
    reference = Session(tiny).run(PROMPT, options("none", new=40))
    assert list(run) and list(reference) and run.summary().tokens == reference.summary().tokens


def test_draft_and_accept_rule_draw_from_two_streams_of_numbers(tiny: Pair) -> None:
    """One stream for both would tie the acceptance of a token to its draw, and the output would no longer be the target's."""
    run = Session(tiny).run(PROMPT, options("full", sampling=Sampling(temperature=1.0, seed=4)))
    assert run._drafter._random.getstate() != Random(4).getstate()  # type: ignore[attr-defined]


def test_a_self_pair_with_full_memory_is_always_accepted(tiny: Pair) -> None:
    run = Session(Pair("self", tiny.target, tiny.target)).run(PROMPT, options("full", new=30, sampling=Sampling(temperature=1.0)))
    assert list(run) and run.summary().acceptance == 1.0


def test_difference_and_its_logit_gap(tiny: Pair) -> None:
    session = Session(tiny)
    reference = session.run(PROMPT, options("none"))
    list(reference)
    tokens = reference.summary().tokens
    other = [*tokens[:7], (tokens[7] + 1) % 256, *tokens[8:]]
    found = session.difference(PROMPT, other, tokens)
    assert found is not None and found.index == 7
    assert (found.ours, found.reference) == (other[7], tokens[7])
    assert found.logit_gap is not None and found.logit_gap > 0  # the reference is the target's own choice
    shorter = session.difference(PROMPT, tokens[:5], tokens)
    assert shorter is not None and (shorter.index, shorter.ours, shorter.reference, shorter.logit_gap) == (
        5,
        None,
        tokens[5],
        None,
    )
    again = session.run(PROMPT, options("full"))
    list(again)
    assert again.summary().tokens == tokens  # looking at a difference left the target usable


def test_adaptor_choice(tiny: Pair, tmp_path: Path) -> None:
    decoder, name = tiny.draft.decoder, tiny.draft.name
    untrained, path = adaptor_for(decoder, name, 4, "none")
    assert path is None and untrained.info.strides == ()
    file = tmp_path / "mine.safetensors"
    Adaptor.copied(decoder, AdaptorInfo(name, (4,))).save(file)
    loaded, path = adaptor_for(decoder, name, 4, str(file))
    assert path == file and loaded.info.strides == (4,)
    with pytest.raises(UsageError, match="was trained for stride 4, not 8"):
        adaptor_for(decoder, name, 8, str(file))
    with pytest.raises(UsageError, match="no adaptor at"):
        adaptor_for(decoder, name, 4, str(tmp_path / "none.safetensors"))
    assert adaptor_for(decoder, name, 4, "auto")[1] is None  # none ships for a random draft
    for choice in ("auto", "quiet"):
        quiet, path = adaptor_for(decoder, name, 4, choice, list(range(60)))
        assert path is None and quiet.kv_bias is not None and bool(quiet.kv_bias.any())
    plain, _ = adaptor_for(decoder, name, 4, "none", list(range(60)))
    assert torch.equal(plain.kv, quiet.kv)
