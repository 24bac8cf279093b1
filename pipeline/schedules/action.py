"""One entry of a schedule: what runs, on which stage, for which micro-batch; and who sends what to whom.

Schedules, checks, the simulator and the executor all speak in these, so an order of work is plain data:
it prints as `2F0`, parses back, and two of them can be compared. Nothing here runs anything.

What crosses between stages follows from the action alone, and is said here alone. Of three stages, micro-batch 0:

    departures  1F0 -> 1SEND_F0     1B0 -> 1SEND_B0     what takes the results of an action to other stages
    partner     1SEND_F0 <-> 2RECV_F0                   the two ends of one message
    carries     2RECV_F0 -> 1F0                         whose result a message is
    arrivals    1F0 -> 1RECV_F0     1B0 -> 1RECV_B0     what an action waits for
    confirms    1RECV_B0 -> 1SEND_F0                    a gradient comes back only from where the output has arrived

A skip connection takes a stage's output past the next stage to a later one, and its gradient back, in messages that
name both of its ends: 0F0 -> 0SEND_F0@3 <-> 3RECV_F0@0, and 3B0 -> 3SEND_B0@0 <-> 0RECV_B0@3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from pipeline.schedules.words import counted

Placement = Callable[[int, int], int]
"""`rank_of(stage, num_ranks)`: the rank that owns a stage."""

Skips = Sequence[tuple[int, int]]
"""Skip connections: (stage that gives, later stage that takes), each once."""


class Kind(Enum):
    """What an action does, in the letters of arXiv 2401.10241 (zero bubble).

    Attributes:
        sends, receives: whether it is that end of a message.
        is_compute: whether it is no message.
    """

    F = "F"  # forward
    B = "B"  # backward, input half: the gradient that the stage before waits for
    W = "W"  # backward, weight half: no other stage waits for it
    BW = "BW"  # both halves in one
    SEND_F = "SEND_F"  # start sending this stage's output to the next stage
    RECV_F = "RECV_F"  # post the receive of this stage's input
    SEND_B = "SEND_B"  # start sending the gradient of this stage's input to the stage before
    RECV_B = "RECV_B"  # post the receive of the gradient of this stage's output
    PAIR = "F&B"  # a forward and a backward at the same time: see `pair`

    def __init__(self, letters: str) -> None:
        self.sends = letters.startswith("SEND")
        self.receives = letters.startswith("RECV")
        self.is_compute = not (self.sends or self.receives)

    __hash__ = object.__hash__  # a member is equal to itself alone; Enum's own, in Python, is a third of an Action's


class Action(NamedTuple):
    """Kind, stage and micro-batch; prints as `2F0`, `0BW3`, `1SEND_F2`, a pair as `0F4&3BW1`.

    The stage is the one that acts: `1SEND_F2` and `2RECV_F2` are the two ends of one message.

    Attributes:
        beside: of a pair, whose stage and micro-batch are those of its forward: the backward.
        other: of a message of a skip connection: the stage at its other end.
    """

    kind: Kind
    stage: int
    microbatch: int
    beside: Action | None = None
    other: int | None = None

    def __repr__(self) -> str:
        if self.kind is Kind.PAIR:
            return "&".join(map(str, self.singles))
        return f"{self.stage}{self.kind.value}{self.microbatch}" + ("" if self.other is None else f"@{self.other}")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action back from what it prints as.

        Raises:
            ValueError: the text is not a stage, a kind and a micro-batch, nor a forward and a backward with & between.
        """
        if "&" in text:
            forward, _, backward = text.partition("&")
            return pair(cls.parse(forward), cls.parse(backward))
        match = re.fullmatch(r"([0-9]+)([A-Z_]+)([0-9]+)(?:@([0-9]+))?", text)
        if match is None or match[2] not in _BY_LETTERS or (match[4] and Kind[match[2]] not in _PARTNER):
            kinds = " ".join(_BY_LETTERS)
            raise ValueError(f"an action reads stage, kind, micro-batch, as 2F0, with a kind of {kinds}; got {text!r}")
        other = None if match[4] is None else int(match[4])
        return cls(Kind[match[2]], int(match[1]), int(match[3]), other=other)

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
        if self.other is not None:
            return Action(kind, self.other, self.microbatch, other=self.stage)
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
        return self._replace(kind=Kind.SEND_F) if self.kind is Kind.RECV_B else None

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

    def arrivals(self, num_stages: int, skips: Skips = ()) -> tuple[Action, ...]:
        """Return the receives that bring what this waits for from other stages, that of the neighbour first."""
        match self.kind:
            case Kind.PAIR:
                return tuple(receive for single in self.singles for receive in single.arrivals(num_stages, skips))
            case Kind.F:
                return self._messages(Kind.RECV_F, self.stage > 0, _givers(self.stage, skips))
            case Kind.B | Kind.BW:
                return self._messages(Kind.RECV_B, self.stage + 1 < num_stages, _takers(self.stage, skips))
        return ()

    def departures(self, num_stages: int, skips: Skips = ()) -> tuple[Action, ...]:
        """Return the sends that take what this made to other stages, that to the neighbour first."""
        match self.kind:
            case Kind.PAIR:
                return tuple(send for single in self.singles for send in single.departures(num_stages, skips))
            case Kind.F:
                return self._messages(Kind.SEND_F, self.stage + 1 < num_stages, _takers(self.stage, skips))
            case Kind.B | Kind.BW:
                return self._messages(Kind.SEND_B, self.stage > 0, _givers(self.stage, skips))
        return ()

    def _messages(self, kind: Kind, has_neighbour: bool, others: Iterable[int]) -> tuple[Action, ...]:
        to_neighbour = (Action(kind, self.stage, self.microbatch),) if has_neighbour else ()
        return *to_neighbour, *(Action(kind, self.stage, self.microbatch, other=other) for other in others)

    def needs(self, num_stages: int, skips: Skips = ()) -> list[Action]:
        """List the parts that must be done before this compute action can run.

            F(s) <- F(s - 1)        B(s), BW(s) <- F(s), B(s + 1)        W(s) <- B(s)        a pair <- what both need

        Raises:
            ValueError: this is communication, which waits for messages and not for actions.
        """
        if not self.kind.is_compute:
            raise ValueError(f"an order holds compute actions only (F, B, W, BW, F&B), got {self}")
        stage, i = self.stage, self.microbatch
        match self.kind:
            case Kind.F:
                before = [F(stage - 1, i)] if stage > 0 else []
                return [*before, *(F(giver, i) for giver in _givers(stage, skips))]
            case Kind.B | Kind.BW:
                after = [B(stage + 1, i)] if stage + 1 < num_stages else []
                return [F(stage, i), *after, *(B(taker, i) for taker in _takers(stage, skips))]
            case Kind.W:
                return [B(stage, i)]
        return [need for single in self.singles for need in single.needs(num_stages, skips)]


_PARTNER = {  # and the step to its stage
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


_BY_LETTERS = [kind.name for kind in Kind if kind is not Kind.PAIR]


def _givers(stage: int, skips: Skips) -> Sequence[int]:
    return sorted(giver for giver, taker in skips if taker == stage) if skips else ()


def _takers(stage: int, skips: Skips) -> Sequence[int]:
    return sorted(taker for giver, taker in skips if giver == stage) if skips else ()


def check_skips(skips: Skips, num_stages: int) -> None:
    """Refuse skip connections that are none.

    Raises:
        ValueError: one does not go from a stage to a later one, or is there twice.
    """
    for index, (giver, taker) in enumerate(skips):
        if not 0 <= giver < taker < num_stages:
            raise ValueError(
                f"a skip connection goes from a stage to a later one, of {counted(num_stages, 'stage')}, "
                f"got {giver}-{taker}"
            )
        if (giver, taker) in skips[:index]:
            raise ValueError(f"a skip connection is given once, got {giver}-{taker} twice")


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
