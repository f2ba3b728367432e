"""Training: what learns, what stays, and that a run which was stopped anywhere is the run that was not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from masw import data
from masw import train as training
from masw.adaptor import Adaptor, AdaptorInfo
from masw.config import MemoryShape
from masw.decoder import Decoder
from masw.dense import DenseMemory
from masw.distil import Passes, _argmax, hardest, head_loss
from masw.errors import Cancelled, MaswError, UsageError
from masw.heldout import HeldOut, held_out
from masw.memory import Memory
from masw.recipe import TrainConfig, recipe
from masw.tokenizer import ByteTokenizer
from masw.train import Result, train
from masw.trainee import LayerDistance, Trainee
from tests.helpers import CPU, random_tokens, tiny_config, tiny_decoder
from tests.test_data import WORDS, silent, write

TOKENIZER = ByteTokenizer()
SEPARATOR = [10, 10]
STAGES = ("64x2:512:1/1/1", "96x2:384:1/1/1")  # 4 + 2 steps


def small_decoder(dtype: torch.dtype = torch.float32, family: str = "llama", layers: int = 2) -> Decoder:
    return tiny_decoder(tiny_config(family, vocab=ByteTokenizer.VOCAB, layers=layers), dtype=dtype)


def config(**fields: Any) -> TrainConfig:
    known: dict[str, Any] = {"base": "tiny", "stages": STAGES, "strides": (4, 8), "windows": (8, 16), "sinks": 2}
    return recipe(**known | {"eval_windows": (8,), "eval_tokens": 300, "warmup_steps": 2, "seed": 1} | fields)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[data.Texts, data.Answers]:
    folder = tmp_path_factory.mktemp("sources")
    text = write(folder / "text.jsonl", [{"text": WORDS * 20}])
    rows = [{"text": WORDS, "question": "Who?", "reference": f"person {i}"} for i in range(4)]
    return (
        data.texts([text], TOKENIZER, folder / "cache", 1, silent),
        data.answers([write(folder / "sft.jsonl", rows)], TOKENIZER, folder / "cache", 1, silent),
    )


def run(
    sources: tuple[data.Texts, data.Answers],
    folder: Path,
    decoder: Decoder | None = None,
    recipe: TrainConfig | None = None,
    **options: Any,
) -> Result:
    held = held_out(*sources, SEPARATOR, length=64, rows=1)
    return train(recipe or config(), decoder or small_decoder(), *sources, held, folder, separator=SEPARATOR, **options)


def log(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    timed = ("time", "tokens_per_s", "floor_share", "eta_s", "seconds")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if line["kind"] == kind]


# ---- what learns


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("mirror", "slot_input"), [("kv", "mean"), ("qkv", "learned"), ("kv", "token"), ("kv", "last")])
def test_gradients_reach_the_mirrored_weights_only(family: str, mirror: str, slot_input: str) -> None:
    decoder = small_decoder(family=family)
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", (), slot_input, 3, mirror)).requires_grad_(True)
    tokens = random_tokens(64, 200, seed=1, batch=2)
    scored = torch.ones(2, 63, dtype=torch.bool)
    loss, *_ = Trainee(adaptor, Passes(decoder), 0.5)(tokens, scored, MemoryShape(2, 8, 4), float(scored.sum()))
    loss.backward()
    for name, parameter in adaptor.named_parameters():
        assert parameter.grad is not None, name
        # The last layer's slot queries feed nothing that is read, and a key bias moves all scores of keys of one kind alike.
        layers = parameter.grad if parameter.dim() == 1 else parameter.grad[:-1] if name.startswith("q") else parameter.grad
        assert layers.abs().sum() > 0, name
    assert all(t.grad is None and not t.requires_grad for t in decoder.weights.tensors())


def test_the_backbone_is_bit_identical_after_training(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    decoder = small_decoder(torch.bfloat16)
    before = [t.clone() for t in decoder.weights.tensors()]
    result = run(sources, tmp_path, decoder)
    assert all(a.equal(b) for a, b in zip(before, decoder.weights.tensors(), strict=True))
    assert result.adaptor.kv.dtype == torch.float32  # the master copy
    untrained = Adaptor.copied(decoder, AdaptorInfo("tiny", ()), dtype=torch.float32)
    assert not result.adaptor.kv.equal(untrained.kv)


def test_training_lowers_the_loss(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    run(sources, tmp_path, recipe=config(stages=("64x4:15k:1/0/0",), eval_tokens=0, windows=(8,), strides=(4,), lr=1e-2))
    losses = [line["loss"] for line in log(tmp_path)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_slots_are_excluded_from_the_loss() -> None:
    """The loss has one term for each scored raw position, whatever number of slots lies between."""
    decoder = small_decoder(torch.float64)
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", ()))
    tokens = random_tokens(41, 200, seed=2, batch=2)
    scored = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    shape = MemoryShape(2, 8, 4)
    loss, found, _ = Trainee(adaptor, Passes(decoder), 0.0)(tokens, scored, shape, float(scored.sum()))
    logits = decoder.logits(decoder.forward(tokens, DenseMemory(shape, dtype=torch.float64, group=2, adaptor=adaptor)))
    plain = F.cross_entropy(logits[:, :-1][scored], tokens[:, 1:][scored])
    assert found.count == int(scored.sum())
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kl", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_what_autograd_gives(kl: float) -> None:
    decoder = small_decoder(torch.float64)
    generator = torch.Generator().manual_seed(3)
    hidden, teacher = (torch.randn(200, decoder.config.hidden, dtype=torch.float64, generator=generator) for _ in range(2))
    labels = random_tokens(200, ByteTokenizer.VOCAB, seed=4)[0]
    hidden.requires_grad_(True)
    loss, found = head_loss(decoder, hidden, teacher, labels, kl=kl, total=150.0)
    (grad,) = torch.autograd.grad(loss * 2, hidden)
    logits, other = decoder.logits(hidden), decoder.logits(teacher)
    distance = F.kl_div(logits.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="sum")
    nll = F.cross_entropy(logits, labels, reduction="sum")
    plain = ((1 - kl) * nll + kl * distance) / 150
    (expected,) = torch.autograd.grad(plain * 2, hidden)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
    assert math.isclose(found.kl, distance.item(), rel_tol=1e-9)
    assert math.isclose(found.nll, nll.item(), rel_tol=1e-9)
    assert found.agreed == int((logits.argmax(-1) == other.argmax(-1)).sum())


@pytest.mark.parametrize("vocabulary", [5, 128, 1280, 1300])
def test_the_place_of_the_largest_logit(vocabulary: int) -> None:
    x = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(1))
    assert torch.equal(_argmax(x), x.argmax(-1, keepdim=True))


def test_the_hardest_positions_of_each_row_are_the_furthest_from_the_full_model() -> None:
    decoder = small_decoder(torch.float64)
    teacher = torch.randn(1, decoder.config.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).expand(9, -1)
    moved = torch.tensor([0.0, 3, 1, 2, 0, 5, 4, 6, 1])[:, None]
    noise = torch.randn(1, decoder.config.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    rows = torch.tensor([0, 0, 0, 0, 2, 2, 2, 2, 3])  # row 1 has no loss position
    kept = hardest(decoder, teacher + 0.05 * moved * noise, teacher, rows, 2)
    assert kept.tolist() == [1, 3, 5, 7, 8]


def test_scoring_the_hardest_positions_alone_is_a_mean_over_them() -> None:
    """With as many positions as there are nothing changes; with fewer the mean is over those, and slots still learn."""
    decoder = small_decoder(torch.float64)
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", ())).requires_grad_(True)
    tokens = random_tokens(40, ByteTokenizer.VOCAB, seed=6, batch=2)
    scored = torch.ones(2, 39, dtype=torch.bool)
    shape = MemoryShape(2, 8, 4)
    every, *_ = Trainee(adaptor, Passes(decoder), 1.0)(tokens, scored, shape, 78.0)
    same, *_ = Trainee(adaptor, Passes(decoder), 1.0, 39)(tokens, scored, shape, 78.0)
    torch.testing.assert_close(same, every, rtol=1e-12, atol=0)
    loss, found, _ = Trainee(adaptor, Passes(decoder), 1.0, 10)(tokens, scored, shape, 20.0)
    assert found.count == 20 and loss.item() > every.item()
    loss.backward()
    assert adaptor.kv.grad is not None and bool(adaptor.kv.grad.abs().sum() > 0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_distance_behind_the_layers_is_what_a_plain_computation_gives(checkpointed: bool) -> None:
    """Behind every layer but the last, on raw rows, relative, through the next layer's norm; its gradient reaches the slots."""
    decoder = small_decoder(torch.float64, layers=4)
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", ())).requires_grad_(True)
    tokens, shape = random_tokens(40, ByteTokenizer.VOCAB, seed=6, batch=2), MemoryShape(2, 8, 4)
    scored = torch.zeros(2, 39, dtype=torch.bool)
    scored[:, 30:] = True
    passes = Passes(decoder, checkpoint=checkpointed)
    alone, *_ = Trainee(adaptor, Passes(decoder), 1.0)(tokens, scored, shape, 18.0)
    loss, found, distance = Trainee(adaptor, passes, 1.0, match=3.0)(tokens, scored, shape, 18.0, 0.5)

    states: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for full in (True, False):
        kept = states[full]
        Passes(decoder).hidden(
            tokens, MemoryShape() if full else shape, None if full else adaptor, lambda i, x, kept=kept: kept.append(x)
        )
    assert len(states[True]) == len(states[False]) == decoder.config.layers > 2
    means = []
    for index, (t, s) in enumerate(zip(states[True][:-1], states[False][:-1], strict=True), 1):
        assert t.shape == s.shape == (2, 40, decoder.config.hidden)
        norm = decoder.weights.layers[index].attn_norm
        t, s = (F.rms_norm(x, (decoder.config.hidden,), norm, decoder.config.norm_eps) for x in (t, s))
        means.append(((s - t).square().sum(-1) / t.square().sum(-1)).mean())
    plain = torch.stack(means).mean()
    torch.testing.assert_close(distance, plain.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, alone + 3 * 0.5 * plain, rtol=1e-12, atol=0)
    assert found.count == 18
    (expected,) = torch.autograd.grad(alone + 1.5 * plain, adaptor.kv)
    (grad,) = torch.autograd.grad(loss, adaptor.kv)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_matching_alone_trains_and_is_logged(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    """Without a share of the KL the full-KV pass is made all the same; the log says the distance, which falls."""
    run(
        sources,
        tmp_path,
        recipe=config(stages=("64x4:15k:1/0/0",), eval_tokens=0, windows=(8,), strides=(4,), lr=1e-2, kl=0.0, match=100.0),
    )
    found = [line["match"] for line in log(tmp_path)]
    assert 0 < sum(found[-10:]) < 0.9 * sum(found[:10])
    assert all(line["kl"] == 0 for line in log(tmp_path))


def test_a_model_of_one_layer_has_no_distance_behind_layers() -> None:
    layers = LayerDistance(small_decoder(torch.float64, layers=1))
    layers.full(0, torch.ones(1, 2, 8))
    layers.memory(0, torch.ones(1, 2, 8))
    assert layers.mean() == 0


def test_the_dense_training_pass_equals_streaming_inference(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    decoder = small_decoder(torch.float64)
    adaptor = run(sources, tmp_path, decoder).adaptor.requires_grad_(False)
    tokens = random_tokens(90, 200, seed=5)
    for stride in (4, 8):
        shape = MemoryShape(2, 8, stride)
        dense = Passes(decoder).hidden(tokens, shape, adaptor)
        memory = Memory(decoder.config, shape, tokens=90, device=CPU, dtype=torch.float64, adaptor=adaptor)
        parts = []
        for token in tokens.split(1, dim=1):
            parts.append(decoder.forward(token, memory))
            memory.commit()
        torch.testing.assert_close(torch.cat(parts, dim=1), dense, rtol=0, atol=1e-9)


def test_micro_batches_add_up_to_the_batch(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    decoder = small_decoder(torch.float64)
    whole = run(sources, tmp_path / "whole", decoder, config(eval_tokens=0, match=2.0))
    parts = run(sources, tmp_path / "parts", decoder, config(eval_tokens=0, micro_rows=1, match=2.0))
    torch.testing.assert_close(whole.adaptor.kv, parts.adaptor.kv, rtol=0, atol=1e-9)


def test_checkpointed_activations_give_the_same_run(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    decoder = small_decoder(torch.float64)
    kept = run(sources, tmp_path / "kept", decoder)
    again = run(sources, tmp_path / "again", decoder, config(checkpoint_activations=True))
    assert all(a.equal(b) for a, b in zip(kept.adaptor.parameters(), again.adaptor.parameters(), strict=True))
    assert log(tmp_path / "kept") == log(tmp_path / "again")


# ---- a run


def test_a_run_leaves_an_adaptor_that_inference_loads(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    decoder = small_decoder()
    lines: list[dict[str, Any]] = []
    result = run(sources, tmp_path, decoder, listener=lines.append)
    assert (result.step, result.tokens) == (6, 896)
    loaded = Adaptor.load(tmp_path / "adaptor.safetensors", decoder, base="tiny", stride=8, dtype=torch.float32)
    assert loaded.kv.equal(result.adaptor.kv.detach().bfloat16().float())
    noted = loaded.info.provenance
    assert noted["tokens"] == 896
    assert noted["recipe"]["stages"] == list(STAGES)
    assert noted["data"] == [source.file.sha256[:16] for source in sources]
    assert {line["kind"] for line in lines} == {"start", "step", "measure"}
    measured = noted["measure"]["rows"]
    assert {(r["set"], r["method"], r["stride"]) for r in measured} == {
        (f"{kind}-64", method, stride)
        for kind in ("reconstruction", "text", "answers")
        for method, stride in (("window", None), ("masw", 4), ("masw", 8))
    }
    assert (tmp_path / "best.safetensors").exists()
    assert [line["tokens"] for line in log(tmp_path)] == [128, 256, 384, 512, 704, 896]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("stop", "average"), [(1, 0.0), (4, 0.0), (5, 0.0), (4, 0.6)])
def test_a_stopped_and_resumed_run_is_the_run_that_was_not(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path, stop: int, average: float
) -> None:
    chosen = config(average=average)
    whole = run(sources, tmp_path / "whole", recipe=chosen)
    part = run(sources, tmp_path / "part", recipe=chosen, max_steps=stop)
    assert part.step == stop
    rest = run(sources, tmp_path / "part", recipe=chosen)
    assert log(tmp_path / "part") == log(tmp_path / "whole")
    assert log(tmp_path / "part", "measure") == log(tmp_path / "whole", "measure")
    for a, b in zip(whole.adaptor.parameters(), rest.adaptor.parameters(), strict=True):
        assert a.equal(b)


def test_the_average_of_the_weights_is_saved_and_does_not_change_the_run(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path
) -> None:
    decoder = small_decoder(torch.float64)
    passed = [run(sources, tmp_path / f"{n}", decoder, config(eval_tokens=0), max_steps=n).adaptor for n in range(7)]
    result = run(sources, tmp_path / "average", decoder, config(eval_tokens=0, average=0.7))
    expected = passed[0].kv
    for step, weights in enumerate(passed[1:], 1):  # a mean of 2, of 3 and of 4, then 0.7 of the old
        expected = expected + max(0.3, 1 / (step + 1)) * (weights.kv - expected)
    torch.testing.assert_close(result.adaptor.kv, expected, rtol=0, atol=1e-12)
    assert log(tmp_path / "average") == log(tmp_path / "6")
    loaded = Adaptor.load(tmp_path / "average" / "adaptor.safetensors", decoder, base="tiny", dtype=torch.float64)
    assert loaded.kv.equal(expected.bfloat16().double())


def test_a_killed_run_goes_on_from_its_checkpoint(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after the last checkpoint are lost with the process and made again, in the log too."""

    def die_at_4(line: dict[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 4:
            raise RuntimeError("killed")

    run(sources, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        run(sources, tmp_path / "part", recipe=config(checkpoint_steps=3), listener=die_at_4)
    with (tmp_path / "part" / "log.jsonl").open("a") as stream:
        stream.write('{"step": 5, "ki')  # a torn line
    assert [line["step"] for line in log_safely(tmp_path / "part")] == [1, 2, 3, 4]
    run(sources, tmp_path / "part")
    assert log(tmp_path / "part") == log(tmp_path / "whole")


def log_safely(folder: Path) -> list[dict[str, Any]]:
    lines = [line for line in (folder / "log.jsonl").read_text().splitlines() if line.endswith("}")]
    return [line for line in map(json.loads, lines) if line["kind"] == "step"]


def test_a_checkpoint_is_whole_or_absent(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(sources, tmp_path, max_steps=2)
    before = (tmp_path / "last.pt").read_bytes()

    def full(state: Any, stream: Any) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training.torch, "save", full)
    with pytest.raises(MaswError, match="the disk is full"):
        run(sources, tmp_path, max_steps=1)
    monkeypatch.undo()
    assert (tmp_path / "last.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))
    assert run(sources, tmp_path).step == 6


def test_a_damaged_checkpoint_is_named(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    run(sources, tmp_path, max_steps=1)
    (tmp_path / "last.pt").write_bytes(b"junk")
    with pytest.raises(MaswError, match=r"last\.pt cannot be read"):
        run(sources, tmp_path)


def test_a_run_of_another_recipe_is_refused(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    run(sources, tmp_path, max_steps=1)
    with pytest.raises(UsageError, match="another lr"):
        run(sources, tmp_path, recipe=config(lr=1e-4))
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(UsageError, match="name another run"):
        run(sources, tmp_path)


def test_a_run_measured_on_other_rows_is_refused(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    run(sources, tmp_path, max_steps=1)
    kept = (tmp_path / "last.pt").read_bytes()
    other = held_out(*sources, SEPARATOR, length=48, rows=1)
    with pytest.raises(UsageError, match="measured on other held-out rows"):
        train(config(), small_decoder(), *sources, other, tmp_path, separator=SEPARATOR)
    assert (tmp_path / "last.pt").read_bytes() == kept
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    del state["held"]  # a checkpoint that does not say goes on
    torch.save(state, tmp_path / "last.pt")
    assert train(config(), small_decoder(), *sources, other, tmp_path, separator=SEPARATOR).step > 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path, number: signal.Signals
) -> None:
    def interrupt(line: dict[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 2:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Cancelled, match="stopped at step 2 of 6") as caught:
        run(sources, tmp_path / "part", listener=interrupt)
    assert caught.value.exit_code == 130
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    run(sources, tmp_path / "part")
    run(sources, tmp_path / "whole")
    assert log(tmp_path / "part") == log(tmp_path / "whole")


def test_a_loss_that_is_not_a_number_stops_the_run(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(sources, tmp_path, max_steps=2)
    before = (tmp_path / "last.pt").read_bytes()
    decoder = small_decoder()
    inner = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda hidden: inner(hidden) * math.nan)
    with pytest.raises(MaswError, match="the loss is not a number at step 3; its last good checkpoint stays"):
        run(sources, tmp_path, decoder, config())
    assert (tmp_path / "last.pt").read_bytes() == before


def test_patience_ends_a_run_that_no_longer_improves(
    sources: tuple[data.Texts, data.Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"set": "s", "method": "masw", "window": 8, "stride": 4, "n": 1, "agreement": 0.5, "nll": 1.0, "kl": 1.0}
    monkeypatch.setattr(training, "measure", lambda *_: [row])
    result = run(sources, tmp_path, recipe=config(eval_tokens=128, patience=2))
    assert result.step == 2 and result.stopped_early
    again = run(sources, tmp_path, recipe=config(eval_tokens=128, patience=2))
    assert again.step == 2 and again.stopped_early
    assert [m["best"] for m in log(tmp_path, "measure")] == [True, False, False]


def test_random_initialisation_is_not_a_copy(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    one = run(sources, tmp_path / "a", recipe=config(random_init=True), max_steps=0).adaptor
    two = run(sources, tmp_path / "b", recipe=config(), max_steps=0).adaptor
    assert not one.kv.equal(two.kv)
    assert torch.isclose(one.kv.std(), two.kv.std(), rtol=0.1)


# ---- bad requests


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": 0}, "lr"),
        ({"kl": 1.5}, "kl"),
        ({"mirror": "v"}, "mirror"),
        ({"slot_input": "none"}, "slot input"),
        ({"stages": ()}, "at least one value"),
        ({"stages": ("64",)}, "stage '64'"),
        ({"strides": (16,), "windows": (8,)}, "stride 16 is longer"),
        ({"learning_rate": 1}, "learning rate"),
    ],
)
def test_bad_recipes(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        config(**fields)
    assert "\n" not in str(caught.value)


def test_rows_longer_than_the_model_reads(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="longer than the model's 4,096 positions"):
        run(sources, tmp_path, recipe=config(stages=("8192x1:8192",)))


def test_a_folder_that_cannot_be_written(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MaswError, match="cannot write to"):
        run(sources, tmp_path / "file" / "run")


# ---- workers

WORKER = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from masw import data
from masw.tokenizer import ByteTokenizer
from masw.train import train
from tests.test_train import SEPARATOR, config, small_decoder
torch.set_num_threads(1)
dist.init_process_group("gloo")
cache, text, sft, out = map(Path, sys.argv[1:])
sources = data.texts([str(text)], ByteTokenizer(), cache, 1, print), data.answers([str(sft)], ByteTokenizer(), cache, 1, print)
result = train(config(eval_tokens=0, match=2.0), small_decoder(torch.float64), *sources, [], out, separator=SEPARATOR)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # as masw.cli.__main__ does, and for its reason
"""


def test_two_workers_train_what_one_does(sources: tuple[data.Texts, data.Answers], tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", [{"text": WORDS * 20}])
    sft = write(tmp_path / "sft.jsonl", [{"text": WORDS, "question": "Who?", "reference": f"person {i}"} for i in range(4)])
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    arguments = [str(script), str(tmp_path / "cache"), text, sft, str(tmp_path / "two")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    one = run(sources, tmp_path / "one", small_decoder(torch.float64), config(eval_tokens=0, match=2.0))
    two = torch.load(tmp_path / "two" / "last.pt", weights_only=True)["adaptor"]
    torch.testing.assert_close(two["kv"], one.adaptor.kv.detach(), rtol=0, atol=1e-9)
    assert [(x["scored"], x["loss"], x["match"]) for x in log(tmp_path / "two")] == [
        (x["scored"], x["loss"], x["match"]) for x in log(tmp_path / "one")
    ]


def test_held_out_rows_are_always_the_same(sources: tuple[data.Texts, data.Answers]) -> None:
    one, two = held_out(*sources, SEPARATOR, length=64, rows=2), held_out(*sources, SEPARATOR, length=64, rows=2)
    assert [s.name for s in one] == ["reconstruction-64", "text-64", "answers-64"]
    assert all(same(a, b) for a, b in zip(one, two, strict=True))


def same(a: HeldOut, b: HeldOut) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = [(a.tokens, b.tokens), (a.scored, b.scored)]
    return all(x.equal(y) for x, y in pairs)
