"""The kinds of vjp: from the cotangent of an op's output to the contribution of one input, or of all of them.

    Vjp          g -> contribution                  a plain closure
    Joint        g -> (contribution, ...)           where the work for several inputs is shared
    AddingVjp    (g, have) -> contribution + have   adds to what other uses of the input have given
    WeightVjp    (g, out) writes into `out`         the gradient's own memory, in its own dtype
    Replay       () -> a new tape                   in place of all vjps of a recomputed block

What a vjp keeps alive from the forward, its residuals, is what its closure holds: `kept_arrays` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from minigrad.backend import Array, xp_of

if TYPE_CHECKING:
    from minigrad.tensor import Tensor

Vjp = Callable[[Array], Array]


class Joint:
    """One vjp for all inputs of an op, where the work is shared.

    It goes from the cotangent to a gradient for each array argument.

    Args:
        vjp: `g -> (grad, ...)`, one for each positional argument of the op.
    """

    __slots__ = ("positions", "vjp")

    def __init__(self, vjp: Callable[[Array], Sequence[Array | None]]) -> None:
        self.vjp = vjp
        self.positions: tuple[int, ...] = ()  # of the arguments that need a gradient; @op fills it in

    def __call__(self, g: Array) -> list[Array]:
        grads = self.vjp(g)
        return [grads[i] for i in self.positions]  # type: ignore[misc]


def constant(c: Array) -> Vjp:
    """Return the vjp of an edge whose contribution is there already."""
    return lambda _: c


class AddingVjp:
    """The vjp of an input that can also add to what other uses have given.

    It does so in the same pass. So the gradient of what passes a norm by is not read and written once more.

    Args:
        onto: (g, have): return the contribution, plus `have` where that is not None; a new array.
    """

    __slots__ = ("onto",)

    def __init__(self, onto: Callable[[Array, Array | None], Array]) -> None:
        self.onto = onto

    def __call__(self, g: Array) -> Array:
        return self.onto(g, None)

    def adding_to(self, have: Array) -> Vjp:
        """Return the vjp whose result is the sum of its contribution and `have`."""
        return lambda g: self.onto(g, have)


class WeightVjp:
    """The vjp of a weight that can also write straight into the gradient's memory.

    It writes in the gradient's own dtype. So no gradient is copied, and where weights are of half precision theirs are
    summed up in float32.

    Args:
        weight: of the op's arguments the one that this is for; only shape and dtype are kept.
        write: (g, out, add): write the contribution into `out`, or add it to what is there.
    """

    __slots__ = ("dtype", "shape", "write")

    def __init__(self, weight: Array, write: Callable[[Array, Array, bool], None]) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.write = write

    def __call__(self, g: Array) -> Array:
        out: Array = xp_of(g).empty(self.shape, self.dtype)
        self.write(g, out, False)
        return out


class Replay:
    """In place of vjps: run the forward again, and walk the tape that it records.

    See `recomputation.py`.

    Args:
        run: () -> the output, recorded, and the number of the first node that may be its own.
        keeps: arrays that the forward will read again.
    """

    __slots__ = ("keeps", "run")

    def __init__(self, run: Callable[[], tuple[Tensor, int]], keeps: Sequence[Array]) -> None:
        self.run = run
        self.keeps = tuple(keeps)


def kept_arrays(held: Any) -> Iterator[Array]:
    """Yield the arrays that a vjp keeps alive through closures.

    `held` is a vjp, or a container of vjps.
    """
    if isinstance(held, (tuple, list)):
        for item in held:
            yield from kept_arrays(item)
    elif isinstance(held, Joint):
        yield from kept_arrays(held.vjp)
    elif isinstance(held, WeightVjp):
        yield from kept_arrays(held.write)
    elif isinstance(held, AddingVjp):
        yield from kept_arrays(held.onto)
    elif isinstance(held, Replay):
        yield from held.keeps
    elif hasattr(held, "__closure__"):
        for cell in held.__closure__ or ():
            yield from kept_arrays(cell.cell_contents)
    elif hasattr(held, "__array_interface__") or hasattr(held, "__cuda_array_interface__"):
        yield held
