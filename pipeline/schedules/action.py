"""One entry of a schedule: what runs, on which stage, for which micro-batch.

Schedules, checks, the simulator and the executor all speak in these, so an order of work is plain data:
it prints as `2F0`, parses back, and two of them can be compared. Nothing here runs anything.
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

    @property
    def is_compute(self) -> bool:
        """Tell compute from communication."""
        return self in (Kind.F, Kind.B, Kind.W, Kind.BW)


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """Kind, stage and micro-batch; prints as `2F0`, `0BW3`, `1SEND_F2`.

    The stage is the one that acts: `1SEND_F2` and `2RECV_F2` are the two ends of one message.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action back from what it prints as.

        Raises:
            ValueError: the text is not a stage, a kind and a micro-batch.
        """
        match = re.fullmatch(r"([0-9]+)([A-Z_]+)([0-9]+)", text)
        if match is None or match[2] not in Kind.__members__:
            kinds = " ".join(Kind.__members__)
            raise ValueError(f"an action reads stage, kind, micro-batch, as 2F0, with a kind of {kinds}; got {text!r}")
        return cls(Kind[match[2]], int(match[1]), int(match[3]))

    @property
    def parts(self) -> tuple[Action, ...]:
        """What is done once this has run: BW counts as B and W, any other as itself."""
        if self.kind is Kind.BW:
            return B(self.stage, self.microbatch), W(self.stage, self.microbatch)
        return (self,)

    def needs(self, num_stages: int) -> list[Action]:
        """List the parts that must be done before this compute action can run.

            F(s) <- F(s - 1)        B(s), BW(s) <- F(s), B(s + 1)        W(s) <- B(s)

        Raises:
            ValueError: this is communication, which waits for messages and not for actions.
        """
        stage, microbatch = self.stage, self.microbatch
        match self.kind:
            case Kind.F:
                return [F(stage - 1, microbatch)] if stage > 0 else []
            case Kind.B | Kind.BW:
                upstream = [B(stage + 1, microbatch)] if stage + 1 < num_stages else []
                return [F(stage, microbatch), *upstream]
            case Kind.W:
                return [B(stage, microbatch)]
        raise ValueError(f"an order holds compute actions only (F, B, W, BW), got {self}")


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


class ScheduleError(ValueError):
    """Orders that break a rule; `cells` are the places at fault, as (rank, index)."""

    def __init__(self, message: str, cells: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.cells = tuple(cells)
