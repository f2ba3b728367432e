"""GGUF files that the test writes itself, read back through the converter and through transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from masw import convert as module
from masw.convert import convert, read_about, unpermute
from masw.errors import MaswError
from masw.packages import sha256_file
from masw.tokenizer import Tokenizer
from tests.modelfiles import HEADS, KV_HEADS, TOKENS, gguf_values, write_gguf

Q = gguf.GGMLQuantizationType


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: row 2i + h of a head in the file is row h * D/2 + i of the model."""
    width = weight.shape[0] // heads
    result = np.empty_like(weight)
    for head in range(heads):
        for i in range(width // 2):
            for half in range(2):
                result[head * width + 2 * i + half] = weight[head * width + half * (width // 2) + i]
    return result


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.bfloat16)


def test_unpermute_undoes_the_file_order() -> None:
    weight = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    assert torch.equal(unpermute(torch.from_numpy(llama_cpp_order(weight, 4)), 4), torch.from_numpy(weight))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_values_and_config(tmp_path: Path, architecture: str) -> None:
    values = gguf_values(architecture)
    kinds = {"blk.0.ffn_down.weight": Q.Q4_0, "blk.1.attn_v.weight": Q.Q8_0, "token_embd.weight": Q.Q5_1}
    stored = dict(values)
    if architecture == "llama":
        for layer in range(2):
            for name, heads in (("q", HEADS), ("k", KV_HEADS)):
                key = f"blk.{layer}.attn_{name}.weight"
                stored[key] = llama_cpp_order(values[key], heads)
    write_gguf(tmp_path / "m.gguf", architecture, stored, kinds)
    convert(tmp_path / "m.gguf", tmp_path / "out", {"source": "test"})

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == architecture and config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-6, 100000.0)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["max_position_embeddings"]) == (4, 2, 512)
    found = tensors(tmp_path / "out")
    assert len(found) == len(values) and all(value.dtype == torch.bfloat16 for value in found.values())
    for part in "qkv":
        assert torch.equal(
            found[f"model.layers.1.self_attn.{part}_proj.weight"], expected(values, kinds, f"blk.1.attn_{part}.weight")
        )
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], expected(values, kinds, "blk.0.ffn_down.weight"))
    assert torch.equal(found["model.embed_tokens.weight"], expected(values, kinds, "token_embd.weight"))
    assert torch.equal(found["model.layers.0.post_attention_layernorm.weight"], bf16(values["blk.0.ffn_norm.weight"]))
    if architecture == "qwen2":
        assert torch.equal(found["model.layers.1.self_attn.q_proj.bias"], bf16(values["blk.1.attn_q.bias"]))


def expected(values: dict[str, np.ndarray], kinds: dict[str, Q], name: str) -> torch.Tensor:
    if name not in kinds:
        return bf16(values[name])
    return bf16(gguf.quants.dequantize(gguf.quants.quantize(values[name], kinds[name]), kinds[name]))


def test_slices_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen2", gguf_values("qwen2"), {"blk.0.ffn_down.weight": Q.Q4_0})
    convert(tmp_path / "m.gguf", tmp_path / "one", {})
    monkeypatch.setattr(module, "SLICE_VALUES", 100)
    monkeypatch.setattr(module, "SHARD_BYTES", 9000)
    done: list[int] = []
    convert(tmp_path / "m.gguf", tmp_path / "many", {}, lambda what, n, of: done.append(n))
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == many.keys() and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in many.values())
    assert done == sorted(done)


@pytest.mark.parametrize(("head", "tied_to"), [("tied", "token_embd.weight"), ("copy", "output.weight"), ("own", None)])
def test_a_matrix_stored_twice_is_tied_to_its_finer_copy(tmp_path: Path, head: str, tied_to: str | None) -> None:
    values = gguf_values("qwen2", head=head)
    write_gguf(tmp_path / "m.gguf", "qwen2", values, {"token_embd.weight": Q.Q4_0})
    convert(tmp_path / "m.gguf", tmp_path / "out", {})
    about, found = read_about(tmp_path / "out"), tensors(tmp_path / "out")
    assert about is not None and about.get("tied_to") == tied_to
    assert ("lm_head.weight" in found) == (head == "own")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == (head != "own")
    if head == "copy":
        assert torch.equal(found["model.embed_tokens.weight"], bf16(values["output.weight"]))


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "m.gguf", "llama", gguf_values("llama"))
    convert(tmp_path / "m.gguf", tmp_path / "out", {})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.generation_config.eos_token_id == [TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")]


def test_tokenizer_of_the_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", gguf_values("llama"), pre="smollm")
    convert(tmp_path / "m.gguf", tmp_path / "out", {})
    tokenizer = Tokenizer(tmp_path / "out")
    text = "hello the 1212 naïve 🦊\n<tool>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == (TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>"))
    assert tokenizer.size == len(TOKENS) - 1  # padding is no token
    assert tokenizer.encode("hel") == [TOKENS.index("hel")] and tokenizer.encode("<tool>") == [TOKENS.index("<tool>")]
    assert tokenizer.encode("12") == [TOKENS.index("1"), TOKENS.index("2")]  # SmolLM reads digits one by one
    start, end = TOKENS.index("<|im_start|>"), TOKENS.index("<|im_end|>")
    assert tokenizer.chat("hel") == [
        *(start, *tokenizer.encode("user\n"), TOKENS.index("hel"), end, *tokenizer.encode("\n")),
        *(start, *tokenizer.encode("assistant\n")),
    ]


def test_provenance_and_hashes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", gguf_values("llama"), {"blk.0.ffn_up.weight": Q.Q4_1})
    convert(tmp_path / "m.gguf", tmp_path / "out", {"packages": "x ==1", "gguf_sha256": "ab"})
    about = read_about(tmp_path / "out")
    assert about is not None and about["packages"] == "x ==1" and about["quantisation"]["Q4_1"] == 1
    on_disk = {path.name for path in (tmp_path / "out").iterdir()} - {"masw.json"}
    assert about["files"].keys() == on_disk
    assert all(about["files"][name]["sha256"] == sha256_file(tmp_path / "out" / name) for name in on_disk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "mystery"}, "pre-tokeniser 'mystery'"),
        ({"model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"architecture": "falcon"}, "architecture 'falcon'"),
        ({"extra": "blk.0.attn_qkv.weight"}, "tensor 'blk.0.attn_qkv.weight' is not known"),
        ({"extra": "rope_freqs.weight"}, "rope scaling"),
    ],
)
def test_what_is_not_known_is_refused_and_nothing_stays(tmp_path: Path, change: dict[str, str], message: str) -> None:
    values = gguf_values("llama")
    if "extra" in change:
        values[change["extra"]] = np.zeros((32, 32), np.float32)
    options = {key: value for key, value in change.items() if key in ("pre", "model")}
    write_gguf(tmp_path / "m.gguf", change.get("architecture", "llama"), values, **options)  # type: ignore[arg-type]
    with pytest.raises(MaswError, match=message) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "out", {})
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"hello" * 100)
    with pytest.raises(MaswError, match="not a readable GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_interrupted_conversion_leaves_the_old_folder_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", gguf_values("llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "m.gguf", tmp_path / "out", {}, stop)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["m.gguf", "old", "out"]
