# mpirun -n 2 python -m mpi4py examples/gpt_pipeline.py
"""Train a GPT whose layers are cut into stages, one a rank or more.

mpirun -n 2 python -m mpi4py examples/gpt_pipeline.py
mpirun -n 2 python -m mpi4py examples/gpt_pipeline.py --schedule zero_bubble_h1 --microbatches 8

gpt_single.py with the model in stages. Each rank builds its own layers only, and the executor runs forwards and
backwards of the batch's micro-batches in the order of the schedule; activations and their gradients go from rank to
rank. `python -m pipeline compare --ranks 2 --microbatches 4` says what each schedule costs; the loss is that of
gpt_single.py in all.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from common.settings import ScheduleSettings
from common.text import load_tokens, split
from distributed import world
from distributed.data.batches import TokenBatches
from distributed.run import Run, read_settings, run_script
from minigrad import cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage


def main() -> None:
    settings = read_settings(ScheduleSettings, __doc__)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")

    config = gpt.GPTConfig(settings.vocab, settings.context, settings.layers, settings.heads, settings.width)
    schedule = SCHEDULES[settings.schedule]
    stages = PipelineStage.of(gpt.layers(config), comm, schedule, seed=settings.seed, dtype=settings.dtype)
    pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=settings.num_microbatches, loss_fn=cross_entropy)
    optimizer = Optimizer(stages.parameters(), AdamW(settings.lr))
    batches = TokenBatches(
        train,
        batch_size=settings.batch,
        context=settings.context,
        seed=settings.seed,
    )

    for _ in run.steps(stages, optimizer, batches):
        x, y = batches.next()
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        optimizer.step()
        run.log(loss)
    run.end()


if __name__ == "__main__":
    run_script(main)
