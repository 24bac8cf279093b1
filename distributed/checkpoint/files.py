"""The files of a checkpoint: how they come into being all at once, and what makes one unreadable.

    folder/
        latest                      the name of the last good one: step-00000300
        step-00000200/
        step-00000300/
            manifest.json           step, state, and of every tensor who saved it, or which slices of it, its shape and
                                    dtype; its checksum
            rank-0.safetensors      what rank 0 saved, and a checksum of each tensor
            rank-1.safetensors
        saving-.../                 one that is being written, or what a kill left of it

A checkpoint begins to exist when its folder is renamed: before that nobody looks at it, after that it is complete. It
ends in the same way. Where one of its step is there already, it is called `step-00000300-...` until that one has gone.

Nothing here knows of communicators. Threads make no MPI calls: the one that commits sees in the folder when the parts
of all ranks are there.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from distributed.checkpoint.plan import Count, Slice, Stored
from distributed.comm.transfer import as_bytes
from distributed.comm.work import Array
from minigrad.files import atomic_write, flush
from minigrad.json_files import as_kind, parse_json

FORMAT = "minigrad checkpoint"
MANIFEST = "manifest.json"
HEAD = {"format", "version", "crc32"}  # what a manifest says of itself; its checksum is of everything else
# What safetensors can keep of NumPy's, each in the order of bytes of this machine.
DTYPES = {"bool", "bfloat16", "complex64", "float16", "float32", "float64"} | {
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
VERSION = 2  # of the layout above; a reader refuses what is newer than itself. 1 knew no slices
_PREFIX = "step-"
UNFINISHED = "saving-"  # begins the names of folders that are no checkpoints: not yet, or not any more
POLL_SECONDS = 0.01
SEEN_SECONDS = 120.0  # after which what another host has written must be seen; NFS may take a minute


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or must not be read."""


@dataclass(frozen=True)
class Manifest:
    """What is saved beside the values.

    Attributes:
        step: number of steps that were done.
        num_updates: those of the optimizer among them.
        save: made up anew by each save, so that parts of two never mix.
        state: the caller's.
    """

    step: Count
    num_updates: Count
    save: str
    tensors: dict[str, Stored]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Version:
    version: int


@dataclass(frozen=True)
class _Checksum:
    crc32: int


class Saving:
    """One rank's share of a save under way, on a thread.

    Rank 0's also waits for the others' and commits.

    Args:
        folder: of all checkpoints.
        arrays: of this rank by name, left alone until this is over.
        keep_last: how many checkpoints stay.
    """

    def __init__(
        self, folder: Path, rank: int, arrays: Mapping[str, Array], manifest: Manifest, *, keep_last: int
    ) -> None:
        self._folder = folder
        self._unfinished = folder / f"{UNFINISHED}{manifest.step:08d}-{manifest.save}"
        self._rank = rank
        self._arrays = arrays
        self._manifest = manifest
        self._keep_last = keep_last
        self._part_done = threading.Event()
        self._cancelled = threading.Event()
        self._all_seen_by = float("inf")
        self._error: str | None = None
        # A daemon: where the other ranks are gone, nobody has to wait for a part that never comes.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_for_part(self) -> str | None:
        """Block until this rank's own part is written; return what went wrong."""
        self._part_done.wait()
        return self._error

    def wait(self) -> str | None:
        """Block until all is over; return what went wrong.

        For when the parts of all ranks are known to be written.
        """
        self._all_seen_by = time.monotonic() + SEEN_SECONDS
        self._thread.join()
        return self._error

    def cancel(self) -> None:
        """Give up, and leave nothing behind. For when no rank writes any more."""
        self._cancelled.set()
        self._thread.join()
        if self._rank == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _run(self) -> None:
        try:
            if self._rank == 0:
                remove_leftovers(self._folder, but=self._unfinished)
            if self._arrays:
                self._write_part()
            self._part_done.set()
            if self._rank == 0 and self._see_all_parts():
                commit(self._unfinished, self._manifest, keep_last=self._keep_last)
        except BaseException as error:  # nobody is above a thread: what is not noted here would count as done
            what = f"{type(error).__name__}: {error}"
            self._error = f"the checkpoint of step {self._manifest.step} could not be written: {what}"
        finally:
            self._part_done.set()

    def _write_part(self) -> None:
        self._unfinished.mkdir(exist_ok=True)  # not its parents: a folder that somebody removed stays so
        checksums = {name: _checksum(array) for name, array in self._arrays.items()}
        metadata = {"save": self._manifest.save, "crc32": json.dumps(checksums)}
        with atomic_write(_part(self._unfinished, self._rank)) as path:
            save_file(dict(self._arrays), path, metadata)

    def _see_all_parts(self) -> bool:
        """Block until the parts of all ranks are in the folder; return False where they will never be."""
        ranks = sorted({part.rank for stored in self._manifest.tensors.values() for part in stored.parts})
        parts = [_part(self._unfinished, rank) for rank in ranks]
        while missing := [part.name for part in parts if not part.exists()]:
            if self._arrays and _part(self._unfinished, self._rank).name in missing:
                raise CheckpointError(f"somebody has removed what was written in {self._unfinished}")
            if self._cancelled.wait(POLL_SECONDS):
                return False
            if time.monotonic() > self._all_seen_by:
                raise CheckpointError(f"{', '.join(missing)} was written, but is not seen in {self._unfinished}")
        return True


def commit(unfinished: Path, manifest: Manifest, *, keep_last: int) -> None:
    """Make a checkpoint of a folder that holds all parts.

    Those that it makes dispensable are removed. A run that went back to an older checkpoint replaces what came after
    it: steps are in the order of their saving.

    Args:
        unfinished: the folder.
        manifest: written into it.
        keep_last: how many checkpoints stay.
    """
    content = asdict(manifest)
    head = {"format": FORMAT, "version": VERSION, "crc32": _checksum_of_json(content)}
    with atomic_write(unfinished / MANIFEST) as path:
        path.write_text(json.dumps(head | content, indent=1, allow_nan=False))
    folder = unfinished.parent
    checkpoint = folder / f"{_PREFIX}{manifest.step:08d}"
    # One of this step may be there, from before the run went back. It is needed until there is the new one.
    taken = checkpoint.exists()
    new = folder / f"{checkpoint.name}-{manifest.save}" if taken else checkpoint
    _rename_to_latest(unfinished, new)
    older = [path for path in complete(folder) if _step_of(path) < manifest.step]
    for path in complete(folder):
        if path not in [new, *older[: keep_last - 1]]:
            os.rename(path, folder / f"{UNFINISHED}{manifest.save}-{path.name}")  # a kill may leave half of one
    if taken:
        _rename_to_latest(new, checkpoint)
    remove_leftovers(folder)


def _rename_to_latest(path: Path, checkpoint: Path) -> None:
    os.rename(path, checkpoint)
    flush(checkpoint.parent)
    with atomic_write(checkpoint.parent / "latest") as pointer:
        pointer.write_text(checkpoint.name + "\n")


def remove_leftovers(folder: Path, *, but: Path | None = None) -> None:
    """Remove what is no checkpoint: not any more, or what a kill left of one."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        if leftover != but:
            shutil.rmtree(leftover, ignore_errors=True)  # what somebody still reads goes the next time


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder.

    The one that `latest` names first, then the others, newest first.
    """
    try:
        latest = (folder / "latest").read_text(errors="replace").strip()
    except OSError:
        latest = ""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.is_dir() and _step_of(path) >= 0]
    return sorted(paths, key=lambda path: (path.name == latest, _step_of(path), path.name), reverse=True)


def read_manifest(checkpoint: Path) -> Manifest:
    """Read what a checkpoint holds.

    Raises:
        CheckpointError: it is no checkpoint, torn, changed, or of a newer version.
        OSError: the disk fails, which says nothing of the checkpoint.
    """
    path = checkpoint / MANIFEST
    try:
        content = parse_json(path.read_bytes(), object, path.name)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{path.name} is not of a {FORMAT}")
        version = as_kind(content, _Version, path.name).version
        if version > VERSION:
            raise CheckpointError(
                f"it was saved by a newer version of this program: its format is {version}, "
                f"the newest known here is {VERSION}"
            )
        checksum = as_kind(content, _Checksum, path.name).crc32
        if checksum != _checksum_of_json({name: content[name] for name in content.keys() - HEAD}):
            raise CheckpointError(f"{path.name} has changed since it was saved")
        return as_kind(content, Manifest, path.name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointError(f"there is no {path.name} in it") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def read_tensors(
    checkpoint: Path,
    manifest: Manifest,
    names: Sequence[str],
    slices: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Array]:
    """Read some tensors, each checked against its shape, dtype and checksum.

    Args:
        slices: of those that are not wanted whole, the first element in C order and one past the last.
    Returns:
        By name; slices are 1-D.
    Raises:
        CheckpointError: a file is missing, torn, changed, or of another save; or slices are not all of their tensor.
        OSError: the disk fails, which says nothing of the checkpoint.
    """
    slices = slices or {}
    by_rank: dict[int, list[tuple[str, Slice]]] = {}
    for name in names:
        stored = manifest.tensors[name]
        if not stored.is_complete():
            raise CheckpointError(f"the slices of {name!r} are not all of it")
        start, stop = slices.get(name, (0, stored.size))
        for part in stored.parts:
            if (part.start < stop and start < part.stop) or not stored.size:
                by_rank.setdefault(part.rank, []).append((name, part))
    values: dict[str, Array] = {}
    for rank, wanted in by_rank.items():
        for (name, part), array in _read_parts(checkpoint, manifest, rank, wanted):
            start, stop = slices.get(name, (0, manifest.tensors[name].size))
            if (part.start, part.stop) == (start, stop):
                values[name] = array
                continue
            target = values.setdefault(name, np.empty(stop - start, array.dtype))
            first, last = max(start, part.start), min(stop, part.stop)
            target[first - start : last - start] = array.reshape(-1)[first - part.start : last - part.start]
    return {
        name: array if name in slices else array.reshape(manifest.tensors[name].shape) for name, array in values.items()
    }


def _read_parts(
    checkpoint: Path, manifest: Manifest, rank: int, wanted: Sequence[tuple[str, Slice]]
) -> Iterator[tuple[tuple[str, Slice], Array]]:
    """Read parts of tensors from the file of one rank, and check them."""
    path = _part(checkpoint, rank)
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("save") != manifest.save:
                raise CheckpointError(f"{path.name} is of another checkpoint")
            checksums = parse_json(metadata.get("crc32", ""), dict[str, int], "its list of checksums")
            for name, part in wanted:
                stored = manifest.tensors[name]
                key = stored.key(name, part)
                array = file.get_tensor(key)
                shape = (part.stop - part.start,) if stored.slices else stored.shape
                if (array.shape, str(array.dtype), _checksum(array)) != (shape, stored.dtype, checksums[key]):
                    raise CheckpointError(f"{path.name} has changed since it was saved: {key!r} is not what it was")
                yield (name, part), array
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error


def not_finite(values: Mapping[str, Array]) -> str | None:
    """Return the name of a tensor with an infinity or a nan, None where there is none."""
    return next((name for name, array in values.items() if not np.isfinite(array).all()), None)


def _part(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rank-{rank}.safetensors"


def _checksum(array: Array) -> int:
    return zlib.crc32(as_bytes(array).data)


def _checksum_of_json(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())  # of these bytes, in every version


def _step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name, -1 where there is none."""
    digits = checkpoint.name.removeprefix(_PREFIX).partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else -1
