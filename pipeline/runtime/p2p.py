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
from pipeline.schedules.action import Action, Kind, Skips

_LANES = 3  # tags of one receiving stage and micro-batch: activation, gradient, header of the activation
_HEADER = 2
_Key = tuple[int, int | None, ArraySpec]


class PointToPoint:
    """The messages of one rank in a pipeline. Making one is collective.

    Args:
        comm: the ranks of the pipeline; nobody else sends on it.
        rank_of: stage -> rank.
        num_stages, num_microbatches, skips: bound the tags.
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
        skips: Skips = (),
        xp: Any = np,
        recorder: Recorder | None = None,
    ) -> None:
        if _LANES * (num_stages + len(skips)) * num_microbatches > comm.max_tag + 1:
            most = (comm.max_tag + 1) // _LANES
            what, got = (
                ("stages", f"{num_stages}") if not skips else ("(stages + skips)", f"{num_stages} + {len(skips)}")
            )
            raise ValueError(
                f"{what} * micro-batches must be at most {most} on this communicator, got {got} and {num_microbatches}"
            )
        self.comm = comm
        ends = [*((stage, stage + 1) for stage in range(num_stages - 1)), *skips]
        neighbours = [(rank_of(giver), rank_of(taker)) for giver, taker in ends]
        comm.connect(sorted({(a, b) for pair in neighbours for a, b in (pair, pair[::-1]) if a != b}))
        self._rank_of = rank_of
        self._routes: dict[Action, tuple[int, int]] = {}
        self._num_microbatches = num_microbatches
        self._lines = {ends: num_stages + number for number, ends in enumerate(skips)}  # those of neighbours come first
        self._xp = xp
        self._recorder = recorder or Recorder()
        # What a stage receives forward, by where it comes from and by shape and dtype of the micro-batch's x
        self._known: dict[_Key, BundleSpec] = {}
        self._learned: dict[_Key, BundleSpec] = {}
        self._inputs: Sequence[ArraySpec] = ()  # of the micro-batches of this step
        self._outputs: dict[Action, BundleSpec] = {}  # what was sent forward
        self._headers: dict[Action, Work] = {}
        self._posted: dict[Action, tuple[BundleSpec, list[Work]] | None] = {}  # None: its shape is not known yet
        self._sends: dict[Action, list[Work]] = {}

    def begin(self, inputs: Sequence[ArraySpec]) -> None:
        """Begin a step on micro-batches of these shapes and dtypes."""
        self._inputs = inputs
        self._outputs.clear()

    def post(self, receive: Action) -> None:
        """Post a receive as far as its shape is known."""
        spec = self._expected(receive)
        self._posted[receive] = None if spec is None else self._post_data(receive, spec)
        if spec is None and receive.kind is Kind.RECV_F:
            header = np.empty(BUNDLE_COLUMNS, np.int64)
            source, tag = self._route(receive)
            self._headers[receive] = self.comm.irecv(header, source=source, tag=tag + _HEADER)

    def receive(self, receive: Action) -> Bundle:
        """Block until a posted message is there.

        A bundle of gradients is empty where none comes back.
        """
        posted = self._posted.pop(receive)
        with self.comm.waiting_for(lambda: f"{receive} of a pipeline"):
            if posted is None:
                posted = self._post_data(receive, self._told(receive))
            spec, works = posted
            return Bundle(tuple(work.wait() for work in works), spec.returns, spec.is_tuple)

    def send(self, send: Action, bundle: Bundle) -> None:
        """Start sending a bundle.

        The arrays are kept until the message is gone and must not be written to.

        Args:
            send: the action, which says to whom.
            bundle: the arrays.
        """
        dest, tag = self._route(send)
        works = []
        if send.kind is Kind.SEND_F:
            spec = self._outputs[send] = bundle.spec
            key = self._key(send.partner)
            before = self._known.get(key) or self._learned.get(key)
            if before not in (None, spec):
                raise RuntimeError(
                    f"stage {send.stage}: an input {key[-1]} gave {before} before and {spec} now; "
                    "the output's shape and dtype may depend on the input's shape and dtype only"
                )
            if key not in self._known:
                self._learned[key] = spec
                works.append(self.comm.isend(spec.encode(), dest=dest, tag=tag + _HEADER))
        for array in bundle.arrays:
            contiguous = array if array.flags.c_contiguous else array.copy(order="C")
            launch = partial(self.comm.isend, contiguous, dest=dest, tag=tag)
            works.append(self._recorder.watch("send", send, launch, nbytes=contiguous.nbytes))
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
        if self._posted:
            left = list(self._posted)
            raise RuntimeError(f"[rank {self.comm.rank}] at the end of a step these receives are not consumed: {left}")
        for send in list(self._sends):
            self.wait_sent(send)
        self._known.update(self._learned)
        self._learned.clear()
        self._outputs.clear()

    def _expected(self, receive: Action) -> BundleSpec | None:
        if receive.kind is Kind.RECV_F:
            return self._known.get(self._key(receive))
        send = receive.confirms  # what went forward has the shape of what comes back
        assert send is not None
        sent = self._known.get(self._key(send.partner)) or self._outputs.get(send)
        return sent and sent.gradients

    def _told(self, receive: Action) -> BundleSpec:
        """Return the spec of a message that was posted without one: from its header, or known since."""
        if receive in self._headers:
            spec = BundleSpec.decode(self._headers.pop(receive).wait())
            self._learned[self._key(receive)] = spec
            return spec
        expected = self._expected(receive)
        if expected is None:
            raise RuntimeError(f"{receive} waits for the gradient of an output that was never sent")
        return expected

    def _post_data(self, receive: Action, spec: BundleSpec) -> tuple[BundleSpec, list[Work]]:
        source, tag = self._route(receive)
        launch = partial(self.comm.irecv, source=source, tag=tag)
        buffers = [self._xp.empty(part.shape, part.dtype) for part in spec.specs]
        watch = self._recorder.watch
        return spec, [watch("receive", receive, partial(launch, buffer), nbytes=buffer.nbytes) for buffer in buffers]

    def _key(self, receive: Action) -> _Key:
        return receive.stage, receive.other, self._inputs[receive.microbatch]

    def _route(self, action: Action) -> tuple[int, int]:
        """Return a message's other rank, and its tag: a number for line, micro-batch, and which way.

        The line of neighbours is that of the receiving stage; a skip connection has its own.
        """
        if action not in self._routes:
            receive = action if action.kind.receives else action.partner
            line = receive.stage
            if receive.other is not None:
                line = self._lines[min(receive.stage, receive.other), max(receive.stage, receive.other)]
            place = line * self._num_microbatches + receive.microbatch
            lane = int(receive.kind is Kind.RECV_B)
            self._routes[action] = self._rank_of(action.partner.stage), place * _LANES + lane
        return self._routes[action]


def _all_done(works: Sequence[Work]) -> bool:
    return all(work.test() for work in works)
