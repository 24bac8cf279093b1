"""Weights to begin with: a run's, one of its checkpoints', or GPT-2's files; in any layout, without any optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed.checkpoint.files import MANIFEST, complete, read_manifest, read_tensors
from minigrad.backend import xp_of
from minigrad.models import GPTConfig, gpt2
from minigrad.parameter import Parameter


def load_weights(params: Sequence[Parameter], config: GPTConfig, folder: str) -> None:
    """Copy weights into parameters of a GPT, all or some; nothing is loaded where one does not fit.

    Raises:
        ValueError, CheckpointError, OSError: the folder holds no such model.
    """
    where = Path(folder)
    if (where / gpt2.CONFIG).is_file():
        gpt2.load(params, config, where)
        return
    checkpoint = where if (where / MANIFEST).is_file() else next(iter(complete(where / "checkpoints")), None)
    if checkpoint is None:
        raise ValueError(f"--init-from must be a run, a checkpoint or GPT-2's files, got {folder}")
    manifest = read_manifest(checkpoint)
    heads = manifest.state.get("settings", {}).get("heads", config.num_heads)
    if heads != config.num_heads:
        raise ValueError(f"--init-from {folder} has --heads {heads}, got {config.num_heads}")
    for p in params:
        stored = manifest.tensors.get(f"parameter/{p.name}")
        if stored is None or tuple(stored.shape) != p.shape:
            found = "no such weight" if stored is None else f"shape {tuple(stored.shape)}"
            raise ValueError(f"--init-from {folder} must fit: {p.name} is {p.shape}, and there it has {found}")
    values = read_tensors(checkpoint, manifest, [f"parameter/{p.name}" for p in params])
    for p in params:
        p.data = xp_of(p.data).asarray(values[f"parameter/{p.name}"])
