"""Figures of traces and result tables, shared by notebooks, report and app.

Every function is pure: a `masw.trace.Trace`, a list of dict rows or a shape goes in, a `Drawn` (plotly figure, caption, alt text, table
twin) comes out. `template` is "light" or "dark". No torch and no model is needed. Pass `CONFIG` wherever a figure is shown.
"""

from masw.figures.acceptance import acceptance_by_position, acceptance_histogram, failure_distance, rolling_acceptance
from masw.figures.attention import projection_distance, slot_attention
from masw.figures.base import COLOURS, CONFIG, GLYPHS, Drawn
from masw.figures.kvmap import kv_map
from masw.figures.memory import break_even, calculator, knob_rows, memory_by_context, memory_bytes
from masw.figures.player import play
from masw.figures.results import accept_rule, acceptance_by_context, method_bars, method_table, training_curve
from masw.figures.slots import memory_content, slot_birth, slot_sources, visibility_mask
from masw.figures.timing import (
    first_token,
    latency_by_context,
    latency_parts,
    speedup_curve,
    speedup_rows,
    step_latency,
    sweep,
)
from masw.figures.tokens import token_html, token_strip, visible

__all__ = [
    "COLOURS",
    "CONFIG",
    "GLYPHS",
    "Drawn",
    "accept_rule",
    "acceptance_by_context",
    "acceptance_by_position",
    "acceptance_histogram",
    "break_even",
    "calculator",
    "failure_distance",
    "first_token",
    "knob_rows",
    "kv_map",
    "latency_by_context",
    "latency_parts",
    "memory_by_context",
    "memory_bytes",
    "memory_content",
    "method_bars",
    "method_table",
    "play",
    "projection_distance",
    "rolling_acceptance",
    "slot_attention",
    "slot_birth",
    "slot_sources",
    "speedup_curve",
    "speedup_rows",
    "step_latency",
    "sweep",
    "token_html",
    "token_strip",
    "training_curve",
    "visibility_mask",
    "visible",
]  # fmt: skip
