"""Ranks: communicators, data parallelism, and what surrounds them."""

from distributed.buckets import GradientBucketManager
from distributed.communicator import Communicator, ReduceOp, SoloCommunicator, Work
from distributed.ddp import DistributedDataParallel, broadcast_params
from distributed.local import LocalWorld
from distributed.mesh import Mesh
from distributed.trainer import BucketedTrainer, DistributedTrainer, SimpleTrainer, TrainingConfig, TrainingMetrics
from distributed.world import describe, launched_by_mpi, launcher_rank, launcher_size, local_rank, world

__all__ = [
    "BucketedTrainer",
    "Communicator",
    "DistributedDataParallel",
    "DistributedTrainer",
    "GradientBucketManager",
    "LocalWorld",
    "Mesh",
    "ReduceOp",
    "SimpleTrainer",
    "SoloCommunicator",
    "TrainingConfig",
    "TrainingMetrics",
    "Work",
    "broadcast_params",
    "describe",
    "launched_by_mpi",
    "launcher_rank",
    "launcher_size",
    "local_rank",
    "world",
]
