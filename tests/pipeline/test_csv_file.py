import re

import pytest
from toy_pipeline import X, Y, check_against_one_process, four_layers

from pipeline import SCHEDULES, ScheduleError, dump, from_text, interleaved_1f1b, load, lower
from pipeline.schedules.csv_file import parse

HAND_WRITTEN = """
0F0, 0F1,     ,     , 0BW0, 0BW1,
   , 1F0, 1BW0, 1F1, 1BW1
"""


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), interleaved_1f1b(3)], ids=lambda s: s.name)
def test_what_is_written_is_read_back(schedule, tmp_path):
    orders = schedule.orders(3, 6)
    path = tmp_path / "mine.csv"
    path.write_text(dump(orders))
    loaded = load(path)
    assert loaded.orders(3, 6) == orders
    assert (loaded.name, loaded.num_chunks, loaded.sizes) == ("mine.csv", schedule.num_chunks, (3, 6))
    num_stages = schedule.num_stages(3)
    assert [loaded.rank_of(s, 3) for s in range(num_stages)] == [schedule.rank_of(s, 3) for s in range(num_stages)]


def test_blank_cells_are_idle_time_and_spaces_do_not_matter():
    assert from_text(HAND_WRITTEN, "mine").orders(2, 2) == SCHEDULES["1f1b"].orders(2, 2)


def test_a_program_is_text_too():
    programs = lower(SCHEDULES["zbv"].orders(2, 3), rank_of=SCHEDULES["zbv"].rank_of, num_stages=4)
    assert parse(dump(programs)) == programs


def test_a_spreadsheet_may_leave_its_mark(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf" + dump(SCHEDULES["gpipe"].orders(2, 2)).replace("\n", "\r\n").encode())
    assert load(path).orders(2, 2) == SCHEDULES["gpipe"].orders(2, 2)


def test_it_is_for_the_sizes_that_it_shows():
    schedule = from_text(HAND_WRITTEN, "mine")
    with pytest.raises(ValueError, match="mine is written for 2 ranks and 2 micro-batches, got 2 and 4"):
        schedule.orders(2, 4)
    with pytest.raises(ValueError, match="mine is written for 2 ranks and 2 micro-batches, got 4 and 2"):
        schedule.orders(4, 2)
    with pytest.raises(ValueError, match="mine is written for 2 ranks, got 4"):
        schedule.rank_of(0, 4)


def refused(text, message):
    with pytest.raises(ScheduleError, match=f"^{re.escape(message)}$") as caught:
        from_text(text, "mine")
    return caught.value.cells


def test_a_cell_that_is_no_action_is_marked():
    with pytest.raises(
        ScheduleError,
        match=r"^mine: a cell is a stage, one of F, B, W, BW, and a micro-batch, as 1F0, or .*; got '1X1' on rank 1\n",
    ) as caught:
        from_text(HAND_WRITTEN.replace("1F1", "1X1"), "mine")
    drawing = """
rank 0  0F0   0F1   0BW0  0BW1
rank 1  1F0   1BW0 [1X1]  1BW1 <-- here
"""
    assert str(caught.value).endswith(drawing.rstrip())
    assert caught.value.cells == ((1, 2),)


@pytest.mark.parametrize("cell", ["7I0", "(0F4;3B1)OVERLAP_F_B"])
def test_a_cell_of_pytorch_names_the_command_that_reads_it(cell):
    with pytest.raises(ScheduleError, match=r"`python -m pipeline dump FILE --from torch` reads PyTorch's cells"):
        from_text(f"0F0,{cell}\n", "mine")


def test_an_order_that_is_no_schedule_is_marked():
    cells = refused(
        "0F0, 0F1, 0BW0, 0BW1\n1BW0, 1F0, 1F1, 1BW1",
        """mine: F comes before B before W of a micro-batch, got 1BW0 on rank 1 with no 1F0 before it
rank 0  0F0   0F1   0BW0  0BW1
rank 1 [1BW0] 1F0   1F1   1BW1 <-- here""",
    )
    assert cells == ((1, 0),)


def test_a_stage_is_on_one_rank():
    cells = refused(
        "0F0, 0BW0\n1F0, 0F1, 1BW0",
        """mine: stage 0 belongs to rank 0, got 0F1 on rank 1
rank 0  0F0   0BW0
rank 1  1F0  [0F1]  1BW0 <-- here""",
    )
    assert cells == ((1, 1),)


def test_every_rank_has_as_many_stages():
    for text, numbers in (
        ("0F0, 1F0, 1BW0, 0BW0\n2F0, 2BW0", "got 2 on rank 0 of 3 on 2 ranks"),
        ("0F0, 0BW0\n2F0, 2BW0", "got 1 on rank 0 of 3 on 2 ranks"),  # there is no stage 1
    ):
        with pytest.raises(
            ScheduleError, match=f"mine: every rank has the same number of stages, {numbers}\nrank 0  0F0"
        ):
            from_text(text, "mine")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xff\xfe0\x00F\x000\x00")  # as a spreadsheet's "Unicode text" is
    with pytest.raises(ScheduleError, match=r"^mine\.csv: a schedule must be text in UTF-8$"):
        load(path)


def test_an_empty_file_is_refused():
    refused("\n  \n", "mine: a schedule has one row a rank, got none")


@pytest.mark.ranks(2)
def test_a_schedule_of_a_person_trains(ranks):
    # Rank 1 puts all its weight halves last, which no schedule of ours does.
    text = """
0F0, 0F1, 0F2, 0BW0,     , 0BW1, 0BW2
   , 1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1W0, 1W1, 1W2
"""
    check_against_one_process(
        ranks, four_layers(), [X[:2], X[2:3], X[3:6]], [Y[:2], Y[2:3], Y[3:6]], schedule=from_text(text, "mine")
    )
