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
# # 1. The tape by hand
#
# **What does backward walk?**
#
# A forward pass is an ordinary program. When it is over, all that seems to be left is one number, the loss. Still,
# `mg.backward(loss)` finds its way back through every step. We look at what the forward has written down, write the
# same engine in a few lines of NumPy, and end with a hook that fires in the *middle* of the backward: all data
# parallelism hangs on that.

# %%
from collections import Counter
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

import minigrad as mg
from minigrad.autodiff.tape import collect

BLUE, GREEN, ORANGE, GREY = "#6aaee8", "#4fb98a", "#efb551", "#d9dfe5"
plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}

# %% [markdown]
# ## A function and its tape
#
# Here is a function of two matrices. It uses `h` twice, which will matter. It takes its ops from `ops`, so that we
# can run the same line with minigrad's ops now and with our own later.


# %%
def f(ops, x, w):
    h = ops.matmul(x, w)
    return ops.mean(ops.mul(h, ops.tanh(h)))


generator = np.random.default_rng(0)
x_data, w_data = generator.standard_normal((8, 3)), generator.standard_normal((3, 2))
x, w = mg.Tensor(x_data, requires_grad=True), mg.Tensor(w_data, requires_grad=True)
loss = f(mg, x, w)
print(mg.Tape.of(loss))

# %% [markdown]
# Four ops ran, so there are four *nodes*, in the order in which they were made. A node knows two things: its parents
# (where its inputs came from, a node or a leaf such as `w`), and for each parent a *vjp*, a closure that turns the
# derivative of the loss by the op's output, the *cotangent*, into this parent's share of it. The arrays that the
# closures hold are the *residuals*; notebook 2 is about them.
#
# Let us draw it. Arrows go from a node to its parents: nothing points forward, so dropping the loss frees everything.

# %%
nodes = collect(loss.node)[::-1]  # the engine's own search, oldest first
leaves = [(x, "x"), (w, "w")]
place = {leaf: i - len(leaves) for i, (leaf, _) in enumerate(leaves)} | {node: i for i, node in enumerate(nodes)}
labels = [name for _, name in leaves] + [f"{i}: {node.name}" for i, node in enumerate(nodes)]
arrows = [(place[node], place[parent]) for node in nodes for parent in node.parents]


# %%
def draw_tape(labels, arrows, num_leaves, kept_bytes):
    _, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7.5, 2.8), layout="constrained")
    boxes = {}
    for i, label in enumerate(labels, start=-num_leaves):
        style = {"boxstyle": "round,pad=0.4", "facecolor": GREY if i < 0 else BLUE, "edgecolor": "none"}
        boxes[i] = top.text(i, 0, label, ha="center", va="center", fontsize=9, bbox=style).get_bbox_patch()
    for start, end in set(arrows):
        bend = 0.0 if start - end == 1 else 0.35
        ends = {"patchA": boxes[start], "patchB": boxes[end], "connectionstyle": f"arc3,rad={bend}"}
        top.annotate("", (end, 0), (start, 0), arrowprops={"arrowstyle": "->", **ends})
    top.set(xlim=(-num_leaves - 0.4, len(kept_bytes) - 0.5), ylim=(-0.4, 1))
    top.set_title("nodes in creation order, arrows to their parents (grey: leaves)", fontsize=10)
    top.axis("off")
    bottom.bar(range(len(kept_bytes)), kept_bytes, 0.5, color=ORANGE)
    bottom.set(ylabel="residuals\n(bytes)", xlabel="node", xticks=range(len(kept_bytes)))
    plt.show()


draw_tape(labels, arrows, len(leaves), [entry.kept_bytes for entry in mg.Tape.of(loss).entries])

# %% [markdown]
# ## The same in ten lines
#
# The problem: run a program of array operations so that it can be walked back. The solution is to write down, after
# each operation, its output and, for each input, how a cotangent travels back to it.

# %%
tape = []  # (output, ((input, vjp), ...)) in creation order


def record(output, *edges):
    tape.append((output, edges))
    return output


def walk(tape):
    grads = {id(tape[-1][0]): 1.0}  # the loss by itself
    for output, edges in reversed(tape):
        g = grads.pop(id(output))
        for array, vjp in edges:
            grads[id(array)] = grads.get(id(array), 0.0) + vjp(g)
    return grads  # what nobody popped: the leaves


# %% [markdown]
# An op is a value and one line of calculus for each argument. The closures keep `a`, `b` or `y` alive: that is all
# there is to a residual.


# %%
def tanh(a):
    y = np.tanh(a)
    return record(y, (a, lambda g: g * (1 - y * y)))


by_hand = SimpleNamespace(
    matmul=lambda a, b: record(a @ b, (a, lambda g: g @ b.T), (b, lambda g: a.T @ g)),
    mul=lambda a, b: record(a * b, (a, lambda g: g * b), (b, lambda g: g * a)),
    sub=lambda a, b: record(a - b, (a, lambda g: g), (b, lambda g: -g)),
    transpose=lambda a: record(a.T, (a, lambda g: g.T)),
    mean=lambda a: record(np.asarray(a.mean()), (a, lambda g: np.full(a.shape, g / a.size))),
    tanh=tanh,
)

# %% [markdown]
# Does it give what minigrad gives?

# %%
value = f(by_hand, x_data, w_data)
grads = walk(tape)
mg.backward(loss)

assert [len(tape), float(value)] == [len(nodes), loss.item()], "the same program should leave the same tape"
for name, leaf, data in [("x", x, x_data), ("w", w, w_data)]:
    assert np.array_equal(grads[id(data)], leaf.grad), f"the gradients of {name} differ: is each vjp right?"
print("equal to the last bit:\n", w.grad)

# %% [markdown]
# Two engines can share a mistake. A finite difference knows nothing of vjps: move `w` a little along a random
# direction `u`, and the loss must change by the product of the gradient and `u`. `mg.check_vjp` does the same for
# every argument.

# %%
u, step = generator.standard_normal(w_data.shape), 1e-6
slope = (f(mg, x_data, w_data + step * u).item() - f(mg, x_data, w_data - step * u).item()) / (2 * step)
predicted = float((w.grad * u).sum())
print(f"finite difference {slope:.9f}, gradient {predicted:.9f}")
assert abs(slope - predicted) < 1e-8, "the gradient is not the slope of the loss"
mg.check_vjp(lambda x, w: f(mg, x, w), x_data, w_data)

# %% [markdown]
# ## Why the reverse of creation order
#
# `h` was used twice, by `mul` and by `tanh`. Its vjps may run only when both have sent their share; with half a
# cotangent they would give half a gradient, and walking `h` once for each use doubles the work at every such fork.
#
# Creation order settles that without a search. An op can only use what exists already, so every user of `h` has a
# higher number than `h`. Walk from high to low, and when you arrive at a node, everything that can reach it has been
# there.
#
# Each node is needed once. minigrad therefore takes it apart as it passes, and its residuals are freed one by one. A
# second walk finds nothing, and says so:

# %%
assert loss.node.parents is None, "backward should have taken the node apart"
try:
    mg.backward(loss)
except RuntimeError as error:
    print("RuntimeError:", error)

# %% [markdown]
# ## When is a gradient final?
#
# The leaves are older than every op. If a leaf's gradient counted as finished when the walk comes to the leaf itself,
# all would be finished at the very end. But a gradient is final as soon as its *last contribution* is in. One look
# over the tape, before the walk, counts how many there will be:


# %%
def walk_with_hooks(tape, on_grad_ready):
    pending = Counter(id(array) for _, edges in tape for array, _ in edges)
    made = {id(output) for output, _ in tape}
    grads = {id(tape[-1][0]): 1.0}
    for output, edges in reversed(tape):
        g = grads.pop(id(output))
        for array, vjp in edges:
            grads[id(array)] = grads.get(id(array), 0.0) + vjp(g)
            pending[id(array)] -= 1
            if not pending[id(array)] and id(array) not in made:
                on_grad_ready(array)  # between two vjps


# %% [markdown]
# We try it on an autoencoder whose first and last layer share the weight `w`, with `u` and `v` between them. The
# batch is a leaf too; a hook could ignore it.


# %%
def autoencoder(ops, x, w, u, v):
    h = x
    for weight in (w, u, v):
        h = ops.tanh(ops.matmul(h, weight))
    error = ops.sub(ops.matmul(h, ops.transpose(w)), x)
    return ops.mean(ops.mul(error, error))


# %%
batch = generator.standard_normal((16, 6))
weights = {name: generator.standard_normal(shape) / 2 for name, shape in [("w", (6, 4)), ("u", (4, 4)), ("v", (4, 4))]}
name_of = {id(array): name for name, array in weights.items()}
tape.clear()
autoencoder(by_hand, batch, **weights)
order_by_hand = []
walk_with_hooks(tape, lambda array: order_by_hand.append(name_of.get(id(array), "batch")))
print("final in this order:", *order_by_hand)

# %% [markdown]
# And minigrad's own: `backward_with_hooks` calls `on_grad_ready` with each parameter, and `between_ops` after each
# op. We note how the gradients stand after each op, and keep a copy of each at the moment when it is called final.

# %%
parameters = [mg.Parameter(array, name) for name, array in weights.items()]
loss = autoencoder(mg, batch, *parameters)
ops_walked = [entry.name for entry in reversed(mg.Tape.of(loss).entries)]
announced, states = {}, []


def note_states():
    states.append([2 if p.name in announced else int(p.grad is not None) for p in parameters])


def note_ready(p):
    announced[p.name] = p.grad.copy()


mg.backward_with_hooks(loss, on_grad_ready=note_ready, between_ops=note_states)

# %%
_, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
for column, state in enumerate(states):
    colours = [(GREY, ORANGE, GREEN)[of_one] for of_one in state]
    axes.barh(range(len(parameters)), 0.94, 0.7, left=column, color=colours)
for colour, label in [(GREY, "nothing yet"), (ORANGE, "a part"), (GREEN, "final")]:
    axes.barh(0, 0, color=colour, label=label)
axes.set(
    yticks=range(len(parameters)),
    yticklabels=[p.name for p in parameters],
    xlabel="ops in the order that backward walks them",
)
axes.set_xticks(np.arange(len(ops_walked)) + 0.47, ops_walked, fontsize=8, rotation=30)
axes.set_title("the gradient of each parameter after each op", fontsize=10, pad=28)
axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
plt.show()

# %% [markdown]
# `v` is final a little past half of the walk: it could travel to another rank while the rest is computed. `w` got its
# first contribution before any other, through the transpose, and is final last, because it has a second use at the
# bottom.
#
# Final must mean final, and both engines should agree on the order:

# %%
for p in parameters:
    assert np.array_equal(announced[p.name], p.grad), f"{p.name} changed after it was called final"
assert list(announced) == [name for name in order_by_hand if name != "batch"], "the two engines call in another order"
assert states[len(states) // 2 + 1][2] == 2, "v should have been final a little past half of the walk"
print("final in this order:", *announced)

# %% [markdown]
# ## The answer
#
# Backward walks the nodes that the loss depends on, from the newest to the oldest, each once. At each it runs the
# vjps, adds what they give to the parents, and lets the node go. The moment a parameter has its last contribution,
# its hook fires, and the walk goes on. Notebook 2 looks at what the nodes keep, notebook 3 at what to do with the
# hook.
#
# ## Things to try
#
# 1. In `walk`, go through the tape in creation order instead of its reverse. What is missing when the first node asks
#    for its cotangent?
# 2. Untie the autoencoder: give the last layer a weight of its own. Predict its row in the picture before you run it.
# 3. In `walk_with_hooks`, call a leaf ready at its first contribution. Which assertion would notice, if minigrad did
#    that?
