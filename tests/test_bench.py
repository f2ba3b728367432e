"""`masw bench` on the tiny pair: the table it leaves, going on after a stop or a crash, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from masw import bench, cli, hardware, results
from masw.adaptor import Adaptor, AdaptorInfo
from masw.eagle import EagleHead, EagleInfo
from masw.engine import Settings
from masw.methods import METHODS
from masw.peers import PEERS, Peers
from masw.session import RunOptions, Session
from masw.trace import Trace
from masw.zoo import load_pair

CALM = "The committee met in the long room above the harbour and wrote down what the engineers had found. "
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def masw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the console command in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(hardware, "measure_bandwidth", lambda *_: 1e10)
    monkeypatch.setattr(hardware, "measure_gemm", lambda *_: 1e11)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["masw", *map(str, args)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "reports.jsonl"
    path.write_text("".join(json.dumps({"id": f"doc {i}", "text": f"Report {i}. " + CALM * 4}) + "\n" for i in range(3)))
    return path


def grid(data: Path, out: Path, *more: object) -> list[object]:
    return [
        "bench", "--pair", "tiny", "--data", data, "--contexts", 200, "--docs", 1, "--repeats", 1, "--window", 32, "--stride", 4,
        "--max-new-tokens", 8, "--dtype", "fp32", "--out", out, *more,
    ]  # fmt: skip


def cells(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert rows[0]["type"] == "header" and rows[0]["schema"] == results.SCHEMA
    return [row for row in rows if row["type"] == "cell"]


@pytest.fixture(scope="module")
def tiny() -> Session:
    return Session(load_pair("tiny", torch.device("cpu"), torch.float32))


@pytest.fixture(scope="module")
def head(tiny: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eagle head that nobody trained."""
    path = tmp_path_factory.mktemp("eagle") / "head.safetensors"
    EagleHead.copied(tiny.pair.target.decoder, EagleInfo(tiny.pair.target.name)).save(path)
    return path


def test_every_method_and_peer_gives_the_targets_own_output(masw: Call, data: Path, head: Path, tmp_path: Path) -> None:
    out, methods = tmp_path / "out", "all,hf,hf-assisted,hf-assisted-default"
    code, text, err = masw(*grid(data, out, "--methods", methods, "--repeats", 2, "--eagle", head, "--json"))
    assert code == 0, err
    report = json.loads(text.splitlines()[-1])
    names = [*METHODS, *PEERS]
    assert [x["method"] for x in report["lines"]] == names and report["done"] == report["cells"] == 2 * len(names)
    found = cells(out)
    for row in found:
        assert row["error"] is None and row["prompt_tokens"] == 200 and row["new_tokens"] <= 8 and row["peak_memory_bytes"] > 0
        assert row["identical_to_greedy"] is (None if row["method"] == "none" else True), row["method"]
        assert row["end_to_end_ms"] >= row["ttft_ms"] > 0 and row["end_to_end_tokens_per_second"] > 0
    # The target read the document once, a head's features aside; every method of ours counts one such reading.
    own = [row for row in found if row["method"] in METHODS]
    shared = {row["prefill_target_ms"] for row in own if not METHODS[row["method"]].head}
    assert len(shared) == 1 and all(row["prefill_target_ms"] > 0 for row in own)
    for row in own:
        trace = Trace.load(out / row["trace"])
        assert bool(trace.of("prefill", "target")) == METHODS[row["method"]].head and trace.header["method"] == row["method"]
        if drafts := trace.of("draft"):  # a mean, since beside a copier some drafted tokens cost no step
            assert row["draft_ms"] == pytest.approx(sum(e.ms for e in drafts) / len(drafts), rel=1e-2, abs=1e-3)
    # Methods take turns, the second time the other way about.
    assert [row["method"] for row in found] == names + names[::-1]
    line = {x["method"]: x for x in report["lines"]}
    assert line["none"]["speedup"] == 1.0 and line["full"]["pairs"] == 2 and line["full"]["speedup_predicted"] > 0
    assert line["full"]["draft_kv_bytes"] == line["full"]["draft_kv_predicted_bytes"] and line["full"]["draft_kv_ratio"] == 1
    assert line["masw"]["draft_kv_ratio"] < 1 and line["masw"]["draft_floor_ms"] > 0
    assert line["hf"]["prefill_target_ms"] is None and line["hf"]["tokens_per_iteration"] == 1
    for name in ("results.csv", "summary.csv", "summary.jsonl"):
        assert (out / name).stat().st_size > 0


def test_the_same_command_goes_on_and_more_may_join(masw: Call, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert masw(*grid(data, out, "--methods", "full"))[0] == 0
    assert [row["method"] for row in cells(out)] == ["none", "full"]
    code, text, _ = masw(*grid(data, out, "--methods", "full"))
    assert code == 0 and len(cells(out)) == 2 and "2 of 2 cells" in text
    # A method that joins is compared with `none` of its own session, which is measured again for it.
    assert masw(*grid(data, out, "--methods", "full,window", "--docs", 2))[0] == 0
    assert [(row["document"], row["method"]) for row in cells(out)[2:]] == [
        ("doc 0", "none"), ("doc 0", "window"), ("doc 1", "none"), ("doc 1", "full"), ("doc 1", "window"),
    ]  # fmt: skip
    code, _, err = masw(*grid(data, out, "--gamma", 3))
    assert code == 2 and "another grid" in err and "gamma 5 -> 3" in err


def test_ctrl_c_keeps_what_is_done(masw: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, add = tmp_path / "out", results.Table.add

    def interrupting(table: results.Table, cell: results.Cell) -> None:
        add(table, cell)
        if len(table.cells) == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(results.Table, "add", interrupting)
        code, _, err = masw(*grid(data, out, "--methods", "full,window,hf"))
    assert code == 130 and "2 of 4 cells are kept" in err and len(cells(out)) == 2
    assert (out / "summary.csv").exists()
    code, text, _ = masw(*grid(data, out, "--methods", "full,window,hf"))
    assert code == 0 and "4 of 4 cells" in text
    assert [row["method"] for row in cells(out)] == ["none", "full", "none", "window", "hf"]


def test_a_crash_in_one_cell_is_recorded_and_tried_again(
    masw: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run = tmp_path / "out", Session.run

    def failing(session: Session, prompt: Any, options: RunOptions, *more: Any) -> Any:
        if options.method == "full":
            raise RuntimeError("broke\nin two lines")
        return run(session, prompt, options, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", failing)
        code, text, err = masw(*grid(data, out, "--methods", "full,window"))
    assert code == 3 and "1 of 3 cells failed" in err and "RuntimeError: broke" in err and "0 (1 failed)" in text
    assert [(row["method"], row["error"]) for row in cells(out)] == [
        ("none", None), ("full", "RuntimeError: broke"), ("window", None)
    ]  # fmt: skip
    # A command that does not ask for the failed method has nothing to complain of.
    assert masw(*grid(data, out, "--methods", "window"))[0] == 0
    code, text, _ = masw(*grid(data, out, "--methods", "full,window"))
    assert code == 0 and "failed" not in text


def test_a_document_that_cannot_be_read_fails_alone(
    masw: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, prefill = tmp_path / "out", bench.Bench._prefill

    def failing(job: bench.Bench, case: Any) -> Any:
        if case.id == "doc 0":
            raise MemoryError("no room")
        return prefill(job, case)

    monkeypatch.setattr(bench.Bench, "_prefill", failing)
    code, _, _ = masw(*grid(data, out, "--methods", "full", "--docs", 2))
    assert code == 3
    assert [(r["document"], r["error"] is None) for r in cells(out)] == [
        ("doc 0", False), ("doc 0", False), ("doc 1", True), ("doc 1", True)
    ]  # fmt: skip


def test_a_method_without_its_head_is_left_out_or_refused(masw: Call, data: Path, tmp_path: Path) -> None:
    code, text, err = masw(*grid(data, tmp_path / "out"))
    assert code == 0 and "eagle is left out: no eagle head" in err and "eagle" not in text
    for methods in ("full,eagle", "full, eagle"):
        code, _, err = masw(*grid(data, tmp_path / "other", "--methods", methods))
        assert code == 2 and "no eagle head" in err


def test_an_adaptor_for_another_stride_is_refused_before_a_cell_runs(masw: Call, data: Path, tmp_path: Path) -> None:
    path, decoder = tmp_path / "a.safetensors", load_pair("tiny", torch.device("cpu"), torch.float32).draft.decoder
    Adaptor.copied(decoder, AdaptorInfo("tiny-2", (8,))).save(path)
    code, _, err = masw(*grid(data, tmp_path / "out", "--methods", "masw", "--adaptor", path))
    assert code == 2 and "trained for stride 8, not 4" in err and not (tmp_path / "out" / "results.jsonl").exists()
    assert masw(*grid(data, tmp_path / "out", "--methods", "window", "--adaptor", path))[0] == 0  # which has no slots


def test_another_adaptor_under_the_same_name_is_another_grid(masw: Call, data: Path, tmp_path: Path) -> None:
    path, decoder = tmp_path / "a.safetensors", load_pair("tiny", torch.device("cpu"), torch.float32).draft.decoder
    adaptor = Adaptor.copied(decoder, AdaptorInfo("tiny-2", (4,)))
    adaptor.save(path)
    command = grid(data, tmp_path / "out", "--methods", "masw", "--adaptor", path)
    assert masw(*command)[0] == 0
    adaptor.kv.data.mul_(1.5)
    adaptor.save(path)
    code, _, err = masw(*command)
    assert code == 2 and "holds another grid (adaptor_sha256" in err


def test_a_longer_context_of_the_same_document_is_read_from_its_beginning(
    masw: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, jobs = Session.run, []

    def watched(*args: Any) -> Any:
        jobs.append(run(*args))
        return jobs[-1]

    monkeypatch.setattr(Session, "run", watched)
    assert masw(*grid(data, tmp_path / "out", "--methods", "none", "--contexts", "200,300"))[0] == 0
    read = [sum(e.count for e in job.trace.of("prefill", "target")) for job in jobs]
    assert read == [199, 0, 299, 0]  # of each context first the reading, then the cell


BAD: list[tuple[list[object], str]] = [
    (["--methods", "ful"], "did you mean full?"),
    (["--methods", "hf-asisted"], "did you mean hf-assisted?"),
    (["--contexts", "2x"], "--contexts takes whole numbers"),
    (["--contexts", "9k"], "exceed the pair's 8,192 positions"),
    (["--contexts", "4k"], "no document fills a context of 4,096"),
    (["--docs", 0], "--docs and --repeats must be at least 1"),
    (["--gamma", 0], "gamma must be 1 to 64"),
    (["--gamma", 60, "--methods", "masw"], "rollback window"),
    (["--draft-weights", "int3"], "draft weights 'int3' are unknown"),
    (["--adaptor", "missing.safetensors"], "missing.safetensors"),
    (["--data", "missing.jsonl"], "cannot read missing.jsonl"),
    (["--pair", "smolm2"], "did you mean smollm2"),
]


@pytest.mark.parametrize(("more", "says"), BAD, ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else None)
def test_bad_input_is_one_line(masw: Call, data: Path, tmp_path: Path, more: list[object], says: str) -> None:
    code, out, err = masw(*grid(data, tmp_path / "out", *more))
    assert code == 2 and out == "" and says in err.splitlines()[-1]
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_grid_that_cannot_fit_is_refused_with_the_estimate(
    masw: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("masw.session.free_bytes", lambda _: 2**20)
    code, _, err = masw(*grid(data, tmp_path / "out"))
    assert code == 2 and "GiB beside the weights" in err and not cells(tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "measure_bandwidth", lambda *_: 1e10)
    monkeypatch.setattr(bench, "free_bytes", lambda _: 2**10)
    code, _, err = masw(*grid(data, tmp_path / "out", "--methods", "hf"))
    assert code == 2 and "transformers' own run at 208 tokens needs" in err


def test_an_out_that_cannot_be_written_is_refused_first(masw: Call, data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = masw(*grid(data, tmp_path / "file" / "out"))
    assert code == 2 and "is a file, not a folder" in err
    (tmp_path / "taken" / "results.jsonl").mkdir(parents=True)
    code, _, err = masw(*grid(data, tmp_path / "taken"))
    assert code == 2 and "is a folder" in err
    if os.getuid():  # root writes everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert masw(*grid(data, tmp_path / "closed" / "out"))[0] == 2


def test_sets_need_names_of_their_own(masw: Call, data: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / data.name
    twin.write_text(data.read_text())
    code, _, err = masw(*grid(data, tmp_path / "out", "--data", twin))
    assert code == 2 and "two sets would be called 'reports'" in err


def test_the_longest_context_leaves_room_for_the_answer(tiny: Session) -> None:
    """8K on a pair of 8,192 positions: the prompt is cut, the context keeps its name."""
    rows = [{"id": "a", "text": CALM * 100, "question": ""}]
    (case,) = bench.cases({"x": rows}, tiny, [8192], 1, 32)
    assert case.context == 8192 and len(case.prompt) == 8192 - 32


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda p: p.name)
def test_peers_emit_what_our_loop_emits(tiny: Session, peer: Any) -> None:
    """Same weights, same greedy output, end token included; the end token here is one that the run happens to emit."""
    prompt = tiny.pair.target.tokenizer.encode(CALM)
    for eos in ((), None):
        job = tiny.run(prompt, RunOptions("none", settings=Settings(max_new_tokens=12)))
        for _ in job:
            pass
        tokens = job.summary().tokens
        ids = (tokens[5],) if eos is None else ()
        expected = tokens[: tokens.index(ids[0]) + 1] if ids else tokens
        found = Peers(tiny.pair).run(peer, prompt, gamma=3, max_new_tokens=12, eos_ids=ids)
        assert found.tokens == expected and sum(found.deliveries) == len(expected) and 0 < found.first_ms <= found.total_ms
        assert max(found.deliveries) <= (1 if not peer.assisted else 4 if not peer.own_defaults else 21)


def test_budget_learns_from_what_ran() -> None:
    keys = [("x", "a", 64, repeat, method) for repeat in range(2) for method in ("none", "full")]
    budget = bench.Budget(dict.fromkeys(keys, 2.0))
    assert budget.left_s == 16.0  # before anything ran: twice the floor
    budget.finish(keys[0], 6.0)
    assert budget.of(keys[2]) == 6.0 and budget.left_s == 18.0  # another method: as the ones that ran
    budget.finish(keys[1], 2.0)
    assert budget.of(keys[3]) == 2.0 and budget.left_s == 8.0
    budget.finish(keys[2], 0.1, count=False)
    assert budget.of(keys[2]) == 6.0
