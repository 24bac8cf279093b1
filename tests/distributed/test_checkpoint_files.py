"""The files of a checkpoint, without ranks: how they appear, which stay, and every way to be unreadable."""

import itertools
import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distributed.checkpoint import files as checkpoint_files
from distributed.checkpoint.files import (
    HEAD,
    CheckpointError,
    Manifest,
    Saving,
    complete,
    read_manifest,
    read_tensors,
)
from distributed.checkpoint.plan import Slice, Stored

STATE = {"data": {"epoch": 2, "position": 1 / 3}, "text": "ä", "empty": [], "nothing": None}


def arrays_of(step: int) -> list[dict[str, np.ndarray]]:
    """What each of two ranks saves."""
    return [
        {
            "parameter/w": np.arange(6, dtype=np.float32).reshape(2, 3) + step,
            "parameter/scale": np.array(0.5 + step),
            "optimizer/m/w": np.full((2, 3), -1.0 / step, np.float32),
        },
        {
            "buffer/mask": np.array([[True], [False]]),
            "buffer/count": np.array([step], np.int64),
            "parameter/none": np.empty((0, 4), np.float16),
        },
    ]


def manifest_of(step: int, arrays: list[dict[str, np.ndarray]]) -> Manifest:
    tensors = {
        name: Stored(rank, array.shape, str(array.dtype))
        for rank, part in enumerate(arrays)
        for name, array in part.items()
    }
    return Manifest(step, step - 1, f"save of step {step}", tensors, STATE)


def save(folder: Path, *steps: int, keep_last: int = 9) -> Path:
    for step in steps:
        arrays = arrays_of(step)
        manifest = manifest_of(step, arrays)
        parts = [Saving(folder, rank, arrays[rank], manifest, keep_last=keep_last) for rank in (0, 1)]
        assert [part.wait_for_part() for part in parts] == [None, None]
        assert [part.wait() for part in parts] == [None, None]
    return complete(folder)[0]


def read(checkpoint: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    manifest = read_manifest(checkpoint)
    return manifest, read_tensors(checkpoint, manifest, list(manifest.tensors))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check(checkpoint: Path, step: int) -> None:
    """Check that a checkpoint is what `save` saved at this step."""
    arrays = arrays_of(step)
    manifest, values = read(checkpoint)
    assert manifest == manifest_of(step, arrays)
    for name, array in (arrays[0] | arrays[1]).items():
        assert (values[name].dtype, values[name].shape) == (array.dtype, array.shape), name
        assert values[name].tobytes() == array.tobytes(), name


# How they appear, and which stay


def test_what_was_saved_is_read(tmp_path):
    checkpoint = save(tmp_path, 7)
    check(checkpoint, 7)
    assert names(checkpoint) == ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert names(checkpoint.parent) == ["latest", "step-00000007"]
    assert (checkpoint.parent / "latest").read_text() == "step-00000007\n"


def test_bfloat16_is_saved_as_it_is(tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    array = np.array([1.5, -2.0], bfloat16)
    saving = Saving(tmp_path, 0, {"w": array}, manifest_of(1, [{"w": array}]), keep_last=1)
    assert saving.wait() is None
    value = read(tmp_path / "step-00000001")[1]["w"]
    assert value.dtype == bfloat16
    assert value.tobytes() == array.tobytes()


def test_no_more_than_the_wanted_tensors_are_read(tmp_path):
    checkpoint = save(tmp_path, 7)
    (checkpoint / "rank-1.safetensors").unlink()
    assert list(read_tensors(checkpoint, read_manifest(checkpoint), ["parameter/scale"])) == ["parameter/scale"]


def test_the_last_ones_stay(tmp_path):
    save(tmp_path, 1, 2, 10, 99, keep_last=2)
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000099"]
    save(tmp_path, 123456789, keep_last=1)
    assert names(tmp_path) == ["latest", "step-123456789"]


def test_a_run_that_went_back_replaces_what_came_after(tmp_path):
    save(tmp_path, 100, 200, 300, 400)
    assert save(tmp_path, 250).name == "step-00000250"
    assert names(tmp_path) == ["latest", "step-00000100", "step-00000200", "step-00000250"]


def test_a_step_may_be_saved_again(tmp_path):
    save(tmp_path, 1, 2)
    before = read_manifest(tmp_path / "step-00000002")
    arrays = arrays_of(2)
    for number in (1, 2):
        again = Manifest(2, 1, f"again {number}", before.tensors, {"number": number})
        for part in [Saving(tmp_path, rank, arrays[rank], again, keep_last=2) for rank in (0, 1)]:
            assert part.wait() is None
        newest, older = complete(tmp_path)
        assert read(newest)[0] == again
        assert older == tmp_path / "step-00000001"
        assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]
        assert (tmp_path / "latest").read_text() == "step-00000002\n"


@pytest.mark.parametrize("latest", [None, "", "step-9", "nonsense", "\x00", "../step-00000001", b"\xff\xfe", "folder"])
def test_without_a_good_pointer_the_newest_comes_first(tmp_path, latest):
    save(tmp_path, 1, 2, 10)
    (tmp_path / "latest").unlink()
    if latest == "folder":
        (tmp_path / "latest").mkdir()
    elif latest is not None:
        (tmp_path / "latest").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    assert [path.name for path in complete(tmp_path)] == ["step-00000010", "step-00000002", "step-00000001"]


def test_the_one_that_latest_names_comes_first(tmp_path):
    save(tmp_path, 1, 2, 10)
    (tmp_path / "latest").write_text("step-00000002")
    assert [path.name for path in complete(tmp_path)] == ["step-00000002", "step-00000010", "step-00000001"]


def test_other_names_are_no_checkpoints(tmp_path):
    save(tmp_path, 3)
    for name in ("step-", "step-x", "step-²", "step--0000003", "saving-00000004-abc", "stepx", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000004").touch()
    assert [path.name for path in complete(tmp_path)] == ["step-00000003"]
    assert complete(tmp_path / "nowhere") == []


def test_what_a_kill_left_goes_at_the_next_save_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "saving-00000002-abc").mkdir()
    (tmp_path / "saving-00000002-abc" / "rank-0.safetensors.unfinished").write_bytes(b"half")
    (tmp_path / "latest.unfinished").write_text("ste")
    (tmp_path / "notes").write_text("somebody's")
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "notes", "step-00000001", "step-00000002"]


def test_what_a_kill_left_makes_room_before_the_next_part_is_written(tmp_path, monkeypatch):
    (tmp_path / "saving-00000001-abc").mkdir()
    seen = []
    save_file = checkpoint_files.save_file

    def looks(*args):
        seen.append(names(tmp_path))
        save_file(*args)

    monkeypatch.setattr(checkpoint_files, "save_file", looks)
    arrays = arrays_of(2)[:1]
    assert Saving(tmp_path, 0, arrays[0], manifest_of(2, arrays), keep_last=1).wait() is None
    assert seen == [["saving-00000002-save of step 2"]]


def test_what_a_name_stands_for_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    events = []

    def noted(what, call):
        def wrapped(path, *args):
            events.append(f"{what} {path.name}")
            return call(path, *args)

        return wrapped

    monkeypatch.setattr(checkpoint_files, "atomic_write", noted("write", checkpoint_files.atomic_write))
    monkeypatch.setattr(checkpoint_files, "flush", noted("flush", checkpoint_files.flush))
    monkeypatch.setattr(os, "rename", noted("rename", os.rename))
    arrays = arrays_of(2)[:1]
    for step in (1, 2):
        events.clear()
        assert Saving(tmp_path, 0, arrays[0], manifest_of(step, arrays), keep_last=1).wait() is None
    assert events == [
        "write rank-0.safetensors",
        "write manifest.json",
        "rename saving-00000002-save of step 2",
        f"flush {tmp_path.name}",
        "write latest",
        "rename step-00000001",
    ]


# One rank's share


def test_nothing_is_seen_before_all_parts_are_there(tmp_path):
    arrays = arrays_of(1)
    manifest = manifest_of(1, arrays)
    first = Saving(tmp_path, 0, arrays[0], manifest, keep_last=1)
    assert first.wait_for_part() is None
    assert complete(tmp_path) == []
    second = Saving(tmp_path, 1, arrays[1], manifest, keep_last=1)
    assert [second.wait(), first.wait()] == [None, None]
    check(tmp_path / "step-00000001", 1)


def test_a_rank_that_saves_nothing_leaves_nothing(tmp_path):
    # It may come late, when rank 0 has already renamed the folder.
    arrays = arrays_of(1)
    manifest = manifest_of(1, arrays)
    save(tmp_path, 1)
    assert Saving(tmp_path, 2, {}, manifest, keep_last=1).wait() is None
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_cancelled_save_leaves_nothing(tmp_path):
    arrays = arrays_of(1)
    saving = Saving(tmp_path, 0, arrays[0], manifest_of(1, arrays), keep_last=1)
    assert saving.wait_for_part() is None
    saving.cancel()
    assert names(tmp_path) == []


def test_a_part_that_is_written_but_never_seen_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SEEN_SECONDS", 0.02)
    arrays = arrays_of(1)
    saving = Saving(tmp_path, 0, arrays[0], manifest_of(1, arrays), keep_last=1)
    error = saving.wait()
    assert error is not None
    assert "the checkpoint of step 1 could not be written" in error
    assert "rank-1.safetensors was written, but is not seen in" in error
    saving.cancel()
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("interpreter ends"), MemoryError()])
def test_whatever_ends_the_thread_is_told(tmp_path, monkeypatch, error):
    def fails(*args):
        raise error

    monkeypatch.setattr(checkpoint_files, "save_file", fails)
    arrays = arrays_of(3)
    part = Saving(tmp_path, 1, arrays[1], manifest_of(3, arrays), keep_last=1)
    assert part.wait_for_part() == (f"the checkpoint of step 3 could not be written: {type(error).__name__}: {error}")


# What is refused


def edit(**changes):
    """Change keys of a manifest, and leave its checksum alone."""

    def damage(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * share)])


def flip(share):
    """Flip one bit, so far into the file."""

    def damage(path):
        content = bytearray(path.read_bytes())
        content[int(len(content) * share)] ^= 1
        path.write_bytes(content)

    return damage


def write(content):
    return lambda path: path.write_bytes(content)


def put_folder(path):
    path.unlink()
    path.mkdir()


def drop_key(key):
    def damage(path):
        content = json.loads(path.read_text())
        del content[key]
        path.write_text(json.dumps(content))

    return damage


JUNK = bytes(range(256)) * 8


def forge(**changes):
    """Change what a manifest says, and its checksum with it: what is left is to hold its content against the schema."""

    def damage(path):
        content = json.loads(path.read_text()) | changes
        rest = {name: content[name] for name in content.keys() - checkpoint_files.HEAD}
        path.write_text(json.dumps(content | {"crc32": checkpoint_files._checksum_of_json(rest)}))

    return damage


def forge_tensor(**changes):
    stored = {"rank": 0, "shape": [2], "dtype": "float32"} | changes
    return forge(tensors={"parameter/w": stored})


def forge_slices(*slices):
    return forge_tensor(slices=[{"rank": 0, "start": start, "stop": stop} for start, stop in slices])


MANIFEST_DAMAGE = {
    "a negative slice": (forge_slices((-1, 2)), r"Expected `int` >= 0 - at `\$\.tensors\[\.\.\.\]\.slices"),
    "a step in words": (forge(step="8"), r"manifest\.json: Expected `int`, got `str` - at `\$\.step`"),
    "a negative step": (forge(step=-8), r"manifest\.json: Expected `int` >= 0 - at `\$\.step`"),
    "no step": (forge(step=None), r"manifest\.json: Expected `int`, got `null` - at `\$\.step`"),
    "tensors in a list": (forge(tensors=["w"]), r"manifest\.json: Expected `object`, got `array` - at `\$\.tensors`"),
    "a state in a list": (forge(state=[]), r"manifest\.json: Expected `object`, got `array` - at `\$\.state`"),
    "a path for a rank": (forge_tensor(rank="../0"), r"Expected `int`, got `str` - at `\$\.tensors\[\.\.\.\]\.rank`"),
    "a negative rank": (forge_tensor(rank=-1), r"Expected `int` >= 0 - at `\$\.tensors\[\.\.\.\]\.rank`"),
    "a shape in words": (forge_tensor(shape="2"), r"Expected `array`, got `str` - at `\$\.tensors\[\.\.\.\]\.shape`"),
    "an infinite size": (forge_tensor(shape=[float("inf")]), r"Expected `int`, got `float` - at `\$\.tensors"),
    "deleted": (Path.unlink, r"there is no manifest\.json in it"),
    "empty": (cut(0), r"manifest\.json cannot be read: "),
    "torn": (cut(0.6), r"manifest\.json cannot be read: "),
    "torn at the end": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read: "),
    "junk": (write(JUNK), r"manifest\.json cannot be read"),
    "a folder": (put_folder, r"there is no manifest\.json in it"),
    "deep": (write(b"[" * 100_000), r"manifest\.json cannot be read: maximum recursion"),
    "a list": (write(b"[]"), r"manifest\.json is not of a minigrad checkpoint"),
    "of another program": (write(b'{"format": "pt", "version": 1}'), "is not of a minigrad checkpoint"),
    "without a format": (drop_key("format"), r"manifest\.json is not of a minigrad checkpoint"),
    "newer": (edit(version=3), "saved by a newer version of this program: its format is 3, the newest known here is 2"),
    "newer and other": (write(b'{"format": "minigrad checkpoint", "version": 7}'), "its format is 7"),
    "of no version": (edit(version="one"), r"manifest\.json: Expected `int`, got `str` - at `\$.version`"),
    "without a version": (drop_key("version"), r"manifest\.json: Object missing required field `version`"),
    "without a checksum": (drop_key("crc32"), r"manifest\.json: Object missing required field `crc32`"),
    "another step": (edit(step=8), r"manifest\.json has changed since it was saved"),
    "another state": (edit(state={}), r"manifest\.json has changed since it was saved"),
    "other tensors": (edit(tensors={}), r"manifest\.json has changed since it was saved"),
    "other updates": (edit(num_updates=5), r"manifest\.json has changed since it was saved"),
}
PART_DAMAGE = {
    "deleted": (Path.unlink, "is missing"),
    "empty": (cut(0), "cannot be read: SafetensorError"),
    "torn in the header": (cut(0.2), "cannot be read: SafetensorError"),
    "torn at the end": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be read: SafetensorError"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "cannot be read: SafetensorError"),
    "junk": (write(JUNK), "cannot be read: SafetensorError"),
    "a folder": (put_folder, "is missing"),
    "a bit of the data": (flip(0.99), "has changed since it was saved: '.*' is not what it was"),
    "a bit of the header's length": (flip(0), "cannot be read: SafetensorError"),
}


@pytest.mark.parametrize("case", MANIFEST_DAMAGE)
def test_a_damaged_manifest_is_refused(tmp_path, case):
    damage, message = MANIFEST_DAMAGE[case]
    checkpoint = save(tmp_path, 7)
    damage(checkpoint / "manifest.json")
    with pytest.raises(CheckpointError, match=message):
        read(checkpoint)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", PART_DAMAGE)
def test_a_damaged_part_is_refused(tmp_path, case, rank):
    damage, message = PART_DAMAGE[case]
    checkpoint = save(tmp_path, 7)
    damage(checkpoint / f"rank-{rank}.safetensors")
    with pytest.raises(CheckpointError, match=rf"rank-{rank}\.safetensors {message}"):
        read(checkpoint)


def test_a_part_of_another_checkpoint_is_refused(tmp_path):
    newest = save(tmp_path, 6, 7)
    shutil.copy(tmp_path / "step-00000006" / "rank-1.safetensors", newest)
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is of another checkpoint"):
        read(newest)


def test_a_part_of_another_rank_is_refused(tmp_path):
    checkpoint = save(tmp_path, 7)
    shutil.copy(checkpoint / "rank-0.safetensors", checkpoint / "rank-1.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors cannot be read"):
        read(checkpoint)


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"save": "save of step 7"}, *({"save": "save of step 7", "crc32": c} for c in ("", "1", "{}"))],
)
def test_a_part_of_another_program_is_refused(tmp_path, metadata):
    checkpoint = save(tmp_path, 7)
    checkpoint_files.save_file(arrays_of(7)[1], checkpoint / "rank-1.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors (cannot be read|is of another checkpoint)"):
        read(checkpoint)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"there is no manifest\.json in it"):
            read_manifest(path)


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"])
def test_no_flipped_bit_and_no_cut_goes_unnoticed(tmp_path, name):
    checkpoint = save(tmp_path, 7)
    path = checkpoint / name
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    harmless = 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(generator.integers(8))
        for data in (bytes(damaged), content[:place]):
            with path.open("r+b") as file:  # a file that is emptied and written again, ext4 brings to the disk at once
                file.write(data)
                file.truncate()
            try:
                check(checkpoint, 7)  # nothing but what was saved, if it is read at all
                harmless += 1
            except CheckpointError:
                pass
    assert harmless < 0.2 * len(content)  # blanks between tokens


# Slices


def save_slices(folder, *ends, size=6):
    """Save a tensor of (2, 3) in slices that end there, in turn by two ranks."""
    values = np.arange(size, dtype=np.float32)
    slices = [Slice(i % 2, start, stop) for i, (start, stop) in enumerate(itertools.pairwise([0, *ends]))]
    stored = Stored(0, (2, 3), "float32", tuple(slices))
    arrays = [
        {stored.key("parameter/w", part): values[part.start : part.stop].copy() for part in slices if part.rank == rank}
        for rank in (0, 1)
    ]
    manifest = Manifest(1, 1, "save", {"parameter/w": stored}, {})
    parts = [Saving(folder, rank, arrays[rank], manifest, keep_last=2) for rank in (0, 1)]
    assert [part.wait_for_part() for part in parts] == [None, None]
    assert [part.wait() for part in parts] == [None, None]
    return complete(folder)[0]


@pytest.mark.parametrize("ends", [(6,), (1, 6), (2, 4, 6), (1, 2, 3, 4, 5, 6)])
def test_slices_are_read_whole_or_in_any_other_slices(tmp_path, ends):
    checkpoint = save_slices(tmp_path, *ends)
    manifest = read_manifest(checkpoint)
    whole = read_tensors(checkpoint, manifest, ["parameter/w"])["parameter/w"]
    np.testing.assert_array_equal(whole, np.arange(6, dtype=np.float32).reshape(2, 3))
    for start, stop in itertools.combinations(range(7), 2):
        values = read_tensors(checkpoint, manifest, ["parameter/w"], {"parameter/w": (start, stop)})
        np.testing.assert_array_equal(values["parameter/w"], np.arange(start, stop, dtype=np.float32))


@pytest.mark.parametrize("slices", [((0, 3),), ((0, 4), (3, 6)), ((0, 2), (3, 6)), ((1, 6),), ((0, 7),)])
def test_slices_that_are_not_all_of_a_tensor_are_refused(tmp_path, slices):
    checkpoint = save_slices(tmp_path, 6)
    stored = Stored(0, (2, 3), "float32", tuple(Slice(0, start, stop) for start, stop in slices))
    manifest = replace(read_manifest(checkpoint), tensors={"parameter/w": stored})
    with pytest.raises(CheckpointError, match=r"the slices of 'parameter/w' are not all of it"):
        read_tensors(checkpoint, manifest, ["parameter/w"])


def test_a_checkpoint_of_version_1_is_read(tmp_path):
    checkpoint = save(tmp_path, 7)
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    for stored in content["tensors"].values():
        assert stored.pop("slices") == []
    content["version"] = 1
    own = {name: content[name] for name in content.keys() - HEAD}
    content["crc32"] = zlib.crc32(json.dumps(own, sort_keys=True).encode())
    path.write_text(json.dumps(content))
    assert read(checkpoint)[0] == manifest_of(7, arrays_of(7))
