"""A step that begins before all gradients are there: the plain step's bits, and what must wait does."""

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, Mesh, SoloCommunicator, Work
from distributed.data_parallel.buckets.early import EarlyOptimizer
from minigrad import nn, optim, rng
from minigrad.flat import zero_grad
from minigrad.models import gpt
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

CONFIG = gpt.GPTConfig(vocab_size=17, context=6, num_layers=2, num_heads=2, width=8, dropout=0.1)


class Late(Work):
    """Work that is there only when somebody waits for it."""

    def __init__(self, work):
        self.work = work
        self.is_waited_for = False

    def test(self):
        return self.is_waited_for

    def wait(self):
        self.is_waited_for = True
        return self.work.wait()


def late(log):
    """Return a comm hook whose messages arrive as late as can be."""

    def hook(grad, comm):
        log.append(Late(comm.allreduce(grad)))
        return log[-1]

    return hook


def train(comm, step_early, *, pp=1, schedule="1f1b", rule=None, max_norm=None, zero_first=True):
    mesh = Mesh(comm, dp=comm.size // pp, pp=pp)
    stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, SCHEDULES[schedule], dtype=np.float64)
    works = []
    ddp = DistributedDataParallel(
        stages, mesh.dp, bucket_bytes=2000, comm_hook=late(works), step_early=step_early, check_every=2
    )
    optimizer = ddp.optimizer(rule or optim.AdamW(lambda step: 0.01 / (1 + step)))
    pipe = PipelineExecutor(stages, mesh.pp, SCHEDULES[schedule], num_microbatches=2, loss_fn=mg.cross_entropy)
    losses, num_late = [], 0
    for step in range(3):
        ids = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (2 * mesh.dp.size, 7))
        own = ids[2 * mesh.dp.rank : 2 * mesh.dp.rank + 2]
        if zero_first:
            optimizer.zero_grad()
        hooks = ddp.hooks(num_samples=len(own))
        with rng.scope(seed=1, step=step, first_sample=ddp.first_sample):
            losses.append(pipe.step(own[:, :-1], own[:, 1:], hooks=hooks))
        ddp.wait()
        if max_norm is not None:
            ddp.clip_by_global_norm(max_norm)
        optimizer.step()
        num_late += sum(not work.is_waited_for for work in works)
        if not zero_first:
            optimizer.zero_grad()
    state = {name: held.array.copy() for name, held in optimizer.state_slices()}
    return losses, {p.name: p.data.copy() for p in stages.parameters()} | state, num_late


def check_same(early, plain):
    for (losses, values, _), (plain_losses, plain_values, _) in zip(early, plain, strict=True):
        assert losses == plain_losses
        assert values.keys() == plain_values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(value, plain_values[name], err_msg=name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("zero_first", [True, False])
def test_an_early_step_has_the_bits_of_a_plain_one(ranks, zero_first):
    plain = ranks.run(lambda comm: train(comm, False))
    early = ranks.run(lambda comm: train(comm, True, zero_first=zero_first))
    check_same(early, plain)
    assert [num_late for *_, num_late in plain] == [0] * ranks.size
    assert min(num_late for *_, num_late in early) > 3  # buckets were on their way when the step was over


@pytest.mark.ranks(4)
def test_an_early_step_of_a_pipeline_has_the_bits_of_a_plain_one(ranks):
    plain = ranks.run(lambda comm: train(comm, False, pp=2, schedule="zero_bubble_h1"))
    early = ranks.run(lambda comm: train(comm, True, pp=2, schedule="zero_bubble_h1"))
    check_same(early, plain)
    assert min(num_late for *_, num_late in early) > 3


@pytest.mark.ranks(2)
def test_a_step_that_clips_waits_for_all_and_has_the_same_bits(ranks):
    plain = ranks.run(lambda comm: train(comm, False, max_norm=0.3))
    early = ranks.run(lambda comm: train(comm, True, max_norm=0.3))
    check_same(early, plain)
    assert [num_late for *_, num_late in early] == [0, 0]


class Two(nn.Module):
    """Two layers, each in a bucket of its own."""

    def __init__(self):
        self.first = mg.Parameter(np.ones((2, 2)), "first")
        self.second = mg.Parameter(np.ones((2, 2)), "second")

    def __call__(self, x):
        return mg.matmul(mg.matmul(x, self.first), self.second)


def one_step(comm, *, take=True):
    """Return a model after one early step of SGD, and its works: of `second`, then of `first`."""
    works, model = [], Two()
    ddp = DistributedDataParallel(model, comm, bucket_bytes=1, comm_hook=late(works), step_early=True)
    optimizer = ddp.optimizer(optim.SGD(1.0))
    mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), ddp.hooks(num_samples=1))
    ddp.wait()
    if take:
        optimizer.step()
    return model, ddp, optimizer, works


@pytest.mark.ranks(2)
def test_a_forward_waits_only_for_what_it_reads(ranks):
    def program(comm):
        model, _, _, (second, first) = one_step(comm)
        assert not first.is_waited_for
        hidden = mg.matmul(np.ones((1, 2)), model.first)
        assert first.is_waited_for
        assert not second.is_waited_for
        np.testing.assert_array_equal(hidden.data, -2)  # 1 - 2 in each weight
        mg.matmul(hidden, model.second)
        assert second.is_waited_for

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_gradient_on_its_way_cannot_be_read(ranks):
    def program(comm):
        model, _, optimizer, _ = one_step(comm)
        with pytest.raises(RuntimeError, match=r"reading \.grad of 'second': its grad is still on its way"):
            model.second.grad  # noqa: B018
        with pytest.raises(RuntimeError, match="its grad is still on its way"):
            optim.Optimizer(model.parameters(), optim.SGD(1.0)).step()
        assert model.second.data[0, 0] == -1
        np.testing.assert_array_equal(model.second.grad, 2)  # it has arrived
        optimizer.zero_grad()
        assert model.second.grad is None

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_step_that_is_not_taken_leaves_nothing_behind(ranks):
    def program(comm):
        model, ddp, optimizer, works = one_step(comm, take=False)
        zero_grad(model.parameters())
        zero_grad(model.parameters())  # of one loop at its end, of another at its beginning
        with pytest.raises(RuntimeError, match="its bucket of the last step is still on its way"):
            mg.backward(mg.sum(model(np.ones((1, 2)))))
        mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), ddp.hooks(num_samples=1))
        ddp.wait()
        optimizer.step()
        assert [work.is_waited_for for work in works] == [True, True, False, False]
        np.testing.assert_array_equal(model.first.data, -1)

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_zero_grad_after_a_step_that_is_not_taken_waits_for_its_buckets(ranks):
    """Or the next backward without the hooks would be refused, where a bucket has not come."""

    def program(comm):
        model, ddp, optimizer, works = one_step(comm, take=False)
        optimizer.zero_grad()
        assert [work.is_waited_for for work in works] == [True, True]
        mg.backward(mg.sum(model(np.ones((1, 2)))))
        mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), ddp.hooks(num_samples=1))
        ddp.wait()
        optimizer.step()
        assert [work.is_waited_for for work in works] == [True, True, False, False]
        optimizer.zero_grad()  # of a step that was taken it waits for nothing
        optimizer.zero_grad()
        assert [work.is_waited_for for work in works] == [True, True, False, False]
        np.testing.assert_array_equal(model.first.data, -3)

    ranks.run(program)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_resets", [0, 1, 2])
def test_a_step_of_micro_batches_comes_after_one_that_is_not_taken(ranks, num_resets):
    """The first of them add to gradients before the hooks are called."""

    def program(comm, step_early):
        zero = 0 if num_resets else 2  # of which gradients may add up
        stages = PipelineStage.of(gpt.layers(CONFIG), SoloCommunicator(), SCHEDULES["1f1b"], dtype=np.float64)
        hook = {} if zero else {"comm_hook": late([])}
        ddp = DistributedDataParallel(stages, comm, bucket_bytes=2000, zero=zero, step_early=step_early, **hook)
        optimizer = ddp.optimizer(optim.SGD(0.1))
        pipe = PipelineExecutor(
            stages, SoloCommunicator(), SCHEDULES["1f1b"], num_microbatches=2, loss_fn=mg.cross_entropy
        )
        for step in range(2):
            ids = np.random.default_rng(step + comm.rank).integers(0, CONFIG.vocab_size, (2, 7))
            hooks = ddp.hooks(num_samples=2)
            with rng.scope(seed=1, step=step, first_sample=ddp.first_sample):
                pipe.step(ids[:, :-1], ids[:, 1:], hooks=hooks)
            ddp.wait()
            for _ in range(num_resets if step == 0 else 0):
                optimizer.zero_grad()
        optimizer.step()
        return np.concatenate([p.data.ravel() for p in stages.parameters()])

    np.testing.assert_array_equal(ranks.run(program, True), ranks.run(program, False))


@pytest.mark.ranks(2)
def test_a_backward_that_one_rank_gives_up_is_no_step(ranks):
    def program(comm):
        model = Two()
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1, step_early=True)
        hooks = ddp.hooks(num_samples=1)
        if comm.rank == 0:
            ddp.cancel()
        else:
            mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), hooks)
            with pytest.raises(RuntimeError, match="dropped on all ranks"):
                ddp.wait()
        optimizer = ddp.optimizer(optim.SGD(1.0))
        with pytest.raises(RuntimeError, match="its grad is this rank's own"):
            optimizer.step()

    ranks.run(program)


@pytest.mark.ranks(2)
def test_a_second_step_waits_for_what_the_first_one_left_behind(ranks):
    def program(comm, step_early):
        model = nn.Linear(nn.ParamGetter(dtype=np.float64).at("fc"), 3, 2)
        ddp = DistributedDataParallel(model, comm, comm_hook=late([]), step_early=step_early)
        optimizer = ddp.optimizer(optim.SGD(0.1, momentum=0.9))
        mg.backward_with_hooks((model(np.ones((2, 3)) + comm.rank) ** 2.0).mean(), ddp.hooks(num_samples=2))
        ddp.wait()
        optimizer.step()
        optimizer.step()  # by the same gradients, and nobody has read a parameter since
        return [p.data.copy() for p in model.parameters()]

    for early, plain in zip(ranks.run(program, True), ranks.run(program, False), strict=True):
        np.testing.assert_array_equal(np.concatenate([*map(np.ravel, early)]), np.concatenate([*map(np.ravel, plain)]))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:no rank's loss depends on b")
def test_what_the_next_forward_leaves_out_is_updated_by_its_own_gradients(ranks):
    def program(comm, step_early):
        param = nn.ParamGetter(dtype=np.float64)
        model = nn.Sequential([nn.Linear(param.at(name), 2, 2) for name in "ab"])
        first, second = model.layers
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1, comm_hook=late([]), step_early=step_early)
        optimizer = ddp.optimizer(optim.SGD(0.1))
        for output in (lambda x: second(first(x)), first, lambda x: second(first(x))):
            optimizer.zero_grad()
            x = np.ones((1, 2)) + comm.rank
            mg.backward_with_hooks((output(x) ** 2.0).mean(), ddp.hooks(num_samples=1))
            ddp.wait()
            optimizer.step()
        return np.concatenate([p.data.ravel() for p in model.parameters()])

    np.testing.assert_array_equal(ranks.run(program, True), ranks.run(program, False))


def test_one_rank_alone_steps_at_once():
    ddp = DistributedDataParallel(Two(), SoloCommunicator(), step_early=True)
    assert type(ddp.optimizer(optim.SGD(1.0))) is not EarlyOptimizer


def before_a_logged_step(comm, model, zero):
    """Return what steps shards early, after `wait`, and a log of which buckets and updates a step then waits for."""
    ddp = DistributedDataParallel(model, comm, bucket_bytes=1, zero=zero, step_early=True)
    optimizer = ddp.optimizer(optim.SGD(1.0))
    mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), ddp.hooks(num_samples=1))
    log = []
    for bucket in ddp.buckets.buckets:
        bucket.work = Logged(bucket.work, bucket.number, log)
    ddp.wait()
    update = optimizer._update
    optimizer._update = lambda part, *args: (log.append(part.params[0].name), update(part, *args))
    return ddp, optimizer, log


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [1, 2])
def test_a_shard_of_a_bucket_that_has_come_is_updated_before_the_next_bucket_is_awaited(ranks, zero):
    def program(comm):
        model = Two()
        _, optimizer, log = before_a_logged_step(comm, model, zero)
        assert log == []
        with pytest.raises(RuntimeError, match=r"reading \.grad of 'first': its grad is still on its way"):
            model.first.grad  # noqa: B018
        optimizer.step()
        expected = [0, "second", 1, "first"]
        assert log == expected or (zero == 2 and log == expected[1:])  # which looked in the backward what had come
        np.testing.assert_array_equal(model.first.data, -1)  # 1 - 2 in each weight
        np.testing.assert_array_equal(model.second.data, -1)

    ranks.run(program)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("is_reversed", "frozen", "expected"),
    [
        (False, "", [0, "second", 1, "first"]),
        (True, "", [1, "first", 0, "second"]),
        (False, "second", [1, "first", 0, "second"]),
        (True, "first", [0, "second", 1, "first"]),
    ],
)
def test_shards_step_as_their_buckets_were_launched_and_frozen_ones_last(ranks, is_reversed, frozen, expected):
    """A bucket of frozen parameters has nothing to gather, but is there too when the step is over."""

    def program(comm):
        model = Two()
        for p in model.parameters():
            p.requires_grad = p.name != frozen
        ddp, optimizer, log = before_a_logged_step(comm, model, zero=1)
        if is_reversed:  # as learned from a backward in which they became complete so
            ddp.buckets.order.buckets.reverse()
        optimizer.step()
        assert log == expected
        assert [p.data[0, 0] for p in model.parameters()] == [1 if p.name == frozen else -1 for p in model.parameters()]

    ranks.run(program)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_after_finish_a_step_needs_no_other_rank(ranks, zero):
    """Ranks that may die vote on a step between the two: one that died later would leave it half done on the others."""

    def program(comm):
        model = Two()
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1, zero=zero, step_early=True)
        optimizer = ddp.optimizer(optim.SGD(1.0))
        mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), ddp.hooks(num_samples=1))
        for bucket in ddp.buckets.buckets:
            bucket.work = Late(bucket.work)
        ddp.wait()
        optimizer.finish()
        assert all(bucket.is_landed for bucket in ddp.buckets.buckets)
        optimizer.step()
        return model.first.data.copy()

    for first in ranks.run(program):
        np.testing.assert_array_equal(first, -1)


class Logged(Work):
    """Work that notes when somebody waits for it."""

    def __init__(self, work, number, log):
        self.work, self.number, self.log = work, number, log

    def test(self):
        return self.work.test()

    def wait(self):
        self.log.append(self.number)
        return self.work.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("step_early", [False, True])
def test_a_gather_that_fails_leaves_no_shard_behind_and_the_step_is_counted(ranks, zero, step_early):
    """As where a rank has died after the vote: the survivors' shards are those of a step that was taken."""

    def program(comm):
        model = Two()
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1, zero=zero, step_early=step_early)
        optimizer = ddp.optimizer(optim.SGD(1.0))
        mg.backward_with_hooks(mg.sum(model(np.ones((1, 2)))), ddp.hooks(num_samples=1))
        ddp.wait()

        def fail(run):
            raise OSError("nobody is there")

        optimizer._gather = fail
        with pytest.raises(OSError, match="nobody is there"):
            optimizer.step()
        assert optimizer.num_steps == 1
        for _, held in optimizer.value_slices():
            np.testing.assert_array_equal(held.array, -1)

    ranks.run(program)
