"""The order in which each rank computes, as pure functions: all schedules on one page.

An order lists compute only. Idle time is never written (the simulator finds it), nor is communication
(`lower` adds it), so a schedule can be read, drawn and checked without a process.

One stage a rank: forward_only, gpipe, one_f_one_b, and zero_bubble_h1 and _h2, which split the backward: W, the half
that nobody waits for, fills what would be a bubble. Several stages a rank: interleaved_1f1b_order and looped_bfs_order
(rank r has stages r, r + P, r + 2P, ..., so that the pipeline fills in a fraction of the time), and zbv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.schedules.action import BW, Action, B, F, Kind, Placement, W


def forward_only(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order forwards alone, for evaluation.

        rank 0 |F0|F1|F2|F3|
        rank 1    |F0|F1|F2|F3|

    Bubble: (P - 1) / M of the ideal time. Peak: nothing is kept for a backward.
    """
    return [F(rank, i) for i in range(num_microbatches)]


def forwards_of(rank_of: Placement, num_ranks: int, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Order the forwards alone of every rank, for any placement of stages and any number of micro-batches.

    In turn, each rank runs the furthest of its stages whose input is there: what entered first leaves first, so as
    little as can be lies between stages. With two stages a rank, in a loop and in a V:

        rank 0 |0F0|0F1|2F0|2F1|0F2|0F3|2F2|2F3|            rank 0 |0F0|0F1|0F2|3F0|0F3|3F1|   |3F2|   |3F3|
        rank 1     |1F0|1F1|3F0|3F1|1F2|1F3|3F2|3F3|        rank 1     |1F0|2F0|1F1|2F1|1F2|2F2|1F3|2F3|
    """
    stages_of: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage in reversed(range(num_stages)):
        stages_of[rank_of(stage, num_ranks)].append(stage)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    done = [0] * num_stages  # micro-batches
    while done[-1] < num_microbatches:
        there = [num_microbatches, *done]  # as inputs of each stage
        for order, stages in zip(orders, stages_of, strict=True):
            furthest = next((stage for stage in stages if done[stage] < there[stage]), None)
            if furthest is not None:
                order.append(F(furthest, done[furthest]))
                done[furthest] += 1
    return orders


def backwards_of(forwards: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Order the full backwards of every rank: its forwards in a mirror, oldest micro-batch first again.

    Args:
        forwards: from `forwards_of`.
    """
    last = max((action.microbatch for order in forwards for action in order), default=0)
    return [[BW(action.stage, last - action.microbatch) for action in reversed(order)] for order in forwards]


def gpipe(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order all forwards, then all backwards.

        rank 0 |F0|F1|F2|F3|        |B0   |B1   |B2   |B3   |
        rank 1    |F0|F1|F2|F3|B0   |B1   |B2   |B3   |

    The paper draws the backwards newest micro-batch first. Oldest first has the same bubble and the same peak (all
    micro-batches are alive when the first backward starts), and sums the gradients in the same order as 1F1B,
    so that the two train alike to the last bit.

    Bubble: (P - 1) / M of the ideal time. Peak: M micro-batches on every rank.
    Source: Huang et al. 2019 (arXiv 1811.06965).
    """
    forwards = [F(rank, i) for i in range(num_microbatches)]
    return forwards + [BW(rank, i) for i in range(num_microbatches)]


def one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order one forward, one backward in turn, as soon as the first backward can run.

        rank 0 |F0|F1|     |B0   |F2|B1   |F3|B2   |  |B3   |
        rank 1    |F0|B0   |F1|B1   |F2|B2   |F3|B3   |

    Bubble: (P - 1) / M of the ideal time, as GPipe. Peak: min(M, P - rank) micro-batches.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), the non-interleaved schedule with flushes.
    """
    warmup = min(num_ranks - rank - 1, num_microbatches)
    order = [F(rank, i) for i in range(warmup)]  # warmup
    for i in range(num_microbatches - warmup):  # steady
        order += [F(rank, warmup + i), BW(rank, i)]
    return order + [BW(rank, i) for i in range(num_microbatches - warmup, num_microbatches)]  # cooldown


def interleaved_1f1b_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Order one forward, one backward in turn; P micro-batches run through a chunk before the next chunk begins.

        rank 0 |0F0|0F1|2F0|2F1|       |2B0    |   |2B1    |0B0    |0B1    |
        rank 1     |1F0|1F1|3F0|3B0    |3F1|3B1    |1B0    |1B1    |

    Bubble: (P - 1) / (V M) of the ideal time, V chunks a rank; V times the messages.
    Peak: min(V M, 2 (P - rank - 1) + (V - 1) P + 1) stage inputs.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; the order is Megatron-LM's.
    Raises:
        ValueError: M is not divisible by P.
    """
    if num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved 1F1B needs num_microbatches divisible by num_ranks, got {num_microbatches} and {num_ranks}"
        )
    # A round takes P micro-batches through all chunks. For P = 2, V = 2, M = 4:
    #   chunk        0 0 1 1   0 0 1 1
    #   micro-batch  0 1 0 1   2 3 2 3
    steps = [
        (chunk, first + i)
        for first in range(0, num_microbatches, num_ranks)
        for chunk in range(num_chunks)
        for i in range(num_ranks)
    ]
    forwards = [F(chunk * num_ranks + rank, i) for chunk, i in steps]
    backwards = [BW((num_chunks - 1 - chunk) * num_ranks + rank, i) for chunk, i in steps]

    warmup = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks, len(steps))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):  # steady; the rest is cooldown
        order += [forward, backward]
    return order + backwards[len(steps) - warmup :]


def looped_bfs_order(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Order all micro-batches through one chunk before the next: GPipe that goes round in a loop.

        rank 0 |0F0|0F1|2F0|2F1|           |2B0    |2B1    |0B0    |0B1    |
        rank 1     |1F0|1F1|3F0|3F1|3B0    |3B1    |1B0    |1B1    |

    All gradients of a chunk are final when its last backward is done, well before those of the next chunk, so
    their reduction over replicas has the rest of the backward to hide in.

    Bubble: (P - 1) / (V M) of the ideal time where M >= P. Peak: V M stage inputs on every rank.
    Source: Lamy-Poirier 2022 (arXiv 2211.05953), breadth-first.
    """
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    forwards = [F(stage, i) for stage in stages for i in range(num_microbatches)]
    return forwards + [BW(stage, i) for stage in reversed(stages) for i in range(num_microbatches)]


def zero_bubble_h1(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order 1F1B with each W as late as memory allows: at most what 1F1B holds on rank 0.

        rank 0 |F0|F1|  |B0|W0|F2|B1|W1|B2|W2|
        rank 1    |F0|B0|F1|B1|W0|F2|B2|W1|W2|

    Bubble: (P - 1) (F + B - W) where M >= P and W <= F, B. Peak: P - rank micro-batches, and what `rank` weight
    halves keep.
    """
    return _lagging(rank, num_ranks, num_microbatches, lag=1)


def zero_bubble_h2(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order twice as many forwards ahead: with M >= 2P - 1 and F = B = W no rank idles inside its span.

        rank 0 |F0|F1|F2|B0|W0|B1|W1|B2|W2|
        rank 1    |F0|B0|F1|B1|F2|B2|W0|W1|W2|

    Span bubble: (P - 1) (F + B - 2W) where M >= 2P - 1 and W <= F, B. Peak: 2 (P - rank) - 1 micro-batches, and
    what 2 rank weight halves keep.
    """
    return _lagging(rank, num_ranks, num_microbatches, lag=2)


def _lagging(rank: int, num_ranks: int, num_microbatches: int, *, lag: int) -> list[Action]:
    """Order by steps: step x runs F of micro-batch x, and B and W of those that many steps before."""
    lags = {F: 0, B: lag * (num_ranks - 1 - rank), W: lag * (num_ranks - 1)}
    return [
        make(rank, step - behind)
        for step in range(num_microbatches + lags[W])
        for make, behind in lags.items()
        if 0 <= step - behind < num_microbatches
    ]


def zbv(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order two chunks a rank, placed in a V: rank r has stages r and 2P - 1 - r.

        rank 0 |0F0|0F1|0F2|3F0|3B0|3W0|3F1|3B1|3W1|0B0|0W0|3F2|3B2|3W2|0B1|0W1|0B2|0W2|
        rank 1     |1F0|2F0|1F1|2F1|2B0|2W0|1F2|1B0|1W0|2F2|2B1|2W1|1B1|2B2|1B2|1W1|2W2|1W2|

    The last stage is on the rank of the first, so a backward starts right after its forward, with no message.

    Span bubble: 2 (P - 1) (B - W) of a chunk's actions where M >= 2P - 1 and W <= F <= B, so 0 at equal times.
    Peak: 2P stage inputs, which are as much as the P micro-batches of 1F1B's first rank.
    Source: the same, section 6; the order is PyTorch's ScheduleZBVZeroBubble.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    f0, b0, w0 = ((kind, down) for kind in (Kind.F, Kind.B, Kind.W))
    f1, b1, w1 = ((kind, up) for kind in (Kind.F, Kind.B, Kind.W))
    below = num_ranks - rank
    # Laid out for as many micro-batches as fill the pipeline; those that there are not fall out.
    num_filling = max(num_microbatches, 2 * num_ranks - 1)
    kinds = [f0] * (2 * below - 1) + [f1, f0] * rank + [f1, b1, w1] * below  # warmup
    kinds += [f0, b0, w0, f1, b1, w1] * (num_filling - num_ranks)  # steady
    kinds += [b0, b1] * rank + [b0, w0] * below + [w1] * rank + [w0] * rank  # cooldown
    count: Counter[tuple[Kind, int]] = Counter()
    order = []
    for kind, stage in kinds:
        order.append(Action(kind, stage, count[kind, stage]))
        count[kind, stage] += 1
    return [action for action in order if action.microbatch < num_microbatches]
