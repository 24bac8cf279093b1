"""The order in which each rank computes where it owns one stage: the classic schedules, as pure functions.

An order lists compute only. Idle time is never written (the simulator finds it), nor is communication
(`lower` adds it), so a schedule can be read, drawn and checked without a process.
"""

from __future__ import annotations

from pipeline.action import BW, Action, F


def forward_only(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order forwards alone, for evaluation.

        rank 0 |F0|F1|F2|F3|
        rank 1    |F0|F1|F2|F3|

    Bubble: (P - 1) / M of the ideal time. Peak: nothing is kept for a backward.
    """
    return [F(rank, i) for i in range(num_microbatches)]


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
