# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Searching a schedule
#
# Stages are rarely equal, messages take time, and memory ends somewhere. The named schedules know nothing of this.
#
# **What is the shortest step on your own times, within your own memory, and how do you know that it is the shortest?**

# %%
from tempfile import NamedTemporaryFile

import numpy as np
from IPython.display import Image

import minigrad as mg
from distributed import LocalWorld
from minigrad.models import mlp
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, picture, write_png
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import round_robin
from pipeline.schedules.search import search


def show(timeline, title):
    """Return a timeline as a PNG, which every viewer of notebooks can show."""
    with NamedTemporaryFile() as file:
        write_png(picture(timeline, title), file.name)
        return Image(file.read(), retina=True)  # two dots a point


# %% [markdown]
# ## The problem
#
# Three stages on three ranks. That in the middle takes 40% longer, a weight half 60% of a forward, and a message 40% of
# one. A rank may hold four micro-batches; what waits for its weight half counts half.

# %%
problem = Problem.of(
    num_ranks=3,
    num_microbatches=8,
    rank_of=round_robin,
    num_stages=3,
    forward=[1, 1.4, 1],
    backward_input=[1, 1.4, 1],
    backward_weight=[0.6, 0.84, 0.6],
    latency=0.4,
    deferred=0.5,
    limit=4,
)

for name in ("1f1b", "zero_bubble_h1", "zero_bubble_h2"):
    timeline = problem.simulate(SCHEDULES[name].orders(3, 8))
    peaks = [f"{peak:g}" for peak in problem.peaks(timeline)]
    print(f"{name:15} makespan {timeline.makespan:5.1f}  peaks {' '.join(peaks):12}  fits: {problem.fits(timeline)}")

# %% [markdown]
# ## The search
#
# It tries rules for what a free rank does next, and stops where no order can be shorter.

# %%
found = search(problem)
print(found.report())

# %%
show(found.timeline, "Found by the search: 3 ranks, 8 micro-batches")

# %% [markdown]
# The bound needs no search: any order takes at least as long as the largest of three arguments.

# %%
for bound in found.bounds:
    print(f"{bound.time:6.2f}  {bound.reason}")

# %% [markdown]
# ## How much is memory worth?
#
# The same search with less and with more room.

# %%
for limit in (1, 1.5, 2, 3, 4, 6):
    other = search(
        Problem.of(
            num_ranks=3,
            num_microbatches=8,
            rank_of=round_robin,
            num_stages=3,
            latency=0.4,
            deferred=0.5,
            limit=limit,
        ),
        measure="span",
        num_tries=200,
    )
    print(f"room for {limit:3} micro-batches: longest span {other.time:5.2f}, none is below {other.bound.time:5.2f}")

# %% [markdown]
# ## It runs
#
# What is found is a schedule as any other: validated, proved free of deadlocks, and run by the executor. Here three
# ranks, as threads, train a small model with it; the loss is the same number that 1F1B gives.

# %%
x = np.random.default_rng(0).standard_normal((16, 8))
y = np.random.default_rng(1).integers(0, 4, 16)


def train(comm, schedule):
    stages = PipelineStage.of(mlp.layers([8, 12, 12, 4]), comm, schedule)
    pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=8, loss_fn=mg.cross_entropy)
    return pipe.step(x, y), {p.name: p.grad.copy() for p in stages.parameters()}


losses = {}
for schedule in (found.schedule, SCHEDULES["1f1b"]):
    results = LocalWorld(3).run(lambda comm, schedule=schedule: train(comm, schedule))
    losses[schedule.name] = results[0][0], {name: grad for _, grads in results for name, grad in grads.items()}
    print(f"{schedule.name:6} loss {losses[schedule.name][0]:.6f}")

equal = all(np.allclose(losses["found"][1][name], grad) for name, grad in losses["1f1b"][1].items())
print(f"{len(losses['1f1b'][1])} gradients, all equal: {equal}")
assert equal

# %% [markdown]
# ## Things to try
#
# - Give the first stage twice the memory of the others: `limit=[8, 4, 4]`. Is it worth it?
# - Two stages a rank: `rank_of=v_shape`, `num_stages=6`, half the times. How long is the step then?
# - `python -m pipeline search --csv mine.csv`, then change a cell, and `check` it.
