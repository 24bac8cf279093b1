"""The recorder: what a rank did when, on one clock for all ranks."""

import time
from itertools import count, pairwise

import numpy as np
import pytest
from recording import Log, RecordingCommunicator
from toy_pipeline import X, Y, connect, four_layers

import minigrad as mg
from distributed import BucketedTrainer, LocalWorld, Mesh, SoloCommunicator, TrainingConfig, Work
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.ddp import DistributedDataParallel
from distributed.trace.clock import DeviceClock
from distributed.trace.recorder import Recorder, clock_offset, size_text
from minigrad.models import MLP
from minigrad.optim import SGD, Optimizer
from pipeline import Event
from pipeline.schedules.measured import timeline


class Later(Work):
    """Work that is complete at its third test."""

    def __init__(self):
        self.num_tests = 0

    def test(self):
        self.num_tests += 1
        return self.num_tests >= 3

    def wait(self):
        return np.ones(1)


class FakeCuda:
    """A stream that comes to each event 1 ms after the one before, and a host that is long through by then."""

    def __init__(self):
        self.num_events = 0
        self.num_waits = 0

    def get_current_stream(self):
        return self

    def record(self):
        self.num_events += 1
        return FakeEvent(self, self.num_events)

    def get_elapsed_time(self, first, last):
        return last.milliseconds - first.milliseconds


class FakeEvent:
    def __init__(self, cuda, milliseconds):
        self.milliseconds = milliseconds
        self.cuda = cuda

    def synchronize(self):
        self.cuda.num_waits += 1


class OnGpu(Later):
    """Work on another stream of a GPU, over 40 ms after its first event."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    @property
    def done_event(self):
        return FakeEvent(self.cuda, 41)


def test_on_a_gpu_times_are_those_of_its_events_and_nobody_waits_while_recording():
    cuda = FakeCuda()
    recorder = Recorder(clock=DeviceClock(cuda))
    with recorder:
        recorder.enter("compute", "0F0")  # 2
        recorder.watch("send", "0SEND_F0", lambda: OnGpu(cuda)).wait()  # 3
        recorder.watch("send", "by the host", Later).wait()  # 4, 5
        recorder.enter("wait", "0RECV_B0")  # 6, 7
        assert cuda.num_waits == 1
    notes = recorder.notes
    zero = notes[0].start - 2e-3
    assert [(note.name, round(1e3 * (note.start - zero)), round(1e3 * (note.end - zero))) for note in notes] == [
        ("0SEND_F0", 2, 40),
        ("by the host", 3, 4),
        ("0F0", 1, 5),
        ("0RECV_B0", 6, 7),
    ]


def test_a_rank_is_in_one_state_at_a_time():
    recorder = Recorder()
    with recorder:
        recorder.enter("compute", "0F0")
        recorder.enter("wait", "0RECV_B0")
        recorder.enter("compute", "0W0", "0W1")
        recorder.leave()
        recorder.leave()
        recorder.enter("step", "drain")
    assert [(note.category, note.name) for note in recorder.notes] == [
        ("compute", "0F0"),
        ("wait", "0RECV_B0"),
        ("compute", "0W0 0W1"),
        ("step", "drain"),
    ]
    ends = [time for note in recorder.notes for time in (note.start, note.end)]
    assert ends == sorted(ends)


def test_nothing_is_noted_or_watched_outside():
    recorder = Recorder()
    recorder.enter("compute", "0F0")
    work = Later()
    assert recorder.watch("send", "0SEND_F0", lambda: work) is work
    assert recorder.hooks().between_ops is None
    recorder.leave()
    assert recorder.notes == []


def test_each_recording_begins_anew():
    recorder = Recorder()
    for name in "ab":
        with recorder:
            recorder.enter("compute", name)
    assert [note.name for note in recorder.notes] == ["b"]


def test_work_ends_when_it_is_first_seen_to_be_complete():
    recorder = Recorder()
    with recorder:
        looked, waited = (recorder.watch("send", name, Later) for name in ("looked", "waited"))
        look = recorder.hooks().between_ops
        waited.wait()
        waited.wait()
        assert [note.name for note in recorder.notes] == ["waited"]
        look()
        assert not looked.test()
        time.sleep(0.001)
        before = time.perf_counter()
        look()
    waited, looked = recorder.notes
    assert looked.name == "looked"
    assert looked.end >= before > waited.end


def test_what_is_still_under_way_at_the_end_is_not_noted():
    recorder = Recorder()
    with recorder:
        work = recorder.watch("send", "0SEND_F0", Later)
    num_tests = work._inner.num_tests
    with recorder:
        recorder.hooks().between_ops()
        assert work._inner.num_tests == num_tests, "a recording looks at what an earlier one left"
        work.wait()
    assert recorder.notes == []


def test_events_of_all_ranks_are_told_to_each_on_one_clock(ranks):
    def program(comm):
        recorder = Recorder()
        comm.barrier()
        with recorder:
            recorder.enter("compute", "outer", comm.rank)
            comm.barrier()
            recorder.enter("step", "inner")
            comm.barrier()
        return recorder.gather(comm)

    first, *others = ranks.run(program)
    assert all(events == first for events in others)
    assert first[0].start == 0
    assert [event.start for event in first] == sorted(event.start for event in first)
    for rank in range(ranks.size):
        outer, inner = (event for event in first if event.rank == rank)
        assert (outer.name, inner.name) == (f"outer {rank}", "inner")
        # All passed the first barrier before anybody passed the second. Clocks are aligned to half of what a message
        # and its answer take: of ranks that share a core, some of their turns.
        assert all(event.start < inner.end + 0.2 for event in first)


def test_events_that_overlap_get_tracks_of_their_own():
    recorder = Recorder()
    with recorder:
        works = [recorder.watch("send", name, Later) for name in "abc"]
        for work in works[:2]:
            work.wait()
        recorder.watch("send", "d", Later).wait()
        works[2].wait()
    events = recorder.gather(SoloCommunicator())
    assert [(event.name, event.category) for event in events] == [
        ("a", "send"),
        ("b", "send 2"),
        ("c", "send 3"),
        ("d", "send"),
    ]


@pytest.mark.ranks(2, 3)
def test_clocks_that_differ_are_aligned(ranks):
    looks = count()  # a clock of threads that goes on when one looks: between two looks of rank 0 another has its own

    def program(comm):
        return clock_offset(comm, lambda: next(looks) + 100.0 * comm.rank)

    if isinstance(ranks, LocalWorld):
        assert ranks.run(program) == [-100 * rank for rank in range(ranks.size)]


@pytest.mark.point_to_point
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_a_step_is_recorded_from_its_opening_to_its_losses(ranks, schedule):
    def program(comm):
        pipe = connect(comm, four_layers(), schedule=schedule)
        pipe.step(X, Y)
        with pipe.recorder:
            pipe.step(X, Y)
        return pipe.recorder.gather(comm)

    events = ranks.run(program)[0]
    orders = timeline(events).rows  # of each rank, its order
    assert [len(row) for row in orders] == [6 if schedule == "1f1b" else 9] * ranks.size
    for rank in range(ranks.size):
        mine = [event for event in events if event.rank == rank]
        steps = [event.name for event in mine if event.category == "step"]
        assert steps == ["open", "drain", "sum tied", "losses"]
        num_messages = 3 * ((rank > 0) + (rank < ranks.size - 1))  # in, and as many out
        for kind in ("send", "receive"):
            assert sum(event.category.split()[0] == kind for event in mine) == num_messages
        assert sum(len(event.name.split()) for event in mine if event.category == "message") == 2 * num_messages
        assert sum(event.category == "wait" for event in mine) == num_messages
        states = [event for event in mine if event.category in ("step", "message", "wait", "compute")]
        assert all(a.end <= b.start for a, b in pairwise(states))


def test_what_is_recorded_changes_nothing(ranks):
    def program(comm):
        log = Log()
        pipe = connect(RecordingCommunicator(comm, log), four_layers(), schedule="zero_bubble_h1")
        pipe.step(X, Y)
        calls = []
        for recorded in (False, True):
            log.clear()
            if recorded:
                with pipe.recorder:
                    loss = pipe.step(X, Y)
            else:
                loss = pipe.step(X, Y)
            calls.append([loss, [(event.call, event.tag) for event in log if event.call != "done"]])
        return calls

    for plain, recorded in ranks.run(program):
        assert plain == recorded


@pytest.mark.ranks(2)
def test_buckets_are_recorded_from_launch_to_end(ranks):
    def program(comm):
        mesh = Mesh(comm, dp=2, pp=1)
        pipe = connect(mesh.pp, four_layers(), schedule="gpipe")
        comm_hook = pipe.recorder.comm_hook(allreduce)
        ddp = DistributedDataParallel(pipe.stages, mesh.dp, bucket_bytes=100, comm_hook=comm_hook)
        with pipe.recorder:
            pipe.step(X, Y, hooks=ddp.hooks(num_samples=len(X)))
            ddp.wait()
        nbytes = sum(p.data.nbytes for p in pipe.stages.parameters())
        return pipe.recorder.gather(comm), ddp.buckets.num_buckets, nbytes

    events, num_buckets, nbytes = ranks.run(program)[0]
    buckets = [event for event in events if event.category.split()[0] == "bucket"]
    assert len(buckets) == 2 * num_buckets > 4
    assert sum(int(event.name.removesuffix(" B")) for event in buckets) == 2 * nbytes
    assert all(isinstance(event, Event) and event.end >= event.start for event in buckets)
    compute_end = max(event.end for event in events if event.category == "compute")
    assert sum(event.start < compute_end for event in buckets) > num_buckets


def test_a_span_gives_back_what_was_done_before():
    recorder = Recorder(first=("compute", "forward"))
    with recorder:
        with recorder.span("wait", "counts"):
            pass
        recorder.enter("compute", "backward")
    assert [(note.category, note.name) for note in recorder.notes] == [
        ("compute", "forward"),
        ("wait", "counts"),
        ("compute", "forward"),
        ("compute", "backward"),
    ]
    with recorder.span("wait", "nothing is noted outside"):
        pass
    assert len(recorder.notes) == 4


def test_a_recording_ends_where_work_has_failed():
    # What ended the step made the look for its messages raise too: the recorder stayed on, and noted all steps to come.
    class Failed(Later):
        def test(self):
            raise ConnectionError("the other rank is gone")

    def step():
        with recorder:
            recorder.watch("bucket", "0", Failed)
            with recorder.span("wait", "counts"):
                raise KeyError

    recorder = Recorder(first=("compute", "forward"))
    with pytest.raises(ConnectionError):
        step()
    assert not recorder.is_on
    assert [note.name for note in recorder.notes] == ["forward", "counts", "forward"]


FORWARD, BACKWARD, OPTIMIZER = (("compute", name) for name in ("forward", "backward", "optimizer"))


def states_by_rank(events, size):
    """Return what each rank did, without what was under way; states may not overlap."""
    result = []
    for rank in range(size):
        mine = [event for event in events if event.rank == rank and event.category in ("compute", "wait")]
        assert all(a.end <= b.start for a, b in pairwise(mine))
        result.append([(event.category, event.name) for event in mine])
    return result


def test_replicas_have_a_timeline_without_a_pipeline(ranks):
    def program(comm):
        model = MLP([3, 8, 2], dtype=np.float64)
        ddp = DistributedDataParallel(model, comm, bucket_bytes=1)
        optimizer = Optimizer(model.parameters(), SGD(0.1))

        def step():
            optimizer.zero_grad()
            loss = model(np.ones((2, 3))).mean()
            mg.backward_with_hooks(loss, ddp.hooks(num_samples=2))
            ddp.wait()
            optimizer.step()
            return ddp.mean(loss.item())

        step()
        with ddp.recorder:
            step()
        return ddp.recorder.gather(comm), ddp.buckets.num_buckets

    events, num_buckets = ranks.run(program)[0]
    counts, buckets, mean = (("wait", name) for name in ("sample counts", "buckets", "mean"))
    expected = [FORWARD, counts, FORWARD, BACKWARD, buckets, OPTIMIZER, mean, OPTIMIZER]
    assert states_by_rank(events, ranks.size) == [expected] * ranks.size
    under_way = [event for event in events if event.category.split()[0] == "bucket"]
    assert len(under_way) == ranks.size * num_buckets


def test_a_trainer_says_what_each_of_its_steps_did(ranks):
    def program(comm):
        model = MLP([3, 8, 2], dtype=np.float64)
        trainer = BucketedTrainer(model, comm, TrainingConfig(grad_accum_steps=2))
        with trainer.recorder:
            for _ in range(4):
                trainer.backward_and_step(model(np.ones((2, 3))).mean(), num_samples=2)
        return trainer.recorder.gather(comm)

    events = ranks.run(program)[0]
    counts, buckets, loss = (("wait", name) for name in ("sample counts", "buckets", "loss"))
    step = [FORWARD, BACKWARD, FORWARD, counts, FORWARD, BACKWARD, buckets, OPTIMIZER, loss, OPTIMIZER]
    assert states_by_rank(events, ranks.size) == [[*step, *step, FORWARD]] * ranks.size


class Line:
    """Rank 0's end of a line to rank 1, whose clock runs `ahead`, in a world where only messages take time.

    Attributes:
        trips: how long a question and its answer take, for each exchange.
        told: what rank 1 is told in the end.
    """

    rank, size = 0, 2

    def __init__(self, ahead, trips):
        self.now, self.ahead, self.trips, self.told = 1000.0, ahead, list(trips), None

    def duplicate(self):
        return self

    def send(self, array, *, dest, tag):
        if not self.trips:
            self.told = float(array[0])
            return
        self.now += self.trips[0][0]

    def recv(self, array, *, source, tag):
        array[0] = self.now + self.ahead
        self.now += self.trips.pop(0)[1]


def test_an_offset_counts_half_the_round_trip_of_the_quickest_answer():
    trips = [(1.0, 9.0)] * 7 + [(2.0, 2.0)] + [(9.0, 1.0)] * 8
    line = Line(ahead=50.0, trips=trips)
    clock_offset(line, lambda: line.now)
    assert line.told == -50.0  # without the half it would be -52, with another exchange's answer -46 or -54


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (98304, "96 KiB"), (2**20 - 1, "1 MiB"), (5 * 2**28, "1.25 GiB")],
)
def test_sizes_have_three_digits_and_their_unit(nbytes, text):
    assert size_text(nbytes) == text
