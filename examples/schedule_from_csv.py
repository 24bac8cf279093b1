# mpirun -n 2 python -m mpi4py examples/schedule_from_csv.py
"""Train a GPT in a pipeline by a schedule that is written in a file.

mpirun -n 2 python -m mpi4py examples/schedule_from_csv.py
mpirun -n 2 python -m mpi4py examples/schedule_from_csv.py --schedule-file mine.csv

gpt_pipeline.py with its schedule from a CSV file: a row a rank, a cell an action, `1F0` the forward of micro-batch 0
through stage 1. B is the half of a backward that the stage before waits for, W the half that nobody waits for, BW is
both. Blank cells are for the eye. `python -m pipeline dump 1f1b --stages 2 --microbatches 8 > mine.csv` writes one to
change. A file that is wrong, or could deadlock, is shown with the cell at fault, before anything starts.

schedules/split_on_last_rank.csv cuts backwards in two on the last rank alone. That is enough there: a third of 1f1b's
bubble with the same memory, as zero_bubble_h1. In the run's folder, timeline.svg shows its last step.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

from dataclasses import dataclass
from pathlib import Path

from common.proof import proved
from common.settings import MOST_MICROBATCHES, PipelineSettings
from common.text import load_tokens, split
from distributed import launcher_size, world
from distributed.data.batches import TokenBatches
from distributed.run import Bounds, Run, flag, read_settings, run_script
from minigrad import cross_entropy
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from pipeline import PipelineExecutor, PipelineStage, Schedule, draw, load

SCHEDULES = Path(__file__).parent / "schedules"


@dataclass(frozen=True)
class FileSettings(PipelineSettings):
    """Of a pipeline by a schedule in a file."""

    schedule_file: str = flag(str(SCHEDULES / "split_on_last_rank.csv"), "CSV, a row a rank", "FILE")
    microbatches: int = flag(
        0,
        "parts that a pipeline cuts its batch into; 0 is as many as the file has, which no other number may be",
        bounds=Bounds(at_least=0, at_most=MOST_MICROBATCHES),
    )

    @property
    def num_microbatches(self) -> int:
        sizes = read_schedule(self.schedule_file).sizes
        assert sizes is not None, "a file shows every action"
        return self.microbatches or sizes[1]


def main() -> None:
    settings = read_settings(FileSettings, __doc__)
    schedule = read_schedule(settings.schedule_file)
    timeline = proved(schedule, settings, launcher_size() or world().size)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, _ = split(tokens, context=settings.context)
    comm = world()
    run = Run(settings, comm, samples="tokens", size=settings.context, loss_unit="nats a token")
    run.say(f"{draw(timeline)}\nthe bubble is {timeline.bubble_fraction:.1%} of the ideal time")

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


def read_schedule(path: str) -> Schedule:
    """Read the schedule to train by.

    Raises:
        ValueError: the file cannot be read, or holds no schedule.
    """
    try:
        return load(path)
    except OSError as error:
        raise ValueError(f"--schedule-file must be a file that can be read, got {path}: {error.strerror}") from error


if __name__ == "__main__":
    run_script(main)
