"""Training a head: what learns, what stays, that a stopped run is the run that was not, and the command."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from masw import data
from masw.catalogue import target_of
from masw.cli import train_eagle as command
from masw.config import MemoryShape
from masw.dense import DenseMemory
from masw.eagle import EagleHead, EagleInfo, before, fused, read_head
from masw.eagle_train import EagleConfig, EagleResult, HeadPass, eagle_recipe, train_eagle
from masw.errors import Cancelled, MaswError, UsageError
from masw.tokenizer import ByteTokenizer
from masw.trace import Trace
from tests.helpers import eagle_head, random_tokens
from tests.test_cli import masw, one_line  # noqa: F401
from tests.test_data import WORDS, silent, write
from tests.test_train import small_decoder

Masw = Callable[..., tuple[int, str, str]]
HELD = random_tokens(64, 200, 9, batch=2)


def config(**fields: Any) -> EagleConfig:
    known: dict[str, Any] = {"base": "tiny", "length": 64, "rows": 2, "tokens": 768, "eval_tokens": 300, "warmup_steps": 2}
    return eagle_recipe(**known | {"seed": 1, "fit_tokens": 128} | fields)  # 6 steps


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> data.Texts:
    folder = tmp_path_factory.mktemp("texts")
    return data.texts([write(folder / "text.jsonl", [{"text": WORDS * 20}])], ByteTokenizer(), folder / "cache", 1, silent)


def run(texts: data.Texts, folder: Path, recipe: EagleConfig | None = None, decoder: Any = None, **options: Any) -> EagleResult:
    return train_eagle(recipe or config(), decoder or small_decoder(), texts, HELD, folder, **options)


def log(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    timed = ("time", "tokens_per_s", "floor_share", "eta_s", "seconds")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if line["kind"] == kind]


# ---- what learns


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_reach_the_head_only(family: str) -> None:
    target = small_decoder(family=family)
    head = eagle_head(target).requires_grad_(True)
    loss, _, _ = HeadPass(target).loss(head, HELD, config(), torch.Generator().manual_seed(0))
    loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(t.grad is None and not t.requires_grad for t in target.weights.tensors())


def test_the_loss_is_the_papers() -> None:
    """Smooth L1 between features and the distance between distributions, spelled out."""
    target = small_decoder(torch.float64)
    head = eagle_head(target)
    loss, regression, score = HeadPass(target).loss(head, HELD, config(regression=0.7, kl=0.3))
    memory = DenseMemory(MemoryShape(), dtype=torch.float64, group=target.config.group)
    hidden = target.forward(HELD, memory)
    features = target.normed(hidden)
    predicted = head(target, HELD, before(features), memory)
    plain = F.smooth_l1_loss(target.normed(predicted), features)
    p, q = (target.logits(x[:, :-1]).log_softmax(-1) for x in (hidden, predicted))
    distance = (p.exp() * (p - q)).sum(-1)
    assert regression == pytest.approx(float(plain), rel=1e-9) and score.count == distance.numel() == 126
    assert float(loss) == pytest.approx(float(0.7 * plain + 0.3 * distance.mean()), rel=1e-9)
    assert score.kl == pytest.approx(float(distance.sum()), rel=1e-9)
    assert score.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_noise_is_bounded_and_of_the_features_alone() -> None:
    target = small_decoder(torch.float64)
    head, passes = eagle_head(target), HeadPass(target)
    one, two, other = (
        float(passes.loss(head, HELD, config(noise=0.2), torch.Generator().manual_seed(seed))[0]) for seed in (1, 1, 2)
    )
    still = float(passes.loss(head, HELD, config(noise=0.0), torch.Generator().manual_seed(1))[0])
    assert one == two != other and still == float(passes.loss(head, HELD, config(noise=0.2))[0])


def test_the_target_is_bit_identical_after_training_and_the_head_is_better(texts: data.Texts, tmp_path: Path) -> None:
    target = small_decoder(torch.bfloat16)
    kept = [t.clone() for t in target.weights.tensors()]
    result = run(texts, tmp_path, config(tokens=128 * 60, lr=1e-2, eval_tokens=0), target)
    assert all(a.equal(b) for a, b in zip(kept, target.weights.tensors(), strict=True))
    assert result.head.fc.dtype == torch.float32  # the master copy
    losses = [line["loss"] for line in log(tmp_path)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_the_head_starts_as_the_best_linear_one() -> None:
    """Its layer adds nothing, and fc is the least squares solution, up to the ridge."""
    target = small_decoder(torch.float64)
    head, passes, rows = EagleHead.copied(target, EagleInfo("tiny")), HeadPass(target), list(random_tokens(256, 200, 3, batch=4))
    passes.fit(head, rows)
    memory = DenseMemory(MemoryShape(), dtype=torch.float64, group=target.config.group)
    hidden = target.forward(torch.stack(rows), memory)
    given = before(target.normed(hidden))
    inputs = head.inputs(target, torch.stack(rows), given)
    assert torch.equal(head(target, torch.stack(rows), given, memory), inputs)
    wanted = F.rms_norm(hidden, (target.config.hidden,), None, target.config.norm_eps)
    best = torch.linalg.lstsq(fused(target, torch.stack(rows), given).flatten(0, 1), wanted.flatten(0, 1)).solution
    least = (fused(target, torch.stack(rows), given) @ best - wanted).square().mean()
    assert least <= (inputs - wanted).square().mean() <= 1.05 * least < wanted.square().mean()


# ---- a run


def test_a_run_leaves_a_head_that_inference_loads(texts: data.Texts, tmp_path: Path) -> None:
    target = small_decoder()
    result = run(texts, tmp_path, decoder=target)
    assert (result.step, result.steps, result.tokens) == (6, 6, 768)
    loaded = EagleHead.load(tmp_path / "head.safetensors", target, base="tiny", dtype=torch.float32)
    assert loaded.fc.equal(result.head.fc.detach().bfloat16().float())
    about = loaded.info.provenance
    assert loaded.info.tokens == 768 and about["recipe"]["length"] == 64 and about["data"] == [texts.file.sha256[:16]]
    assert about["trained"]["torch"] and about["measure"]["rows"][0]["set"] == "text-64"
    assert [line["tokens"] for line in log(tmp_path, "measure")] == [0, 384, 640, 768]
    assert read_head(tmp_path / "best.safetensors")[0].tokens in (0, 384, 640, 768)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best.safetensors", "head.safetensors", "last.pt", "log.jsonl", "recipe.json",
    ]  # fmt: skip


@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_and_resumed_run_is_the_run_that_was_not(texts: data.Texts, tmp_path: Path, stop: int) -> None:
    whole = run(texts, tmp_path / "whole")
    assert run(texts, tmp_path / "part", max_steps=stop).step == stop
    rest = run(texts, tmp_path / "part")
    for kind in ("step", "measure"):
        assert log(tmp_path / "part", kind) == log(tmp_path / "whole", kind)
    assert all(a.equal(b) for a, b in zip(whole.head.parameters(), rest.head.parameters(), strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint(texts: data.Texts, tmp_path: Path, number: signal.Signals) -> None:
    def interrupt(line: dict[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(Cancelled, match="stopped at step 2 of 6") as caught:
        run(texts, tmp_path / "part", listener=interrupt)
    assert caught.value.exit_code == 130
    run(texts, tmp_path / "part")
    run(texts, tmp_path / "whole")
    assert log(tmp_path / "part") == log(tmp_path / "whole")


def test_a_killed_run_goes_on_from_its_checkpoint(texts: data.Texts, tmp_path: Path) -> None:
    def die(line: dict[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 4:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(texts, tmp_path / "part", config(checkpoint_steps=3), listener=die)
    run(texts, tmp_path / "part")
    run(texts, tmp_path / "whole")
    assert log(tmp_path / "part") == log(tmp_path / "whole")


def test_a_loss_that_is_not_a_number_stops_the_run(texts: data.Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_decoder()
    inner = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: inner(hidden) * math.nan)
    with pytest.raises(MaswError, match="the loss is not a number at step 1; no checkpoint was written yet"):
        run(texts, tmp_path, config(eval_tokens=0), target)


def test_folders_of_other_runs_are_refused(texts: data.Texts, tmp_path: Path) -> None:
    run(texts, tmp_path, max_steps=1)
    with pytest.raises(UsageError, match="another lr"):
        run(texts, tmp_path, config(lr=1e-4))
    (tmp_path / "last.pt").write_bytes(b"junk")
    with pytest.raises(MaswError, match=r"last\.pt cannot be read"):
        run(texts, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"lr": 0}, "lr"), ({"length": 8}, "length"), ({"kl": -1}, "kl"), ({"rows": 0}, "rows"), ({"window": 1}, "window")],
)
def test_bad_recipes(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        config(**fields)
    assert "\n" not in str(caught.value)


def test_rows_that_do_not_fit(texts: data.Texts, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="longer than the model's 4,096 positions"):
        run(texts, tmp_path, config(length=8192))
    with pytest.raises(UsageError, match="fewer than one row"):
        run(texts, tmp_path, config(length=4096))


# ---- the command


@pytest.fixture
def train(masw: Masw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Masw:  # noqa: F811
    """`masw train-eagle` of 4 steps on the tiny target."""
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))
    text = write(tmp_path / "text.jsonl.gz", [{"text": WORDS * 20}])
    fixed = ("--text", text, "--valid", text, "--length", 64, "--tokens", 512, "--eval-rows", 1, "--warmup-steps", 2)

    def call(*options: object) -> tuple[int, str, str]:
        base = () if "--base" in options or "--pair" in options else ("--pair", "tiny")
        return masw("train-eagle", *base, *fixed, "--dtype", "fp32", "--device", "cpu", "--out", tmp_path / "run", *options)

    return call


def test_the_command_trains_goes_on_and_its_head_drafts(train: Masw, masw: Masw, tmp_path: Path) -> None:  # noqa: F811
    code, out, err = train("--max-steps", 1)
    assert code == 0 and "step 1 of 4, 128 tokens; the same command goes on" in out and "starting: 4 steps" in err
    code, out, err = train("--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 0 and "going on from step 1" in err and report["finished"] and report["tokens"] == 512
    assert report["base"] == target_of("tiny") == read_head(Path(report["head"]))[0].base
    document, trace = tmp_path / "report.txt", tmp_path / "run.jsonl"
    document.write_text(WORDS * 20)
    fixed = ("run", document, "--method", "eagle", "--max-new-tokens", 12, "--dtype", "fp32")
    code, out, _ = masw(*fixed, "--pair", "tiny", "--eagle", report["head"], "--compare", "--trace", trace)
    assert code == 0 and "identical to the target's own greedy output: yes" in out
    assert "The eagle head (head.safetensors) was trained on 512 tokens" in out and "untrained" not in out
    assert Trace.load(trace).header["eagle"]["tokens"] == 512
    code, _, err = masw(*fixed, "--pair", "tiny-2", "--eagle", report["head"])
    assert code == 2 and "belongs to the target 'tiny-4', not 'tiny-2'" in one_line(err)


def test_a_missing_head_is_one_line_before_anything_is_loaded(masw: Masw, tmp_path: Path) -> None:  # noqa: F811
    document = tmp_path / "report.txt"
    document.write_text(WORDS)
    for options, words in (
        (("--pair", "llama-3.1-70b"), "no eagle head for the target 'llama-3.1-70b-instruct' comes with masw; train one with"),
        (("--eagle", tmp_path / "none"), "no eagle head at"),
        (("--eagle", document), "is not an eagle head that masw wrote"),
    ):
        code, _, err = masw("run", document, "--method", "eagle", *options)
        assert code == 2 and words in one_line(err)


def test_bad_requests_are_one_line(train: Masw, tmp_path: Path) -> None:
    for options, words in (
        (("--pair", "tiny", "--base", "tiny-2"), "name the target once"),
        (("--pair", "nonsense"), "unknown model or pair"),
        (("--lr", 0), "lr"),
        (("--eval-rows", 0), "--eval-rows from one"),
        (("--text", tmp_path / "none.jsonl"), "no training text at"),
    ):
        code, _, err = train(*options)
        assert code == 2 and words in one_line(err), options


def test_the_command_leaves_out_what_the_library_leaves_out() -> None:
    known = {name: field.default for name, field in EagleConfig.model_fields.items()}
    for name, parameter in inspect.signature(command.train_eagle).parameters.items():
        if name in known and name != "base":
            assert parameter.default == known[name], name
    assert inspect.signature(command.train_eagle).parameters["checkpoint_minutes"].default * 60 == known["checkpoint_s"]
