"""StepGuard: steps whose loss or gradient is infinite or nan are not taken, and a run of them ends the training."""

from __future__ import annotations

import math

from minigrad.words import counted

MAX_SKIPPED_IN_A_ROW = 10


class StepGuard:
    """Decides whether an optimizer may step, and counts the steps that it may not.

        if guard.allows(grad_norm, loss):
            optimizer.step()

    It asks nobody: give it numbers that are the same on every rank, such as the norm of averaged gradients, and all
    ranks decide alike.

    Args:
        max_in_a_row: skipped steps that may follow each other. One bad batch is no reason to end a run; weights that
            give nothing finite any more are.

    Raises:
        ValueError: max_in_a_row is negative.
    """

    def __init__(self, max_in_a_row: int = MAX_SKIPPED_IN_A_ROW) -> None:
        if max_in_a_row < 0:
            raise ValueError(f"max_in_a_row must not be negative, got {max_in_a_row}")
        self.max_in_a_row = max_in_a_row
        self._num_skipped = 0
        self._num_in_a_row = 0

    @property
    def num_skipped(self) -> int:
        """Steps skipped so far."""
        return self._num_skipped

    @property
    def num_in_a_row(self) -> int:
        """Of the skipped steps, the last ones with no step taken since."""
        return self._num_in_a_row

    def allows(self, *values: float) -> bool:
        """Return whether all of these are finite: the gradient's norm, the loss.

        Raises:
            FloatingPointError: too many steps in a row would be skipped. Call this before saving.
        """
        good = all(map(math.isfinite, values))
        self._count(good)
        if not good:
            self.check(*values)
        return good

    def check(self, *values: float) -> None:
        """Raise FloatingPointError if too many steps in a row were skipped.

        It says what these values were for the last one.
        """
        if self.num_in_a_row > self.max_in_a_row:
            found = " and ".join(map(str, values))
            raise FloatingPointError(
                f"no more than {counted(self.max_in_a_row, 'step')} in a row are skipped for a loss or a norm that is "
                f"not finite, now got {found}: go on from a checkpoint with a lower learning rate, or look at the data"
            )

    def _count(self, good: bool) -> None:
        """Note that a step was taken, or skipped."""
        self._num_skipped += not good
        self._num_in_a_row = 0 if good else self._num_in_a_row + 1
