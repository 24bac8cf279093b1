"""A job of ranks: train a small GPT in a pipeline, and hold its peak of memory against what was said before."""

import gc
import sys
import tracemalloc

import numpy as np

import minigrad as mg
from distributed import world
from minigrad import optim, rng
from minigrad.models import gpt
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage
from pipeline.runtime.memory import stage_bytes
from pipeline.schedules.held import rank_bytes

NUM_MICROBATCHES, SAMPLES = 8, 4
RULE = optim.AdamW(lr=1e-3)


def main() -> None:
    """Fail where the two differ by more than 5%."""
    comm = world()
    layers = gpt.layers(gpt.GPTConfig(vocab_size=64, context=32, num_layers=6, num_heads=2, width=64, dropout=0.1))
    tokens = np.random.default_rng(0).integers(0, 64, (NUM_MICROBATCHES * SAMPLES, 33))
    x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    for name in sys.argv[1:]:
        schedule = SCHEDULES[name]
        kept = stage_bytes(
            layers,
            x[:SAMPLES],
            num_stages=schedule.num_stages(comm.size),
            loss_fn=lambda output: mg.cross_entropy(output, y[:SAMPLES]),
            rule=RULE,
        )
        said = rank_bytes(kept, schedule, num_ranks=comm.size, num_microbatches=NUM_MICROBATCHES)[comm.rank]
        gc.collect()
        tracemalloc.start()
        stages = PipelineStage.of(layers, comm, schedule)
        optimizer = optim.Optimizer(stages.parameters(), RULE)
        pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=NUM_MICROBATCHES, loss_fn=mg.cross_entropy)
        for step in range(2):  # the first one makes what is then kept
            tracemalloc.reset_peak()
            optimizer.zero_grad()
            with rng.scope(seed=0, step=step):
                pipe.step(x, y)
            peak = tracemalloc.get_traced_memory()[1]
            optimizer.step()
        tracemalloc.stop()
        assert abs(said / peak - 1) < 0.05, f"{name} on rank {comm.rank}: said {said:.0f}, measured {peak}"


if __name__ == "__main__":
    main()
