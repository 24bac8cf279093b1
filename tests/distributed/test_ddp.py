"""Data parallelism: every rank trains on its own samples, and all of them end where one process would.

Small hand-made losses, with gradients that are known, show one property each; a GPT and an MLP with dropout are
trained beside one process that sees all samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from common.train_gpt_settings import TrainSettings
from distributed import DistributedDataParallel, LocalWorld, Mesh, SoloCommunicator, broadcast_params, world
from distributed.data_parallel.comm_hooks import compressed
from minigrad.autodiff.mode import Capture, capturing
from minigrad.flat import zero_grad
from minigrad.models import GPT, MLP, GPTConfig
from minigrad.nn import Module
from minigrad.optim import SGD, AdamW, Optimizer, Rule
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

NUM_STEPS = 4
BUCKET_BYTES = 600  # several parameters in a bucket, and several buckets

# Many tests here leave parameters out on purpose; that this is reported has tests of its own.
pytestmark = pytest.mark.filterwarnings("ignore:no rank's loss depends on")


class Weights(Module):
    """Named parameters and no layers, for losses written by hand."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, mg.Parameter(value, name))


def reduced_backward(ddp: DistributedDataParallel, loss: mg.Tensor, num_samples: int = 1) -> None:
    mg.backward_with_hooks(loss, ddp.hooks(num_samples=num_samples))
    ddp.wait()


def mean_over_ranks(ranks: Any, value: Callable[[int], float]) -> float:
    return sum(map(value, range(ranks.size))) / ranks.size


# Equal to one process


@dataclass(frozen=True)
class Recipe:
    """A training run: `alone` carries it out in one process, `in_parallel` on many.

    Attributes:
        build: makes the model from a seed.
        batch: gives the samples of a step, x and y, from the step and their number.
        rule: of the optimizer.
        optimizes: which parameters the optimizer holds.
        trains: which parameters require grad in which step.
    """

    build: Callable[[int], Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    rule: Rule
    optimizes: Callable[[mg.Parameter], bool] = lambda p: True
    trains: Callable[[mg.Parameter, int], bool] = lambda p, step: True

    def optimizer(self, model: Module) -> Optimizer:
        return Optimizer([p for p in model.parameters() if self.optimizes(p)], self.rule)

    def steps(self, model: Module) -> Iterator[int]:
        for step in range(NUM_STEPS):
            for p in model.parameters():
                p.requires_grad = self.trains(p, step)
            yield step


def build_gpt(seed: int) -> GPT:
    config = GPTConfig(vocab_size=11, context=5, num_layers=2, num_heads=2, width=8, dropout=0.1)
    return GPT(config, seed=seed, dtype=np.float64)


def gpt_batch(step: int, num_samples: int) -> tuple[Any, Any]:
    ids = np.random.default_rng(step).integers(0, 11, (num_samples, 6))
    return ids[:, :-1], ids[:, 1:]


def build_mlp(seed: int) -> MLP:
    return MLP([6, 16, 8, 5], dropout=0.1, seed=seed, dtype=np.float64)


def mlp_batch(step: int, num_samples: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    return rng.standard_normal((num_samples, 6)), rng.integers(0, 5, num_samples)


MOMENTUM = SGD(0.1, momentum=0.9)
# The gradient of a key's bias is zero but for rounding, which a small eps would blow up into steps of full size.
ADAMW = AdamW(1e-2, eps=1e-3)
RECIPES = {
    "gpt-sgd": Recipe(build_gpt, gpt_batch, MOMENTUM),
    "gpt-adamw": Recipe(build_gpt, gpt_batch, ADAMW),
    "mlp-sgd": Recipe(build_mlp, mlp_batch, MOMENTUM),
    "mlp-adamw": Recipe(build_mlp, mlp_batch, ADAMW),
    "mlp-frozen-and-unfrozen": Recipe(
        build_mlp, mlp_batch, MOMENTUM, trains=lambda p, step: p.name != "fc1.weight" or step in (0, 3)
    ),
    "mlp-optimizer-of-the-head": Recipe(
        build_mlp,
        mlp_batch,
        MOMENTUM,
        optimizes=lambda p: p.name.startswith("fc2"),
        trains=lambda p, step: p.name.startswith("fc2"),
    ),
}


def samples_by_rank(step: int, size: int) -> list[int]:
    """Uneven, and of another unevenness in each step."""
    return [1 + (3 * rank + step) % 4 for rank in range(size)]


def loss_of(model: Module, x: Any, y: Any, step: int, first_sample: int = 0) -> mg.Tensor:
    with mg.rng.scope(seed=7, step=step, first_sample=first_sample):
        return mg.cross_entropy(model(x), y)


def grads_of(model: Module) -> dict[str, Any]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: np.zeros(()) if grad is None else grad.copy() for name, grad in grads.items()}


def alone(recipe: Recipe, size: int) -> list[dict[str, Any]]:
    """Return the gradients of every step, then the parameters at the end, of one process with the samples of `size`."""
    model = recipe.build(0)
    optimizer = recipe.optimizer(model)
    history = []
    for step in recipe.steps(model):
        mg.backward(loss_of(model, *recipe.batch(step, sum(samples_by_rank(step, size))), step))
        history.append(grads_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*history, model.state_dict()]


def in_parallel(comm: Any, recipe: Recipe, *, optimizer_first: bool = False) -> list[dict[str, Any]]:
    """Return on each rank what `alone` returns."""
    model = recipe.build(comm.rank)  # equal only once rank 0's values are broadcast
    early = recipe.optimizer(model) if optimizer_first else None
    ddp = DistributedDataParallel(model, comm, bucket_bytes=BUCKET_BYTES)
    optimizer = early or recipe.optimizer(model)
    history = []
    for step in recipe.steps(model):
        counts = samples_by_rank(step, comm.size)
        x, y = recipe.batch(step, sum(counts))
        hooks = ddp.hooks(num_samples=counts[comm.rank])
        mine = slice(ddp.first_sample, ddp.first_sample + counts[comm.rank])
        mg.backward_with_hooks(loss_of(model, x[mine], y[mine], step, ddp.first_sample), hooks)
        ddp.wait()
        history.append(grads_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*history, model.state_dict()]


def bits(history: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    return [{name: array.tobytes() for name, array in arrays.items()} for arrays in history]


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_one_process(ranks, name, optimizer_first):
    expected = alone(RECIPES[name], ranks.size)

    def program(comm):
        history = in_parallel(comm, RECIPES[name], optimizer_first=optimizer_first)
        for arrays, expected_arrays in zip(history, expected, strict=True):
            for key in expected_arrays:
                np.testing.assert_allclose(arrays[key], expected_arrays[key], rtol=1e-10, atol=1e-12, err_msg=key)
        return bits(history)

    results = ranks.run(program)
    assert all(result == results[0] for result in results)


def test_two_runs_have_the_same_bits(ranks):
    recipe = RECIPES["gpt-sgd"]
    first, second = (ranks.run(lambda comm: bits(in_parallel(comm, recipe))) for _ in range(2))
    assert first == second


def test_replicas_start_as_rank_0(ranks):
    expected = build_mlp(0).state_dict()

    def program(comm):
        model = build_mlp(comm.rank)
        DistributedDataParallel(model, comm)
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(value, expected[name])

    ranks.run(program)


def test_parameters_are_broadcast_from_any_root_wherever_they_lie(ranks):
    def program(comm):
        model = Weights(a=float(comm.rank), b=np.full(3, comm.rank, np.float32), empty=np.zeros((0, 2)))
        if comm.rank == 0:  # one rank has them in flats of its own
            Optimizer([model.a], SGD(1.0))
        broadcast_params(model.parameters(), comm, root=comm.size - 1)
        assert model.a.data == comm.size - 1
        np.testing.assert_array_equal(model.b.data, [comm.size - 1] * 3)

    ranks.run(program)


def test_a_broadcast_between_forward_and_backward_is_noticed(ranks):
    def program(comm):
        model = Weights(w=np.ones(2))
        Optimizer(model.parameters(), SGD(1.0))  # the memory has its place
        loss = (model.w * model.w).sum()
        broadcast_params(model.parameters(), comm)
        with pytest.raises(RuntimeError, match=r"needs 'w' .* as it was in the forward, but it was changed"):
            mg.backward(loss)

    ranks.run(program)


def test_mean_weighs_as_the_gradients_do(ranks):
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        values = np.arange(comm.size) ** 2
        assert ddp.mean(comm.rank**2) == pytest.approx(values.mean(), rel=1e-12)
        assert ddp.mean(mg.Tensor(float(comm.rank**2))) == pytest.approx(values.mean(), rel=1e-12)
        counts = samples_by_rank(0, comm.size)
        ddp.hooks(num_samples=counts[comm.rank])
        assert ddp.mean(comm.rank**2) == pytest.approx(np.average(values, weights=counts), rel=1e-12)

    ranks.run(program)


@pytest.mark.ranks(2, 3)
def test_the_communicator_averages_where_all_ranks_have_the_same_share(ranks):
    """And nowhere else: not where one rank alone could know, nor where the share is not 1 / size."""

    def program(comm):
        averaged = []
        model = Weights(w=1.0)
        ddp = DistributedDataParallel(model, comm)
        average = ddp.comm.average
        ddp.comm.average = lambda array: averaged.append(array.size) or average(array)
        for samples, options, is_even in [
            ([4] * comm.size, {}, True),
            (samples_by_rank(1, comm.size), {}, False),
            ([4] * comm.size, {"mean_over": 4.0}, False),
        ]:
            averaged.clear()
            zero_grad(model.parameters())
            hooks = ddp.hooks(num_samples=samples[comm.rank], **options)
            mg.backward_with_hooks(model.w * float(comm.rank), hooks)
            ddp.wait()
            assert averaged == [1] * is_even
            np.testing.assert_allclose(model.w.grad, np.average(range(comm.size), weights=samples), rtol=1e-15)

    ranks.run(program)


def test_first_sample_counts_those_of_the_ranks_before(ranks):
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        counts = samples_by_rank(1, comm.size)
        ddp.hooks(num_samples=counts[comm.rank])
        assert ddp.first_sample == sum(counts[: comm.rank])

    ranks.run(program)


# Inside the backward


def log_launches(ddp: DistributedDataParallel, log: list[str]) -> None:
    """Write into `log` which parameters each launch carries."""
    allreduce = ddp.comm.allreduce

    def logged(array: Any, **kwargs: Any) -> Any:
        if kwargs:  # which parameters were reached: no gradients
            return allreduce(array, **kwargs)
        names = [p.name for p in ddp.params if p.grad is not None and np.may_share_memory(p.grad, array)]
        log.append(f"launch {' '.join(names) or 'no gradient'}")
        return allreduce(array)

    ddp.comm.allreduce = logged


def logged_product(name: str, log: list[str]) -> Callable[..., mg.Tensor]:
    """Return an op, x @ w, that writes each of its vjps into `log` as it runs."""

    def product(x, w):
        def into_x(g):
            log.append(f"{name} into x")
            return g @ w.T

        def into_w(g):
            log.append(f"{name} into w")
            return x.T @ g

        return x @ w, (into_x, into_w)

    return mg.op(product)


def test_each_layer_is_launched_before_the_earlier_layers_run(ranks):
    def program(comm):
        model = Weights(w0=np.eye(3), w1=np.eye(3), w2=np.eye(3))
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        log = []
        log_launches(ddp, log)
        x = np.ones((2, 3))
        for name in ("w0", "w1", "w2"):
            x = logged_product(name, log)(x, getattr(model, name))
        hooks = ddp.hooks(num_samples=1) + mg.Hooks(on_grad_ready=lambda p: log.append(f"{p.name} ready"))
        mg.backward_with_hooks(x.sum(), hooks)
        ddp.wait()
        return log

    expected = [
        *("w2 into x", "w2 into w", "launch w2", "w2 ready"),
        *("w1 into x", "w1 into w", "launch w1", "w1 ready"),
        *("w0 into w", "launch w0", "w0 ready"),
    ]
    assert ranks.run(program) == [expected] * ranks.size


@pytest.mark.parametrize("sizes", [(3, 5, 7), (4, 4, 4)])  # a wrong pairing of equal sizes would raise nothing
def test_ranks_whose_gradients_arrive_in_another_order_reduce_the_same_buckets(ranks, sizes):
    def program(comm):
        model = Weights(**{f"p{i}": np.zeros(size) for i, size in enumerate(sizes)})
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        launches, arrivals = [], []
        log_launches(ddp, launches)
        order = np.roll([0, 1, 2], comm.rank)
        terms = [(comm.rank + 1) * (i + 1) * getattr(model, f"p{i}").sum() for i in order]
        loss = terms[0] + terms[1] + terms[2]
        hooks = ddp.hooks(num_samples=1) + mg.Hooks(on_grad_ready=lambda p: arrivals.append(p.name))
        mg.backward_with_hooks(loss, hooks)
        ddp.wait()
        for i, p in enumerate(ddp.params):
            np.testing.assert_allclose(p.grad, np.full(sizes[i], (comm.size + 1) / 2 * (i + 1)), rtol=1e-12)
        assert launches == ["launch p2", "launch p1", "launch p0"]
        return arrivals

    arrivals = ranks.run(program)
    assert len({tuple(arrival) for arrival in arrivals}) == min(ranks.size, 3)  # they did differ


def test_collectives_of_the_caller_do_not_meet_the_launches(ranks):
    def program(comm):
        model = Weights(a=np.ones(1), b=np.ones(1))
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        own = []

        def call(p):
            if (p.name == "a") == (comm.rank == 0):  # rank 0 calls after both launches, the others between them
                own.append(comm.allreduce(np.array([100.0])))

        hooks = ddp.hooks(num_samples=1) + mg.Hooks(on_grad_ready=call)
        mg.backward_with_hooks((model.a * model.b).sum(), hooks)
        ddp.wait()
        assert own[0].wait() == 100 * comm.size
        assert (model.a.grad[0], model.b.grad[0]) == pytest.approx((1, 1))

    ranks.run(program)


def test_messages_may_progress_after_every_op(ranks):
    def program(comm):
        model = Weights(a=1.0)
        ddp = DistributedDataParallel(model, comm)
        calls = []
        ddp.comm.progress = lambda: calls.append("progress")
        reduced_backward(ddp, model.a * 2.0 * 3.0 * 4.0)
        assert len(calls) == 3

    ranks.run(program)


def test_an_exception_in_a_hook_reaches_the_caller(ranks):
    def boom(p):
        raise ValueError(f"boom at {p.name}")

    def program(comm):
        model = Weights(w=1.0)
        ddp = DistributedDataParallel(model, comm)
        with pytest.raises(ValueError, match="boom at w"):
            mg.backward_with_hooks(model.w * 2.0, mg.Hooks(on_grad_ready=boom) + ddp.hooks(num_samples=1))

    ranks.run(program)


def test_an_exception_in_a_hook_of_one_rank_ends_all():
    def program(comm):
        def boom(p):
            if comm.rank == 1:
                raise ValueError("boom")

        model = Weights(w=1.0)
        ddp = DistributedDataParallel(model, comm)
        mg.backward_with_hooks(model.w * 2.0, mg.Hooks(on_grad_ready=boom) + ddp.hooks(num_samples=1))
        ddp.wait()

    with pytest.raises(ValueError, match="boom") as caught:
        LocalWorld(3).run(program)
    assert caught.value.__notes__ == ["in on_grad_ready of 'w'", "[rank 1]"]


# What a loss reaches


def test_a_parameter_that_some_ranks_do_not_reach(ranks):
    def uses_b(rank, step):
        return (rank + step) % 2 == 1

    def program(comm):
        model = Weights(a=1.0, b=1.0, c=np.ones((1, 1)))
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        optimizer = Optimizer(model.parameters(), SGD(0.0))
        for step in range(6):
            loss = 2.0 * (comm.rank + 1) * model.a
            if uses_b(comm.rank, step):
                loss = loss + 6.0 * model.b
            reduced_backward(ddp, loss)
            assert model.a.grad == pytest.approx(comm.size + 1)
            assert model.b.grad == pytest.approx(mean_over_ranks(comm, lambda rank, s=step: 6 * uses_b(rank, s)))
            assert model.c.grad == 0  # reached by nobody
            optimizer.zero_grad()

    ranks.run(program)


def test_a_parameter_that_nobody_reaches_decays_like_a_zero_gradient(ranks):
    def program(comm):
        model = Weights(used=np.ones((1, 1)), unused=np.ones((1, 1)))
        ddp = DistributedDataParallel(model, comm)
        optimizer = Optimizer(model.parameters(), SGD(1.0, weight_decay=0.1))
        reduced_backward(ddp, model.used.sum() * 2.0)
        optimizer.step()
        assert (model.used.data.item(), model.unused.data.item()) == pytest.approx((1 - 2.1, 1 - 0.1))

    ranks.run(program)


def test_a_parameter_used_twice_is_launched_once_when_both_are_summed(ranks):
    def program(comm):
        model = Weights(shared=np.ones(2), other=np.ones(2))
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        launches = []
        log_launches(ddp, launches)
        hidden = model.shared * (comm.rank + 1.0)
        reduced_backward(ddp, (hidden * model.other + model.shared * 10.0).sum())
        np.testing.assert_allclose(model.shared.grad, [10 + (comm.size + 1) / 2] * 2, rtol=1e-12)
        assert launches == ["launch other", "launch shared"]

    ranks.run(program)


def test_parameters_without_axes_without_elements_and_of_two_dtypes(ranks):
    def program(comm):
        model = Weights(scalar=2.0, empty=np.zeros((0, 3)), single=np.ones(3, np.float32), double=np.ones(3))
        ddp = DistributedDataParallel(model, comm)
        double = model.single.astype(dtype=np.float64) * model.double * (comm.rank + 1.0)
        reduced_backward(ddp, double.sum() * model.scalar + model.empty.sum())
        mean = (comm.size + 1) / 2
        assert model.scalar.grad == pytest.approx(3 * mean)
        assert model.scalar.grad.shape == ()
        assert model.empty.grad.shape == (0, 3)
        assert model.single.grad.dtype == np.float32
        np.testing.assert_allclose(model.single.grad, [2 * mean] * 3, rtol=1e-6)
        np.testing.assert_allclose(model.double.grad, [2 * mean] * 3, rtol=1e-12)

    ranks.run(program)


def test_tied_parameters_have_the_last_buckets(ranks):
    def program(comm):
        model = Weights(a=1.0, b=1.0, c=1.0)
        model.tied = [model.c]
        ddp = DistributedDataParallel(model, comm)
        launches = []
        log_launches(ddp, launches)
        reduced_backward(ddp, model.a * model.b * model.c * (comm.rank + 1.0))
        assert launches == ["launch a b", "launch c"]
        assert model.c.grad == pytest.approx((comm.size + 1) / 2)

    ranks.run(program)


# Several backwards


def test_a_plain_backward_accumulates_and_the_hooked_one_reduces_the_sum(ranks):
    def program(comm):
        model = Weights(w=1.0, early=1.0)
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        optimizer = Optimizer(model.parameters(), SGD(0.0))
        launches = []
        log_launches(ddp, launches)
        for _ in range(2):
            mg.backward(model.w * (comm.rank + 1.0) + model.early * (10.0 * comm.rank))
            assert launches == []
            reduced_backward(ddp, model.w * (2.0 * comm.rank + 3.0))  # does not reach `early`
            assert len(launches) == 2
            assert model.w.grad == pytest.approx(mean_over_ranks(comm, lambda rank: 3 * rank + 4))
            assert model.early.grad == pytest.approx(mean_over_ranks(comm, lambda rank: 10 * rank))
            optimizer.zero_grad()
            launches.clear()

    ranks.run(program)


def test_a_plain_backward_that_raised_leaves_no_trace_after_zero_grad(ranks):
    @mg.op
    def broken(x):
        def vjp(g):
            raise ValueError("boom")

        return x + 0, (vjp,)

    def program(comm):
        model = Weights(a=1.0, b=1.0)
        ddp = DistributedDataParallel(model, comm)
        with pytest.raises(ValueError, match="boom"):
            mg.backward(broken(model.a) * model.b)
        zero_grad(ddp.params)
        reduced_backward(ddp, model.a * (comm.rank + 1.0) + model.b)
        assert (model.a.grad, model.b.grad) == pytest.approx(((comm.size + 1) / 2, 1))

    ranks.run(program)


def set_to_none(params: list[mg.Parameter]) -> None:
    for p in params:
        p.grad = None


def fill_with_zeros(params: list[mg.Parameter]) -> None:
    for p in params:
        p.grad[...] = 0


def assign_zeros(params: list[mg.Parameter]) -> None:
    for p in params:
        p.grad = np.zeros(p.shape)


@pytest.mark.parametrize("clear", [set_to_none, fill_with_zeros, assign_zeros])
def test_gradients_cleared_by_hand_are_as_good_as_after_zero_grad(ranks, clear):
    """fairscale#354: what a user puts in place of a gradient is still the bucket's memory."""

    def program(comm):
        model = Weights(w=np.ones(2), v=np.ones(2))
        ddp = DistributedDataParallel(model, comm)
        reduced_backward(ddp, (model.w * model.v * (comm.rank + 1.0)).sum())
        clear(ddp.params)
        if clear is fill_with_zeros:  # a write into the array itself cannot be seen: refused, not guessed
            loss = (model.w * model.v * (comm.rank + 3.0)).sum()
            with pytest.raises(RuntimeError, match="its grad is already reduced over ranks; call zero_grad"):
                mg.backward_with_hooks(loss, ddp.hooks(num_samples=1))
            zero_grad(ddp.params)
        reduced_backward(ddp, (model.w * model.v * (comm.rank + 3.0)).sum())
        np.testing.assert_allclose(model.w.grad, [(comm.size + 5) / 2] * 2, rtol=1e-12)
        model.w.grad[:] = -1
        np.testing.assert_allclose(model.v.grad, [(comm.size + 5) / 2] * 2, rtol=1e-12)

    ranks.run(program)


def test_an_assigned_gradient_is_reduced_with_what_the_backward_adds(ranks):
    def program(comm):
        model = Weights(w=np.ones(2))
        ddp = DistributedDataParallel(model, comm)
        model.w.grad = np.array([10.0 * comm.rank, 0.0])
        reduced_backward(ddp, model.w.sum())
        np.testing.assert_allclose(model.w.grad, [1 + 10 * (comm.size - 1) / 2, 1], rtol=1e-12)

    ranks.run(program)


def test_parameters_that_no_rank_reaches_are_reported(ranks, recwarn):
    def program(comm):
        model = Weights(a=1.0, b=1.0, c=1.0, frozen=1.0)
        model.frozen.requires_grad = False
        ddp = DistributedDataParallel(model, comm)
        reduced_backward(ddp, model.a * (model.b if comm.rank == 0 else 1.0))
        assert ddp.buckets.unused == ["c"]
        assert model.b.grad == pytest.approx(1 / comm.size)
        zero_grad(ddp.params)
        mg.backward(model.c * 1.0)  # reached before: its gradient is there
        reduced_backward(ddp, model.a * model.b)
        assert ddp.buckets.unused == []

    ranks.run(program)


def test_the_report_is_a_warning_once_for_the_same_parameters():
    comm = SoloCommunicator()
    model = Weights(a=1.0, b=1.0, c=1.0)
    ddp = DistributedDataParallel(model, comm)
    for used, message in [
        (["a"], "no rank's loss depends on b, c: their gradients are zeros"),
        (["a"], None),
        (["a", "b"], "no rank's loss depends on c: their gradients are zeros"),
        (["a", "b", "c"], None),
    ]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduced_backward(ddp, mg.sum(mg.concatenate(*(getattr(model, name).reshape(1) for name in used))))
        assert [str(w.message) for w in caught] == ([] if message is None else [message])
        zero_grad(ddp.params)


# Comm hooks


def test_a_comm_hook_decides_how_buckets_travel(ranks):
    def program(comm):
        sizes = []

        def hook(grad, comm):
            sizes.append(grad.size)
            return comm.allreduce(grad)

        model = Weights(a=np.ones(3), b=np.ones(4))
        ddp = DistributedDataParallel(model, comm, bucket_bytes=8, comm_hook=hook)
        reduced_backward(ddp, (model.a.sum() + model.b.sum()) * (comm.rank + 1.0))
        assert sizes == [4, 3]
        np.testing.assert_allclose(model.a.grad, [(comm.size + 1) / 2] * 3, rtol=1e-12)

    ranks.run(program)


@pytest.mark.ranks(2, 3)
def test_gradients_live_in_the_memory_that_is_reduced_fastest(ranks):
    def program(comm):
        model = Weights(a=np.zeros(2), b=np.zeros(3, np.float32), c=np.zeros(4))
        taken = []
        lend = type(comm).buffer

        class Lender(type(comm)):
            def buffer(self, num_elements, dtype):
                taken.append(lend(self, num_elements, dtype))
                return taken[-1]

        comm.duplicate = lambda: lent(type(comm).duplicate(comm))

        def lent(duplicate):
            duplicate.__class__ = Lender
            return duplicate

        ddp = DistributedDataParallel(model, comm)
        assert sorted((memory.size, memory.dtype.name) for memory in taken) == [(3, "float32"), (6, "float64")]
        for p in ddp.params:
            p.grad_view()
            assert any(np.shares_memory(p.grad, memory) for memory in taken)

    ranks.run(program)


def test_half_precision_rounds_gradients_and_nothing_else(ranks):
    def program(comm):
        values = np.random.default_rng(comm.rank).standard_normal(1000)
        model = Weights(w=np.zeros(1000))
        ddp = DistributedDataParallel(model, comm, comm_hook=compressed(np.float16))
        reduced_backward(ddp, (model.w * values).sum())
        everyone = np.stack([np.random.default_rng(rank).standard_normal(1000) for rank in range(comm.size)])
        np.testing.assert_allclose(model.w.grad, everyone.mean(0), atol=4e-3)
        np.testing.assert_array_equal(model.w.grad, model.w.grad.astype(np.float16))  # it did travel as float16
        assert model.w.grad.dtype == np.float64
        copies = comm.allgather(model.w.grad.copy()).wait()
        np.testing.assert_array_equal(copies, np.broadcast_to(model.w.grad, copies.shape))

    ranks.run(program)


def test_most_of_a_default_gpt_travels_while_its_backward_still_computes():
    """Buckets that are too large launch all at the end, and nothing is hidden."""
    defaults = TrainSettings()
    config = GPTConfig(defaults.vocab, 8, defaults.layers, defaults.heads, defaults.width)
    model = GPT(config)
    ddp = DistributedDataParallel(model, SoloCommunicator())
    launched: list[int] = []
    look = mg.Hooks(between_ops=lambda: launched.append(ddp.buckets.num_launched))
    ids = np.arange(8).reshape(1, 8)
    mg.backward_with_hooks(mg.cross_entropy(model(ids), ids), ddp.hooks(num_samples=1) + look)
    assert launched[len(launched) // 2] >= ddp.buckets.num_buckets // 3 >= 3
    assert launched[-5] >= ddp.buckets.num_buckets - 2  # the last, small ones: embeddings


# Calls in the wrong order


def begun(comm: Any) -> tuple[Weights, DistributedDataParallel, Optimizer]:
    """A model whose gradients are on their way."""
    model = Weights(w=1.0, v=1.0)
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), SGD(1.0))
    mg.backward_with_hooks(model.w * model.v * 2.0, ddp.hooks(num_samples=1))
    return model, ddp, optimizer


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (
            lambda model, ddp, optimizer: optimizer.step(),
            r"optimizer\.step\(\) with 'w': .* being reduced .* call wait\(\) first",
        ),
        (
            lambda model, ddp, optimizer: optimizer.zero_grad(),
            r"zero_grad\(\) of 'w': .* being reduced .* call wait\(\) first",
        ),
        (lambda model, ddp, optimizer: mg.optim.clip_by_global_norm(ddp.params, 1.0), r"the norm of 'w': .* wait\(\)"),
        (lambda model, ddp, optimizer: setattr(model.w, "grad", None), r"a new grad for 'w': .* wait\(\) first"),
        (lambda model, ddp, optimizer: mg.backward(model.w * 1.0), r"backward into 'w': .* being reduced .* wait\(\)"),
        (
            lambda model, ddp, optimizer: mg.backward_with_hooks(model.w * 1.0, ddp.hooks(num_samples=1)),
            r"a new backward before the last one was reduced .*; call wait\(\), or after an exception cancel\(\)$",
        ),
    ],
)
def test_before_wait_no_one_may_use_the_gradients(ranks, call, rule):
    def program(comm):
        model, ddp, optimizer = begun(comm)
        with pytest.raises(RuntimeError, match=rule):
            call(model, ddp, optimizer)
        ddp.wait()
        optimizer.step()
        assert (model.w.data, model.v.data) == (-1, -1)

    ranks.run(program)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_into_reduced_gradients_is_refused(ranks, hooked):
    def program(comm):
        model, ddp, _ = begun(comm)
        ddp.wait()
        hooks = ddp.hooks(num_samples=1) if hooked else None
        with pytest.raises(RuntimeError, match="backward into 'w': its grad is already reduced over ranks; call zero"):
            mg.backward_with_hooks(model.w * 1.0, hooks)
        zero_grad(ddp.params)
        reduced_backward(ddp, model.w * 5.0)
        assert (model.w.grad, model.v.grad) == (pytest.approx(5), 0)

    ranks.run(program)


def test_wait_without_a_backward_and_wait_twice_are_refused(ranks):
    def program(comm):
        model = Weights(w=1.0)
        ddp = DistributedDataParallel(model, comm)
        rule = rf"\[rank {comm.rank}\] wait\(\) without a reduction; run a backward with the hooks first"
        with pytest.raises(RuntimeError, match=rule):
            ddp.wait()
        reduced_backward(ddp, model.w * 2.0)
        with pytest.raises(RuntimeError, match=rule):
            ddp.wait()

    ranks.run(program)


def test_the_same_gradients_cannot_be_reduced_by_two_at_once(ranks):
    def program(comm):
        model = Weights(w=1.0)
        one, two = DistributedDataParallel(model, comm), DistributedDataParallel(model, comm)
        with pytest.raises(RuntimeError, match="a second reduction of 'w': its grad is being reduced over ranks"):
            mg.backward_with_hooks(model.w * 2.0, one.hooks(num_samples=1) + two.hooks(num_samples=1))

    ranks.run(program)


def test_a_parameter_that_is_not_reduced_must_not_be_reached(ranks):
    def program(comm):
        model, stranger = Weights(w=1.0), mg.Parameter(1.0, "stranger")
        ddp = DistributedDataParallel(model, comm)
        rule = rf"\[rank {comm.rank}\] backward reaches 'stranger', which is not among the parameters to reduce"
        with pytest.raises(ValueError, match=rule):
            mg.backward_with_hooks(model.w * stranger, ddp.hooks(num_samples=1))
        reduced_backward(ddp, model.w * 2.0)
        assert model.w.grad == pytest.approx(2)

    ranks.run(program)


@pytest.mark.parametrize("num_samples", [0, -2])
def test_a_rank_without_samples_is_an_error_on_all(ranks, num_samples):
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        mine = num_samples if comm.rank == comm.size - 1 else 3
        with pytest.raises(ValueError, match="every rank needs num_samples of at least 1") as caught:
            ddp.hooks(num_samples=mine)
        return str(caught.value)

    counts = [3] * (ranks.size - 1) + [num_samples]
    assert ranks.run(program) == [f"every rank needs num_samples of at least 1, got {counts} by rank"] * ranks.size


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weight_that_cannot_be_one_is_an_error_on_all(ranks, weight):
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        with pytest.raises(ValueError, match="weights must be at least 0 and finite") as caught:
            ddp.hooks(num_samples=3, weight=weight if comm.rank == comm.size - 1 else 2.0)
        return str(caught.value)

    weights = [2.0] * (ranks.size - 1) + [weight]
    assert all(message.endswith(f"got {weights} by rank") for message in ranks.run(program))


def test_weights_that_are_all_0_are_an_error_on_all(ranks):
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        with pytest.raises(ValueError, match=r"and one of them above 0, .* got \[0\.0.*\] by rank"):
            ddp.hooks(num_samples=3, weight=0)

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_weight_on_one_rank_alone_is_an_error_on_all(ranks):
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        with pytest.raises(ValueError, match=r"every rank needs one or none does, got \[5\.0, None\] by rank"):
            ddp.hooks(num_samples=3, weight=None if comm.rank else 5.0)

    ranks.run(program)


def test_losses_and_gradients_weigh_by_what_counts_where_that_is_said(ranks):
    def program(comm):
        model = Weights(w=1.0)
        ddp = DistributedDataParallel(model, comm)
        unit = 4 + 3 * comm.rank  # what weighs 1 on this rank: on another it is something else
        mg.backward_with_grad(model.w * 6.0, 8 / unit)  # a mean over 8
        hooks = ddp.hooks(num_samples=1, weight=9.0 + comm.rank, mean_over=unit)
        mg.backward_with_grad(model.w * float(comm.rank), (1 + comm.rank) / unit, hooks=hooks)
        ddp.wait()
        total = sum(9 + rank for rank in range(comm.size))
        expected = sum(6 * 8 + rank * (1 + rank) for rank in range(comm.size)) / total
        assert model.w.grad == pytest.approx(expected, rel=1e-12)
        assert (ddp.first_sample, ddp.share) == (comm.rank, (9 + comm.rank) / total)

    ranks.run(program)


@pytest.mark.parametrize("mean_over", [0.0, -2.0, float("nan"), float("inf")])
def test_a_weight_that_nothing_can_be_divided_by_is_refused(mean_over):
    ddp = DistributedDataParallel(Weights(w=1.0), SoloCommunicator())
    with pytest.raises(ValueError, match=f"mean_over must be above 0 and finite, got {mean_over}"):
        ddp.hooks(num_samples=1, mean_over=mean_over)


# Ranks that differ


def test_a_mean_that_one_rank_alone_asks_for_is_one_error_that_names_both_calls():
    def program(comm):
        ddp = DistributedDataParallel(Weights(w=1.0), comm)
        if comm.rank == 0:
            ddp.mean(1.0)
        ddp.hooks(num_samples=2)

    with pytest.raises(
        RuntimeError, match=r"rank 0 calls allreduce .*DistributedDataParallel\.mean\) and rank 1 calls all"
    ):
        LocalWorld(2, timeout_seconds=10).run(program)


def error_of_construction(comm: Any, model: Module, **options: Any) -> str:
    with pytest.raises(ValueError, match="all ranks need the same") as caught:
        DistributedDataParallel(model, comm, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"a": np.zeros(2), "c": np.zeros(3)}, "1 is 'b' float64[3] on rank 0 and 'c' float64[3]"),
        ({"a": np.zeros(2), "b": np.zeros((3, 1))}, "1 is 'b' float64[3] on rank 0 and 'b' float64[3, 1]"),
        ({"a": np.zeros(2, np.float32), "b": np.zeros(3)}, "0 is 'a' float64[2] on rank 0 and 'a' float32[2]"),
        ({"b": np.zeros(3), "a": np.zeros(2)}, "0 is 'a' float64[2] on rank 0 and 'b' float64[3]"),
        ({"a": np.zeros(2)}, "1 is 'b' float64[3] on rank 0 and missing"),
        ({"a": np.zeros(2), "b": np.zeros(3), "c": 1.0}, "2 is missing on rank 0 and 'c' float64[]"),
    ],
)
@pytest.mark.ranks(2, 3, 4)
def test_the_first_parameter_that_differs_is_named_on_every_rank(ranks, other, difference):
    def program(comm):
        model = Weights(**other) if comm.rank == comm.size - 1 else Weights(a=np.zeros(2), b=np.zeros(3))
        return error_of_construction(comm, model)

    rule = "all ranks need the same parameters in the same order, but parameter"
    assert ranks.run(program) == [f"{rule} {difference} on rank {ranks.size - 1}"] * ranks.size


@pytest.mark.ranks(2, 3, 4)
def test_buckets_of_another_size_on_one_rank_are_an_error_on_all(ranks):
    def program(comm):
        model = Weights(a=np.zeros(2), b=np.zeros(3))
        return error_of_construction(comm, model, bucket_bytes=1 if comm.rank == comm.size - 1 else 1000)

    difference = f"bucket 0 is ['b', 'a'] at 0 of 5 on rank 0 and ['b'] at 0 of 5 on rank {ranks.size - 1}"
    rule = "all ranks need the same buckets in the same order, but"
    assert ranks.run(program) == [f"{rule} {difference}"] * ranks.size


def test_two_parameters_of_one_name_are_refused(ranks):
    def program(comm):
        model = Weights(a=np.zeros(2))
        model.b = mg.Parameter(np.zeros(3), "a")
        with pytest.raises(ValueError, match="parameter names must be unique, got 'a' twice"):
            DistributedDataParallel(model, comm)

    ranks.run(program)


# Buffers


class Tabled(Module):
    def __init__(self, value: float, shape: tuple[int, ...] = (2,)) -> None:
        self.w = mg.Parameter(1.0, "w")
        self.table = mg.nn.Buffer(np.full(shape, value), "table")


def test_buffers_start_as_those_of_rank_0_and_are_each_ranks_own_until_synced(ranks):
    def program(comm):
        model = Tabled(float(comm.rank + 1))
        ddp = DistributedDataParallel(model, comm)
        np.testing.assert_array_equal(model.table.data, [1, 1])
        model.table.data = np.full(2, 10.0 + comm.rank)
        reduced_backward(ddp, model.w * 2.0)
        np.testing.assert_array_equal(model.table.data, [10 + comm.rank] * 2)
        ddp.sync_buffers()
        np.testing.assert_array_equal(model.table.data, [10, 10])

    ranks.run(program)


class Running(Module):
    """A running mean that each forward assigns anew."""

    def __init__(self, name: str = "w") -> None:
        self.w = mg.Parameter(1.0, name)
        self.mean = mg.nn.Buffer(np.zeros(()), "mean")

    def __call__(self, x: Any) -> mg.Tensor:
        data = x.data if isinstance(x, mg.Tensor) else x
        self.mean = mg.nn.Buffer(0.9 * self.mean.data + 0.1 * data.mean(), "mean")
        return x * self.w


def test_a_buffer_that_is_assigned_anew_is_the_one_that_is_synced(ranks):
    def program(comm):
        model = Running()
        ddp = DistributedDataParallel(model, comm)
        reduced_backward(ddp, model(np.full(2, 10.0 * (comm.rank + 1))).sum())
        assert model.mean.data == pytest.approx(comm.rank + 1.0)
        ddp.sync_buffers()
        assert model.mean.data == pytest.approx(1.0)
        assert model.state_dict()["mean"] == pytest.approx(1.0)

    ranks.run(program)


@pytest.mark.ranks(2, 4)
def test_buffers_of_stages_are_broadcast_and_synced_as_those_of_a_module_are(ranks):
    def program(comm):
        mesh = Mesh(comm, dp=2, pp=comm.size // 2)
        schedule = SCHEDULES["1f1b"]
        layers = [(f"running{i}", lambda param, name=f"w{i}": Running(name)) for i in range(mesh.pp.size)]
        stages = PipelineStage.of(layers, mesh.pp, schedule, dtype=np.float64)
        (stage,) = stages
        (running,) = stage.layers
        running.mean.data = float(comm.rank)
        ddp = DistributedDataParallel(stages, mesh.dp)
        assert running.mean.data == mesh.pp.rank  # that of the first replica
        pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=2, loss_fn=lambda output, y: output.mean())
        pipe.step(np.full(4, comm.rank + 1.0), np.zeros(4), hooks=ddp.hooks(num_samples=4))
        ddp.wait()
        ddp.sync_buffers()
        return running.mean.data.item()

    means = ranks.run(program)
    assert means[: ranks.size // 2] == means[ranks.size // 2 :]


@pytest.mark.ranks(2)
def test_buffers_that_differ_at_a_sync_are_an_error_on_all(ranks):
    def program(comm):
        model = Tabled(0.0)
        ddp = DistributedDataParallel(model, comm)
        if comm.rank == 1:
            del model.table
            model.table = mg.nn.Buffer(np.zeros(3), "table")
        with pytest.raises(ValueError, match=r"buffer 0 is 'table' float64\[2\] on rank 0 and 'table' float64\[3\] on"):
            ddp.sync_buffers()

    ranks.run(program)


def test_buffers_of_another_shape_are_an_error_on_all(ranks):
    def program(comm):
        return error_of_construction(comm, Tabled(0.0, shape=(2 + (comm.rank == comm.size - 1),)))

    if ranks.size > 1:
        difference = f"buffer 0 is 'table' float64[2] on rank 0 and 'table' float64[3] on rank {ranks.size - 1}"
        rule = "all ranks need the same buffers in the same order, but"
        assert ranks.run(program) == [f"{rule} {difference}"] * ranks.size


def test_a_model_without_parameters_is_nothing_to_reduce(ranks):
    def program(comm):
        ddp = DistributedDataParallel(Weights(), comm)
        x = mg.Tensor(np.ones(2), requires_grad=True)
        mg.backward_with_hooks(mg.sum(x * 2.0), ddp.hooks(num_samples=1))
        ddp.wait()
        assert ddp.mean(float(comm.rank)) == pytest.approx((comm.size - 1) / 2)

    ranks.run(program)


@pytest.mark.parametrize("kind", ["data parallel", "pipeline"])
def test_a_step_that_is_captured_for_one_rank_alone_is_refused(kind: str) -> None:
    """Its graph would keep what ranks told each other once: their samples, by which they weigh, and their shapes."""

    def program(comm: Any) -> None:
        if kind == "data parallel":
            ddp = DistributedDataParallel(MLP([3, 2]), comm)
            run = lambda: ddp.hooks(num_samples=1)  # noqa: E731
        else:
            schedule = SCHEDULES["gpipe"]
            stages = PipelineStage.of([("a", lambda _: mg.tanh), ("b", lambda _: mg.tanh)], comm, schedule)
            pipe = PipelineExecutor(stages, comm, schedule, num_microbatches=1, loss_fn=lambda x, y: mg.sum(x * y))
            run = lambda: pipe.evaluate(np.ones((2, 3)), np.ones((2, 3)))  # noqa: E731
        with (
            capturing(Capture.ALONE),
            pytest.raises(RuntimeError, match=r"ranks tell each other .*gather=comm\.gather_"),
        ):
            run()
        with capturing(Capture.TOGETHER):
            run()
        if kind == "data parallel":
            for given in ({"weight": 2.0}, {"mean_over": 2.0}):
                with capturing(Capture.TOGETHER), pytest.raises(RuntimeError, match="the weight of a loss cannot be"):
                    ddp.hooks(num_samples=1, **given)

    LocalWorld(2).run(program)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda model, comm: DistributedDataParallel(model.parameters(), comm),
            TypeError,
            r"takes a model with parameters\(\), got list",
        ),
        (lambda model, comm: DistributedDataParallel(model, 2), TypeError, r"such as world\(\), got int"),
        (
            lambda model, comm: DistributedDataParallel(model, comm, comm_hook=3),
            TypeError,
            "a comm_hook is a function of a bucket and a communicator, got 3",
        ),
        (
            lambda model, comm: DistributedDataParallel(model, comm, bucket_bytes=1.5),
            TypeError,
            "bucket_bytes must be an integer, got 1.5",
        ),
        (
            lambda model, comm: DistributedDataParallel(model, comm).hooks(num_samples=1.5),
            ValueError,
            r"num_samples must be a whole number, got \[1.5\] by rank",
        ),
        (
            lambda model, comm: DistributedDataParallel(model, comm)(1),
            TypeError,
            "'DistributedDataParallel' object is not callable",
        ),
    ],
)
def test_what_is_given_in_place_of_something_else_is_named(make, kind, words):
    # An attribute that a list or a number lacks said so, from inside; a half sample was cut off.
    with pytest.raises(kind, match=words):
        make(build_mlp(0), SoloCommunicator())


@pytest.mark.parametrize("make", [LocalWorld, lambda size, **options: world(**options)])
def test_no_wait_is_shorter_than_nothing(make):
    with pytest.raises(ValueError, match="timeout_seconds must be above 0, got -1"):
        make(2, timeout_seconds=-1)
