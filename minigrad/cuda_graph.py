"""A training step captured once for each shape of its inputs, and replayed: no Python between its kernels.

    calls 1, 2    run as they are: kernels are compiled, plans are made, memory is taken
    call 3        captured into a graph, which computes nothing, then replayed
    from then on  inputs are copied to where the graph reads them, the optimizer tells its numbers, the graph runs

What a graph replays is exactly what was launched while it was captured: a Python number is frozen, so everything that
changes from step to step lies on the device. Whatever asks the device for an answer cannot be part of it, and is
refused with its place in the code.

Each shape has a graph and a pool of memory of its own, which live and die together; so have those of parameters that
are trained. Of several ranks a graph has also what they told each other while it was captured, such as how much each
weighs: so there it is one of the shapes on all.
"""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from minigrad.autodiff.mode import Capture, capturing, current_hook
from minigrad.backend import Array, cuda_library, cupy, xp_of
from minigrad.optim import Optimizer
from minigrad.tensor import Tensor

NUM_WARMUP_CALLS = 2


class CapturedStep:
    """Calls a training step, as a CUDA graph once it knows it.

    That is from the third call with inputs of a shape on.

        def step(x, y):
            optimizer.zero_grad()
            loss = mg.cross_entropy(model(x), y)
            mg.backward(loss)
            optimizer.step()
            return loss

        captured = CapturedStep(step, optimizer)
        for x, y in batches:
            loss = captured(x, y)  # every call trains; reading the loss waits for the GPU

    Args:
        step: (*arrays) -> what it computes on the GPU: tensors, arrays, tuples of them, or None. It must do the same
            each time, and neither move data between host and device nor ask the device anything.
        optimizer: that `step` steps, once; an AdamW of float32 parameters. It clips with its own `max_norm`.
        gather: of a step of several ranks: returns what all of them give, as `comm.gather_objects` does. A graph is
            then one of the shapes on all ranks, by which they weigh, and all take theirs in the same step.
    Raises:
        ValueError: this optimizer asks the device in its step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        optimizer: Optimizer,
        *,
        gather: Callable[[Any], Sequence[Any]] | None = None,
    ) -> None:
        if not optimizer.asks_nothing:
            raise ValueError(
                "a step can be captured with an AdamW of float32 parameters on a GPU, got another optimizer"
            )
        self._cp = cupy()
        self._step = step
        self._optimizer = optimizer
        self._gather = gather
        self._stream = self._cp.cuda.Stream()  # waits for the default stream, and the default stream for it
        self._shapes: dict[Any, _Shape] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Train one step, and return what `step` returned for these inputs; it holds until the next call.

        Collective with `gather`.

        Args:
            inputs: arrays of the host or of the GPU.
        Raises:
            TypeError: an input is no array.
            RuntimeError: the step does something that cannot be captured: says what, and where.
            MemoryError: the GPU has no room for what the step keeps.
        """
        for x in inputs:
            if isinstance(x, Tensor) or not hasattr(x, "dtype"):
                raise TypeError(f"the inputs of a captured step are arrays, got {_kind(x)}")
        key: Any = tuple([(x.shape, x.dtype.str) for x in inputs]), self._optimizer.trained()
        if self._gather is not None:
            key = key, tuple(self._gather(key))
        shape = self._shapes.get(key)
        with self._stream:
            if shape is None:
                shape = self._shapes[key] = _Shape(self._cp, inputs)
            shape.feed(inputs)
            if shape.num_calls < NUM_WARMUP_CALLS:
                with self._cp.cuda.using_allocator(shape.pool.malloc):
                    result = self._step(*shape.inputs)
                shape.num_calls += 1  # of calls that went well: nothing is compiled in a capture
                return result
            self._optimizer.finish()  # what a step that is no graph has begun, and its next forward would wait for
            if shape.graph is None:
                self._capture(shape)
            self._optimizer.advance()
            shape.graph.launch(self._stream)
            return shape.result

    @property
    def num_launches(self) -> int:
        """How many kernels, copies and fills the newest graph launches.

        It is 0 before there is one.
        """
        graphs = [shape.graph for shape in self._shapes.values() if shape.graph is not None]
        return _num_nodes(graphs[-1]) if graphs else 0

    @property
    def pool_bytes(self) -> int:
        """Memory that the graphs hold.

        Parameters, gradients and the optimizer's state come on top.
        """
        return sum(shape.pool.total_bytes() for shape in self._shapes.values())

    def clear(self) -> None:
        """Drop all graphs, and give their memory back.

        Results of earlier calls become invalid.
        """
        self._stream.synchronize()
        pools = [shape.pool for shape in self._shapes.values()]
        self._shapes.clear()
        for pool in pools:
            pool.free_all_blocks()

    def _capture(self, shape: _Shape) -> None:
        """Record one step of this shape without running it."""
        if current_hook() is not None:
            raise RuntimeError("a step cannot be captured while profile() or detect_anomaly() looks at its ops")
        self._optimizer.is_captured = True
        try:
            with self._cp.cuda.using_allocator(shape.pool.malloc):
                self._stream.begin_capture()
                try:
                    with capturing(Capture.ALONE if self._gather is None else Capture.TOGETHER):
                        shape.result = self._step(*shape.inputs)
                    shape.graph = self._stream.end_capture()
                except BaseException as error:
                    self._abandon()
                    if isinstance(error, MemoryError) or not isinstance(error, Exception):
                        raise
                    raise RuntimeError(
                        f"this step cannot be captured in a CUDA graph: {_what_failed(error, self._step)}"
                    ) from error
        finally:
            self._optimizer.is_captured = False

    def _abandon(self) -> None:
        """End a capture that failed, so that the stream computes again.

        It stays the same stream, because memory in which libraries scribble, earlier graphs' too, goes by streams.
        """
        with contextlib.suppress(Exception):  # it says again that the capture failed
            self._stream.end_capture()


class _Shape:
    """What belongs to inputs of one shape."""

    def __init__(self, cp: Any, inputs: tuple[Array, ...]) -> None:
        self.inputs = [cp.empty(x.shape, x.dtype) for x in inputs]
        self.pool = cp.cuda.MemoryPool()
        self.num_calls = 0
        self.graph: Any = None
        self.result: Any = None

    def feed(self, inputs: tuple[Any, ...]) -> None:
        """Copy inputs to where the graph reads them."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            if xp_of(given) is xp_of(mine):
                mine[...] = given
            else:
                mine.set(given, stream=cupy().cuda.get_current_stream())


def _what_failed(error: BaseException, step: Callable[..., Any]) -> str:
    """Return an error and where it came from: the step's own line, and the innermost one that is not CuPy's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not re.search(r"\bcupy(_backends)?/", f.filename)]
    own_file = getattr(getattr(step, "__code__", None), "co_filename", None)
    own = [f for f in frames if f.filename == own_file]
    places = [own[-1], frames[-1]] if own and own[-1] is not frames[-1] else frames[-1:]
    return f"{', which calls '.join(map(_place, places))} ({type(error).__name__}: {error})"


def _kind(x: object) -> str:
    name = type(x).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _place(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {line}"


def _num_nodes(graph: Any) -> int:
    """Return how many nodes a captured graph has."""
    count = ctypes.c_size_t()
    status = cuda_library("cudart").cudaGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(count))
    return count.value if status == 0 else 0
