"""Local steps: ranks that train on their own and agree from time to time."""

import contextlib
import functools
import threading

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, SoloCommunicator
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.checkpoint.contents import Contents
from distributed.data_parallel.compression.feedback import WithState
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.local_steps import LocalSteps, Nesterov
from minigrad.models import MLP
from minigrad.optim import SGD, AdamW, Optimizer


def walk(comm, num_steps, **how):
    """Step two weights of 1 by a gradient of 2 each time; return both after each step (torchft's example)."""
    params = [mg.Parameter(np.ones(1), name) for name in ("a", "b")]
    optimizer = Optimizer(params, SGD(1.0))
    local = LocalSteps(params, comm, SGD(2.0), **how)
    seen = []
    for _ in range(num_steps):
        for p in params:
            p.grad = np.full(1, 2.0)
        optimizer.step()
        local.step()
        seen.append([float(p.data[0]) for p in params])
    return np.array(seen).T.tolist()


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ({}, [-1, -3, -11, -13, -15, -17, -19, -21, -35]),
        ({"alpha": 0.5}, [-1, -3, -8, -10, -12, -14, -16, -18, -24.5]),
        ({"alpha": 1.0}, [-1, -3, -5, -7, -9, -11, -13, -15, -17]),
        ({"delay": 1, "alpha": 0.0}, [-1, -3, -7, -9, -11, -13, -15, -17, -27]),
    ],
    ids=str,
)
def test_published_numbers(ranks, how, first):
    for found, _ in ranks.run(functools.partial(walk, every=6, num_fragments=2, **how), 9):
        assert found == first


def test_the_second_fragment_has_its_turn_in_between():
    _, second = walk(SoloCommunicator(), 7, every=6, num_fragments=2)
    assert second == [-1, -3, -5, -7, -9, 1 - 2 * 12, 1 - 2 * 12 - 2]


def batch_of(rank, step):
    generator = np.random.default_rng((rank, step))
    return generator.standard_normal((4, 5)), generator.standard_normal((4, 2))


def weights_of(model):
    return {p.name: p.data.copy() for p in model.parameters()}


def train(comm, rule, *, every, num_steps, inner=None):
    model = MLP([5, 6, 2], seed=comm.rank, dtype=np.float64)
    optimizer = Optimizer(model.parameters(), inner or SGD(0.1))
    local = LocalSteps(model.parameters(), comm, rule, every=every)
    for step in range(num_steps):
        x, y = batch_of(comm.rank, step)
        optimizer.zero_grad()
        mg.backward(mg.mse(model(x), y))
        optimizer.step()
        local.step()
    return weights_of(model), local


def train_ddp(comm, num_steps):
    ddp = DistributedDataParallel(MLP([5, 6, 2], seed=0, dtype=np.float64), comm)
    optimizer = ddp.optimizer(SGD(0.1))
    for step in range(num_steps):
        x, y = batch_of(comm.rank, step)
        optimizer.zero_grad()
        mg.backward_with_hooks(mg.mse(ddp.model(x), y), ddp.hooks(num_samples=4))
        ddp.wait()
        optimizer.step()
    return weights_of(ddp.model)


def test_an_agreement_in_every_step_by_sgd_of_1_is_data_parallelism(ranks):
    found = ranks.run(lambda comm: train(comm, SGD(1.0), every=1, num_steps=5)[0])
    wanted = ranks.run(train_ddp, 5)
    for ours, theirs in zip(found, wanted, strict=True):
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-12)


def test_it_is_so_to_the_last_bit_where_no_sum_is_rounded(ranks):
    """Weights and gradients are eighths, so that what is learned comes back whole from w - (w - g)."""

    def program(comm, is_local):
        w = mg.Parameter(np.arange(4.0), "w")
        gradient = np.array([1.0, -2, 4, 8]) * comm.size * (comm.rank + 1)
        optimizer = Optimizer([w], SGD(0.125))
        local = LocalSteps([w], comm, SGD(1.0), every=1) if is_local else None
        for _ in range(3):
            w.grad = gradient if local else comm.allreduce(gradient.copy()).wait() / comm.size
            optimizer.step()
            if local:
                local.step()
        return w.data.tolist()

    assert ranks.run(program, True) == ranks.run(program, False)


def test_ranks_differ_in_between_and_agree_after(ranks):
    def program(comm):
        weights, local = train(comm, Nesterov(0.7, momentum=0.9), every=3, num_steps=5)
        assert not local.in_step
        before = comm.gather_objects(weights["fc0.weight"] if "fc0.weight" in weights else next(iter(weights.values())))
        agreed, local = train(comm, Nesterov(0.7, momentum=0.9), every=3, num_steps=6)
        assert local.in_step
        assert local.num_agreements == [2]
        each = 2 * (comm.size - 1) * sum(array.nbytes for array in agreed.values()) // comm.size  # of an allreduce
        assert (local.sent_bytes, local.plain_bytes) == (2 * each, 6 * each)
        return before, comm.gather_objects(agreed)

    for before, after in ranks.run(program):
        assert ranks.size == 1 or any((other != before[0]).any() for other in before[1:])
        for other in after:
            for name, values in after[0].items():
                np.testing.assert_array_equal(other[name], values)


def test_nesterov_is_pytorchs():
    """v = momentum v + g; w -= lr (g + momentum v): torch.optim.SGD(nesterov=True), by hand."""
    rule, w, v, state = Nesterov(0.5, momentum=0.75), 3.0, 0.0, None
    data = np.array([3.0])
    state = rule.init(data)
    for step, g in enumerate([1.0, -2.0, 4.0]):
        v = 0.75 * v + g
        w -= 0.5 * (g + 0.75 * v)
        rule.update(data, np.array([g]), state, lr=0.5, step=step, decay=False)
        assert data[0] == pytest.approx(w, rel=1e-15)


def walk_apart(comm, num_steps, **how):
    """Step a weight of 64 on each rank by updates of its own; return after each step its weights, and all updates."""
    w = mg.Parameter(np.full(3, 64.0), "w")
    local = LocalSteps([w], comm, SGD(1.0), **how)
    seen, updates = [], []
    for step in range(num_steps):
        updates.append(np.array([1.0, 0.25, -2.0]) * (comm.rank + 1) * (1 + step % 3))
        w.data[...] -= updates[-1]
        w.note_change("the test")
        local.step()
        seen.append(w.data.copy())
    return np.array(seen), np.array(updates)


@pytest.mark.parametrize("how", [{"every": 4, "delay": 2}, {"every": 3, "delay": 1}, {"every": 2}], ids=str)
@pytest.mark.ranks(2, 4)
def test_the_mean_of_all_ranks_misses_no_update(ranks, how):
    by_rank = ranks.run(functools.partial(walk_apart, num_steps=13, **how))
    weights, updates = (np.mean(arrays, axis=0) for arrays in zip(*by_rank, strict=True))
    np.testing.assert_array_equal(weights, 64 - updates.cumsum(axis=0))
    every, delay = how["every"], how.get("delay", 0)
    for agreed_on in range(every - 1, 13, every):  # then ranks differ by what they learned since it set out
        apart = by_rank[1][0][agreed_on] - by_rank[0][0][agreed_on]
        learned = [by_rank[rank][1][agreed_on - delay + 1 : agreed_on + 1].sum(axis=0) for rank in (0, 1)]
        np.testing.assert_array_equal(apart, learned[0] - learned[1])


@pytest.mark.ranks(2, 3)
def test_what_few_bits_leave_out_is_said_in_the_next_agreement(ranks):
    def program(comm):
        hook = ErrorFeedback("int8")
        weights, updates = walk_apart(comm, 120, every=3, delay=1, comm_hook=hook)
        return weights, updates, hook.sent_bytes

    by_rank = ranks.run(program)
    weights = np.mean([weights for weights, _, _ in by_rank], axis=0)
    wanted = 64 - np.mean([updates for _, updates, _ in by_rank], axis=0).cumsum(axis=0)
    largest = 3 * 2 * ranks.size * 2  # what a rank learns from one agreement to the next
    assert 0 < abs(weights - wanted).max() < 2 * (ranks.size + 1) * largest / 254, (
        "it does not add up over 40 agreements"
    )
    assert by_rank[0][2] > 0


def test_sums_move_on_during_a_backward():
    """Nothing called MPI between two agreements: what a delay was to hide began to travel where it was waited for."""
    model = MLP([5, 6, 2], seed=0)
    local = LocalSteps(model.parameters(), SoloCommunicator(), SGD(1.0), every=4, delay=2)
    moved = []
    local.comm.progress = lambda: moved.append(1)
    x, y = batch_of(0, 0)
    loss = mg.mse(model(x.astype(np.float32)), y.astype(np.float32))
    mg.backward_with_hooks(loss, local.hooks())
    assert len(moved) >= 4, "after each op"


HOW = [
    {"every": 3},
    {"every": 3, "delay": 2},
    {"every": 3, "delay": 2, "alpha": 0.0},
    {"every": 3, "delay": 1, "comm_hook": "int8"},
    {"every": 4, "num_fragments": 2, "delay": 1},
    {"every": 4, "num_fragments": 2, "alpha": 0.5},
]


class Saved:
    """A model on local steps, by a rule that has a state, with a folder of checkpoints."""

    def __init__(self, comm, folder, how):
        self.comm = comm
        self.model = MLP([5, 6, 2], seed=0, dtype=np.float64)
        self.optimizer = Optimizer(self.model.parameters(), AdamW(0.05))
        rule = Nesterov(0.7, momentum=0.9)
        if "comm_hook" in how:
            how = how | {"comm_hook": ErrorFeedback(how["comm_hook"])}
        self.local = LocalSteps(self.model.parameters(), comm, rule, inner=self.optimizer, **how)
        state = WithState(self.model, self.local)
        self.checkpoints = Checkpointer(folder, comm, state, self.optimizer, keep_last=20)

    def train(self, first, last, *, save_each=False):
        for step in range(first, last):
            x, y = batch_of(self.comm.rank, step)
            self.optimizer.zero_grad()
            mg.backward(mg.mse(self.model(x), y))
            self.optimizer.step()
            self.local.step()
            if save_each:
                self.checkpoints.save(step + 1)
        self.checkpoints.wait()

    def all_there_is(self):
        """Return what decides how it goes on, as bits."""
        self.local.pack()
        arrays = {buffer.name: buffer.data.tobytes() for buffer in self.local.buffers()}
        arrays |= {p.name: p.data.tobytes() for p in self.model.parameters()}
        self.local.unpack()
        return arrays, self.local.num_agreements


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.ranks(2, 3)
def test_a_run_that_is_saved_after_any_step_goes_on_as_if_undisturbed(ranks, how, tmp_path):
    num_steps = 9

    def program(comm):
        folder = comm.broadcast_object(tmp_path)  # each process of MPI has another one
        undisturbed, saved = Saved(comm, folder / "none", how), Saved(comm, folder / "run", how)
        undisturbed.train(0, num_steps)
        saved.train(0, num_steps, save_each=True)
        wanted = undisturbed.all_there_is()
        assert saved.all_there_is() == wanted, "to save changes nothing"
        for step in range(4, 8):  # each of the steps from one agreement to the next
            resumed = Saved(comm, folder / "run", how)
            if step % 2:
                resumed.train(0, 1 + step % how["every"])  # what is under way there goes
            loaded = resumed.checkpoints.load(folder / "run" / f"step-{step:08d}")
            assert (loaded.step, loaded.forgets) == (step, False)
            resumed.train(step, num_steps)
            assert resumed.all_there_is() == wanted, step
        return True

    assert all(ranks.run(program))


@pytest.mark.parametrize("how", HOW, ids=str)
def test_who_cannot_copy_what_it_saves_has_its_own_weights_again(how, tmp_path, monkeypatch):
    """The model had those that were last agreed on from there on, and a rank that could copy waited for this one."""

    def program(comm):
        undisturbed, saved = Saved(comm, tmp_path / "none", how), Saved(comm, tmp_path / "run", how)
        undisturbed.train(0, 5)
        saved.train(0, 2)
        contents = Contents(WithState(saved.model, saved.local), saved.optimizer)
        (name, held), *_ = contents.held().items()
        with pytest.raises(MemoryError) if comm.rank == 0 else contextlib.nullcontext():
            contents.copy({name: name}, {name: np.empty(held.shape)})
        saved.train(2, 5)
        assert saved.all_there_is() == undisturbed.all_there_is()

    def full(array):
        if threading.current_thread().name == "rank 0":
            raise MemoryError
        return array

    monkeypatch.setattr("distributed.checkpoint.contents.to_host", full)
    LocalWorld(2, timeout_seconds=10).run(program)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_any_other_layout_goes_on_from_what_was_last_agreed_on(how, tmp_path):
    def save(comm):
        saved = Saved(comm, tmp_path, how)
        saved.train(0, 5, save_each=True)
        saved.local.pack()
        return weights_of(saved.model)

    def load(comm, how):
        other = Saved(comm, tmp_path, how)
        other.train(0, 2)  # it has a past of its own
        loaded = other.checkpoints.load()
        found = weights_of(other.model)
        begins = (loaded.step, loaded.forgets, other.local.num_steps, other.local.in_step)
        other.train(5, 5 + how["every"])
        return found, begins, other.local.num_agreements

    agreed = LocalWorld(2).run(save)
    longer = how | {"every": 2 * how["every"]}
    for found, begins, num_agreements in [*LocalWorld(3).run(load, how), *LocalWorld(2).run(load, longer)]:
        assert begins == (5, True, 0, True)
        assert num_agreements == [1] * how.get("num_fragments", 1)
        for name, values in agreed[0].items():
            np.testing.assert_array_equal(found[name], values)
            np.testing.assert_array_equal(agreed[1][name], values)


@pytest.mark.parametrize("num_before", [1, 3, 5, 6])
def test_who_forgets_walks_as_at_first(num_before):
    """Nothing is left of what was agreed on, of momentum, of the count, and of a sum that is under way."""

    def program(comm):
        w = mg.Parameter(np.ones(3), "w")
        local = LocalSteps([w], comm, Nesterov(0.5, momentum=0.75), every=3, delay=1)

        def walk(num_steps):
            seen = []
            for step in range(num_steps):
                w.data[...] -= (comm.rank + 1) * (step + 2)
                w.note_change("the test")
                local.step()
                seen.append(w.data.tolist())
            return seen

        first = walk(7)
        walk(num_before)
        w.data = np.ones(3)
        local.forget()
        assert (local.num_steps, local.num_agreements, local.in_step, local.sent_bytes) == (0, [0], True, 0)
        assert walk(7) == first
        return True

    assert all(LocalWorld(2).run(program))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"every": 5, "num_fragments": 2}, "every must be a multiple of num_fragments, got 5 and 2"),
        ({"every": 6, "num_fragments": 3}, "3 fragments need as many parameters, got 2"),
        ({"every": 6, "num_fragments": 2, "delay": 3}, "delay must be at least 0 and below the 3 steps"),
        ({"every": 6, "alpha": 1.5}, "alpha must be from 0 to 1, got 1.5"),
    ],
)
def test_wrong_settings_are_refused(how, message):
    params = [mg.Parameter(np.ones(1), name) for name in ("a", "b")]
    with pytest.raises(ValueError, match=message):
        LocalSteps(params, SoloCommunicator(), SGD(1.0), **how)


def test_a_world_that_survives_failures_is_refused():
    """A rank that steps in would get one rank's weights, and think that all of them agreed on these."""

    def program(comm):
        params = [mg.Parameter(np.ones(1), "a")]
        with pytest.raises(ValueError, match=r"a world that survives failures .* got rank . of 2 of such a world"):
            LocalSteps(params, comm.split(0), SGD(1.0), every=2)
        return True

    assert LocalWorld(2, survive=True).run(program) == [True, True]
