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
# # 4. Pipeline schedules and the bubble
#
# A model that is too large for one process is cut into *stages*, one on each rank. A batch is cut into
# *micro-batches* that follow each other through the stages. A rank can only work on what has reached it, so ranks
# wait.
#
# **How much time do they lose, and on what does it depend?**

# %%
from tempfile import NamedTemporaryFile

import matplotlib.pyplot as plt
from IPython.display import Image

from pipeline import BW, SCHEDULES, F, draw, draw_order, picture, simulate, write_png

BLUE, GREEN, ORANGE = "#6aaee8", "#4fb98a", "#efb551"
plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}


def show(timeline, title):
    """Return a timeline as a PNG, which every viewer of notebooks can show."""
    with NamedTemporaryFile() as file:
        write_png(picture(timeline, title), file.name)
        return Image(file.read(), retina=True)  # two dots a point


# %% [markdown]
# ## An order is data
#
# A rank does two things: the forward `F` and the backward `BW` of one micro-batch through its stage. Each is a small
# value that knows what it has to wait for: the stage before it, or the one behind.

# %%
print(F(1, 0), "needs", F(1, 0).needs(num_stages=3))
print(BW(1, 0), "needs", BW(1, 0).needs(num_stages=3))

# %% [markdown]
# A *schedule* says in which order each rank does its work. GPipe's is the simplest that there is: all forwards, then
# all backwards. As a pure function it has three lines.


# %%
def my_gpipe(rank, num_ranks, num_microbatches):
    forwards = [F(rank, i) for i in range(num_microbatches)]
    backwards = [BW(rank, i) for i in range(num_microbatches)]
    return forwards + backwards


P, M = 3, 6  # ranks, micro-batches
orders = [my_gpipe(rank, P, M) for rank in range(P)]
print(draw_order(orders))

assert orders == SCHEDULES["gpipe"].orders(P, M), "this is all that GPipe is"

# %% [markdown]
# ## Time follows
#
# No message and no waiting is written in an order. Both follow from what an action needs: it starts when its rank is
# free and its inputs are there. `simulate` runs the orders against a clock that way. A forward takes 1; a backward
# takes 2, because it multiplies twice where the forward multiplies once.

# %%
timeline = simulate(orders, num_stages=P)
print(draw(timeline))

# %%
show(timeline, f"GPipe: {P} ranks, {M} micro-batches")

# %% [markdown]
# The grey is the *bubble*. Count it on the last rank. Before its first forward it waits until micro-batch 0 has
# passed P - 1 stages: P - 1 forwards. After its last backward the gradient still travels back through P - 1 stages:
# P - 1 backwards. Every other rank waits as long, elsewhere. With times F and BW of one micro-batch on one rank:
#
# $$\text{bubble} = (P - 1)\,(F + BW) \qquad
# \frac{\text{bubble}}{\text{ideal}} = \frac{(P - 1)(F + BW)}{M\,(F + BW)} = \frac{P - 1}{M}$$

# %%
for rank in range(P):
    idle = timeline.makespan_bubble(rank)
    assert idle == (P - 1) * (1 + 2), f"rank {rank} waits for P - 1 forwards and P - 1 backwards, not for {idle}"
print(f"every rank is idle for {idle:g} of {timeline.makespan:g}: {timeline.bubble_fraction:.0%} over the ideal time")

# %% [markdown]
# So the *time* lost does not depend on M at all, and the *share* lost falls as 1 / M. The lines are the formula, the
# dots are simulations.

# %%
counts = [1, 2, 4, 8, 16, 32, 64]
_, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
for p, colour in ((2, BLUE), (4, GREEN), (8, ORANGE)):
    bubbles = [simulate(SCHEDULES["gpipe"].orders(p, m), num_stages=p).bubble_fraction for m in counts]
    assert bubbles == [(p - 1) / m for m in counts], f"the formula must hold for {p} ranks: {bubbles}"
    axes.plot(counts, [(p - 1) / m for m in counts], color=colour, label=f"P = {p}")
    axes.plot(counts, bubbles, "o", color=colour)
axes.set(xscale="log", yscale="log", xlabel="micro-batches M", ylabel="bubble / ideal time")
axes.set_xticks(counts, counts)
axes.set_yticks([0.01, 0.1, 1, 10], ["1%", "10%", "100%", "1000%"])
axes.minorticks_off()
axes.set_title("GPipe's bubble: formula (lines) and simulation (dots)", fontsize=10)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What stops us from taking M = 1000?
#
# Memory. A forward leaves activations behind, and its backward frees them. GPipe starts no backward before the last
# forward, so every rank holds all M.
#
# *1F1B* (one forward, one backward) starts each backward as soon as it can. The bubble is just the same, but rank r
# never holds more than P - r micro-batches, whatever M is.

# %%
early = simulate(SCHEDULES["1f1b"].orders(P, M), num_stages=P)
assert early.makespan == timeline.makespan, "another order of the same work, as long as GPipe"
assert early.peak_microbatches == [P - rank for rank in range(P)], early.peak_microbatches
show(early, f"1F1B: {P} ranks, {M} micro-batches")

# %% [markdown]
# ## A smaller bubble: smaller steps
#
# The bubble is the time to fill and to drain the pipeline. It shrinks if the first micro-batch arrives sooner, and it
# does when stages are smaller. *Interleaved 1F1B* gives each rank V stages instead of one: here rank 0 has the
# stages 0 and 3; each is half the work, so that filling takes half the time. (The picture is drawn twice as wide for
# the same time.)

# %%
from pipeline import interleaved_1f1b

V = 2
two_chunks = interleaved_1f1b(V)
halves = {"forward": 1 / V, "backward_input": 1 / V, "backward_weight": 1 / V}
interleaved = simulate(two_chunks.orders(P, M), num_stages=V * P, **halves)
assert interleaved.makespan_bubble(0) == timeline.makespan_bubble(0) / V, "the bubble is divided by V"
show(interleaved, f"Interleaved 1F1B: {V * P} stages on {P} ranks, {M} micro-batches")

# %% [markdown]
# Nothing is free: V times smaller stages have V times as many borders, nearly, and each of them costs a message per
# micro-batch and direction. `lower` turns orders into *programs*, which send and receive as well.

# %%
from pipeline import lower


def num_messages(schedule):
    num_stages = schedule.num_stages(P)
    programs = lower(schedule.orders(P, M), rank_of=schedule.rank_of, num_stages=num_stages)
    return sum(action.kind.name.startswith("SEND") for program in programs for action in program)


for one in (SCHEDULES["gpipe"], SCHEDULES["1f1b"], two_chunks):
    borders = one.num_stages(P) - 1
    assert num_messages(one) == 2 * M * borders, "each border: an activation and a gradient per micro-batch"
    print(f"{one.name:17} {num_messages(one):3} messages")

# %% [markdown]
# And more activations are alive. The most that rank 0 holds, in micro-batches of a whole rank. (Interleaved 1F1B
# wants M divisible by P.)

# %%
counts = range(P, 25, P)
_, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
for one, colour in ((SCHEDULES["gpipe"], ORANGE), (two_chunks, GREEN), (SCHEDULES["1f1b"], BLUE)):
    lines = [simulate(one.orders(P, m), num_stages=one.num_stages(P)) for m in counts]
    peaks = [timeline.peak_microbatches[0] / one.num_chunks for timeline in lines]
    axes.plot(counts, peaks, "o-", color=colour, label=one.name)
axes.set(xlabel="micro-batches M", ylabel="peak on rank 0", xticks=counts, ylim=(0, None))
axes.set_title("activations, in micro-batches of a whole rank", fontsize=10)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Can it hang?
#
# Ranks that wait for each other's messages can wait for ever, and a program that hangs once in a thousand runs is
# worse than one that never works. Whether it hangs must not depend on luck. `check_deadlock_free` runs the programs of
# all ranks under the strictest rule that MPI allows (a send is complete only once its receive is posted). Every receive
# names its message, so no timing changes what meets what: this one run speaks for all of them.

# %%
from pipeline import ScheduleError, check_deadlock_free, validate

for schedule in SCHEDULES.values():
    for p in range(1, 7):
        for m in range(p, 13, p):
            where = {"rank_of": schedule.rank_of, "num_stages": schedule.num_stages(p)}
            check_deadlock_free(lower(schedule.orders(p, m), **where), **where)  # raises if they can hang
print(f"proved for {', '.join(SCHEDULES)} on 1 to 6 ranks")

# %% [markdown]
# Now a program that does hang: 1F1B whose sends block until they are received, and whose receives are posted only
# when they are needed. Two neighbours send to each other at the same time, and neither gets to its receive.

# %%
where = {"rank_of": SCHEDULES["1f1b"].rank_of, "num_stages": 2}
programs = lower(SCHEDULES["1f1b"].orders(2, 3), lookahead=0, **where)
try:
    check_deadlock_free(programs, synchronous_sends=True, **where)
except ScheduleError as error:
    refused = error
    print(refused)
assert "1SEND_B0 waits for 0RECV_B0" in str(refused), "rank 1 cannot send its gradient: rank 0 is stuck in a send too"

# %% [markdown]
# A mistake in an order itself is found even earlier. Here somebody swapped two actions of rank 1:

# %%
orders = SCHEDULES["1f1b"].orders(P, M)
orders[1][0], orders[1][2] = orders[1][2], orders[1][0]
try:
    validate(orders, num_stages=P, num_microbatches=M, rank_of=SCHEDULES["1f1b"].rank_of)
except ScheduleError as error:
    refused = error
    print(refused)
assert refused.cells[0] == (1, 0), "the faulty cell is the first of rank 1"

# %% [markdown]
# ## The answer
#
# A pipeline loses the time of filling and draining: (P - 1)(F + BW), which is (P - 1) / M of the ideal. More
# micro-batches make the share small, 1F1B makes the memory for that independent of M, and V stages a rank divide the
# bubble by V at the price of messages. Notebook 5 goes on: a backward has two halves, and one of them nobody waits
# for.
#
# ## Things to try
#
# 1. Give one stage twice the time: `simulate(orders, num_stages=3, forward=[1, 2, 1], backward_input=[1, 2, 1],
#    backward_weight=[1, 2, 1])`. How much do the two others wait? What does that say about where to cut a model?
# 2. Let messages take time: `simulate(..., latency=0.5)`. Which of the schedules suffers most, and why?
# 3. Write an order of your own: 1F1B with one forward more ahead. What happens to the bubble with and without
#    latency, and what does it cost?
