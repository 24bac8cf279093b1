"""How ops run here and now: whether they record, and inside which hook. A context variable: threads do not meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from minigrad.backend import Array

if TYPE_CHECKING:
    from minigrad.autodiff.tape import Node


class OpHook(Protocol):
    """Somebody who runs every op, to measure it or to look at it.

    It may also do something after each: see `op_hooks.py`.
    """

    def forward(self, name: str, function: Any, arrays: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Seen]:
        """Run an op's function.

        Args:
            name: of the op.
            function: its author's, which takes arrays and options.
            arrays, kwargs: of this call.
        Returns:
            The output, its vjps, and what to remember on the node.
        """

    def backward(self, node: Node, vjp: Any, g: Array) -> Any:
        """Run `vjp(g)` for a node and return what it gives.

        Args:
            node: whose vjp it is.
            vjp: takes a cotangent.
            g: the cotangent of the node's output.
        """

    def module(self, module: Any) -> AbstractContextManager[None]:
        """Run a module's call inside this."""


class Seen(NamedTuple):
    """What a hook remembers of an op.

    That is the path of the module that called it, and its forward's time.
    """

    path: str
    seconds: float


class Capture(Enum):
    """Whether what runs becomes part of a CUDA graph, and for which ranks."""

    NONE = "none"
    ALONE = "alone"  # other ranks do not know when this one replays it
    TOGETHER = "together"  # all of them replay theirs in the same step


class Mode(NamedTuple):
    """How ops run here and now.

    That is whether they record, inside which hook, whether it is the second time, and whether they are captured.
    """

    recording: bool = True
    hook: OpHook | None = None
    replaying: bool = False
    capture: Capture = Capture.NONE


_PLAIN = Mode()
current_mode: ContextVar[Mode] = ContextVar("mode", default=_PLAIN)


@contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing inside: for evaluation. Works as a decorator too."""
    with _set_mode(current_mode.get()._replace(recording=False)):
        yield


@contextmanager
def enable_grad() -> Iterator[None]:
    """Record inside, even within `no_grad`."""
    with _set_mode(current_mode.get()._replace(recording=True)):
        yield


@contextmanager
def hooked_by(hook: OpHook) -> Iterator[None]:
    """Let `hook` run every op inside, forward and backward.

    The hook outside sees none of them.
    """
    with _set_mode(current_mode.get()._replace(hook=hook)):
        yield


@contextmanager
def replaying() -> Iterator[None]:
    """Run a forward inside that ran before.

    What it has changed must not change again, such as a running mean.
    """
    with _set_mode(current_mode.get()._replace(replaying=True)):
        yield


@contextmanager
def capturing(capture: Capture) -> Iterator[None]:
    """Let those inside know that they are captured."""
    with _set_mode(current_mode.get()._replace(capture=capture)):
        yield


@contextmanager
def _set_mode(mode: Mode) -> Iterator[None]:
    token = current_mode.set(mode)
    try:
        yield
    finally:
        current_mode.reset(token)


def is_recording() -> bool:
    """Return whether ops record here and now."""
    return current_mode.get().recording


def current_hook() -> OpHook | None:
    """Return the hook that ops run in here and now."""
    return current_mode.get().hook


def check_told_again(what: str, *, by_shapes: bool = True) -> None:
    """Refuse to capture what ranks tell each other: a graph would keep it for good.

    Args:
        what: they tell each other.
        by_shapes: whether it follows from the shapes of all ranks' inputs: then it may be captured for all together.
    Raises:
        RuntimeError: a step is being captured, and not so.
    """
    capture = current_mode.get().capture
    if capture is Capture.NONE or (by_shapes and capture is Capture.TOGETHER):
        return
    if not by_shapes:
        raise RuntimeError(f"{what} cannot be part of a captured step, which would keep this step's for good")
    raise RuntimeError(
        f"ranks tell each other {what}: a step of several is captured with "
        "CapturedStep(step, optimizer, gather=comm.gather_objects), so that all of them take the same graph"
    )


def is_replaying() -> bool:
    """Return whether the forward that runs here and now is recomputed."""
    return current_mode.get().replaying
