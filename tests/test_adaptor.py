"""The adaptor: its copy of the backbone, its file, and the files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from masw.adaptor import SHIPPED_BYTES, SLOT_INPUTS, Adaptor, AdaptorInfo, low_rank, rank_that_fits, read_info
from masw.config import ModelConfig
from masw.decoder import Decoder
from masw.errors import UsageError
from tests.helpers import FAMILIES, tiny_config, tiny_decoder, trained_adaptor

DECODER = tiny_decoder(tiny_config("qwen2"))


def refusal(path: Path, *, decoder: Decoder = DECODER, base: str = "tiny", stride: int | None = None) -> str:
    with pytest.raises(UsageError) as error:
        Adaptor.load(path, decoder, base=base, stride=stride)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("mirror", ["kv", "qkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_adaptor_is_the_backbone(family: str, mirror: str) -> None:
    decoder = tiny_decoder(tiny_config(family))
    c = decoder.config
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", (), "learned", 7, mirror))
    assert torch.equal(adaptor.slot_embedding, decoder.weights.embed[7])  # type: ignore[arg-type]
    h = torch.randn(2, 3, c.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for index, layer in enumerate(decoder.weights.layers):
        whole = h @ layer.qkv.T + (0 if layer.qkv_bias is None else layer.qkv_bias)
        q, k, v = adaptor.project(index, h)
        torch.testing.assert_close(k, whole[..., c.q_width : c.q_width + c.kv_width])
        torch.testing.assert_close(v, whole[..., c.q_width + c.kv_width :])
        assert (q is None) == (mirror == "kv")
        if q is not None:
            torch.testing.assert_close(q, whole[..., : c.q_width])
    assert not any(p.requires_grad for p in adaptor.parameters())


def test_copied_weights_are_not_shared_with_the_backbone() -> None:
    adaptor = trained_adaptor(DECODER)
    assert not torch.equal(adaptor.kv[0], DECODER.weights.layers[0].qkv[DECODER.config.q_width :])
    assert torch.equal(Adaptor.copied(DECODER, adaptor.info).kv[0], DECODER.weights.layers[0].qkv[DECODER.config.q_width :])


@pytest.mark.parametrize("slot_input", SLOT_INPUTS)
@pytest.mark.parametrize("mirror", ["kv", "qkv"])
def test_a_file_holds_weights_and_provenance(tmp_path: Path, mirror: str, slot_input: str) -> None:
    adaptor, path = trained_adaptor(DECODER, slot_input, mirror), tmp_path / "deep" / "a.safetensors"
    adaptor.save(path, dtype=torch.float64, commit="abc", tokens_seen=12)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]  # nothing half-written beside it
    info, shape = read_info(path)
    assert (info.base, info.slot_input, info.mirror, info.slot_token) == ("tiny", slot_input, mirror, 3)
    assert info.provenance == {"commit": "abc", "tokens_seen": 12}
    assert shape == {"layers": 2, "kv_width": 16, "hidden": 24}
    again = Adaptor.load(path, DECODER, base="tiny", stride=5)
    mine, theirs = dict(adaptor.named_parameters()), dict(again.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_files_are_bf16_by_default(tmp_path: Path) -> None:
    adaptor = trained_adaptor(DECODER)
    adaptor.save(tmp_path / "a.safetensors")
    again = Adaptor.load(tmp_path / "a.safetensors", DECODER, base="tiny")
    assert again.kv.dtype == torch.float64 and torch.equal(again.kv, adaptor.kv.bfloat16().double())
    assert (tmp_path / "a.safetensors").stat().st_size < 2 * sum(p.numel() for p in adaptor.parameters()) + 1000


# ---- a mirrored Q as a low-rank difference


@pytest.mark.parametrize("rank", [1, 5, 32])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_low_rank_query_comes_back_within_its_bound(tmp_path: Path, family: str, rank: int) -> None:
    decoder = tiny_decoder(tiny_config(family))
    adaptor, path = trained_adaptor(decoder, "mean", "qkv"), tmp_path / "a.safetensors"
    adaptor.save(path, dtype=torch.float64, q_rank=rank, decoder=decoder, note="kept")
    again = Adaptor.load(path, decoder, base="tiny")
    assert adaptor.q is not None and again.q is not None
    others = [name for name, _ in adaptor.named_parameters() if name != "q"]
    mine, theirs = dict(adaptor.named_parameters()), dict(again.named_parameters())
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in others)
    backbone = torch.stack([layer.qkv[: decoder.config.q_width] for layer in decoder.weights.layers])
    singular = torch.linalg.svdvals(adaptor.q - backbone)
    missed = float(singular[:, rank:].square().sum().sqrt())
    assert float((again.q - adaptor.q).norm()) == pytest.approx(missed, abs=1e-12)  # no other rank-k matrix is nearer
    noted = again.info.provenance
    assert noted["note"] == "kept" and noted["q_rank"] == min(rank, 24)
    assert noted["q_rank_error"] == pytest.approx(missed / float(singular.square().sum().sqrt()), abs=1e-4)
    h = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(again.project(1, h)[0], h @ again.q[1].T + (0 if again.q_bias is None else again.q_bias[1]))


def test_a_low_rank_query_in_bf16_is_near(tmp_path: Path) -> None:
    adaptor, path = trained_adaptor(DECODER, "mean", "qkv"), tmp_path / "a.safetensors"
    adaptor.save(path, q_rank=24, decoder=DECODER)
    q = Adaptor.load(path, DECODER, base="tiny").q
    assert q is not None and adaptor.q is not None
    backbone = torch.stack([layer.qkv[: DECODER.config.q_width] for layer in DECODER.weights.layers])
    assert (q - adaptor.q).norm() < 2 * 2**-8 * (adaptor.q - backbone).norm()  # the rounding of two factors


def test_an_unchanged_query_is_no_difference(tmp_path: Path) -> None:
    adaptor = Adaptor.copied(DECODER, AdaptorInfo("tiny", (), mirror="qkv"))
    adaptor.save(tmp_path / "a.safetensors", q_rank=3, decoder=DECODER)
    q = Adaptor.load(tmp_path / "a.safetensors", DECODER, base="tiny").q
    assert q is not None and adaptor.q is not None and q.equal(adaptor.q)


def test_the_rank_touches_no_other_file(tmp_path: Path) -> None:
    """Only a low-rank file needs the newer format; all others stay readable for an older masw."""
    for name, mirror, rank in (("kv", "kv", 4), ("whole", "qkv", 0), ("low", "qkv", 4)):
        trained_adaptor(DECODER, "mean", mirror).save(tmp_path / name, q_rank=rank, decoder=DECODER)
    versions = {}
    for path in tmp_path.iterdir():
        with safe_open(path, framework="pt") as file:
            versions[path.name] = json.loads(file.metadata()["masw"])["version"], "q_up" in file.keys()  # noqa: SIM118
    assert versions == {"kv": (1, False), "whole": (1, False), "low": (2, True)}


def test_low_rank_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    trained_adaptor(DECODER, "mean", "qkv").save(path, q_rank=4, decoder=DECODER)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"q_down": tensors["q_down"][:, :3].contiguous()}, path, metadata)
    assert "q_down [2, 3, 24], expected [2, 32, 4] and [2, 4, 24]" in refusal(path)
    save_file({name: t for name, t in tensors.items() if name != "q_down"}, path, metadata)
    assert "lacks or has extra tensors (['q', 'q_up'])" in refusal(path)
    with pytest.raises(ValueError, match="pass the decoder"):
        trained_adaptor(DECODER, "mean", "qkv").save(path, q_rank=4)


def test_low_rank_of_nothing() -> None:
    up, down, missed = low_rank(torch.zeros(2, 4, 3), 2)
    assert up.shape == (2, 4, 2) and down.shape == (2, 2, 3) and missed == 0 and not (up @ down).any()


SMOLLM2 = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, 1e5, 1e-5, True)
QWEN = ModelConfig("qwen2", 151936, 896, 24, 14, 2, 64, 4864, 32768, 1e6, 1e-6, True, qkv_bias=True)


@pytest.mark.parametrize("config", [SMOLLM2, QWEN], ids=["smollm2", "qwen"])
def test_a_shipped_file_with_a_low_rank_query_is_small(tmp_path: Path, config: ModelConfig) -> None:
    rank = rank_that_fits(config)
    assert rank >= 32
    info = AdaptorInfo("x", (4, 8), "learned", mirror="qkv")
    adaptor = Adaptor(config, info, dtype=torch.bfloat16, device=torch.device("cpu"))
    size = sum(p.nbytes for name, p in adaptor.named_parameters() if name != "q")
    size += 2 * config.layers * rank * (config.q_width + config.hidden)
    assert SHIPPED_BYTES - 200_000 < size < SHIPPED_BYTES - 30_000


def test_an_adaptor_for_another_draft_or_stride_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    adaptor = Adaptor.copied(DECODER, AdaptorInfo("tiny", (4, 8)))
    adaptor.save(path)
    assert "belongs to the draft 'tiny', not 'other'" in refusal(path, base="other")
    assert "trained for stride 4, 8, not 5; pass --stride 4" in refusal(path, stride=5)
    assert adaptor.serves(8) and not adaptor.serves(5)
    Adaptor.load(path, DECODER, base="tiny", stride=8)
    deeper = tiny_decoder(tiny_config("qwen2", layers=3))
    assert "'layers': 2" in refusal(path, decoder=deeper) and "'layers': 3" in refusal(path, decoder=deeper)
    assert "lacks or has extra tensors (['kv_bias'])" in refusal(path, decoder=tiny_decoder(tiny_config("llama")))


def test_files_that_are_no_adaptor_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert "no adaptor at" in refusal(path)
    assert "no adaptor at" in refusal(tmp_path)
    for content in (b"", b"not a tensor file", bytes(200)):
        path.write_bytes(content)
        assert "is not an adaptor that masw wrote" in refusal(path)
    tensors = {"kv": torch.zeros(2, 32, 24)}
    for metadata in (None, {"masw": "{"}, {"masw": "[]"}, {"masw": json.dumps({"version": 1})}):
        save_file(tensors, path, metadata)
        assert "is not an adaptor that masw wrote" in refusal(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    Adaptor.copied(DECODER, AdaptorInfo("tiny", ())).save(path)
    info = {"base": "tiny", "strides": []}
    save_file({"kv": torch.zeros(1)}, path, {"masw": json.dumps({"version": 99, "info": info, "shape": {}})})
    assert "has format 99, this masw reads formats 1 and 2" in refusal(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    Adaptor.copied(DECODER, AdaptorInfo("tiny", ())).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "is not an adaptor that masw wrote" in refusal(path)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(UsageError, match=r"cannot write the adaptor to|is a folder"):
        trained_adaptor(DECODER).save(tmp_path / "a.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("options", [{"slot_input": "sum"}, {"mirror": "k"}])
def test_unknown_choices_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="is unknown; use"):
        AdaptorInfo("tiny", (), **options)  # type: ignore[arg-type]


def test_what_the_file_system_refuses_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    too_long = "a" * 300
    for path in (tmp_path / "file" / "a.safetensors", tmp_path / too_long):
        with pytest.raises(UsageError, match="cannot write the adaptor to") as error:
            trained_adaptor(DECODER).save(path)
        assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_tokens_seen_count_those_of_the_runs_before() -> None:
    before = {"tokens": 80, "init": {"tokens": 400, "recipe": {}}}
    assert AdaptorInfo("tiny", (4,), provenance={"tokens": 1000, "init": before}).tokens_seen == 1480
    assert AdaptorInfo("tiny", ()).tokens_seen == 0


def test_the_longest_row_is_that_of_all_runs_before() -> None:
    before = {"recipe": {"stages": ["512x2:60k:2/1/1", "4096x1:140k"]}}
    about = {"recipe": {"stages": ["2048x1:1k"]}}
    assert AdaptorInfo("tiny", (4,), provenance=about).longest_row == 2048
    assert AdaptorInfo("tiny", (4,), provenance=about | {"init": before}).longest_row == 4096
    assert AdaptorInfo("tiny", (4,), provenance=about).reach == 4 * 2048
    two = {
        "recipe": {"stages": ["2048x2:8k:1/1/1", "4096x1:8k", "256x1:1k"]}
    }  # of which two steps of 4,096 tokens are the first stage
    for tokens, longest in (
        (1, 2048),
        (8192, 2048),
        (8193, 4096),
        (10**6, 4096),
    ):  # stopped, or best, in the middle of its recipe
        assert AdaptorInfo("tiny", (4,), provenance=two | {"tokens": tokens}).longest_row == longest
    assert AdaptorInfo("tiny", (4,), provenance=two | {"tokens": 0, "init": before | {"tokens": 60_000}}).longest_row == 512
    for strange in ({"recipe": "none"}, {"recipe": {"stages": "512"}}, {"recipe": {"stages": ["abc", None, 7]}, "init": "gone"}):
        assert AdaptorInfo("tiny", (4,), provenance=strange).longest_row in (None, 7)
        assert AdaptorInfo("tiny", (4,), provenance=strange | {"tokens": "many"}).tokens_seen == 0
    assert AdaptorInfo("tiny", ()).longest_row is None and AdaptorInfo("tiny", ()).reach is None
