import json
import subprocess
import sys

import pytest

from pipeline.__main__ import main

DRAWN = """\
1f1b: 2 stages on 2 ranks, 3 micro-batches
rank 0 |F0|F1|     |B0   |F2|B1   |  |B2   |
rank 1    |F0|B0   |F1|B1   |F2|B2   |
makespan                                12
bubble_fraction (ratio to ideal time)   0.3333
span_bubble_rate (idle share of a span) 0.2500
efficiency (ideal time / makespan)      0.7500
peak micro-batches per stage            2 1
"""


def test_draw_prints_the_grid_and_what_it_costs(capsys):
    assert main(["draw", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out == DRAWN


def test_times_reach_the_simulator(capsys):
    options = ["--forward", "2,1", "--backward-input", "2", "--backward-weight", "3", "--latency", "0.5"]
    assert main(["draw", "gpipe", "--stages", "2", "--microbatches", "1", *options]) == 0
    assert "makespan                                14\n" in capsys.readouterr().out  # 2 + .5 + 1 + 5 + .5 + 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "2f2b"], "schedule must be one of gpipe, 1f1b, "),
        (["draw", "2f2b"], ", or a .csv file, or MODULE:NAME, got '2f2b'"),
        (["compare", "gpipe", "2f2b"], "got '2f2b'"),
        (["check", "nowhere.csv"], "python -m pipeline: nowhere.csv cannot be read: No such file or directory\n"),
        (
            ["simulate", "zbv", "--stages", "5"],
            "--stages must be a multiple of 2, the stages that a rank has under zbv, got 5",
        ),
        (
            ["dump", "interleaved_1f1b", "--microbatches", "6"],
            "interleaved 1F1B needs --microbatches divisible by the number of ranks, got 6 and 4",
        ),
        (["draw", "1f1b", "--svg", "/nowhere/1f1b.svg"], "--svg /nowhere/1f1b.svg cannot be written: No such file"),
        (["draw", "1f1b", "--perfetto", "/"], "--perfetto / cannot be written: Is a directory"),
        (["draw", "1f1b", "--stages", "0"], "argument --stages: must be a whole number of at least 1, got '0'"),
        (["dump", "1f1b", "--stages", "x"], "argument --stages: must be a whole number of at least 1, got 'x'"),
        (
            ["check", "1f1b", "--microbatches", "0"],
            "argument --microbatches: must be a whole number of at least 1, got",
        ),
        (["compare", "--ranks", "0"], "argument --ranks: must be a whole number of at least 1, got '0'"),
        (["compare", "--microbatches", "1.5"], "argument --microbatches: must be a whole number of at least 1, got"),
        (["compare", "--forward", "0"], "argument --forward: must be a number above 0, got '0'"),
        (["compare", "--forward", "1,1"], "argument --forward: must be a number above 0, got '1,1'"),
        (
            ["compare", "1f1b", "zbv", "--message-bytes", "1,2,3"],
            "--message-bytes must be one number or one for each of the boundaries between stages under zbv, got 3 for",
        ),
        (["draw", "1f1b", "--latency", "-1"], "argument --latency: must be a number of at least 0, got '-1'"),
        (["draw", "1f1b", "--latency", "inf"], "argument --latency: must be a number of at least 0, got 'inf'"),
        (["simulate", "1f1b", "--bandwidth", "0"], "argument --bandwidth: must be a number above 0, or inf, got '0'"),
        (["simulate", "1f1b", "--bandwidth", "nan"], "argument --bandwidth: must be a number above 0, or inf, got"),
        (["draw", "1f1b", "--message-bytes", "-1"], "--message-bytes: must be a number of at least 0, or several with"),
        (
            ["draw", "1f1b", "--message-bytes", "1,2,3,4"],
            "--message-bytes must be one number or one for each of the boundaries between stages, got 4 for 3",
        ),
        (
            ["draw", "1f1b", "--backward-input", "1,2"],
            ": --backward-input must be one number or one for each of the stages, got 2 for 4",
        ),
        (["draw", "1f1b", "--forward", "1,"], "--forward: must be a number above 0, or several with commas, got '1,'"),
        (["draw", "1f1b", "--forward", "1,0,1,1"], "--forward: must be a number above 0, or several with commas, got"),
        (
            ["draw", "1f1b", "--forward", "inf"],
            "--forward: must be a number above 0, or several with commas, got 'inf'",
        ),
        (["draw", "1f1b", "--ranks", "4", "--stages", "4"], "argument --stages: not allowed with argument --ranks"),
        (["paint"], "invalid choice: 'paint'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_name_or_value_is_one_line_and_status_2(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as exit_:  # argparse leaves in its own way
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("python -m pipeline")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "taught"),
    [
        ([], "draw 1f1b --stages 4 --microbatches 8"),
        (["draw"], "one of gpipe, 1f1b"),
        (["draw"], "write the drawing as SVG"),
        (["check"], "deadlock"),
        (["verify"], "MODULE:NAME (default 1f1b)"),
        (["compare"], "(default: any number)"),
    ],
)
def test_help_teaches(arguments, taught, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    assert taught in capsys.readouterr().out


def test_simulate_prints_the_numbers_alone(capsys):
    assert main(["simulate", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out == "".join(
        line for line in DRAWN.splitlines(keepends=True) if not line.startswith("rank")
    )


def test_messages_reach_the_simulator(capsys):
    options = ["--message-bytes", "30", "--bandwidth", "60", "--latency", "0.25"]
    assert main(["simulate", "gpipe", "--stages", "2", "--microbatches", "1", *options]) == 0
    assert "makespan                                7.5\n" in capsys.readouterr().out  # 1 + .75 + 1 + 2 + .75 + 2


def test_draw_writes_files(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    files = {kind: tmp_path / f"zbv.{kind}" for kind in ("svg", "png", "perfetto")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["draw", "zbv", "--stages", "4", "--microbatches", "3", *options]) == 0
    assert capsys.readouterr().out.startswith("zbv: 4 stages on 2 ranks, 3 micro-batches\nrank 0 |0F0|")
    assert files["svg"].read_text().startswith("<svg ")
    assert "zbv: 4 stages on 2 ranks, 3 micro-batches" in files["svg"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in json.loads(files["perfetto"].read_text())


COMPARED = """\
2 ranks, 4 micro-batches
                   makespan  bubble/ideal  bubble/span  efficiency  peak micro-batches a rank
gpipe                    15        0.2500       0.2000      0.8000  4 4
1f1b                     15        0.2500       0.2000      0.8000  2 1
interleaved_1f1b       13.5        0.1250       0.1111      0.8889  2.5 1.5
looped_bfs             13.5        0.1250       0.1111      0.8889  4 4
zero_bubble_h1           13        0.0833       0.0769      0.9231  2 1
zero_bubble_h2           13        0.0833       0.0000      0.9231  3 1
zbv                    12.5        0.0417       0.0000      0.9600  2 2
v_min                  13.5        0.1250       0.1111      0.8889  1 1
v_half                 12.5        0.0417       0.0000      0.9600  2 2
dualpipev              12.5        0.0417       0.0400      0.9600  2.5 2.5
dualpipev_overlap        13        0.0833       0.0769      0.9231  2.5 2.5
"""


def test_a_search_says_memory_as_compare_does(capsys):
    """In bytes with their unit, and with what a rank holds in any case: it printed 4.168e+09 beside a limit in GiB."""
    work = ["--ranks", "2", "--microbatches", "4", "--activations", "700MiB", "--static", "9GiB"]
    assert main(["compare", "zero_bubble_h1", *work]) == 0
    assert "10.37GiB 9.684GiB" in capsys.readouterr().out
    assert main(["search", "--placement", "one", *work]) == 0
    assert "memory a rank               10.37GiB 9.684GiB\n" in capsys.readouterr().out


def test_a_large_search_says_what_it_looks_for(monkeypatch, capsys):
    """Up to half a minute went by without a word."""
    monkeypatch.setattr("pipeline.cli.search._LARGE", 50)
    sizes = ["search", "--ranks", "4", "--microbatches", "4"]
    assert main([*sizes, "--placement", "one"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*sizes, "--placement", "v"]) == 0
    assert capsys.readouterr().err == "placement v: looking for an order of 96 actions\n"
    assert main([*sizes, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_compare_gives_every_schedule_the_same_work(capsys):
    assert main(["compare", "--ranks", "2", "--microbatches", "4"]) == 0
    assert capsys.readouterr().out == COMPARED


def test_compare_says_in_its_row_which_schedule_does_not_allow_the_sizes(capsys):
    assert main(["compare", "interleaved_1f1b", "1f1b", "--ranks", "4", "--microbatches", "6"]) == 0
    refused, row = capsys.readouterr().out.splitlines()[2:]
    assert refused.endswith("interleaved 1F1B needs --microbatches divisible by the number of ranks, got 6 and 4")
    assert row.startswith("1f1b ")


def test_a_schedule_written_by_hand_can_be_checked_and_drawn(tmp_path, capsys):
    assert main(["dump", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0
    path = tmp_path / "mine.csv"
    path.write_text(capsys.readouterr().out)
    assert path.read_text() == "0F0,0F1,0BW0,0F2,0BW1,0BW2\n1F0,1BW0,1F1,1BW1,1F2,1BW2\n"
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == (
        "mine.csv: 2 stages on 2 ranks, 3 micro-batches: complete, in order, "
        "and no timing of messages can deadlock it\n"
    )
    assert main(["draw", str(path)]) == 0
    assert capsys.readouterr().out == DRAWN.replace("1f1b", "mine.csv")
    assert main(["verify", "mlp", "--schedule", str(path)]) == 0
    assert capsys.readouterr().out.startswith("dp=1 pp=2 mine.csv micro-batches=3: ")
    assert main(["memory", "mlp", str(path)]) == 0
    assert "mine.csv: 2 stages on 2 ranks, 3 micro-batches\n" in capsys.readouterr().out
    path.write_text(path.read_text().replace("0BW0,0F2", "0F2"))
    assert main(["check", str(path)]) == 2
    assert "rank 0 has no B or BW of micro-batch 0 on stage 0" in capsys.readouterr().err


def test_a_schedule_is_asked_for_by_its_ranks_or_by_its_stages(capsys):
    drawn = []
    for size in (["--ranks", "2"], ["--stages", "4"]):
        assert main(["draw", "zbv", *size, "--microbatches", "3"]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("draw 1f1b --ranks 1 --microbatches 1", "1f1b: 1 stage on 1 rank, 1 micro-batch"),
        ("compare zbv --ranks 1 --microbatches 2", "1 rank, 2 micro-batches"),
        ("memory mlp --pp 2 --microbatches 1", "1f1b: 2 stages on 2 ranks, 1 micro-batch"),
        ("search --placement one --ranks 1 --microbatches 1", "placement one: 1 stage on 1 rank, 1 micro-batch"),
    ],
)
def test_one_of_a_thing_is_said_as_one(command, title, capsys):
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines()[0] == title


def test_a_bad_cell_names_its_file(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0X1\n")
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.startswith(
        "python -m pipeline: mine.csv: a cell is a stage, one of F, B, W, BW, and a micro-batch, as 1F0, or F of one "
        "micro-batch and a backward of another, as 0F4&3BW1; got '0X1'"
    )


def test_a_png_without_matplotlib_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["draw", "1f1b", "--png", str(tmp_path / "1f1b.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m pipeline: a PNG needs matplotlib: pip install ")
    assert captured.err.count("\n") == 1


def test_a_png_that_cannot_be_written_says_so(capsys):
    pytest.importorskip("matplotlib", reason="an extra: pip install 'minigrad-distributed[draw]'")
    assert main(["draw", "1f1b", "--png", "/nowhere/1f1b.png"]) == 2
    message = "python -m pipeline: --png /nowhere/1f1b.png cannot be written: No such file or directory\n"
    assert capsys.readouterr().err == message


def test_any_bandwidth_may_be_said_as_inf(capsys):
    assert main(["simulate", "1f1b", "--bandwidth", "inf", "--message-bytes", "0"]) == 0


def test_forwards_alone_can_be_drawn(capsys):
    assert main(["draw", "forward_only", "--stages", "2", "--microbatches", "2"]) == 0
    assert "rank 1    |F0|F1|\n" in capsys.readouterr().out


def test_runs_as_a_module():
    command = [sys.executable, "-m", "pipeline", "draw", "1f1b", "--stages", "2", "--microbatches", "3"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == DRAWN
    refused = subprocess.run([*command, "--latency", "-1"], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
