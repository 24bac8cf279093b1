# mpirun -n 2 python -m mpi4py examples/custom_comm_hook.py
"""Average gradients over ranks in a way of one's own: send the largest ones only.

mpirun -n 2 python -m mpi4py examples/custom_comm_hook.py
mpirun -n 2 python -m mpi4py examples/custom_comm_hook.py --forget

mlp_digits.py with a comm hook, which says how the gradients of a bucket travel. Each rank sends the largest hundredth,
as indices and values, and keeps the others, to be added to those of the next step. A step sends a fiftieth of the
bytes, and all gradients get through in the end: after a slower start the digits are read about as well as in
mlp_digits.py. With --forget a rank drops the others. What is small in every step is then never learned, and the loss
ends more than twice as high.
What a hook must do, leave the same bits on every rank by the same collectives, distributed/data_parallel/comm_hooks.py
says.
Source: the memory of Stich et al. 2018 (arXiv 1809.07599).
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from dataclasses import dataclass

import numpy as np

from common.digits import accuracy, load_digits
from common.settings import DigitsSettings
from distributed import Communicator, DistributedDataParallel, GradientBucketManager, Work, world
from distributed.comm.work import Array, JoinedWork
from distributed.data.batches import Sampler
from distributed.data_parallel.compression.feedback import WithState
from distributed.run import Run, flag, read_settings, run_script
from minigrad import backward_with_hooks, cross_entropy
from minigrad.models import MLP
from minigrad.nn import Buffer
from minigrad.optim import AdamW, Optimizer

SHARE = 0.01  # of a bucket's gradients that are sent in a step


@dataclass(frozen=True)
class HookSettings(DigitsSettings):
    """Of a network whose gradients are sent in part."""

    forget: bool = flag(False, "drop what is not sent, instead of sending it later")


class LargestOnly:
    """A comm hook that sends the largest gradients of a bucket, and keeps the others for the next step.

    What is kept is part of a checkpoint: a run that is resumed, on as many ranks, is the undisturbed one.

    Attributes:
        sent_bytes, plain_bytes: what this rank has sent so far, and what it would have sent without the hook.
    """

    def __init__(self, share: float, *, forget: bool) -> None:
        self.sent_bytes = self.plain_bytes = 0
        self._share = share
        self._forget = forget
        self._kept: dict[int, Buffer] = {}  # of each bucket, by the place in memory that it has for good

    def attach(self, manager: GradientBucketManager) -> None:
        """Make what is kept, under a name for each rank and bucket."""
        for bucket in manager.buckets:
            grad, name = bucket.range.grad, f"{bucket.range.params[0].name}.kept_by_{manager.comm.rank}"
            self._kept[grad.ctypes.data] = Buffer(np.zeros_like(grad), name)

    def buffers(self) -> list[Buffer]:
        return list(self._kept.values())

    def forget(self) -> None:
        """Begin anew: a checkpoint of another number of ranks has been loaded."""
        for kept in self._kept.values():
            kept.data[...] = 0

    def __call__(self, grad: Array, comm: Communicator) -> Work:
        kept = self._kept[grad.ctypes.data].data
        kept += grad
        count = max(1, round(self._share * grad.size))
        where = np.argpartition(np.abs(kept), -count)[-count:].astype(np.int32)
        values = kept[where]
        kept[slice(None) if self._forget else where] = 0
        self.sent_bytes += where.nbytes + values.nbytes
        self.plain_bytes += grad.nbytes

        def add_up(gathered: list[Array]) -> Array:
            grad[:] = 0
            for where, values in zip(*gathered, strict=True):  # in the order of ranks: all get the same bits
                grad[where] += values
            return grad

        return JoinedWork([comm.allgather(where), comm.allgather(values)], add_up)


def main() -> None:
    settings = read_settings(HookSettings, __doc__)
    train, validation = load_digits()
    comm = world()
    run = Run(settings, comm)

    model = MLP([64, settings.hidden, 10], seed=settings.seed)
    hook = LargestOnly(SHARE, forget=settings.forget)
    ddp = DistributedDataParallel(model, comm, comm_hook=hook)
    hook.attach(ddp.buckets)
    optimizer = Optimizer(model.parameters(), AdamW(settings.lr))
    sampler = Sampler(len(train.y), batch_size=settings.batch, seed=settings.seed, rank=comm.rank, size=comm.size)

    for _ in run.steps(WithState(model, hook), optimizer, sampler):
        rows = sampler.next()
        x, y = train.x[rows], train.y[rows]
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        backward_with_hooks(loss, ddp.hooks(num_samples=len(x)))
        ddp.wait()
        optimizer.step()
        run.log(ddp.mean(loss.item()))
    if run.stopped:
        return

    share = accuracy(model, validation)
    run.end(validation_accuracy=share)
    run.say(f"reads {share:.1%} right of {len(validation.y)} digits that it never saw")
    run.say(f"a rank sent {hook.sent_bytes:,} bytes of gradients; all of them are {hook.plain_bytes:,}")


if __name__ == "__main__":
    run_script(main)
