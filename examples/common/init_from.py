"""Weights to begin with: a run's, one of its checkpoints', or GPT-2's files; in any layout, without any optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed.checkpoint.files import MANIFEST, Manifest, complete, read_manifest, read_tensors
from minigrad.backend import xp_of
from minigrad.models import GPTConfig, gpt2
from minigrad.parameter import Parameter

SIZES = ("layers", "heads", "width", "context", "vocab")  # as the settings call them


def sizes_of(folder: str) -> dict[str, int]:
    """Return the sizes of the model in a folder, by the fields of the settings.

    Raises:
        ValueError, CheckpointError, OSError: the folder holds no GPT.
    """
    where = Path(folder)
    if (where / gpt2.CONFIG).is_file():
        config = gpt2.config_of(where)
        values = (config.num_layers, config.num_heads, config.width, config.context, config.vocab_size)
        return dict(zip(SIZES, values, strict=True))
    checkpoint, manifest = _newest(folder)
    settings = manifest.state.get("settings", {})
    sizes = {name: settings.get(name) for name in SIZES}
    if not all(type(size) is int for size in sizes.values()):
        raise ValueError(f"--init-from must be of a GPT, and {checkpoint} does not say its {', '.join(SIZES)}")
    return sizes


def load_weights(params: Sequence[Parameter], config: GPTConfig, folder: str) -> None:
    """Copy weights into parameters of a GPT of these sizes.

    All or some of them; nothing is loaded where one does not fit.

    Raises:
        ValueError, CheckpointError, OSError: the folder holds no such model.
    """
    if (Path(folder) / gpt2.CONFIG).is_file():
        gpt2.load(params, config, folder)
        return
    checkpoint, manifest = _newest(folder)
    for p in params:
        stored = manifest.tensors.get(f"parameter/{p.name}")
        if stored is None or tuple(stored.shape) != p.shape:
            found = "no such weight" if stored is None else f"shape {tuple(stored.shape)}"
            raise ValueError(f"--init-from {folder} must fit: {p.name} is {p.shape}, and there it has {found}")
    values = read_tensors(checkpoint, manifest, [f"parameter/{p.name}" for p in params])
    for p in params:
        p.data = xp_of(p.data).asarray(values[f"parameter/{p.name}"])


def _newest(folder: str) -> tuple[Path, Manifest]:
    where = Path(folder)
    checkpoint = where if (where / MANIFEST).is_file() else next(iter(complete(where / "checkpoints")), None)
    if checkpoint is None:
        raise ValueError(f"--init-from must be a run, a checkpoint or GPT-2's files, got {folder}")
    return checkpoint, read_manifest(checkpoint)
