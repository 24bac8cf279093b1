"""Arrays of a GPU by way of the host, with a CuPy of NumPy arrays: what is told to a stream comes about later."""

import time
from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest

from distributed import LocalWorld
from distributed.comm.local import LocalCommunicator

STARTS = ("_broadcast", "_allreduce", "_allgather", "_all_to_all", "_isend", "_irecv")


class LateStream(fake_cupy.Stream):
    """A stream that has much to do before anything that it is told."""

    def enqueue(self, call: Callable[[], None]) -> None:
        super().enqueue(lambda: time.sleep(0.01))
        super().enqueue(call)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_cupy.install(monkeypatch)
    module.cuda.get_current_stream = LateStream
    return module


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All arrays that operations are started on."""
    seen: list[Any] = []

    def watched(start: Any) -> Any:
        def start_and_note(comm: Any, array: Any, *how: Any) -> Any:
            seen.append(array)
            return start(comm, array, *how)

        return start_and_note

    for name in STARTS:
        monkeypatch.setattr(LocalCommunicator, name, watched(getattr(LocalCommunicator, name)))
    return seen


@pytest.mark.parametrize("longest", [2, 100])
def test_an_array_comes_to_the_host_and_its_result_goes_back(cupy: Any, started: list[Any], longest: int) -> None:
    n = np.arange(5.0)

    def program(comm: Any) -> None:
        comm.max_message_elements = longest
        mine, other = cupy.asarray(n + comm.rank), cupy.asarray(n + 7)
        for work, result, expected in (
            (comm.allreduce(mine), mine, 2 * n + 1),
            (comm.broadcast(other, root=1), other, n + 7),
        ):
            assert work.wait() is result
            np.testing.assert_array_equal(result.get(), expected)
        gathered = comm.allgather(cupy.asarray(n + comm.rank)).wait()
        rows = cupy.asarray(np.stack([n, n + 10]) + comm.rank)
        exchanged = comm.all_to_all(rows).wait()
        assert isinstance(gathered, fake_cupy.ndarray)
        assert isinstance(exchanged, fake_cupy.ndarray)
        np.testing.assert_array_equal(gathered.get(), [n, n + 1])
        np.testing.assert_array_equal(exchanged.get(), np.stack([n, n + 1]) + 10 * comm.rank)
        sent, received = cupy.asarray(n + comm.rank), cupy.asarray(n * 0)
        posted = comm.irecv(received, source=1 - comm.rank, tag=3)
        send = comm.isend(sent, dest=1 - comm.rank, tag=3)
        assert posted.wait() is received
        np.testing.assert_array_equal(received.get(), n + 1 - comm.rank)
        sent[...] = -1
        assert send.wait() is sent
        assert (sent == -1).all(), "what is sent is only read"

    LocalWorld(2, timeout_seconds=10).run(program)
    assert {type(array) for array in started} == {np.ndarray}
    assert len(started) == (2 * (6 if longest == 100 else 6 * 3))


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_an_empty_array_is_copied(cupy: Any, size: int) -> None:
    def program(comm: Any) -> None:
        array = cupy.empty((0, 3), np.float32)
        assert comm.allreduce(array).wait() is array
        assert comm.allgather(array).wait().shape == (size, 0, 3)

    LocalWorld(size, timeout_seconds=10).run(program)


def test_an_array_that_goes_as_it_is_is_finished_first(
    cupy: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[tuple[int, int]] = []
    monkeypatch.setattr(LocalCommunicator, "_reads_gpu_memory", lambda _, call: call == "allreduce")
    monkeypatch.setattr(LocalCommunicator, "_finish_writing", lambda _, a: finished.append((id(a), len(started))))
    array = cupy.asarray(np.ones(3))
    LocalWorld(1).run(lambda comm: comm.allreduce(array).wait())
    assert finished == [(id(array), 0)]
    assert [each is array for each in started] == [True]
