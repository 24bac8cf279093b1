"""A training run: its flags, its folder, what it prints, saves and draws, and how it goes on.

An application of all three packages, for scripts like those in examples/: nothing else imports it.

    settings = read_settings(RunSettings, "Train my model.")
    run = Run(settings, comm)
    for step in run.steps(model, optimizer, batches):
        ...
        run.log(loss)
    run.end()
"""

from distributed.run.command_line import read_flags, read_settings, run_script
from distributed.run.flags import Bounds, check, flag
from distributed.run.joined_state import JoinedState
from distributed.run.run import Run
from distributed.run.settings import ReplicaSettings, RunSettings

__all__ = [
    "Bounds",
    "JoinedState",
    "ReplicaSettings",
    "Run",
    "RunSettings",
    "check",
    "flag",
    "read_flags",
    "read_settings",
    "run_script",
]
