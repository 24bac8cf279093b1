"""How the communicators of a world behave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """What started these ranks cannot give them the world that they ask for."""


@dataclass(frozen=True)
class Settings:
    """How the communicators of a world behave; the same on every rank.

    Attributes:
        synchronous_sends: a send completes only once its receive is posted (Issend): shows who relies on buffering.
        deterministic: reductions sum in rank order, whatever MPI does. Few ranks on several hosts do so in any case.
        timeout_seconds: the longest single wait.
        progress_thread: a thread moves unfinished operations, so that nobody has to call progress().
        check_collectives: ranks compare each collective before it starts.
        survive: the death of a rank raises RankFailure on the others, and ends the job no more.
        hosts: the host of each world rank; found out by default. Lets one host pass for several in a test.
    """

    synchronous_sends: bool = False
    deterministic: bool = False
    timeout_seconds: float = 600.0
    progress_thread: bool = False
    check_collectives: bool = False
    survive: bool = False
    hosts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_timeout(self.timeout_seconds)


def check_timeout(seconds: float) -> None:
    """Raise ValueError where no wait could be so long."""
    if not seconds > 0:
        raise ValueError(f"timeout_seconds must be above 0, got {seconds}")
