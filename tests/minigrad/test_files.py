"""Files that are written whole: what is on the disk, and in which order, whatever happens in the middle."""

import os
import stat
from pathlib import Path

import pytest

from minigrad.files import atomic_write, flush


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_becomes_the_file(tmp_path):
    target = tmp_path / "weights.bin"
    for content in (b"first", b"second, and longer"):
        with atomic_write(target) as unfinished:
            unfinished.write_bytes(content)
            assert unfinished.parent == tmp_path  # a rename from another file system would be a copy
        assert target.read_bytes() == content
        assert names(tmp_path) == ["weights.bin"]


def test_others_may_read_it_whoever_wrote_it(tmp_path):
    (tmp_path / "plain").write_text("")
    with atomic_write(tmp_path / "target") as unfinished:
        unfinished.write_bytes(b"weights")
        unfinished.chmod(0o600)
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_until_the_end_the_file_is_what_it_was(tmp_path):
    target = tmp_path / "weights.bin"
    target.write_bytes(b"old")
    with atomic_write(target) as unfinished:
        unfinished.write_bytes(b"new")
        assert target.read_bytes() == b"old"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_exception_the_file_is_what_it_was(tmp_path, error):
    target = tmp_path / "weights.bin"
    target.write_bytes(b"old")

    def writes_half():
        with atomic_write(target) as unfinished:
            unfinished.write_bytes(b"half of the n")
            raise error

    with pytest.raises(error):
        writes_half()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["weights.bin"]


def test_what_a_kill_left_is_overwritten(tmp_path):
    (tmp_path / "weights.bin.unfinished").write_bytes(b"half, and longer than the new one")
    with atomic_write(tmp_path / "weights.bin") as unfinished:
        unfinished.write_bytes(b"new")
    assert (tmp_path / "weights.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["weights.bin"]


def test_a_body_that_writes_nothing_is_an_error(tmp_path):
    target = tmp_path / "weights.bin"
    target.write_bytes(b"old")
    with pytest.raises(FileNotFoundError, match=r"weights\.bin\.unfinished"), atomic_write(target):
        pass
    assert target.read_bytes() == b"old"


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), atomic_write(tmp_path / "nowhere" / "weights.bin"):
        pytest.fail("no work before the error")


def test_content_is_on_the_disk_before_its_name_and_then_the_name(tmp_path, monkeypatch):
    # Renamed first, a file can be empty after a power cut (ext4's delayed allocation).
    events = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_replace(*paths):
        events.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with atomic_write(tmp_path / "weights.bin") as unfinished:
        unfinished.write_bytes(b"new")
    assert events == ["file", "rename", "folder"]


def test_a_folder_may_be_renamed_as_soon_as_the_file_appears(tmp_path, monkeypatch):
    # Rank 0 commits a checkpoint as soon as it sees the last part; the rank that wrote it is still in `whole`.
    replace = os.replace

    def replace_and_move_away(*paths):
        replace(*paths)
        (tmp_path / "saving").rename(tmp_path / "step-1")

    monkeypatch.setattr(os, "replace", replace_and_move_away)
    (tmp_path / "saving").mkdir()
    with atomic_write(tmp_path / "saving" / "rank-1.bin") as unfinished:
        unfinished.write_bytes(b"part")
    assert (tmp_path / "step-1" / "rank-1.bin").read_bytes() == b"part"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux lists the open files of a process")
def test_no_descriptor_stays_open(tmp_path):
    with atomic_write(tmp_path / "weights.bin") as unfinished:
        unfinished.write_bytes(b"new")
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "weights.bin"):
        pass
    flush(tmp_path)
    opened = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []


@pytest.mark.parametrize(
    ("number", "what", "goes_on"), [(22, "folder", True), (22, "file", False), (5, "folder", False)]
)
def test_a_folder_that_cannot_be_flushed_is_no_failure(tmp_path, monkeypatch, number, what, goes_on):
    """CIFS and some FUSE say EINVAL (22) of a folder; of a file, or as EIO (5), it means that data may be lost."""
    fsync = os.fsync

    def refuses(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (what == "folder"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses)

    def write():
        with atomic_write(tmp_path / "weights.bin") as unfinished:
            unfinished.write_bytes(b"new")

    if goes_on:
        write()
        flush(tmp_path)
        assert names(tmp_path) == ["weights.bin"]
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            write()
