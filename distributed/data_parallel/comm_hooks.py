"""Comm hooks: how a bucket's gradients travel. A hook is a plain function, `(gradients, communicator) -> Work`.

The gradients are (n,) contiguous, already multiplied by this rank's share, so their sum over ranks is the mean. When
the Work is done, that sum must lie in the same array, with the same bits on every rank. Every rank uses the same
hook, and a hook makes the same collectives on every rank.

To write one: reduce something smaller or something else, and return a Work that puts the result back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.comm.communicator import Array, Communicator, Work

CommHook = Callable[[Array, Communicator], Work]


def allreduce(grad: Array, comm: Communicator) -> Work:
    """Send the gradients as they are: the default."""
    return comm.allreduce(grad)


def average(grad: Array, comm: Communicator) -> Work:
    """Send gradients of which all ranks have the same share.

    They are not multiplied by it yet. It is what buckets do in place of `allreduce` where they can: the same bits, and
    on a GPU no pass before the reduction.
    """
    return comm.average(grad)


def compressed(dtype: Any) -> CommHook:
    """Return a hook that sends gradients in a narrower dtype.

    float16 and bfloat16 are half the bytes of float32. What is summed is rounded to that dtype once before the sum and
    once after it. float16 overflows beyond 65504: gradients in a loss scale or without clipping may need bfloat16
    (`ml_dtypes.bfloat16`).
    """

    def hook(grad: Array, comm: Communicator) -> Work:
        return _Widening(comm.allreduce(grad.astype(dtype)), grad)

    return hook


class _Widening(Work):
    """Copies a narrow result into the wide array that it came from."""

    def __init__(self, narrow: Work, wide: Array) -> None:
        self._narrow = narrow
        self._wide = wide
        self._done = False

    def test(self) -> bool:
        if not self._done and self._narrow.test():
            self.wait()
        return self._done

    def wait(self) -> Array:
        if not self._done:
            self._wide[...] = self._narrow.wait()
            self._done = True
        return self._wide
