"""What has to be known to read a run's numbers rightly, told from the header of its trace: one wording for terminal, pages and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def remarks(header: Mapping[str, Any]) -> list[str]:
    """Sentences about the run whose trace has this header; none where there is nothing to warn of."""
    adaptor, head, models = header.get("adaptor"), header.get("eagle"), header.get("models") or {}
    said = [] if adaptor is None else [*_slots(adaptor, header.get("prompt_tokens") or 0)]
    if head:
        trained = f"was trained on {head['tokens']:,} tokens" if head.get("tokens") else "is untrained"
        said.append(f"The eagle head ({head['file']}) {trained}.")
    if models and models.get("draft") == models.get("target") and header.get("memory") is not None and not head:
        said.append(
            "Draft and target are one model here: this shows what compression costs in acceptance, and no speed-up can be expected."
        )
    if "tiny" in str(header.get("pair")):
        said.append("This pair is made of random weights: its text is noise, and its milliseconds say little about real models.")
    return said


def _slots(adaptor: Mapping[str, Any], prompt_tokens: int) -> list[str]:
    if not adaptor.get("strides"):
        if adaptor.get("choice") == "none":
            return ["The draft's memory slots are untrained, a plain copy of its own projections: worse than no slots."]
        return [
            "The draft's memory slots are untrained (no adaptor for this draft and stride) and kept quiet: the draft is about as good as its "
            "window alone."
        ]
    reach = adaptor.get("reach")
    if reach and prompt_tokens > reach:
        return [
            f"Slots more than {reach:,} tokens back are not read: the adaptor was trained on rows of at most "
            f"{adaptor['longest_row']:,} tokens."
        ]
    return []
