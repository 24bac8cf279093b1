# mpirun -n 2 python -m mpi4py examples/gpt_local_steps.py
"""Train a GPT on replicas that a slow link joins: each steps on its own, and they agree every few steps (DiLoCo).

mpirun -n 2 python -m mpi4py examples/gpt_local_steps.py
mpirun -n 2 python -m mpi4py examples/gpt_local_steps.py --every 30 --outer-lr 0.7 --outer-momentum 0.9 --compress none

gpt_ddp.py with local steps in place of gradients that travel. Each rank steps an optimizer of its own on its part of
each batch. After --every steps the ranks average how far they have come, and take that as the gradient of an outer
step. So a rank sends one model in --every steps, where gpt_ddp.py sends as much in each; in a byte a number, which is a
quarter; and, with --delay, while it computes the next steps. The second line is DiLoCo as in its paper.
The loss is that of each rank's own weights, and only at first that of gpt_ddp.py. A run may be ended after any step:
its checkpoint has what each rank has of its own, and on as many ranks it goes on as if nothing had been.
Source: Douillard et al. 2023 (arXiv 2311.08105) and 2025 (arXiv 2501.18512).
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from common.settings import LocalStepsSettings
from common.text import load_tokens, split
from distributed import world
from distributed.data.batches import TokenBatches
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.compression.feedback import WithState
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.local_steps import LocalSteps, Nesterov
from distributed.run import Run, read_settings, run_script
from minigrad import backward_with_hooks, cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer


def main() -> None:
    settings = read_settings(LocalStepsSettings, __doc__)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")

    config = gpt.GPTConfig(settings.vocab, settings.context, settings.layers, settings.heads, settings.width)
    model = gpt.GPT(config, seed=settings.seed, dtype=settings.dtype)
    optimizer = Optimizer(model.parameters(), AdamW(settings.lr))
    local = LocalSteps(
        model.parameters(),
        comm,
        Nesterov(settings.outer_lr, settings.outer_momentum),
        every=settings.every,
        num_fragments=settings.fragments,
        delay=settings.delay,
        alpha=settings.alpha,
        comm_hook=allreduce if settings.compress == "none" else ErrorFeedback(settings.compress),
        inner=optimizer,
    )
    batches = TokenBatches(
        train,
        batch_size=settings.batch,
        context=settings.context,
        seed=settings.seed,
        rank=comm.rank,
        size=comm.size,
    )

    for _ in run.steps(WithState(model, local), optimizer, batches):
        x, y = batches.next()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        backward_with_hooks(loss, local.hooks())
        optimizer.step()
        local.step()
        run.log(local.mean(loss.item()))
    run.end()
    if not run.stopped:
        sent, plain = (count / local.num_steps for count in (local.sent_bytes, local.plain_bytes))
        run.say(f"a rank sent {sent:,.0f} bytes of weights a step, where gpt_ddp.py sends {plain:,.0f} of gradients")


if __name__ == "__main__":
    run_script(main)
