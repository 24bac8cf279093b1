"""Numbers in memory that CUDA's streams write and wait for, without a kernel; CuPy has no door to these calls.

They are captured in graphs as nodes of their own.

Source: NVIDIA, CUDA Driver API, "Stream Memory Operations".
"""

from __future__ import annotations

import ctypes

_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class StreamFlags:
    """Words of four bytes that are 0 or 1, in the memory of a GPU or of another one that it reaches.

    Raises:
        OSError: there is no driver of NVIDIA.
    """

    def __init__(self) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._wait, self._write = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
        for call in (self._wait, self._write):
            call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def wait(self, stream: int, at: int) -> None:
        """Let a stream wait until the word at this address is 1."""
        _check(self._wait(stream, at, 1, _UNTIL_AT_LEAST))

    def write(self, stream: int, at: int, value: int) -> None:
        """Let a stream write a word, after all that it has written before."""
        _check(self._write(stream, at, value, 0))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's driver refused a wait or a write of a stream, error {status}")
