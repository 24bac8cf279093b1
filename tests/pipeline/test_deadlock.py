import json
import re

import pytest
from drawn_orders import read
from jobs import needs_mpirun, run_job

from pipeline import SCHEDULES, Action, Collective, ScheduleError, check_deadlock_free, dump, lower
from pipeline.schedules import deadlock
from pipeline.schedules.schedule import round_robin

ONE_F_ONE_B = lower(SCHEDULES["1f1b"].orders(2, 2), rank_of=round_robin, num_stages=2)
LATE_RECEIVES = lower(SCHEDULES["1f1b"].orders(2, 2), rank_of=round_robin, num_stages=2, lookahead=0)
SWAPPED = read(
    """
0RECV_B0 0F0 0F1 0SEND_F1 0BW0 0SEND_F0 0RECV_B1 0BW1
1RECV_F0 1F0 1RECV_F1 1BW0 1SEND_B0 1F1 1BW1 1SEND_B1
"""
)
ALLREDUCE = Collective("allreduce", (0, 1))


def check(programs, **options):
    check_deadlock_free(programs, rank_of=round_robin, num_stages=2, **options)


def refused(programs, message, cells=None, **options):
    with pytest.raises(ScheduleError, match=f"^{re.escape(message.strip())}$") as caught:
        check(programs, **options)
    if cells is not None:
        assert caught.value.cells == tuple(cells)


def without(programs, text):
    return [[step for step in program if str(step) != text] for program in programs]


def swapped(programs, rank, one, other):
    """Exchange two steps of a rank."""
    change = {one: other, other: one}
    program = [Action.parse(change.get(str(step), str(step))) for step in programs[rank]]
    return [program if r == rank else list(p) for r, p in enumerate(programs)]


def test_receives_are_posted_early_so_that_even_blocking_sends_end():
    check(ONE_F_ONE_B)
    check(ONE_F_ONE_B, synchronous_sends=True)
    check(LATE_RECEIVES)


def test_blocking_sends_before_the_receives_meet_head_on():
    refused(
        LATE_RECEIVES,
        """
deadlock: rank 0 in 0SEND_F1 waits for 1RECV_F1 on rank 1; rank 1 in 1SEND_B0 waits for 0RECV_B0 on rank 0
rank 0  ... 0SEND_F0  0F1  [0SEND_F1]  0RECV_B0  0BW0 ...
rank 1  ... 1F0  1BW0  [1SEND_B0]  1RECV_F1  1F1 ...
""",
        cells=[(0, 3), (1, 3)],
        synchronous_sends=True,
    )


def test_a_dropped_receive_is_missed_by_the_action_that_needs_it():
    refused(
        without(ONE_F_ONE_B, "1RECV_F1"),
        """
deadlock: rank 1 in 1F1 waits for 1RECV_F1, which rank 1 never does
rank 1  ... 1BW0  1SEND_B0  [1F1]  1BW1  1SEND_B1
""",
        cells=[(1, 4)],
    )


def test_a_dropped_send_is_missed_by_its_receiver():
    refused(
        without(ONE_F_ONE_B, "0SEND_F1"),
        """
deadlock: rank 1 in 1F1 waits for 0SEND_F1, which rank 0 never does
rank 1  ... 1BW0  1SEND_B0  [1F1]  1BW1  1SEND_B1
""",
    )


def test_swapped_sends_leave_both_waiting():
    # Rank 1 needs F0 for the B0 that rank 0 waits for, before it sends F0.
    refused(
        SWAPPED,
        """
deadlock: rank 0 in 0BW0 waits for 1SEND_B0 on rank 1; rank 1 in 1F0 waits for 0SEND_F0 on rank 0
rank 0  ... 0F1  0SEND_F1  [0BW0]  0SEND_F0  0RECV_B1 ...
rank 1  1RECV_F0  [1F0]  1RECV_F1  1BW0 ...
""",
    )


def test_a_send_before_the_data_is_made_is_refused():
    refused(
        swapped(ONE_F_ONE_B, 0, "0SEND_F0", "0SEND_F1"),
        """
rank 0 sends 0SEND_F1 before 0F1 has made it
rank 0  0F0  [0SEND_F1]  0RECV_B0  0F1 ...
""",
        cells=[(0, 1)],
    )
    refused(
        swapped(ONE_F_ONE_B, 1, "1SEND_B0", "1BW0"),
        """
rank 1 sends 1SEND_B0 before 1B0 has made it
rank 1  ... 1F0  1RECV_F1  [1SEND_B0]  1BW0  1F1 ...
""",
    )


def test_a_send_without_a_receive_is_waited_for_at_the_end():
    programs = [[*ONE_F_ONE_B[0], Action.parse("0SEND_F0")], ONE_F_ONE_B[1]]
    refused(
        programs,
        """
deadlock: rank 0 in its end waits for 1RECV_F0, which rank 1 never does
rank 0  ... 0BW1  0SEND_F0  []
""",
        cells=[(0, len(programs[0]))],
    )


def test_the_end_comes_before_the_closing_collectives():
    programs = [[*ONE_F_ONE_B[0], Action.parse("0SEND_F0")], ONE_F_ONE_B[1]]
    with pytest.raises(ScheduleError, match="deadlock: rank 0 in its end waits for 1RECV_F0, which"):
        check(programs, closing=[[ALLREDUCE], [ALLREDUCE]])


def test_a_receive_that_nothing_takes_would_eat_the_next_message():
    programs = [ONE_F_ONE_B[0], [Action.parse("1RECV_F0"), *ONE_F_ONE_B[1]]]
    refused(programs, "rank 1 posts 1RECV_F0 and no action takes it\nrank 1  [1RECV_F0]  1RECV_F0  1F0 ...", [(1, 0)])


def test_a_backward_waits_for_the_send_of_its_forward():
    # Rank 1 sends a gradient before it asks for the activation, and asks for the next one first.
    programs = read(
        """
0F0 0SEND_F0 0RECV_B0 0BW0 0F1 0SEND_F1 0RECV_B1 0BW1
1BW0 1SEND_B0 1RECV_F1 1F1 1RECV_F0 1F0 1BW1 1SEND_B1
"""
    )
    refused(
        programs,
        """
deadlock: rank 0 in 0BW0 waits for 1RECV_F0 on rank 1; rank 1 in 1F1 waits for 0SEND_F1 on rank 0
rank 0  ... 0SEND_F0  0RECV_B0  [0BW0]  0F1  0SEND_F1 ...
rank 1  ... 1SEND_B0  1RECV_F1  [1F1]  1RECV_F0  1F0 ...
""",
    )


def test_the_counter_example_leaves_out_who_only_waits():
    # All three wait, but ranks 1 and 2 for each other.
    programs = read(
        """
0F0 0SEND_F0 0RECV_B0 0BW0
1RECV_F0 1F0 1RECV_B0 1BW0 1SEND_F0 1SEND_B0
2RECV_F0 2F0 2BW0 2SEND_B0
"""
    )
    with pytest.raises(ScheduleError) as caught:
        check_deadlock_free(programs, rank_of=round_robin, num_stages=3)
    assert caught.value.cells == ((1, 3), (2, 1))


def test_the_counter_example_is_the_smallest_circle():
    # 0 waits for 1 and 2, 1 for 0, and 2 for 1: two circles.
    everyone, first, last = (Collective(str(ranks), ranks) for ranks in ((0, 1, 2), (0, 1), (1, 2)))
    with pytest.raises(ScheduleError) as caught:
        check_deadlock_free(
            [[everyone, first], [first, everyone, last], [last, everyone]], rank_of=round_robin, num_stages=3
        )
    assert caught.value.cells == ((0, 0), (1, 0))


def with_last(programs, *collectives):
    return [[*program, *mine] for program, mine in zip(programs, collectives, strict=True)]


def test_collectives_in_one_order_end():
    buckets = [Collective("bucket 0", (0, 1)), Collective("bucket 1", (0, 1))]
    check(with_last(ONE_F_ONE_B, buckets, buckets), closing=[[ALLREDUCE], [ALLREDUCE]])


def test_collectives_in_two_orders_do_not():
    buckets = [Collective("bucket 0", (0, 1)), Collective("bucket 1", (0, 1))]
    refused(
        with_last(ONE_F_ONE_B, buckets, buckets[::-1]),
        """
deadlock: rank 0 in bucket 0 waits for bucket 0 on rank 1; rank 1 in bucket 1 waits for bucket 1 on rank 0
rank 0  ... 0BW0  0BW1  [bucket 0]  bucket 1
rank 1  ... 1BW1  1SEND_B1  [bucket 1]  bucket 0
""",
    )


def test_a_collective_that_a_rank_leaves_out_is_missed():
    refused(
        with_last(ONE_F_ONE_B, [ALLREDUCE], []),
        """
deadlock: rank 0 in allreduce waits for allreduce, which rank 1 never does
rank 0  ... 0BW0  0BW1  [allreduce]
""",
    )


def test_a_collective_before_a_send_that_the_other_needs_first():
    program = [*ONE_F_ONE_B[0][:1], ALLREDUCE, *ONE_F_ONE_B[0][1:]]
    refused(
        [program, [*ONE_F_ONE_B[1], ALLREDUCE]],
        """
deadlock: rank 0 in allreduce waits for allreduce on rank 1; rank 1 in 1F0 waits for 0SEND_F0 on rank 0
rank 0  0F0  [allreduce]  0SEND_F0  0RECV_B0 ...
rank 1  1RECV_F0  [1F0]  1RECV_F1  1BW0 ...
""",
    )


def test_closing_collectives_come_after_the_sends_and_only_where_they_belong():
    check(ONE_F_ONE_B, closing=[[ALLREDUCE], [Collective("alone", (1,)), ALLREDUCE]])


def test_replicas_meet_in_their_buckets():
    def replica(order):
        dp = [Collective(f"bucket {i}", (0, 2)) for i in order]
        return [[*ONE_F_ONE_B[0], *dp], [*ONE_F_ONE_B[1], Collective("bucket 0", (1, 3))]]

    check([*replica((0, 1)), *replica((0, 1))], num_replicas=2)
    with pytest.raises(ScheduleError, match=r"rank 0 in bucket 0 .* rank 2 in bucket 1") as caught:
        check([*replica((0, 1)), *replica((1, 0))], num_replicas=2)
    assert [rank for rank, _ in caught.value.cells] == [0, 2]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_no_schedule_deadlocks_whenever_receives_are_posted(schedule, lookahead):
    place = {"rank_of": schedule.rank_of, "num_stages": schedule.num_stages(4)}
    check_deadlock_free(lower(schedule.orders(4, 8), lookahead=lookahead, **place), **place)


def test_leaving_out_any_message_end_is_refused():
    for program in ONE_F_ONE_B:
        for step in program:
            if not step.kind.is_compute:
                with pytest.raises(ScheduleError, match="never does"):
                    check(without(ONE_F_ONE_B, str(step)))


def test_a_large_program_is_proved_in_few_looks(monkeypatch):
    """A rank that waits is looked at again while others go on: not so often that it grows with their number squared."""
    programs = lower(SCHEDULES["1f1b"].orders(16, 64), rank_of=round_robin, num_stages=16)
    looks = 0

    class Counted(deadlock._Wait):
        def __new__(cls, at, awaited, lacking):
            def counted():
                nonlocal looks
                looks += 1
                return lacking()

            return super().__new__(cls, at, awaited, counted)

    monkeypatch.setattr(deadlock, "_Wait", Counted)
    check_deadlock_free(programs, rank_of=round_robin, num_stages=16)
    num_steps = sum(map(len, programs))
    assert 0 < looks < num_steps


# Whether the proof tells the truth about MPI: the same programs over real synchronous sends.

RUN_PROGRAMS = """
import json, os, sys, time
from mpi4py import MPI
import numpy as np
from pipeline.schedules.csv_file import parse

world = MPI.COMM_WORLD
other = 1 - world.rank

class Hangs(Exception):
    pass

def tag(action):  # both ends of a message: direction, receiving stage, micro-batch
    to = action.stage + {"SEND_F": 1, "SEND_B": -1}.get(action.kind.name, 0)
    return (action.kind.name[-1] == "B") * 1000 + to * 100 + action.microbatch

def run(comm, programs, blocking, limit):
    kept, end = [], time.monotonic() + limit

    def finish(request):
        while not request.Test():
            if time.monotonic() > end:
                raise Hangs
            time.sleep(1e-4)

    def receive(number):
        kept.append(array := np.empty(1))
        return comm.Irecv(array, other, number)

    posted, sent = {}, []
    for action in programs[comm.rank]:
        name = action.kind.name
        if name.startswith("RECV"):
            posted[tag(action)] = receive(tag(action))
        elif name.startswith("SEND"):
            sent.append(comm.Issend(np.zeros(1), other, tag(action)))
            if blocking:
                finish(sent[-1])
        else:
            needed = (name[0] == "B") * 1000 + action.stage * 100 + action.microbatch
            if (action.stage, name) not in ((0, "F"), (1, "BW")):
                finish(posted.pop(needed) if needed in posted else receive(needed))
    for request in sent:
        finish(request)

for case, text, blocking, limit in json.loads(sys.argv[1]):
    world.Barrier()
    try:
        run(comm := world.Dup(), parse(text), blocking, limit)
        hangs = False
    except Hangs:
        hangs = True
    hangs = world.allreduce(hangs)  # on any rank
    if world.rank == 0:
        print(f"{case}: {'hangs' if hangs else 'ends'}", flush=True)
world.Barrier()
os._exit(0)  # with messages under way, for which MPI would wait
"""

CASES = {  # programs, whether a send blocks
    "1f1b": (ONE_F_ONE_B, False),
    "1f1b, blocking": (ONE_F_ONE_B, True),
    "late receives": (LATE_RECEIVES, False),
    "late receives, blocking": (LATE_RECEIVES, True),
    "swapped sends": (SWAPPED, False),
    "dropped send": (without(ONE_F_ONE_B, "1SEND_B0"), False),
}


@needs_mpirun
def test_mpi_ends_what_is_accepted_and_hangs_in_what_is_refused(tmp_path):
    """All in one job: on a communicator of its own each, and who hangs gives up after a second."""
    verdicts, orders = {}, []
    for case, (programs, blocking) in CASES.items():
        try:
            check(programs, synchronous_sends=blocking)
            verdicts[case], limit = "ends", 30
        except ScheduleError:
            verdicts[case], limit = "hangs", 1
        orders.append((case, dump(programs), blocking, limit))
    assert set(verdicts.values()) == {"ends", "hangs"}
    script = tmp_path / "run_programs.py"
    script.write_text(RUN_PROGRAMS)
    result = run_job([str(script), json.dumps(orders)], ranks=2)
    said = sorted(re.findall(".*: (?:ends|hangs)", result.stdout))
    assert said == sorted(f"{case}: {verdict}" for case, verdict in verdicts.items()), result.stderr
