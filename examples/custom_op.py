# mpirun -n 2 python -m mpi4py examples/custom_op.py
"""Train on an op of one's own.

mpirun -n 2 python -m mpi4py examples/custom_op.py

mlp_digits.py with a squared ReLU, y = relu(x)^2, between its layers. An op is one function: it takes arrays and returns
the value and, for each array, a vjp: from the cotangent of the value, g = d loss / d y, to that array's gradient, here
g * 2 relu(x). A vjp keeps alive the arrays that it names, here relu(x), so it had better name few.
check_vjp holds it against finite differences before anything trains: change the 2 to a 2.01, and see what it says.
Source: So et al. 2021 (arXiv 2109.08668), where squared ReLU comes out of a search.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import numpy as np

from common.digits import accuracy, load_digits
from common.settings import DigitsSettings
from distributed import DistributedDataParallel, world
from distributed.data.batches import Sampler
from distributed.run import Run, read_settings, run_script
from minigrad import backward_with_hooks, check_vjp, cross_entropy, op
from minigrad.autodiff.vjps import Vjp
from minigrad.backend import Array, xp_of
from minigrad.nn import Linear, ParamGetter, Sequential
from minigrad.optim import AdamW, Optimizer


@op
def squared_relu(x: Array) -> tuple[Array, tuple[Vjp]]:
    """Take relu(x)^2. d/dx = 2 relu(x)."""
    positive = xp_of(x).maximum(x, 0)  # of NumPy or CuPy, whichever x is an array of
    return positive * positive, (lambda g: g * (2 * positive),)


def main() -> None:
    settings = read_settings(DigitsSettings, __doc__)
    train, validation = load_digits()
    check_vjp(squared_relu, np.random.default_rng(settings.seed).standard_normal((4, 5)))
    comm = world()
    run = Run(settings, comm)

    param = ParamGetter(settings.seed)
    inner, outer = Linear(param.at("fc0"), 64, settings.hidden), Linear(param.at("fc1"), settings.hidden, 10)
    model = Sequential([inner, squared_relu, outer])
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), AdamW(settings.lr))
    sampler = Sampler(len(train.y), batch_size=settings.batch, seed=settings.seed, rank=comm.rank, size=comm.size)

    for _ in run.steps(model, optimizer, sampler):
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


if __name__ == "__main__":
    run_script(main)
