"""Orders for two chunks a rank placed in a V, beside zbv: less memory (v_min, v_half), or pairs of F and B (dualpipev).

Rank r has stages r and 2P - 1 - r, down the ranks and up again. What the first ranks hold long on their way down, they
hold shortly on their way up, so that all ranks hold about as much: a V needs no more than its average.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from pipeline.schedules.action import BW, Action, B, F, Kind, W, pair
from pipeline.schedules.greedy import Rule, build
from pipeline.schedules.problem import Problem

_PERIOD = 6  # actions of a micro-batch on a rank: F, B and W of two chunks


def v_min(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order a V that holds as little as it can: about a third of what 1F1B's first rank holds, on every rank.

        rank 0 |0F0|       |3F0|3B0|3W0|0F1|0B0|0W0|3F1|3B1|3W1|0F2|0B1|0W1|3F2|3B2|3W2|   |0B2|0W2|
        rank 1     |1F0|2F0|       |2B0|1B0|1F1|2F1|2W0|1W0|2B1|1B1|1F2|2F2|2W1|1W1|2B2|1B2|2W2|1W2|

    A block of six actions a rank repeats every six units of time. In it a micro-batch goes through all stages and back
    without a stop:

        F on the way down   r               B on the way down   2P + r + shift
        F on the way up     2P - 1 - r      B on the way up     4P - 1 - r + shift

    No two of them may fall on the same of the six places; where P is divisible by 3, backwards shift by two for it.
    Weight halves take the two places that are left.

    Span bubble, with F = B = W: 4P - 5 of a chunk's actions, 4P - 3 where P is divisible by 3; for P > 1,
    M >= P.
    Peak: at most 2 floor((P + 4) / 3) stage inputs.
    Source: Qi et al. 2024 (arXiv 2405.15362), V-Min.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    shift = 2 if num_ranks % 3 == 0 else 0
    at = {
        F(down, 0): rank,
        F(up, 0): 2 * num_ranks - 1 - rank,
        B(up, 0): 2 * num_ranks + rank + shift,
        B(down, 0): 4 * num_ranks - 1 - rank + shift,
    }
    for stage in (up, down):
        place = at[B(stage, 0)] + 1
        while place % _PERIOD in {taken % _PERIOD for taken in at.values()}:
            place += 1
        at[W(stage, 0)] = place
    order = [
        (start + _PERIOD * i, Action(first.kind, first.stage, i))
        for first, start in at.items()
        for i in range(num_microbatches)
    ]
    return [action for _, action in sorted(order, key=lambda entry: entry[0])]


def v_half(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order a V with half the memory of zbv: V-Min's block, where each rank runs ahead as far as that allows.

        rank 0 |0F0|0F1|0F2|3F0|3B0|3F1|3B1|0B0|0W0|0B1|3W0|3F2|3B2|0W1|3W1|0B2|0W2|3W2|
        rank 1     |1F0|2F0|1F1|2F1|2B0|1B0|2B1|1B1|1F2|2F2|1W0|2W0|2B2|1B2|1W1|2W1|1W2|2W2|

    Weight halves run where a rank would be idle.

    Span bubble, with F = B = W, P <= 9 and M >= 2P: at most 3P - 1 - 3k + max(3P, P - 1 + 2 (1 + floor((k + 1) / 2)))
    of a chunk's actions, with k = 2 floor((P + 2) / 2). Peak: at most k stage inputs.
    Source: the same, V-Half; the bubble is what the authors' published search reaches with so much memory.
    """
    return list(_ahead(num_ranks, num_microbatches, 2 * ((num_ranks + 2) // 2))[rank])


@lru_cache(maxsize=4)  # for the other ranks of the same schedule
def _ahead(num_ranks: int, num_microbatches: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """Return the orders of a V, for actions of equal length and room for so many stage inputs on a rank."""
    num_stages = 2 * num_ranks
    problem = Problem.of(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        rank_of=lambda stage, ranks: min(stage, 2 * ranks - 1 - stage),
        num_stages=num_stages,
        limit=most,
    )
    offsets = tuple((float(s), float(2 * num_stages - 1 - s), 1e9) for s in range(num_stages))
    built = build(problem, Rule(offsets, period=_PERIOD, target=float("inf")))
    assert built is not None, "a rule that keeps room for later stages always ends"
    return tuple(tuple(order) for order in built.orders)


def dualpipev(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order a V in pairs: each backward stands right behind the forward of another micro-batch.

        rank 0 |0F0|0F1|0F2|3F0|3B0|3W0|3F1|0F3|3B1    |3F2|0B0    |3B2    |3F3|   |0B1    |3B3    |0B2|0W2|0B3|0W3|
        rank 1     |1F0|2F0|1F1|2F1|1F2|2B0    |2F2|1B0    |1F3|2B1    |2F3|1B1    |2B2    |1B2    |2B3|1B3|2W3|1W3|

    The two of a pair run one after the other here, so that each starts as soon as its own inputs are there;
    `dualpipev_overlap` runs them at the same time.

    Span bubble: (P - 1) (F + B - W) of a chunk's actions where W <= F = B and M >= 2P. Peak: 2P + 1 stage inputs,
    where M >= 2P.
    Source: DeepSeek-AI 2024 (arXiv 2412.19437), DualPipe, as cut in half in the authors' published code, where
    M >= 2P; for fewer micro-batches, those that there are not fall out of the order for 2P.
    """
    return [single for action in dualpipev_overlap(rank, num_ranks, num_microbatches) for single in action.singles]


def dualpipev_overlap(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order the pairs of `dualpipev` as one action each, so that one's messages move while the other computes.

        rank 0 |0F0|0F1|0F2|3F0|3B0|3W0|3F1|0F3&3B1    |   |3F2&0B0    |3B2    |   |3F3&0B1    |3B3    |0B2|0W2|0B3|0W3|
        rank 1     |1F0|2F0|1F1|2F1|1F2|2B0    |2F2&1B0    |1F3&2B1    |2F3&1B1    |2B2    |1B2    |   |2B3|1B3|2W3|1W3|

    A pair starts once the inputs of both are there; so the very first backward, on the last rank, is in none.

    Makespan, where W <= F = B and M >= 2P, with F&B from max(F, B + W) to F + B + W: 3P F + (2M - P - 2) F&B
    + (2P + 1) B + 3W of a chunk's actions. Span bubble, with F&B = F + B + W: (P - 1) (F&B + B - 2W). Peak: 2P + 1
    stage inputs, where M >= 2P.
    Source: as `dualpipev`.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    below = num_ranks - 1 - rank
    count: Counter[tuple[Kind, int]] = Counter()
    order: list[tuple[Action, ...]] = []  # of two, a pair
    put_off: list[Action] = []  # weight halves that are still to come

    def add(kind: Kind, stage: int) -> None:
        order.append((Action(kind, stage, count[kind, stage]),))
        count[kind, stage] += 1

    def forward(stage: int) -> None:
        add(Kind.F, stage)

    def backward(stage: int, *, split: bool = False) -> None:
        microbatch = count[Kind.B, stage]
        count[Kind.B, stage] += 1
        order.append((B(stage, microbatch) if split else BW(stage, microbatch),))
        if split:
            put_off.append(W(stage, microbatch))

    def both(forward_stage: int, backward_stage: int) -> None:
        forward(forward_stage)
        backward(backward_stage)
        order[-2:] = [order[-2] + order[-1]]

    for _ in range(2 * below):  # warmup: down
        forward(down)
    for _ in range(rank + 1):  # and up
        forward(down)
        forward(up)
    for _ in range(below):  # the first backwards, whose weight halves wait for nobody
        backward(up, split=True)
        order.append((put_off.pop(0),))
        forward(up)
    for i in range(max(num_microbatches - 2 * num_ranks, 0) + rank + 1):  # steady: pairs
        if i == below == 0:  # the first backward of all waits for nobody but this rank
            forward(down)
            backward(up)
        else:
            both(down, up)
        both(up, down)
    for _ in range(below):  # cooldown: pairs on the way up
        backward(up)
        both(up, down)
    # Then backwards alone, of which the second half leaves its weight halves to the end.
    alone = [stage for _ in range(rank + 1) for stage in (up, down)]
    for index, stage in enumerate(alone):
        backward(stage, split=index >= rank + 1)
    for _ in range(below):
        order.append((put_off.pop(0),))
        backward(down, split=True)
    order += [(weights,) for weights in put_off]
    there = [tuple(action for action in entry if action.microbatch < num_microbatches) for entry in order]
    return [pair(*entry) if len(entry) == 2 else entry[0] for entry in there if entry]
