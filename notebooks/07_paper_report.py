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
# # The paper's tables, on this machine
#
# The main table (methods by contexts by sets), the trade-off at the longest context, ablations and open questions, from the result tables in data/results. What has not been measured is said, and the paper's own numbers stand apart.

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
from masw.lessons import start
from masw.report import headline, show
from masw.tables import (
    BENCH_COLUMNS,
    NO_RESULTS,
    PAPER,
    ablations,
    bench_lines,
    marked,
    missing,
    recall,
    speedup_points,
    trade_off,
)

lesson = start(globals())

# %% [markdown]
# ## 1 Main table
#
# Every row is a set, a context and a method, over documents and repeats. Speed-ups are medians of ratios to autoregressive decoding of the same document; `predicted` uses measured step times, `at floor` the cost model alone. In bf16 a block of rows is rounded differently than a single row, so an output may part from the greedy one where the target's two best logits nearly tie: the last column is how far they were apart. In fp32 outputs are equal (notebook 04). The share of draft KV is of that drafter's own full cache: 1 for an EAGLE head, whose cache is uncompressed and one layer deep.

# %%
lines = bench_lines(pair)
print(f"{len(lines)} lines of benchmark results" if lines else NO_RESULTS)
traces = lesson.traces(["none", "full", "window", "masw", "snapkv", "hybrid", "lookup"])
rows = [marked(line) for line in lines] or figures.speedup_rows(traces)
show(
    figures.method_table(
        rows,
        BENCH_COLUMNS if lines else None,
        title="Methods, contexts, sets" if lines else "One document, recorded",
        template=template,
    )
)

# %% [markdown]
# **Takeaway.** n stands beside every number, and quartiles of the speed-ups are in the tables of data/results; one document is an indication and no result.

# %%
assert rows
headline("benchmark lines", len(lines), "lines")

# %% [markdown]
# ## 2 Speed-up by method and context

# %%
points = speedup_points(lines, traces)
show(
    figures.method_bars(
        points, "speed-up", unit="x", group="context", title="Decode speed-up over autoregressive", template=template
    )
)

# %% [markdown]
# **Takeaway.** The paper's claim in kind is a line that rises with the context for the compact strong draft and falls for the uncompressed one. Whether it does here is what this figure is for; with one context it cannot. Where draft and target are one model (smollm2), no draft model can gain; copying (`lookup`) costs nothing and can.

# %%
assert all(point["speed-up"] is None or point["speed-up"] > 0 for point in points)
for point in points[:12]:
    headline(f"speed-up, {point['method']}, {point['context']} tokens", point["speed-up"], "x", kind="timing", n=point["n"])

# %% [markdown]
# ## 3 Memory, latency and acceptance at the longest context

# %%
trade = trade_off(lines, traces)
show(figures.method_table(trade, title="The trade-off", template=template))

# %% [markdown]
# **Takeaway.** The paper keeps 23 to 28 % of the draft's cache at 32K, with steps of a third to a quarter of the time, for 3.77 instead of 4.82 tokens per iteration (70B target).

# %%
kept = {row["method"]: row["draft KV (bytes)"] for row in trade}
assert not kept.get("masw") or not kept.get("full") or kept["masw"] < kept["full"]
if kept.get("masw") and kept.get("full"):
    headline("share of the draft's cache kept, masw", kept["masw"] / kept["full"], "share")

# %% [markdown]
# ## 4 Ablations

# %%
compared, _ = ablations(pair)
show(
    figures.method_table(
        compared or missing("slot input", "copy against random initialisation", "training length", "PT + SFT against SFT only"),
        title="Ablations at equal tokens",
        template=template,
    )
)

# %% [markdown]
# **Takeaway.** "answers (n)" counts the target's answers behind tokens per iteration. Each recipe saw the same number of tokens, far too few to reach what the paper's adaptors reach (its stage 1 alone is 2B tokens), so it says where recipes start, not where they end: copy far before random, the last token as slot input before the others, and at 2,048 and 4,096 tokens all but that one still below the window without slots in agreement. Rows that say "not measured yet" are missing, and nothing should be read into them.

# %%
headline("ablations measured", len(compared), "rows")

# %% [markdown]
# ## 5 Open questions
#
# Verbatim recall of far text, contexts of 128K and beyond, and the capacity of a slot when only K and V are trained. For the first, a made-up code is planted in the first half of a real document and asked for; what counts is agreement on the code's own tokens, in answers where the target knows it.

# %%
recalled = recall(pair)
show(
    figures.method_table(
        recalled or missing("verbatim recall of far text"), title="Verbatim recall of far text", template=template
    )
)
show(figures.method_table(missing("128K and beyond", "capacity of one slot"), title="Open questions", template=template))

# %% [markdown]
# **Takeaway.** A window has not seen the code and can only guess at its tokens; entries selected by attention can hold it. What `masw` gains over `window` here is what its slots carry word for word: more with more slots (r = 4), and less than selected entries hold, with adaptors as little trained as these. A failure shows as slower drafting; the target has the last word.

# %%
assert all(0 <= row["agreement on the planted tokens (share)"] <= 1 for row in recalled)
headline("rows on recall", len(recalled), "rows")

# %% [markdown]
# ## 6 What the paper reports
#
# Not measured here: other models (8B and 70B targets), other machines. For comparison in kind only.

# %%
show(figures.method_table(PAPER, title="Reported by the paper (arXiv 2608.30252)", template=template))

# %% [markdown]
# **Takeaway.** Differences that should be kept in mind: this project's default pair is 0.5B and 1.5B on a CPU; its answers are short; its adaptors have been trained on less than a thousandth of the paper's tokens; prefill of draft and target run one after the other.

# %%
assert any(row["method"] == "MASW" for row in PAPER)
headline("paper: MASW at 32K, 8B target", 2.08, "x", note="reported by the paper, not measured here")
