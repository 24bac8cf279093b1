"""Weight halves side by side: the bits of one after the other, and parameters that are ready early."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from recording import Log, RecordingCommunicator
from toy_pipeline import apply, connect, dense, mean, scale, scale_positive

import minigrad as mg
from distributed import Mesh
from distributed.data_parallel.ddp import DistributedDataParallel
from minigrad import Hooks, nn
from pipeline import BW, SCHEDULES, Action, B, F, Kind, PipelineExecutor, PipelineStage, Schedule, W
from pipeline.runtime.step_hooks import side_by_side


def parameters() -> list[mg.Parameter]:
    generator = np.random.default_rng(0)
    return [mg.Parameter(generator.standard_normal((3, 3)).astype(np.float32), name) for name in "uvw"]


def chain(x: mg.Tensor, u: mg.Parameter, v: mg.Parameter, w: mg.Parameter) -> mg.Tensor:
    return mg.tanh(mg.tanh(mg.tanh(x @ u) @ v) @ w).sum()


def tied(x: mg.Tensor, u: mg.Parameter, v: mg.Parameter, w: mg.Parameter) -> mg.Tensor:
    return (mg.tanh(mg.tanh(mg.tanh(x @ u) @ v) @ w.T) @ u).sum()


def squared(x: mg.Tensor, u: mg.Parameter, v: mg.Parameter, w: mg.Parameter) -> mg.Tensor:
    return mg.tanh(mg.tanh(x @ (u * u)) @ (v @ w)).sum()


def recomputed(x: mg.Tensor, u: mg.Parameter, v: mg.Parameter, w: mg.Parameter) -> mg.Tensor:
    return mg.recompute(lambda h: mg.tanh(mg.tanh(h @ u) @ v) @ u, mg.tanh(x @ w)).sum()


def conditional(x: mg.Tensor, u: mg.Parameter, v: mg.Parameter, w: mg.Parameter) -> mg.Tensor:
    return mg.tanh((x @ u if x.data.sum() > 0 else x) @ v).sum() + 0 * w.sum()


def halves_of(loss: Callable[..., mg.Tensor], params: Sequence[mg.Parameter]) -> list[mg.DeferredGrads]:
    generator = np.random.default_rng(1)
    inputs = [
        mg.Tensor(generator.standard_normal((5, 3)).astype(np.float32) + shift, requires_grad=True)
        for shift in (1, -2, 3)
    ]
    return [mg.backward_input(loss(x, *params)) for x in inputs]


@pytest.mark.parametrize("loss", [chain, tied, squared, recomputed, conditional])
def test_the_bits_are_those_of_one_after_the_other(loss: Callable[..., mg.Tensor]) -> None:
    one_by_one, together = parameters(), parameters()
    for half in halves_of(loss, one_by_one):
        mg.backward_weight(half)
    ready: list[str] = []
    mg.backward_weight(halves_of(loss, together), hooks=Hooks(on_grad_ready=lambda p: ready.append(p.name)))
    for a, b in zip(one_by_one, together, strict=True):
        np.testing.assert_array_equal(a.grad, b.grad)
    assert sorted(ready) == ["u", "v", "w"]


def test_a_parameter_is_ready_when_the_last_tape_has_passed_it() -> None:
    events: list[str] = []
    hooks = Hooks(on_grad_ready=lambda p: events.append(p.name), between_ops=lambda: events.append("."))
    mg.backward_weight(halves_of(chain, parameters()), hooks=hooks)
    assert "".join(events) == "..w...v...u."


def test_a_tape_waits_where_the_one_before_still_adds_to_a_parameter() -> None:
    events: list[str] = []
    hooks = Hooks(on_grad_ready=lambda p: events.append(p.name), between_ops=lambda: events.append("."))
    mg.backward_weight(halves_of(tied, parameters()), hooks=hooks)  # u comes first and last: one tape after the other
    assert "".join(events) == "." * 12 + "w.v.u."


def test_what_was_computed_before_is_refused() -> None:
    first, second, _ = halves_of(chain, parameters())
    with pytest.raises(RuntimeError, match="backward_weight: these deferred gradients were already computed"):
        mg.backward_weight([first, second, first])


def test_tapes_that_meet_in_a_node_are_refused() -> None:
    w = parameters()[0]
    transposed = w.T
    inputs = [mg.Tensor(np.ones((2, 3), np.float32), requires_grad=True) for _ in range(2)]
    halves = [mg.backward_input((x @ transposed).sum()) for x in inputs]
    with pytest.raises(RuntimeError, match="this tape was already walked"):
        mg.backward_weight(halves)


def test_a_program_runs_the_weight_halves_of_a_stage_that_stand_in_a_row_as_one() -> None:
    program = [F(0, 0), B(0, 0), W(0, 0), W(0, 1), W(2, 0), BW(0, 2), BW(0, 3), W(0, 2)]
    wanted: list[list[Action]] = [[program[0]], [program[1]], program[2:4], *([action] for action in program[4:])]
    assert side_by_side(program) == wanted
    assert side_by_side([]) == []


def test_messages_in_a_row_are_one_too() -> None:
    first, second = Action(Kind.SEND_F, 0, 0), Action(Kind.RECV_B, 0, 0)
    assert side_by_side([F(0, 0), first, second, F(0, 1), first]) == [[F(0, 0)], [first, second], [F(0, 1)], [first]]


@pytest.mark.ranks(4)
@pytest.mark.point_to_point
def test_buckets_travel_beside_the_weight_halves_at_the_end_of_a_zero_bubble_step(ranks):
    """Of two replicas of two stages; the second stage ends with two W's, whose first parameters are ready early."""
    layers = [dense(f"fc{i}", 4, 4) for i in range(8)]
    x, y = np.random.default_rng(0).standard_normal((2, 8, 4))

    def program(comm, one_by_one):
        log = Log()
        mesh = Mesh(RecordingCommunicator(comm, log), dp=2, pp=2)
        schedule = SCHEDULES["zero_bubble_h1"]
        stages = PipelineStage.of(layers, mesh.pp, schedule)
        ddp = DistributedDataParallel(stages, mesh.dp, bucket_bytes=8)
        pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=4, loss_fn=mg.mse)
        if one_by_one:
            for stage in stages:
                run = stage.backward_weight
                vars(stage)["backward_weight"] = lambda numbers, hooks, run=run: [run([i], hooks) for i in numbers]
        ready = Hooks(on_grad_ready=lambda p: log.note("ready"))
        hooks = ready + ddp.hooks(num_samples=8) + Hooks(between_ops=lambda: log.note("op"))
        log.clear()
        pipe.step(x, y, hooks=hooks)
        ddp.wait()
        calls = [event.call for event in log if event.call in ("op", "ready", "allreduce")]
        first_launch = list(pairwise(calls)).index(("ready", "allreduce"))
        ops_after_the_first_launch = calls[first_launch:].count("op")
        return mesh.pp.rank, ops_after_the_first_launch, {p.name: p.grad.tobytes() for p in stages.parameters()}

    together, apart = ranks.run(program, False), ranks.run(program, True)
    for (stage, early, grads), (_, late, same_grads) in zip(together, apart, strict=True):
        assert grads == same_grads
        num_ops = len(layers) // 2  # of one W: a node each; what follows a launch counts, and the op that it was in
        assert late == num_ops
        assert early == (2 * num_ops - 1 if stage == 1 else num_ops)


def test_a_parameter_that_only_some_of_the_weight_halves_reach_is_ready_when_it_is_final(ranks):
    """Micro-batches 0 and 2 reach it: counting both of the pair W0 W1 would call it ready before W2."""
    layers = [*(apply(f"same{i}", lambda x: x) for i in range(ranks.size - 1)), ("two", two_scales)]

    def order(rank, num_ranks, num_microbatches):
        pair = [B(rank, 0), B(rank, 1), W(rank, 0), W(rank, 1)]
        return [*(F(rank, i) for i in range(4)), *pair, B(rank, 2), W(rank, 2), B(rank, 3), W(rank, 3)]

    def program(comm):
        pipe = connect(comm, layers, schedule=Schedule("pair", order), num_microbatches=4, loss_fn=mean)
        ready = []
        hooks = Hooks(on_grad_ready=lambda p: ready.append((p.name, float(p.grad))))
        pipe.step(np.array([1.0, -1, 1, -1]), np.zeros(4), hooks=hooks)
        assert ready == [(p.name, float(p.grad)) for p in pipe.stages.parameters()]
        return [name for name, _ in ready]

    *others, last = ranks.run(program)
    assert last == ["sometimes", "always"]
    assert others == [[]] * (ranks.size - 1)


def two_scales(param):
    return nn.Sequential([factory(param) for _, factory in (scale_positive("sometimes"), scale("always"))])
