"""What a rank did when, noted while it runs.

    with ddp.recorder:                          # or pipe.recorder, of a pipeline
        ...                                     # one step
    events = ddp.recorder.gather(comm)          # collective: of all ranks, on one clock
    Path("step.json").write_text(perfetto(events))

Replicas of a pipeline share its recorder: `DistributedDataParallel(stages, mesh.dp, recorder=pipe.recorder)`.

A rank is at any moment in one state: it computes (forward, backward, optimizer, or an action of a schedule), waits for
others, posts or sends a message, opens or closes the step. Besides, messages and buckets are under way; one counts as
complete when this rank first sees that it is, at the latest after the op that it was in. On a GPU times are the GPU's
own: see `clock.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.trace.clock import Clock, HostClock
from distributed.trace.perfetto import Event
from minigrad.autodiff.hooks import Hooks

NUM_EXCHANGES = 16  # of clocks, with each rank; the quickest counts
CommHook = Callable[[Array, Communicator], Work]


class Note(NamedTuple):
    """An Event on this rank's own clock.

    It is in seconds, or in moments of the clock while it is noted.
    """

    name: str
    start: Any
    end: Any
    category: str


class Recorder:
    """Notes what this rank does inside a `with`; outside it costs a look at a flag.

    Args:
        first: category and name of what a rank does when a recording begins, where that is known.
        clock: that times are read from; the host's by default.
    """

    def __init__(self, first: tuple[str, str] | None = None, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or HostClock()
        self._notes: list[Note] = []
        self._first = first
        self._is_on = False
        self._state: tuple[str, str, Any] | None = None  # name, category, since which moment
        self._under_way: list[_WatchedWork] = []
        self._ready: dict[str, Any] = {}  # by name of a parameter

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def ready(self) -> dict[str, float]:
        """When each gradient was final in the last backward, by the parameter's name. Waits for a GPU."""
        return {name: self._clock.seconds(moment) for name, moment in self._ready.items()}

    @property
    def notes(self) -> list[Note]:
        """What was noted, in the order in which it ended.

        Each `with` begins with none. Waits for a GPU.
        """
        seconds = self._clock.seconds
        return [Note(name, seconds(start), seconds(end), category) for name, start, end, category in self._notes]

    def __enter__(self) -> Recorder:
        self._notes = []
        self._ready = {}
        self._is_on = True
        self._clock.start()
        if self._first is not None:
            self.enter(*self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        try:
            self._look()
        finally:  # of work that failed
            self._under_way.clear()
            self._is_on = False

    def enter(self, category: str, *what: object) -> None:
        """Note that this rank now does something else; `what` becomes the event's name."""
        if self._is_on:
            self.leave()
            self._state = " ".join(map(str, what)), category, self._clock.now()

    def leave(self) -> None:
        """Note that this rank is done with what it did."""
        if self._state is not None:
            name, category, start = self._state
            self._notes.append(Note(name, start, self._clock.now(), category))
            self._state = None

    def note_ready(self, name: str) -> None:
        """Note that a parameter's gradient is final now."""
        if self._is_on:
            self._ready[name] = self._clock.now()

    @contextmanager
    def span(self, category: str, *what: object) -> Iterator[None]:
        """Note that this rank does something inside the `with`.

        After it the rank goes on with what it did before.
        """
        before = self._state
        self.enter(category, *what)
        try:
            yield
        finally:
            self.leave()
            if before is not None:
                self.enter(before[1], before[0])

    def watch(self, category: str, what: object, launch: Callable[[], Work], *, nbytes: int | None = None) -> Work:
        """Launch work, and note how long it is under way.

        Args:
            nbytes: what travels; it ends the event's name.
        """
        if not self._is_on:
            return launch()
        name = str(what) if nbytes is None else f"{what} {size_text(nbytes)}".lstrip()
        notes, start, clock = self._notes, self._clock.now(), self._clock
        work = launch()
        watched = _WatchedWork(work, lambda: notes.append(Note(name, start, clock.end_of(work), category)))
        self._under_way.append(watched)
        return watched

    def comm_hook(self, inner: CommHook) -> CommHook:
        """Return the way in which a bucket's gradients travel, `inner`, watched.

        It is a comm hook for `DistributedDataParallel`.
        """

        def hook(grad: Array, comm: Communicator) -> Work:
            return self.watch("bucket", "", lambda: inner(grad, comm), nbytes=grad.nbytes)

        return hook

    def hooks(self) -> Hooks:
        """Return what a backward has to call.

        The end of a message is then seen when it comes.
        """
        return Hooks(between_ops=self._look) if self._is_on else Hooks()

    def _look(self) -> None:
        self._under_way = [work for work in self._under_way if not work.test()]

    def gather(self, comm: Communicator) -> list[Event]:
        """Return the events of all ranks, in order of their start. Collective.

        Times count from the first one on.

        Args:
            comm: says what a rank is; see `clock_offset` for how its clocks are aligned.
        """
        offset = clock_offset(comm)
        mine = [
            Event(comm.rank, note.name, note.start + offset, note.end + offset, note.category) for note in self.notes
        ]
        events = [event for row in comm.gather_objects(_on_tracks(mine)) for event in row]
        first = min((event.start for event in events), default=0.0)
        shifted = [event._replace(start=event.start - first, end=event.end - first) for event in events]
        return sorted(shifted, key=lambda event: event.start)


def size_text(nbytes: int) -> str:
    """Return a number of bytes in three digits, with its unit: "96 KiB"."""
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 999.5:
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}"


def clock_offset(comm: Communicator, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return what to add to this rank's clock to have rank 0's. Collective.

    Rank 0 asks each other rank for its time, some times over. The quickest answer counts, taken for the time in the
    middle between question and answer: wrong by at most half of what it took, microseconds on one host. Clocks that
    run at different speeds drift apart afterwards.
    """
    comm = comm.duplicate()
    time_of_other, offset = np.zeros(1), np.zeros(1)
    for other in range(1, comm.size):
        quickest = np.inf
        for _ in range(NUM_EXCHANGES):
            if comm.rank == 0:
                asked = clock()
                comm.send(time_of_other, dest=other, tag=0)
                comm.recv(time_of_other, source=other, tag=0)
                took = clock() - asked
                if took < quickest:
                    quickest, offset[0] = took, asked + took / 2 - time_of_other[0]
            elif comm.rank == other:
                comm.recv(time_of_other, source=0, tag=0)
                time_of_other[0] = clock()
                comm.send(time_of_other, dest=0, tag=0)
        if comm.rank == 0:
            comm.send(offset, dest=other, tag=0)
        elif comm.rank == other:
            comm.recv(offset, source=0, tag=0)
    return 0.0 if comm.rank == 0 else float(offset[0])


def _on_tracks(events: Iterable[Event]) -> list[Event]:
    """Give events of one category that overlap a category each: "send", "send 2", ..."""
    placed: list[Event] = []
    free_from: dict[str, list[float]] = {}  # of each track of a category
    for event in sorted(events, key=lambda event: event.start):
        tracks = free_from.setdefault(event.category, [])
        track = next((i for i, end in enumerate(tracks) if end <= event.start), len(tracks))
        tracks[track : track + 1] = [event.end]
        placed.append(event._replace(category=event.category if track == 0 else f"{event.category} {track + 1}"))
    return placed


class _WatchedWork(Work):
    """Work that tells once when it is seen to be complete."""

    def __init__(self, inner: Work, on_end: Callable[[], None]) -> None:
        self._inner = inner
        self._on_end: Callable[[], None] | None = on_end

    def wait(self) -> Array:
        result = self._inner.wait()
        self._ended()
        return result

    def test(self) -> bool:
        done = self._inner.test()
        if done:
            self._ended()
        return done

    @property
    def done_event(self) -> Any:
        return self._inner.done_event

    def _ended(self) -> None:
        if self._on_end is not None:
            self._on_end()
            self._on_end = None
