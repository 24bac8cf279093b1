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
# # 2. What a vjp keeps
#
# **Which arrays live between forward and backward?**
#
# Training needs several times the memory that the model itself takes, and most of it holds arrays that a forward
# leaves behind for its backward. They are not a table somewhere: they are what the closures on the tape, the *vjps*,
# hold on to. We look at single ops, then at a whole GPT, and then let the GPT keep almost nothing.

# %%
import gc
import tracemalloc
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

import minigrad as mg
from minigrad.autodiff.op_hooks import progressing
from minigrad.autodiff.vjps import kept_arrays
from minigrad.models import GPT, GPTConfig

BLUE, GREEN, ORANGE, GREY = "#6aaee8", "#4fb98a", "#efb551", "#d9dfe5"
plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}

# %% [markdown]
# ## One op at a time
#
# A vjp turns the cotangent `g` of an output into the contribution to an input. What it needs for that is written in
# its equation, and no op may keep more:
#
# | op | contribution | needs |
# |---|---|---|
# | `add` | `g` | nothing |
# | `relu` | `g` where `x > 0` | a yes or no for each element |
# | `tanh` | `g * (1 - y * y)` | its output |
# | `softmax` | `y * (g - sum(g * y))` | its output |
# | `gelu` | `g * slope` | the slope, which it works out in the forward |
# | `mul` | `g * b`, `g * a` | both inputs |
# | `matmul` | `g @ b.T`, `a.T @ g` | both inputs |

# %%
generator = np.random.default_rng(0)


def leaf(*shape):
    return mg.Tensor(generator.standard_normal(shape).astype(np.float32), requires_grad=True)


x, w = leaf(256, 256), leaf(256, 256)
outputs = {
    "add": x + w, "relu": mg.relu(x), "tanh": mg.tanh(x), "gelu": mg.gelu(x),
    "softmax": mg.softmax(x), "mul": x * w, "matmul": x @ w,
}  # fmt: skip
kept = {name: mg.Tape.of(y).kept_bytes / x.size for name, y in outputs.items()}

# %%
_, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
bars = axes.bar(kept.keys(), kept.values(), 0.6, color=ORANGE)
axes.bar_label(bars, fmt="{:.0f}")
axes.set(ylabel="kept (bytes an element)", ylim=(0, 9), yticks=range(0, 9, 4))
axes.set_title("what one op keeps for its backward; a float32 array is 4 bytes an element", fontsize=10)
plt.show()

# %% [markdown]
# Keeping an array does not mean copying it: a residual is often an array that exists anyway.

# %%
(mask,) = kept_arrays(outputs["relu"].node.vjps)
assert mask.dtype == bool, "relu should keep a mask, a byte for each element"
(residual,) = kept_arrays(outputs["tanh"].node.vjps)
assert residual is outputs["tanh"].data, "tanh should keep its output, not its input: 1 - y * y has no x in it"
assert {id(array) for array in kept_arrays(outputs["matmul"].node.vjps)} == {id(x.data), id(w.data)}
print(f"relu keeps {mask.dtype}s, tanh its own output, matmul its own inputs")

# %% [markdown]
# ## Who asks, and who else holds it
#
# Two things make a network cheaper than the sum of its ops. An input that needs no gradient has no vjp, so what only
# that vjp needed is let go: here the first product does not keep `w1`. And an array that is the output of one op and
# an input of the next is kept once. minigrad counts it where it is kept first.

# %%
data, w1, w2 = leaf(512, 64).data, leaf(64, 128), leaf(128, 32)
y = mg.relu(data @ w1) @ w2
print(mg.Tape.of(y))
first, mask, second = (entry.kept_bytes for entry in mg.Tape.of(y).entries)
assert first == data.nbytes, "the first product should keep its data only: nobody wants a gradient for it"
assert mask == 512 * 128, "relu should keep one byte for each of its elements"
assert second == 4 * mask + w2.data.nbytes, "the second product should keep relu's output and w2"

# %% [markdown]
# ## Keeping less
#
# The same function can be made of ops in more than one way. `x * sigmoid(x)` keeps two arrays, `x` and the sigmoid.
# An op of its own can work out the slope in the forward and keep that alone; `@mg.op` asks for the value and one vjp
# for each array.


# %%
@mg.op
def swish(x):
    s = 1 / (1 + np.exp(-x))
    y = x * s
    slope = s + y * (1 - s)
    return y, (lambda g: g * slope,)


of_two_ops, of_one = mg.Tape.of(x * mg.sigmoid(x)), mg.Tape.of(swish(x))
print(f"two ops keep {of_two_ops.kept_bytes / x.size:.0f} bytes an element, one op {of_one.kept_bytes / x.size:.0f}")
assert 2 * of_one.kept_bytes == of_two_ops.kept_bytes, "the closure of swish should hold the slope and nothing else"
mg.check_vjp(swish, generator.standard_normal((4, 5)))  # and the gradient must be right

# %% [markdown]
# ## A whole step
#
# Now a GPT with eight blocks. After every op of a step we add up all arrays that are alive: NumPy reports each of
# them to `tracemalloc`. In the forward, `progressing` calls us after each op; in the backward, the hook `between_ops`
# does.

# %%
model = GPT(GPTConfig(vocab_size=64, context=64, num_layers=8, num_heads=4, width=64))
ids = generator.integers(0, 64, (8, 65))


def loss_by(run):
    embed, *blocks, head = model.layers
    h = embed(ids[:, :-1])
    for block in blocks:
        h = run(block, h)
    return mg.cross_entropy(head(h), ids[:, 1:])


# %%
def arrays_mb():
    traces = tracemalloc.take_snapshot().traces
    return sum(trace.size for trace in traces if trace.domain == np.lib.tracemalloc_domain) / 1e6


def measure(run):
    for p in model.parameters():
        p.grad = None
    gc.collect()  # what earlier cells left behind, pictures for instance, should not be freed during the step
    before, curve = arrays_mb(), []

    def sample():
        curve.append(arrays_mb() - before)

    with progressing(sample):
        loss = loss_by(run)
    forward, tape = len(curve), mg.Tape.of(loss)
    mg.backward_with_hooks(loss, between_ops=sample)
    grads = [p.grad.copy() for p in model.parameters()]
    return SimpleNamespace(curve=curve, forward=forward, tape=tape, grads=grads)


# %% [markdown]
# The first step allocates the gradients themselves, which stay, so we measure the second. The tape's own account
# should agree with what was measured at the end of the forward. It includes the weights, which the products keep too,
# and which were there before.


# %%
def run_plainly(block, h):
    return block(h)


mg.backward(loss_by(run_plainly))
tracemalloc.start()
plain = measure(run_plainly)
parameter_mb = sum(p.data.nbytes for p in model.parameters()) / 1e6
kept_mb = plain.tape.kept_bytes / 1e6 - parameter_mb
measured_mb = plain.curve[plain.forward - 1]
print(f"parameters {parameter_mb:.1f} MB, residuals by the tape {kept_mb:.1f} MB, measured {measured_mb:.1f} MB")
assert abs(measured_mb / kept_mb - 1) < 0.03, "something other than the vjps' residuals is alive after the forward"
assert plain.curve[-1] < 0.05 * kept_mb, "backward should have freed the residuals as it went"


# %%
def draw(curves, title):
    _, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
    for step, name, colour in curves:
        axes.plot(range(1, len(step.curve) + 1), step.curve, color=colour, label=name)
        axes.plot(step.forward, step.curve[step.forward - 1], "o", color=colour)
    axes.set(xlabel="ops run so far", ylabel="memory (MB)", xlim=(0, None), ylim=(0, None))
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    plt.show()


draw([(plain, "plain", BLUE)], "memory beyond the model itself; the dot is the end of the forward")

# %% [markdown]
# The forward climbs, block by block. The backward walks the tape from its newest node and takes each one apart as it
# passes, so it comes down on the other side. If the tape were freed only at the end, the curve would stay at the top
# until then, and cotangents would come on top of that.

# %% [markdown]
# ## Trading the peak for a second forward
#
# A block can be run again. `mg.recompute(block, h)` runs it, keeps its input only, and puts one node on the tape.
# When the backward arrives there, the block runs a second time, and the walk goes on over the nodes that it leaves.

# %%
recomputed = measure(mg.recompute)
draw([(plain, "plain", BLUE), (recomputed, "each block recomputed", ORANGE)], "the same step, run in two ways")
peaks = max(plain.curve), max(recomputed.curve)
print(f"peak {peaks[0]:.1f} MB and {peaks[1]:.1f} MB, ops {len(plain.curve)} and {len(recomputed.curve)}")

# %% [markdown]
# One tooth for each block: only one block's residuals live at a time, above a floor of block inputs. With $N$ blocks
# that keep $b$ bytes each, and inputs of $a$ bytes, the peak falls from about $N b$ to $N a + b$. It costs one more
# forward. A backward takes about two forwards' time, so a step takes four thirds of what it took.
#
# And the gradients? The same ops on the same numbers in the same order:

# %%
for p, first, second in zip(model.parameters(), plain.grads, recomputed.grads, strict=True):
    assert np.array_equal(first, second), f"{p.name}: a recomputed gradient should be the same to the last bit"
assert peaks[1] < peaks[0] / 3, "with eight blocks the peak should fall to a third at least"
print("all", len(plain.grads), "gradients are equal to the last bit")

# %% [markdown]
# ## The answer
#
# What lives is what a closure holds: a mask, an output, an input, as the equation of the vjp says, from the op's
# forward until the walk has passed its node. So a step's memory is a mountain with its top between forward and
# backward, and recomputing takes the mountain away for about a third more time.
#
# ## Things to try
#
# (Some checks will fail. Are they right?)
#
# 1. Recompute only every second block, or two blocks as one (`mg.recompute(lambda h: b2(b1(h)), h)`). Predict the
#    picture. For $N$ blocks in groups of $k$ the peak is about $(N / k) a + k b$: which $k$ is best here? (Chen et
#    al. 2016, *Training deep nets with sublinear memory cost*.)
# 2. Let `swish` keep `x` and `s` and work out the slope in its vjp. What does it keep now, alone, and after a
#    `matmul`?
# 3. In `measure`, put the `vjps` of all nodes (`collect(loss.node)` of `minigrad.autodiff.tape`) in a list before the
#    backward. What does that do to the way down?
