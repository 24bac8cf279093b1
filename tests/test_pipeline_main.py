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
        (["draw", "2f2b"], "schedule must be one of gpipe, 1f1b, got '2f2b'"),
        (["draw", "1f1b", "--stages", "0"], "num_ranks must be at least 1, got 0"),
        (["draw", "1f1b", "--microbatches", "0"], "num_microbatches must be at least 1, got 0"),
        (["draw", "1f1b", "--latency", "-1"], "latency must be at least 0 and finite, got -1"),
        (["draw", "1f1b", "--forward", "1,2"], "forward must be one time or one for each of 4 stages, got 2 times"),
        (["draw", "1f1b", "--stages", "x"], "argument --stages: invalid int value: 'x'"),
        (["draw", "1f1b", "--forward", "1,"], "argument --forward: invalid times value: '1,'"),
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
    ("arguments", "taught"), [([], "draw 1f1b --stages 4 --microbatches 8"), (["draw"], "one of gpipe, 1f1b")]
)
def test_help_teaches(arguments, taught, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    assert taught in capsys.readouterr().out


def test_runs_as_a_module():
    command = [sys.executable, "-m", "pipeline", "draw", "1f1b", "--stages", "2", "--microbatches", "3"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == DRAWN
    refused = subprocess.run([*command, "--latency", "-1"], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
