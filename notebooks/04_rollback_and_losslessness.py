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
# # Rejected, and nothing lost
#
# Drafts are refused on purpose: the memory rolls back bit for bit. Then the reason why no memory, however bad, can change the output: the accept rule, computed exactly, and a broken rule that is caught.

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
p: list[float] = [0.5, 0.3, 0.2]  # the target's distribution over a toy vocabulary
q: list[float] = [0.7, 0.2, 0.1]  # the draft's
draws: int = 20000  # seeded draws of the accept rule [100..200000]
template: Literal["light", "dark"] = "light"  # theme of the figures

# %%
from masw import figures
from masw.explain import accept_rows, chi_square, total_variation
from masw.lessons import start
from masw.metrics import first_difference, summarise
from masw.report import headline, show

lesson = start(globals())

# %% [markdown]
# ## 1 Token 1,005 is rejected: what happens to slot 126?
#
# The draft has read x0 to x1000, then drafts on: x1001 to x1007 are read as they are drafted (seven here, so that a slot is written; a block that ends at x1005 would have made none). x1007 closes the stretch 1000 to 1007, so slot 126 (position 1,008) is written. Now the target accepts x1001 to x1004 and refuses x1005.
#
# In trace mode this runs on the `tiny` pair, whose random weights are made on the spot: rollback does not depend on what a model has learned.

# %%
back = lesson.roll_back(read=1001, drafted=7, kept=4)
show(
    figures.method_table(
        back.rows(),
        {"moment": "moment", "tokens": "raw tokens read", "slots": "slots", "entries": "entries"},
        title="A rejected draft, before and after",
        template=template,
    )
)

# %% [markdown]
# **Takeaway.** Slot 126 read rejected tokens, so it goes with them; slot 125 (position 1,000) stays. The memory is bit for bit the one of a run that never drafted x1005, and so are the logits that follow. A fresh slot 126 is made when a later round closes that stretch. Evictions wait for acceptance too: a rollback window of 16 tokens outlives the nominal window.

# %%
assert back.identical and back.continues
if (sinks, window, stride) == (4, 256, 8):
    assert back.drafted["slots"] == 126 and back.after == {"tokens": 1005, "slots": 125, "entries": 385}
headline("memory identical after rollback", back.identical)
headline("slots dropped with the rejected tokens", back.dropped_slots, "slots")

# %% [markdown]
# ## 2 Greedy output is the target's own
#
# Each method's answer against the target decoding alone; the first difference is printed if there is one.

# %%
traces = lesson.traces(["none", "full", "window", "masw", "lookup"])
reference = summarise(traces["none"]).tokens
different = {name: first_difference(summarise(t).tokens, reference) for name, t in traces.items()}
print({name: "identical" if at is None else f"first difference at token {at + 1}" for name, at in different.items()})
rows = [
    {
        "method": name,
        "emitted": len(summarise(t).tokens),
        "rounds": summarise(t).rounds,
        "first difference": "none" if different[name] is None else different[name] + 1,
    }
    for name, t in traces.items()
]
show(
    figures.method_table(
        rows,
        {"method": "method", "emitted": "tokens emitted", "rounds": "rounds", "first difference": "first difference (token)"},
        title="The same words, in fewer or more rounds",
        template=template,
    )
)

# %% [markdown]
# **Takeaway.** Draft memories differ widely in what they keep; the answer (one document, greedy decoding) does not differ at all. In bf16 a near-tie may round the other way between a pass over one row and one over several: then `masw run` prints the place and the gap of the two logits.

# %%
assert dtype != "fp32" or all(at is None for at in different.values())
others = [at for name, at in different.items() if name != "none"]
headline("methods identical to greedy decoding", sum(at is None for at in others), "methods", n=len(others))

# %% [markdown]
# ## 3 Why the output cannot change
#
# A draft token x, drawn from q, is kept with probability min(1, p(x) / q(x)). If it is refused, a token is drawn from norm(max(0, p - q)), where norm divides by the sum. That sum is just the probability of a refusal, so the two cancel, and token x comes out with probability min(p, q) + max(0, p - q) = p, whatever q is: a bad memory makes q bad, and costs rounds, but has no way into the result. This holds token after token, so a sampled answer has the target's own *distribution*; greedy decoding is the case where p is 1 on one token, and gives the same words.
#
# With p = (0.5, 0.3, 0.2) and q = (0.7, 0.2, 0.1): A is kept with probability 0.5 / 0.7, a refusal happens with probability 0.2, and the residual is (0, 0.5, 0.5). So A comes out with 0.5, B with 0.2 + 0.2 x 0.5 = 0.3, C with 0.1 + 0.2 x 0.5 = 0.2.
#
# **The broken rule** draws its correction from p instead of the residual, an easy mistake that no reader of the output would notice.

# %%
rows = accept_rows(p, q, draws, seed)
show(figures.accept_rule(rows, template=template))

# %% [markdown]
# **Takeaway.** The rule emits p exactly (total variation 0 up to rounding); the broken one is off by a tenth here, and the exact computation catches it at once. The open diamonds are seeded draws through the very function that decoding uses; how far they may stray by chance is what chi-square says (the default seed is an unlikely one: one in 150 strays further).

# %%
exact, broken = total_variation(rows, "emitted"), total_variation(rows, "broken")
assert exact < 1e-12
if (p, q) == ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]):
    assert abs(broken - 0.1) < 1e-12  # where p and q share no token, the broken rule does no harm
statistic, freedom, as_large = chi_square(rows)
assert as_large > 4e-6  # at 2 degrees of freedom: a statistic below 25
headline("total variation, accept rule", exact, note="exact, up to rounding")
headline("total variation, broken rule", broken)
headline(
    "chi-square of the seeded draws",
    statistic,
    n=draws,
    note=f"{freedom} degrees of freedom; {as_large:.2g} of all seeds give as much or more, and their mean is {freedom}",
)
