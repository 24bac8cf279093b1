"""Messages between stages: headers only where a shape is new, gradients only for floats, nothing left behind."""

import numpy as np
import pytest
from recording import Log, RecordingCommunicator

from distributed import SoloCommunicator
from pipeline.runtime.boundary import ArraySpec, Bundle
from pipeline.runtime.p2p import PointToPoint
from pipeline.schedules.action import Action, Kind

pytestmark = [pytest.mark.ranks(2), pytest.mark.point_to_point]

ROW = ArraySpec((2,), np.dtype(float))


def exchange(p2p, arrays, *, posted_early=True, specs=None):
    """Run one step in which stage 0 sends these arrays, one a micro-batch, and stage 1 sends twice them back.

    Returns:
        What arrived on this rank.
    """
    p2p.begin([ROW] * len(arrays) if specs is None else specs)
    rank = p2p.comm.rank
    receive, send = (Kind.RECV_B, Kind.SEND_F) if rank == 0 else (Kind.RECV_F, Kind.SEND_B)
    numbers = range(len(arrays))
    if rank == 0:
        for i, array in enumerate(arrays):
            p2p.send(Action(send, 0, i), bundle(array))
    if posted_early:
        for i in numbers:
            p2p.post(Action(receive, rank, i))
    arrived = []
    for i in numbers:
        if not posted_early:
            p2p.post(Action(receive, rank, i))
        arrived.append(p2p.receive(Action(receive, rank, i)))
        if rank == 1:
            back = [
                np.asarray(2 * array)
                for array, wanted in zip(arrived[i].arrays, arrived[i].returns, strict=True)
                if wanted
            ]
            p2p.send(Action(send, 1, i), Bundle(tuple(back), (False,) * len(back), True))
    p2p.finish()
    return [one.arrays[0] if one.arrays else None for one in arrived]


def bundle(array):
    return Bundle((array,), (array.dtype.kind == "f",), False)


def connect(comm, num_microbatches, log=None):
    comm = RecordingCommunicator(comm, Log() if log is None else log)
    return PointToPoint(comm, lambda stage: stage, num_stages=2, num_microbatches=num_microbatches)


def lanes(log):
    """Count sends by lane: activations, gradients, headers."""
    tags = [event.tag % 3 for event in log.calls("isend")]
    return [tags.count(lane) for lane in range(3)]


@pytest.mark.parametrize("posted_early", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_arrays_of_any_shape_go_there_and_back(ranks, shape, dtype, posted_early):
    def program(comm):
        p2p = connect(comm, 3)
        for step in range(3):
            arrays = [np.full(shape, 10 * step + i, dtype) for i in range(3)]
            arrived = exchange(p2p, arrays, posted_early=posted_early)
            for got, array in zip(arrived, arrays, strict=True):
                np.testing.assert_array_equal(got, array * (2 - comm.rank), strict=True)

    ranks.run(program)


def test_a_header_is_sent_once_for_a_shape_and_counts_from_the_next_step(ranks):
    def program(comm):
        log = Log()
        p2p = connect(comm, 2, log)
        sent = []
        small, large = ROW, ArraySpec((5,), np.dtype(float))
        # A shape twice in its first step has two headers: what a step teaches counts from the next one.
        for specs in ([small, small], [small, small], [small, large], [large, small]):
            log.clear()
            exchange(p2p, [np.ones(spec.shape) for spec in specs], specs=specs)
            sent.append(lanes(log))
        return sent

    there, back = ranks.run(program)
    assert there == [[2, 0, 2], [2, 0, 0], [2, 0, 1], [2, 0, 0]]
    assert back == [[0, 2, 0]] * 4


def test_no_gradient_comes_back_for_integers(ranks):
    def program(comm):
        log = Log()
        p2p = connect(comm, 2, log)
        for _ in range(2):
            arrived = exchange(p2p, [np.arange(3), np.arange(3)])
            if comm.rank == 0:
                assert arrived == [None, None]
            else:
                np.testing.assert_array_equal(arrived[0], np.arange(3), strict=True)
        return lanes(log)

    assert ranks.run(program) == [[4, 0, 2], [0, 0, 0]]


def test_every_message_has_a_buffer_of_its_own(ranks):
    def program(comm):
        p2p = connect(comm, 3)
        kept = [array for step in range(3) for array in exchange(p2p, [np.full(4, 3.0 * step + i) for i in range(3)])]
        assert [array[0] for array in kept] == [(2 - comm.rank) * n for n in range(9)]

    ranks.run(program)


def test_a_sent_array_need_not_be_contiguous_or_kept(ranks):
    def program(comm):
        p2p = connect(comm, 2)
        for _ in range(2):
            table = np.arange(12.0).reshape(3, 4)
            p2p_arrays = [table.T, np.broadcast_to(np.float64(7), (4, 3))]
            arrived = exchange(p2p, p2p_arrays)
            np.testing.assert_array_equal(arrived[0], table.T * (2 - comm.rank))
            np.testing.assert_array_equal(arrived[1], np.full((4, 3), 7.0 * (2 - comm.rank)))

    ranks.run(program)


def test_nothing_is_outstanding_at_the_end_of_a_step(ranks):
    def program(comm):
        log = Log()
        p2p = connect(comm, 3, log)
        for _ in range(3):
            exchange(p2p, [np.ones(3)] * 3)
            assert log.requests == {}
        assert len(log.calls("done")) == len(log.calls("isend", "irecv"))

    ranks.run(program)


def test_wait_sent_lets_the_array_go(ranks):
    def program(comm):
        log = Log()
        p2p = connect(comm, 1, log)
        p2p.begin([ROW])
        if comm.rank == 0:
            p2p.send(Action(Kind.SEND_F, 0, 0), bundle(np.ones(2)))
            assert len(log.requests) == 2  # header and data
            p2p.wait_sent(Action(Kind.SEND_F, 0, 0))
            assert log.requests == {}
            p2p.wait_sent(Action(Kind.SEND_F, 0, 0))  # again: nothing to wait for
        else:
            p2p.post(Action(Kind.RECV_F, 1, 0))
            p2p.receive(Action(Kind.RECV_F, 1, 0))
        p2p.finish()

    ranks.run(program)


def solo(num_microbatches=2, **limits):
    comm = RecordingCommunicator(SoloCommunicator(), Log(), **limits)
    return PointToPoint(comm, lambda stage: 0, num_stages=2, num_microbatches=num_microbatches)


def test_a_receive_left_over_is_refused_at_the_end_of_a_step():
    p2p = solo()
    p2p.begin([ROW, ROW])
    p2p.post(Action(Kind.RECV_F, 1, 0))
    message = r"\[rank 0\] at the end of a step these receives are not consumed: \[1RECV_F0\]"
    with pytest.raises(RuntimeError, match=message):
        p2p.finish()


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_shape_that_depends_on_data_is_refused(in_one_step):
    p2p = solo()
    p2p.begin([ROW, ROW])
    p2p.send(Action(Kind.SEND_F, 0, 0), bundle(np.ones(3)))
    if not in_one_step:
        p2p.finish()
        p2p.begin([ROW, ROW])
    message = (
        r"stage 0: an input float64\[2\] gave float64\[3\] before and float64\[4\] now; "
        "the output's shape and dtype may depend on the input's shape and dtype only"
    )
    with pytest.raises(RuntimeError, match=message):
        p2p.send(Action(Kind.SEND_F, 0, 1), bundle(np.ones(4)))


def test_tags_are_bounded():
    solo(num_microbatches=4, max_tag=3 * 2 * 4 - 1)
    message = r"stages \* micro-batches must be at most 7 on this communicator, got 2 and 4"
    with pytest.raises(ValueError, match=message):
        solo(num_microbatches=4, max_tag=3 * 2 * 4 - 2)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 1), (3, 4), (4, 2)])
def test_every_message_has_a_tag_of_its_own_at_both_ends(num_stages, num_microbatches):
    log, seen = Log(), {}
    comm = RecordingCommunicator(SoloCommunicator(), log)
    p2p = PointToPoint(comm, lambda stage: 0, num_stages=num_stages, num_microbatches=num_microbatches)
    p2p.begin([ROW] * num_microbatches)
    for stage in range(num_stages - 1):
        for i in range(num_microbatches):
            for kind, sender, receiver in [(Kind.SEND_F, stage, stage + 1), (Kind.SEND_B, stage + 1, stage)]:
                log.clear()
                p2p.send(Action(kind, sender, i), bundle(np.ones(2)))
                receive = Action(Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B, receiver, i)
                p2p.post(receive)
                p2p.receive(receive)
                sent, received = ([event.tag for event in log.calls(call)] for call in ("isend", "irecv"))
                assert sorted(sent) == sorted(received)
                assert seen.keys().isdisjoint(sent)
                seen.update(dict.fromkeys(sent))
    assert max(seen) < 3 * num_stages * num_microbatches
    p2p.finish()
