"""The loop of a run that goes on when ranks die.

    for attempt in recovering(comm, build, num_steps=300):
        with attempt as training:                   # what `build(comm)` made for the ranks that there are
            x, y = training.data.next()
            training.optimizer.zero_grad()
            loss = ...                              # forward, backward, reductions, clipping
            attempt.commit()                        # all ranks have come this far, or the step is done again
        log(attempt.step, loss)

Parameters change only after all ranks agreed that everything a step needs of others is done: `commit` asks, and then
lets the optimizer step, which needs nobody. So a death leaves every living rank at the beginning of the same step, or
at its end. Each living rank votes once an attempt, whatever happens to it, which keeps the votes matched.

After a death the ranks heal their world, `build` makes everything anew for it, and the state comes from whoever has it,
see `sources.py`. Before they heal, they leave what they have for a job that comes after theirs, see `rescue.py`.

State that one rank alone has (a stage without a replica, a shard of the optimizer's, what a compression keeps) dies
with it. A buddy's copy has it, so all go back to that. What a compression keeps is of one layout: others begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

from distributed.comm.communicator import Communicator
from distributed.comm.failure import Heal, RankFailure
from distributed.recovery.loop import Loop
from distributed.recovery.state import Training

T = TypeVar("T", bound=Training)

UNHEALED = "a rank that dies ends this run: `python -m distributed.recovery -n RANKS SCRIPT` starts one that heals"


class Attempt(Generic[T]):
    """One try at a step; a context, whose `as` is the training. An attempt that meets a death ends without an error.

    Attributes:
        step: from 0.
        comm: all ranks that train; spares are not among them.
        training: what `build` made for them.
        recovery: what went before this attempt, if that was a recovery.
        committed: whether the step is done.
    """

    def __init__(self, loop: Loop[T]) -> None:
        assert loop.training is not None
        assert loop.comm is not None
        self.step = loop.step
        self.training = loop.training
        self.comm = loop.comm
        self.recovery = loop.new_recovery()
        self.committed = False
        self._loop = loop
        self._voted = False

    def commit(self, *, take: bool = True) -> None:
        """Agree that the step is done everywhere, and let the optimizer step. Collective.

        Args:
            take: False leaves the parameters as they are, say because the gradients are not finite; the same on every
                rank.
        Raises:
            RankFailure: it is not, and will be done again.
        """
        if self._voted:
            raise RuntimeError(f"step {self.step} was committed already")
        self._loop.before_vote()
        self._voted = True
        if not self._loop.world.vote(True):
            raise RankFailure
        if take:
            with suppress(RankFailure):  # whoever sends new values on has them; the next attempt meets the death
                self.training.optimizer.step()
        self.committed = True
        self._loop.done(self.step + 1)

    def end(self) -> None:
        """Let this be the last attempt, which spares have to be told: after a `break` they would wait. Collective."""
        self._loop.end()

    def __enter__(self) -> T:
        return self.training

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            if not self._voted:
                raise RuntimeError(f"step {self.step} ended without attempt.commit(), which lets the optimizer step")
            return False
        if isinstance(error, TimeoutError):  # a rank hangs, say: the launcher may start the job again
            self._loop.leave_behind()
        if not isinstance(error, RankFailure):
            return False
        if not self._voted:
            self._voted = True
            self._loop.world.vote(False)
        return True  # a committed step is done: the next attempt meets the failure


def recovering(
    comm: Communicator,
    build: Callable[[Communicator], T],
    *,
    num_steps: int,
    heal: Heal = Heal.REPLACE,
    restore: Callable[[T], int] | None = None,
    buddy_every: int = 0,
    num_spares: int = 0,
    usable: Callable[[int], int] | None = None,
    rehearse: Callable[[], object] | None = None,
    say: Callable[[str], object] | None = None,
) -> Iterator[Attempt[T]]:
    """Yield attempts at the steps of a run until all are done, whoever dies. Collective.

    Args:
        comm: all ranks, of a world that survives failures; any other raises what it always does.
        build: makes model, optimizer, data and whatever a step needs, for the ranks of a communicator; called again
            after each failure. What it builds must depend on nothing else.
        num_steps: of the whole run.
        heal: whether the dead are replaced, or the others go on without them, with spares in their places if there are.
        restore: loads a saved state, say from a checkpoint, into a training; returns the number of steps that are done,
            the same on every rank. Called at the beginning, and where nobody living has all of the state.
        buddy_every: steps between two rounds of copies in a buddy's memory; 0 for none.
        num_spares: ranks that wait, the last ones at first, and step in when others die. To them the loop yields
            nothing before they do.
        usable: how many of so many ranks a layout has a place for; those left over wait as spares. All, by default.
        rehearse: called once on each spare, before it waits, say to take a step of a small model by itself: what steps
            load when they are first taken is there then when the others need this one.
        say: called on one rank as soon as a death is seen, with a line that says who died and what follows; and
            at the beginning where the world survives none.
    Raises:
        ValueError: buddy_every or num_spares is negative, or no rank is left that trains, or the optimizer clips by a
            norm of several ranks, which it would ask for in its step.
    """
    loop = Loop(comm, build, heal, restore, buddy_every, num_spares, usable, say)
    if say is not None and comm.rank == 0 and not comm.survives:
        say(UNHEALED)
    loop.begin()
    if loop.comm is None and rehearse is not None:
        rehearse()
    while loop.step < num_steps and not loop.ended:
        if loop.comm is None:
            loop.wait_as_spare()
            continue
        attempt = Attempt(loop)
        yield attempt
        if not attempt.committed:
            loop.recover()
