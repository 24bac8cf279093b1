"""How a run goes on from a checkpoint: its position in the data, and which flags are other ones than before."""

from __future__ import annotations

from dataclasses import fields

from distributed.checkpoint.checkpointer import Checkpoint
from distributed.protocols import HasState
from distributed.run.command_line import Saved
from distributed.run.flags import flag_of
from distributed.run.settings import RunSettings
from minigrad.json_files import as_kind

FORGETS = "what gradients have not said yet, and local steps' momentum, are of another layout: they begin anew"


def warnings_of(loaded: Checkpoint) -> list[str]:
    """Say what whoever goes on from a checkpoint should know.

    That is which others were passed over, and what begins anew.
    """
    warnings = [f"passed over {reason}" for reason in loaded.refused]
    if loaded.forgets:
        warnings.append(FORGETS)
    return warnings


def take_state(loaded: Checkpoint, batches: HasState, settings: RunSettings) -> list[str]:
    """Put the data where a checkpoint's run was; return which flags have changed.

    Each comes with its value before and now.

    Args:
        loaded: the checkpoint.
        batches: whose position is set.
        settings: of the run that goes on.
    Raises:
        ValueError: the run is to be shorter than what is done, or the checkpoint is of no such run.
    """
    if loaded.step > settings.steps:
        raise ValueError(f"--steps must be at least the {loaded.step} that are done, got {settings.steps}")
    try:
        before = as_kind(loaded.state, Saved, "its state").settings
        batches.load_state_dict(loaded.state["data"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{loaded.path} is of no such run: {error}") from error
    return [
        f"{flag_of(f.name)} {before.get(f.name)} -> {getattr(settings, f.name)}"
        for f in fields(settings)
        if not f.metadata["once"] and before.get(f.name) != getattr(settings, f.name)
    ]
