"""GGUF file -> a model folder in the hub's layout (config, tokenizer, bf16 safetensors), read one slice of a tensor at a time.

Legend: H hidden, D head_dim, V vocabulary. GGUF names dimensions innermost first; arrays here are in torch's order [out, in].
Quantised blocks are expanded to float32 and rounded to bf16 once; no slice is larger than `SLICE_VALUES`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from masw.errors import MaswError
from masw.packages import Progress, no_progress, sha256_file, write_json

FORMAT = 1  # of masw.json; a folder with another number is converted again
SLICE_VALUES = 1 << 24
SHARD_BYTES = 512 << 20

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# The pre-tokenisers that GGUF only names. Digits: one by one (SmolLM, Qwen) or in threes (Llama 3).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"qwen2": _WORDS % r"\p{N}", "llama-bpe": _WORDS % r"\p{N}{1,3}"}
_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")


def convert(source: Path, folder: Path, provenance: dict[str, Any], progress: Progress = no_progress) -> None:
    """Writes the model of the GGUF file `source` to `folder`, which appears only when it is whole.

    `provenance` goes into the folder's masw.json beside quantisation types and the SHA-256 of every file written.
    Raises MaswError for an architecture, tokenizer or tensor that is not known here.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise MaswError(f"{source.name} is not a readable GGUF file ({error}); fetch it again") from None
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        meta = _Metadata(reader)
        tied_to = _tied_source(reader)
        config = _config(meta, reader, tied=tied_to is not None)
        write_json(partial / "config.json", config)
        stops = _write_tokenizer(meta, partial)
        generation = {"bos_token_id": meta.get("tokenizer.ggml.bos_token_id"), "eos_token_id": stops}
        write_json(partial / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
        _write_tensors(reader, config, tied_to, partial, progress)
        files = {p.name: {"sha256": sha256_file(p), "bytes": p.stat().st_size} for p in sorted(partial.iterdir())}
        kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
        about = {"format": FORMAT, **provenance, "quantisation": dict(kinds.most_common()), "dtype": "bfloat16", "files": files}
        if tied_to:
            about["tied_to"] = tied_to
        write_json(partial / "masw.json", about)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _Metadata:
    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = str(self.need("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise MaswError(f"GGUF architecture '{self.architecture}' is not supported; only {' and '.join(_ARCHITECTURES)} are")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise MaswError(f"the GGUF file lacks '{key}'; use another file")
        return value

    def number(self, key: str) -> Any:
        return self.need(f"{self.architecture}.{key}")


def _config(meta: _Metadata, reader: gguf.GGUFReader, tied: bool) -> dict[str, Any]:
    """The hub's config.json. A llama3 rope scaling is refused: GGUF keeps its result, not its parameters."""
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names or meta.get(f"{meta.architecture}.rope.scaling.type", "none") != "none":
        raise MaswError("GGUF files with rope scaling are not supported; use the safetensors model from the hub")
    hidden, heads = int(meta.number("embedding_length")), int(meta.number("attention.head_count"))
    vocab = next(int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight")
    # GGUF stores float32 (9.99999997e-07 for 1e-6): the shortest decimal that rounds to it is what was meant.
    eps = float(str(np.float32(meta.number("attention.layer_norm_rms_epsilon"))))
    theta = float(str(np.float32(meta.get(f"{meta.architecture}.rope.freq_base", 10000.0))))
    return {
        "architectures": [_ARCHITECTURES[meta.architecture]],
        "model_type": meta.architecture,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": int(meta.number("feed_forward_length")),
        "num_hidden_layers": int(meta.number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{meta.architecture}.attention.head_count_kv", heads)),
        "head_dim": int(meta.get(f"{meta.architecture}.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(meta.number("context_length")),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }


# ---- tensors


def _tied_source(reader: gguf.GGUFReader) -> str | None:
    """Name of the GGUF tensor that serves as embedding and head, None if they are two matrices.

    Quantisers may store a tied matrix twice, at different precision. Two copies that differ by no more than quantisation are one
    matrix, and the finer copy is nearer to the original; two trained matrices differ by more than their own size.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    embed, head = tensors.get("token_embd.weight"), tensors.get("output.weight")
    if embed is None:
        raise MaswError("the GGUF file lacks 'token_embd.weight'; use another file")
    if head is None:
        return "token_embd.weight"
    if list(embed.shape) != list(head.shape):
        return None
    step = max(1, embed.data.shape[0] // 2048)
    a = gguf.quants.dequantize(embed.data[::step], embed.tensor_type)
    b = gguf.quants.dequantize(head.data[::step], head.tensor_type)
    if float(np.square(a - b).sum()) > 0.05 * float(np.square(b).sum()):
        return None
    return "output.weight" if head.n_bytes >= embed.n_bytes else "token_embd.weight"


def _hub_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    if stem.startswith("blk."):
        _, layer, inner = stem.split(".", 2)
        if inner in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[inner]}.{kind}"
    return None


def _dequantised(tensor: Any) -> torch.Tensor:
    """The tensor as bf16, expanded slice by slice along its first (output) dimension."""
    shape = [int(n) for n in reversed(tensor.shape)]
    if len(shape) == 1:
        return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))).to(torch.bfloat16)
    result = torch.empty(shape, dtype=torch.bfloat16)
    rows = max(1, SLICE_VALUES // shape[1])
    for start in range(0, shape[0], rows):
        values = gguf.quants.dequantize(tensor.data[start : start + rows], tensor.tensor_type)
        result[start : start + rows] = torch.from_numpy(np.array(values))  # a copy: the file itself is not writable
    return result


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of Q/K rows. There a head's rows are rotation pairs (0, D/2), (1, D/2 + 1), ...; here they are in
    halves. weight: [heads*D, ...] -> same shape."""
    pairs = weight.unflatten(0, (heads, weight.shape[0] // heads // 2, 2))  # [heads, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any], tied_to: str | None) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(hub name, bf16 tensor, bytes of GGUF consumed)"""
    for tensor in sorted(reader.tensors, key=lambda t: t.data_offset):
        name = _hub_name(tensor.name)
        if name is None:
            raise MaswError(f"GGUF tensor '{tensor.name}' is not known for {config['model_type']}; use another file")
        if tied_to and name in ("model.embed_tokens.weight", "lm_head.weight"):
            if tensor.name != tied_to:
                continue
            name = "model.embed_tokens.weight"
        value = _dequantised(tensor)
        if config["model_type"] == "llama" and ".q_proj." in name:
            value = unpermute(value, config["num_attention_heads"])
        elif config["model_type"] == "llama" and ".k_proj." in name:
            value = unpermute(value, config["num_key_value_heads"])
        yield name, value, int(tensor.n_bytes)


def _write_tensors(
    reader: gguf.GGUFReader, config: dict[str, Any], tied_to: str | None, folder: Path, progress: Progress
) -> None:
    """Shards of about SHARD_BYTES with an index; a model that fits one shard gets the plain name and no index."""
    total, read, size = sum(int(t.n_bytes) for t in reader.tensors), 0, 0
    shards: list[tuple[str, list[str], int]] = []
    shard: dict[str, torch.Tensor] = {}
    for name, value, consumed in _tensors(reader, config, tied_to):
        if shard and size + value.nbytes > SHARD_BYTES:
            shards.append(_write_shard(folder, len(shards), shard))
            shard, size = {}, 0
        shard[name] = value.contiguous()
        size += value.nbytes
        read += consumed
        progress("converting", read, total)
    shards.append(_write_shard(folder, len(shards), shard))
    progress("converting", total, total)
    if len(shards) == 1:
        os.replace(folder / shards[0][0], folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for index, (old, names, nbytes) in enumerate(shards):
        new = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / old, folder / new)
        weight_map |= dict.fromkeys(names, new)
        total_bytes += nbytes
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_shard(folder: Path, index: int, tensors: dict[str, torch.Tensor]) -> tuple[str, list[str], int]:
    name = f"shard{index}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return name, list(tensors), sum(tensor.nbytes for tensor in tensors.values())


# ---- tokenizer


def _write_tokenizer(meta: _Metadata, folder: Path) -> list[int]:
    """tokenizer.json and tokenizer_config.json; returns the ids that end a text."""
    kind, pre = meta.need("tokenizer.ggml.model"), str(meta.get("tokenizer.ggml.pre", "default"))
    if kind != "gpt2":
        raise MaswError(f"GGUF tokenizer '{kind}' is not supported, only byte-level BPE is; use the model from the hub")
    tokens: list[str] = meta.need("tokenizer.ggml.tokens")
    types = [gguf.TokenType(int(t)) for t in meta.need("tokenizer.ggml.token_type")]
    # Unused entries only pad the embedding to a round size; they are no tokens.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != gguf.TokenType.UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in meta.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    else:
        raise MaswError(f"GGUF pre-tokeniser '{pre}' is not known; use the model from the hub")
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    added = [i for i, t in enumerate(types) if t in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)]
    control = gguf.TokenType.CONTROL
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=types[i] == control) for i in added])
    bos, eos = meta.get("tokenizer.ggml.bos_token_id"), int(meta.need("tokenizer.ggml.eos_token_id"))
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = byte_level
    if meta.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        first = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], int(bos))]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, first])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta.number("context_length")),
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos],
    }
    if bos is not None:
        settings["bos_token"] = tokens[bos]
    if (pad := meta.get("tokenizer.ggml.padding_token_id")) is not None:
        settings["pad_token"] = tokens[pad]
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    write_json(folder / "tokenizer_config.json", settings)
    stops = [eos, meta.get("tokenizer.ggml.eot_token_id"), *(vocab.get(token) for token in _STOP_TOKENS)]
    return list(dict.fromkeys(int(i) for i in stops if i is not None))


def read_about(folder: Path) -> dict[str, Any] | None:
    """masw.json of a converted folder; None if there is none or it is of another format."""
    try:
        about: dict[str, Any] = json.loads((folder / "masw.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about if about.get("format") == FORMAT else None
