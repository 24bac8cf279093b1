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
# # 3. When a bucket launches
#
# **When does a bucket launch, and how large should it be?**
#
# Two ranks train one model, each on its own samples, and average their gradients at every step. Waiting for that
# after the backward wastes the link during the backward, and the processor after it. Notebook 1 found a way out: a
# gradient is final long before the backward ends. So send it right away. But each message costs some time however
# small it is, so gradients travel together, in *buckets*.
#
# The engine, the buckets and the sums below are the real ones; the ranks are threads of this process. Only time is
# made up: a clock that counts operations, and a link that follows a formula. So the pictures are the same on every
# machine.

# %%
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld
from distributed.data_parallel.comm_hooks import allreduce
from minigrad.models import MLP

BLUE, GREEN, ORANGE, GREY = "#6aaee8", "#4fb98a", "#efb551", "#d9dfe5"
plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}

NUM_LAYERS, WIDTH, BATCH = 24, 48, 256
FLOPS = 20e9  # floating point operations a second: one core
LATENCY_SECONDS = 100e-6  # of a message, however small
BANDWIDTH = 125e6  # bytes a second: Ethernet of 1 Gbit/s

# %% [markdown]
# ## A clock that counts
#
# In the backward each linear layer makes two products, one for its weight and one for its input. Each takes `WIDTH`
# multiplications and as many additions for every element of the layer's output. What works element by element counts
# one operation for each. The clock moves when an op *begins*, so that it shows the time at which the op under way
# will be done: this is when its hooks fire.


# %%
def seconds_of(entry):
    operations_an_element = 4 * WIDTH if entry.name == "linear" else 1
    return operations_an_element * np.prod(entry.shape) / FLOPS


class VirtualClock:
    now = 0.0

    def hooks(self, tape):
        costs = iter([seconds_of(entry) for entry in reversed(tape.entries)])

        def tick(*_):
            self.now += next(costs, 0.0)

        return mg.Hooks(on_start=tick, between_ops=tick)


# %% [markdown]
# When is each gradient final? Hooks add, so the clock's hooks and ours watch the same backward.

# %%
samples = np.random.default_rng(0).standard_normal((2, BATCH, WIDTH)).astype(np.float32)  # by rank
targets = np.arange(BATCH) % WIDTH


def loss_of(model, rank):
    return mg.cross_entropy(model(samples[rank]), targets)


model, clock, ready = MLP([WIDTH] * (NUM_LAYERS + 1)), VirtualClock(), []
loss = loss_of(model, 0)
note = mg.Hooks(on_grad_ready=lambda p: ready.append((clock.now, p.data.nbytes)))
mg.backward_with_hooks(loss, clock.hooks(mg.Tape.of(loss)) + note)
seconds, sizes = np.array(ready).T
grad_bytes, backward_seconds = sizes.sum(), clock.now

# %%
_, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
axes.step([0, *seconds * 1e3], [0, *sizes.cumsum() / 1e3], where="post", color=GREEN, linewidth=2)
axes.set(xlabel="time since the backward began (ms)", ylabel="final gradients (kB)", xlim=(0, None), ylim=(0, None))
axes.axvspan(0, backward_seconds * 1e3, color=BLUE, alpha=0.15, linewidth=0)
axes.set_title("gradients become final all along the backward (blue)", fontsize=10)
plt.show()
half = sizes[seconds <= backward_seconds / 2].sum() / grad_bytes
assert 0.4 < half <= 0.5, "of equal layers, half of the gradients should be final after half of the backward"

# %% [markdown]
# ## A real step on two ranks
#
# `DistributedDataParallel` lays the gradients out in buckets and starts an allreduce inside the hook that completes
# one. *How* a bucket travels is a function that we may give: `comm_hook`. Ours notes the time of the launch and
# passes the bucket on. On each rank:


# %%
def overlapped(comm, bucket_bytes):
    clock, launches = VirtualClock(), []

    def noted(grad, comm):
        launches.append((clock.now, grad.nbytes))
        return allreduce(grad, comm)

    model = MLP([WIDTH] * (NUM_LAYERS + 1))
    ddp = DistributedDataParallel(model, comm, bucket_bytes=bucket_bytes, comm_hook=noted)
    loss = loss_of(model, comm.rank)
    mg.backward_with_hooks(loss, clock.hooks(mg.Tape.of(loss)) + ddp.hooks(num_samples=BATCH))
    ddp.wait()
    return SimpleNamespace(launches=launches, grads=[p.grad for p in model.parameters()])


# %% [markdown]
# `LocalWorld(2)` runs it on two threads, one a rank. We try nine bucket sizes, from a message for each parameter to
# one for all. (Where you ask for no size, the manager fills no bucket beyond a sixteenth of all gradients; the end of
# this notebook shows why.)

# %%
layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
bucket_sizes = [1] + [n * layer_bytes for n in (1, 2, 3, 4, 6, 8, 12, 24)]
steps = {size: LocalWorld(2).run(overlapped, size)[0] for size in bucket_sizes}
for size, step in steps.items():
    assert sum(nbytes for _, nbytes in step.launches) == grad_bytes, "every gradient should travel exactly once"
    print(f"bucket_bytes {size:>6}, messages: {len(step.launches):>2}, the first at {step.launches[0][0] * 1e3:.2f} ms")

# %% [markdown]
# Before we look at the times: is the answer right? The plain way is to run the backward to its end and average every
# gradient then. No bucket size may change a single bit of that.


# %%
def after_the_backward(comm):
    model = MLP([WIDTH] * (NUM_LAYERS + 1))
    mg.backward(loss_of(model, comm.rank))
    return [comm.allreduce(p.grad * np.float32(0.5)).wait() for p in model.parameters()]


reference = LocalWorld(2).run(after_the_backward)[0]
for size, step in steps.items():
    for p, grad, expected in zip(model.parameters(), step.grads, reference, strict=True):
        assert np.array_equal(grad, expected), f"bucket_bytes={size} changed the gradient of {p.name}"
print(f"{len(reference)} gradients, {len(steps)} bucket sizes: equal to the last bit")

# %% [markdown]
# ## The link
#
# One message at a time: it starts when it was launched or when the link is free, whichever is later, and takes a
# latency and its bytes over the bandwidth. What sticks out beyond the end of the backward is *exposed*: nobody
# computes meanwhile. (The few bytes in which the ranks agree on shares and on unused parameters are left out.)


# %%
def on_link(launches):
    messages, free = [], 0.0
    for launched, nbytes in launches:
        start = max(launched, free)
        free = start + LATENCY_SECONDS + nbytes / BANDWIDTH
        messages.append((start, free))
    return messages


def exposed_seconds(launches):
    return max(0.0, on_link(launches)[-1][1] - backward_seconds)


# %%
def draw_timeline(axes, step):
    axes.barh(1, backward_seconds * 1e3, 0.6, color=BLUE)
    for start, end in on_link(step.launches):
        axes.barh(0, (end - start) * 1e3, 0.6, left=start * 1e3, color=ORANGE, edgecolor="white", linewidth=0.8)
    exposed = exposed_seconds(step.launches) * 1e3
    axes.barh(0.5, exposed, 1.6, left=backward_seconds * 1e3, color=GREY, alpha=0.5, zorder=0)
    axes.set(yticks=(0, 1), yticklabels=("link", "backward"))
    axes.set_title(f"messages: {len(step.launches)}, exposed (grey): {exposed:.2f} ms", fontsize=10, loc="left")


chosen = [1, 3 * layer_bytes, NUM_LAYERS * layer_bytes]
_, rows = plt.subplots(len(chosen), sharex=True, figsize=(7.5, 4), layout="constrained")
for axes, size in zip(rows, chosen, strict=True):
    draw_timeline(axes, steps[size])
rows[-1].set_xlabel("time since the backward began (ms)")
plt.show()

# %% [markdown]
# At the top the link never rests, but pays a latency for every parameter, and falls behind. At the bottom there is
# one latency, and the link idles through the whole backward. In the middle the messages keep pace, and only the last
# one is exposed. It always is: it carries the first layer, whose gradient is the last to be final.
#
# ## What the formula says
#
# Let $T$ be the time of the backward and $G$ the bytes of all gradients, in $n$ equal buckets over a link of latency
# $\alpha$ and bandwidth $\beta$. The first bucket is complete after $T / n$. Then one of two things decides:
#
# - the link falls behind and is busy until the end: exposed are $T / n + n \alpha + G / \beta - T$;
# - the link keeps pace, and the last bucket alone is late: exposed are $\alpha + G / (n \beta)$.
#
# The larger of the two is the prediction.


# %%
def predicted_seconds(n):
    falls_behind = backward_seconds / n + n * LATENCY_SECONDS + grad_bytes / BANDWIDTH - backward_seconds
    keeps_pace = LATENCY_SECONDS + grad_bytes / n / BANDWIDTH
    return np.maximum(falls_behind, keeps_pace)


counts = np.array([len(step.launches) for step in steps.values()])
exposed = np.array([exposed_seconds(step.launches) for step in steps.values()])
total = counts * LATENCY_SECONDS + grad_bytes / BANDWIDTH
hidden, hidden_by_formula = 1 - exposed / total, 1 - predicted_seconds(counts) / total
for n, share, predicted in zip(counts, hidden, hidden_by_formula, strict=True):
    print(f"messages: {n:>2}, hidden of all communication: {share:4.0%}, by the formula: {predicted:4.0%}")
assert abs(hidden - hidden_by_formula).max() < 0.03, "the buckets should hide the share that the formula predicts"

# %%
_, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
n = np.linspace(1, counts.max(), 500)
axes.plot(grad_bytes / n / 1e3, predicted_seconds(n) * 1e3, color=GREY, linewidth=3, label="formula")
axes.plot(grad_bytes / counts / 1e3, exposed * 1e3, "o", color=ORANGE, label="real buckets on this link")
axes.set(xscale="log", xlabel="mean size of a bucket (kB)", ylabel="exposed (ms)", ylim=(0, None))
axes.set_xticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
axes.minorticks_off()
axes.set_title("communication that nothing hides", fontsize=10)
axes.legend(frameon=False)
plt.show()
best = counts[exposed.argmin()]
assert 1 < best < counts.max(), "the best bucket should be neither the smallest nor the largest"

# %% [markdown]
# A valley. On its left slope latencies add up; on its right one the link starts late and ends with a large message.
# The left one is the steeper: there is no limit to what many small messages cost, while the worst of too large a
# bucket is no overlap at all.
#
# ## The answer
#
# A bucket launches inside the hook that brings its last gradient, in the middle of the backward, or with the buckets
# in front of it if those are late: every rank launches in the same order. It should be large enough for the link to
# keep pace, and no larger: the last one is always exposed. That is why the manager never puts a large model into one
# bucket, and why it makes the first bucket small, so that the link starts early, and the last one too.
#
# ## Things to try
#
# (Some checks will fail. Are they right?)
#
# 1. Set `LATENCY_SECONDS = 5e-6` and `BANDWIDTH = 10e9`, a fast network. Where is the valley now, and how deep is it?
# 2. Send half precision: let `noted` return `compressed(np.float16)(grad, comm)`, from
#    `distributed.data_parallel.comm_hooks`, and
#    note half of the bytes. Which slope falls?
# 3. Give the first layer ten times the parameters, as an embedding has: `[10 * WIDTH] + [WIDTH] * NUM_LAYERS`, and
#    samples as wide. Its message is the last, and nothing is left to hide it. Would another bucket size help?
