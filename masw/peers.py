"""transformers on the same weights, as an outside peer: what a user would run without masw. Measured, never used by our own loop.

The model is built around our tensors (views, no copy), so that both sides compute with the same numbers in the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from masw.config import ModelConfig
from masw.weights import named_tensors
from masw.zoo import Model, Pair


@dataclass(frozen=True)
class Peer:
    """A row of a benchmark that is not our loop."""

    name: str
    title: str
    assisted: bool
    own_defaults: bool = False  # the library's own block length and confidence rule, else blocks of gamma


PEERS: dict[str, Peer] = {
    p.name: p
    for p in (
        Peer("hf", "transformers generate()", False),
        Peer("hf-assisted", "transformers generate(assistant_model=), blocks of gamma", True),
        Peer("hf-assisted-default", "transformers generate(assistant_model=), its own block rule", True, True),
    )
}


@dataclass(frozen=True)
class PeerRun:
    """Greedy output and its times. `deliveries` counts tokens by iteration: one target forward each, the first with the prefill."""

    tokens: list[int]
    deliveries: list[int]
    first_ms: float  # prefill and the first iteration, which cannot be told apart from outside
    total_ms: float
    cancelled: bool


def build(model: Model, attention: str = "sdpa") -> Any:
    """A transformers model over the tensors of `model`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    decoder = model.decoder
    config = AutoConfig.for_model(decoder.config.family, **hf_config(decoder.config))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, dtype=decoder.dtype, attn_implementation=attention)
    tensors = named_tensors(decoder.config, decoder.weights)
    if decoder.config.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    theirs.load_state_dict(tensors, assign=True, strict=True)
    # Its frequencies are no part of the state, and were made on the meta device.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config=config).to(decoder.device)
    # A greedy run ends where ours does, without what a model's own generation settings would add.
    theirs.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return theirs.eval()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Our shape in the words of a hub `config.json`."""
    c, s = config, config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if s is not None:
        rope |= {
            "rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_max_position,
        }  # fmt: skip
    return {
        "vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "intermediate_size": c.intermediate,
        "max_position_embeddings": c.max_position, "rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tied, "rope_parameters": rope,
        "sliding_window": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


class Peers:
    """The peers of one pair; each model is built when first needed."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._target: Any = None
        self._draft: Any = None

    @torch.no_grad()
    def run(
        self,
        peer: Peer,
        prompt: Sequence[int],
        *,
        gamma: int,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        stop: Callable[[], bool] = lambda: False,
    ) -> PeerRun:
        """Generates greedily; `stop` is asked after every target forward."""
        if self._target is None:
            self._target = build(self._pair.target)
        options: dict[str, Any] = {}
        if peer.assisted:
            if self._draft is None:  # one set of weights may draft for itself, through a model object (and a cache) of its own
                self._draft = build(self._pair.draft)
            settings = self._draft.generation_config
            settings.num_assistant_tokens = 20 if peer.own_defaults else gamma
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.4 if peer.own_defaults else 0.0
            options["assistant_model"] = self._draft
        device = self._pair.target.decoder.device
        watch = _Watch(device)
        ids = torch.tensor([list(prompt)], device=device)
        start = watch.now()
        found = self._target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=list(eos_ids) or None, pad_token_id=0, streamer=watch, stopping_criteria=[lambda ids, scores: stop()],
            **options,
        )  # fmt: skip
        end = watch.now()
        tokens = found[0, len(prompt) :].tolist()
        first = watch.stamps[0] - start if watch.stamps else end - start
        return PeerRun(tokens, watch.counts, first, end - start, stop())


class _Watch:
    """A transformers streamer that only looks at the clock (ms): the prompt comes first, then the tokens of each iteration."""

    def __init__(self, device: torch.device) -> None:
        self.counts: list[int] = []
        self.stamps: list[float] = []
        self._device, self._prompt_seen = device, False

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1e3

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.counts.append(value.numel())
        self.stamps.append(self.now())

    def end(self) -> None:
        """Nothing is held back."""


def stepper(model: Model, tokens: Sequence[int], attention: str, chunk: int) -> Callable[[], torch.Tensor]:
    """transformers' decode step after it has read `tokens`; each call reads one more."""
    from transformers import DynamicCache

    theirs = build(model, attention)
    cache, device = DynamicCache(config=theirs.config), model.decoder.device
    with torch.no_grad():
        for start in range(0, len(tokens), chunk):
            ids = torch.tensor([list(tokens[start : start + chunk])], device=device)
            theirs(ids, cache=cache, use_cache=True, logits_to_keep=1)
    token = torch.tensor([list(tokens[:1])], device=device)

    @torch.no_grad()
    def step() -> torch.Tensor:
        logits: torch.Tensor = theirs(token, cache=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return step
