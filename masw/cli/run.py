"""`masw run`: one document, one method, the answer as it streams, and a table of what it cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from masw.cli.stop import Stop
from masw.cli.training import interruptible
from masw.errors import Cancelled, UsageError

if TYPE_CHECKING:
    from masw.session import Difference, Run, Session


def run(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-", help="Text, Markdown, PDF, DOCX, HTML or EPUB, told apart by content; - for standard input."
        ),
    ],
    question: Annotated[str | None, typer.Argument(help="The question, for --task question.")] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of a text or HTML document, such as cp1252. Default: found from its bytes.")
    ] = None,
    password: Annotated[str | None, typer.Option(help="Password of an encrypted PDF.")] = None,
    pair: Annotated[
        str, typer.Option(help="Preset (see `masw models list`) or DRAFT:TARGET, each a hub id or a local folder.")
    ] = "qwen2.5-coder",
    method: Annotated[
        str,
        typer.Option(
            help="Who drafts, with what memory: masw | full | window | snapkv | hybrid | eagle (a head) | lookup (copies from the "
            "text) | full+lookup | masw+lookup (copies where words recur) | none."
        ),
    ] = "masw",
    task: Annotated[
        str | None, typer.Option(help='summarize | continue | question "...". Default: summarize, or question when one is given.')
    ] = None,
    gamma: Annotated[
        str,
        typer.Option(
            help="Drafted tokens per verify pass, or auto: as many each round as pays on measured times and acceptance, 0 to 8; "
            "drafted or copied, where a method can do both."
        ),
    ] = "5",
    least: Annotated[
        float, typer.Option(help="End a block early once the draft gives it less than this probability; 0: never.")
    ] = 0.0,
    stride: Annotated[int, typer.Option(help="r: raw tokens per memory slot.")] = 8,
    window: Annotated[int, typer.Option(help="W: last raw tokens kept exactly.")] = 512,
    sinks: Annotated[int, typer.Option(help="S: first raw tokens kept exactly.")] = 4,
    draft_weights: Annotated[
        str, typer.Option(help="auto | plain | int8 | int4: a quantised draft never changes the output.")
    ] = "auto",
    adaptor: Annotated[
        str, typer.Option(help="Mirrored projections: auto (shipped with masw, else quiet) | quiet | none (plain copy) | PATH.")
    ] = "auto",
    eagle: Annotated[
        str, typer.Option(help="For --method eagle, the head on the target's features: auto (shipped with masw) | PATH.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer at most, tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that together reach p.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto | bf16 | fp32.")] = "auto",
    max_context: Annotated[
        int | None, typer.Option(help="Prompt + answer at most, tokens. Default: what the models have positions for.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode autoregressively from the same prefill and compare.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(metavar="OUT.jsonl", help="Write every event of the run (JSON lines).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, last on standard output, instead of text and table.")
    ] = False,
) -> None:
    """Answer about FILE with speculative decoding: the output is the target's own, whatever the draft remembers."""
    from dataclasses import replace

    from masw import documents, prompts
    from masw.adaptor import read_info
    from masw.devices import resolve_device, resolve_dtype
    from masw.engine import Settings
    from masw.files import check_writable
    from masw.gamma import parse
    from masw.methods import MemoryOptions, method_named
    from masw.quantise import check_kind
    from masw.session import ADAPTORS, RunOptions, Session, eagle_file
    from masw.verify import Sampling
    from masw.zoo import load_pair, resolve_pair

    # Everything that can be refused is refused before a model is fetched or loaded.
    most, adaptive = parse(gamma)
    settings = Settings(max_new_tokens, most, Sampling(temperature, top_k, top_p, seed), adaptive=adaptive, least=least)
    options = RunOptions(method, MemoryOptions(sinks, window, stride), settings, adaptor, draft_weights, eagle)
    options.shape()
    task = task or ("question" if question else "summarize")
    prompts.check_task(task, question)
    check_kind(draft_weights)
    if adaptor not in ADAPTORS:
        read_info(Path(adaptor))
    if method_named(method).head:
        eagle_file(eagle, resolve_pair(pair).target.name)
    if trace is not None:
        check_writable(trace, not_over=file)
    where = resolve_device(device)
    with interruptible(f"interrupted while {documents.shown(Path(file).name)} was read; nothing was lost"):
        document = documents.read_file(file, password=password, encoding=encoding)
    _note(f"read {documents.shown(document.name)}: {document.summary}")
    for warning in document.warnings:
        _note(warning)
    if document.is_guess:
        _note(f"the encoding {document.encoding} is a guess; if the text reads wrong, name the right one with --encoding")
    with interruptible(
        f"interrupted while the models of {pair} were fetched or loaded; what was fetched is kept, nothing was lost"
    ):
        session = Session(load_pair(pair, device=where, dtype=resolve_dtype(dtype, where)))
    tokenizer = session.pair.target.tokenizer
    settings = replace(settings, eos_ids=session.pair.target.eos_ids)
    options = RunOptions(method, options.memory, settings, adaptor, draft_weights, eagle)
    limit = _context(max_context, session.context_limit)
    if max_new_tokens >= limit:
        raise UsageError(f"--max-new-tokens {max_new_tokens:,} leaves no room for a document in a context of {limit:,}; lower it")
    prompt = prompts.build(tokenizer, document.text, task, question, limit - max_new_tokens)
    if prompt.notice:
        _note(prompt.notice)

    stop = Stop()
    with stop:
        job = session.run(prompt.ids, options, stop)
        session.warm_up(most, draft_weights if method_named(method).model else None)
        kind = str(session.pair.target.decoder.dtype).removeprefix("torch.")
        _note(f"{pair}: {len(prompt.ids):,} prompt tokens, method {method}, {where} {kind}")
        try:
            _stream(job, session, echo=not as_json)
        except BaseException:
            if trace is not None:  # whatever went wrong, what was recorded until then is worth having
                job.save(trace)
            raise
        reference = difference = None
        if compare and not stop():
            reference = session.run(prompt.ids, replace(options, method="none"), stop)
            _note("the same again without a draft, for comparison")
            _stream(reference, session, echo=False)
            if stop():
                reference = None
            elif settings.sampling.greedy:
                difference = session.difference(prompt.ids, job.summary().tokens, reference.summary().tokens)
    report = _report(session, job, reference, difference, prompt.truncated_tokens)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        typer.echo(_table(report, job, reference))
    if trace is not None:
        job.save(trace)
    if stop():
        said = job.summary().tokens
        raise Cancelled("interrupted; the partial answer is the target's own" if said else "interrupted before the first token")


def _context(asked: int | None, limit: int) -> int:
    if asked is None:
        return limit
    if not 16 <= asked <= limit:
        raise UsageError(f"--max-context must be 16 to {limit:,} tokens for this pair, not {asked:,}")
    return asked


def _note(text: str) -> None:
    typer.echo(f"masw: {text}", err=True)


def _stream(job: Run, session: Session, *, echo: bool) -> None:
    """Runs a job to its end; shows prefill progress and, with `echo`, the text as it comes."""
    from masw.cli.display import PrefillBar, safe
    from masw.prefill import Progress
    from masw.tokenizer import StreamDecoder

    bar, text = PrefillBar(), StreamDecoder(session.pair.target.tokenizer)
    try:
        for step in job:
            if isinstance(step, Progress):
                bar.show(step)
            elif echo:
                sys.stdout.write(safe(text.push(list(step.tokens))))
                sys.stdout.flush()
    finally:
        bar.close()
        if echo:
            sys.stdout.write(safe(text.flush()) + "\n\n")
            sys.stdout.flush()


def _report(session: Session, job: Run, reference: Run | None, difference: Difference | None, truncated: int) -> dict[str, Any]:
    """The object that --json prints; null where a thing was not measured."""
    from dataclasses import asdict

    from masw.devices import peak_bytes

    s = job.summary()
    kv = job.trace.header.get("draft_kv") or {}
    speedup = None
    if reference is not None:
        ar = reference.summary()
        if s.tokens_per_second and ar.tokens_per_second:
            speedup = s.tokens_per_second / ar.tokens_per_second
    identical = difference is None if reference is not None and job.options.settings.sampling.greedy else None
    return {
        "text": session.pair.target.tokenizer.decode(s.tokens),
        "tokens": s.tokens,
        "finish": s.finish,
        "identical_to_greedy": identical,
        "first_difference": None if difference is None else asdict(difference),
        "speedup_vs_ar": speedup,
        "tokens_per_second": s.tokens_per_second,
        "tokens_per_iteration": s.tokens_per_iteration,
        "tokens_per_iteration_without_bonus": s.tokens_per_iteration_without_bonus,
        "acceptance": s.acceptance,
        "acceptance_by_position": s.acceptance_by_position,
        "prefill_ms": s.prefill_ms,
        "ttft_ms": s.ttft_ms,
        "end_to_end_ms": s.end_to_end_ms,
        "draft_ms": s.draft_ms,
        "verify_ms": s.verify_ms,
        "upkeep_ms": s.upkeep_ms,
        "draft_kv_bytes": kv.get("allocated_bytes"),
        "draft_kv_bytes_predicted": kv.get("predicted_bytes"),
        "draft_kv_bytes_peak": kv.get("peak_bytes"),
        "draft_kv_bytes_full": kv.get("full_bytes"),
        "peak_memory_bytes": peak_bytes(session.pair.target.decoder.device),
        "prompt_tokens": s.prompt_tokens,
        "truncated_tokens": truncated,
        "provenance": {k: v for k, v in job.trace.header.items() if k not in ("draft_kv", "prompt_tokens")},
    }


def _table(report: dict[str, Any], job: Run, reference: Run | None) -> str:
    from masw.cli.display import Line, number, size, table
    from masw.methods import method_named

    s, ar = job.summary(), None if reference is None else reference.summary()
    drafts = method_named(job.options.method).drafts
    remembers = report["draft_kv_bytes"] is not None
    target_prefill = s.prefill_ms["target"]
    lines = [
        Line("prefill target", number(target_prefill, "ms", 0), "shared" if ar else ""),
        *([Line("prefill draft", number(s.prefill_ms["draft"], "ms", 0), "-" if ar else "")] if remembers else []),
        Line(
            "time to first token (TTFT)",
            number(s.ttft_ms, "ms", 0),
            number((target_prefill or 0) + (ar.ttft_ms or 0), "ms", 0) if ar else "",
        ),
        Line("emitted tokens", f"{len(s.tokens)} ({s.finish})", f"{len(ar.tokens)} ({ar.finish})" if ar else ""),
        Line("decoding", number(s.tokens_per_second, "tokens/s", 2), number(ar.tokens_per_second, "tokens/s", 2) if ar else ""),
        Line(
            "end to end",
            number(s.end_to_end_ms, "ms", 0),
            number((target_prefill or 0) + ar.end_to_end_ms, "ms", 0) if ar else "",
        ),
    ]
    if ar is not None and report["speedup_vs_ar"]:
        total = ((target_prefill or 0) + ar.end_to_end_ms) / len(ar.tokens) / (s.end_to_end_ms / len(s.tokens))
        lines.append(Line("speed-up, decoding only", f"{report['speedup_vs_ar']:.2f}x", "1"))
        lines.append(Line("speed-up, end to end", f"{total:.2f}x", "1"))
    lines.append(Line("verify pass, median", number(s.verify_ms, "ms", 1), number(ar.verify_ms, "ms", 1) if ar else ""))
    if drafts:
        if job.options.settings.adaptive:
            asked = [e.data["gamma"] for e in job.trace.of("verify")]
            lines.append(Line("gamma chosen a round, mean", number(sum(asked) / len(asked) if asked else None, "", 2)))
        by_position = " ".join(f"{share:.2f}" for share in s.acceptance_by_position) or "not measured"
        lines += [
            Line("draft step, median", number(s.draft_ms, "ms", 1)),
            Line("upkeep a round, median", number(s.upkeep_ms, "ms", 2), number(ar.upkeep_ms, "ms", 2) if ar else ""),
            Line("tokens per iteration", number(s.tokens_per_iteration, "", 2), "1.00" if ar else ""),
            Line("  without correction/bonus", number(s.tokens_per_iteration_without_bonus, "", 2)),
            Line("acceptance", number(s.acceptance, "", 3)),
            Line("  by position in the block", by_position),
        ]
    if remembers:
        kept = report["draft_kv_bytes"] / report["draft_kv_bytes_full"]
        lines += [
            Line("draft KV, allocated", size(report["draft_kv_bytes"]), f"{size(report['draft_kv_bytes_predicted'])} predicted"),
            *(
                [Line("draft KV, while the prompt is read", "", f"{size(report['draft_kv_bytes_peak'])} predicted")]
                if report["draft_kv_bytes_peak"] > report["draft_kv_bytes_predicted"]
                else []
            ),
            Line(
                "draft KV, uncompressed",
                size(report["draft_kv_bytes_full"]),
                f"{kept:.1%} kept" if kept <= 1 else f"{kept:.1f} times as much kept: the prompt is short for this memory",
            ),
        ]
    lines.append(Line("peak memory of the process", size(report["peak_memory_bytes"])))
    text = table(lines, ("", job.options.method, "autoregressive" if ar else ""))
    return "\n".join([text, "", *_verdict(report, job, reference)])


def _verdict(report: dict[str, Any], job: Run, reference: Run | None) -> list[str]:
    from masw.remarks import remarks

    notes = []
    greedy = job.options.settings.sampling.greedy
    if report["identical_to_greedy"]:
        notes.append("identical to the target's own greedy output: yes")
    elif report["identical_to_greedy"] is False:
        d = report["first_difference"]
        gap = "one output had ended" if d["logit_gap"] is None else f"logit gap there {d['logit_gap']:.4f}"
        notes.append(f"identical to the target's own greedy output: no, first difference at token {d['index'] + 1} ({gap})")
        if d["logit_gap"] is not None and job.trace.header["provenance"]["dtype"] == "bfloat16":
            notes.append(
                "  bf16 rounds a pass over several rows differently from one over a single row: a near-tie can flip; --dtype fp32 settles it"
            )
    elif reference is not None and not greedy:
        notes.append("sampled output has the target's distribution; two sampled runs are not compared token by token")
    notes += remarks(job.trace.header)
    return notes
