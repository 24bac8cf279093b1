# python -m distributed.recovery -n 2 examples/gpt_recovery.py
"""Train a GPT on replicas that may die: kill any of them, and the loss goes on as if nothing had happened.

python -m distributed.recovery -n 2 examples/gpt_recovery.py
kill -9 PID                                                     from another terminal; each rank prints its own

gpt_ddp.py with three things more. What depends on the ranks that there are is built by a function, which is called
again when they change. The loop goes over attempts at steps: one that meets a death ends, and the step is done again.
And the optimizer steps in commit(), once all ranks have agreed that the step is done. A rank that is killed is replaced
by a new process, which gets its state from a replica that lives.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from dataclasses import dataclass
from functools import partial

from common.settings import RecoverySettings
from common.text import load_tokens, split
from distributed import Communicator, DistributedDataParallel, world
from distributed.data import TokenBatches
from distributed.recovery import Heal, recovering
from distributed.run import read_flags, run_script
from minigrad import backward_with_hooks, cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer


@dataclass
class Training:
    """What is built for the ranks that there are."""

    model: gpt.GPT
    ddp: DistributedDataParallel
    optimizer: Optimizer
    data: TokenBatches


def main() -> None:
    settings = read_flags(RecoverySettings, __doc__)
    train, _ = split(load_tokens(None), context=settings.context)
    config = gpt.GPTConfig(256, settings.context, settings.layers, settings.heads, settings.width)

    def build(comm: Communicator) -> Training:
        model = gpt.GPT(config)
        ddp = DistributedDataParallel(model, comm)
        data = TokenBatches(
            train, batch_size=settings.batch, context=settings.context, seed=0, rank=comm.rank, size=comm.size
        )
        return Training(model, ddp, Optimizer(model.parameters(), AdamW(1e-3)), data)

    comm = world(survive=True, deterministic=True)
    print(f"rank {comm.rank} is process {os.getpid()}", flush=True)
    heal, say = Heal(settings.heal), partial(print, flush=True)
    for attempt in recovering(comm, build, num_steps=settings.steps, heal=heal, num_spares=settings.spares, say=say):
        if attempt.recovery is not None and attempt.comm.rank == 0:
            say(attempt.recovery)
        with attempt as training:
            x, y = training.data.next()
            training.optimizer.zero_grad()
            loss = cross_entropy(training.model(x), y)
            backward_with_hooks(loss, training.ddp.hooks(num_samples=len(x)))
            training.ddp.wait()
            mean = training.ddp.mean(loss.item())
            attempt.commit()
        if attempt.committed and attempt.comm.rank == 0:
            print(f"step {attempt.step + 1}: loss {mean:.4f}", flush=True)


if __name__ == "__main__":
    run_script(main)
