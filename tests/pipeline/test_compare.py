"""Schedules side by side: numbers of a rank, memory in bytes, reductions over replicas, many sizes, heat maps."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from pipeline import SCHEDULES, dump, svg
from pipeline.cli.main import main
from pipeline.schedules.compare import Work, measure, searched, sweep, to_csv
from pipeline.schedules.drawing.heat_map import Quantity, heat_map

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


def test_a_step_with_reductions_is_longer_by_what_is_not_hidden():
    work = Work(gradient_bytes=4, reduction_bandwidth=2)
    alone, reduced = (measure(SCHEDULES["looped_bfs"], 2, 4, w) for w in (Work(), work))
    assert alone.with_reductions == alone.makespan
    assert alone.hidden == 1
    assert reduced.with_reductions == alone.makespan + 1  # that of one chunk
    assert reduced.hidden == 0.5


def test_messages_that_leave_a_host_share_its_link():
    work = Work(message_bytes=1)
    apart, shared = (measure(SCHEDULES["zbv"], 4, 8, replace(work, ranks_per_host=n)) for n in (0, 1))
    assert shared.makespan == apart.makespan  # a link of any bandwidth
    work = replace(work, bandwidth=0.5)
    apart, shared, inside = (measure(SCHEDULES["zbv"], 4, 8, replace(work, ranks_per_host=n)) for n in (0, 1, 4))
    assert shared.makespan > apart.makespan == inside.makespan


def test_a_sweep_leaves_out_what_a_schedule_does_not_allow():
    results = sweep([SCHEDULES["interleaved_1f1b"], SCHEDULES["1f1b"]], [2, 4], [2, 6], [Work()])
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


def test_a_search_is_one_of_the_schedules_and_keeps_the_memory_of_each_work():
    def search(p, m, work):
        return searched(p, m, work, seconds=5, num_tries=20)

    works = [Work(memory=memory) for memory in (1.5, 2, 4)]
    results = sweep([search], [3], [6], works)
    assert [r.schedule for r in results] == ["search"] * 3
    assert all(result.fits for result in results)
    assert results[0].makespan > results[2].makespan
    named = sweep(SCHEDULES.values(), [3], [6], works)
    for result in results:
        assert all(result.makespan <= r.makespan for r in named if r.fits and r.memory == result.memory)


def test_a_search_in_bytes_between_stages_keeps_to_placements_of_these_stages():
    """Sizes of seven boundaries, of two stages a rank, were cut to the first three for one stage a rank."""
    work = Work(message_bytes=(0.0, 0, 0, 9, 9, 9, 9), bandwidth=1)
    assert searched(4, 4, work, num_tries=2).num_chunks == 2
    with pytest.raises(
        ValueError, match="message_bytes must be one number or one for each of the boundaries, got 4 for 3"
    ):
        searched(4, 4, Work(message_bytes=(0.0,) * 4), num_tries=2)


def test_a_heat_map_is_darker_where_the_number_is_larger():
    picture = heat_map(
        {(2, 4): 0.0, (2, 8): 1.0, (3, 4): 0.5},
        Quantity("bubble"),
        "title",
        down=Quantity("ranks"),
        across=Quantity("micro-batches"),
    )
    fills = [box.fill for box in picture.boxes]
    assert fills == ["#eff6fc", "#2166ac", "#88aed4", "#e9edf1"]
    assert [words.text for words in picture.words] == [
        *("title", "down: ranks, across: micro-batches", "4", "8"),
        *("2", "0.00", "1.00", "3", "0.50"),
    ]
    assert ET.fromstring(svg(picture)).tag.endswith("svg")


def test_a_heat_map_has_units_of_memory_for_memory_alone(tmp_path):
    """A step of 16 million microseconds once took 15.3Mi."""
    drawing = tmp_path / "a.svg"
    options = [
        "--latency",
        "0,2000000",
        "--memory",
        "1GiB,2GiB",
        "--svg",
        str(drawing),
        "--csv",
        str(tmp_path / "a.csv"),
    ]
    assert main(["sweep", "1f1b", *options, "--value", "with-reductions"]) == 0
    words = [text.text for text in ET.fromstring(drawing.read_text()).iter() if text.tag.endswith("text")]
    assert words[2:] == ["1Gi", "2Gi", "0", "33.00", "33.00", "2e+06", "3.2e+07", "3.2e+07"]
    assert main(["sweep", "1f1b", *options, "--value", "peak-memory", "--activations", "1GiB"]) == 0
    assert "4Gi" in drawing.read_text()


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    table, drawing = tmp_path / "a.csv", tmp_path / "a.svg"
    options = ["--ranks", "2..4", "--microbatches", "4,8", "--activations", "100MiB", "--memory", "1GiB"]
    assert main(["sweep", "gpipe", *options, "--csv", str(table), "--svg", str(drawing), "--value", "peak-memory"]) == 0
    assert capsys.readouterr().out == ""
    assert len(table.read_text().splitlines()) == 1 + 3 * 2
    assert "gpipe: most memory that a rank holds" in drawing.read_text()
    assert main(["sweep", "1f1b", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "1f1b,2,8,27,0.125,0.1111111111,2,True,27,1,0,inf,inf"


def test_a_sweep_goes_over_links_and_memory_too(tmp_path, capsys):
    drawing = tmp_path / "a.svg"
    options = ["--bandwidth", "1,2,inf", "--message-bytes", "1", "--memory", "2GiB,4GiB", "--activations", "1GiB"]
    assert main(["sweep", "1f1b", *options, "--json", "--svg", str(drawing)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["bandwidth"], row["memory"], row["fits"]) for row in rows] == [
        *((1, 2 * GIB, False), (1, 4 * GIB, True)),
        *((2, 2 * GIB, False), (2, 4 * GIB, True)),
        *((None, 2 * GIB, False), (None, 4 * GIB, True)),
    ]
    assert rows[0]["makespan"] > rows[2]["makespan"] > rows[4]["makespan"] == 33
    assert "down: bandwidth, across: memory" in drawing.read_text()
    assert "4Gi" in drawing.read_text()


def test_compare_has_names_files_functions_and_a_search_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text(dump(SCHEDULES["gpipe"].orders(2, 4)))
    (tmp_path / "their_lab.py").write_text("from pipeline import one_f_one_b as mine\n")
    sizes = ["--ranks", "2", "--microbatches", "4"]
    memory = ["--activations", "1GiB", "--static", "1GiB", "--memory", "3GiB"]
    reductions = ["--gradient-bytes", "100MiB", "--reduction-bandwidth", "104857600"]
    files = ["--csv", "a.csv", "--svg", "a.svg"]
    candidates = ["own.csv", "their_lab:mine", "zbv", "search", "interleaved_1f1b"]
    assert main(["compare", *candidates, *sizes, *memory, *reductions, *files, "--seconds", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "2 ranks, 4 micro-batches"
    assert out[1].endswith("efficiency  with reductions  hidden  peak memory a rank")
    assert [line.split()[0] for line in out[2:]] == candidates
    assert out[2].endswith("5GiB 5GiB  too much")
    assert out[3].split()[-2:] == ["3GiB", "2GiB"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert [row["schedule"] for row in rows] == candidates
    by_name = {row["schedule"]: float(row["makespan"]) for row in rows}
    assert by_name["search"] <= by_name["zbv"] < by_name["their_lab:mine"] == by_name["own.csv"] == 15
    assert {float(row["with_reductions"]) - float(row["makespan"]) for row in rows[:2]} == {1}
    drawing = (tmp_path / "a.svg").read_text()
    assert [drawing.count(f">{name}: ") for name in candidates] == [1] * 5
    assert main(["compare", "1f1b", "own.csv", "--json"]) == 0  # of the sizes that the file is written for
    named, row = json.loads(capsys.readouterr().out)
    assert (row["makespan"], row["memory"]) == (15, None)
    assert (named["num_ranks"], named["num_microbatches"]) == (2, 4)
    assert (
        main(["compare", "own.csv", "1f1b", "--ranks", "4", "--microbatches", "8"]) == 0
    )  # a schedule that does not allow a size says so
    assert "own.csv is written for 2 ranks and 4 micro-batches, got 4 and 8" in capsys.readouterr().out


def test_a_name_with_a_comma_is_one_cell_of_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.csv").write_text(dump(SCHEDULES["gpipe"].orders(2, 4)))
    assert main(["compare", "a,b.csv", "--csv", "table.csv"]) == 0
    capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text()))
    assert (row["schedule"], row["num_ranks"], row["makespan"]) == ("a,b.csv", "2", "15")


def test_a_heat_map_says_a_bandwidth_as_it_was_typed_and_a_memory_with_its_unit(tmp_path):
    """1e9 was 954Mi, a unit that the flag does not take."""
    drawing = tmp_path / "a.svg"
    sizes = ["--message-bytes", "1e9", "--bandwidth", "1e9,2.5e10", "--memory", "8,2GiB"]
    assert main(["sweep", "1f1b", *sizes, "--csv", str(tmp_path / "a.csv"), "--svg", str(drawing)]) == 0
    words = [element.text for element in ET.fromstring(drawing.read_text()).iter() if element.tag.endswith("text")]
    assert words[2:] == ["8", "2Gi", "1e+09", words[5], words[6], "2.5e+10", words[8], words[9]]


def test_what_is_found_is_drawn(tmp_path, capsys):
    path = tmp_path / "found.svg"
    assert main(["search", "--ranks", "2", "--microbatches", "3", "--placement", "one", "--svg", str(path)]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title == "placement one: 2 stages on 2 ranks, 3 micro-batches"
    assert title in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--ranks", "4..2"], "must go from a number to a larger one, got '4..2'"),
        (["sweep", "--ranks", "0..2"], "must be whole numbers of at least 1, as 2..16 or 2,4,8, got '0..2'"),
        (["sweep", "--ranks", "2.."], "must be whole numbers of at least 1, as 2..16 or 2,4,8, got '2..'"),
        (["sweep", "--ranks", "2,,4"], "must be whole numbers of at least 1, as 2..16 or 2,4,8, got '2,,4'"),
        (["sweep", "--memory", "8GB"], "must be a number of at least 0, with or without one of KiB, MiB, GiB, TiB"),
        (["sweep", "--svg", "x.svg"], "--svg draws one schedule, got 11"),
        (
            ["sweep", "interleaved_1f1b", "--microbatches", "3"],
            "interleaved 1F1B needs --microbatches divisible by the number of ranks, got 3 and 4",
        ),
        (
            ["sweep", "1f1b", "--svg", "x.svg", "--ranks", "2,3", "--memory", "1,2", "--latency", "0,1"],
            "at most two things, got several of ranks, latency, memory",
        ),
        (["sweep", "--memory", "8,x"], "one of KiB, MiB, GiB, TiB, or several with commas, got '8,x'"),
        (["compare", "--memory", "8,9"], "with or without one of KiB, MiB, GiB, TiB, got '8,9'"),
        (["compare", "--bucket-bytes", "0"], "--bucket-bytes: must be a number above 0, with or without one of KiB"),
        (
            ["simulate", "1f1b", "--ranks", "9", "--measured", "gpt"],
            "a model of 8 layers, embedding and head not counted, cannot be cut into 9 stages",
        ),
        (
            ["compare", "1f1b", "--ranks", "9", "--measured", "gpt"],
            "a model of 8 layers, embedding and head not counted, cannot be cut into 9 stages",
        ),
        (["compare", "--ranks-per-host", "0"], "must be a whole number of at least 1, got '0'"),
        (["search", "--memory", "1", "--static", "2"], "--memory must be more than --static, got 1 and 2"),
        (["search", "--memory", "0.5"], "takes 1 on rank 0, got a limit of 0.5"),
        (
            ["search", "--memory", "6MiB", "--activations", "8GiB"],
            "takes 8GiB on rank 0, got a limit of 6MiB",
        ),
        (["compare", "1f1b", "--ranks", "2", "--fro", "zbv"], "unrecognized arguments: --fro"),
        (["draw", "1f1b", "--ranks", "2", "zbv"], "unrecognized arguments: zbv"),
        (
            ["search", "--forward", "1,2,3"],
            "numbers with commas must be one for each of 4 or 8 stages, got 3 for --forward",
        ),
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


@pytest.mark.parametrize(
    ("split", "together"),
    [
        ("compare 1f1b --ranks 2 zbv --microbatches 4 gpipe", "compare 1f1b zbv gpipe --ranks 2 --microbatches 4"),
        ("sweep --ranks 2 1f1b --microbatches 4,6 zbv", "sweep 1f1b zbv --ranks 2 --microbatches 4,6"),
    ],
)
def test_schedules_may_stand_on_both_sides_of_a_flag(split, together, capsys):
    """Those behind it were unrecognized arguments."""
    said = []
    for arguments in (split, together):
        assert main(arguments.split()) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["memory", "mlp", "--pp", "2", "zbv"]) == 0
    assert capsys.readouterr().out.startswith("zbv: 4 stages on 2 ranks")


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
