"""Pairs, F&B: a forward and a backward of two micro-batches as one action, from their text to their gradients."""

import numpy as np
import pytest
from toy_pipeline import X, Y, connect, dense, gradients_in_one_process, grads_of

import minigrad as mg
from distributed import LocalWorld
from minigrad import Hooks, nn
from minigrad.autodiff.op_hooks import progressing
from pipeline import BW, SCHEDULES, Action, B, F, ScheduleError, W, dump, from_text, simulate
from pipeline.runtime.alongside import Alongside
from pipeline.runtime.microbatch import split
from pipeline.schedules.action import Kind, pair
from pipeline.schedules.drawing.svg import picture
from pipeline.schedules.drawing.trace import trace_picture
from pipeline.schedules.measured import timeline, times
from pipeline.schedules.reductions import Reductions, reduce_beside
from pipeline.schedules.schedule import round_robin
from pipeline.schedules.validate import validate
from pipeline.verify import Case, verify

OVERLAP = SCHEDULES["dualpipev_overlap"]
PAIR = pair(F(0, 4), BW(3, 1))


# What a pair is


def test_it_prints_and_parses():
    assert (str(PAIR), str(pair(F(0, 4), B(3, 1)))) == ("0F4&3BW1", "0F4&3B1")
    assert Action.parse("0F4&3BW1") == PAIR != pair(F(0, 4), B(3, 1))
    assert (PAIR.stage, PAIR.microbatch, PAIR.kind) == (0, 4, Kind.PAIR)


@pytest.mark.parametrize(
    "text", ["0F4&3BW4", "3BW1&0F4", "0F4&3W1", "0F4&3F1", "0F4&3BW1&0F5", "0F4&", "&0F4", "0F4&1SEND_B0"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"a pair is F of one micro-batch|reads stage, kind, micro-batch"):
        Action.parse(text)


def test_it_does_and_waits_for_what_both_do():
    assert PAIR.singles == (F(0, 4), BW(3, 1))
    assert PAIR.parts == (F(0, 4), B(3, 1), W(3, 1))
    inner = pair(F(1, 4), BW(2, 1))
    assert inner.needs(4) == [F(0, 4), F(2, 1), B(3, 1)]
    assert [*map(str, inner.arrivals(4))] == ["1RECV_F4", "2RECV_B1"]
    assert [*map(str, inner.departures(4))] == ["1SEND_F4", "2SEND_B1"]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("0F0,1F0,1BW0,0F1&0BW0,1F1,1BW1,0BW1", None),
        ("0F0,1F0,0F1&1BW0,0BW0,1F1,1BW1,0BW1", None),
        ("0F0,1F0,0F1&0BW0,1BW0,1F1,1BW1,0BW1", r"no rank can go on: rank 0 is at 0F1&0BW0 and needs 1B0"),
        ("0F0,1F0,0F1&1BW1,1BW0,0BW0,1F1,0BW1", r"a cell is a stage, .* as 0F4&3BW1; got '0F1&1BW1' on rank 0"),
        ("0F0,0F1&1BW0,1F0,0BW0,1F1,1BW1,0BW1", r"F comes before B before W.*got 0F1&1BW0 on rank 0 with no 1F0"),
        ("0F0,1F0,0F1&1BW0,1BW0,0BW0,1F1,1BW1", r"a stage runs B of a micro-batch once, got 1BW0 .* after 1B0"),
    ],
)  # fmt: skip
def test_a_schedule_with_pairs_is_checked(cells, message):
    if message is None:
        assert dump(from_text(cells, "x").orders(1, 2)) == cells + "\n"
        return
    with pytest.raises(ScheduleError, match=message):
        from_text(cells, "x")


def test_a_backward_on_the_wrong_rank_is_seen_in_a_pair():
    with pytest.raises(ScheduleError, match="stage 1 belongs to rank 1, got 0F1&1BW0 on rank 0"):
        validate([[F(0, 0), pair(F(0, 1), BW(1, 0))], [F(1, 0)]], num_stages=2, num_microbatches=2, rank_of=round_robin)


# Its time, its memory, its drawing


@pytest.mark.parametrize("overlap", [0, 0.4, 1])
def test_dualpipev_takes_as_long_as_its_formula_says(overlap):
    for p, m, f, b, w in ((4, 10, 1, 1, 1), (2, 4, 2, 2, 1), (8, 20, 1, 1, 1)):
        both = f + b + w - overlap * f
        times = {"forward": f, "backward_input": b, "backward_weight": w}
        makespan = simulate(OVERLAP.orders(p, m), num_stages=2 * p, overlap=overlap, **times).makespan
        assert makespan == pytest.approx(3 * p * f + (2 * m - p - 2) * both + (2 * p + 1) * b + 3 * w)
    published = simulate(OVERLAP.orders(4, 10), num_stages=8)
    assert [published.makespan, *map(published.makespan_bubble, range(4))] == [66, 6, 6, 6, 6]


def test_a_pair_takes_from_the_longer_one_to_the_sum_of_both():
    orders = from_text("0F0,1F0,0F1&1BW0,0BW0,1F1,1BW1,0BW1", "x").orders(1, 2)
    for overlap, time in ((0, 8), (0.5, 6.5), (1, 5)):
        row = simulate(orders, num_stages=2, forward=[3, 1], backward_weight=4, overlap=overlap).rows[0]
        assert row[2].end - row[2].start == time
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="overlap must be from 0 to 1, got"):
            simulate(orders, num_stages=2, overlap=wrong)


def test_while_it_runs_both_are_held():
    orders = from_text("0F0,1F0,0F1&1BW0,0BW0,1F1,1BW1,0BW1", "x").orders(1, 2)
    found = simulate(orders, num_stages=2)
    assert found.peak_microbatches == [3]
    assert found.peak_microbatches_per_stage == [2, 1]
    assert found.peak_memory([10, 1], 100) == [21]  # nothing is put off in a whole backward
    halves = from_text("0F0,1F0,0F1&1B0,0BW0,1W0,1F1,1BW1,0BW1", "x").orders(1, 2)
    assert simulate(halves, num_stages=2).peak_memory([10, 1], 100) == [120]


def test_it_is_drawn_as_both():
    found = simulate(from_text("0F0,1F0,0F1&1BW0,0BW0,1F1,1BW1,0BW1", "x").orders(1, 2), num_stages=2)
    top, bottom = [box for box in picture(found, "x").boxes if box.height == 13]
    assert (top.x, top.width, top.y + 13) == (bottom.x, bottom.width, bottom.y)
    assert top.fill != bottom.fill
    events = [(0, "0F1&1BW0", 0.0, 1.0, "compute"), (0, "0F2", 1.0, 2.0, "compute")]
    fills = {box.fill for box in trace_picture(events, "x").boxes}
    assert {"#70a5d6", "#6fc29b"} <= fills


def test_measured_times_are_those_of_single_actions_where_there_are_some():
    rows = [("0F0", 0, 1), ("1F0", 1, 3), ("0F1&1BW0", 3, 9), ("0BW0", 9, 13)]
    found = times(timeline([(0, name, start, end, "compute") for name, start, end in rows]))
    assert found == {"forward": [1, 2], "backward_input": [2, 2], "backward_weight": [2, 2]}


def test_gradients_that_a_pair_makes_final_are_reduced_after_it():
    orders = from_text("0F0,1F0,0F1,1F1,1BW0,0BW0,1BW1,0BW1", "x").orders(1, 2)
    paired = from_text("0F0,1F0,1BW0,0F1&0BW0,1F1,1BW1,0BW1", "x").orders(1, 2)
    for some, ready in ((orders, [10, 12]), (paired, [10, 12])):
        found = simulate(some, num_stages=2)
        assert [r.ready for rank in reduce_beside(found, Reductions(gradient_bytes=1)) for r in rank] == ready


# How it runs


def layers_for(comm):
    return [dense(f"fc{i}", 4, 4) for i in range(2 * comm.size - 1)] + [dense("last", 4, 2)]


@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
def test_gradients_have_the_bits_of_the_same_order_one_after_the_other(ranks, num_microbatches):
    def program(comm):
        results = []
        for name in ("dualpipev", "dualpipev_overlap"):
            pipe = connect(comm, layers_for(comm), schedule=name, num_microbatches=num_microbatches)
            losses = [pipe.step(X, Y) for _ in range(2)]
            results.append((losses, grads_of(pipe)))
        (losses, plain), (again, overlapped) = results
        assert losses == again
        for name, grad in plain.items():
            np.testing.assert_array_equal(grad, overlapped[name], err_msg=name)
        _, alone = gradients_in_one_process(
            layers_for(comm), split(X, num_microbatches), split(Y, num_microbatches), mg.mse
        )
        for name, grad in overlapped.items():
            np.testing.assert_allclose(grad, 2 * alone[name], rtol=1e-12, atol=1e-16)

    ranks.run(program)


def test_its_ops_alternate_and_its_parts_are_sent_when_they_are_done():
    happened = []

    def program(comm):
        def hook(what):
            def note():
                if comm.rank == 0:
                    happened.append(what)

            return note

        pipe = connect(comm, layers_for(comm), schedule="dualpipev_overlap", num_microbatches=4)
        if comm.rank == 0:
            send = pipe._p2p.send

            def noted_send(message, bundle):
                happened.append(str(message))
                send(message, bundle)

            pipe._p2p.send = noted_send
        enter = pipe.recorder.enter

        def noted_enter(category, *what):
            if comm.rank == 0 and category == "compute":
                happened.append(str(what[0]))
            enter(category, *what)

        pipe.recorder.enter = noted_enter
        for stage in pipe.stages:
            forward, steps = stage.forward, stage.backward_steps

            def noted_forward(*args, forward=forward, **kwargs):
                with progressing(hook("f")):
                    return forward(*args, **kwargs)

            def noted_steps(*args, steps=steps):
                run = steps(*args)
                while True:
                    try:
                        next(run)
                    except StopIteration as end:
                        return end.value
                    hook("b")()
                    yield

            stage.forward, stage.backward_steps = noted_forward, noted_steps
        pipe.step(X, Y)

    LocalWorld(2).run(program)
    text = " ".join(happened)
    assert "0F3&3BW1 b f b f 0SEND_F3 b b 3SEND_B1 3F2&0BW0 b f b f b f " in text, text


def test_work_alongside_has_its_own_context_and_its_error_is_not_lost():
    seen = []

    def steps():
        for _ in range(3):
            seen.append(mg.exp(mg.Tensor(1.0, requires_grad=True)).requires_grad)
            yield
        raise KeyError("broken")

    other = Alongside(steps())
    with mg.no_grad():
        for _ in range(3):
            other.step()
    assert seen == [True] * 3
    for _ in range(2):  # also where whoever asked has swallowed it
        with pytest.raises(KeyError, match="broken"):
            other.step()
    with pytest.raises(KeyError, match="broken"):
        other.finish()


def test_a_backward_that_fails_in_a_pair_says_so():
    def program(comm):
        pipe = connect(comm, layers_for(comm), schedule="dualpipev_overlap", num_microbatches=4)
        calls = iter(range(1000))

        def fail_later(parameter):
            if next(calls) == 0:
                raise InterruptedError("no more")

        with pytest.raises(InterruptedError, match="no more"):
            pipe.step(X, Y, hooks=Hooks(on_grad_ready=fail_later))

    LocalWorld(1).run(program)


class Dropping(nn.Module):
    def __init__(self, param, name):
        self.linear = nn.Linear(param.at(name), 4, 4)
        self.dropout = nn.Dropout(name, 0.3)

    def __call__(self, x):
        return mg.tanh(self.dropout(self.linear(x)))


def test_recomputed_layers_with_dropout_are_replayed_beside_a_forward():
    def layer(name):
        return name, lambda param: nn.Recomputed(Dropping(param, name))

    case = Case([layer(f"l{i}") for i in range(4)], [(X, X[::-1]), (X, X)], mg.mse)
    report = verify(case, pp=2, schedule="dualpipev_overlap", num_microbatches=6)
    assert report.largest_difference < 1e-14
