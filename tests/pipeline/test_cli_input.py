"""Whatever is given to the command line: an answer, or one error and status 2; never a traceback, never all memory."""

import json
import sys
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed.run import command_line
from pipeline import SCHEDULES, Schedule, ScheduleError, from_text
from pipeline.cli import files, flags
from pipeline.cli import main as cli
from pipeline.cli.flags import MOST_ACTIONS
from pipeline.cli.own_code import place_of
from pipeline.schedules.csv_file import MOST_CHARACTERS
from pipeline.schedules.drawing.text import draw_order
from pipeline.verify import MismatchError

MOST_OUTPUT = 2_000_000  # letters


def run(arguments, capsys):
    """Return status, output and errors."""
    try:
        status = cli.main(arguments)
    except SystemExit as exit_:  # argparse leaves in its own way
        status = exit_.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


FILES = {  # text -> the rule that it breaks
    "x" * 200_000: "a schedule must be a table of cells with commas between: field larger than field limit",
    "0F0,0BW0," + "x" * 50_000: "got 'xxxxxxxx",
    ",,,\n,,,\n": "a schedule has at least one action, got none",
    "0F0,0BW0,0F3000000000\n": "rank 0 has no B or BW of micro-batch 3000000000",
    "0F3000000000\n": "every stage runs every micro-batch: rank 0 has no F of micro-batch 0 on stage 0",
    "3000000000F0\n": "every rank has the same number of stages, got 1 on rank 0 of 3000000001",
    f"0F{'9' * 5000}\n": "a cell is a stage, one of F, B, W, BW, and a micro-batch",
    "\0": "a cell is a stage",
    "0F0,0BW0\0\n": "got '0BW0\\x00'",
    "": "a schedule has one row a rank, got none",
    "0F0,0F0," + "0BW0," * 5000: "a stage runs F of a micro-batch once",
}


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
@pytest.mark.parametrize("command", ["check", "draw", "dump", "simulate"])
def test_a_file_that_is_no_schedule(command, text, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    status, out, err = run([command, str(path)], capsys)
    assert (status, out) == (2, "")
    assert err.startswith("python -m pipeline: mine.csv: ")
    assert FILES[text] in err.splitlines()[0] or "every stage runs" in err.splitlines()[0]
    assert len(err) < 20_000


def test_a_file_that_is_too_large(tmp_path, capsys):
    path = tmp_path / "large.csv"
    path.write_text(" " * (MOST_CHARACTERS + 1))
    status, _, err = run(["check", str(path)], capsys)
    assert (status, err) == (2, "python -m pipeline: large.csv: a schedule must have at most 16,777,216 characters\n")


ARGUMENTS = [
    (["draw", "1f1b", "--forward", "1e-6"], "a drawing has at most 1,000,000 letters, got 2.64e+08"),
    (["draw", "1f1b", "--forward", "1e-300"], "than numbers can tell"),
    (["draw", "1f1b", "--backward-input", "1e308"], "than numbers can tell"),
    (["simulate", "1f1b", "--forward", "1e-300,1,1,1"], "than numbers can tell"),
    (["simulate", "1f1b", "--latency", "1e308", "--forward", "1e308"], "than numbers can tell"),
    (["compare", "--forward", "1e308"], "than numbers can tell"),
    (["compare", "zbv", "--forward", "5e-324"], "forward must be positive"),
    (["simulate", "1f1b", "--bandwidth", "1e-320", "--message-bytes", "1"], "than numbers can tell"),
    (["draw", "1f1b", "--microbatches", "1" + "0" * 12], f"must make at most {MOST_ACTIONS:,} actions"),
    (["check", "gpipe", "--stages", "1" + "0" * 12], f"must make at most {MOST_ACTIONS:,} actions"),
    (["compare", "--ranks", "1" + "0" * 12], f"must make at most {MOST_ACTIONS:,} actions"),
    (["check", "gpipe", "--dp", "1" + "0" * 12], f"must make at most {MOST_ACTIONS:,} actions"),
    (["sweep", "gpipe", "--microbatches", "2..1" + "0" * 12], f"--microbatches: must go to {MOST_ACTIONS:,} at most"),
    (["verify", "mlp", "--microbatches", "1" + "0" * 12], "must make at most"),
    (["dump", "gpipe", "--stages", "9" * 5000], "must be a whole number of at least 1, got '999"),
    (["dump", "gpipe", "--stages", "nan"], "must be a whole number of at least 1, got 'nan'"),
    (["search", "--seed", "x"], "--seed must be an integer, got 'x'"),
    (["draw", "1f1b", "--width", "5"], "--width must have room for an action, at least 11 letters, got 5"),
    (["draw", "1f1b", "--svg", "a.x", "--png", "./a.x"], "--svg and --png must be different files, got a.x"),
    (["dump", "gpipe", "--stages", "-3"], "must be a whole number of at least 1, got '-3'"),
    (["draw", "n" * 300], "schedule must be one of"),
    (["draw", "n" * 300 + ".csv"], "cannot be read: File name too long"),
    (["draw", "1f1b", "--svg", "n" * 300], "cannot be written: File name too long"),
    (["verify", "os:remove"], "os:remove() must return a pipeline.verify.Case, but ended in TypeError"),
    (["verify", "sys:exit"], "sys:exit() must return a pipeline.verify.Case, but ended in SystemExit"),
    (["verify", "os:getpid"], "os:getpid must return a pipeline.verify.Case, got int"),
    (["verify", "os:nothing"], "the model 'os:nothing' cannot be found"),
    (["verify", "a\0b:c"], "cannot be found"),
    (["verify", "m" * 300], "MODULE:FUNCTION"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_value_that_no_schedule_can_have(arguments, message, capsys):
    status, _, err = run(arguments, capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("python -m pipeline")
    assert message in err


@pytest.mark.parametrize(
    ("sizes", "about"),
    [
        ("1f1b --ranks 1000 --microbatches 500", "2,998,000"),
        ("zbv --ranks 100 --microbatches 1000 --skips 0-199,3-5", "1,196,000"),  # 0 and 199 share a rank
        ("gpipe --dp 10000", "1,600,000"),
        ("forward_only --ranks 1000 --microbatches 500", "1,499,000"),
    ],
)
def test_check_refuses_what_is_too_large_before_it_is_made(sizes, about, monkeypatch, capsys):
    """Once three million actions were made first, for twenty seconds."""
    monkeypatch.setattr(Schedule, "orders", lambda *_: pytest.fail("it began"))
    status, _, err = run(["check", *sizes.split()], capsys)
    assert status == 2
    assert f"must make at most {MOST_ACTIONS:,} actions, got about {about}\n" in err


def test_check_at_other_sizes_than_a_file_has(tmp_path, capsys):
    path = tmp_path / "own.csv"
    path.write_text("0F0,0BW0\n1F0,1BW0\n")
    status, _, err = run(["check", str(path), "--ranks", "3"], capsys)
    assert (status, err) == (2, "python -m pipeline: own.csv is written for 2 ranks and 1 micro-batch, got 3 and 1\n")


def test_a_picture_of_very_different_times_stays_a_picture(tmp_path, capsys):
    path = tmp_path / "wide.svg"
    times = ["--forward", "1", "--backward-input", "3000"]
    assert run(["draw", "1f1b", "--stages", "2", "--microbatches", "2", *times, "--svg", str(path)], capsys)[0] == 0
    assert 'width="20' in path.read_text()


CELL = st.one_of(
    st.text(max_size=8),
    st.builds(
        "{}{}{}".format, st.integers(0, 3), st.sampled_from(["F", "B", "W", "BW", "SEND_F", "X"]), st.integers(0, 3)
    ),
)
TABLE = st.lists(st.lists(CELL, max_size=8), max_size=4)


@given(TABLE, st.sampled_from(["check", "draw", "dump"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table_is_a_schedule_or_one_error(tmp_path, capsys, table, command):
    path = tmp_path / "any.csv"
    path.write_text("\n".join(",".join(row) for row in table), encoding="utf-8", errors="replace")
    status, out, err = run([command, str(path)], capsys)
    assert status in (0, 2)
    assert bool(out) == (status == 0)
    assert bool(err) == (status == 2)


NUMBER = st.one_of(st.floats().map(str), st.integers().map(str), st.text(max_size=4))
OPTIONS = ["--forward", "--backward-input", "--latency", "--bandwidth", "--message-bytes"]


@given(st.sampled_from(["draw", "simulate", "compare"]), st.dictionaries(st.sampled_from(OPTIONS), NUMBER, max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_numbers_are_an_answer_or_one_line(capsys, command, options):
    arguments = [command, "1f1b", *(f"{option}={number}" for option, number in options.items())]
    status, out, err = run(arguments, capsys)
    assert status in (0, 2)
    assert len(out) < MOST_OUTPUT
    assert (status == 2) == bool(err)
    assert err.count("\n") <= 1
    assert "nan" not in out
    assert "inf" not in out


# check --dp


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_are_proved_with_their_reductions(schedule, capsys):
    status, out, err = run(["check", schedule, "--dp", "3"], capsys)
    assert (status, err) == (0, "")
    assert ", 3 replicas: complete, in order, and no timing of messages and reductions can deadlock it" in out


# Drawings in errors


def test_a_fault_in_a_large_order_is_drawn_with_what_is_around_it():
    orders = [[f"0F{i}" for i in range(3000)], [f"1F{i}" for i in range(3000)]]
    assert draw_order(orders, [(1, 1000)]) == (
        "rank 1 ...  1F996   1F997   1F998   1F999  [1F1000] 1F1001  1F1002  1F1003  1F1004 <-- here"
    )


def test_a_cell_of_one_letter_too_many_is_not_taken_for_another():
    with pytest.raises(ScheduleError, match="a cell is a stage"):
        from_text("0F" + "0" * 100, "mine")


OWN = """
from pipeline import BW, SCHEDULES, F, Schedule, gpipe


def numbers(rank, num_ranks, num_microbatches):
    return [1, 2]


def words(rank, num_ranks, num_microbatches):
    return "0F0"


def leaves(rank, num_ranks, num_microbatches):
    raise SystemExit(3)


def breaks(rank, num_ranks, num_microbatches):
    raise KeyError("a\\nb")


def endless(rank, num_ranks, num_microbatches):
    while True:
        yield F(rank, 0)


def forwards(rank, num_ranks, num_microbatches):
    return [F(rank, i) for i in range(num_microbatches)]


def lettered(rank, num_ranks, num_microbatches):
    return [F("a", 0)]


def halves(rank, num_ranks, num_microbatches):
    return [make(rank * 1.0, i) for i in range(num_microbatches) for make in (F, BW)]


schedule = Schedule("schedule", numbers)
on_a_half = Schedule("on_a_half", gpipe, rank_of=lambda stage, num_ranks: stage * 1.0)
"""
SAID = {
    "numbers": "own:numbers must give actions, as pipeline.F(0, 1), got 1",
    "schedule": "own:schedule must give actions, as pipeline.F(0, 1), got 1",
    "words": "own:words must give actions, as pipeline.F(0, 1), got '0'",
    "leaves": "own:leaves gives no order: SystemExit: 3",
    "breaks": "own:breaks gives no order: KeyError: ",
    "endless": "stages times micro-batches must make at most 1,000,000 actions",
    "lettered": "stages are numbered 0 to ",
    "halves": "stages are numbered 0 to ",
    "on_a_half": "rank_of must give a rank from 0 to ",
    "forwards": "every stage runs every micro-batch: rank 0 has no B or BW of micro-batch 0 on stage 0",
}


@pytest.mark.parametrize(
    "command", ["draw", "check", "dump", "sweep", "compare", "memory mlp", "verify mlp --schedule"], ids=str.split
)
@pytest.mark.parametrize("name", SAID)
def test_a_function_that_gives_no_order_is_one_clear_error(name, command, tmp_path, monkeypatch, capsys):
    """Once a traceback of where the first action was looked at, and compare measured what trains nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setattr(flags, "MOST_ACTIONS", 1_000_000 if name != "endless" else 1000)
    Path("own.py").write_text(OWN)
    status = cli.main([*command.split(), f"own:{name}"])
    said = capsys.readouterr()
    message = SAID[name].replace("1,000,000", f"{flags.MOST_ACTIONS:,}")
    assert status == 2
    assert said.out == ""
    assert said.err.startswith(f"python -m pipeline: {message}")


OWN_CASES = """
import numpy as np
from minigrad.models import mlp
from minigrad.ops import cross_entropy
from pipeline import Schedule, gpipe
from pipeline.verify import Case

LAYERS = mlp.layers([8, 12, 12, 4])
BATCHES = [(np.zeros((24, 8)), np.zeros(24, int))]

def case(layers=LAYERS, batches=BATCHES, loss_fn=cross_entropy):
    return Case(layers, batches, loss_fn)

def in_loss():
    return case(loss_fn=lambda output, y: cross_entropy(output, y) / nothing)

def factory(param):
    raise KeyError("width")

def in_factory():
    return case(layers=[*LAYERS[:-1], ("last", factory)])

def a_number():
    return case(loss_fn=lambda output, y: 3.0)

def no_layers():
    return case(layers=3)

def no_batches():
    return case(batches=[1, 2])

def a_loss_each():
    return case(loss_fn=lambda output, y: output * output)

def a_nan():
    return case(loss_fn=lambda output, y: cross_entropy(output, y) * float("nan"))

def no_factory():
    return case(layers=[("a", 3), ("b", 4)])

def an_x():
    return case(batches=[(np.zeros((24, 8)),)])

def place(stage, num_ranks):
    return {0: 0}[stage]

placed = Schedule("placed", gpipe, rank_of=place)
few = Schedule("few", gpipe, rank_of=lambda stage: 0)
"""
PLACES = {
    "verify own:in_loss": "NameError: name 'nothing' is not defined (own.py:15)",
    "memory own:in_loss --pp 2": "NameError: name 'nothing' is not defined (own.py:15)",
    "verify own:in_factory": "KeyError: 'width' (own.py:18)",
    "memory own:in_factory --pp 2": "KeyError: 'width' (own.py:18)",
    "verify own:a_number": "a case's loss_fn must return a Tensor without axes, the mean loss, got float",
    "memory own:a_number --pp 2": "a case's loss_fn must return a Tensor without axes, the mean loss, got float",
    "verify own:a_loss_each": "a case's loss_fn must return a Tensor without axes, the mean loss, got one of shape "
    "(24, 4)",
    "memory own:a_loss_each --pp 2": "a case's loss_fn must return a Tensor without axes, the mean loss, got one of "
    "shape (3, 4)",
    "verify own:a_nan": "step 1 in one process: loss nan, norm of the gradient nan",
    "verify own:no_layers": "own:no_layers() must return a pipeline.verify.Case, but ended in TypeError: "
    "a case's layers must be a list of (name, factory), got 3 (own.py:12)",
    "verify own:no_batches": "own:no_batches() must return a pipeline.verify.Case, but ended in TypeError: "
    "a case's batches must be a list of (x, y), got 1 (own.py:12)",
    "verify own:no_factory": "own:no_factory() must return a pipeline.verify.Case, but ended in TypeError: "
    "a case's layers must be a list of (name, factory), got ('a', 3) (own.py:12)",
    "verify own:an_x": "own:an_x() must return a pipeline.verify.Case, but ended in TypeError: "
    "a case's batches must be a list of (x, y), got (array([[0., 0... 0., 0., 0.]]),) (own.py:12)",
    "check own:placed": "own:placed places stage 1 on no rank: KeyError: 1 (own.py:45)",
    "verify mlp --schedule own:placed": "own:placed places stage 1 on no rank: KeyError: 1 (own.py:45)",
    "simulate own:few": "own:few places stage 0 on no rank: TypeError: "
    "<lambda>() takes 1 positional argument but 2 were given",
}


@pytest.mark.parametrize("command", PLACES)
def test_an_error_in_code_of_ones_own_is_one_line_with_its_place(command, tmp_path, monkeypatch, capsys):
    """It was a traceback, of the insides of the project for the most part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    Path("own.py").write_text(OWN_CASES)
    status, out, err = run(command.split(), capsys)
    assert (status, out, err) == (2, "", f"python -m pipeline: {PLACES[command]}\n")


def test_a_file_beside_the_packages_is_ones_own_whatever_its_name_begins_with():
    places = []
    for name in ("pipeline_of_mine.py", "pipeline/of_theirs.py"):
        path = Path(flags.__file__).parents[2] / name
        with pytest.raises(ZeroDivisionError) as raised:
            exec(compile("1 / 0", str(path), "exec"))
        raised.value.__traceback__ = raised.value.__traceback__.tb_next  # without the line above
        places.append(place_of(raised.value))
    assert [place and Path(place).name for place in places] == ["pipeline_of_mine.py:1", None]


@pytest.mark.parametrize("command", ["verify nosuch", "verify mlp --dp 0", "verify mlp --pp 9"])
def test_of_several_ranks_one_says_what_is_wrong(command, monkeypatch, capsys):
    """Each of them did, under mpirun. What one alone finds it says after a wait, in which a launcher ends others."""
    waited: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    said = []
    for rank in (0, 1):
        monkeypatch.setattr(command_line, "launcher_rank", lambda rank=rank: rank)
        status, out, err = run(command.split(), capsys)
        assert (status, out, err.count("\n")) == (2, "", 1)
        said.append(err)
    assert said[1] == f"[rank 1] {said[0]}"
    assert waited == [command_line.GRACE_SECONDS]


def test_a_rank_leaves_one_the_time_to_say_what_differs(monkeypatch, capsys):
    """A rank that leaves first ends the job, and what rank 0 was about to say with it."""
    waited: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    monkeypatch.setattr(command_line, "launcher_rank", lambda: 1)
    monkeypatch.setattr("pipeline.cli.verify.verify", Mock(side_effect=MismatchError("here")))
    assert run(["verify", "mlp"], capsys) == (1, "", "")
    assert waited == [command_line.GRACE_SECONDS]


def test_an_error_that_no_code_of_ones_own_has_a_part_in_is_a_traceback(monkeypatch):
    monkeypatch.setattr("pipeline.cli.check.checked", itemgetter("a bug"))
    with pytest.raises(TypeError, match="tuple indices"):
        cli.main(["check", "1f1b"])


@pytest.mark.parametrize("command", ["compare search", "compare search --json", "sweep search", "search"])
def test_what_has_no_result_ends_with_status_2(command, capsys):
    """Compare, which says in a row what a schedule does not allow, once ended with status 0 where all rows said so."""
    for memory, why in {
        "0.5": "a rank must hold one micro-batch",
        "2 --static 3": "--memory must be more than ",
    }.items():
        status = cli.main([*command.split(), "--memory", *memory.split()])
        said = capsys.readouterr()
        assert (status, said.out, said.err.count("\n")) == (2, "", 1)
        assert why in said.err


@pytest.mark.parametrize("command", ["compare 1f1b", "compare 1f1b search", "sweep 1f1b", "sweep 1f1b search"])
def test_a_schedule_that_does_not_fit_is_a_result(command, capsys):
    assert cli.main([*command.split(), "--memory", "0.5", "--json"]) == 0
    assert [row["fits"] for row in json.loads(capsys.readouterr().out)] == [False]


@pytest.mark.parametrize("command", ["search --ranks 2 --csv", "draw 1f1b --svg", "sweep 1f1b --csv", "compare --svg"])
def test_a_file_that_there_cannot_be_is_said_before_any_work(command, tmp_path, monkeypatch, capsys):
    """A search of minutes whose result went nowhere; and sweep printed its table before it said so."""
    name = command.split()[0]
    monkeypatch.setattr(f"pipeline.cli.{name}.run", lambda arguments: pytest.fail("it began"))
    (tmp_path / "file").write_text("")
    for path, why in (("gone/x", "No such file or directory"), ("file/x", "Not a directory"), (".", "Is a directory")):
        assert cli.main([*command.split(), str(tmp_path / path)]) == 2
        assert capsys.readouterr().err.endswith(f" cannot be written: {why}\n")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("before")

    def write(beside):
        beside.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"--csv .*x.csv cannot be written: No space left on device"):
        files.write_file("--csv", path, write)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]
    files.write_file("--csv", path, lambda beside: beside.write_text("after"))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["after"]
    files.write_file("--csv", Path("/dev/null"), lambda device: device.write_text("gone"))


def test_repair_names_its_file(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    for text in ("F0\n", "0F0,0SEND_F0,0BW0\n", "0F0\n"):
        path.write_text(text)
        assert cli.main(["repair", str(path)]) == 2
        assert capsys.readouterr().err.startswith("python -m pipeline: mine.csv: ")
    path.write_bytes(b"\xff\xfe0")
    assert cli.main(["repair", str(path)]) == 2
    assert capsys.readouterr().err.endswith("mine.csv cannot be read: it is no text in UTF-8\n")


@pytest.mark.parametrize("command", ["search", "compare search", "sweep search"])
@pytest.mark.parametrize("sizes", ["--ranks 2 --microbatches 100000", "--ranks 100000 --microbatches 1"])
def test_a_search_that_would_not_come_to_its_first_order_is_refused(command, sizes, monkeypatch, capsys):
    """`--seconds 1` took minutes."""
    for name in ("schedules.compare.search_placements", "cli.search.search_placements"):
        monkeypatch.setattr(f"pipeline.{name}", lambda *_, **__: pytest.fail("it began"))
    status, out, err = run([*command.split(), *sizes.split()], capsys)
    assert status == 2
    assert "a search must have at most 50,000 actions, F, B and W, got " in out + err


def test_a_sweep_calls_a_flag_by_its_name(capsys):
    status, _, err = run(["sweep", "1f1b", "--ranks", "4,5", "--message-bytes", "1,2,3"], capsys)
    assert (status, err) == (
        2,
        "python -m pipeline: --message-bytes must be one number or one for each of the boundaries, got 3 for 4\n",
    )
