"""The stages of a training: how long its rows are, how many tokens of them, and of which kinds. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from masw.errors import UsageError

KINDS = ("reconstruction", "text", "answers")
MOST_TOKENS = 2**22  # of one step


def amount(text: str) -> int:
    """A number of tokens: 300000, 300k or 1.5m, in thousands and millions. Raises ValueError for anything else."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    count = float(text[:-1] if unit > 1 else text) * unit
    if not 0 <= count < 1e15 or abs(count - round(count)) > 1e-6:  # nan and inf too
        raise ValueError(text)
    return round(count)


@dataclass(frozen=True)
class Stage:
    """A stretch of training: `tokens` tokens in rows of `length`, `rows` rows a step, of each kind in these shares."""

    length: int
    rows: int
    tokens: int
    reconstruction: float = 0.0  # a passage, a separator, the same passage again: loss on the second copy
    text: float = 1.0  # next token everywhere
    answers: float = 0.0  # a document, a question, an answer: loss on the answer

    def __post_init__(self) -> None:
        if not 16 <= self.length <= 131_072:
            raise UsageError(f"a training row has 16 to 131,072 tokens, not {self.length}")
        if self.rows < 1 or self.tokens < 1:
            raise UsageError(f"a stage needs at least one row a step and one token, not {self.rows} and {self.tokens}")
        if self.length * self.rows > MOST_TOKENS:
            raise UsageError(
                f"a step of {self.rows:,} rows of {self.length:,} tokens is more than {MOST_TOKENS:,} tokens; take fewer rows"
            )
        if min(self.shares) < 0 or sum(self.shares) <= 0:
            raise UsageError(f"shares of a stage must be zero or more and not all zero, not {self.shares}")

    @property
    def shares(self) -> tuple[float, float, float]:
        return self.reconstruction, self.text, self.answers

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.length * self.rows))

    @staticmethod
    def parse(text: str) -> Stage:
        """LENGTHxROWS:TOKENS[:RECONSTRUCTION/TEXT/ANSWERS], for example 384x8:300k:2/1/0."""
        try:
            size, tokens, *rest = text.split(":")
            length, rows = size.split("x")
            shares = [float(s) for s in rest[0].split("/")] if rest else [0.0, 1.0, 0.0]
            reconstruction, plain, answered = shares
            return Stage(int(length), int(rows), amount(tokens), reconstruction, plain, answered)
        except (ValueError, IndexError):
            raise UsageError(
                f"stage '{text}' is not LENGTHxROWS:TOKENS[:RECONSTRUCTION/TEXT/ANSWERS], such as 384x8:300k:2/1/0 "
                "(TOKENS: a whole number, 300k or 1.5m)"
            ) from None


def check_sources(stages: tuple[Stage, ...], text: bool, answers: bool) -> None:
    """Raises UsageError when the stages read a kind of source that is not there."""
    if not text and any(s.reconstruction or s.text for s in stages):
        raise UsageError("the stages read plain text but no text source was named; pass --text or use answers only")
    if not answers and any(s.answers for s in stages):
        raise UsageError("the stages read answers but no question source was named; pass --answers or give them no share")
