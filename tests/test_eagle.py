"""The EAGLE head: its file, its one pass in whatever pieces it comes, and what a draft with it remembers after each round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.dense import DenseMemory
from masw.eagle import EagleHead, EagleInfo, before, read_head
from masw.eagle_draft import EagleDraft
from masw.engine import Settings, Target
from masw.errors import UsageError
from masw.verify import Sampling
from tests.helpers import drafter_for, eagle_head, memory_for, noisy, random_tokens, run, tiny_config, tiny_decoder

TARGET = tiny_decoder(tiny_config(), seed=1)
PROMPT = random_tokens(37, 61, 20)[0].tolist()


def dense(decoder: Any) -> DenseMemory:
    return DenseMemory(MemoryShape(), dtype=decoder.dtype, group=decoder.config.group)


# ---- the pass


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_streaming_equals_the_dense_pass(family: str) -> None:
    """In pieces of any size through a memory, or at once as in training: the same hidden states, for every family."""
    target = tiny_decoder(tiny_config(family), seed=3)
    head, tokens = eagle_head(target), random_tokens(50, 61, 4)
    features = before(target.normed(target.forward(tokens, dense(target))))
    whole = head(target, tokens, features, dense(target))
    memory = memory_for(head.decoder(target), MemoryShape())
    parts = [
        head(target, t, f, memory)
        for t, f in zip(tokens.split([20, 1, 9, 20], 1), features.split([20, 1, 9, 20], 1), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-9)
    assert memory.snapshot()[1].shape[:2] == (1, 2)  # one layer


def test_a_row_reads_its_token_and_the_feature_before_it() -> None:
    head, tokens = eagle_head(TARGET), random_tokens(12, 61, 5)
    features = torch.randn(1, 12, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shifted = before(features)
    assert not shifted[:, 0].any() and torch.equal(shifted[:, 1:], features[:, :-1])
    plain = head(TARGET, tokens, shifted, dense(TARGET))
    for changed, first in ((tokens.clone(), 7), (tokens, 8)):
        other = features.clone()
        if first == 7:
            changed[0, 7] = (changed[0, 7] + 1) % 61
        else:
            other[0, 7] += 1.0
        moved = (head(TARGET, changed, before(other), dense(TARGET)) - plain).abs().amax(-1)[0] > 1e-9
        assert moved.tolist() == [i >= first for i in range(12)]


def test_the_first_draft_is_what_teacher_forcing_predicts() -> None:
    """Whatever was drafted and dropped before, each block starts from the target's features alone."""
    for gamma in (1, 4):
        drafter = drafter_for("eagle", TARGET)
        result = run(Target(TARGET, 100), drafter, PROMPT, Settings(30, gamma))
        text = torch.tensor([PROMPT + result.tokens])
        features = before(TARGET.normed(TARGET.forward(text, dense(TARGET))))
        forced = TARGET.logits(eagle_head(TARGET)(TARGET, text, features, dense(TARGET)))[0].argmax(-1)
        at = len(PROMPT)
        for r in result.rounds:
            assert not r.drafted or r.drafted[0] == int(forced[at - 1])
            at += len(r.tokens)


def test_later_drafts_read_the_heads_own_features() -> None:
    drafter: Any = drafter_for("eagle", TARGET)
    result = run(Target(TARGET, 60), drafter, PROMPT, Settings(5, 4))
    head, text = eagle_head(TARGET), torch.tensor([PROMPT])
    features = before(TARGET.normed(TARGET.forward(text, dense(TARGET))))
    expected: list[int] = []
    for _ in range(4):
        hidden = head(TARGET, text, features, dense(TARGET))
        expected.append(int(TARGET.logits(hidden)[0, -1].argmax()))
        text = torch.cat([text, torch.tensor([expected[-1:]])], dim=1)
        features = torch.cat([features, TARGET.normed(hidden[:, -1:])], dim=1)
    assert list(result.rounds[0].drafted) == expected


def test_features_are_not_kept() -> None:
    """After prefill and after each round at most the features of what the next block reads first are held."""
    drafter = drafter_for("eagle", noisy(TARGET, 0.25))
    assert isinstance(drafter, EagleDraft) and drafter.observer is drafter and drafter.seen == 0
    run(Target(TARGET, 100), drafter, PROMPT, Settings(30, 4, chunk=5))
    assert sum(len(part) for part in drafter._waiting) <= 5
    assert drafter.seen == len(PROMPT) + 29  # all but the last token: the target has not read it


def test_drafters_that_do_not_care_are_shown_nothing() -> None:
    for method in ("none", "full", "window", "masw", "lookup"):
        assert drafter_for(method, TARGET).observer is None


def test_a_sampled_draft_knows_what_it_was_drawn_from() -> None:
    sampling = Sampling(temperature=0.9, seed=4)
    drafter = drafter_for("eagle", TARGET, sampling=sampling)
    result = run(Target(TARGET, 100), drafter, PROMPT, Settings(30, 4, sampling))
    events = result.recorder.trace.of("draft")
    assert all(0 < e.data["q"] <= 1 for e in events) and result.roles.count("accepted") > 0


# ---- the file


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_head_comes_back_from_its_file(tmp_path: Path, family: str) -> None:
    target = tiny_decoder(tiny_config(family), seed=3)
    head, path = eagle_head(target), tmp_path / "new" / "head.safetensors"
    head.save(path, dtype=torch.float64, tokens=1234, commit="abc")
    again = EagleHead.load(path, target, base="tiny")
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert again.info == EagleInfo("tiny", 1234, {"commit": "abc"})
    assert not any(p.requires_grad for p in again.parameters())
    assert [p.name for p in path.parent.iterdir()] == ["head.safetensors"]


def test_a_head_for_another_base_or_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    eagle_head(TARGET).save(path)
    with pytest.raises(UsageError, match=r"eagle head head\.safetensors belongs to the target 'tiny', not 'other'"):
        EagleHead.load(path, TARGET, base="other")
    with pytest.raises(UsageError, match=r"has the shape .*train one with `masw train-eagle` for it"):
        EagleHead.load(path, tiny_decoder(tiny_config(kv_heads=4)), base="tiny")


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    head = eagle_head(TARGET)
    about = {"version": 1, "info": {"base": "tiny"}, "shape": {k: getattr(TARGET.config, k) for k in
             ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "qkv_bias", "qk_norm")}}  # fmt: skip
    tensors = {name: p.detach() for name, p in head.named_parameters()}

    def written(tensors: dict[str, torch.Tensor], **about: Any) -> Path:
        save_file(tensors, path, {"masw-eagle": json.dumps(about)})
        return path

    cases = [
        (tmp_path / "nowhere", "no eagle head at"),
        (written(tensors, **about | {"version": 9}), "has format 9, this masw reads format 1"),
    ]
    for file, words in cases:
        with pytest.raises(UsageError, match=words):
            EagleHead.load(file, TARGET, base="tiny")
    for wrong, words in (
        ({k: v for k, v in tensors.items() if k != "fc"}, r"lacks or has extra tensors \(fc\)"),
        (tensors | {"fc": torch.zeros(3, 3)}, r"fc is \[3, 3\], expected \[24, 48\]"),
    ):
        with pytest.raises(UsageError, match=words) as error:
            EagleHead.load(written(wrong, **about), TARGET, base="tiny")
        assert "\n" not in str(error.value)
    path.write_bytes(b"junk")
    with pytest.raises(UsageError, match="is not an eagle head that masw wrote"):
        read_head(path)
    Adaptor.copied(TARGET, AdaptorInfo("tiny", ())).save(path)
    with pytest.raises(UsageError, match="is not an eagle head that masw wrote"):
        read_head(path)


def test_the_untrained_head_is_seeded() -> None:
    one, two, other = (EagleHead.copied(TARGET, EagleInfo("tiny"), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.fc, two.fc) and not torch.equal(one.fc, other.fc)
    assert not one.layer["down"].any() and not one.layer["out"].any()
    assert torch.equal(one.layer["gate_up"], TARGET.weights.layers[-1].gate_up)  # type: ignore[arg-type]
