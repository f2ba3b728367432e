"""A document and a task -> prompt tokens that fit the context. What is cut is counted, never silent."""

from __future__ import annotations

from dataclasses import dataclass

from masw.errors import UsageError
from masw.tokenizer import AnyTokenizer

# What follows the document. It leads, so that a second question about it shares the whole prefix with the first.
TASKS = {
    "summarize": "\n\nSummarize the document above in a few clear paragraphs.",
    "question": "\n\nAnswer this question about the document above, using only what it says.\n\nQuestion: {question}",
    "continue": "",
}


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    document_tokens: int  # of the whole document
    truncated_tokens: int  # of the document that did not fit
    kept: str  # all | start | end: which part of the document is in `ids`

    @property
    def notice(self) -> str | None:
        if not self.truncated_tokens:
            return None
        return (
            f"the document has {self.document_tokens:,} tokens; its {'last' if self.kept == 'start' else 'first'} "
            f"{self.truncated_tokens:,} do not fit the context and are cut"
        )


def check_task(task: str, question: str | None) -> None:
    """Raises UsageError for an unknown task, a missing question or one that no one asked for."""
    if task not in TASKS:
        raise UsageError(f"task '{task}' is unknown; use one of {', '.join(TASKS)}")
    asked = bool(question and question.strip())
    if task == "question" and not asked:
        raise UsageError('the task question needs the question itself: --task question "..."')
    if task != "question" and asked:
        raise UsageError(f"a question was given with the task {task}; use --task question")


def build(tokenizer: AnyTokenizer, document: str, task: str, question: str | None, limit: int) -> Prompt:
    """Prompt of at most `limit` tokens. `continue` keeps the end of a document that is too long, the other tasks its start."""
    check_task(task, question)

    def render(text: str) -> list[int]:
        if task == "continue":
            return tokenizer.encode(text)
        return tokenizer.chat(text + TASKS[task].replace("{question}", (question or "").strip()))

    frame = len(render(""))
    room = limit - frame
    if room < 1:
        raise UsageError(
            f"a context of {limit} prompt tokens has no room for a document beside the task's own {frame}; "
            "ask for fewer new tokens, or raise --max-context"
        )
    ids = tokenizer.encode(document)
    whole = render(document)
    if len(whole) <= limit:
        return Prompt(whole, len(ids), 0, "all")
    keep = room
    while True:
        # Cutting between tokens can change how the text around the cut is split, so the result is counted again.
        part = ids[-keep:] if task == "continue" else ids[:keep]
        prompt = render(tokenizer.decode(part))
        if len(prompt) <= limit:
            return Prompt(prompt, len(ids), len(ids) - keep, "end" if task == "continue" else "start")
        keep -= len(prompt) - limit
        if keep < 1:
            raise UsageError(f"the document cannot be cut to {limit} tokens; ask for fewer new tokens, or raise --max-context")
