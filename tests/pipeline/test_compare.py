"""Schedules side by side: numbers of a rank, memory in bytes, reductions over replicas, many sizes, heat maps."""

import csv
import io
import xml.etree.ElementTree as ET

import pytest
from drawn_orders import read

from pipeline import SCHEDULES, simulate, svg
from pipeline.cli.main import main
from pipeline.schedules.compare import Work, measure, reductions_end, sweep, to_csv
from pipeline.schedules.drawing.heat_map import heat_map

GIB = 1 << 30


def test_the_work_of_a_rank_is_the_same_whatever_its_chunks():
    results = [measure(schedule, 4, 8, Work()) for schedule in SCHEDULES.values()]
    assert all(result.makespan / (1 + result.bubble) == pytest.approx(24) for result in results)
    by_name = {result.schedule: result for result in results}
    assert by_name["1f1b"].bubble == 9 / 24
    assert by_name["zbv"].span_bubble == 0
    assert by_name["v_half"].peak_memory == 3


def test_memory_in_bytes_is_what_micro_batches_take_and_what_is_always_held():
    work = Work(activations=GIB, deferred=GIB / 4, static=3 * GIB, memory=6 * GIB)
    assert measure(SCHEDULES["1f1b"], 4, 8, work).peak_memory == 7 * GIB  # a full backward keeps nothing for W
    assert not measure(SCHEDULES["1f1b"], 4, 8, work).fits
    assert measure(SCHEDULES["v_min"], 4, 8, work).fits


def test_reductions_of_an_early_stage_hide_behind_the_rest():
    # One rank: the backward of stage 1 is done at 5, of stage 0 at 7.
    timeline = simulate(read("0F0 1F0 1BW0 0BW0"), num_stages=2, backward_weight=0.5, backward_input=0.5)
    assert timeline.makespan == 4
    assert reductions_end(timeline, 0.75) == 4.75  # stage 1's: 3 to 3.75
    assert reductions_end(timeline, 2) == 7  # 3 to 5, 5 to 7: one after the other
    assert reductions_end(timeline, 0.75, latency=0.5) == 5.5


def test_a_step_with_reductions_is_longer_by_what_is_not_hidden():
    alone, reduced = (measure(SCHEDULES["looped_bfs"], 2, 4, Work(reduction=r)) for r in (0, 2))
    assert alone.with_reductions == alone.makespan
    assert reduced.with_reductions == alone.makespan + 1  # that of one chunk


def test_a_sweep_leaves_out_what_a_schedule_does_not_allow():
    results = sweep([SCHEDULES["interleaved_1f1b"], SCHEDULES["1f1b"]], [2, 4], [2, 6], Work())
    assert [(r.schedule[:4], r.num_ranks, r.num_microbatches) for r in results] == [
        ("inte", 2, 2),
        ("inte", 2, 6),
        ("1f1b", 2, 2),
        ("1f1b", 2, 6),
        ("1f1b", 4, 2),
        ("1f1b", 4, 6),
    ]
    rows = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert rows[2]["bubble"] == "0.5"
    assert [row["num_microbatches"] for row in rows] == ["2", "6"] * 3


def test_a_heat_map_is_darker_where_the_number_is_larger():
    picture = heat_map({(2, 4): 0.0, (2, 8): 1.0, (3, 4): 0.5}, "title", down="ranks", across="micro-batches")
    fills = [box.fill for box in picture.boxes]
    assert fills == ["#eff6fc", "#2166ac", "#88aed4", "#e9edf1"]
    assert [words.text for words in picture.words] == [
        *("title", "down: ranks, across: micro-batches", "4", "8"),
        *("2", "0.00", "1.00", "3", "0.50"),
    ]
    assert ET.fromstring(svg(picture)).tag.endswith("svg")


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    table, drawing = tmp_path / "a.csv", tmp_path / "a.svg"
    options = ["--ranks", "2..4", "--microbatches", "4,8", "--activations", "100MiB", "--memory", "1GiB"]
    assert main(["sweep", "gpipe", *options, "--csv", str(table), "--svg", str(drawing), "--value", "peak-memory"]) == 0
    assert capsys.readouterr().out == ""
    assert len(table.read_text().splitlines()) == 1 + 3 * 2
    assert "gpipe: most memory that a rank holds" in drawing.read_text()
    assert main(["sweep", "1f1b", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "1f1b,2,8,27,0.125,0.1111111111,2,True,27"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--ranks", "4..2"], "must go from a number to a larger one, got '4..2'"),
        (["sweep", "--ranks", "0..2"], "must be a whole number of at least 1, got '0'"),
        (["sweep", "--memory", "8GB"], "must be a number of at least 0, with or without one of KiB, MiB, GiB, TiB"),
        (["sweep", "--svg", "x.svg"], "--svg draws one schedule, got 10"),
        (["sweep", "interleaved_1f1b", "--microbatches", "3"], "no schedule allows any of these sizes"),
        (["search", "--memory", "1", "--static", "2"], "--memory must be more than --static, got -1 less"),
        (["search", "--memory", "0.5"], "takes 1 on rank 0, got a limit of 0.5"),
        (["search", "--forward", "1,2,3"], "numbers with commas must be one for each stage, got 3"),
    ],
)
def test_a_wrong_value_is_one_line(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_search_writes_what_check_accepts(tmp_path, capsys):
    path = tmp_path / "found.csv"
    options = ["--ranks", "2", "--microbatches", "4", "--memory", "2GiB", "--activations", "1GiB", "--seconds", "1"]
    assert main(["search", *options, "--csv", str(path)]) == 0
    assert "lower bound" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    assert "no timing of messages can deadlock it" in capsys.readouterr().out
    unequal = ["--ranks", "2", "--placement", "one", "--forward", "1,2", "--memory", "4,2", "--seconds", "1"]
    assert main(["search", *unequal]) == 0
    assert capsys.readouterr().out.startswith("placement one: 2 stages on 2 ranks, 8 micro-batches\nmakespan ")


def test_a_schedule_may_be_a_python_function(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_lab.py").write_text(
        "from pipeline import BW, F, SCHEDULES\n"
        "def mine(rank, num_ranks, num_microbatches):\n"
        "    return [a for i in range(num_microbatches) for a in (F(rank, i), BW(rank, i))]\n"
        "a_v = SCHEDULES['zbv']\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert main(["draw", "my_lab:mine", "--stages", "2", "--microbatches", "2"]) == 0
    assert capsys.readouterr().out.startswith("my_lab:mine: 2 stages on 2 ranks, 2 micro-batches\nrank 0 |F0|")
    assert main(["check", "my_lab:a_v"]) == 0
    assert main(["check", "my_lab:number"]) == 2
    assert "my_lab:number must be a Schedule or an order, a function, got int" in capsys.readouterr().err
    assert main(["check", "my_lab:other"]) == 2
    assert "the schedule 'my_lab:other' cannot be found" in capsys.readouterr().err
