"""The command line as a user meets it: output, exit codes, and one plain line for each kind of bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from masw import cli
from masw.trace import Trace

WORDS = "The committee met in the long room above the harbour and wrote down what the engineers had found. "


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "report.txt"
    path.write_text(WORDS * 6, encoding="utf-8")
    return path


@pytest.fixture
def masw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the console command in this process: (exit code, standard output, standard error)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["masw", *map(str, args)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        out, err = capsys.readouterr()
        return code, out, err

    return call


def one_line(err: str) -> str:
    """The error line; fails when there is a traceback or more than one."""
    lines = [line for line in err.splitlines() if line.strip()]
    assert not any("Traceback" in line for line in lines), err
    errors = [line for line in lines if line.startswith("masw: ")]
    assert errors, err
    return errors[-1]


REPORT_KEYS = {
    "text", "tokens", "identical_to_greedy", "first_difference", "speedup_vs_ar", "tokens_per_second", "tokens_per_iteration",
    "tokens_per_iteration_without_bonus", "acceptance_by_position", "prefill_ms", "ttft_ms", "end_to_end_ms", "draft_ms", "verify_ms",
    "upkeep_ms", "draft_kv_bytes", "draft_kv_bytes_predicted", "draft_kv_bytes_full", "peak_memory_bytes", "prompt_tokens",
    "truncated_tokens", "provenance",
}  # fmt: skip


@pytest.mark.parametrize("method", ["masw", "full", "window", "snapkv", "hybrid", "none"])
def test_json_is_one_object_last_on_standard_output(masw, document: Path, method: str) -> None:
    code, out, _ = masw(
        "run", document, "--pair", "tiny", "--method", method, "--max-new-tokens", 12, "--dtype", "fp32", "--compare", "--json"
    )
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert report.keys() >= REPORT_KEYS
    assert report["identical_to_greedy"] is True and report["first_difference"] is None
    assert len(report["tokens"]) <= 12
    assert report["speedup_vs_ar"] > 0
    if method == "none":
        assert report["draft_kv_bytes"] is None and report["draft_ms"] is None
    else:
        assert report["draft_kv_bytes"] == report["draft_kv_bytes_predicted"]


def test_table_says_identical_and_that_slots_are_untrained(masw, document: Path) -> None:
    code, out, _ = masw("run", document, "--pair", "tiny", "--max-new-tokens", 8, "--dtype", "fp32", "--compare")
    assert code == 0
    assert "identical to the target's own greedy output: yes" in out
    assert "untrained" in out
    for name in (
        "prefill target",
        "prefill draft",
        "TTFT",
        "tokens per iteration",
        "by position",
        "draft KV, allocated",
        "predicted",
        "upkeep",
    ):
        assert name in out, name


@pytest.mark.parametrize("method", ["hybrid", "lookup", "none"])
def test_adaptive_gamma(masw, document: Path, tmp_path: Path, method: str) -> None:
    path = tmp_path / "run.jsonl"
    options = ("--pair", "tiny", "--method", method, "--gamma", "auto", "--max-new-tokens", 24, "--dtype", "fp32")
    code, out, _ = masw("run", document, *options, "--compare", "--trace", path)
    assert code == 0 and "identical to the target's own greedy output: yes" in out
    assert ("gamma chosen a round, mean" in out) == (method != "none")
    trace = Trace.load(path)
    assert trace.header["settings"]["adaptive"] is True and trace.header["settings"]["gamma"] == 8
    assert trace.of("verify")[0].data["gamma"] == (8 if method != "none" else 0)  # nothing is offered there


def test_self_pair_says_that_no_speed_up_can_be_expected(masw, document: Path) -> None:
    code, out, _ = masw("run", document, "--pair", "tiny-2", "--max-new-tokens", 6, "--dtype", "fp32")
    assert code == 0 and "no speed-up can be expected" in out


def test_sampled_runs_repeat_with_their_seed(masw, document: Path) -> None:
    args = ("run", document, "--pair", "tiny", "--max-new-tokens", 20, "--temperature", 1.0, "--top-p", 0.9, "--json")
    one, two, other = (json.loads(masw(*args, "--seed", seed)[1].splitlines()[-1])["tokens"] for seed in (1, 1, 2))
    assert one == two != other


def test_trace_is_written_and_reads_back(masw, document: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    code, out, _ = masw("run", document, "--pair", "tiny", "--max-new-tokens", 9, "--trace", path, "--json")
    assert code == 0
    trace = Trace.load(path)
    assert [t for e in trace.of("emit") for t in e.data["tokens"]] == json.loads(out.splitlines()[-1])["tokens"]
    assert trace.header["provenance"]["torch"] and trace.header["models"]["target"]


def test_document_from_standard_input(masw, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WORDS.encode())))
    assert masw("run", "-", "--pair", "tiny", "--max-new-tokens", 4)[0] == 0


def test_question_and_continue(masw, document: Path) -> None:
    assert masw("run", document, "What was found?", "--pair", "tiny", "--max-new-tokens", 4)[0] == 0
    assert masw("run", document, "What was found?", "--task", "question", "--pair", "tiny", "--max-new-tokens", 4)[0] == 0
    assert masw("run", document, "--task", "continue", "--pair", "tiny", "--max-new-tokens", 4)[0] == 0


def test_what_does_not_fit_is_cut_with_a_notice(masw, document: Path) -> None:
    code, out, err = masw("run", document, "--pair", "tiny", "--max-context", 300, "--max-new-tokens", 10, "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 0 and "are cut" in err
    assert report["prompt_tokens"] <= 290 and report["truncated_tokens"] > 0


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks(masw, tmp_path: Path, mark: str) -> None:
    path = tmp_path / "marked.txt"
    path.write_bytes(WORDS.encode(mark))
    code, out, _ = masw("run", path, "--pair", "tiny", "--max-new-tokens", 2, "--json")
    plain = tmp_path / "plain.txt"
    plain.write_text(WORDS, encoding="utf-8")
    _, plain_out, _ = masw("run", plain, "--pair", "tiny", "--max-new-tokens", 2, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["prompt_tokens"] == json.loads(plain_out.splitlines()[-1])["prompt_tokens"]


BAD_FILES = {
    "empty.txt": (b"", "empty"),
    "blank.txt": (b" \n\t\n ", "white space"),
    "broken.txt": (b"%PDF-1.7\0\0\1\2" * 40, "damaged PDF"),
    "noise.txt": (bytes(range(1, 9)) * 200, "binary"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n" + bytes(40), "PNG image"),
    "cut16.txt": ("caf\u00e9".encode("utf-16") + b"\0", "not UTF-16"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(masw, tmp_path: Path, name: str) -> None:
    content, phrase = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    code, _, err = masw("run", path, "--pair", "tiny")
    assert code == 2 and phrase in one_line(err)


def test_a_guessed_encoding_is_said_and_can_be_named(masw, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Le r\u00e9sum\u00e9 de l'\u00e9t\u00e9. ".encode("latin-1") * 9)
    args = ("run", path, "--pair", "tiny", "--max-new-tokens", 2)
    code, _, err = masw(*args)
    assert code == 0 and "plain text, cp1252 (detected), " in err and "name the right one with --encoding" in err
    code, _, err = masw(*args, "--encoding", "latin-1")
    assert code == 0 and "latin-1 (as given)" in err and "guess" not in err
    code, _, err = masw(*args, "--encoding", "klingon")
    assert code == 2 and "unknown" in one_line(err)


def test_a_pdf_with_a_password_from_standard_input(masw, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from tests.documentfiles import encrypted, line, pdf

    locked = encrypted(pdf(*[line(WORDS)] * 3), "secret")
    for options, expected, phrase in (((), 2, "--password"), (("--password", "secret"), 0, "standard input: PDF, 3 pages")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(locked)))
        code, _, err = masw("run", "-", "--pair", "tiny", "--max-new-tokens", 2, *options)
        assert code == expected and phrase in err


def test_missing_file_and_folder(masw, tmp_path: Path) -> None:
    code, _, err = masw("run", tmp_path / "nowhere.txt", "--pair", "tiny")
    assert code == 2 and "no file" in one_line(err)
    code, _, err = masw("run", tmp_path, "--pair", "tiny")
    assert code == 2 and "folder" in one_line(err)


BAD_OPTIONS = [
    (("--gamma", 0), "gamma must be"),
    (("--gamma", "fast"), "gamma must be auto or 1 to 64 drafted tokens, not 'fast'"),
    (("--gamma", 17), "rollback window of 16"),
    (("--gamma", 14, "--stride", 4), "use a gamma of at most 12"),
    (("--stride", 0), "stride must be"),
    (("--stride", 600), "longer than the window"),
    (("--window", 0), "window must be"),
    (("--sinks", -1), "sinks must be"),
    (("--max-new-tokens", 0), "max-new-tokens must be"),
    (("--max-new-tokens", 9000), "no room"),
    (("--max-context", 5), "--max-context must be"),
    (("--max-context", 10**6), "--max-context must be"),
    (("--temperature", -1), "temperature must be"),
    (("--temperature", "nan"), "temperature must be"),
    (("--top-p", 0), "top-p must be"),
    (("--top-k", -2), "top-k must be"),
    (("--seed", -1), "seed must be"),
    (("--method", "eagel"), "unknown"),
    (("--task", "translate"), "unknown"),
    (("--task", "question"), "needs the question"),
    (("--pair", "smollm3"), "did you mean smollm2"),
    (("--pair", "./nowhere"), "no folder"),
    (("--pair", "tiny-2:tiny-4:tiny-4"), "more than two models"),
    (("--device", "cuda:7"), "--device cpu"),
    (("--device", "tpu"), "unknown"),
    (("--dtype", "int3"), "unknown"),
    (("--draft-weights", "int2"), "unknown"),
    (("--draft-weights", "int4", "--dtype", "fp32"), "use plain"),
    (("--adaptor", "nowhere.safetensors"), "no adaptor at"),
    (("--trace", "."), "name a file"),
    (("--trace", ""), "name a file"),
]


@pytest.mark.parametrize(("options", "phrase"), BAD_OPTIONS, ids=[" ".join(map(str, o)) for o, _ in BAD_OPTIONS])
def test_bad_options(masw, document: Path, options: tuple[object, ...], phrase: str) -> None:
    import torch

    if "cuda:7" in options and torch.cuda.is_available():
        phrase = "does not exist"
    code, out, err = masw("run", document, "--pair", "tiny", *options)
    assert code == 2 and phrase in one_line(err)
    assert out == ""


def test_unknown_option_is_bad_usage(masw, document: Path) -> None:
    assert masw("run", document, "--gama", 3)[0] == 2


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(masw, document: Path, tmp_path: Path) -> None:
    blocked, pipe = tmp_path / "blocked", tmp_path / "pipe"
    blocked.write_text("a file where a folder is needed", encoding="utf-8")
    os.mkfifo(pipe)
    for trace, phrase in ((blocked / "t.jsonl", "not a folder"), (pipe, "regular file"), (document, "input itself")):
        code, out, err = masw("run", document, "--pair", "tiny", "--max-new-tokens", 4, "--trace", trace)
        assert code == 2 and phrase in one_line(err) and out == ""
    assert pipe.is_fifo() and document.read_text(encoding="utf-8").startswith("The committee")


def test_closed_standard_input(masw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = masw("run", "-", "--pair", "tiny")
    assert code == 2 and "standard input is closed" in one_line(err)


def test_too_little_memory_names_the_estimate(masw, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from masw import session

    monkeypatch.setattr(session, "free_bytes", lambda device: 1000)
    code, _, err = masw("run", document, "--pair", "tiny")
    assert code == 2 and "GiB" in one_line(err)


@pytest.mark.parametrize(("row", "far"), [(32, True), (2048, False)])
def test_a_prompt_far_longer_than_an_adaptors_training_is_said(masw, document: Path, tmp_path: Path, row: int, far: bool) -> None:
    import torch

    from masw.adaptor import Adaptor, AdaptorInfo
    from masw.zoo import load_pair

    decoder = load_pair("tiny", device=torch.device("cpu"), dtype=torch.float32).draft.decoder
    path = tmp_path / "short.safetensors"
    Adaptor.copied(decoder, AdaptorInfo("tiny-2", (4,))).save(path, recipe={"stages": [f"{row}x2:1k:0/1/0"]})
    code, out, err = masw(
        "run", document, "--pair", "tiny", "--window", 16, "--stride", 4, "--adaptor", path, "--max-new-tokens", 4, "--compare"
    )
    assert code == 0 and (f"Slots more than {4 * row} tokens back are not read" in out + err) == far


def test_adaptor_for_another_model_or_stride_is_refused_by_name(masw, document: Path, tmp_path: Path) -> None:
    import torch

    from masw.adaptor import Adaptor, AdaptorInfo
    from masw.zoo import load_pair

    decoder = load_pair("tiny", device=torch.device("cpu"), dtype=torch.float32).draft.decoder
    Adaptor.copied(decoder, AdaptorInfo("tiny-2", (4,))).save(tmp_path / "four.safetensors")
    Adaptor.copied(decoder, AdaptorInfo("smollm2-135m", ())).save(tmp_path / "other.safetensors")
    code, _, err = masw("run", document, "--pair", "tiny", "--stride", 8, "--adaptor", tmp_path / "four.safetensors")
    assert code == 2 and "trained for stride 4, not 8" in one_line(err)
    code, _, err = masw("run", document, "--pair", "tiny", "--adaptor", tmp_path / "other.safetensors")
    assert code == 2 and "'smollm2-135m'" in one_line(err)
    (tmp_path / "junk.safetensors").write_bytes(b"not tensors")
    code, _, err = masw("run", document, "--pair", "tiny", "--adaptor", tmp_path / "junk.safetensors")
    assert code == 2 and "not an adaptor" in one_line(err)
    assert (
        masw("run", document, "--pair", "tiny", "--stride", 4, "--adaptor", tmp_path / "four.safetensors", "--max-new-tokens", 4)[
            0
        ]
        == 0
    )


def test_models_commands(masw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASW_HOME", str(tmp_path))
    code, out, _ = masw("models")
    assert code == 0 and "qwen2.5-coder" in out and "MB to fetch" in out
    names = [row["name"] for row in json.loads(masw("models", "list", "--json")[1])]
    assert names == ["smollm2", "qwen2.5-coder", "llama-3.1-8b", "llama-3.1-70b", "tiny"]
    code, _, err = masw("models", "path", "smollm2")
    assert code == 2 and "masw models fetch smollm2" in one_line(err)
    code, _, err = masw("models", "fetch", "smolm2")
    assert code == 2 and "did you mean" in one_line(err)
    assert masw("models", "fetch", "tiny")[0] == 0
    assert masw("models", "verify")[0] == 0


def test_doctor(masw) -> None:
    code, out, _ = masw("doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["torch"]


def test_version_and_help(masw) -> None:
    assert masw("--version")[1].startswith("masw ")
    assert "tokens" in masw("run", "--help")[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("module", "name", "phrase"),
    [
        ("masw.documents", "read_file", "interrupted while report.txt was read; nothing was lost"),
        ("masw.zoo", "load_pair", "interrupted while the models of tiny were fetched or loaded"),
    ],
)
def test_an_interrupt_before_the_run_says_where(
    masw, document: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, module: str, name: str, phrase: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)  # not waited for: the handler raises

    monkeypatch.setattr(f"{module}.{name}", interrupted)
    code, out, err = masw("run", document, "--pair", "tiny")
    line = one_line(err)
    assert code == 130 and out == "" and phrase.replace("report.txt", document.name) in line and "nothing was lost" in line
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupt_anywhere_else(masw, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("masw.devices.resolve_device", interrupted)
    code, out, err = masw("run", document, "--pair", "tiny")
    assert (
        code == 130
        and out == ""
        and one_line(err) == "masw: run: interrupted; files that were written are whole, nothing was lost"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_the_partial_answer(tmp_path: Path, document: Path, number: signal.Signals) -> None:
    trace = tmp_path / "partial.jsonl"
    command = [sys.executable, "-c", "from masw.cli import main; main()", "run", str(document), "--pair", "tiny"]
    with subprocess.Popen(
        [*command, "--max-new-tokens", "6000", "--task", "continue", "--trace", str(trace), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "prompt tokens" in line:
                break
        time.sleep(1.5)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in one_line(err)
    report = json.loads(out.splitlines()[-1])
    assert report["finish"] == "cancelled"
    assert Trace.load(trace).of("end")[-1].data["reason"] == "cancelled"
    assert len(report["tokens"]) < 6000
