# mpirun -n 4 python -m mpi4py examples/gpt_hybrid.py --dp 2 --pp 2
"""Train a GPT in replicas, each of which is a pipeline.

mpirun -n 4 python -m mpi4py examples/gpt_hybrid.py --dp 2 --pp 2

gpt_pipeline.py with gpt_ddp.py's three things, and a mesh that gives each rank its place in both. Pipelines run along
mesh.pp; along mesh.dp are the ranks that hold the same stage, so each stage averages its gradients by itself, while
the other stages still compute. With --dp 1 or --pp 1 it is one of those two scripts, and the loss is the same.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from common.settings import HybridSettings
from common.text import load_tokens, split
from distributed import DistributedDataParallel, Mesh, world
from distributed.data.batches import TokenBatches
from distributed.run import Run, read_settings, run_script
from minigrad import cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage


def main() -> None:
    settings = read_settings(HybridSettings, __doc__)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    mesh = Mesh(comm, dp=settings.dp, pp=settings.pp)
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")

    config = gpt.GPTConfig(settings.vocab, settings.context, settings.layers, settings.heads, settings.width)
    schedule = SCHEDULES[settings.schedule]
    stages = PipelineStage.of(gpt.layers(config), mesh.pp, schedule, seed=settings.seed, dtype=settings.dtype)
    num_microbatches = settings.num_microbatches
    pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=num_microbatches, loss_fn=cross_entropy)
    ddp = DistributedDataParallel(stages, mesh.dp)
    pipe.check_deadlock_free(ddp)
    optimizer = Optimizer(stages.parameters(), AdamW(settings.lr))
    batches = TokenBatches(
        train,
        batch_size=settings.batch,
        context=settings.context,
        seed=settings.seed,
        rank=mesh.dp.rank,
        size=mesh.dp.size,
    )

    for _ in run.steps(stages, optimizer, batches):
        x, y = batches.next()
        optimizer.zero_grad()
        loss = pipe.step(x, y, hooks=ddp.hooks(num_samples=len(x)))
        ddp.wait()
        optimizer.step()
        run.log(ddp.mean(loss))
    run.end()


if __name__ == "__main__":
    run_script(main)
