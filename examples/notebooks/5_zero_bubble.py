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
# # 5. Zero bubble
#
# While a pipeline drains, each rank waits for the backward of the stage behind it. Yet it needs only half of what
# that backward computes.
#
# **What is gained by splitting the backward in two, and what does it cost?**

# %%
import time
import tracemalloc
from tempfile import NamedTemporaryFile

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image

import minigrad as mg
from minigrad import nn
from minigrad.models.gpt import GPTBlock, GPTConfig
from pipeline import SCHEDULES, B, W, picture, simulate, write_png

BLUE, GREEN, ORANGE, GREY = "#6aaee8", "#4fb98a", "#efb551", "#d9dfe5"
plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}


def show(timeline, title):
    """Return a timeline as a PNG, which every viewer of notebooks can show."""
    with NamedTemporaryFile() as file:
        write_png(picture(timeline, title), file.name)
        return Image(file.read(), retina=True)  # two dots a point


# %% [markdown]
# ## A backward is two products
#
# For a layer y = x w, whose output has the cotangent g:
#
# | | | who waits for it |
# |---|---|---|
# | input half, **B** | g wᵀ, the gradient of x | the layer before, and with it the stage before |
# | weight half, **W** | xᵀ g, the gradient of w | the optimizer, at the end of the step |
#
# Here is that layer as an op which notes what it multiplies.

# %%
done = []


@mg.op
def product(x, w):
    def to_x(g):
        done.append("g wT")
        return g @ w.T

    def to_w(g):
        done.append("xT g")
        return x.T @ g

    done.append("x w")
    return x @ w, (to_x, to_w)


# %% [markdown]
# A stage is two of them. Its input is a leaf, for which the stage before wants the gradient.

# %%
random = np.random.default_rng(0)
w1, w2 = (mg.Parameter(random.standard_normal((4, 4)), name) for name in ("w1", "w2"))
input_values, g = random.standard_normal((2, 8, 4))


def forward():
    done.clear()
    x = mg.Tensor(input_values, requires_grad=True)
    return x, product(mg.tanh(product(x, w1)), w2)


# %% [markdown]
# The whole backward takes the two products of each layer in turn. `backward_input` does only what the stage before
# waits for, and keeps the rest. `backward_weight` does the rest, whenever we like.

# %%
x, y = forward()
deferred = mg.backward_input(y, g)
print("F and B:", done)
assert done == ["x w"] * 2 + ["g wT"] * 2, "B multiplies into no weight"
assert x.grad is not None, "the gradient that the stage before waits for is there"
assert w1.grad is None, "the gradients of the weights are not"

done.clear()
mg.backward_weight(deferred)
print("W:      ", done)
assert done == ["xT g"] * 2, "W is what was left"

# %% [markdown]
# The same products, added in the same order. So nothing changes, not even the last bit.

# %%
halves = [w1.grad.copy(), w2.grad.copy(), x.grad.copy()]
w1.grad = w2.grad = None
x, y = forward()
mg.backward_with_grad(y, g)
print("whole:  ", done)
for split, whole in zip(halves, [w1.grad, w2.grad, x.grad], strict=True):
    assert np.array_equal(split, whole), "B then W gives every bit of the whole backward"

# %% [markdown]
# ## Who waits for whom
#
# A schedule may now use three actions instead of two. Only B is on the way back through the stages:

# %%
print(B(1, 0), "needs", B(1, 0).needs(num_stages=3))
print(W(1, 0), "needs", W(1, 0).needs(num_stages=3))

# %% [markdown]
# In 1F1B a rank that waits for the next stage waits for both halves of its backward. With F = B = W, drawn with a
# backward of length 2:

# %%
P, M = 3, 6  # ranks, micro-batches


def run(name, num_ranks=P, num_microbatches=M, f=1.0, b=1.0, w=1.0):
    schedule = SCHEDULES[name]
    v = schedule.num_chunks  # a rank with two stages has the same work in halves
    orders = schedule.orders(num_ranks, num_microbatches)
    times = {"forward": f / v, "backward_input": b / v, "backward_weight": w / v}
    return simulate(orders, num_stages=schedule.num_stages(num_ranks), **times)


show(run("1f1b"), f"1F1B: {P} ranks, {M} micro-batches")

# %% [markdown]
# `zero_bubble_h1` is 1F1B with split backwards. The gradient travels up after B alone, and each W goes where a rank
# would be idle.

# %%
show(run("zero_bubble_h1"), f"Zero bubble H1: {P} ranks, {M} micro-batches")

# %% [markdown]
# Filling still takes P - 1 forwards. Draining takes P - 1 times B instead of B + W, and meanwhile a rank does P - 1
# weight halves that it had put off. The bubble was (P - 1)(F + B + W); now it is
#
# $$(P - 1)\,(F + B - W)$$
#
# where W is no longer than F and B: a third, at equal times.

# %%
for p in (2, 3, 4, 8):
    assert run("1f1b", p, 2 * p).makespan_bubble(0) == (p - 1) * 3
    idle = run("zero_bubble_h1", p, 2 * p).makespan_bubble(0)
    assert idle == (p - 1) * 1, f"on {p} ranks H1 waits for (P - 1)(F + B - W), not for {idle}"

# %% [markdown]
# ## No bubble at all?
#
# More weight halves in store fill more. `zero_bubble_h2` sends twice as many forwards ahead, and no rank waits any
# more between its first and its last action. Only the slant is left, and the time from the first start to the last
# end is that of H1. If a step ends with something that all ranks do together (the norm of all gradients, for
# clipping), they wait there after all; if not, the next step starts right away.

# %%
h2 = run("zero_bubble_h2")
assert h2.span_bubble == 0, "nobody waits between its first and its last action"
show(h2, f"Zero bubble H2: {P} ranks, {M} micro-batches")

# %% [markdown]
# `zbv` gets there with less memory. Each rank has two stages, placed in a V: down the ranks and up again. The last
# stage is on rank 0, beside the first, so rank 0 need not wait until a gradient has come all the way back. (Drawn
# twice as wide for the same time: each box is half the work.)

# %%
zbv = run("zbv")
assert zbv.span_bubble == 0, "nobody waits between its first and its last action"
assert zbv.makespan_bubble(0) == h2.makespan_bubble(0) / 2, "the slant is half as long, as the stages are half the size"
show(zbv, f"ZBV: {2 * P} stages on {P} ranks, {M} micro-batches")

# %% [markdown]
# ## What it costs
#
# W needs the layer's input and its cotangent, so both stay alive until W has run. How much is that in a real layer?
# Run a transformer block and ask Python what it holds.

# %%
config = GPTConfig(width=128, num_heads=4, context=64)
block = GPTBlock(nn.ParamGetter(), config)
batch = random.standard_normal((8, config.context, config.width), dtype=np.float32)


def actions():
    """Yield after each of F, B and W of the block; nothing but its own state is alive then."""
    y = block(mg.Tensor(batch, requires_grad=True))
    yield "F"
    deferred = mg.backward_input(y, batch)
    del y
    yield "B"
    mg.backward_weight(deferred)
    yield "W"


# %%
for _ in range(2):  # once to write gradients, once to add to them: what each needs is loaded, and their memory is there
    list(actions())
tracemalloc.start()
held = {name: tracemalloc.get_traced_memory()[0] for name in actions()}
tracemalloc.stop()
print({f"after {name}": f"{size / 1e6:.1f} MB" for name, size in held.items()})

deferred_share = held["B"] / held["F"]
assert held["W"] < 0.05 * held["F"], "after W all is free"
assert 0.5 < deferred_share < 1.5, f"from B to W a block keeps about what it kept before B, got {deferred_share:.2f}"

# %% [markdown]
# So a W put off costs nearly as much as a whole micro-batch in flight. What each rank holds at its peak, counted that
# way:

# %%
names = {"1f1b": GREY, "zero_bubble_h1": BLUE, "zero_bubble_h2": ORANGE, "zbv": GREEN}
_, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
for i, (name, colour) in enumerate(names.items()):
    share = 1 / SCHEDULES[name].num_chunks
    peaks = run(name).peak_memory(activations=share, deferred=share * deferred_share)
    axes.bar(np.arange(P) + 0.2 * i - 0.3, peaks, 0.18, color=colour, label=name)
axes.set_xticks(range(P), [f"rank {rank}" for rank in range(P)])
axes.set(ylabel="peak, in micro-batches", ylim=(0, 7.5))
axes.set_title("activations and weight halves put off", fontsize=10)
axes.legend(frameon=False, ncols=2)
plt.show()

# %% [markdown]
# H1 and ZBV let every rank hold as much as the first rank of 1F1B does, which had to fit anyway. H2 needs nearly
# twice that.
#
# ## With measured times
#
# F, B and W are not equal in truth. The same block with a clock beside it, the quickest of 15 runs:


# %%
def seconds():
    clock = [time.perf_counter()]
    clock += [time.perf_counter() for _ in actions()]
    return np.diff(clock)


f, b, w = 1000 * np.min([seconds() for _ in range(15)], axis=0)
print(f"F {f:.2f} ms, B {b:.2f} ms, W {w:.2f} ms")

# %% [markdown]
# Simulate a pipeline of eight such blocks with the times that you have just measured, beside the one with equal
# times. A bar is the whole bubble, in two parts: the longest that a rank waits between its first and its last action,
# and the rest, the slant at both ends, where the pipeline fills and drains.

# %%
figure, panels = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(7.5, 2.8), layout="constrained")
for axes, title, times in zip(panels, ("F = B = W", "measured"), ((1, 1, 1), (f, b, w)), strict=True):
    timelines = [run(name, 8, 24, *times) for name in names]
    bubbles = np.array([timeline.bubble_fraction for timeline in timelines])
    inside = np.array([timeline.span_bubble / timeline.ideal for timeline in timelines])
    axes.barh(range(len(names)), inside, 0.6, color=BLUE, label="between first and last action")
    slant = axes.barh(range(len(names)), bubbles - inside, 0.6, left=inside, color=GREY, label="slant")
    axes.bar_label(slant, [f"{share:.1%}" for share in bubbles], padding=3)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="bubble / ideal time", xlim=(0, 0.36))
    assert bubbles[1] <= bubbles[0], "H1 is never longer than 1F1B, whatever F, B and W are"
panels[0].set_yticks(range(len(names)), names)
panels[0].set_xticks([0, 0.1, 0.2, 0.3], ["0%", "10%", "20%", "30%"])
panels[0].invert_yaxis()
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", frameon=False, ncols=2)
plt.show()

# %% [markdown]
# ## The answer
#
# Half of a backward is waited for by nobody, so it can be done where a rank would be idle. At equal times that takes
# away two thirds of the bubble, without any change in the numbers and with no more memory than 1F1B's first rank has.
# What is left between a rank's first and its last action goes with twice the memory, or with two stages a rank. The
# slant at both ends, where the pipeline fills and drains, stays; with two stages a rank it is half as long. What it is
# for your model depends on W: the shorter it is beside F and B, the less there is to fill with.
#
# ## Things to try
#
# 1. `recompute` the block (keep its input only, and run its forward again in the backward). What does it do to F, B,
#    W and to `deferred_share`?
# 2. Make W very short: `run("zero_bubble_h1", w=0.1)`. Where has the gain gone?
# 3. The formula of H1 holds from M = P on. Plot its bubble against M from 1 on, beside that of 1F1B.
