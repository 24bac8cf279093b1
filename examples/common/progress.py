"""The view of a run as it goes on."""

import sys
import time
from typing import IO, Self

from tqdm import tqdm

from common.settings import Settings


class Progress:
    """Show step, loss, tokens a second and the time left: as a bar or as at most 20 lines, on one rank only.

    with Progress(settings, visible=comm.rank == 0) as progress:
        for step in range(settings.steps):
            ...
            progress.update(loss)
    """

    def __init__(self, settings: Settings, *, visible: bool, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._visible = visible
        self._num_steps = settings.steps
        self._tokens_per_step = settings.batch * settings.context
        self._step = 0
        self._start = time.perf_counter()
        terminal = self._stream.isatty()
        self._bar = tqdm(
            total=settings.steps,
            file=self._stream,
            disable=not visible or settings.progress == "lines" or (settings.progress == "auto" and not terminal),
            bar_format="step {n}/{total} |{bar}| {remaining} left{postfix}",
            ncols=None if terminal else 80,  # behind mpirun's pipe there is a terminal, but nobody to ask its width
        )

    def update(self, loss: float) -> None:
        """Count one step more, of which `loss` is the loss."""
        self._step += 1
        elapsed = time.perf_counter() - self._start
        speed = f"loss {loss:.3f}, {self._step * self._tokens_per_step / elapsed:,.0f} tokens/s"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update()
        line_is_due = self._step * 20 // self._num_steps > (self._step - 1) * 20 // self._num_steps
        if self._visible and self._bar.disable and line_is_due:
            left = tqdm.format_interval(elapsed / self._step * (self._num_steps - self._step))
            print(f"step {self._step}/{self._num_steps}, {left} left, {speed}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
