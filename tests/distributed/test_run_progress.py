"""The view of a run that the example scripts show."""

import io
from collections.abc import Callable

import pytest

from distributed.run import progress as progress_module
from distributed.run.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, num_steps: int, look: str = "auto", *, first_step: int = 0) -> str:
    with Progress(first_step, num_steps, look=look, stream=stream) as progress:
        for step in range(first_step, num_steps):
            progress.update(f"loss {step + 1}")
    return stream.getvalue()


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (20, 20), (33, 20), (1000, 20)])
def test_at_most_twenty_lines_where_there_is_no_terminal(steps: int, lines: int) -> None:
    output = shown(io.StringIO(), steps).splitlines()
    assert len(output) == lines
    assert output[-1] == f"step {steps}/{steps}, 00:00 left, loss {steps}"


def test_time_left_counts_the_steps_of_this_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now)
    progress = Progress(40, 100, look="lines", stream=(stream := io.StringIO()))
    for _ in range(5):
        now += 2.0
        progress.update("loss 1")
    assert stream.getvalue() == "step 45/100, 01:50 left, loss 1\n"


@pytest.mark.parametrize(
    ("make_stream", "look", "is_bar"),
    [
        (Terminal, "auto", True),
        (io.StringIO, "auto", False),
        (Terminal, "lines", False),
        (io.StringIO, "bar", True),
    ],
)
def test_bar_or_lines(make_stream: Callable[[], io.StringIO], look: str, is_bar: bool) -> None:
    output = shown(make_stream(), 3, look)
    assert ("\r" in output) == is_bar
    assert output.count("\n") == (1 if is_bar else 3)
    for part in ("step 3/3", "00:00 left", "loss 3"):
        assert part in output


@pytest.mark.parametrize("look", ["bar", "lines"])
def test_a_resumed_run_is_shown_from_where_it_goes_on(look: str) -> None:
    output = shown(io.StringIO(), 8, look, first_step=6)
    assert "step 8/8" in output
    assert "step 1/8" not in output


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_nothing_is_shown_where_nobody_looks(stream: io.StringIO) -> None:
    assert shown(stream, 3, "none") == ""
