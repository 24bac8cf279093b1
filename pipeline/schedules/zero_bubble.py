"""Orders that split the backward: W, the half that nobody waits for, fills what would be a bubble.

Source: Qi et al. 2023 (arXiv 2401.10241), zero bubble pipeline parallelism.
"""

from __future__ import annotations

from collections import Counter

from pipeline.action import Action, B, F, Kind, W


def zero_bubble_h1(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order 1F1B with each W as late as memory allows: at most what 1F1B holds on rank 0.

        rank 0 |F0|F1|  |B0|W0|F2|B1|W1|B2|W2|
        rank 1    |F0|B0|F1|B1|W0|F2|B2|W1|W2|

    Bubble: (P - 1) (F + B - W) where M >= P. Peak: P - rank micro-batches, and what `rank` weight halves keep.
    """
    return _lagging(rank, num_ranks, num_microbatches, lag=1)


def zero_bubble_h2(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order twice as many forwards ahead: with M >= 2P - 1 and F = B = W no rank idles inside its span.

        rank 0 |F0|F1|F2|B0|W0|B1|W1|B2|W2|
        rank 1    |F0|B0|F1|B1|F2|B2|W0|W1|W2|

    Span bubble: (P - 1) (F + B - 2W) where M >= 2P - 1. Peak: 2 (P - rank) - 1 micro-batches, and what
    2 rank weight halves keep.
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

    Span bubble: (P - 1) (B - W) where M >= 2P - 1 and F, W <= B, so 0 at equal times. Peak: 2P stage inputs, which
    are as much as the P micro-batches of 1F1B's first rank.
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
