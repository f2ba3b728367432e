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
# # Where the time goes
#
# Time of each round by part, a decode step against the context with its floor, the speed-up model beside measured points, where it falls below 1, and the time to the first token.

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

# %%
from masw import figures
from masw.figures.timing import rounds_ms
from masw.lessons import start
from masw.metrics import summarise
from masw.report import headline, show

lesson = start(globals())

# %% [markdown]
# ## 1 One run, round by round

# %%
traces = lesson.traces(["none", "full", "window", "masw", "lookup"])
drawn = figures.step_latency(traces["masw"], template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** Nearly all of a round is two things: drafting gamma tokens one after the other, and one verify pass. The accept rule, rollback and recording (upkeep) hardly show.

# %%
parts = [sum(row[k] for k in ("draft", "verify", "upkeep", "other")) for row in rounds_ms(traces["masw"]) if row["round"]]
whole = [event.ms for event in traces["masw"].of("emit")]
assert all(abs(a - b) <= 0.05 * b + 0.1 for a, b in zip(parts, whole, strict=True))  # nothing is unaccounted for
upkeep = summarise(traces["masw"]).upkeep_ms
headline("upkeep of a round", upkeep, "ms", kind="timing", n=len(whole))

# %% [markdown]
# ## 2 A median round of each method

# %%
drawn = figures.latency_parts(traces, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** Copying from the text drafts for nothing; a model pays for each drafted token.

# %%
assert {row["method"] for row in drawn.table} == set(traces)
for row in drawn.table:
    headline(
        f"median round, {row['method']}",
        row["round median ms"],
        "ms",
        kind="timing",
        n=row["n"],
        spread=(row["round p10 ms"], row["round p90 ms"]),
    )

# %% [markdown]
# ## 3 A decode step against the context
#
# Single-token forwards of the draft after reading that many tokens. The dotted floor is what has to be read, weights and KV, over the bandwidth measured on the same machine.

# %%
rows = lesson.latency()
show(figures.latency_by_context(rows, template=template))

# %% [markdown]
# **Takeaway.** A full cache makes the step slower with every token read; the compact one hardly. How much that matters depends on the share of the KV in all the bytes of a step: small for a small model at a few thousand tokens, large for long contexts.

# %%
assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
longest = max(row["context"] for row in rows)
at = {row["method"]: row for row in rows if row["context"] == longest}
assert at["masw"]["floor_ms"] < at["full"]["floor_ms"]
headline(
    "step at the longest context, full",
    at["full"]["ms"],
    "ms",
    kind="timing",
    n=at["full"]["n"],
    spread=(at["full"]["p10_ms"], at["full"]["p90_ms"]),
)
headline(
    "step at the longest context, masw",
    at["masw"]["ms"],
    "ms",
    kind="timing",
    n=at["masw"]["n"],
    spread=(at["masw"]["p10_ms"], at["masw"]["p90_ms"]),
)

# %% [markdown]
# ## 4 The speed-up model, and where it is below 1

# %%
rows = figures.speedup_rows(traces)
show(figures.speedup_curve(rows, template=template))

# %% [markdown]
# **Takeaway.** In the shaded region drafting costs more than it saves. A pair whose draft is the target itself lives there by construction; a draft must be both cheap and believed.

# %%
assert rows and all(row["predicted speed-up"] > 0 for row in rows)
for row in rows:
    headline(
        f"speed-up, {row['method']}",
        row["measured speed-up"],
        "x",
        kind="timing",
        n=row["n"],
        note=f"predicted {row['predicted speed-up']:.2f}",
    )

# %% [markdown]
# ## 5 Time to the first token

# %%
drawn = figures.first_token(traces, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** A draft model has to read the document too. On one CPU its prefill comes on top of the target's; on a GPU with two streams the longer of the two counts.

# %%
draft = {row["method"]: row["draft prefill ms"] for row in drawn.table}
assert draft["none"] == draft["lookup"] == 0  # nothing to read it with
headline("draft prefill, masw", draft["masw"] / 1e3, "s", kind="timing")

# %% [markdown]
# ## 6 What is held for it

# %%
drawn = figures.memory_bytes({name: t for name, t in traces.items() if name in ("full", "window", "masw")}, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** The bytes saved are exact and known in advance; the time saved has to be measured.

# %%
last = {row["method"]: row["measured bytes"] for row in drawn.table}
assert last["masw"] < last["full"]
headline("draft KV at the end, masw", last["masw"], "bytes")
headline("draft KV at the end, full", last["full"], "bytes")
