"""The death of a rank as an exception, where the ranks that live want to go on without it.

In a world that survives failures (`world(survive=True)`, `LocalWorld(n, survive=True)`) the first rank that sees a
death revokes the whole family, the world and all that was split off it: every wait of every living rank then raises
`RankFailure` within milliseconds, whoever it waits for. Three calls still work on the world afterwards, as long as each
living rank makes them in the same order:

    world.vote(yes)     True if all ranks live and all say yes, else False: the same on every rank
    world.heal(how)     a new world, of the ranks that live, or of as many as before
    world.abort(words)

Everything else starts anew on the new world: what was split off the old one is of no use any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Heal(Enum):
    """What becomes of a world that has lost ranks."""

    REPLACE = "replace"
    """New ranks take the places of the dead: the same number of ranks, each living one with its old number."""

    SHRINK = "shrink"
    """The ranks that live, in their old order."""

    SPARES = "spares"
    """The same; but some of them had waited for this, and take the places of the dead: see `recovering`."""


class RankFailure(RuntimeError):  # noqa: N818  # what failed is the rank
    """Ranks of this world are dead, so the operation cannot be completed.

    No communicator of that world can complete anything any more.

    Attributes:
        ranks: those that this rank knows of, numbered as in the world; others may be dead too.
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(sorted(ranks))
        which = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "a rank"
        super().__init__(f"{which} of the world is dead: vote, heal, and go on in the new world")
