# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Who is believed, and where
#
# One document, every method: which drafted tokens the target keeps, where in a block, along the answer, and what a failed draft would have needed to know.
#
# In each **round** (or iteration) the draft proposes a **block** of at most gamma tokens and the target verifies it in one pass. Methods differ in what the draft remembers: `full` all, `window` sinks and window, `masw` those and slots, `snapkv` those and the prompt entries that its end attends to most, `hybrid` slots and such entries; `lookup` has no draft model and copies what followed the same words earlier; `none` drafts nothing.

# %% tags=["parameters"]
from typing import Literal

mode: Literal["trace", "live"] = "trace"  # recorded traces (no model), or computed now with the pair
pair: str = "smollm2"  # any pair of `masw models`; live mode loads it
sinks: int = 4  # S: first raw tokens, kept for ever (live) [0..64]
window: int = 256  # W: last raw tokens, kept exactly (live) [16..4096]
stride: int = 8  # r: raw tokens per memory slot (live) [1..64]
gamma: int = 5  # drafted tokens per verify pass (live) [1..12]
tokens: int = 96  # length of the answer, tokens (live) [8..512]
dtype: Literal["fp32", "bf16"] = "fp32"  # of both models (live); fp32 makes greedy outputs equal token by token
seed: int = 0  # of sampling and of seeded draws
document: str = ""  # a text file (live); empty: the sample
template: Literal["light", "dark"] = "light"  # theme of the figures
widgets: bool = False  # also a live player (JupyterLab)

# %%
from masw import cost, figures
from masw.lessons import start
from masw.metrics import summarise
from masw.report import headline, show
from masw.timeline import shape_of

lesson = start(globals())

# %% [markdown]
# ## 1 The fate of every token
#
# Blue ✓ was kept, orange ✗ refused, yellow ↻ is the target's correction, light blue + its bonus after a fully accepted block, grey = a token of the target alone (nothing was drafted).

# %%
traces = lesson.traces(["none", "full", "window", "masw", "snapkv", "hybrid", "lookup"])
drawn = figures.token_strip(traces["masw"], steps=True, template=template)
show(drawn)
figures.play(drawn, on=widgets)

# %% [markdown]
# **Takeaway.** A block is kept up to its first miss. Everything after a miss was wasted work, and the target's own token takes its place, so every round moves on by at least one token.

# %%
masw = summarise(traces["masw"])
assert len(masw.tokens) >= masw.rounds
headline("tokens per iteration, masw", masw.tokens_per_iteration, "tokens", n=masw.rounds)

# %% [markdown]
# ## 2 How many drafts a block keeps

# %%
drawn = figures.acceptance_histogram(traces["masw"], template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** The mean of this histogram, plus one for the target's own token, is the tokens per iteration of the rounds that drafted. A last round with room for one token drafts none, so the tokens per iteration of the whole run can be a little lower.

# %%
kept = sum(row["accepted"] * row["blocks"] for row in drawn.table)
assert kept == round(masw.tokens_per_iteration_without_bonus * masw.rounds)
headline("blocks that keep nothing", drawn.table[0]["share"], "share", n=drawn.table[0]["n"])

# %% [markdown]
# ## 3 By position in the block, all methods

# %%
drawn = figures.acceptance_by_position(traces, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** Acceptance falls with the position, since a token counts only when all before it were right. What the draft forgot shows at once, in position 1. Where whiskers overlap, as those of `masw` and `window` may, one document cannot tell two methods apart.

# %%
first = {row["method"]: row["share"] for row in drawn.table if row["position"] == 1}
assert pair != "smollm2" or first["full"] == 1.0  # one model drafts for itself with all it needs: never refused
headline("kept at position 1, masw", first["masw"], "share")
headline("kept at position 1, full", first["full"], "share")

# %% [markdown]
# ## 4 Along the answer

# %%
show(figures.rolling_acceptance(traces, template=template))

# %% [markdown]
# **Takeaway.** Acceptance is a property of the passage as much as of the method: along one answer it rises and falls by more than methods differ.

# %%
assert all(0 <= summarise(t).acceptance <= 1 for name, t in traces.items() if name != "none")
headline("acceptance, masw", masw.acceptance, "share of drafted tokens")

# %% [markdown]
# ## 5 Tokens per iteration, and the same output from all

# %%
rows = [
    {"method": name, "tokens per iteration": summarise(t).tokens_per_iteration, "n": summarise(t).rounds}
    for name, t in traces.items()
]
show(figures.method_bars(rows, "tokens per iteration", unit="tokens", template=template))

# %% [markdown]
# **Takeaway.** Methods differ in how far they get per round, never in what they say (here: one document, greedy decoding).

# %%
assert dtype != "fp32" or all(summarise(t).tokens == summarise(traces["none"]).tokens for t in traces.values())
same = [name for name, t in traces.items() if name != "none" and summarise(t).tokens == summarise(traces["none"]).tokens]
headline("methods with the output of none", len(same), "methods", n=len(traces) - 1)

# %% [markdown]
# ## 6 Where a draft fails, and what it would have needed
#
# For every rejection: how far back the token stands that would have been right. Near: inside the window, the draft saw it and missed anyway. Far and verbatim: the window has lost it, and only a slot, or a copy, could know.

# %%
missed = [row for row in lesson.failures() if row["method"] in traces]
drawn = figures.failure_distance(missed, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** The share beyond the window is what a longer memory could win; the share inside it cannot be won by reaching further back, though it may be by reading the window as the full cache does. (smollm2 drafts for itself, so `full` never fails there.) New tokens stand nowhere in the text so far.

# %%
of_masw = [row for row in missed if row["method"] == "masw"]
reach = shape_of(traces["masw"]).window
far = [row for row in of_masw if row["distance"] is not None and row["distance"] > reach]
new = [row for row in of_masw if row["distance"] is None]
assert all(row["distance"] is None or row["distance"] > 0 for row in missed)
headline("rejections whose token stands beyond the window", len(far) / max(1, len(of_masw)), "share", n=len(of_masw))
headline("rejections whose token is new", len(new) / max(1, len(of_masw)), "share", n=len(of_masw))

# %% [markdown]
# ## 7 When does compression not pay? Second answer: lost acceptance
#
# Speed-up = tokens per iteration / (gamma t_d / t_t + t_verify / t_t). A compact draft is cheaper a step; if it is believed less, that is lost again.

# %%
rows = figures.speedup_rows(traces)
show(figures.speedup_curve(rows, template=template))

# %% [markdown]
# **Takeaway.** A worked example with gamma 5 and verification at 1.1 steps: a full draft at 0.4 of the target's step, each token of which is kept with 80 % given that all before it were, gives 1.19x. Compressed to 0.25 of the step it beats that at 70 % (1.25x), and loses to it at 60 % (1.01x). A draft whose step costs as much as the target's can hardly win: smollm2 drafts for itself here, so read no ranking from its speed-ups; one run on a shared machine also has noise of this size in every step time.

# %%
gain = [
    round(cost.speedup(cost.tokens_per_iteration(a, 5), 5, c, 1.1, 1.0), 2) for a, c in ((0.8, 0.4), (0.7, 0.25), (0.6, 0.25))
]
assert gain == [1.19, 1.25, 1.01]
own = next((row for row in rows if row["method"] == "masw"), None)
headline("decode speed-up, masw", own and own["measured speed-up"], "x", kind="timing")
headline("decode speed-up, masw, from its costs", own and own["predicted speed-up"], "x", kind="timing")
