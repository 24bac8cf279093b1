"""A rank of the job that `aimed_kills.py` starts: it trains the toy, saves, and is killed where a plan says.

The plan is a list of shots, in a folder that all ranks of all starts see; a file there marks a shot that was fired. A
rank that reaches the moment of a shot lets a thread of its own kill it, at once or after some milliseconds that the
seed says: a real SIGKILL, wherever the process is by then.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

STARTED = time.monotonic()

LOOP = {"buddy_every", "heal", "num_spares"}
"""What of a layout is the loop's, and not that of what it builds."""

SPANS = {
    "anywhere": 0.3,  # of a step and those after it
    "forward": 3e-3,
    "hook": 0.0,
    "reduction": 1e-3,
    "vote": 5e-4,
    "optimizer": 0.0,
    "save": 1.5e-2,
    "recovery": 1.5,
    "newcomer": 1.5,
}
"""Moments of a run -> the seconds after their beginning in which a kill comes."""


class Shot(NamedTuple):
    """One kill, or several at once.

    Attributes:
        phase: one of `SPANS`.
        ranks: that die; of newcomers any one, whose number nobody knows yet.
        step: the first in which they may.
    """

    phase: str
    ranks: tuple[int, ...]
    step: int


class Target:
    """What kills this rank where the plan says.

    Args:
        folder: has `plan.json`: the seed and the shots.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seed, shots = json.loads((folder / "plan.json").read_text())
        self._shots = [Shot(phase, tuple(ranks), step) for phase, ranks, step in shots]
        (folder / f"process-{os.getpid()}").touch()

    def reach(self, phase: str, rank: int | None, step: int) -> None:
        """Die, now or soon, if a shot is for this moment."""
        for number, shot in enumerate(self._shots):
            if shot.phase == phase and step >= shot.step and (rank is None or rank in shot.ranks):
                self._fire(number, phase, rank)

    def _fire(self, number: int, phase: str, rank: int | None) -> None:
        mark = f"fired-{number}-{phase}-{rank}"
        with suppress(FileExistsError):
            os.close(os.open(self._folder / mark, os.O_CREAT | os.O_EXCL))
            delay = random.Random(f"{self._seed} {mark}").uniform(0, SPANS[phase])
            if not delay:
                shoot()
            threading.Timer(delay, shoot).start()

    def note_step(self, step: int) -> None:
        (self._folder / "step").write_text(str(step))

    def last_step(self) -> int:
        with suppress(FileNotFoundError, ValueError):
            return int((self._folder / "step").read_text())
        return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def shoot() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(call: Callable[..., None], reach: Callable[[], None], times: int) -> Callable[..., None]:
    """Return a function that reaches a moment before its every so many-th call."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count % times == 0:
            reach()
        call(*args, **kwargs)

    return wrapped


def main(folder: Path, layout: dict[str, Any], num_steps: int) -> None:
    target = Target(folder)
    if "MINIGRAD_NEWCOMER" in os.environ:
        target.reach("newcomer", None, target.last_step())
    from toy_recovery import builder, digest

    from distributed import world
    from distributed.checkpoint import Checkpointer
    from distributed.recovery import Heal, recovering
    from minigrad import Hooks, rng

    comm = world(survive=True, deterministic=True, timeout_seconds=60)
    how = {key: layout.pop(key) for key in LOOP & layout.keys()}
    how["heal"] = Heal(how.get("heal", "replace"))
    pp = layout.get("pp", 1)
    if how["heal"] is not Heal.REPLACE:
        how["usable"] = lambda living: max(1, living // pp * pp)
    build_toy = builder(**layout)

    saving = []

    def build(ranks: Any) -> Any:
        for checkpoints in saving:
            checkpoints.abandon()
        toy = build_toy(ranks)
        toy.checkpoints = Checkpointer(folder / "checkpoints", ranks, toy.model, toy.optimizer, keep_last=2)
        saving[:] = [toy.checkpoints]
        update = toy.optimizer._update  # of some of the parameters
        toy.optimizer._update = deadly(update, lambda: target.reach("optimizer", comm.rank, step), times=3)
        return toy

    def restore(toy: Any) -> int:
        loaded = toy.checkpoints.load()
        if loaded is None:
            return 0
        toy.data.load_state_dict(loaded.state["data"])
        return loaded.step

    step = 0
    parameters = {}
    attempts = recovering(comm, build, num_steps=num_steps, restore=restore, **how)
    for attempt in attempts:
        step, comm = attempt.step, attempt.comm
        if attempt.recovery is not None:
            attempt.training.checkpoints.own_folder()
        if attempt.recovery is not None and comm.rank == 0:
            say(f"healed from {attempt.recovery.source}")

        def reach(phase: str, step: int = step, rank: int = comm.rank) -> None:
            target.reach(phase, rank, step)

        with attempt as toy:
            reach("anywhere")
            reach("forward")
            x, y = toy.data.next()
            toy.optimizer.zero_grad()
            hooks = toy.ddp.hooks(num_samples=len(x)) + Hooks(on_grad_ready=lambda _: reach("hook"))
            with rng.scope(seed=3, step=step, first_sample=toy.ddp.first_sample):
                toy.pipe.step(x, y, hooks=hooks)
            reach("reduction")
            toy.ddp.wait()
            reach("vote")
            attempt.commit()
            if (step + 1) % 5 == 0:
                reach("save")
                toy.checkpoints.save(step + 1, {"data": toy.data.state_dict()})
            parameters = {p.name: p.data.copy() for p in toy.model.parameters()}
        if not attempt.committed:
            reach("recovery")
        elif comm.rank == 0:
            target.note_step(step + 1)
    if step == num_steps - 1:  # not of a rank that had to wait before
        say(json.dumps(digest(parameters)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
