import re

import pytest
from drawn_orders import read

from pipeline import SCHEDULES, ScheduleError, validate
from pipeline.schedules.schedule import round_robin


def check(orders, num_stages=2, num_microbatches=2, rank_of=round_robin):
    validate(orders, num_stages=num_stages, num_microbatches=num_microbatches, rank_of=rank_of)


GOOD = """
0F0  0F1  0BW0 0BW1
1F0  1BW0 1F1  1BW1
"""

# Each mutant of GOOD with the rule that it breaks and the grid that the message ends with.
MUTANTS = {
    "micro-batch used twice": (
        """
0F0  0F1  0BW0 0BW1
1F0  1BW0 1F0  1BW1
""",
        "a stage runs F of a micro-batch once, got 1F0 on rank 1 after 1F0 was done",
        """
rank 0  0F0   0F1   0BW0  0BW1
rank 1 [1F0]  1BW0 [1F0]  1BW1 <-- here
""",
    ),
    "both backward and weight half": (
        """
0F0  0F1  0BW0 0W0 0BW1
1F0  1BW0 1F1  1BW1
""",
        "a stage runs W of a micro-batch once, got 0W0 on rank 0 after 0W0 was done",
        """
rank 0  0F0   0F1  [0BW0][0W0]  0BW1 <-- here
rank 1  1F0   1BW0  1F1   1BW1
""",
    ),
    "swapped pair": (
        """
0F0  0F1  0BW0 0BW1
1BW0 1F0  1F1  1BW1
""",
        "F comes before B before W of a micro-batch, got 1BW0 on rank 1 with no 1F0 before it",
        """
rank 0  0F0   0F1   0BW0  0BW1
rank 1 [1BW0] 1F0   1F1   1BW1 <-- here
""",
    ),
    "weight half too early": (
        """
0F0  0W0  0B0 0F1 0BW1
1F0  1BW0 1F1  1BW1
""",
        "F comes before B before W of a micro-batch, got 0W0 on rank 0 with no 0B0 before it",
        """
rank 0  0F0  [0W0]  0B0   0F1   0BW1 <-- here
rank 1  1F0   1BW0  1F1   1BW1
""",
    ),
    "missing backward": (
        """
0F0  0F1  0BW0 0BW1
1F0  1BW0 1F1
""",
        "every stage runs every micro-batch: rank 1 has no B or BW of micro-batch 1 on stage 1",
        """
rank 0  0F0   0F1   0BW0  0BW1
rank 1  1F0   1BW0  1F1  [] <-- here
""",
    ),
    "missing weight half": (
        """
0F0  0F1  0BW0 0B1
1F0  1BW0 1F1 1BW1
""",
        "every stage runs every micro-batch: rank 0 has no W or BW of micro-batch 1 on stage 0",
        """
rank 0  0F0   0F1   0BW0  0B1  [] <-- here
rank 1  1F0   1BW0  1F1   1BW1
""",
    ),
    "missing micro-batch": (
        """
0F0  0BW0
1F0  1BW0 1F1 1BW1
""",
        "every stage runs every micro-batch: rank 0 has no F of micro-batch 1 on stage 0",
        """
rank 0  0F0   0BW0 [] <-- here
rank 1  1F0   1BW0  1F1   1BW1
""",
    ),
    "stage of another rank": (
        """
0F0  0F1  0BW0 1F1
1F0  1BW0 0BW1 1BW1
""",
        "stage 1 belongs to rank 1, got 1F1 on rank 0",
        """
rank 0  0F0   0F1   0BW0 [1F1] <-- here
rank 1  1F0   1BW0  0BW1  1BW1
""",
    ),
    "no such stage": (
        """
0F0  0F1  0BW0 0BW1
1F0  1BW0 3F1  1BW1
""",
        "stages are numbered 0 to 1, got 3F1 on rank 1",
        """
rank 0  0F0   0F1   0BW0  0BW1
rank 1  1F0   1BW0 [3F1]  1BW1 <-- here
""",
    ),
    "no such micro-batch": (
        """
0F0  0F1  0BW0 0BW2
1F0  1BW0 1F1  1BW1
""",
        "micro-batches are numbered 0 to 1, got 0BW2 on rank 0",
        """
rank 0  0F0   0F1   0BW0 [0BW2] <-- here
rank 1  1F0   1BW0  1F1   1BW1
""",
    ),
    "communication": (
        """
0F0  0SEND_F0  0F1  0BW0 0BW1
1F0  1BW0 1F1  1BW1
""",
        "an order holds compute actions only (F, B, W, BW, F&B), got 0SEND_F0 on rank 0",
        """
rank 0  0F0      [0SEND_F0] 0F1       0BW0      0BW1 <-- here
rank 1  1F0       1BW0      1F1       1BW1
""",
    ),
    "each waits for the other": (
        """
0F0  0BW0 0F1  0BW1
1F0  1F1  1BW0 1BW1
""",
        "no rank can go on: rank 0 is at 0BW0 and needs 1B0; rank 1 is at 1F1 and needs 0F1",
        """
rank 0  0F0  [0BW0] 0F1   0BW1 <-- here
rank 1  1F0  [1F1]  1BW0  1BW1 <-- here
""",
    ),
}


def test_accepts_what_the_mutants_are_made_from():
    check(read(GOOD))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused_with_its_cell_marked(name):
    orders, rule, grid = MUTANTS[name]
    with pytest.raises(ScheduleError, match=f"^{re.escape(rule + grid.rstrip())}$"):
        check(read(orders))


def test_the_error_carries_the_cells():
    with pytest.raises(ScheduleError) as caught:
        check(read(MUTANTS["swapped pair"][0]))
    assert caught.value.cells == ((1, 0),)


def test_halves_may_stand_apart_and_mix_with_full_backwards():
    check(read("0F0 0F1 0B0 0B1 0W1 0W0\n1F0 1BW0 1F1 1B1 1W1"))


def test_a_rank_may_own_several_stages():
    v_shape = [0, 1, 1, 0]
    orders = read("0F0 3F0 3BW0 0BW0\n1F0 2F0 2BW0 1BW0")
    check(orders, num_stages=4, num_microbatches=1, rank_of=lambda stage, num_ranks: v_shape[stage])


def test_every_stage_has_a_rank():
    with pytest.raises(ScheduleError, match="rank_of must give a rank from 0 to 1, got 2 for stage 1\nrank 0  0F0"):
        check(read(GOOD), rank_of=lambda stage, num_ranks: 2 * stage)


GOOD_1F1B = SCHEDULES["1f1b"].orders(3, 4)
CELLS = [(rank, index) for rank, order in enumerate(GOOD_1F1B) for index in range(len(order))]


def changed(rank, start, stop, actions):
    """1F1B on 3 ranks with 4 micro-batches, some actions of one rank replaced."""
    orders = [list(order) for order in GOOD_1F1B]
    orders[rank][start:stop] = actions
    return orders


@pytest.mark.parametrize(("rank", "index"), CELLS)
def test_leaving_out_any_action_is_refused(rank, index):
    with pytest.raises(ScheduleError, match=r"every stage runs every micro-batch|F comes before B"):
        check(changed(rank, index, index + 1, []), num_stages=3, num_microbatches=4)


@pytest.mark.parametrize(("rank", "index"), CELLS)
def test_repeating_any_action_is_refused_with_both_cells(rank, index):
    with pytest.raises(ScheduleError, match=r"a stage runs [FB] of a micro-batch once") as caught:
        check(changed(rank, index, index, [GOOD_1F1B[rank][index]]), num_stages=3, num_microbatches=4)
    assert caught.value.cells == ((rank, index), (rank, index + 1))


@pytest.mark.parametrize(("rank", "index"), [cell for cell in CELLS if cell[1] > 0])
def test_swapping_neighbours_is_refused_where_a_backward_needs_its_forward(rank, index):
    # Any other swap in 1F1B gives another schedule, slower or larger but one that runs.
    before, after = GOOD_1F1B[rank][index - 1 : index + 1]
    orders = changed(rank, index - 1, index + 1, [after, before])
    if before in after.needs(3):
        with pytest.raises(ScheduleError, match=f"got {after} on rank {rank} with no {before} before it") as caught:
            check(orders, num_stages=3, num_microbatches=4)
        assert caught.value.cells == ((rank, index - 1),)
    else:
        check(orders, num_stages=3, num_microbatches=4)


def test_an_evaluation_holds_every_forward_and_nothing_else():
    place = {"num_stages": 2, "num_microbatches": 2, "rank_of": round_robin, "trains": False}
    validate(read("0F0 0F1\n1F1 1F0"), **place)
    with pytest.raises(ScheduleError, match="rank 1 has no F of micro-batch 1 on stage 1"):
        validate(read("0F0 0F1\n1F0"), **place)
    with pytest.raises(ScheduleError, match="an evaluation holds F only, got 1BW0 on rank 1") as caught:
        validate(read("0F0 0F1\n1F0 1BW0 1F1"), **place)
    assert caught.value.cells == ((1, 1),)


@pytest.mark.parametrize("rank", ["a", None, 0.5])
def test_a_placement_that_gives_no_number_of_a_rank_is_refused(rank):
    with pytest.raises(ScheduleError, match=f"rank_of must give a rank from 0 to 0, got {rank!r} for stage 0"):
        check(read("0F0 0BW0"), num_stages=1, num_microbatches=1, rank_of=lambda stage, num_ranks: rank)
