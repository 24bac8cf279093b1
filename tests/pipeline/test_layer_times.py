"""Times of layers, for a cut by measured time."""

import time

import numpy as np
import pytest
from toy_pipeline import apply, dense

import minigrad as mg
from minigrad.models import gpt
from pipeline import cut_by_weights
from pipeline.runtime.layer_times import layer_seconds


@mg.op
def sleepy(x):
    """Take 10 ms forward and 20 ms backward."""

    def vjp(g):
        time.sleep(0.02)
        return g

    time.sleep(0.01)
    return x * 1, (vjp,)


def test_forward_and_backward_count_and_all_ranks_hear_the_same(ranks):
    layers = [dense("a", 4, 4), apply("slow", sleepy), dense("b", 4, 4), dense("c", 4, 4)]

    def program(comm):
        return layer_seconds(layers, np.ones((3, 4)) if comm.rank == 0 else None, comm, dtype=np.float64)

    first, *others = ranks.run(program)
    assert all(other == first for other in others)
    assert all(seconds > 0 for seconds in first)
    assert first[1] >= 0.03  # what it sleeps, forward and backward
    assert cut_by_weights(["a", "slow", "b", "c"], first, 2)[1].layer_stop == 4


@pytest.mark.ranks(1)
def test_a_gpt_with_dropout_and_integer_input(ranks):
    config = gpt.GPTConfig(vocab_size=17, context=6, num_layers=2, num_heads=2, width=8, dropout=0.1)
    ids = np.arange(12).reshape(2, 6)
    (seconds,) = ranks.run(lambda comm: layer_seconds(gpt.layers(config), ids, comm))
    assert len(seconds) == 4
    assert all(s > 0 for s in seconds)


def test_a_layer_that_rank_0_cannot_run_fails_on_every_rank(ranks):
    def program(comm):
        x = np.ones((3, 5))  # the layer takes 4
        with pytest.raises(RuntimeError, match=r"^\[rank 0\] \w+: ") as caught:
            layer_seconds([dense("a", 4, 4)], x if comm.rank == 0 else None, comm, dtype=np.float64)
        comm.barrier()
        return str(caught.value)

    assert len(set(ranks.run(program))) == 1


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"num_runs": 0}, ValueError, "num_runs must be at least 1, got 0"),
        ({"comm": None}, TypeError, r"layer_seconds takes a communicator, such as world\(\), got NoneType"),
        ({"layers": [3]}, TypeError, r"a pipeline's layers are \(name, factory\), such as .*, got 3"),
        ({"x": [[1.0] * 4]}, RuntimeError, r"^\[rank 0\] TypeError: x must be an array, got list"),
    ],
    ids=["num_runs", "comm", "layers", "x"],
)
def test_what_it_cannot_measure_is_said(ranks, changed, error, words):
    """What came was min() of nothing, or an attribute that something inside does not have."""

    def program(comm):
        given = {"layers": [dense("a", 4, 4)], "x": np.ones((3, 4)), "comm": comm, "dtype": np.float64}
        with pytest.raises(error, match=words):
            layer_seconds(**given | changed)

    ranks.run(program)
