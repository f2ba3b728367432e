"""Hub folders that the test writes itself, loaded into fused tensors; every broken folder names what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from masw.config import ModelConfig
from masw.errors import UsageError
from masw.weights import load_weights, parameter_count, random_weights, read_config
from tests.modelfiles import config_json, write_hub_folder

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_lands_in_its_place(tmp_path: Path, family: str, shards: int, tied: bool) -> None:
    hub = write_hub_folder(tmp_path, config_json(family, tied), shards)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config, CPU, torch.float32)
    assert torch.equal(weights.embed, hub["model.embed_tokens.weight"]) and torch.equal(weights.norm, hub["model.norm.weight"])
    assert (weights.head is weights.embed) == tied
    if not tied:
        assert torch.equal(weights.head, hub["lm_head.weight"])
    for index, layer in enumerate(weights.layers):
        p = f"model.layers.{index}."
        assert torch.equal(layer.qkv, torch.cat([hub[f"{p}self_attn.{x}_proj.weight"] for x in "qkv"]))
        assert torch.equal(layer.gate_up, torch.cat([hub[f"{p}mlp.gate_proj.weight"], hub[f"{p}mlp.up_proj.weight"]]))
        assert torch.equal(layer.out, hub[f"{p}self_attn.o_proj.weight"])
        assert torch.equal(layer.down, hub[f"{p}mlp.down_proj.weight"])
        assert torch.equal(layer.attn_norm, hub[f"{p}input_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, hub[f"{p}post_attention_layernorm.weight"])
        assert (layer.qkv_bias is not None) == (family == "qwen2")
        if layer.qkv_bias is not None:
            assert torch.equal(layer.qkv_bias, torch.cat([hub[f"{p}self_attn.{x}_proj.bias"] for x in "qkv"]))
        assert (layer.q_norm is not None) == (family == "qwen3")
        if layer.q_norm is not None and layer.k_norm is not None:
            assert torch.equal(layer.q_norm, hub[f"{p}self_attn.q_norm.weight"])
            assert torch.equal(layer.k_norm, hub[f"{p}self_attn.k_norm.weight"])
    assert parameter_count(tmp_path) == sum(t.numel() for t in hub.values()) == sum(t.numel() for t in weights.tensors())


def test_dtype_and_progress(tmp_path: Path) -> None:
    hub = write_hub_folder(tmp_path, config_json(), 2)
    seen: list[tuple[str, int, int]] = []
    weights = load_weights(tmp_path, read_config(tmp_path), CPU, torch.bfloat16, lambda *now: seen.append(now))
    assert all(t.dtype == torch.bfloat16 for t in weights.tensors())
    assert torch.equal(weights.norm, hub["model.norm.weight"].bfloat16())
    assert seen[-1] == ("loading", parameter_count(tmp_path), parameter_count(tmp_path))


def test_loaded_weights_do_not_depend_on_the_files(tmp_path: Path) -> None:
    hub = write_hub_folder(tmp_path, config_json())
    weights = load_weights(tmp_path, read_config(tmp_path), CPU, torch.float32)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(weights.embed, hub["model.embed_tokens.weight"])


def test_a_head_stored_beside_a_tied_embedding_is_ignored(tmp_path: Path) -> None:
    write_hub_folder(tmp_path, config_json())
    (tmp_path / "config.json").write_text(json.dumps(config_json(tied=True)))
    weights = load_weights(tmp_path, read_config(tmp_path), CPU, torch.float32)
    assert weights.head is weights.embed


def _edit(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def _break(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    if how == "missing":
        _edit(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    elif how == "unexpected":
        _edit(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    elif how == "shape":
        _edit(folder, **{"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 31)})
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "pickle":
        file.rename(folder / "pytorch_model.bin")
    elif how == "none":
        file.unlink()
    elif how == "many":
        (folder / "b.safetensors").write_bytes(file.read_bytes())
        file.rename(folder / "a.safetensors")
    elif how == "shard":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
        )
    elif how == "outside":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../m.safetensors"}}))
    elif how == "config":
        (folder / "config.json").write_text("{")
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "short config":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif how == "quantised":
        (folder / "config.json").write_text(json.dumps(config_json(quantization_config={"quant_method": "awq"})))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"lacks the tensor 'model.layers.1.mlp.up_proj.weight' \(and 0 more\)"),
        ("unexpected", "unexpected tensor 'model.layers.0.self_attn.q_proj.bias' for a llama model"),
        ("shape", r"'model.layers.0.mlp.up_proj.weight' is \[64, 31\], the config says \[64, 32\]"),
        ("cut", "damaged"),
        ("pickle", "only pickle weights .* never loaded"),
        ("none", "no weights"),
        ("many", "2 safetensors files and no index"),
        ("shard", "lacks model-00001-of-00002.safetensors"),
        ("outside", "points outside its folder"),
        ("config", "cannot be read"),
        ("no config", "has no config.json"),
        ("short config", "lacks 'num_attention_heads'"),
        ("quantised", r"is quantised \(awq\)"),
    ],
)
def test_broken_folders(tmp_path: Path, how: str, message: str) -> None:
    write_hub_folder(tmp_path, config_json())
    _break(tmp_path, how)
    with pytest.raises(UsageError, match=message) as caught:
        load_weights(tmp_path, read_config(tmp_path), CPU, torch.float32)
    assert "\n" not in str(caught.value)


def test_random_weights_are_seeded_and_nested() -> None:
    two, four = (ModelConfig.from_hf(config_json(num_hidden_layers=n)) for n in (2, 4))
    a, again, other = (random_weights(two, seed, CPU, torch.float32) for seed in (1, 1, 2))
    deep = random_weights(four, 1, CPU, torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(a.tensors(), again.tensors(), strict=True))
    assert not torch.equal(a.embed, other.embed)
    assert torch.equal(a.embed, deep.embed) and torch.equal(a.head, deep.head)
    assert torch.equal(a.layers[1].qkv, deep.layers[1].qkv) and not torch.equal(deep.layers[2].qkv, deep.layers[3].qkv)
    assert torch.equal(a.norm, torch.ones(32))
    unit = torch.nn.functional.rms_norm(torch.randn(256, 32), (32,))
    assert 1.5 < float((unit @ a.head.T).std()) < 2.5  # neither flat nor one-hot
    tied = random_weights(ModelConfig.from_hf(config_json(tied=True)), 1, CPU, torch.float32)
    assert tied.head is tied.embed and 1.5 < float((unit @ tied.head.T).std()) < 2.5
