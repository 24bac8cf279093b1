"""Point to point between stages: what is posted, what is in flight, and how a receiver knows the shape.

What passes between two stages is activations (F, forward) or gradients of them (B, backward), one array or several. A
receive can be posted early only if shapes and dtypes are known. They are learned once for every boundary and shape of
a micro-batch:

    first step with a shape     header (dtype, shape), then the data
    later steps                 the data alone, into a receive that waits for it

Both ends decide by what they knew when the step began, so they always agree: what a step teaches counts from the
next one. A gradient has the shape of the activation that went the other way, so it never has a header; it
travels if and only if the activation is floating point, whatever is frozen; a plain array in a tuple is data.
Several arrays of one bundle share a tag: messages of one tag arrive in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from distributed.comm.communicator import Communicator, Work
from distributed.trace.recorder import Recorder
from pipeline.runtime.boundary import BUNDLE_COLUMNS, ArraySpec, Bundle, BundleSpec
from pipeline.schedules.action import Action, Kind


class PointToPoint:
    """The messages of one rank in a pipeline.

    Args:
        comm: the ranks of the pipeline; nobody else sends on it.
        rank_of: stage -> rank.
        num_stages, num_microbatches: bound the tags.
        xp: the module, numpy or cupy, of the arrays.
        recorder: notes how long messages are under way.
    Raises:
        ValueError: the tags would exceed what the communicator allows.
    """

    def __init__(
        self,
        comm: Communicator,
        rank_of: Callable[[int], int],
        *,
        num_stages: int,
        num_microbatches: int,
        xp: Any = np,
        recorder: Recorder | None = None,
    ) -> None:
        if 3 * num_stages * num_microbatches > comm.max_tag + 1:
            raise ValueError(
                f"stages * micro-batches must be at most {(comm.max_tag + 1) // 3} on this communicator, "
                f"got {num_stages} and {num_microbatches}"
            )
        self.comm = comm
        self._rank_of = rank_of
        self._num_microbatches = num_microbatches
        self._xp = xp
        self._recorder = recorder or Recorder()
        # (receiving stage, shape and dtype of the micro-batch's x) -> what the stage receives
        self._known: dict[tuple[int, ArraySpec], BundleSpec] = {}
        self._learned: dict[tuple[int, ArraySpec], BundleSpec] = {}
        self._inputs: Sequence[ArraySpec] = ()  # of the micro-batches of this step
        self._outputs: dict[tuple[int, int], BundleSpec] = {}  # (stage, micro-batch) -> what it sent forward
        self._headers: dict[Action, Work] = {}
        self._posted: dict[Action, tuple[BundleSpec, list[Work]]] = {}
        self._sends: dict[Action, list[Work]] = {}

    def begin(self, inputs: Sequence[ArraySpec]) -> None:
        """Begin a step on micro-batches of these shapes and dtypes."""
        self._inputs = inputs
        self._outputs.clear()

    def post(self, receive: Action) -> None:
        """Post a receive as far as its shape is known."""
        spec = self._expected(receive)
        if spec is not None:
            self._post_data(receive, spec)
        elif receive.kind is Kind.RECV_F:
            header = np.empty(BUNDLE_COLUMNS, np.int64)
            self._headers[receive] = self.comm.irecv(header, source=self._peer(receive), tag=self._tag(receive, 2))

    def receive(self, receive: Action) -> Bundle:
        """Block until a posted message is there. A bundle of gradients is empty where none comes back."""
        if receive in self._headers:
            with self.comm.waiting_for(f"{receive} of a pipeline"):
                spec = BundleSpec.decode(self._headers.pop(receive).wait())
            self._learned[receive.stage, self._inputs[receive.microbatch]] = spec
            self._post_data(receive, spec)
        elif receive not in self._posted:
            spec_now = self._expected(receive)
            assert spec_now is not None
            self._post_data(receive, spec_now)
        spec, works = self._posted.pop(receive)
        with self.comm.waiting_for(f"{receive} of a pipeline"):
            return Bundle(tuple(work.wait() for work in works), spec.returns, spec.is_tuple)

    def send(self, send: Action, bundle: Bundle) -> None:
        """Start sending; the arrays are kept until the message is gone and must not be written to."""
        works = []
        if send.kind is Kind.SEND_F:
            spec = self._outputs[send.stage, send.microbatch] = bundle.spec
            key = send.stage + 1, self._inputs[send.microbatch]
            before = self._known.get(key) or self._learned.get(key)
            if before not in (None, spec):
                raise RuntimeError(
                    f"stage {send.stage}: an input {key[1]} gave {before} before and {spec} now; "
                    "the output's shape and dtype may depend on the input's shape and dtype only"
                )
            if key not in self._known:
                self._learned[key] = spec
                works.append(self.comm.isend(spec.encode(), dest=self._peer(send), tag=self._tag(send, 2)))
        for array in bundle.arrays:
            contiguous = array if array.flags.c_contiguous else array.copy(order="C")
            launch = partial(self.comm.isend, contiguous, dest=self._peer(send), tag=self._tag(send))
            works.append(self._recorder.watch("send", send, launch))
        # Sends of the same kind that are gone by now let their arrays go.
        self._sends = {a: w for a, w in self._sends.items() if a.kind is not send.kind or not _all_done(w)}
        self._sends[send] = works

    def wait_sent(self, send: Action) -> None:
        """Block until a send is complete, so that its array can go."""
        for work in self._sends.pop(send, ()):
            work.wait()

    def finish(self) -> None:
        """Block until every send of the step is complete.

        Raises:
            RuntimeError: a posted receive was not consumed; it would eat the next step's message.
        """
        left = [*self._headers, *self._posted]
        if left:
            raise RuntimeError(f"[rank {self.comm.rank}] at the end of a step these receives are not consumed: {left}")
        for send in list(self._sends):
            self.wait_sent(send)
        self._known.update(self._learned)
        self._learned.clear()

    def _expected(self, receive: Action) -> BundleSpec | None:
        x = self._inputs[receive.microbatch]
        if receive.kind is Kind.RECV_F:
            return self._known.get((receive.stage, x))
        sent = self._known.get((receive.stage + 1, x)) or self._outputs.get((receive.stage, receive.microbatch))
        return sent and sent.gradients

    def _post_data(self, receive: Action, spec: BundleSpec) -> None:
        launch = partial(self.comm.irecv, source=self._peer(receive), tag=self._tag(receive))
        buffers = [self._xp.empty(part.shape, part.dtype) for part in spec.specs]
        works = [self._recorder.watch("receive", receive, partial(launch, buffer)) for buffer in buffers]
        self._posted[receive] = spec, works

    def _peer(self, action: Action) -> int:
        towards = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
        return self._rank_of(action.stage + towards)

    def _tag(self, action: Action, lane: int | None = None) -> int:
        """Number a message by its receiving stage, micro-batch and lane: 0 activation, 1 gradient, 2 header."""
        step = {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(action.kind, 0)
        if lane is None:
            lane = 0 if action.kind in (Kind.SEND_F, Kind.RECV_F) else 1
        return ((action.stage + step) * self._num_microbatches + action.microbatch) * 3 + lane


def _all_done(works: Sequence[Work]) -> bool:
    return all(work.test() for work in works)
