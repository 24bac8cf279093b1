"""The contract between a training script and whatever carries its messages.

`Communicator` is a group of ranks with collectives and point-to-point messages, named after MPI. Everything that
moves an array returns a `Work` and does not block; blocking is `.wait()`. The public methods check their arguments
once, here, before anything is sent; what is not plain they hand to `transfer`, which finds the way. A subclass supplies
the methods that start with an underscore.

Rules that hold for every subclass: all ranks call collectives in the same order; an array handed over must not be
touched until its Work is complete; the communicator itself keeps unfinished Work and its arrays alive, so dropping a
Work is safe; one thread at a time uses a communicator. A CuPy array is read after what its current stream has to do
already, and its result is there for what that stream does after wait().
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from distributed.comm.failure import Heal
from distributed.comm.reduction import ReduceOp, check_reducible
from distributed.comm.sequence import MessageSteps, SequenceWork
from distributed.comm.transfer import MAX_MESSAGE_BYTES, carry, carry_rows, check_array
from distributed.comm.work import Array, JoinedWork, Work
from minigrad.backend import round_to, synchronize, xp_of
from minigrad.words import counted

# Every MPI offers tags up to here (MPI 4.1, section 9.1.2), so this is what other communicators promise.
PORTABLE_MAX_TAG = 32767
MAX_MESSAGE_ELEMENTS = 2**31 - 1  # MPI counts in C ints
_REDUCIBLE = frozenset(map(np.dtype, ("float32", "float64", "int64", "uint8")))  # native; others get a closer look

WaitContext = str | Callable[[], str]


class Communicator(ABC):
    """A group of ranks, 0 to size - 1, of which this process is `rank`.

    Attributes:
        max_message_elements: what is longer goes in several messages. The same on every rank.
    Raises:
        ValueError: max_message_elements is not positive.
    """

    def __init__(self, rank: int, size: int, *, max_message_elements: int = MAX_MESSAGE_ELEMENTS) -> None:
        if max_message_elements < 1:
            raise ValueError(f"max_message_elements must be positive, got {max_message_elements}")
        self.rank = rank
        self.size = size
        self.max_message_elements = max_message_elements
        self._wait_contexts: list[WaitContext] = []
        self._subject: str | None = None  # of the collectives that are being launched

    @property
    @abstractmethod
    def library(self) -> str:
        """What carries the messages, for a start line: `Open MPI v5.0.11`, `no MPI`."""

    @property
    @abstractmethod
    def max_tag(self) -> int:
        """The largest tag that a point-to-point message may have."""

    @property
    @abstractmethod
    def waited_seconds(self) -> float:
        """How long this rank has been blocked so far.

        It counts waits of this communicator and of all that share its origin. The family is one: a split, a split of a
        split and the communicator that they come from give the same number. The difference over a step is the
        communication that nothing hid.
        """

    # Collectives: every rank calls them, in the same order.

    def broadcast(self, array: Array, *, root: int = 0) -> Work:
        """Overwrite `array` with that of rank `root`, on every rank.

        Collective. Any dtype; the same shape and dtype on every rank.

        Args:
            array: contiguous; on `root` it is only read.
        Returns:
            Work whose wait() gives `array`.
        Raises:
            ValueError: root is no rank, or `array` is not contiguous or not writeable.
        """
        self._check_rank("broadcast", "root", root)
        if self._is_plain(array):
            return self._broadcast(array, root)
        check_array("broadcast", array, written=True)
        return carry(self, "broadcast", array, lambda part: self._broadcast(part, root))

    def allreduce(self, array: Array, *, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Overwrite `array` with its reduction over all ranks, on every rank.

        Collective; the same shape and dtype on every rank. float16 and bfloat16 are added up in float32. The order of
        summation is the subclass's own: bits may differ from one communicator to another.

        Args:
            array: contiguous; a slice of `buffer()` is reduced fastest.
            op: elementwise reduction.
        Returns:
            Work whose wait() gives `array`.
        Raises:
            TypeError: `array` is not of native integers or floats, or op is MEAN and it is not of floats.
            ValueError: `array` is not contiguous or not writeable.
        Cost: 2 (size - 1) / size * array.nbytes sent per rank (ring).
        """
        if self._is_plain(array, op=op):
            return self._allreduce(array, op)
        check_array("allreduce", array, written=True)
        check_reducible("allreduce", array.dtype, op)
        return carry(self, "allreduce", array, lambda part: self._allreduce(part, op))

    def average(self, array: Array, *, everywhere: bool = True) -> Work:
        """Overwrite `array` with the sum over all ranks of its values times 1 / size.

        Not the MEAN of `allreduce`, which divides the sum: these are the bits of a sum with weights that happen to be
        equal. Collective; the same shape and dtype on every rank. A communicator that multiplies on the way saves a
        pass over the memory.

        Args:
            array: contiguous floats.
            everywhere: or each rank is left its own slice alone, as by `reduce_scatter`.
        Returns:
            Work whose wait() gives `array`, or that slice.
        Raises:
            TypeError: `array` is not of native floats.
            ValueError: `array` is not contiguous or not writeable, or without `everywhere` not divisible by size.
        """
        if not self._is_plain(array, op=ReduceOp.SUM) or array.dtype.kind != "f":
            check_array("average", array, written=True)
            check_reducible("average", array.dtype, ReduceOp.MEAN)
        if not everywhere:
            self._check_slices("average", array)
        array *= array.dtype.type(1 / self.size)
        return self.allreduce(array) if everywhere else self.reduce_scatter(array)

    def reduce_scatter(self, flat: Array, *, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Reduce `flat` over ranks and leave this rank its own slice.

        Collective: every rank calls it, same order, same size and dtype.

        Args:
            flat: (size * n,) contiguous; overwritten, and only the own slice is defined afterwards.
            op: elementwise reduction.
        Returns:
            Work whose wait() gives the (n,) slice [rank * n : (rank + 1) * n] of `flat`, a view.
        Raises:
            TypeError: `flat` is not of native integers or floats, or op is MEAN and it is not of floats.
            ValueError: `flat` is not 1-D, contiguous and writeable, or flat.size is not divisible by size.
        Cost: (size - 1) / size * flat.nbytes sent per rank (ring).
        Source: MPI 4.1, section 6.10; Rajbhandari et al. 2020 (ZeRO), section 5.
        """
        if self._is_plain(flat, op=op) and flat.ndim == 1 and flat.size % self.size == 0:
            return self._reduce_scatter(flat, op)
        check_array("reduce_scatter", flat, written=True)
        check_reducible("reduce_scatter", flat.dtype, op)
        self._check_slices("reduce_scatter", flat)
        return carry_rows(
            self,
            "reduce_scatter",
            flat,
            self.size,
            lambda part: self._reduce_scatter(part.reshape(-1), op),
            lambda: flat[self._own_slice(flat)],
        )

    def sum_widely(self, array: Array, wide: Array, is_wide: Array, *, everywhere: bool = True) -> Work:
        """Overwrite `array` with its sum over all ranks, added up in a wider dtype and rounded once.

        Where a rank's own values are sums in the wider dtype already, it says so, each rank for itself. Collective.

            | wide, 8n bytes | array, 4n bytes | is_wide |       in one `buffer()` ranks of one host read each other's
                                                                 values as they are, and write what they add up

        Args:
            array: (n,) contiguous floats.
            wide: (n,) contiguous floats of a wider dtype, which may be overwritten.
            is_wide: (1,) uint8: 1 where this rank's values are in `wide`, 0 where they are in `array`.
            everywhere: or each rank is left its own slice alone, as by `reduce_scatter`.
        Returns:
            Work whose wait() gives `array`; what `wide` has then is undefined.
        Raises:
            TypeError: `array` or `wide` is not of native integers or floats, or `wide` is of none that are wider.
            ValueError: the arrays are not contiguous and writeable, or not of one size; or without `everywhere` it is
                not divisible by size.
        Cost: as `allreduce` or `reduce_scatter` of `wide` between hosts; of `array` on one.
        """
        for each in (array, wide, is_wide):
            check_array("sum_widely", each, written=True)
        check_reducible("sum_widely", array.dtype, ReduceOp.SUM)
        check_reducible("sum_widely", wide.dtype, ReduceOp.SUM)
        if wide.dtype.itemsize <= array.dtype.itemsize:
            raise TypeError(f"sum_widely adds {array.dtype} up in a wider dtype, got {wide.dtype}")
        if array.ndim != 1 or wide.shape != array.shape or is_wide.shape != (1,):
            shapes = f"{array.shape}, {wide.shape} and {is_wide.shape}"
            raise ValueError(f"sum_widely needs two arrays of (n,) and one of (1,), got {shapes}")
        if not everywhere:
            self._check_slices("sum_widely", array)
        return self._sum_widely(array, wide, is_wide, everywhere)

    def allgather(self, array: Array) -> Work:
        """Collect the arrays of all ranks, in rank order, on every rank.

        Collective. Any dtype; the same shape and dtype on every rank.

        Args:
            array: contiguous, of any shape.
        Returns:
            Work whose wait() gives a new array, (size, *array.shape).
        Raises:
            ValueError: `array` is not contiguous.
        Cost: (size - 1) * array.nbytes received per rank.
        """
        if self._is_plain(array, written=False):
            return self._allgather(array)
        check_array("allgather", array, written=False)
        return carry_rows(
            self,
            "allgather",
            array,
            1,
            self._allgather,
            lambda: xp_of(array).empty((self.size, *array.shape), array.dtype),
        )

    def allgather_in_place(self, *flats: Array) -> Work:
        """Overwrite each rank's slice of some arrays with what that rank has there.

        What undoes a reduce_scatter of each. Collective. Any dtype; the same sizes and dtypes on every rank.

        Args:
            flats: (size * n,) contiguous, n of each its own; this rank's slice [rank * n : (rank + 1) * n] is only
                read. In one `buffer()` ranks of one host write straight into each other's.
        Returns:
            Work whose wait() gives the first of `flats`.
        Raises:
            ValueError: there is none, or one is not 1-D, contiguous and writeable, or its size not divisible by size.
        Cost: (size - 1) / size * nbytes received per rank.
        Source: MPI 4.1, section 6.7 (MPI_IN_PLACE).
        """
        if not flats:
            raise ValueError("allgather_in_place needs an array")
        if all(self._is_plain(flat) and flat.ndim == 1 and flat.size % self.size == 0 for flat in flats):
            return self._allgather_in_place(flats)
        for flat in flats:
            check_array("allgather_in_place", flat, written=True)
            self._check_slices("allgather_in_place", flat)
        return self._gathered_into(flats)

    def all_to_all(self, array: Array) -> Work:
        """Send row r of `array` to rank r, and collect the rows that come here.

        They come in rank order. Collective. Any dtype; the same shape and dtype on every rank.

        Args:
            array: (size, ...) contiguous.
        Returns:
            Work whose wait() gives a new array of the same shape.
        Raises:
            ValueError: `array` is not contiguous, or has not one row for each rank.
        Cost: (size - 1) / size * array.nbytes sent per rank.
        """
        check_array("all_to_all", array, written=False)
        if array.ndim == 0 or len(array) != self.size:
            ranks = counted(self.size, "rank")
            raise ValueError(f"all_to_all needs one row for each of {ranks}, got shape {array.shape}")
        return carry_rows(
            self, "all_to_all", array, self.size, self._all_to_all, lambda: xp_of(array).empty_like(array)
        )

    def buffer(self, num_elements: int, dtype: Any) -> Array:
        """Return memory from which this communicator reduces fastest.

        It is (num_elements,) zeros. Collective, blocking. An allreduce of any slice of it takes the fast way, if every
        rank gives the same slice.

        Raises:
            ValueError: the ranks ask for different things; the same message on every rank.
        """
        wanted = self.gather_objects((int(num_elements), np.dtype(dtype).name))
        if len(set(wanted)) > 1:
            raise ValueError(f"buffer needs the same size and dtype on every rank, got {wanted} by rank")
        return self._buffer(int(num_elements), np.dtype(dtype))

    def stage_reductions(self) -> None:
        """Let what is not in `buffer()` be scattered by `reduce_scatter` through memory that ranks share, if it can.

        Collective, blocking. For arrays whose memory comes and goes.
        """
        return  # where nothing is gained

    @abstractmethod
    def gather_objects(self, obj: object) -> list[Any]:
        """Collect one small Python object of each rank, in rank order, on every rank.

        Collective, blocking, and pickled: for start-up and errors, never in a training step.
        """

    def broadcast_object(self, obj: object, *, root: int = 0) -> Any:
        """Return one small Python object of rank `root`, on every rank.

        Collective, blocking, and pickled: for start-up and errors, never in a training step.

        Args:
            obj: the others' is not looked at.
        Raises:
            ValueError: root is no rank.
        """
        pickled = pickle.dumps(obj) if self.rank == root else b""
        with self.waiting_for("broadcast_object"):
            size = self.broadcast(np.array([len(pickled)]), root=root).wait()[0]
            array = np.frombuffer(bytearray(pickled), np.uint8) if self.rank == root else np.empty(size, np.uint8)
            return pickle.loads(self.broadcast(array, root=root).wait().tobytes())

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank has called it."""

    def split(self, color: int, key: int = 0) -> Communicator:
        """Make a communicator of the ranks that give the same color.

        Its ranks are ordered by key, then by rank. Collective, blocking. Its messages never meet those of any other
        communicator.

        Args:
            color: 0 or more; key: any integer.
        Raises:
            ValueError: color is negative.
        """
        if color < 0:
            raise ValueError(f"split needs color >= 0, got {color}")
        return self._split(color, key)

    def duplicate(self) -> Communicator:
        """Make a communicator of the same ranks with messages of its own.

        Collective, blocking.
        """
        return self.split(color=0, key=self.rank)

    def free(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give back what this communicator, and all that was split off it, have taken.

        Collective. None of them may be used afterwards, and nothing may be under way. Who never calls it loses nothing
        but room: MPICH has it for 2,048 communicators a process, of which a DistributedDataParallel takes about ten.
        Threads, single ranks, and a world that survives failures, have nothing to give back.

        Raises:
            RuntimeError: this is the world, which lives as long as its ranks.
        """

    # Point to point: two ranks. The k-th send of a (source, dest, tag) meets the k-th receive.

    def isend(self, array: Array, *, dest: int, tag: int) -> Work:
        """Send the bytes of `array` to rank `dest`.

        May complete before the message is received, or only once the receive is posted: a correct program allows for
        both.

        Args:
            array: contiguous, of any dtype.
            dest: a rank of this communicator, this one too; tag: 0 to max_tag.
        Returns:
            Work whose wait() gives `array`, which must not be written to until then.
        Raises:
            ValueError: dest is no rank, tag is not in 0..max_tag, or `array` is not contiguous.
        """
        self._check_message("isend", "dest", dest, tag)
        if self._is_plain(array, written=False):
            return self._isend(array, dest, tag)
        check_array("isend", array, written=False)
        return carry(self, "isend", array, lambda part: self._isend(part, dest, tag), written=False)

    def irecv(self, array: Array, *, source: int, tag: int) -> Work:
        """Receive a message of array.nbytes bytes from rank `source` into `array`.

        Args:
            array: contiguous; overwritten.
            source: a rank of this communicator, this one too; tag: 0 to max_tag.
        Returns:
            Work whose wait() gives `array`; it raises ValueError where the message has another size.
        Raises:
            ValueError: source is no rank, tag is not in 0..max_tag, or `array` is not contiguous or not writeable.
        """
        self._check_message("irecv", "source", source, tag)
        if self._is_plain(array):
            return self._irecv(array, source, tag)
        check_array("irecv", array, written=True)
        return carry(self, "irecv", array, lambda part: self._irecv(part, source, tag))

    def send(self, array: Array, *, dest: int, tag: int) -> None:
        """Send and block until `array` may be written to again; see isend."""
        self.isend(array, dest=dest, tag=tag).wait()

    def recv(self, array: Array, *, source: int, tag: int) -> Array:
        """Receive and block until `array` holds the message; see irecv."""
        return self.irecv(array, source=source, tag=tag).wait()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make messages between some ranks as fast as they can be.

        All others can be sent as well. Collective, blocking; once.

        Args:
            pairs: (source, dest); the same on every rank.
        Raises:
            ValueError: ranks give different ones; the same message on every rank.
        """
        return  # where there is one way only

    def sequence(self, steps: MessageSteps) -> Work:
        """Run an operation of several messages, on host arrays.

        Where work moves by itself, this does too.

        Args:
            steps: yields each Work, is sent its result, and returns that of the whole: see `sequence.py`.
        """
        return SequenceWork(steps)

    def progress(self) -> None:
        """Let unfinished work move.

        Cheap enough to call between any two ops of a backward.
        """
        return  # where work moves by itself

    @contextmanager
    def waiting_for(self, what: WaitContext) -> Iterator[None]:
        """Say in whose name this communicator waits inside the `with`.

        An error says it, should a wait last too long.

            with comm.waiting_for(lambda: f"bucket {i}, pending: {names}"):
                work.wait()

        Args:
            what: words for the error message, or a function that finds them, called only then.
        """
        self._wait_contexts.append(what)
        try:
            yield
        finally:
            self._wait_contexts.pop()

    @contextmanager
    def calls_about(self, what: str) -> Iterator[None]:
        """Say what the collectives launched inside the `with` are about.

        A bucket of gradients, for example. Where ranks compare their calls they compare this too, and an error names
        it: two ranks that reduce as many numbers of something else are found.
        """
        before, self._subject = self._subject, what
        try:
            yield
        finally:
            self._subject = before

    @property
    def survives(self) -> bool:
        """Whether this is of a world that survives the death of a rank."""
        return False

    @property
    def is_newcomer(self) -> bool:
        """Whether this process took the place of a rank that died.

        It has none of the run's state then.
        """
        return False

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks of this world that this rank knows to be dead; once it has been healed, all that were."""
        return ()

    def vote(self, yes: bool, *, idle: bool = False) -> bool:
        """Return whether all ranks live and all of them say yes.

        The answer is the same on every rank, whoever dies meanwhile. Collective, blocking; of a world that survives
        failures, see `failure.py`. In any other a death ends the job, so nothing is asked.

        Args:
            idle: this rank has nothing to do meanwhile, and leaves its core to others.
        """
        return yes

    def heal(self, how: Heal) -> Communicator:
        """Return the world that comes after this one, which has lost ranks.

        Collective over those that live.

        Args:
            how: whether the dead are replaced, or left out.
        Raises:
            RuntimeError: this is no world that survives failures.
        """
        raise RuntimeError(f"only a world that survives failures can heal, this one is of {self.library}")

    @abstractmethod
    def abort(self, message: str) -> NoReturn:
        """End the whole job, all ranks of it, with a message.

        Args:
            message: what is said, beside the rank that says it.
        """

    # What a subclass supplies; the arguments have been checked.

    @abstractmethod
    def _broadcast(self, array: Array, root: int) -> Work: ...

    @abstractmethod
    def _allreduce(self, array: Array, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, flat: Array, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _allgather(self, array: Array) -> Work: ...

    @abstractmethod
    def _all_to_all(self, array: Array) -> Work: ...

    @abstractmethod
    def _split(self, color: int, key: int) -> Communicator: ...

    @abstractmethod
    def _isend(self, array: Array, dest: int, tag: int) -> Work: ...

    @abstractmethod
    def _irecv(self, array: Array, source: int, tag: int) -> Work: ...

    # What a subclass may do in a faster way.

    def _sum_widely(self, array: Array, wide: Array, is_wide: Array, everywhere: bool) -> Work:
        if not is_wide[0]:
            wide[...] = array

        def land(results: list[Array]) -> Array:
            own = slice(None) if everywhere else self._own_slice(array)
            round_to(array[own], results[0])
            return array

        return JoinedWork([self.allreduce(wide) if everywhere else self.reduce_scatter(wide)], land)

    def _allgather_in_place(self, flats: Sequence[Array]) -> Work:
        return self._gathered_into(flats)

    def _buffer(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        return np.zeros(num_elements, dtype)

    def _reads_gpu_memory(self, call: str) -> bool:
        """Whether this operation takes GPU arrays as they are."""
        return False

    def _finish_writing(self, array: Array) -> None:
        """Do what is needed before a GPU array is read as it is: wait for the kernels that write it."""
        synchronize(array)

    # What the methods above have in common.

    def _gathered_into(self, flats: Sequence[Array]) -> Work:
        """Gather slices into memory of their own first."""

        def land(results: list[Array]) -> Array:
            for flat, rows in zip(flats, results, strict=True):
                flat[...] = rows.reshape(-1)
            return flats[0]

        return JoinedWork([self.allgather(flat.reshape(self.size, -1)[self.rank]) for flat in flats], land)

    def _own_slice(self, flat: Array) -> slice:
        return slice(self.rank * flat.size // self.size, (self.rank + 1) * flat.size // self.size)

    def _describe_context(self) -> str:
        """Say in whose name this communicator waits, for the end of an error message."""
        contexts = [what if isinstance(what, str) else what() for what in self._wait_contexts]
        return "".join(f", for {context}" for context in contexts)

    def _is_plain(self, array: Array, *, written: bool = True, op: ReduceOp | None = None) -> bool:
        """Return whether an array passes all checks and goes in one message as it is, as nearly all do: one look.

        Args:
            written: whether it is written into.
            op: what reduces it, if anything does.
        """
        return (
            type(array) is np.ndarray
            and array.flags.c_contiguous
            and (array.flags.writeable or not written)
            and array.size <= self.max_message_elements
            and array.nbytes <= MAX_MESSAGE_BYTES
            and (not array.dtype.hasobject if op is None else array.dtype in _REDUCIBLE and op is not ReduceOp.MEAN)
        )

    def _check_slices(self, call: str, flat: Array) -> None:
        if flat.ndim != 1 or flat.size % self.size:
            raise ValueError(
                f"{call} needs a 1-D array whose size is divisible by the number of ranks, "
                f"got shape {flat.shape} and {counted(self.size, 'rank')}"
            )

    def _check_rank(self, call: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{call} needs a {name} in 0..{self.size - 1}, got {rank}")

    def _check_message(self, call: str, name: str, rank: int, tag: int) -> None:
        self._check_rank(call, name, rank)
        if not (0 <= tag <= PORTABLE_MAX_TAG or 0 <= tag <= self.max_tag):
            raise ValueError(f"{call} needs a tag in 0..{self.max_tag}, got {tag}")
