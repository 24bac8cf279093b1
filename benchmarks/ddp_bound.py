"""How much of its communication a data-parallel step can hide at best."""

from __future__ import annotations

from collections.abc import Sequence


def exposed_seconds(ready: Sequence[float], transfers: Sequence[float], cpu: float) -> float:
    """Return by how much messages prolong a step whose buckets travel one at a time, each as soon as it is ready.

    Bucket i ends at `end_i = max(ready_i, end_(i-1)) + transfers_i`; what lies behind the backward is exposed. While
    messages travel the backward gets only the rest of its core, so that ready_i is later than without them:

        core     | backward                        | waits     |
        channel         | bucket 0 | bucket 1 | ...            |

    Args:
        ready: when each bucket is ready in a backward without messages, in launch order; the last one at its end.
        transfers: how long each takes by itself.
        cpu: CPU seconds that moving all of them takes of the core that computes.
    """
    pace = 1 - cpu / sum(transfers)  # of the backward while messages travel
    computed = now = end = 0.0
    for goal, transfer in zip(ready, transfers, strict=True):
        work, busy = goal - computed, max(0.0, end - now)
        now += work / pace if work < busy * pace else work + busy * (1 - pace)
        computed = goal
        end = max(now, end) + transfer
    return end - computed
