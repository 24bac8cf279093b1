"""What a stage keeps, in bytes: counted for shapes that can be counted by hand, and against a real pipeline's peak."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jobs import needs_mpirun, run_job
from toy_pipeline import apply, dense, giving, join

import minigrad as mg
from minigrad import optim
from minigrad.models import mlp
from pipeline import SCHEDULES
from pipeline.cli.main import main
from pipeline.runtime.memory import stage_bytes
from pipeline.schedules.held import Gift, Measured, StageBytes, from_json, rank_bytes, to_json
from pipeline.schedules.schedule import round_robin
from pipeline.schedules.simulate import simulate

pytestmark = pytest.mark.usefixtures("young_heap")
JOB = Path(__file__).parents[1] / "support" / "memory_peak.py"


def measured(width=512, samples=256, **options):
    x = np.ones((samples, width), np.float32)
    y = np.zeros(samples, np.int64)
    layers = mlp.layers([width, width, width, width])
    return stage_bytes(layers, x, loss_fn=lambda output: mg.cross_entropy(output, y), **options)


@pytest.mark.long
def test_weights_gradients_and_state_are_counted():
    one, two, three = measured(num_stages=3, rule=optim.AdamW(lr=1e-3))
    weights = 4 * (512 * 512 + 512)
    for stage in (one, two, three):
        assert (stage.weights, stage.gradients, stage.optimizer) == (weights, weights, 2 * weights)
    assert measured(num_stages=3)[0].optimizer == 0
    assert one.static(num_shards=4) == 2.5 * weights
    assert one.static(num_shards=4, sharded=["gradients", "optimizer"]) == (1 + 3 / 4) * weights


def test_a_micro_batch_keeps_the_input_of_its_product_and_what_its_nonlinearity_needs():
    array = 4 * 256 * 512
    first, middle, _ = measured(num_stages=3)
    assert (first.message, middle.message) == (0, array)
    assert 0 < first.activations <= 1.1 * array  # its input is a part of the batch, which is there anyway
    assert array <= middle.activations <= 2.1 * array
    assert array <= middle.deferred <= 2.1 * array  # W needs the input and the cotangent


def test_a_rank_holds_what_its_schedule_keeps():
    stage = StageBytes(100, 100, 200, 10, 4, 13, 3, 3, 3, 2)
    schedule = SCHEDULES["1f1b"]
    assert rank_bytes([stage] * 4, schedule, num_ranks=4, num_microbatches=8) == [443, 433, 423, 413]
    sharded = rank_bytes([stage] * 4, schedule, num_ranks=4, num_microbatches=8, num_shards=2)
    assert sharded == [343, 333, 323, 313]
    assert rank_bytes([stage] * 4, SCHEDULES["zbv"], num_ranks=2, num_microbatches=8) == [843, 843]


def test_what_waits_for_a_later_stage_counts_once():
    """A tanh keeps its output, which its backward needs; a factor keeps nothing, so its gift is held besides."""
    x, y = np.ones((256, 64), np.float32), np.zeros((256, 64), np.float32)
    layers = [
        giving(dense("tanh", 64, 64), "b"),
        giving(apply("twice", lambda x: x * 2.0), "a"),
        dense("last", 64, 64),
        join("join", 64, 64, "a", "b"),
    ]
    stages = stage_bytes(layers, x, num_stages=4, loss_fn=lambda output: mg.mse(output, y))
    array = 4 * 256 * 64
    assert [[gift[:3] for gift in stage.gifts] for stage in stages] == [
        [(1, array, array), (3, array, array)],  # to the next stage first
        [(2, array, 0), (3, array, 0)],
        [(3, array, array)],
        [],
    ]
    found = from_json(to_json({4: stages}, num_microbatches=2, num_shards=1), "x")
    assert found.stages_of(4) == stages
    timeline = simulate(SCHEDULES["gpipe"].orders(4, 2), num_stages=4)
    plain = Measured(lambda _: [replace(stage, gifts=stage.gifts[:1]) for stage in stages])
    more = np.subtract(found.peaks(timeline, 4, round_robin), plain.peaks(timeline, 4, round_robin))
    # Rank 1 holds two values until rank 3 takes them. Rank 0 keeps its own anyway, but posts a receive for a gradient.
    assert list(more) == [array, 2 * array, 0, 0]
    assert found.activations(4)[:2] == [stages[0].activations, stages[1].activations + array]


@pytest.mark.parametrize(
    ("gift", "peak"),
    [
        # F0 F1 B1 W1 B0 W0, where F1 takes what F0 gave
        (Gift(1, 10), 65),  # in F1, which has it from F0, that kept nothing of it
        (Gift(1, 10, kept=10, taken=10), 60),  # after B1: its gradient waits for B0, and F0's tape has it still
        (Gift(1, 10, kept=10, taken=10, taken_later=10), 55),  # in F1, where it is in the tapes of both; and after B1
    ],
)
def test_two_stages_of_a_rank_keep_what_passes_between_them_once(gift, peak):
    stages = [StageBytes(0, 0, 0, 30, 0, 30, 0, 0, 0, 0, (gift,)), StageBytes(0, 0, 0, 35, 20, 35, 0, 0, 0, 10)]
    assert rank_bytes(stages, SCHEDULES["zbv"], num_ranks=1, num_microbatches=1) == [peak]


def test_a_message_is_held_until_the_next_one_goes_and_one_that_comes_has_a_buffer():
    """Rank 0 has sent F0's result, or F1's, and has posted the receive of a gradient; rank 1 has one or the other."""
    stages = [StageBytes(*[0] * 10, (Gift(1, 10),)), StageBytes(*[0] * 9, 10)]
    assert rank_bytes(stages, SCHEDULES["gpipe"], num_ranks=2, num_microbatches=2) == [20, 10]


def test_wrong_sizes_are_refused():
    stage = StageBytes(100, 100, 200, 10, 4, 13, 3, 3, 3, 2)
    with pytest.raises(ValueError, match="1f1b has 2 stages, got 3"):
        rank_bytes([stage] * 3, SCHEDULES["1f1b"], num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match=r"shared by at least 1 shard, got \['weight'\] and 2"):
        stage.static(num_shards=2, sharded=["weight"])


@pytest.mark.long
def test_the_command_measures_a_model(capsys):
    assert main(["memory", "mlp", "1f1b", "zbv", "--pp", "2", "--microbatches", "4"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "1f1b: 2 stages on 2 ranks, 4 micro-batches"
    assert [line.split()[0] for line in out[2:4]] == ["0", "1"]
    assert len(out[4].removeprefix("a rank needs").split()) == 2
    assert out[5].startswith("zbv: 4 stages on 2 ranks")
    assert main(["memory", "mlp", "--pp", "20"]) == 2
    assert "which must be at most the layers of the model" in capsys.readouterr().err


@needs_mpirun
@pytest.mark.long
def test_it_is_within_5_percent_of_the_peak_of_a_real_pipeline():
    names = ["gpt:interleaved_1f1b", "gpt:v_half", "unet:gpipe", "unet:1f1b", "unet:zbv", "recomputed:zero_bubble_h1"]
    result = run_job(["-m", "mpi4py", str(JOB), *names], ranks=2)
    assert result.returncode == 0, result.stderr[-2000:]
