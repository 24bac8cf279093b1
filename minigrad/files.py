"""Files that are written whole or not at all, whatever is killed in the middle."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose content becomes `path` on leaving.

    What was written is on the disk by then.

        with atomic_write(folder / "weights.bin") as unfinished:
            unfinished.write_bytes(data)

    After an exception, or a kill, `path` is what it was before.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    folder = os.open(path.parent, os.O_RDONLY)  # held, since whoever sees `path` appear may rename its folder
    try:
        mode = _mode_of_a_new_file(unfinished)
        yield unfinished
        unfinished.chmod(mode)  # safetensors makes files that nobody else may read
        flush(unfinished)
        os.replace(unfinished, path)
        _flush(folder)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(folder)


def _mode_of_a_new_file(path: Path) -> int:
    """Ask the file system who may read what: Python cannot read the mask of permissions without setting it."""
    path.unlink(missing_ok=True)  # what a kill left may have another mode
    path.write_bytes(b"")
    mode = path.stat().st_mode
    path.unlink()
    return mode


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # What CIFS and some FUSE say of a folder means that there is no such call, not that it has failed.
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
