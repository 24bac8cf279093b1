"""Going on after an exception in a backward: nothing of half a step is left, on one rank or on several."""

import numpy as np
import pytest
from toy_pipeline import X, Y, connect, four_layers

import minigrad as mg
from distributed import (
    BucketedTrainer,
    DistributedDataParallel,
    DistributedTrainer,
    SimpleTrainer,
    SoloCommunicator,
    TrainingConfig,
    Work,
)
from distributed.data_parallel.comm_hooks import allreduce
from minigrad.nn import Linear, Module, ParamGetter
from minigrad.optim import SGD, Optimizer, clip_by_global_norm


class Fuse(Module):
    """Two layers with an op between them whose vjp raises each error of `errors` once."""

    def __init__(self):
        param = ParamGetter(dtype=np.float64)
        self.first, self.second = Linear(param.at("first"), 3, 4), Linear(param.at("second"), 4, 2)
        self.errors = []

    def __call__(self, x):
        @mg.op
        def fuse(x):
            def vjp(g):
                if self.errors:
                    raise self.errors.pop()
                return g

            return x.copy(), (vjp,)

        return self.second(fuse(self.first(x)))


class Interrupted(Work):
    """Ctrl-C while somebody waits."""

    def test(self):
        return False

    def wait(self):
        raise KeyboardInterrupt


SAMPLES = np.random.default_rng(0).standard_normal((4, 3))
ERRORS = [MemoryError("no memory"), KeyboardInterrupt()]


def loss_of(model, scale=1.0):
    return (model(SAMPLES * scale) ** 2.0).mean()


def weights_of(model):
    return {name: value.copy() for name, value in model.state_dict().items()}


def undisturbed(num_steps=2):
    """Return the norms and the weights of some steps without an exception, in a plain loop."""
    model, norms = Fuse(), []
    optimizer = Optimizer(model.parameters(), SGD(0.1))
    for _ in range(num_steps):
        optimizer.zero_grad()
        mg.backward(loss_of(model))
        norms.append(clip_by_global_norm(optimizer.params, 1e9))
        optimizer.step()
    return norms, weights_of(model)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("zero_grad", ["first", "last"])
def test_a_single_rank_goes_on_as_if_nothing_had_been(error, zero_grad):
    model = Fuse()
    ddp = DistributedDataParallel(model, SoloCommunicator(), bucket_bytes=1)
    optimizer, norms = Optimizer(model.parameters(), SGD(0.1)), []

    def step():
        if zero_grad == "first":
            optimizer.zero_grad()
        mg.backward_with_hooks(loss_of(model), ddp.hooks(num_samples=4))
        ddp.wait()
        norms.append(clip_by_global_norm(ddp.params, 1e9))
        optimizer.step()
        if zero_grad == "last":
            optimizer.zero_grad()

    model.errors = [error]
    with pytest.raises(type(error)):
        step()
    step()
    step()
    expected_norms, expected = undisturbed()
    assert norms == expected_norms
    for name, values in weights_of(model).items():
        np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("kind", [SimpleTrainer, DistributedTrainer, BucketedTrainer])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_trainer_on_a_single_rank_goes_on_with_a_new_step(error, kind, num_parts):
    def trained(*errors):
        model = Fuse()
        comm = () if kind is SimpleTrainer else (SoloCommunicator(),)
        trainer = kind(model, *comm, TrainingConfig(grad_accum_steps=num_parts))
        if errors:
            for part in range(num_parts):  # in the last part of a step
                if part == num_parts - 1:
                    model.errors = list(errors)
                    with pytest.raises(type(errors[0])):
                        trainer.backward_and_step(loss_of(model), num_samples=4)
                else:
                    trainer.backward_and_step(loss_of(model, 3.0), num_samples=4)
        results = [trainer.backward_and_step(loss_of(model), num_samples=4) for _ in range(2 * num_parts)]
        metrics = results[num_parts - 1 :: num_parts]
        return [(m.step, m.loss, m.grad_norm) for m in metrics], weights_of(model)

    (found, weights), (expected, expected_weights) = trained(error), trained()
    assert found == expected
    for name, values in weights.items():
        np.testing.assert_array_equal(values, expected_weights[name])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("when", ["in the backward", "before it"])
def test_of_several_ranks_the_one_that_failed_cancels_and_all_leave_the_step_out(ranks, when):
    def program(comm):
        model = Fuse()
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        optimizer, words = Optimizer(model.parameters(), SGD(0.1)), []
        for step in range(3):
            try:
                optimizer.zero_grad()
                hooks = ddp.hooks(num_samples=4)
                if step == 1 and comm.rank == 1:
                    model.errors = [MemoryError("no memory")]
                    if when == "before it":
                        raise model.errors.pop()
                mg.backward_with_hooks(loss_of(model), hooks)
                ddp.wait()
            except (MemoryError, RuntimeError) as error:
                words.append(str(error))
                ddp.cancel()
                continue
            optimizer.step()
        return words, weights_of(model)

    _, expected = undisturbed()
    for rank, (words, weights) in enumerate(ranks.run(program)):
        dropped = "the backward of another rank ended with an exception: this step's gradients are dropped on all ranks"
        assert words == (
            ["no memory"] if rank == 1 else [f"[rank {rank}] {dropped}, which can go on with the next one"]
        )
        for name, values in weights.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-12)


@pytest.mark.ranks(2)
def test_of_several_ranks_one_that_failed_can_do_nothing_before_it_cancels(ranks):
    def program(comm):
        model = Fuse()
        ddp = DistributedDataParallel(model, comm)
        optimizer = Optimizer(model.parameters(), SGD(0.1))
        model.errors = [MemoryError()]
        with pytest.raises(MemoryError):
            mg.backward_with_hooks(loss_of(model), ddp.hooks(num_samples=4))
        held = r"'first.w.*': its backward ended with an exception while other ranks wait .* call cancel\(\) first"
        for call in (optimizer.step, optimizer.zero_grad, lambda: mg.backward(loss_of(model))):
            with pytest.raises(RuntimeError, match="backward ended with an exception while other ranks wait"):
                call()
        with pytest.raises(RuntimeError, match=held):
            optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"a new backward before the last .* after an exception cancel\(\)"):
            ddp.hooks(num_samples=4)
        with pytest.raises(
            RuntimeError, match=r"wait\(\) before every gradient was ready; after an exception .* cancel"
        ):
            ddp.wait()
        ddp.cancel()
        ddp.cancel()  # nothing is left to give up
        assert all(p.grad is None for p in ddp.params)
        mg.backward_with_hooks(loss_of(model), ddp.hooks(num_samples=4))
        ddp.cancel()  # after a whole backward too
        assert all(p.grad is None for p in ddp.params)

    ranks.run(program)


def test_a_comm_hook_that_raises_is_gone_on_from_too(ranks):
    def program(comm):
        model = Fuse()
        errors = [MemoryError("no memory for a copy")] if comm.rank == comm.size - 1 else []

        def hook(grad, comm):
            if errors:
                raise errors.pop()
            return allreduce(grad, comm)

        ddp = DistributedDataParallel(model, comm, bucket_bytes=1, comm_hook=hook)
        norms = []
        for _ in range(2):
            try:
                mg.backward_with_hooks(loss_of(model), ddp.hooks(num_samples=4))
                ddp.wait()
            except (MemoryError, RuntimeError):
                ddp.cancel()
                continue
            norms.append(clip_by_global_norm(ddp.params, 1e9))
        return norms

    expected, _ = undisturbed(1)
    for norms in ranks.run(program):
        assert norms == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(2)
def test_a_wait_that_was_interrupted_is_called_again(ranks):
    def program(comm):
        model = Fuse()
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        mg.backward_with_hooks(loss_of(model), ddp.hooks(num_samples=4))
        work = ddp.buckets.buckets[-1].work
        ddp.buckets.buckets[-1].work = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            ddp.wait()
        with pytest.raises(RuntimeError, match=r"cancel\(\) inside wait\(\): other ranks may take this step; wait\(\)"):
            ddp.cancel()
        ddp.buckets.buckets[-1].work = work
        ddp.wait()
        Optimizer(model.parameters(), SGD(0.1)).step()
        return weights_of(model)

    one, two = ranks.run(program)
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name])


@pytest.mark.ranks(2)
def test_a_cancel_that_was_interrupted_is_called_again(ranks):
    def program(comm):
        interrupts = [KeyboardInterrupt()] if comm.rank == 0 else []

        class Once(Interrupted):
            def __init__(self, work):
                self.work = work

            def wait(self):
                if interrupts and failed:
                    raise interrupts.pop()
                return self.work.wait()

        model, failed = Fuse(), False
        ddp = DistributedDataParallel(model, comm, comm_hook=lambda grad, comm: Once(allreduce(grad, comm)))
        hooks = ddp.hooks(num_samples=4)
        if comm.rank == 0:
            failed, model.errors = True, [MemoryError()]
            with pytest.raises(MemoryError):
                mg.backward_with_hooks(loss_of(model), hooks)
            with pytest.raises(KeyboardInterrupt):
                ddp.cancel()
            ddp.cancel()
        else:
            mg.backward_with_hooks(loss_of(model), hooks)
            with pytest.raises(RuntimeError, match="the backward of another rank ended with an exception"):
                ddp.wait()
        assert all(p.grad is None for p in ddp.params)
        mg.backward_with_hooks(loss_of(model), ddp.hooks(num_samples=4))
        ddp.wait()

    ranks.run(program)


def test_a_pipeline_of_one_rank_goes_on_and_keeps_nothing():
    comm = SoloCommunicator()
    fuse = Fuse()

    @mg.op
    def fused(x):
        def vjp(g):
            if fuse.errors:
                raise fuse.errors.pop()
            return g

        return x.copy(), (vjp,)

    layers = four_layers()
    layers.insert(2, ("fuse", lambda param: fused))

    def step(pipe, ddp):
        return pipe.step(X, Y, hooks=ddp.hooks(num_samples=len(X)))

    pipe, other = connect(comm, layers), connect(comm, layers)
    ddp, other_ddp = (DistributedDataParallel(p.stages, comm, bucket_bytes=1) for p in (pipe, other))
    fuse.errors = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        step(pipe, ddp)
    assert all(stage.num_in_flight == 0 for stage in pipe.stages)
    assert step(pipe, ddp) == step(other, other_ddp)
    ddp.wait()
    other_ddp.wait()
    for p, q in zip(ddp.params, other_ddp.params, strict=True):
        np.testing.assert_array_equal(p.grad, q.grad)


def test_a_forward_without_a_backward_can_be_given_up(ranks):
    def program(comm):
        pipe = connect(comm, four_layers())
        pipe.forward(X)
        with pytest.raises(RuntimeError, match=r"if none will come, call pipe.cancel\(\) on every rank"):
            pipe.step(X, Y)
        pipe.cancel()
        assert all(stage.num_in_flight == 0 for stage in pipe.stages)
        with pytest.raises(RuntimeError, match=r"pipe.backward\(\) without pipe.forward\(\)"):
            pipe.backward(np.ones((7, 2)))
        assert pipe.step(X, Y) == connect(comm, four_layers()).step(X, Y)

    ranks.run(program)
