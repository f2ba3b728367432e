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
# # How a slot is born
#
# A small model, the **draft**, proposes a few tokens; a large one, the **target**, checks them in one pass and answers for the output (notebooks 3 and 4). After a long document the draft's KV cache, the keys and values that its attention reads, makes each proposal slow. So the draft has to remember the document cheaply. This notebook fills its memory token by token: what stays exactly (sinks and window), what is folded into memory slots, which position a slot takes, what it reads and who reads it.

# %% tags=["parameters"]
from typing import Literal

mode: Literal["trace", "live"] = "trace"  # recorded traces (no model), or computed now with the pair
pair: str = "smollm2"  # any pair of `masw models`; live mode loads it
sinks: int = 4  # S: first raw tokens, kept for ever [0..64]
window: int = 256  # W: last raw tokens, kept exactly [16..4096]
stride: int = 8  # r: raw tokens per memory slot [1..64]
text: str = (
    "The agreement was signed in March by both parties and a copy was sent to the court the next day ."  # words to step through
)
template: Literal["light", "dark"] = "light"  # theme of the figures
widgets: bool = False  # also a live player (JupyterLab)

# %%
from masw import figures
from masw.config import MemoryShape
from masw.lessons import start
from masw.report import headline, show
from masw.timeline import state_count

lesson = start(globals())

# %% [markdown]
# ## 1 Step through a short text
#
# What happens to a token, in order:
#
# 1. **Prefill**: the draft reads the prompt once, in chunks.
# 2. **Sinks** (▼): the first S raw tokens stay for ever. Models put much attention there.
# 3. **Window** (■): the last W raw tokens stay exactly.
# 4. **Slot** (◆): every r tokens an extra entry g is written. What goes in is made of the r token embeddings: their mean, or, with the adaptors that come with masw, the last of them; it passes all layers like a token, with K/V projections of its own.
# 5. **Eviction** (×): raw tokens that the window has passed leave.
# 6. **Draft**, 7. **verify**, 8. **rollback** are in notebooks 3 and 4.
#
# Press play, or drag the slider. The memory here is a toy: S = 2, W = 6, r = 4.

# %%
words = text.split()
toy = MemoryShape(2, 6, 4)
drawn = figures.slot_birth(words, toy, template=template)
show(drawn)
figures.play(drawn, on=widgets)

# %% [markdown]
# **Takeaway.** The memory is append-only: a slot never changes once written, and raw tokens leave in order. After t tokens there are exactly floor(t / r) slots.

# %%
count = state_count(toy, len(words))
assert count["slot"] == len(words) // 4
assert sum(count.values()) == len(words) + count["slot"]
headline("entries held after the short text", toy.entries(len(words)), "entries", note=f"{len(words)} tokens")

# %% [markdown]
# ## 2 Who sees whom
#
# A raw token sees the sinks, its window and every slot before it. A slot sees the sinks, the window before it, every earlier slot and itself.

# %%
small = MemoryShape(1, 4, 4)
drawn = figures.visibility_mask(small, 13, pieces=words, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** A token that left the window is still reachable: a slot read it, and later slots read that slot. That chain is the draft's long-range memory.

# %%
rows = {row["query"]: row["sees"].split() for row in drawn.table}
assert "x1" in rows["g1"] and "x1" not in rows["x12"]  # evicted, but g1 has read it
assert "g1" in rows["g2"] and "g2" in rows["x12"]

# %% [markdown]
# ## 3 What is in the memory at token 1,000, and why position 1,000 occurs twice
#
# Take the memory of this notebook's parameters (S = 4, W = 256, r = 8 unless they were changed) when 1,000 tokens, x0 to x999, have been read.
#
# Slot m takes the position of the raw token that *follows* it, m times r. So slot 125 has position 1,000 (rotary embeddings turn its key by it), and so will x1000, the next raw token: from the moment it is read, position 1,000 occurs twice. Slots thus take no positions of their own: the distance between any two words is what it was without them.

# %%
drawn = figures.memory_content(lesson.shape, 1000, template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** With the default parameters: 4 sinks (x0 to x3), 256 raw tokens (x744 to x999) and 125 slots, 385 entries where a full cache holds 1,000. Position 1,000 belongs to slot 125 now, and to x1000 too once that is read: two entries of different kind, told apart by their stored kind and never by their place. These are the live entries; the buffers have 16 places more, for rollback (notebooks 2 and 4).

# %%
held = state_count(lesson.shape, 1000)
if (sinks, window, stride) == (4, 256, 8):
    assert held == {"sink": 4, "window": 256, "slot": 125, "evicted": 740}
    assert lesson.shape.entries(1000) == 385
    assert 125 * stride == 1000
headline("entries at token 1,000", lesson.shape.entries(1000), "entries")
headline("slots at token 1,000", held["slot"], "slots")

# %% [markdown]
# ## 4 What a slot attends to, and who attends to it
#
# Measured on the draft, over the first 200 tokens of the sample, with a window short enough (64) to give every key its bar.

# %%
profile = lesson.attention()
show(figures.slot_attention(profile, template=template))

# %% [markdown]
# **Takeaway.** A slot reads its window, the sinks and earlier slots in one go. Later tokens give it a small share, and a plain one of many keys: what that share carries is what training changes. The caption says which slots these are.

# %%
assert abs(sum(key["share"] for key in profile["keys"]) - 1) < 1e-3
assert all(key["position"] <= profile["position"] for key in profile["keys"])
later = [row["share"] for row in profile["later"]]
headline("attention paid to the slot by later tokens", sum(later) / len(later), "share", n=len(later))

# %% [markdown]
# ## 5 Mirrored against frozen projections
#
# Slots use K and V projections of their own, one pair a layer, which start as copies ("mirrored") of the frozen ones. They are all that is trained.

# %%
distance, adaptor = lesson.distance()
show(figures.projection_distance(distance, note=f"Adaptor: {adaptor}.", template=template))

# %% [markdown]
# **Takeaway.** What a slot can do beyond a plain token sits in these matrices (and in a query projection, where the adaptor has one); the rest of the draft is untouched. Bars at 0 are the untrained copy.

# %%
assert all(row["key"] >= 0 and row["value"] >= 0 for row in distance)
assert adaptor != "the untrained copy" or all(row["key"] == row["value"] == 0 for row in distance)
headline(
    "distance of the keys from the copy", sum(row["key"] for row in distance) / len(distance), "of the norm", n=len(distance)
)
