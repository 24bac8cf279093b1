"""The order in which each rank computes, as pure functions.

An order lists compute only. Idle time is never written (the simulator finds it), nor is communication
(`lower` adds it), so a schedule can be read, drawn and checked without a process.

To add one: write its order, then a row in SCHEDULES, a drawn grid and its bubble formula in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.action import BW, Action, F, Placement

Order = Callable[[int, int, int], list[Action]]
"""`order(rank, num_ranks, num_microbatches)`: the compute actions of one rank."""


def round_robin(stage: int, num_ranks: int) -> int:
    """Place the stages on the ranks in turn, from rank 0 again after the last."""
    return stage % num_ranks


@dataclass(frozen=True)
class Schedule:
    """An order, the number of stages a rank owns, and which ones they are."""

    name: str
    order: Order
    num_chunks: int = 1
    rank_of: Placement = round_robin

    def num_stages(self, num_ranks: int) -> int:
        """Return how many stages the model is cut into."""
        return num_ranks * self.num_chunks

    def num_ranks(self, num_stages: int) -> int:
        """Return how many ranks share a model of so many stages.

        Raises:
            ValueError: they would own unequal numbers of stages.
        """
        if num_stages % self.num_chunks:
            raise ValueError(
                f"{self.name} needs num_stages divisible by num_chunks, got {num_stages} and {self.num_chunks}"
            )
        return num_stages // self.num_chunks

    def orders(self, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
        """Return the order of every rank.

        Raises:
            ValueError: a count is below 1.
        """
        for what, count in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
            if count < 1:
                raise ValueError(f"{what} must be at least 1, got {count}")
        return [self.order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


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


SCHEDULES = {schedule.name: schedule for schedule in (Schedule("gpipe", gpipe), Schedule("1f1b", one_f_one_b))}
