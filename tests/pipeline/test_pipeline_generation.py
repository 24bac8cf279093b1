"""Text from a pipeline: the tokens of one process, on every rank, whatever the layout."""

from itertools import islice

import numpy as np
import pytest

from distributed import LocalWorld
from minigrad.models import GPT, GPTConfig, gpt
from minigrad.models.generation import Sampling, generate
from pipeline import SCHEDULES, PipelineStage
from pipeline.generation import PipelineReader
from pipeline.generation import generate as generate_in_pipeline

CONFIG = GPTConfig(vocab_size=29, context=10, num_layers=4, num_heads=2, width=8, dropout=0.5)
SAMPLING = Sampling(temperature=0.7, seed=3)


def enlarge(params):
    for p in params:
        p.data = 4 * p.data  # or every token would be as likely as the next


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("zbv", 2), ("interleaved_1f1b", 2), ("gpipe", 1)])
def test_a_pipeline_writes_what_one_process_writes(schedule, num_ranks):
    model = GPT(CONFIG, dtype=np.float64)
    enlarge(model.parameters())
    expected = list(islice(generate(model, [5, 6, 7], sampling=SAMPLING), 25))  # past the context, too

    def program(comm):
        layers = gpt.layers(CONFIG, recompute=True)
        stages = PipelineStage.of(layers, comm, SCHEDULES[schedule], dtype=np.float64)
        enlarge(stages.parameters())
        tokens = generate_in_pipeline(stages, SCHEDULES[schedule], [5, 6, 7], context=10, sampling=SAMPLING)
        return list(islice(tokens, 25)), [stage.training for stage in stages]

    for tokens, training in LocalWorld(num_ranks).run(program):
        assert tokens == expected
        assert all(training)


def test_a_rank_keeps_what_its_own_blocks_have_read():
    def program(comm):
        stages = PipelineStage.of(gpt.layers(CONFIG), comm, SCHEDULES["1f1b"])
        reader = PipelineReader(stages, SCHEDULES["1f1b"], CONFIG.context)
        reader.read([1, 2])
        reader.read([1, 2, 3])
        return [(cache.length, cache.nbytes) for cache in reader.caches]

    assert LocalWorld(2).run(program) == [[(3, 2 * 10 * 8 * 4)] * 2] * 2
