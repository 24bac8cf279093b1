# mpirun -n 2 python -m mpi4py examples/custom_schedule.py
"""Train a GPT in a pipeline by a schedule of one's own, written as a function.

mpirun -n 2 python -m mpi4py examples/custom_schedule.py

gpt_pipeline.py with its schedule from this file. A schedule is a pure function: from a rank, the number of ranks and of
micro-batches to the list of what that rank computes. Idle time and messages are nobody's to write: the simulator finds
the one, and the executor adds the other. So a schedule is drawn, proved and timed before any rank has started.

Eager 1F1B runs twice as many forwards ahead as 1F1B. Where messages take no time that only costs memory, and where
they take long it hides them: the script prints both bubbles for a message as long as a forward. The losses are those
of gpt_pipeline.py, and timeline.svg in the run's folder shows how the last step went here.
Source: the eager-1F1B of Zhuang et al. 2022 (arXiv 2211.05322).
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from common.proof import proved
from common.settings import PipelineSettings
from common.text import load_tokens, split
from distributed import launcher_size, world
from distributed.data.batches import TokenBatches
from distributed.run import Run, read_settings, run_script
from minigrad import cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from pipeline import BW, SCHEDULES, Action, F, PipelineExecutor, PipelineStage, Schedule, draw


def eager_one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order one forward, one backward in turn, after twice 1F1B's forwards."""
    warmup = min(2 * (num_ranks - rank - 1), num_microbatches)
    order = [F(rank, i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        order += [F(rank, warmup + i), BW(rank, i)]
    return order + [BW(rank, i) for i in range(num_microbatches - warmup, num_microbatches)]


def main() -> None:
    settings = read_settings(PipelineSettings, __doc__)
    schedule = Schedule("eager_1f1b", eager_one_f_one_b)
    timeline = proved(schedule, settings, launcher_size() or world().size)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")
    run.say(draw(timeline))
    for each in (SCHEDULES["1f1b"], schedule):
        bubbles = [proved(each, settings, comm.size, latency=latency).bubble_fraction for latency in (0.0, 1.0)]
        run.say(f"{each.name}: a bubble of {bubbles[0]:.1%} of the ideal time, {bubbles[1]:.1%} with slow messages")

    config = gpt.GPTConfig(settings.vocab, settings.context, settings.layers, settings.heads, settings.width)
    stages = PipelineStage.of(gpt.layers(config), comm, schedule, seed=settings.seed, dtype=settings.dtype)
    pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=settings.num_microbatches, loss_fn=cross_entropy)
    optimizer = Optimizer(stages.parameters(), AdamW(settings.lr))
    batches = TokenBatches(
        train,
        batch_size=settings.batch,
        context=settings.context,
        seed=settings.seed,
    )

    for step in run.steps(stages, optimizer, batches):
        x, y = batches.next()
        optimizer.zero_grad()
        with run.recorded(pipe, step):
            loss = pipe.step(x, y)
        optimizer.step()
        run.log(loss)
    run.end()


if __name__ == "__main__":
    run_script(main)
