# mpirun -n 2 python -m mpi4py examples/gpt_ddp.py
"""Train a GPT on as many replicas as mpirun starts ranks.

mpirun -n 2 python -m mpi4py examples/gpt_ddp.py

gpt_single.py with three things more. DistributedDataParallel starts all replicas from the same values. Its hooks send
each part of the gradients on its way as soon as the backward is done with it. wait() returns when all of them are
the mean over ranks. A rank takes its own part of each batch, so two ranks on two cores need about half of
gpt_single.py's time, and the loss is the same. Besides, the last step is recorded, and drawn as timeline.svg.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from common.settings import GPTReplicaSettings
from common.text import load_tokens, split
from distributed import DistributedDataParallel, world
from distributed.data.batches import TokenBatches
from distributed.run import Run, read_settings, run_script
from minigrad import backward_with_hooks, cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer


def main() -> None:
    settings = read_settings(GPTReplicaSettings, __doc__)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")

    config = gpt.GPTConfig(settings.vocab, settings.context, settings.layers, settings.heads, settings.width)
    model = gpt.GPT(config, seed=settings.seed, dtype=settings.dtype)
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), AdamW(settings.lr))
    batches = TokenBatches(
        train,
        batch_size=settings.batch,
        context=settings.context,
        seed=settings.seed,
        rank=comm.rank,
        size=comm.size,
    )

    for step in run.steps(model, optimizer, batches):
        x, y = batches.next()
        with run.recorded(ddp, step):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            backward_with_hooks(loss, ddp.hooks(num_samples=len(x)))
            ddp.wait()
            optimizer.step()
        run.log(ddp.mean(loss.item()))
    run.end()


if __name__ == "__main__":
    run_script(main)
