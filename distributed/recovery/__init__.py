"""A run that goes on when ranks die: `recovering` is the loop, the rest is where state comes from."""

from distributed.comm.failure import Heal, RankFailure
from distributed.recovery.attempts import Attempt, recovering
from distributed.recovery.loop import Recovery

__all__ = ["Attempt", "Heal", "RankFailure", "Recovery", "recovering"]
