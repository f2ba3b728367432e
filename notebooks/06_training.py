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
# # What training gives a slot
#
# The adaptor is all that is trained: mirrored K and V projections of each layer, and in the adaptors that ship a mirrored Q. Its learning curve from recorded logs, what is known about starts and recipes, and a short training done now (live mode).

# %% tags=["parameters"]
from typing import Literal

mode: Literal["trace", "live"] = "trace"  # recorded traces (no model), or computed now with the pair
pair: str = "smollm2"  # any pair of `masw models`; live mode loads it
seconds: int = 120  # length of the live training [5..3600]
dtype: Literal["fp32", "bf16"] = "fp32"  # of the draft (live)
seed: int = 0  # of the live training
template: Literal["light", "dark"] = "light"  # theme of the figures

# %%
from masw import figures
from masw.lessons import start
from masw.report import headline, show
from masw.tables import ablations, missing

lesson = start(globals())

# %% [markdown]
# ## 1 Learning curves, recorded
#
# Agreement: how often the draft's first choice is that of the same model with its full cache. That is what acceptance counts, so it is the measure; loss is the wrong judge. `copy` started from a plain copy of the projections, as the paper does; `quiet` from slots that no query looks at. `mean` is the last 1.10M tokens of an earlier adaptor, whose slots read the mean of the tokens that they close: it goes on from one of 560K tokens, at a rate that falls, on the distance to the full cache alone. `last` is a copy whose slots read the last token that they close, also on that distance alone: for smollm2 the first 401K of the 1.5M tokens of the adaptor that ships. `match` has the distance to the full cache behind every layer in its loss too: for smollm2 the last 684K of those tokens (422K between the two are told in docs/LOG.md and not drawn), for qwen2.5-coder all but the first 82K of what ships, which began again from a plain copy. Each run was measured on its own held-out rows, at steps of its own: a mark is such a measurement, and the thin line of `copy` goes on after its last mark because that run was stopped before the next.

# %%
logs = lesson.training()
drawn = figures.training_curve(logs, value="agreement", template=template)
show(drawn)

# %% [markdown]
# **Takeaway.** A plain copy starts far below the window alone: hundreds of entries that look like tokens and say nothing true. Training first has to undo that. A quiet start begins at the window's level. `mean` and `last` end above the window on the mean of their held-out rows: slots have begun to carry something. `last` gets there within 100K tokens. For smollm2 `match` goes on rising where the run before it had stopped; for qwen2.5-coder it falls while its rate is high and comes back as that falls, from and to a level above that of `last`, though rows differ.

# %%
held = {name: [(r["tokens"], r["agreement"]) for r in lines if r["kind"] == "measure"] for name, lines in logs.items()}
assert logs and all(points for points in held.values())
assert "copy" not in held or held["copy"][-1][1] > held["copy"][0][1]
beside = {row["run"]: row["agreement"] for row in drawn.table if row["measure"] == "held out, window alone"}
assert all(held[name][-1][1] > beside[name] for name in ("mean", "last", "match") if name in held)
for name, points in held.items():
    headline(f"held-out agreement of the window alone, {name}", beside[name], "share")
    headline(f"held-out agreement at the start, {name}", points[0][1], "share")
    headline(f"held-out agreement after {points[-1][0]:,} tokens, {name}", points[-1][1], "share")

# %% [markdown]
# ## 2 The same runs by distance to the full cache

# %%
show(figures.training_curve(logs, value="kl", template=template))

# %% [markdown]
# **Takeaway.** KL counts what agreement cannot see, since much of what is learned first does not change the first choice. Neither improves by itself: with a high rate and half reconstruction the recorded `quiet` run lost agreement and ended below its window.

# %%
first = next(iter(logs.values()))
assert any(line["kind"] == "step" for line in first)

# %% [markdown]
# ## 3 Copy or random, short or long, PT + SFT or SFT alone
#
# Recipes trained on equal tokens (`scripts/ablations.py`; for another pair than smollm2 the table is empty until that has been run). Agreement and KL are held out, against the same model with its full cache; tokens per iteration are on the target's own answers. The curves are the next-token loss of two recipes that see the same rows in the same order and differ in the first weights alone.

# %%
compared, losses = ablations(pair)
rows = compared or missing("copy against random initialisation", "short against long training", "PT + SFT against SFT only")
show(figures.method_table(rows, title="Ablations", template=template))
starts = {name: losses[name] for name in ("base", "random") if name in losses}
show(figures.training_curve(starts, value="nll", smooth=1, template=template))

# %% [markdown]
# **Takeaway.** The paper reports that random initialisation is still worse after 300 steps than the copy at step 0, that training at 8K beats 32K for equal tokens (3.77 against 3.58 tokens per iteration at 32K), and PT + SFT 5.34 against SFT alone 3.01. In this project's small runs (smollm2, 49,152 tokens a recipe, 24 steps, one seed) the random start stays far behind the trained copy in every column, and its next-token loss never comes down to the copy's at its first step (its agreement does pass that of an untrained copy). The paper's other two comparisons differ here by less than such a budget can tell. A slot that reads the last of its tokens starts nearest, and is the only recipe of this table above its own window, at 2,048 and 4,096 tokens; all others are still below it in agreement. "answers (n)" counts the target's answers behind tokens per iteration; W and r do not apply to a row without window or slots; first and last loss are single steps on unlike rows.

# %%
assert rows
if starts.keys() == {"base", "random"}:
    assert min(line["nll"] for line in starts["random"]) > starts["base"][0]["nll"]
headline("ablations measured", len(compared), "rows")

# %% [markdown]
# ## 4 A training of two minutes, now
#
# Live mode trains the pair's draft on three quarters of the sample and measures on the rest. In trace mode nothing runs.

# %%
log = lesson.train(seconds)
show(figures.training_curve({"now": log}, smooth=5, template=template))

# %% [markdown]
# **Takeaway.** Two minutes on one document teach nothing lasting; they show that the loop runs, what a step costs, and which numbers to watch.

# %%
steps_done = sum(line["kind"] == "step" for line in log)
assert mode == "trace" or steps_done > 0
headline("steps of the live training", steps_done if mode == "live" else None, "steps", kind="timing")
