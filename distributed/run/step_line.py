"""The line of metrics of the step under way: what it did, how long it took, and what of that time is not its own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from distributed.comm.communicator import Communicator, ReduceOp


class StepLine:
    """One step's line, begun anew for each.

    Args:
        samples: what speed is counted in.
        samples_per_step: over all ranks.

    Attributes:
        values: by their names in the metrics.
        speed: the name of the speed.
    """

    def __init__(self, samples: str, samples_per_step: int) -> None:
        self.values: dict[str, Any] = {}
        self.samples = samples
        self.speed = f"{samples}_per_second"
        self._samples_per_step = samples_per_step
        self._aside = (0.0, 0.0)  # seconds that are not of this step, and of these in waits

    def begin(self, step: int, learning_rate: float, layout: Mapping[str, int]) -> None:
        """Begin the line of a step; `layout` says of the first one which processes go on."""
        self.values, self._aside = {"step": step, "learning_rate": learning_rate, **layout}, (0.0, 0.0)

    def note(self, **values: float) -> None:
        """Add to the line."""
        self.values |= {name: float(value) for name, value in values.items()}

    @contextmanager
    def aside(self, comm: Communicator) -> Iterator[None]:
        """Leave what runs inside out of this step's time."""
        start, waited = time.perf_counter(), comm.waited_seconds
        yield
        self._aside = (self._aside[0] + time.perf_counter() - start, self._aside[1] + comm.waited_seconds - waited)

    def mean_wait(self, comm: Communicator, waited: float) -> float | None:
        """Return how long a rank waited in this step, on average. Collective.

        None where there are no other ranks.
        """
        if comm.size == 1:
            return None
        return float(comm.allreduce(np.array([waited - self._aside[1]]), op=ReduceOp.MEAN).wait()[0])

    def end(self, seconds: float, waited: float | None) -> dict[str, Any]:
        """Return the line of the step that has ended.

        Args:
            seconds: since the step began, those aside too.
            waited: what `mean_wait` returned.
        Raises:
            RuntimeError: nobody logged a loss.
        """
        if "loss" not in self.values:
            raise RuntimeError("every step logs its loss: call run.log(loss) before the end of the loop's body")
        seconds -= self._aside[0]
        self.values |= {"seconds": seconds, self.speed: self._samples_per_step / seconds}
        if waited is not None:
            self.values["exposed_comm_seconds"] = waited
        return self.values

    def check_loss(self) -> None:
        """Raise ValueError where the step that has ended leads nowhere."""
        if not math.isfinite(self.values["loss"]):
            number = self.values["step"] + 1  # as the progress bar counts
            raise ValueError(f"the loss of step {number} is {self.values['loss']}, and what follows would be too")

    def words(self, num_steps: int, seconds: float) -> str:
        """Return what a progress bar says after so many steps.

        Args:
            num_steps: that this process has done.
            seconds: that they took.
        """
        speed = num_steps * self._samples_per_step / seconds
        return f"loss {self.values['loss']:.3f}, {speed:,.0f} {self.samples}/s"
