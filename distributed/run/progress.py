"""The view of a run as it goes on."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import IO, Any, Self

NUM_LINES = 20  # at most, where there is no bar


class Progress:
    """Show step, loss, speed and the time left, as a bar or as at most 20 lines.

        with Progress(first_step, num_steps, look="auto") as progress:
            for step in range(first_step, num_steps):
                ...
                progress.update(f"loss {loss:.3f}")

    Args:
        first_step: steps that were done before, by the run that is resumed.
        num_steps: steps when all is done.
        look: bar, lines, auto (a bar where the stream is a terminal), or none.
    """

    def __init__(self, first_step: int, num_steps: int, *, look: str, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._look = look
        self._first_step = first_step
        self._num_steps = num_steps
        self._step = first_step
        self._start = time.perf_counter()
        terminal = self._stream.isatty()
        if look == "auto":
            self._look = "bar" if terminal and find_spec("tqdm") is not None else "lines"
        # Behind mpirun's pipe there is a terminal, but nobody to ask its width.
        self._bar = self._new_bar(None if terminal else 80) if self._look == "bar" else None

    def update(self, words: str) -> None:
        """Count one step more, of which there is this to say."""
        self._step += 1
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        due = self._step * NUM_LINES // self._num_steps > (self._step - 1) * NUM_LINES // self._num_steps
        if self._look == "lines" and due:
            seconds_a_step = (time.perf_counter() - self._start) / (self._step - self._first_step)
            left = _clock(seconds_a_step * (self._num_steps - self._step))
            print(f"step {self._step}/{self._num_steps}, {left} left, {words}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _new_bar(self, width: int | None) -> Any:
        from tqdm import tqdm

        return tqdm(
            initial=self._first_step,
            total=self._num_steps,
            file=self._stream,
            bar_format="step {n}/{total} |{bar}| {remaining} left{postfix}",
            ncols=width,
        )


def _clock(seconds: float) -> str:
    """Return a time as 1:02:03, or 02:03 where it is under an hour."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
