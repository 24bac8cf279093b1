"""Ranks: communicators, data parallelism, and what surrounds them."""

from distributed.clipping import NormOverRanks, clip_by_global_norm
from distributed.comm.communicator import Communicator, ReduceOp, Work
from distributed.comm.local import LocalWorld
from distributed.comm.mesh import Mesh
from distributed.comm.solo import SoloCommunicator
from distributed.comm.world import (
    describe,
    exit_together,
    launched_by_mpi,
    launcher_rank,
    launcher_size,
    local_rank,
    world,
)
from distributed.data_parallel.batch_norm import SyncBatchNorm
from distributed.data_parallel.buckets.exact import weights_sha256
from distributed.data_parallel.buckets.manager import GradientBucketManager
from distributed.data_parallel.ddp import DistributedDataParallel
from distributed.data_parallel.loss_trainers import BucketedTrainer, DistributedTrainer, SimpleTrainer
from distributed.data_parallel.pipeline_trainer import PipelineTrainer
from distributed.data_parallel.replicas import broadcast_params
from distributed.data_parallel.trainer import TrainingConfig, TrainingMetrics

__all__ = [
    "BucketedTrainer",
    "Communicator",
    "DistributedDataParallel",
    "DistributedTrainer",
    "GradientBucketManager",
    "LocalWorld",
    "Mesh",
    "NormOverRanks",
    "PipelineTrainer",
    "ReduceOp",
    "SimpleTrainer",
    "SoloCommunicator",
    "SyncBatchNorm",
    "TrainingConfig",
    "TrainingMetrics",
    "Work",
    "broadcast_params",
    "clip_by_global_norm",
    "describe",
    "exit_together",
    "launched_by_mpi",
    "launcher_rank",
    "launcher_size",
    "local_rank",
    "weights_sha256",
    "world",
]
