"""One entry of a schedule: what runs, on which stage, for which micro-batch; and who sends what to whom.

Schedules, checks, the simulator and the executor all speak in these, so an order of work is plain data:
it prints as `2F0`, parses back, and two of them can be compared. Nothing here runs anything.

What crosses between stages follows from the action alone, and is said here alone. Of three stages, micro-batch 0:

    departures  1F0 -> 1SEND_F0     1B0 -> 1SEND_B0     what takes the results of an action to other stages
    partner     1SEND_F0 <-> 2RECV_F0                   the two ends of one message
    carries     2RECV_F0 -> 1F0                         whose result a message is
    arrivals    1F0 -> 1RECV_F0     1B0 -> 1RECV_B0     what an action waits for
    confirms    1RECV_B0 -> 1SEND_F0                    a gradient comes back only from where the output has arrived
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

Placement = Callable[[int, int], int]
"""`rank_of(stage, num_ranks)`: the rank that owns a stage."""


class Kind(Enum):
    """What an action does, in the letters of arXiv 2401.10241 (zero bubble)."""

    F = "F"  # forward
    B = "B"  # backward, input half: the gradient that the stage before waits for
    W = "W"  # backward, weight half: no other stage waits for it
    BW = "BW"  # both halves in one
    SEND_F = "SEND_F"  # start sending this stage's output to the next stage
    RECV_F = "RECV_F"  # post the receive of this stage's input
    SEND_B = "SEND_B"  # start sending the gradient of this stage's input to the stage before
    RECV_B = "RECV_B"  # post the receive of the gradient of this stage's output
    PAIR = "F&B"  # a forward and a backward at the same time: see `pair`

    @property
    def is_compute(self) -> bool:
        """Tell compute from communication."""
        return self in (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.PAIR)

    @property
    def sends(self) -> bool:
        """Tell the sending end of a message from all else."""
        return self in (Kind.SEND_F, Kind.SEND_B)

    @property
    def receives(self) -> bool:
        """Tell the receiving end of a message from all else."""
        return self in (Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """Kind, stage and micro-batch; prints as `2F0`, `0BW3`, `1SEND_F2`, a pair as `0F4&3BW1`.

    The stage is the one that acts: `1SEND_F2` and `2RECV_F2` are the two ends of one message.

    Attributes:
        beside: of a pair, whose stage and micro-batch are those of its forward: the backward.
    """

    kind: Kind
    stage: int
    microbatch: int
    beside: Action | None = None

    def __repr__(self) -> str:
        if self.kind is Kind.PAIR:
            return "&".join(map(str, self.singles))
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action back from what it prints as.

        Raises:
            ValueError: the text is not a stage, a kind and a micro-batch, nor a forward and a backward with & between.
        """
        if "&" in text:
            forward, _, backward = text.partition("&")
            return pair(cls.parse(forward), cls.parse(backward))
        match = re.fullmatch(r"([0-9]+)([A-Z_]+)([0-9]+)", text)
        if match is None or match[2] not in Kind.__members__:
            kinds = " ".join(kind.name for kind in Kind if kind is not Kind.PAIR)
            raise ValueError(f"an action reads stage, kind, micro-batch, as 2F0, with a kind of {kinds}; got {text!r}")
        return cls(Kind[match[2]], int(match[1]), int(match[3]))

    @property
    def singles(self) -> tuple[Action, ...]:
        """The actions that run as this one: the two of a pair, any other itself."""
        if self.beside is None:
            return (self,)
        return F(self.stage, self.microbatch), self.beside

    @property
    def parts(self) -> tuple[Action, ...]:
        """What is done once this has run: BW counts as B and W, a pair as F and those, any other as itself."""
        if self.kind is Kind.BW:
            return B(self.stage, self.microbatch), W(self.stage, self.microbatch)
        if self.beside is not None:
            return F(self.stage, self.microbatch), *self.beside.parts
        return (self,)

    @property
    def partner(self) -> Action:
        """The other end of a message: `1SEND_F2` and `2RECV_F2`.

        Raises:
            ValueError: this is no communication.
        """
        if self.kind not in _PARTNER:
            raise ValueError(f"only messages have two ends, got {self}")
        kind, step = _PARTNER[self.kind]
        return Action(kind, self.stage + step, self.microbatch)

    @property
    def carries(self) -> Action:
        """What made the data that a message carries.

        Raises:
            ValueError: this is no communication.
        """
        send = self if self.kind.sends else self.partner
        return Action(Kind.F if send.kind is Kind.SEND_F else Kind.B, send.stage, send.microbatch)

    @property
    def confirms(self) -> Action | None:
        """The send that is complete once this gradient is received; None for any other action."""
        return Action(Kind.SEND_F, self.stage, self.microbatch) if self.kind is Kind.RECV_B else None

    @property
    def before(self) -> tuple[Action, ...]:
        """The parts on its own stage that must be done before this compute action can run."""
        match self.kind:
            case Kind.PAIR:
                return tuple(part for single in self.singles for part in single.before)
            case Kind.B | Kind.BW:
                return (F(self.stage, self.microbatch),)
            case Kind.W:
                return (B(self.stage, self.microbatch),)
        return ()

    def arrivals(self, num_stages: int) -> tuple[Action, ...]:
        """Return the receives that bring what this waits for from other stages."""
        match self.kind:
            case Kind.PAIR:
                return tuple(receive for single in self.singles for receive in single.arrivals(num_stages))
            case Kind.F if self.stage > 0:
                return (Action(Kind.RECV_F, self.stage, self.microbatch),)
            case Kind.B | Kind.BW if self.stage + 1 < num_stages:
                return (Action(Kind.RECV_B, self.stage, self.microbatch),)
        return ()

    def departures(self, num_stages: int) -> tuple[Action, ...]:
        """Return the sends that take what this made to other stages."""
        match self.kind:
            case Kind.PAIR:
                return tuple(send for single in self.singles for send in single.departures(num_stages))
            case Kind.F if self.stage + 1 < num_stages:
                return (Action(Kind.SEND_F, self.stage, self.microbatch),)
            case Kind.B | Kind.BW if self.stage > 0:
                return (Action(Kind.SEND_B, self.stage, self.microbatch),)
        return ()

    def needs(self, num_stages: int) -> list[Action]:
        """List the parts that must be done before this compute action can run.

            F(s) <- F(s - 1)        B(s), BW(s) <- F(s), B(s + 1)        W(s) <- B(s)        a pair <- what both need

        Raises:
            ValueError: this is communication, which waits for messages and not for actions.
        """
        if not self.kind.is_compute:
            raise ValueError(f"an order holds compute actions only (F, B, W, BW, F&B), got {self}")
        return [*self.before, *(arrival.carries for arrival in self.arrivals(num_stages))]


_PARTNER = {  # and the step to its stage
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def F(stage: int, microbatch: int) -> Action:
    """Return the forward of one micro-batch on one stage."""
    return Action(Kind.F, stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    """Return the input half of a backward."""
    return Action(Kind.B, stage, microbatch)


def W(stage: int, microbatch: int) -> Action:
    """Return the weight half of a backward."""
    return Action(Kind.W, stage, microbatch)


def BW(stage: int, microbatch: int) -> Action:
    """Return a full backward."""
    return Action(Kind.BW, stage, microbatch)


def pair(forward: Action, backward: Action) -> Action:
    """Return a forward and a backward that run at the same time, once the inputs of both are there.

    Raises:
        ValueError: they are no F and B or BW, or of one micro-batch, of which the backward waits for the forward.
    """
    if (
        forward.kind is not Kind.F
        or backward.kind not in (Kind.B, Kind.BW)
        or forward.microbatch == backward.microbatch
    ):
        raise ValueError(
            f"a pair is F of one micro-batch and B or BW of another, as 0F4&3BW1; got {forward}&{backward}"
        )
    return Action(Kind.PAIR, forward.stage, forward.microbatch, backward)


class ScheduleError(ValueError):
    """Orders that break a rule; `cells` are the places at fault, as (rank, index)."""

    def __init__(self, message: str, cells: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.cells = tuple(cells)
