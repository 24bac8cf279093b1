"""Ranks as a grid of data-parallel replicas by pipeline stages."""

from __future__ import annotations

from distributed.comm.communicator import Communicator
from minigrad.words import counted


class Mesh:
    """A dp x pp grid over the ranks of a communicator.

    pp varies fastest, so that a pipeline's ranks are neighbours.

        dp=2, pp=3:          pp 0  1  2
                      dp 0      0  1  2      a row is one replica's pipeline, `pp` of its ranks
                      dp 1      3  4  5      a column holds the same stage of all replicas, their `dp`

    Making one is collective.

    Args:
        comm: all ranks.
        dp: number of replicas.
        pp: number of ranks in each replica's pipeline.
    Attributes:
        comm: all ranks, as given.
        dp: the replicas of this rank's stages.
        pp: this replica's pipeline.
    Raises:
        ValueError: dp * pp is not the number of ranks, or one of them is not positive.
    """

    def __init__(self, comm: Communicator, *, dp: int = 1, pp: int = 1) -> None:
        if dp < 1 or pp < 1 or dp * pp != comm.size:
            ranks = counted(comm.size, "rank")
            raise ValueError(f"dp * pp must equal the number of ranks, got dp={dp}, pp={pp} and {ranks}")
        row, column = divmod(comm.rank, pp)
        self.comm = comm
        self.dp = comm.split(color=column, key=row)
        self.pp = comm.split(color=row, key=column)
