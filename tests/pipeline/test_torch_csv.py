"""Schedules as PyTorch writes them, there and back."""

import pytest

from pipeline import BW, SCHEDULES, B, F, ScheduleError, W
from pipeline.cli.main import main
from pipeline.schedules.action import pair
from pipeline.schedules.torch_csv import dump_torch, parse_torch


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_there_and_back(schedule):
    orders = schedule.orders(4, 8)
    assert parse_torch(dump_torch(orders)) == orders


def test_the_letters_are_those_of_pytorch():
    assert dump_torch([[F(0, 0), B(0, 0), W(0, 0)], [F(1, 0), BW(1, 0)]]) == "0F0,0I0,0W0\n1F0,1B0\n"


def test_a_pair_is_one_cell_and_communication_is_left_out():
    text = "0F0,,(0F1;3B0)OVERLAP_F_B,0SEND_F1,0UNSHARD,0REDUCE_GRAD\n1RECV_F0, 1F0 ,1I0\n"
    assert parse_torch(text) == [[F(0, 0), pair(F(0, 1), BW(3, 0))], [F(1, 0), B(1, 0)]]
    assert dump_torch(parse_torch(text)) == "0F0,(0F1;3B0)OVERLAP_F_B\n1F0,1I0\n"


@pytest.mark.parametrize(
    "cell", ["0BW0", "F0", "0F", *(f"({both})OVERLAP_F_B" for both in ("0F1;3X0", "0F1;3B1", "3B0;0F1")), "0F0;"]
)
def test_a_wrong_cell_is_named(cell):
    with pytest.raises(ScheduleError, match="a cell of PyTorch is a stage, one of F, I, W, B") as caught:
        parse_torch(f"0F0\n1F0,{cell}\n")
    assert repr(cell) in str(caught.value)
    assert caught.value.cells == ((1, 1),)


def test_what_is_no_table_is_one_line(tmp_path, capsys):
    # The reader's own error came through, with its traceback; and a cell was shown whole, however long.
    path = tmp_path / "theirs.csv"
    for text, said in [("0" * 200_000, "a schedule must be a table of cells"), ("0F" + "1" * 5000, "got '0F111")]:
        path.write_text(text)
        assert main(["dump", str(path), "--from", "torch"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
        assert len(line) < 400


def test_communication_is_not_written():
    from pipeline import lower

    schedule = SCHEDULES["1f1b"]
    programs = lower(schedule.orders(2, 2), rank_of=schedule.rank_of, num_stages=2)
    with pytest.raises(ValueError, match="an order holds compute actions only"):
        dump_torch(programs)


def test_the_command_writes_and_reads_it(tmp_path, capsys):
    assert main(["dump", "dualpipev", "--stages", "4", "--microbatches", "4", "--for", "torch"]) == 0
    path = tmp_path / "theirs.csv"
    path.write_text(capsys.readouterr().out)
    assert "0I2" in path.read_text()
    assert main(["dump", str(path), "--from", "torch"]) == 0
    ours = capsys.readouterr().out
    assert main(["dump", "dualpipev", "--stages", "4", "--microbatches", "4"]) == 0
    assert capsys.readouterr().out == ours


def test_a_file_of_theirs_that_is_no_step_is_refused(tmp_path, capsys):
    path = tmp_path / "theirs.csv"
    path.write_text("0F0,0W0\n")
    assert main(["dump", str(path), "--from", "torch"]) == 2
    assert "F comes before B before W" in capsys.readouterr().err
