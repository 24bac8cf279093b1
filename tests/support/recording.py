"""A communicator that writes down what happens on it, for tests that ask what was sent and when."""

from dataclasses import dataclass
from typing import Any, NoReturn

from distributed import Communicator, ReduceOp, Work
from distributed.comm.communicator import Array


@dataclass(frozen=True)
class Event:
    """One call.

    Attributes:
        call: `isend`, `irecv`, `allreduce`, ..., `done`, or what a test notes itself.
        tag, nbytes: of the message.
        outstanding: point-to-point requests not yet known to be complete, as (call, tag), this one not counted.
    """

    call: str
    tag: int | None
    nbytes: int
    outstanding: tuple[tuple[str, int], ...]


class Log(list[Event]):
    """The events of one rank in order, over all communicators that share it.

    Attributes:
        requests: what is outstanding.
        num_progress: how often something was asked to let messages move.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_progress = 0
        self.requests: dict[Work, tuple[str, int]] = {}

    def note(self, call: str, tag: int | None = None, nbytes: int = 0) -> None:
        self.append(Event(call, tag, nbytes, tuple(self.requests.values())))

    def calls(self, *names: str) -> list[Event]:
        return [event for event in self if event.call in names]


class RecordedWork(Work):
    """A point-to-point request, outstanding until a wait or a test says that it is complete."""

    def __init__(self, inner: Work, log: Log, call: str, tag: int, nbytes: int) -> None:
        self._inner = inner
        self._log = log
        log.note(call, tag, nbytes)
        log.requests[self] = (call, tag)

    def wait(self) -> Array:
        result = self._inner.wait()
        self._complete()
        return result

    def test(self) -> bool:
        done = self._inner.test()
        if done:
            self._complete()
        return done

    def _complete(self) -> None:
        request = self._log.requests.pop(self, None)
        if request is not None:
            self._log.note("done", request[1])


class RecordingCommunicator(Communicator):
    """Passes everything on to `inner` and notes it in `log`; what is split off it does the same.

    Args:
        max_tag: what to promise instead of what `inner` does.
    """

    def __init__(self, inner: Communicator, log: Log, *, max_tag: int | None = None) -> None:
        super().__init__(inner.rank, inner.size)
        self._inner = inner
        self._log = log
        self._max_tag = inner.max_tag if max_tag is None else max_tag

    @property
    def library(self) -> str:
        return self._inner.library

    @property
    def max_tag(self) -> int:
        return self._max_tag

    @property
    def waited_seconds(self) -> float:
        return self._inner.waited_seconds

    def gather_objects(self, obj: object) -> list[Any]:
        self._log.note("gather_objects")
        return self._inner.gather_objects(obj)

    def barrier(self) -> None:
        self._inner.barrier()

    def progress(self) -> None:
        self._log.num_progress += 1
        self._inner.progress()

    def abort(self, message: str) -> NoReturn:
        self._inner.abort(message)

    def _broadcast(self, array: Array, root: int) -> Work:
        self._log.note("broadcast", nbytes=array.nbytes)
        return self._inner.broadcast(array, root=root)

    def _allreduce(self, array: Array, op: ReduceOp) -> Work:
        self._log.note("allreduce", nbytes=array.nbytes)
        return self._inner.allreduce(array, op=op)

    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work:
        self._log.note("reduce_scatter", nbytes=flat.nbytes)
        return self._inner.reduce_scatter(flat, op=op)

    def _allgather(self, array: Array) -> Work:
        self._log.note("allgather", nbytes=array.nbytes)
        return self._inner.allgather(array)

    def _all_to_all(self, array: Array) -> Work:
        self._log.note("all_to_all", nbytes=array.nbytes)
        return self._inner.all_to_all(array)

    def _split(self, color: int, key: int) -> Communicator:
        return RecordingCommunicator(self._inner.split(color, key), self._log, max_tag=self._max_tag)

    def _isend(self, array: Array, dest: int, tag: int) -> Work:
        return RecordedWork(self._inner.isend(array, dest=dest, tag=tag), self._log, "isend", tag, array.nbytes)

    def _irecv(self, array: Array, source: int, tag: int) -> Work:
        return RecordedWork(self._inner.irecv(array, source=source, tag=tag), self._log, "irecv", tag, array.nbytes)
