"""The command line of the examples: settings from flags, from the run that is resumed, or an error in one line.

A script sets OPENBLAS_NUM_THREADS before its first import, as NumPy reads it once, when it loads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar

from common.settings import RunSettings, check
from distributed.checkpoint.files import MANIFEST, CheckpointError, read_manifest
from distributed.comm.world import launcher_rank, launcher_size, world

S = TypeVar("S", bound=RunSettings)
T = TypeVar("T")

GRACE_SECONDS = 3.0  # more than ranks that start together differ by, on a busy machine
RUNS = Path("runs")
SETTINGS_FILE = "settings.json"
CHECKPOINTS = "checkpoints"


def read_settings(kind: type[S], description: str | None, argv: Sequence[str] | None = None) -> S:
    """Read and check the command line; end the run with one line and exit code 2 if something is wrong with it.

    A run that is resumed has the settings that it was started with, but for those that are given anew.
    """
    given = vars(_parser(kind, description).parse_args(argv))
    where: Path | None = None
    try:
        where, run = find_run(given.get("run"), given.get("resume"))
        saved = read_saved(where, kind) if where is not None else {}
        for f in fields(kind):
            if f.metadata["fixed"] and f.name in saved and given.get(f.name, saved[f.name]) != saved[f.name]:
                raise ValueError(
                    f"{flag_of(f.name)} cannot change when a run is resumed: "
                    f"it was {saved[f.name]}, got {given[f.name]}"
                )
        settings = kind(**(saved | {"run": run} | given))
        check(settings, launcher_size() or world().size)
    except ValueError as error:
        fail(f"{error} (flags that are not given are as in {where})" if where is not None else str(error))
    return settings


def find_run(run: str | None, resume: str | None) -> tuple[Path | None, str | None]:
    """Find what goes on.

    Returns:
        The file with its settings, None for a new run; and the folder of the run, None for one that is still to be
        made.
    Raises:
        ValueError: `resume` names no checkpoint, or `run` holds a run and nothing says that it is to go on.
    """
    if resume == "auto":
        runs = [Path(run)] if run is not None else sorted(RUNS.glob(f"{script_name()}-*"), reverse=True)
        found = next((folder for folder in runs if (folder / SETTINGS_FILE).is_file()), None)
        return (None, run) if found is None else (found / SETTINGS_FILE, str(found))
    if run is not None and (Path(run) / SETTINGS_FILE).is_file():
        raise ValueError(f"--run {run} holds a run: go on with it by --resume auto, or name another folder")
    if resume is None:
        return None, run
    if (Path(resume) / SETTINGS_FILE).is_file():
        raise ValueError(f"--resume {resume} is a run and no checkpoint: --run {resume} --resume auto goes on with it")
    if not (Path(resume) / MANIFEST).is_file():
        raise ValueError(f"--resume must be auto or the folder of a checkpoint, got {resume}")
    return Path(resume) / MANIFEST, run


def read_saved(path: Path, kind: type[RunSettings]) -> dict[str, Any]:
    """Read the settings that a run was started with, but for those that are of one start alone.

    Args:
        path: the settings of a run, or the manifest of a checkpoint of one.
    Raises:
        ValueError: they are missing, torn, of another script, or not of the types that they should be.
    """
    try:
        saved = read_manifest(path.parent).state if path.name == MANIFEST else json.loads(path.read_bytes())
        script, settings = saved["script"], dict(saved["settings"])
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise ValueError(f"the settings of a run cannot be read from {path}: {error}") from error
    if script != script_name():
        raise ValueError(f"{path} is of a run of {script}, not of {script_name()}")
    saved = {f.name: settings[f.name] for f in fields(kind) if f.name in settings and not f.metadata["once"]}
    for f in fields(kind):
        allowed = (str, NoneType) if f.default is None else (type(f.default),)
        if f.name in saved and type(saved[f.name]) not in allowed:
            raise ValueError(f"{path} must say {allowed[0].__name__} for {f.name}, got {saved[f.name]!r}")
    return saved


def to_save(settings: RunSettings) -> dict[str, Any]:
    """Return what `read_saved` reads, as JSON can say it."""
    return {"script": script_name(), "settings": asdict(settings)}


def script_name() -> str:
    """Return the name of the script that runs, without its suffix."""
    return Path(sys.argv[0]).stem


def flag_of(field_name: str) -> str:
    """Return how a field of the settings is written on the command line."""
    return "--" + field_name.replace("_", "-")


def or_fail(read: Callable[[], T]) -> T:
    """Return what `read` reads; end the run with one line if that cannot be had."""
    try:
        return read()
    except (ValueError, ModuleNotFoundError) as error:
        fail(str(error), everywhere=False)


def fail(message: str, *, everywhere: bool = True) -> NoReturn:
    """End the run with one line on stderr and exit code 2.

    Rank 0 speaks for all. A launcher ends a job, unread output included, when its first process fails, so the others
    wait to be ended and leave by themselves only where the launcher lets them.

    Args:
        everywhere: all ranks are known to fail alike. False: a rank that is still there after its wait may be
            the only one that fails (a file that only its host lacks), and says so itself.
    """
    rank = launcher_rank()
    line = f"{Path(sys.argv[0]).name}: {message}"
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
        if not everywhere:
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
    sys.exit(2)


def _parser(kind: type[RunSettings], description: str | None) -> argparse.ArgumentParser:
    """Make a parser that returns only what was given: what was not may come from the run that is resumed."""
    parser = _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}  # by field; a group is what one class adds
    for cls in reversed(kind.__mro__):
        added = [name for name in vars(cls).get("__annotations__", {}) if name not in groups]
        if added:
            title = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
            groups |= dict.fromkeys(added, parser.add_argument_group(title))
    for f in fields(kind):
        group, text = groups[f.name], f.metadata["help"]
        if isinstance(f.default, bool):
            action = "store_true" if f.metadata["once"] else BooleanOptionalAction
            group.add_argument(flag_of(f.name), action=action, help=text)
        else:
            text += "" if f.default is None else f" (default: {f.default})"
            convert = str if f.default is None else type(f.default)
            group.add_argument(flag_of(f.name), type=convert, metavar=f.metadata["metavar"] or "N", help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says things once, though every rank reads the same command line."""

    def print_help(self, file: Any = None) -> None:
        if launcher_rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        fail(message)
