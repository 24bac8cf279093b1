"""A job of ranks: train a small GPT in a pipeline, and hold its peak of memory against what was said before."""

import gc
import sys
import tracemalloc
from typing import Any

import numpy as np
from toy_pipeline import apply, dense, giving, join

import minigrad as mg
from distributed import world
from minigrad import optim, rng
from minigrad.models import gpt
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage
from pipeline.runtime.memory import stage_bytes
from pipeline.schedules.held import rank_bytes

NUM_MICROBATCHES, SAMPLES = 8, 4
RULE = optim.AdamW(lr=1e-3)


def small_gpt(*, recompute: bool = False) -> tuple[list[Any], Any, Any]:
    """Return layers, inputs and targets."""
    config = gpt.GPTConfig(vocab_size=64, context=32, num_layers=6, num_heads=2, width=64, dropout=0.1)
    layers = gpt.layers(config, recompute=recompute)
    tokens = np.random.default_rng(0).integers(0, 64, (NUM_MICROBATCHES * SAMPLES, 33))
    return layers, tokens[:, :-1].copy(), tokens[:, 1:].copy()


def small_unet() -> tuple[list[Any], Any, Any]:
    """Return the same of a model with skip connections."""
    layers = [
        giving(dense("down0", 32, 32), "a"),
        giving(apply("down1", lambda x: x * 2.0), "b"),
        *(dense(f"mid{i}", 32, 32) for i in range(36)),
        join("up1", 32, 32, "b"),
        join("up0", 32, 32, "a"),
    ]
    generator = np.random.default_rng(0)
    samples = NUM_MICROBATCHES * 1024
    return layers, generator.standard_normal((samples, 32)).astype(np.float32), generator.integers(0, 32, samples)


MODELS = {"gpt": small_gpt, "recomputed": lambda: small_gpt(recompute=True), "unet": small_unet}


def main() -> None:
    """Fail where the two differ by more than 5%. Schedules are given with a model, as gpt:1f1b."""
    comm = world()
    gc.freeze()  # hundreds of collections are to come, and none need look at what was imported
    for name in sys.argv[1:]:
        model, _, schedule_name = name.partition(":")
        layers, x, y = MODELS[model]()
        schedule = SCHEDULES[schedule_name]
        samples = len(x) // NUM_MICROBATCHES
        kept = stage_bytes(
            layers,
            x[:samples],
            num_stages=schedule.num_stages(comm.size),
            loss_fn=lambda output, y=y[:samples]: mg.cross_entropy(output, y),
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
