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
# # What leaves, and what it leaves behind
#
# The draft's memory over a whole run: which entry holds what at which step, which slots absorbed the raw tokens that left, and what all of it weighs from 1K to 128K tokens.
#
# Sections 1, 2 and 4 show runs (in trace mode recorded ones, with a memory of their own), section 5 the buffers of four memories; sections 3 and 6 to 8 follow the parameters S, W and r.

# %% tags=["parameters"]
from typing import Literal

mode: Literal["trace", "live"] = "trace"  # recorded traces (no model), or computed now with the pair
pair: str = "smollm2"  # any pair of `masw models`; live mode loads it
sinks: int = 4  # S: first raw tokens, kept for ever [0..64]
window: int = 256  # W: last raw tokens, kept exactly [16..4096]
stride: int = 8  # r: raw tokens per memory slot [1..64]
gamma: int = 5  # drafted tokens per verify pass (live) [1..12]
tokens: int = 96  # length of the answer, tokens (live) [8..512]
dtype: Literal["fp32", "bf16"] = "fp32"  # of both models (live); fp32 makes greedy outputs equal token by token
seed: int = 0  # of sampling and of seeded draws
document: str = ""  # a text file (live); empty: the sample
template: Literal["light", "dark"] = "light"  # theme of the figures
widgets: bool = False  # also a live player (JupyterLab)

# %%
from masw import figures
from masw.config import MemoryShape
from masw.lessons import start
from masw.report import headline, show
from masw.timeline import shape_of, state_count, steps

lesson = start(globals())

# %% [markdown]
# ## 1 The KV map
#
# A row is a cache entry, the x axis is time in steps: prefill chunks first, then draft forwards and the settling of each round. Colour and glyph say what the entry is.

# %%
trace = lesson.traces(["masw"])["masw"]
drawn = figures.kv_map(trace, play=True, template=template)
show(drawn)
figures.play(drawn, on=widgets)

# %% [markdown]
# **Takeaway.** Sinks and slots stay; of the other raw tokens the last W are held, at the end of the prefill as at the end of the run (finer rows show more of them under the gap). The memory grows by one entry every r tokens instead of one every token.

# %%
shape, end = shape_of(trace), steps(trace)[-1]
assert end.slots == end.tokens // shape.stride
assert end.evicted == max(0, end.tokens - shape.sinks - shape.window)
headline("raw tokens evicted", end.evicted, "tokens")
headline("slots at the end", end.slots, "slots")

# %% [markdown]
# ## 2 The same, close up: drafting, rejection, rollback
#
# The last tokens of the prompt and the answer. Entries marked ? are drafted and not yet judged: many are rolled back a moment later.

# %%
prompt = trace.header["prompt_tokens"]
show(figures.kv_map(trace, first=prompt - 16, rows=400, template=template))

# %% [markdown]
# **Takeaway.** Drafting runs ahead of what is accepted; what is refused disappears without a trace, slots included.

# %%
settled = [step for step in steps(trace) if step.kind == "settle"]
assert all(step.tokens == step.final for step in settled)  # nothing tentative is left once a round is settled
headline("rounds", len(settled), "rounds")

# %% [markdown]
# ## 3 Which slots absorbed the tokens that left
#
# For every evicted raw token: the slot that closed its stretch of r tokens, and all that could still read it before it left.

# %%
show(figures.slot_sources(lesson.shape, 1000, template=template))

# %% [markdown]
# **Takeaway.** With W = 256 and r = 8 each raw token is read by W / r = 32 successive slots before it leaves: a slot is not limited to its own 8 tokens. (The bar of several neighbours spans the slots of all of them.)

# %%
if (sinks, window, stride) == (4, 256, 8):
    assert state_count(lesson.shape, 1000)["evicted"] == 740
note = "" if window % stride == 0 else "one more for some"
headline("slots that read a raw token before it leaves", window // stride, "slots", note=note)

# %% [markdown]
# ## 4 Bytes over the run, counted beside the formula
#
# The counted side adds up what the memory reported at each step of the run (written, evicted, rolled back); section 5 weighs the buffers themselves.

# %%
traces = lesson.traces(["full", "window", "masw"])
drawn = figures.memory_bytes(traces, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** What the events add up to is the formula, (S + W + floor(t / r)) times the bytes of an entry, at every step, after rejections too: no entry is lost or left behind.

# %%
assert all(row["measured bytes"] == row["predicted bytes"] for row in drawn.table if row["method"] != "full" and row["step"] > 0)
last = {row["method"]: row for row in drawn.table}
headline(
    "draft memory against a full cache",
    last["masw"]["measured bytes"] / last["masw"]["full cache bytes"],
    "share",
    note=f"{end.tokens:,} tokens",
)

# %% [markdown]
# ## 5 From 1K to 128K, predicted and measured
#
# Allocated buffers, so with the rollback window of 16 tokens.

# %%
rows = lesson.buffers()
show(figures.memory_by_context(rows, template=template))

# %% [markdown]
# **Takeaway.** The compact memory still grows linearly, with the slope divided by r. Only a window alone stays constant, and it forgets.

# %%
assert all(row["measured_bytes"] == row["predicted_bytes"] for row in rows)
longest = max(row["context"] for row in rows)
share = next(row["share of full"] for row in rows if row["context"] == longest and row["method"] == "masw r 8")
assert 0.12 < share < 0.13
headline("share of a full cache at 128K, r = 8", share, "share")

# %% [markdown]
# ## 6 When does compression not pay? First answer: short prompts
#
# A compact memory has a fixed part (S + W + 16). Below some length it is larger than a full cache.

# %%
windows = [w for w in (64, 128, 256, 512, 1024) if w >= stride]
rows = figures.knob_rows(lesson.shape, "window", windows, [1024, 4096, 32768], lesson.entry_bytes())
show(
    figures.sweep(
        rows,
        "window",
        "share",
        x_title="W, window (tokens)",
        y_title="share of a full cache (%)",
        by="context",
        template=template,
    )
)

# %% [markdown]
# **Takeaway.** With S = 4, W = 256 and r = 8 the compact memory is the smaller one from 316 tokens on, with W = 512 from 609. Below that, compression costs acceptance (speed, never the answer) and saves no memory. Two more cases where it does not pay: r = 1 (next section), and a draft that loses more acceptance than its shorter steps save, which is notebook 3's subject.

# %%
assert [figures.break_even(MemoryShape(4, w, 8)) for w in (256, 512)] == [316, 609]
headline("break-even context, W = 512, r = 8", figures.break_even(MemoryShape(4, 512, 8)), "tokens", kind="predicted")
headline("break-even context of this memory", figures.break_even(lesson.shape) or "never", "tokens", kind="predicted")

# %% [markdown]
# ## 7 The stride r

# %%
strides = [r for r in (1, 2, 4, 8, 16, 32) if r <= window]
rows = figures.knob_rows(lesson.shape, "stride", strides, [4096, 32768, 131072], lesson.entry_bytes())
show(
    figures.sweep(
        rows,
        "stride",
        "mib",
        x_title="r, stride (tokens per slot)",
        y_title="KV of the draft (MiB)",
        by="context",
        template=template,
    )
)

# %% [markdown]
# **Takeaway.** r sets the bytes at long contexts; W sets them at short ones. r = 1 never pays: a slot for each token, beside the window.

# %%
by_stride = {row["stride"]: row["entries"] for row in rows if row["context"] == "131,072 tokens"}
assert by_stride[4] - by_stride[8] == 131072 // 8  # twice the slots, and the same window

# %% [markdown]
# ## 8 The sinks S

# %%
rows = figures.knob_rows(lesson.shape, "sinks", [0, 1, 4, 16, 64], [4096, 32768], lesson.entry_bytes())
show(
    figures.sweep(
        rows, "sinks", "mib", x_title="S, sinks (tokens)", y_title="KV of the draft (MiB)", by="context", template=template
    )
)

# %% [markdown]
# **Takeaway.** Keeping the first 4 tokens costs next to nothing; 64 would show at short contexts.

# %%
by_sinks = {row["sinks"]: row["mib"] for row in rows if row["context"] == "32,768 tokens"}
assert by_sinks[4] / by_sinks[0] < 1.01
