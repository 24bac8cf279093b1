"""Whoever is given a communicator has messages of his own: those of the caller may be under way at the same time.

Without that a message of the caller's is taken for an activation, and his sum for a checkpoint's.
"""

from pathlib import Path

import numpy as np
import pytest
from toy_checkpoints import Training
from toy_pipeline import X, Y, connect, four_layers

from distributed import DistributedDataParallel, Mesh
from distributed.stop import StopRequest
from minigrad import backward_with_hooks
from minigrad.models import MLP

NUM_TAGS = 64  # more than the toy pipeline uses


def pipeline(comm, folder):
    pipe = connect(comm, four_layers())
    return lambda: pipe.step(X, Y)


def checkpointer(comm, folder):
    training = Training(comm, Path(comm.broadcast_object(str(folder))) / "checkpoints")
    return lambda: training.save(1)


def stop(comm, folder):
    request = StopRequest(comm)
    return request.agreed


def data_parallel(comm, folder):
    model = MLP([3, 2])
    ddp = DistributedDataParallel(model, comm)

    def step():
        backward_with_hooks(model(np.ones((4, 3), np.float32)).sum(), ddp.hooks(num_samples=4))
        ddp.wait()
        ddp.mean(1.0)

    return step


def mesh(comm, folder):
    axes = Mesh(comm, dp=comm.size)

    def both():
        axes.dp.allreduce(np.zeros(3)).wait()
        axes.pp.allreduce(np.zeros(2)).wait()

    return both


@pytest.mark.point_to_point
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("make", [pipeline, checkpointer, stop, data_parallel, mesh])
def test_messages_of_the_caller_do_not_meet_those_of(make, ranks, tmp_path):
    def program(comm):
        call = make(comm, tmp_path)
        mine = [np.array([100.0 * comm.rank + tag]) for tag in range(NUM_TAGS)]
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sends = [comm.isend(mine[tag], dest=rank, tag=tag) for rank in others for tag in range(NUM_TAGS)]
        total = np.array([comm.rank])
        if comm.rank == 0:  # before, the others after: a collective begins on each rank when it comes to it
            work = comm.allreduce(total)
        call()
        if comm.rank != 0:
            work = comm.allreduce(total)
        for rank in others:
            for tag in range(NUM_TAGS):
                assert comm.recv(np.empty(1), source=rank, tag=tag) == 100 * rank + tag
        assert work.wait() == comm.size * (comm.size - 1) // 2
        for send in sends:
            send.wait()

    ranks.run(program)
