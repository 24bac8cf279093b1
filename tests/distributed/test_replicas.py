"""Replicas that drift apart: said where it can be seen at once, and found by a look at the weights otherwise."""

import copy

import ml_dtypes
import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel
from distributed.data_parallel.replicas import fingerprint
from minigrad.models import MLP
from minigrad.optim import SGD, Optimizer, clip_by_global_norm

X = np.arange(6.0).reshape(3, 2)


def made(comm, **options):
    model = MLP([2, 3, 1], dtype=np.float64)
    return model, DistributedDataParallel(model, comm, **options), Optimizer(model.parameters(), SGD(0.1))


def loss_of(model, comm):
    return (model(X + comm.rank) ** 2.0).mean()


@pytest.mark.ranks(2, 3)
def test_a_step_with_gradients_that_were_never_reduced_is_refused(ranks):
    def program(comm):
        model, ddp, optimizer = made(comm)
        before = model.state_dict()

        def refused():
            for what, call in {
                r"optimizer\.step\(\) with": optimizer.step,
                "the norm of": lambda: clip_by_global_norm(ddp.params, 1.0),
            }.items():
                rule = rf"^{what} 'fc\d\.\w+': its grad is this rank's own, and replicas would drift apart; run .* wait"
                with pytest.raises(RuntimeError, match=rule):
                    call()

        mg.backward(loss_of(model, comm))
        refused()
        optimizer.zero_grad()
        refused()
        mg.backward_with_hooks(loss_of(model, comm), ddp.hooks(num_samples=3))
        ddp.wait()
        optimizer.step()
        optimizer.zero_grad()
        mg.backward(loss_of(model, comm))  # forgotten in the second step only
        refused()
        assert optimizer.num_steps == 1
        assert any((model.state_dict()[name] != values).any() for name, values in before.items())

    ranks.run(program)


def test_accumulating_first_and_reducing_last_is_a_step(ranks):
    def program(comm):
        model, ddp, optimizer = made(comm)
        mg.backward_with_grad(loss_of(model, comm), 0.5)
        mg.backward_with_grad(loss_of(model, comm), 0.5, hooks=ddp.hooks(num_samples=3))
        ddp.wait()
        found = [p.grad.copy() for p in ddp.params]
        optimizer.zero_grad()
        mg.backward_with_hooks(loss_of(model, comm), ddp.hooks(num_samples=3))
        ddp.wait()
        for p, grad in zip(ddp.params, found, strict=True):
            np.testing.assert_allclose(grad, p.grad, rtol=1e-12)
        optimizer.step()

    ranks.run(program)


def test_what_is_averaged_stays_so_where_another_wrapper_is_made(ranks):
    def program(comm):
        model, ddp, optimizer = made(comm)
        mg.backward_with_hooks(loss_of(model, comm), ddp.hooks(num_samples=3))
        ddp.wait()
        DistributedDataParallel(model, comm)
        optimizer.step()
        with pytest.raises(RuntimeError, match="already reduced over ranks"):
            mg.backward(loss_of(model, comm))

    ranks.run(program)


def test_one_rank_needs_no_hooks_and_a_copy_is_nobodys_replica(ranks):
    def program(comm):
        model, _, optimizer = made(comm)
        averaged = copy.deepcopy(model)
        mg.backward(loss_of(averaged, comm))
        Optimizer(averaged.parameters(), SGD(0.1)).step()
        if comm.size == 1:
            mg.backward(loss_of(model, comm))
            optimizer.step()
            optimizer.zero_grad()
            mg.backward(loss_of(model, comm))
            optimizer.step()

    ranks.run(program)


@pytest.mark.ranks(2, 3, 4)
def test_a_look_at_the_weights_names_the_first_parameter_that_differs_on_every_rank(ranks):
    def program(comm):
        model, ddp, optimizer = made(comm, check_every=2)
        last = comm.size - 1
        words = []
        for step in range(4):
            optimizer.zero_grad()
            try:
                hooks = ddp.hooks(num_samples=3)
            except RuntimeError as error:
                words.append((step, str(error)))
                break
            mg.backward_with_hooks(loss_of(model, comm), hooks)
            ddp.wait()
            optimizer.step()
            if step == 1 and comm.rank == last:  # the last bit of one element
                bias = model.parameters()[1]
                bias.data[1] = np.nextafter(bias.data[1], 9)
        return words

    results = ranks.run(program)
    assert results == [results[0]] * ranks.size
    ((step, words),) = results[0]
    assert step == 3
    assert f"the first of them 'fc0.bias', which on rank {ranks.size - 1} differs from rank 0's" in words


def test_equal_weights_pass_and_nothing_is_looked_at_unless_asked(ranks, monkeypatch):
    def program(comm, check_every):
        model, ddp, optimizer = made(comm, check_every=check_every)
        looks = []
        look = ddp.check_replicas
        ddp.check_replicas = lambda: (looks.append(ddp), look())
        for _ in range(5):
            optimizer.zero_grad()
            mg.backward_with_hooks(loss_of(model, comm), ddp.hooks(num_samples=3))
            ddp.wait()
            optimizer.step()
        return len(looks)

    assert ranks.run(program, 2) == [2] * ranks.size
    assert ranks.run(program, 0) == [0] * ranks.size


@pytest.mark.ranks(2)
def test_all_ranks_look_at_the_same_time(ranks):
    def program(comm):
        with pytest.raises(ValueError, match="setting 0 is check_every=0 on rank 0 and check_every=1 on rank 1"):
            made(comm, check_every=comm.rank)

    ranks.run(program)


def test_a_negative_number_of_steps_between_looks_is_refused(ranks):
    def program(comm):
        with pytest.raises(ValueError, match="check_every must not be negative, got -1"):
            made(comm, check_every=-1)

    ranks.run(program)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_any_bit_changes_a_fingerprint(dtype, shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    assert fingerprint(array) == fingerprint(array.copy())
    words = array.reshape(-1).view(np.uint8)
    for index in range(words.size):
        for bit in range(8):
            before = fingerprint(array)
            words[index] ^= 1 << bit
            assert fingerprint(array) != before
            words[index] ^= 1 << bit
