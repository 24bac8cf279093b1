"""Values on their way: the parameters of a bucket are hidden until what makes them new is over.

`optimizer.step()` need not wait for messages: it defers. The first who reads a hidden parameter, an op of the next
forward as a rule, waits for that parameter's bucket and for no other; a checkpoint, a print, a comparison of replicas
do so too. So nobody ever sees values of before the step.

For the tape they change at the step, and the optimizer notes it there: what was recorded before holds old values, what
comes after can hold none. Noted at their arrival, in the middle of a forward, the change would make each backward look
for it in all that the ops of that forward have kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from distributed.comm.communicator import Communicator
from distributed.trace.recorder import Recorder
from minigrad.parameter import Parameter


class Arrival:
    """The new values of some parameters.

    Args:
        params: these.
        wait: blocks until what they are made of is there; called once.
        update: makes them of it, then; where they are there already, nothing.
    """

    def __init__(
        self, params: Sequence[Parameter], wait: Callable[[], None], update: Callable[[], None] | None = None
    ) -> None:
        self._params = params
        self._wait = wait
        self._update = update
        self._is_over = False
        for p in params:
            p.defer(self.land)

    def land(self) -> None:
        """Block until the values are there, and show them."""
        if self._is_over:
            return
        self._wait()
        self._is_over = True
        for p in self._params:
            p.restore()
        if self._update is not None:
            self._update()


@contextmanager
def waiting_for_values(params: Sequence[Parameter], comm: Communicator, recorder: Recorder) -> Iterator[None]:
    """Say, inside the `with`, that this rank waits for new values of parameters."""
    what = f"parameters {params[0].name} ..."
    with ExitStack() as stack:
        stack.enter_context(recorder.span("wait", what))
        stack.enter_context(comm.waiting_for(what))
        yield
