"""The view of a run that the example scripts show."""

import io
from collections.abc import Callable

import pytest

from common import progress as progress_module
from common.progress import Progress
from common.settings import Settings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, settings: Settings, *, visible: bool = True) -> str:
    with Progress(settings, visible=visible, stream=stream) as progress:
        for step in range(settings.steps):
            progress.update(loss=2.0 - step / settings.steps)
    return stream.getvalue()


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (20, 20), (33, 20), (1000, 20)])
def test_at_most_twenty_lines_where_there_is_no_terminal(steps: int, lines: int) -> None:
    output = shown(io.StringIO(), Settings(steps=steps)).splitlines()
    assert len(output) == lines
    assert output[-1].startswith(f"step {steps}/{steps}, 00:00 left, loss {1 + 1 / steps:.3f}, ")
    assert output[-1].endswith(" tokens/s")


def test_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: next(clock))
    progress = Progress(Settings(steps=60, batch=6, context=10), visible=True, stream=(stream := io.StringIO()))
    for _ in range(2):
        progress.update(loss=1.0)
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: 106.0)
    progress.update(loss=1.0)
    assert stream.getvalue() == "step 3/60, 01:54 left, loss 1.000, 30 tokens/s\n"


@pytest.mark.parametrize(
    ("make_stream", "choice", "is_bar"),
    [
        (Terminal, "auto", True),
        (io.StringIO, "auto", False),
        (Terminal, "lines", False),
        (io.StringIO, "bar", True),
    ],
)
def test_bar_or_lines(make_stream: Callable[[], io.StringIO], choice: str, is_bar: bool) -> None:
    output = shown(make_stream(), Settings(steps=3, progress=choice))
    assert ("\r" in output) == is_bar
    assert output.count("\n") == (1 if is_bar else 3)
    for part in ("step 3/3", "00:00 left", "loss 1.333", "tokens/s"):
        assert part in output


@pytest.mark.parametrize("choice", ["auto", "bar", "lines"])
def test_other_ranks_are_silent(choice: str) -> None:
    assert shown(Terminal(), Settings(steps=3, progress=choice), visible=False) == ""
