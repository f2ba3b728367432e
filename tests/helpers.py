"""Tiny models, stub networks and a plain reference that the tests compare with. Nothing here uses masw's masks or forward.

Legend: B batch, T raw tokens, N rows (raw and slots interleaved), K keys, H query heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from masw.adaptor import Adaptor, AdaptorInfo
from masw.cascade import CascadeDraft
from masw.config import MemoryShape, ModelConfig, RopeScaling
from masw.decoder import Decoder, LayerWeights, Weights
from masw.drafters import Drafter, ModelDraft, NoDraft
from masw.eagle import EagleHead, EagleInfo
from masw.eagle_draft import EagleDraft
from masw.engine import Round, Settings, Target, generate
from masw.lookup import LookupDraft
from masw.memory import Listener, Memory
from masw.methods import METHODS, MemoryOptions
from masw.recorder import Recorder
from masw.snapkv import draft_memory
from masw.verify import Sampling

CPU = torch.device("cpu")
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")  # llama3: llama with its rope scaling
OPTIONS = MemoryOptions(sinks=2, window=8, stride=4)


# ---- tiny models


def tiny_config(
    family: str = "llama", *, vocab: int = 61, layers: int = 2, heads: int = 4, kv_heads: int = 2, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        family="llama" if family == "llama3" else family,
        vocab=vocab,
        hidden=24,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        intermediate=40,
        max_position=4096,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32) if family == "llama3" else None,
    )


def tiny_decoder(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """Seeded random weights, norms and biases included, that give logits with a spread of about two."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)

    c, qkv = config, config.q_width + 2 * config.kv_width
    layers = [
        LayerWeights(
            attn_norm=normal(c.hidden, std=0.1, mean=1.0),
            qkv=normal(qkv, c.hidden, std=1.5 * c.hidden**-0.5),
            qkv_bias=normal(qkv, std=0.5) if c.qkv_bias else None,
            out=normal(c.hidden, c.q_width, std=c.q_width**-0.5),
            mlp_norm=normal(c.hidden, std=0.1, mean=1.0),
            gate_up=normal(2 * c.intermediate, c.hidden, std=c.hidden**-0.5),
            down=normal(c.hidden, c.intermediate, std=c.intermediate**-0.5),
            q_norm=normal(c.head_dim, std=0.1, mean=1.0) if c.qk_norm else None,
            k_norm=normal(c.head_dim, std=0.1, mean=1.0) if c.qk_norm else None,
        )
        for _ in range(c.layers)
    ]
    embed = normal(c.vocab, c.hidden, std=1.0)
    head = embed if c.tied else normal(c.vocab, c.hidden, std=2.0 * c.hidden**-0.5)
    return Decoder(config, Weights(embed, layers, normal(c.hidden, std=0.1, mean=1.0), head))


def noisy(decoder: Decoder, scale: float, seed: int = 1) -> Decoder:
    """A copy with every weight disturbed: a draft that is often, not always, right."""
    generator = torch.Generator().manual_seed(seed)

    def disturbed(t: Tensor | None) -> Any:
        return None if t is None else t + torch.randn(t.shape, generator=generator, dtype=t.dtype) * scale * t.std()

    w = decoder.weights
    layers = [LayerWeights(**{name: disturbed(t) for name, t in vars(layer).items()}) for layer in w.layers]
    embed = disturbed(w.embed)
    return Decoder(decoder.config, Weights(embed, layers, disturbed(w.norm), embed if w.head is w.embed else disturbed(w.head)))


def with_vocab(decoder: Decoder, vocab: int) -> Decoder:
    """The same model with its vocabulary padded (zero rows) or cut."""
    w = decoder.weights

    def fit(table: Tensor) -> Tensor:
        return torch.cat([table, table.new_zeros(max(0, vocab - len(table)), table.shape[1])])[:vocab]

    embed = fit(w.embed)
    head = embed if w.head is w.embed else fit(w.head)
    return Decoder(replace(decoder.config, vocab=vocab), Weights(embed, w.layers, w.norm, head))


def trained_adaptor(decoder: Decoder, slot_input: str = "mean", mirror: str = "kv", seed: int = 5, noise: float = 0.3) -> Adaptor:
    """An adaptor that differs from the backbone, as training would leave it, so that no test can mistake one for the other."""
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny", (), slot_input, 3, mirror))
    generator = torch.Generator().manual_seed(seed)
    for parameter in adaptor.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * noise)
    return adaptor


def eagle_head(target: Decoder, seed: int = 7) -> EagleHead:
    """A head that nobody trained but that is sometimes right: the target's last layer, and an fc that passes embeddings on too."""
    head = EagleHead.copied(target, EagleInfo("tiny"), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05)
    head.fc[:, : target.config.hidden].diagonal().add_(1.0)
    return head


def memory_for(
    decoder: Decoder | Chain,
    shape: MemoryShape,
    *,
    tokens: int = 64,
    batch: int = 1,
    adaptor: Adaptor | None = None,
    listener: Listener | None = None,
) -> Memory:
    if shape.stride and adaptor is None:
        assert isinstance(decoder, Decoder)
        adaptor = trained_adaptor(decoder)
    return draft_memory(
        decoder.config, shape, tokens=tokens, device=CPU, dtype=decoder.dtype, batch=batch, adaptor=adaptor, listener=listener
    )


def random_tokens(count: int, vocab: int, seed: int, batch: int = 1) -> Tensor:
    return torch.randint(0, vocab, (batch, count), generator=torch.Generator().manual_seed(seed))


@contextmanager
def unset_memory_is_nan() -> Iterator[None]:
    """`torch.empty` gives NaN (and the largest integer), so that reading what was never written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- the plain reference: the paper's table and an unfused forward, in loops

Row = tuple[str, int]  # ("raw", i) or ("slot", tau)


def interleaved(tokens: int, stride: int | None) -> list[Row]:
    """x_0 .. x_{t-1} with slot tau after x_{tau-1}."""
    rows: list[Row] = []
    for i in range(tokens):
        rows.append(("raw", i))
        if stride is not None and (i + 1) % stride == 0:
            rows.append(("slot", i + 1))
    return rows


def sees(query: Row, key: Row, sinks: int, window: int | None) -> bool:
    """One cell of the paper's visibility table."""
    (what, at), (kind, j) = query, key
    if kind == "slot":
        return j <= at  # for both kinds of query
    if what == "raw":
        return j <= at and (window is None or j < sinks or at - window < j)
    return j < at and (window is None or j < sinks or at - window <= j)


@lru_cache(maxsize=64)
def table_mask(tokens: int, sinks: int, window: int | None, stride: int | None) -> Tensor:
    """[N, N] of who sees whom, cell by cell."""
    rows = interleaved(tokens, stride)
    return torch.tensor([[sees(query, key, sinks, window) for key in rows] for query in rows])


def reference_logits(
    decoder: Decoder,
    tokens: Tensor,
    shape: MemoryShape,
    adaptor: Adaptor | None = None,
    seen_of: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits [B, T, V] of one dense pass over the interleaved sequence, every step spelled out. `tokens` [B, T].

    `seen_of(layer, q, k)` gives a mask [B, H, N, N] in place of the table, from turned q [B, N, H, D] and k [B, N, kv_heads, D].
    """
    c, w = decoder.config, decoder.weights
    stride = shape.stride
    rows = interleaved(tokens.shape[1], stride)
    longest = max(64, 1 << (tokens.shape[1] - 1).bit_length())  # the mask of a prefix is a corner of the whole one
    seen = table_mask(longest, shape.sinks, shape.window, stride)[: len(rows), : len(rows)]
    is_slot = torch.tensor([kind == "slot" for kind, _ in rows])
    places = torch.tensor([at for _, at in rows], dtype=torch.float64)
    angle = torch.outer(places, reference_frequencies(c))  # [N, D / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    inputs = []
    for kind, at in rows:
        if kind == "raw":
            inputs.append(w.embed[tokens[:, at]])
        else:
            assert adaptor is not None and stride is not None
            inputs.append(_reference_slot(adaptor, w.embed, tokens[:, at - stride : at]))
    x = torch.stack(inputs, dim=1)  # [B, N, hidden]

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return t / (t.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def turn(t: Tensor) -> Tensor:  # [B, N, heads, D]
        low, high = t.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    for index, layer in enumerate(w.layers):
        h = norm(x, layer.attn_norm)
        q, k, v = (h @ part.T for part in layer.qkv.split([c.q_width, c.kv_width, c.kv_width]))
        if layer.qkv_bias is not None:
            q, k, v = (t + b for t, b in zip((q, k, v), layer.qkv_bias.split([c.q_width, c.kv_width, c.kv_width]), strict=True))
        if adaptor is not None:
            mine_k, mine_v = (h @ part.T for part in adaptor.kv[index].chunk(2))
            mine_q = q if adaptor.q is None else h @ adaptor.q[index].T
            if adaptor.kv_bias is not None:
                bias_k, bias_v = adaptor.kv_bias[index].chunk(2)
                mine_k, mine_v = mine_k + bias_k, mine_v + bias_v
            if adaptor.q_bias is not None:
                mine_q = mine_q + adaptor.q_bias[index]
            q, k, v = (torch.where(is_slot[:, None], mine, raw) for mine, raw in ((mine_q, q), (mine_k, k), (mine_v, v)))
        q, k, v = (t.unflatten(-1, (-1, c.head_dim)) for t in (q, k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        q, k = turn(q), turn(k)
        x = x + naive_attention(q, k, v, seen if seen_of is None else seen_of(index, q, k)) @ layer.out.T
        gate, up = (norm(x, layer.mlp_norm) @ part.T for part in layer.gate_up.chunk(2))
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer.down.T
    return (norm(x, w.norm) @ w.head.T)[:, ~is_slot]


def naive_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q [B, N, H, D]; k, v [B, K, kv_heads, D]; seen [N, K] or [B, H, N, K]. Returns [B, N, H * D]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    score = torch.einsum("bnhd,bkhd->bhnk", q, k) / math.sqrt(q.shape[-1])
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhnk,bkhd->bnhd", weight, v).flatten(2)


def reference_frequencies(config: ModelConfig) -> Tensor:
    """RoPE inverse frequencies, Llama 3's three bands written as branches."""
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    s = config.rope_scaling
    if s is not None:
        for i, value in enumerate(plain):
            wave = 2 * math.pi / value
            if wave > s.original_max_position / s.low_freq_factor:
                plain[i] = value / s.factor
            elif wave >= s.original_max_position / s.high_freq_factor:
                share = (s.original_max_position / wave - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                plain[i] = (1 - share) * value / s.factor + share * value
    return torch.tensor(plain, dtype=torch.float64)


def _reference_slot(adaptor: Adaptor, embed: Tensor, closed: Tensor) -> Tensor:
    """Input [B, hidden] of the slot that closes raw tokens `closed` [B, r]."""
    if adaptor.info.slot_input == "mean":
        return embed[closed].mean(1)
    if adaptor.info.slot_input == "last":
        return embed[closed[:, -1]]
    row = embed[adaptor.info.slot_token] if adaptor.info.slot_input == "token" else adaptor.slot_embedding
    assert row is not None
    return row.expand(closed.shape[0], -1)


# ---- stub networks


class Chain:
    """A network whose next token depends on the last one alone: `follows(x)`. It reads and writes a real memory."""

    def __init__(self, follows: Callable[[int], int], vocab: int = 64) -> None:
        self.config = ModelConfig("llama", vocab, vocab, 1, 1, 1, 2, 2, 4096, 10000.0, 1e-6, False)
        self.device, self.dtype = CPU, torch.float64
        self._table = torch.zeros(vocab, vocab, dtype=torch.float64)
        for x in range(vocab):
            self._table[x, follows(x) % vocab] = 10.0
        self.widths: list[int] = []  # tokens read by each forward

    def forward(self, tokens: Tensor, memory: Memory) -> Tensor:
        block = memory.begin(tokens)
        rows = torch.zeros(tokens.shape[0], len(block.positions), 1, 2, dtype=self.dtype)
        memory.extend(0, rows, rows, rows)
        memory.end()
        self.widths.append(tokens.shape[1])
        return torch.nn.functional.one_hot(tokens, self.config.vocab).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._table


def chain_draft(net: Chain, vocab: int = 64) -> ModelDraft:
    return ModelDraft(net, memory_for(net, MemoryShape()), Sampling(), Random(0), vocab)  # type: ignore[arg-type]


def chain_target(net: Chain) -> Target:
    return Target(net, 64)  # type: ignore[arg-type]


# ---- runs


def drafter_for(
    method: str,
    draft: Decoder,
    *,
    vocab: int | None = None,
    sampling: Sampling | None = None,
    options: MemoryOptions = OPTIONS,
    tokens: int = 64,
) -> Drafter:
    """The drafter of a row of METHODS."""
    shape = METHODS[method].memory(options)
    if shape is None:
        return LookupDraft() if METHODS[method].copies else NoDraft()
    sampling = sampling or Sampling()
    if METHODS[method].head:
        head = eagle_head(draft)
        memory = memory_for(head.decoder(draft), shape, tokens=tokens)
        return EagleDraft(head, draft, memory, sampling, Random(sampling.seed + 1), vocab or draft.config.vocab)
    memory = memory_for(draft, shape, tokens=tokens)
    drafter = ModelDraft(draft, memory, sampling, Random(sampling.seed + 1), vocab or draft.config.vocab)
    return CascadeDraft(drafter) if METHODS[method].copies else drafter


@dataclass
class Run:
    """All that a generation gave."""

    tokens: list[int]
    rounds: list[Round]
    recorder: Recorder

    @property
    def roles(self) -> list[str]:
        return [role for r in self.rounds for role in r.roles]

    @property
    def finish(self) -> str:
        return str(self.recorder.trace.of("end")[-1].data["reason"])


def run(
    target: Target, drafter: Drafter, prompt: Sequence[int], settings: Settings, stop: Callable[[], bool] = lambda: False
) -> Run:
    recorder = Recorder({"prompt_tokens": len(prompt)}, CPU)
    rounds = [item for item in generate(target, drafter, prompt, settings, recorder, stop) if isinstance(item, Round)]
    return Run([token for r in rounds for token in r.tokens], rounds, recorder)


def argmax_text(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding with the plain reference, a whole pass a token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(reference_logits(decoder, torch.tensor([text]), MemoryShape())[0, -1].argmax()))
    return text[len(prompt) :]


@dataclass
class StopAfter:
    """Says stop from the call after `calls` on, and goes on saying it."""

    calls: int
    asked: int = field(default=0, init=False)

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked > self.calls
