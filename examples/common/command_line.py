"""The command line of the examples: settings from flags, from the run that is resumed, or an error in one line.

A script sets OPENBLAS_NUM_THREADS before its first import, as NumPy reads it once, when it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from common.settings import RunSettings, check
from distributed.checkpoint_files import complete
from distributed.world import launcher_rank

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
    script = Path(sys.argv[0]).stem
    try:
        folder = find_run(script, given.get("run"), given.get("resume"))
        saved = read_saved(folder, script, kind) if folder is not None else {}
        for f in fields(kind):
            name = f.name
            if f.metadata["fixed"] and name in saved and name in given and given[name] != saved[name]:
                raise ValueError(
                    f"--{name.replace('_', '-')} cannot change when a run is resumed: "
                    f"it was {saved[name]} in {folder}, got {given[name]}"
                )
        settings = kind(**(saved | {"run": folder and str(folder), "resume": None} | given))
        check(settings, launcher_size())
    except ValueError as error:
        fail(str(error))
    return settings


def find_run(script: str, run: str | None, resume: str | None) -> Path | None:
    """Find the folder of the run that is to go on; None for a new run.

    Raises:
        ValueError: `resume` names no checkpoint, or `run` holds a run and nothing says that it is to go on.
    """
    found: Path | None = None
    if resume == "auto":
        runs = [Path(run)] if run is not None else sorted(RUNS.glob(f"{script}-*"), reverse=True)
        found = next((folder for folder in runs if (folder / SETTINGS_FILE).is_file()), None)
    elif resume is not None:
        if not (Path(resume) / "manifest.json").is_file():
            raise ValueError(f"--resume must be auto or the folder of a checkpoint, got {resume}")
        found = Path(resume).parent.parent
    goes_on = found is not None and run is not None and found.resolve() == Path(run).resolve()
    if run is not None and not goes_on and complete(Path(run) / CHECKPOINTS):
        raise ValueError(f"--run {run} holds a run: go on with it by --resume auto, or name another folder")
    return found


def read_saved(folder: Path, script: str, kind: type[RunSettings]) -> dict[str, Any]:
    """Read the settings that a run was started with.

    Raises:
        ValueError: they are missing, torn, or of another script.
    """
    path = folder / SETTINGS_FILE
    try:
        saved = json.loads(path.read_bytes())
        found, settings = saved["script"], saved["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the settings of a run cannot be read from {path}: {error}") from error
    if found != script:
        raise ValueError(f"{folder} is a run of {found}, not of {script}")
    return {f.name: settings[f.name] for f in fields(kind) if f.name in settings}


def settings_json(settings: RunSettings) -> str:
    """Return what `read_saved` reads."""
    return json.dumps({"script": Path(sys.argv[0]).stem, "settings": asdict(settings)}, indent=2) + "\n"


def launcher_size(environ: Mapping[str, str] = os.environ) -> int:
    """Tell how many ranks the launcher started, before MPI is loaded: 1 without a launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):  # Open MPI; MPICH and Intel MPI; srun
        if name in environ:
            return int(environ[name])
    return 1


def or_fail(read: Callable[[], T]) -> T:
    """Return what `read` reads; end the run with one line if it raises ValueError."""
    try:
        return read()
    except ValueError as error:
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
    for f in fields(kind):
        name, text = f"--{f.name.replace('_', '-')}", f.metadata["help"]
        if isinstance(f.default, bool):
            parser.add_argument(name, action="store_true", help=text)
        else:
            text += "" if f.default is None else f" (default: {f.default})"
            convert = str if f.default is None else type(f.default)
            parser.add_argument(name, type=convert, metavar=f.metadata["metavar"] or "N", help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says things once, though every rank reads the same command line."""

    def print_help(self, file: Any = None) -> None:
        if launcher_rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        fail(message)
