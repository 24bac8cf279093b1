"""Orders of ranks that own several stages in turn: rank r has stages r, r + P, r + 2P, ...

A micro-batch passes every rank once for each chunk, so the pipeline fills in a fraction of the time.
"""

from __future__ import annotations

from pipeline.action import BW, Action, F


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
