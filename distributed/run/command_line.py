"""The command line of the examples: settings from flags, from the run that is resumed, or an error in one line.

A script sets OPENBLAS_NUM_THREADS before its first import, as NumPy reads it once, when it loads.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_args, get_type_hints

from distributed.checkpoint.files import MANIFEST, CheckpointError, complete, read_manifest
from distributed.comm.outcome import RUN, job_folder, read_run
from distributed.comm.settings import LaunchError
from distributed.comm.world import exit_together, is_newcomer, launched_by_mpi, launcher_rank, launcher_size, world
from distributed.run.flags import Settings, check, flag_of
from distributed.run.settings import RunSettings
from minigrad.json_files import as_kind, parse_json

S = TypeVar("S", bound=RunSettings)
F = TypeVar("F", bound=Settings)

GRACE_SECONDS = 3.0  # more than ranks that start together differ by, on a busy machine
# What a person can mend without reading the code; everything else keeps its traceback.
EXPECTED = (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError, CheckpointError, LaunchError)
RUNS = Path("runs")
SETTINGS_FILE = "settings.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Saved:
    """What settings.json and every checkpoint say of a run."""

    script: str
    settings: dict[str, Any]


def run_script(main: Callable[[], None]) -> None:
    """Run a script, and end with one line and exit code 2 where it cannot go on.

    That is where its flags are wrong, or where it cannot have what it needs, such as memory or a file. `python -X dev`
    shows where it was instead.
    """
    try:
        main()
    except EXPECTED as error:
        if sys.flags.dev_mode:
            raise
        words = " ".join(str(error).split()) if isinstance(error, MemoryError) else str(error)
        fail(words or "there is not enough memory", everywhere=False)


def read_settings(kind: type[S], description: str | None, argv: Sequence[str] | None = None) -> S:
    """Read and check the command line.

    It ends the run with one line and exit code 2 if something is wrong with that. A run that is resumed has the
    settings that it was started with, but for those that are given anew.

    Args:
        kind: a dataclass of flags, one a field.
        description: for `--help`.
        argv: sys.argv without the program's name by default.
    """
    given = vars(parser(kind, description).parse_args(argv))
    if RUN in os.environ and launched_by_mpi():  # the launcher has started this job again, after it was lost
        given |= {"run": os.environ[RUN], "resume": "auto"}
    # A newcomer has the settings of those that it joins, which do not resume.
    joined = read_run(job_folder()) if is_newcomer() else None
    where: Path | None = None
    try:
        source, run = find_run(joined or given.get("run"), "auto" if joined else given.get("resume"))
        saved = read_saved(source, kind) if source is not None else kind.inherited(given)
        where = source
        for f in fields(kind):
            if f.metadata["fixed"] and f.name in saved and given.get(f.name, saved[f.name]) != saved[f.name]:
                raise ValueError(
                    f"{flag_of(f.name)} cannot change when a run is resumed: "
                    f"it was {saved[f.name]}, got {given[f.name]}"
                )
        settings = kind(**(saved | given | {"run": run}))
        if not is_newcomer():  # whose launcher counts newcomers; those before it have checked the same settings
            check(settings, launcher_size() or world().size)
    except (ValueError, OSError, CheckpointError) as error:
        fail(f"{error} (flags that are not given are as in {where})" if where is not None else str(error))
    return settings


def read_flags(kind: type[F], description: str | None, argv: Sequence[str] | None = None) -> F:
    """Read and check the command line of a script that leaves no run behind it.

    It ends the script with one line and exit code 2 if something is wrong with that.

    Args:
        kind, description, argv: as of `read_settings`.
    """
    settings = kind(**vars(parser(kind, description).parse_args(argv)))
    try:
        if not is_newcomer():
            check(settings, launcher_size() or world().size)
    except ValueError as error:
        fail(str(error))
    return settings


def find_run(run: str | None, resume: str | None) -> tuple[Path | None, str | None]:
    """Find what goes on.

    Args:
        run: what `--run` says, a folder.
        resume: what `--resume` says: `auto`, or a checkpoint's folder.
    Returns:
        The file with its settings, None for a new run; and the folder of the run, None for one that is still to be
        made.
    Raises:
        ValueError: `resume` names no checkpoint, or `run` holds a run and nothing says that it is to go on.
        OSError: a name cannot be one of a file.
    """
    if resume == "auto":
        runs = [Path(run)] if run is not None else sorted(RUNS.glob(f"{script_name()}-*"), reverse=True)
        found = next((folder for folder in runs if _settings_in(folder) is not None), None)
        return (None, run) if found is None else (_settings_in(found), str(found))
    if run is not None and (_settings_in(Path(run)) is not None or (Path(run) / METRICS).exists()):
        raise ValueError(f"--run {run} holds a run: go on with it by --resume auto, or name another folder")
    if resume is None:
        return None, run
    if _settings_in(Path(resume)) is not None:
        raise ValueError(f"--resume {resume} is a run and no checkpoint: --run {resume} --resume auto goes on with it")
    if not (Path(resume) / MANIFEST).is_file():
        raise ValueError(f"--resume must be auto or the folder of a checkpoint, got {resume}")
    return Path(resume) / MANIFEST, run


def _settings_in(run: Path) -> Path | None:
    """Return the file that knows the settings of a run: its own, or where that is gone the newest checkpoint's."""
    if (run / SETTINGS_FILE).is_file():
        return run / SETTINGS_FILE
    return next((checkpoint / MANIFEST for checkpoint in complete(run / CHECKPOINTS)), None)


def read_saved(path: Path, kind: type[RunSettings]) -> dict[str, Any]:
    """Read the settings that a run was started with.

    Those that are of one start alone are left out.

    Args:
        path: the settings of a run, or the manifest of a checkpoint of one.
    Raises:
        ValueError: they are missing, torn, of another script, or not of the types that they should be.
    """
    try:
        if path.name == MANIFEST:
            saved = as_kind(read_manifest(path.parent).state, Saved, path.name)
        else:
            saved = parse_json(path.read_bytes(), Saved, path.name)
        # All of them, since a type is asked for where it is declared. What is missing has its default, and is left out.
        settings = as_kind(saved.settings, kind, path.name) if saved.script == script_name() else None
    except (OSError, ValueError, CheckpointError) as error:
        raise ValueError(f"the settings of a run cannot be read from {path}: {error}") from None
    if settings is None:
        raise ValueError(f"{path} is of a run of {saved.script}, not of {script_name()}")
    known = [f.name for f in fields(kind) if f.name in saved.settings and not f.metadata["once"]]
    return {name: getattr(settings, name) for name in known}


def to_save(settings: RunSettings) -> dict[str, Any]:
    """Return what `read_saved` reads, as JSON can say it."""
    return {"script": script_name(), "settings": asdict(settings)}


def script_name() -> str:
    """Return the name of the script that runs, without its suffix."""
    return Path(sys.argv[0]).stem


def warn(words: str) -> None:
    """Say a line on stderr, in one call: print writes a line's end by a call of its own, so threads mix their lines."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def speak_for_all(words: str, *, everywhere: bool) -> None:
    """Say on stderr why the job ends.

    Rank 0 speaks for all. A launcher ends a job, unread output included, when its first process fails, so the others
    wait to be ended and leave by themselves only where the launcher lets them.

    Args:
        everywhere: all ranks are known to fail alike. False: a rank that is still there after its wait may be
            the only one that fails (a file that only its host lacks), and says so itself.
    """
    rank = launcher_rank()
    if rank == 0:
        warn(words)
    else:
        time.sleep(GRACE_SECONDS)
        if not everywhere:
            warn(f"[rank {rank}] {words}")


def fail(message: str, *, everywhere: bool = True) -> NoReturn:
    """End the run with one line on stderr and exit code 2.

    Args:
        everywhere: as `speak_for_all` has it.
    """
    speak_for_all(f"{Path(sys.argv[0]).name}: {message}", everywhere=everywhere)
    if everywhere:
        exit_together(2)
    sys.exit(2)


def parser(kind: type[Settings], description: str | None) -> argparse.ArgumentParser:
    """Make a parser that returns only what was given: what was not may come from the run that is resumed."""
    parser = _Parser(
        usage="%(prog)s [--FLAG VALUE ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}  # by field; a group is what one class adds
    for cls in reversed(kind.__mro__):
        added = [name for name in vars(cls).get("__annotations__", {}) if name not in groups]
        if added:
            title = (cls.__doc__ or "").partition("\n")[0].rstrip(".").removeprefix("Settings of ")
            title = title[:1].upper() + title[1:]
            groups |= dict.fromkeys(added, parser.add_argument_group(title))
    hints = get_type_hints(kind)
    for f in fields(kind):
        group, text = groups[f.name], f.metadata["help"]
        if isinstance(f.default, bool):
            action = "store_true" if f.metadata["once"] else BooleanOptionalAction
            group.add_argument(flag_of(f.name), action=action, help=text)
        else:
            text += "" if f.default is None else f" (default: {_shown(f.default)})"
            values = [f.default, *f.metadata["words"].values()]
            convert = next((type(value) for value in values if value is not None), _kind_of(hints[f.name]))
            read = _reader(f.name, convert, f.metadata["words"])
            group.add_argument(flag_of(f.name), type=read, metavar=f.metadata["metavar"] or "N", help=text)
    return parser


def _shown(default: Any) -> str:
    """Say a default; a path as it is seen from here, which help does not break into two lines."""
    text = str(default)
    return os.path.relpath(text) if os.path.isabs(text) else text


def _kind_of(hint: Any) -> type:
    """Return what a field holds that may be None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return cast(type, kinds[0] if kinds else hint)


def _reader(field_name: str, kind: type, words: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return what reads a flag's value, and says what it must be where it is not."""

    def read(text: str) -> Any:
        if kind is str and not text:  # a variable of a shell that has no value; as a path it is the folder one is in
            fail(f"{flag_of(field_name)} must not be empty")
        try:
            return words[text] if text in words else kind(text)
        except ValueError:
            what = " or ".join([{int: "an integer", float: "a number"}[kind], *words])
            fail(f"{flag_of(field_name)} must be {what}, got {text!r}")

    return read


class _Parser(argparse.ArgumentParser):
    """Says things once, though every rank reads the same command line."""

    def print_help(self, file: Any = None) -> None:
        if launcher_rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        known = [option.lstrip("-") for action in self._actions for option in action.option_strings]
        given = words.split()[0].partition("=")[0] if unknown else ""
        alike = 0.6 if given.startswith("-") else 0.8  # a value is no flag, unless its dashes were forgotten
        close = difflib.get_close_matches(given.lstrip("-"), known, 1, alike)  # dashes make all flags alike
        fail(message + (f"; is it --{close[0]}?" if close else ""))
