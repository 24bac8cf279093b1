"""Ranks: communicators, data parallelism, and what surrounds them."""

from distributed.communicator import Communicator, ReduceOp, SoloCommunicator, Work
from distributed.local import LocalWorld
from distributed.mesh import Mesh
from distributed.world import describe, launched_by_mpi, launcher_rank, world

__all__ = [
    "Communicator",
    "LocalWorld",
    "Mesh",
    "ReduceOp",
    "SoloCommunicator",
    "Work",
    "describe",
    "launched_by_mpi",
    "launcher_rank",
    "world",
]
