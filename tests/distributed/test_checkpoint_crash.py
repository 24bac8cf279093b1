"""A run that is killed while it saves: whatever the moment, what is left can be loaded and saved over.

The save runs in a copy of this process (fork), which ends itself, without any cleaning up, at its k-th change to the
file system; for every k. Two of the calls write a file: there it also ends half way.
"""

import itertools
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_checkpoints import Training, names

from distributed import LocalWorld, SoloCommunicator
from distributed.checkpoint import files as checkpoint_files
from distributed.checkpoint.files import complete, read_manifest, read_tensors

KILLED = 9
CHANGES = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir")

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot copy a process"),
    # The copy makes its own threads and leaves those of this process alone.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def exit_code_of_copy(job: Callable[[], object]) -> int:
    """Run a job in a copy of this process."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a copy that hangs ends by it
        code = 1
        try:
            job()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(k: int) -> None:
    """End this process at its k-th change to the file system from now on."""
    changes = itertools.count()

    def end_at_k(first: Callable[[], object] = lambda: None) -> None:
        if next(changes) == k:
            first()
            os._exit(KILLED)

    def deadly(call):
        def wrapped(*args, **kwargs):
            end_at_k()
            return call(*args, **kwargs)

        return wrapped

    def deadly_half_way(call, file_of):
        def wrapped(*args):
            end_at_k()
            call(*args)
            path = file_of(*args)
            end_at_k(lambda: os.truncate(path, path.stat().st_size // 2))

        return wrapped

    for name in CHANGES:
        setattr(os, name, deadly(getattr(os, name)))
    Path.write_text = deadly_half_way(Path.write_text, lambda path, text: path)
    save_file = deadly_half_way(checkpoint_files.save_file, lambda arrays, path, metadata: path)
    checkpoint_files.save_file = save_file


def save(comm, folder: Path, *, step: int, keep_last: int, back_to: str | None, k: int | None = None) -> None:
    """Save the numbers of step 90 under a step's name."""
    training = Training(comm, folder, keep_last=keep_last)
    training.checkpoints.load(back_to and folder / back_to)
    comm.barrier()
    if k is not None and comm.rank == 0:
        die_at(k)
    comm.barrier()
    training.at(90).checkpoints.save(step, {"step": 90})
    training.checkpoints.wait()


def check_what_is_left(comm, folder: Path, allowed: list[int | None]) -> None:
    """Check that one of these is found, all that is there whole, and that the next save leaves nothing else behind."""
    for path in complete(folder):
        manifest = read_manifest(path)
        read_tensors(path, manifest, list(manifest.tensors))
    training = Training(comm, folder, keep_last=2)
    loaded = training.checkpoints.load()
    if loaded is None:
        assert None in allowed
    else:
        assert loaded.refused == ()
        assert loaded.state["step"] in allowed
        training.check(loaded.state["step"])
    training.save(7)
    assert len(names(folder)) <= 3
    assert [name for name in names(folder) if not name.startswith("step-")] == ["latest"]
    training.at(0)
    assert training.checkpoints.load().step == 7
    training.check(7)


SCENES = {
    "the first": {"before": (), "step": 1, "keep_last": 3, "back_to": None},
    "the only one is replaced": {"before": (1,), "step": 2, "keep_last": 1, "back_to": None},
    "the only one is saved again": {"before": (1, 2), "step": 2, "keep_last": 1, "back_to": None},
    "back by two": {"before": (1, 2, 3), "step": 2, "keep_last": 3, "back_to": "step-00000001"},
}


@pytest.mark.parametrize(
    ("scene", "num_ranks"),
    [*((scene, 1) for scene in SCENES), pytest.param("the only one is saved again", 2, marks=pytest.mark.long)],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, monkeypatch, scene, num_ranks):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill of a process loses nothing that was written
    keys = SCENES[scene].copy()
    before = keys.pop("before")
    old = before[-1] if before else None

    def run(program, *args):
        if num_ranks > 1:
            LocalWorld(num_ranks, timeout_seconds=20).run(program, *args)
        else:
            program(SoloCommunicator(), *args)

    prepared = tmp_path / "prepared"
    run(lambda comm: Training(comm, prepared, keep_last=keys["keep_last"]).save(*before))
    for k in itertools.count():
        folder = tmp_path / f"killed at {k}"
        shutil.copytree(prepared, folder)
        code = exit_code_of_copy(lambda folder=folder, k=k: run(lambda comm: save(comm, folder, k=k, **keys)))
        assert code in (0, KILLED)
        run(check_what_is_left, folder, [90] if code == 0 else [old, 90])
        shutil.rmtree(folder)
        if code == 0:
            break
    assert k >= 14  # so many changes at least, else some were not counted
