"""Checkpoints over ranks: what is agreed, what goes wrong on one rank, and how training goes on."""

import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from toy_checkpoints import Training, Weights, names

import minigrad as mg
from distributed import SoloCommunicator
from distributed.checkpoint import checkpointer as checkpoint
from distributed.checkpoint import files as checkpoint_files
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.checkpoint.files import CheckpointError, complete
from minigrad.nn import Buffer
from minigrad.optim import SGD, AdamW, Optimizer


@pytest.fixture
def folder_of(tmp_path):
    """Return comm -> a folder that all ranks share."""
    return lambda comm: Path(comm.broadcast_object(str(tmp_path))) / "run" / "checkpoints"


def on_rank_0(comm, what):
    """Run something on rank 0, between two moments when all ranks are there."""
    comm.barrier()
    if comm.rank == 0:
        what()
    comm.barrier()


def raised(call, *args):
    """Return type and words of what a call raises."""
    try:
        call(*args)
    except (ValueError, TypeError, CheckpointError) as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def same_everywhere(results):
    """Check that all ranks have the same result, and return it."""
    assert all(result == results[0] for result in results), results
    return results[0]


# Saved and loaded


def test_nothing_to_load_yet(ranks, folder_of):
    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        assert training.checkpoints.load() is None
        training.check(1)
        return names(folder_of(comm))

    assert ranks.run(program) == [[]] * ranks.size


def test_everything_is_as_it_was(ranks, folder_of):
    def program(comm):
        Training(comm, folder_of(comm)).save(3)
        training = Training(comm, folder_of(comm))
        loaded = training.checkpoints.load()
        assert (loaded.step, loaded.state, loaded.path.name, loaded.refused) == (3, {"step": 3}, "step-00000003", ())
        training.check(3)
        return names(loaded.path)

    files = same_everywhere(ranks.run(program))
    assert files == ["manifest.json", *(f"rank-{rank}.safetensors" for rank in range(ranks.size))]


def test_loading_changes_nothing_on_the_disk(ranks, folder_of):
    def program(comm):
        folder = folder_of(comm)
        training = Training(comm, folder).save(1, 2)
        before = names(folder), (folder / "latest").read_text()
        assert training.checkpoints.load(folder / "step-00000001").step == 1
        training.check(1)
        assert (names(folder), (folder / "latest").read_text()) == before
        assert training.checkpoints.load().step == 2
        training.check(2)

    ranks.run(program)


def test_a_run_may_go_back_and_on_from_there(ranks, folder_of):
    def program(comm):
        folder = folder_of(comm)
        Training(comm, folder).save(1, 2, 3)
        training = Training(comm, folder)
        assert training.checkpoints.load(str(folder / "step-00000001")).step == 1
        training.at(22).checkpoints.save(2)
        training.checkpoints.wait()
        training.at(0)
        loaded = training.checkpoints.load()
        assert (loaded.step, loaded.state) == (2, {})
        training.check(22)
        return [path.name for path in complete(folder)]

    assert same_everywhere(ranks.run(program)) == ["step-00000002", "step-00000001"]


def test_another_run_s_checkpoint_is_loaded_and_left_alone(ranks, folder_of):
    def program(comm):
        theirs, ours = folder_of(comm) / "theirs", folder_of(comm) / "ours"
        Training(comm, theirs).save(5)
        training = Training(comm, ours)
        loaded = training.checkpoints.load(theirs / "step-00000005")
        assert (loaded.step, loaded.path) == (5, theirs / "step-00000005")
        training.check(5)
        training.save(6)
        return names(theirs), names(ours)

    expected = ["latest", "step-00000005"], ["latest", "step-00000006"]
    assert ranks.run(program) == [expected] * ranks.size


@pytest.mark.parametrize("loads", ["nothing", "another run's"])
def test_a_run_that_was_not_loaded_is_not_replaced(ranks, folder_of, loads):
    def program(comm):
        folder = folder_of(comm)
        Training(comm, folder).save(3)
        Training(comm, folder.parent / "other").save(7)
        training = Training(comm, folder).at(1)
        if loads == "another run's":
            training.checkpoints.load(folder.parent / "other" / "step-00000007")
        with pytest.raises(RuntimeError, match=r"holds step-00000003 already: call load\(\) first, or save elsewhere$"):
            training.checkpoints.save(1)
        assert names(folder) == ["latest", "step-00000003"]
        training.checkpoints.load()
        training.save(4)
        return names(folder)

    assert ranks.run(program) == [["latest", "step-00000003", "step-00000004"]] * ranks.size


def test_only_the_last_ones_stay(ranks, folder_of):
    def program(comm):
        Training(comm, folder_of(comm), keep_last=2).save(1, 2, 3)
        comm.barrier()
        return names(folder_of(comm))

    assert ranks.run(program) == [["latest", "step-00000002", "step-00000003"]] * ranks.size


def test_a_model_without_state_in_its_optimizer(ranks, folder_of):
    def program(comm):
        Training(comm, folder_of(comm), rule=SGD(0.1)).save(2)
        training = Training(comm, folder_of(comm), rule=SGD(0.1))
        training.checkpoints.load()
        training.check(2)

    ranks.run(program)


def test_each_tensor_is_written_once(ranks, folder_of):
    def program(comm):
        folder = folder_of(comm)
        training = Training(comm, folder).save(1)
        parts = [checkpoint_files.safe_open(path, "numpy") for path in (folder / "step-00000001").glob("rank-*")]
        saved = [name for part in parts for name in part.keys()]  # noqa: SIM118
        assert len(saved) == len(set(saved))
        return len(saved), len(training.model.everything(training.optimizer)) - 1

    num_saved, num_held = zip(*ranks.run(program), strict=True)
    num_shared = 2 * 3 + 1  # two parameters with two arrays of state each, one buffer
    assert same_everywhere(num_saved) == num_shared + sum(held - num_shared for held in num_held)


def test_the_state_of_a_parameter_without_a_name_cannot_be_told():
    optimizer = Optimizer([mg.Parameter(np.zeros((2, 3)), "")], AdamW(0.1))
    with pytest.raises(ValueError, match=r"told apart by the names of parameters, but .*\(2, 3\).* has none"):
        list(optimizer.state_arrays())


# While training goes on


@pytest.fixture
def gate(monkeypatch):
    """Keep all writers waiting until it is set."""
    gate = threading.Event()
    save_file = checkpoint_files.save_file

    def waits(*args):
        assert gate.wait(20)
        save_file(*args)

    monkeypatch.setattr(checkpoint_files, "save_file", waits)
    yield gate
    gate.set()


def test_what_is_saved_is_what_was_there_when_save_was_called(ranks, folder_of, gate):
    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        state = {"position": [1]}
        training.checkpoints.save(1, state)
        training.at(2)
        state["position"].append(2)
        assert complete(folder_of(comm)) == []
        comm.barrier()
        gate.set()
        training.checkpoints.wait()
        loaded = training.checkpoints.load()
        assert (loaded.step, loaded.state) == (1, {"position": [1]})
        training.check(1)

    ranks.run(program)


def test_a_save_waits_for_the_one_before(ranks, folder_of, gate):
    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        training.checkpoints.save(1)
        training.at(2)
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        training.checkpoints.save(2)
        assert gate.is_set()
        assert "step-00000001" in names(folder_of(comm))
        training.at(3)
        training.checkpoints.wait()
        for step in (1, 2):
            training.checkpoints.load(folder_of(comm) / f"step-0000000{step}")
            training.check(step)
        timer.join()

    ranks.run(program)


def test_a_load_waits_for_the_save_before(ranks, folder_of):
    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        training.checkpoints.save(1)
        training.at(2)
        assert training.checkpoints.load().step == 1
        training.check(1)

    ranks.run(program)


# One rank cannot write


@pytest.fixture
def full_disk(monkeypatch):
    """Let the writers of some ranks fail, half way: `full_disk.add(rank)`."""
    full = set()
    save_file = checkpoint_files.save_file

    def fails(arrays, path, metadata):
        save_file(arrays, path, metadata)
        if any(path.name.startswith(f"rank-{rank}.") for rank in full):
            os.truncate(path, 50)
            raise OSError(28, "No space left on device", path.name)

    monkeypatch.setattr(checkpoint_files, "save_file", fails)
    return full


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("then", ["wait", "save", "load"])
def test_a_failure_on_one_rank_is_raised_on_all_and_training_can_go_on(ranks, folder_of, full_disk, which, then):
    broken = 0 if which == "first" else ranks.size - 1

    def program(comm):
        folder = folder_of(comm)
        training = Training(comm, folder).save(1)
        full_disk.add(broken)
        training.at(2).checkpoints.save(2)
        call = {"wait": training.checkpoints.wait, "save": lambda: training.checkpoints.save(3)}
        error = raised(call.get(then, training.checkpoints.load))
        training.check(2)
        comm.barrier()
        assert names(folder) == ["latest", "step-00000001"]
        full_disk.discard(broken)
        training.save(4)
        assert names(folder) == ["latest", "step-00000001", "step-00000004"]
        training.checkpoints.load(folder / "step-00000001")
        training.check(1)
        training.checkpoints.load()
        training.check(4)
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    assert message.startswith(f"[rank {broken}] the checkpoint of step 2 could not be written: OSError: [Errno 28] No ")


def test_a_part_that_somebody_removes_is_not_waited_for(tmp_path, monkeypatch):
    # For two minutes, as for one that another host has written.
    see_all_parts = checkpoint_files.Saving._see_all_parts

    def removed(saving):
        shutil.rmtree(tmp_path / "run")
        return see_all_parts(saving)

    monkeypatch.setattr(checkpoint_files.Saving, "_see_all_parts", removed)
    monkeypatch.setattr(checkpoint_files, "SEEN_SECONDS", 1.0)
    training = Training(SoloCommunicator(), tmp_path / "run").at(1)
    training.checkpoints.save(1)
    with pytest.raises(CheckpointError, match=r"CheckpointError: somebody has removed what was written in .*saving-"):
        training.checkpoints.wait()


@pytest.mark.parametrize("call", ["rename", "replace", "fsync"])
def test_a_commit_that_fails_is_raised_on_all_ranks(ranks, folder_of, monkeypatch, call):
    broken = threading.Event()
    function = getattr(os, call)

    def fails(*args):
        if broken.is_set():
            raise OSError(5, "Input/output error")
        return function(*args)

    monkeypatch.setattr(os, call, fails)

    def program(comm):
        training = Training(comm, folder_of(comm)).save(1)
        comm.barrier()
        broken.set()
        training.at(2).checkpoints.save(2)
        error = raised(training.checkpoints.wait)
        comm.barrier()
        broken.clear()
        assert names(folder_of(comm)) == ["latest", "step-00000001"]
        training.save(3).at(0).checkpoints.load()
        training.check(3)
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    assert "[rank 0] the checkpoint of step 2 could not be written: OSError: [Errno 5]" in message


# Refused at the door, on every rank


def unnamed(comm, folder):
    Training(comm, folder, **({"bias": mg.Parameter(np.zeros(2), "")} if comm.rank == comm.size - 1 else {}))


def twice(comm, folder):
    Training(comm, folder, **({"other": Buffer(np.zeros(2), "mean")} if comm.rank == 0 else {}))


def keep_nothing(comm, folder):
    Training(comm, folder, keep_last=0 if comm.rank == comm.size - 1 else 1)


def foreign_parameter(comm, folder):
    model = Weights(comm.rank)
    Checkpointer(folder, comm, model, Optimizer([mg.Parameter(np.zeros(2), "shared")], SGD(0.1)))


def file_for_folder(comm, folder):
    on_rank_0(comm, lambda: folder.parent.mkdir(parents=True, exist_ok=True) or folder.touch())
    Training(comm, folder)


class Phases(SGD):
    """A rule whose state no file can hold."""

    def init(self, data):
        return {"phase": data.astype(np.complex128)}


def state_that_no_file_holds(comm, folder):
    Training(comm, folder, rule=Phases(0.1))


AT_THE_DOOR = {
    state_that_no_file_holds: r"\[rank 0\] a checkpoint holds numbers of bfloat16, .* is complex128",
    unnamed: r"\[rank {last}\] every tensor of a checkpoint needs a name of its own, .*\(2,\).* has none",
    twice: r"\[rank 0\] every tensor of a checkpoint needs a name of its own, 'mean' has none",
    keep_nothing: r"\[rank {last}\] keep_last must be at least 1, got 0",
    foreign_parameter: r"\[rank 0\] the optimizer must update parameters of the model, 'shared' is not among them",
    file_for_folder: r"\[rank 0\] checkpoints cannot be saved in .*checkpoints: \[Errno [0-9]+\]",
}


@pytest.mark.parametrize("mistake", AT_THE_DOOR, ids=lambda mistake: mistake.__name__)
def test_a_mistake_on_one_rank_is_refused_on_all(ranks, folder_of, mistake):
    def program(comm):
        return raised(mistake, comm, folder_of(comm))

    kind, message = same_everywhere(ranks.run(program))
    assert kind is ValueError
    assert re.match(AT_THE_DOOR[mistake].replace("{last}", str(ranks.size - 1)), message)


def test_weights_that_are_not_finite_are_no_checkpoint(ranks, folder_of):
    """Saved, they would be the newest of the run, and going on from them could only fail."""

    def program(comm):
        training = Training(comm, folder_of(comm))
        training.save(1)
        if comm.rank == comm.size - 1:
            training.model.own.data[0, 0] = np.nan
        message = raised(training.checkpoints.save, 2)[1]
        return message, training.checkpoints.load().step, names(folder_of(comm))

    last = ranks.size - 1
    message, step, left = same_everywhere(ranks.run(program))
    assert message == f"[rank {last}] parameter/own {last} is not finite, so step 2 is not saved"
    assert (step, left) == (1, ["latest", "step-00000001"])


def test_weights_that_were_saved_though_not_finite_are_passed_over(ranks, folder_of, monkeypatch):
    not_finite, looks = checkpoint.not_finite, []
    monkeypatch.setattr(checkpoint, "not_finite", lambda values: not_finite(values) if looks else None)

    def program(comm):
        training = Training(comm, folder_of(comm))
        training.save(1)
        training.model.shared.data[:] = np.inf
        training.checkpoints.save(2)  # as it was done before anybody looked
        training.checkpoints.wait()
        comm.barrier()
        looks.append(True)
        comm.barrier()
        loaded = training.checkpoints.load()
        return loaded.step, len(loaded.refused), "parameter/shared is not finite in it" in loaded.refused[0]

    assert same_everywhere(ranks.run(program)) == (1, 1, True)


def test_a_buffer_may_be_infinite(ranks, folder_of):
    def program(comm):
        training = Training(comm, folder_of(comm))
        training.model.mean.data[:] = -np.inf
        training.checkpoints.save(1)
        training.model.mean.data[:] = 0
        training.checkpoints.load()
        return training.model.mean.data.tolist()

    assert ranks.run(program) == [[-np.inf] * 3] * ranks.size


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_whoever_may_read_the_run_may_read_its_checkpoints(ranks, folder_of):
    def program(comm):
        folder = folder_of(comm)
        Training(comm, folder).save(1)
        plain = folder.parent / f"plain-{comm.rank}"
        plain.mkdir()
        (plain / "file").touch()
        found = {path.stat().st_mode for path in (folder, folder / "step-00000001")}
        files = {path.stat().st_mode for path in (folder / "step-00000001").iterdir()}
        return found == {plain.stat().st_mode} and files == {(plain / "file").stat().st_mode}

    assert all(ranks.run(program))


def test_a_folder_that_was_removed_is_not_made_anew(ranks, folder_of):
    def program(comm):
        folder = folder_of(comm)
        training = Training(comm, folder)
        training.save(1)
        on_rank_0(comm, lambda: shutil.rmtree(folder.parent))
        training.checkpoints.save(2)
        kind, message = raised(training.checkpoints.wait)
        return kind, "No such file or directory" in message, folder.parent.exists()

    assert same_everywhere(ranks.run(program)) == (CheckpointError, True, False)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("values", [np.zeros((3, 2)), np.zeros((2, 3), np.float32)], ids=["shape", "dtype"])
def test_ranks_that_disagree_on_a_tensor_are_refused(ranks, folder_of, values):
    def program(comm):
        last = comm.rank == comm.size - 1
        tensor = Buffer(values if last else np.zeros((2, 3)), "table")
        return raised(lambda: Training(comm, folder_of(comm), table=tensor))

    kind, message = same_everywhere(ranks.run(program))
    assert kind is ValueError
    assert f"buffer/table is float64[2, 3] on rank 0 and {values.dtype}{list(values.shape)} on rank" in message


@pytest.mark.ranks(2, 3, 4)
def test_a_folder_that_one_rank_does_not_see_is_refused(ranks, folder_of, monkeypatch):
    monkeypatch.setattr(checkpoint, "SEEN_SECONDS", 0.05)

    def program(comm):
        folder = folder_of(comm)
        error = raised(Training, comm, folder if comm.rank < comm.size - 1 else folder / "of this host")
        comm.barrier()
        return *error, names(folder)[0] if names(folder) else "empty"

    kind, message, left = same_everywhere(ranks.run(program))
    assert (kind, left) == (ValueError, "empty")
    assert f"[rank {ranks.size - 1}] all ranks must see the folder of checkpoints" in message


def test_a_folder_that_is_seen_late_is_waited_for(tmp_path):
    threading.Timer(0.05, (tmp_path / "late").mkdir).start()
    assert checkpoint._is_seen(tmp_path / "late")


@pytest.mark.parametrize("what", ["manifest.json", "rank-0.safetensors"])
def test_where_the_disk_fails_no_older_one_is_loaded(ranks, folder_of, monkeypatch, what):
    """A moment later the newest may be readable again, and a save after the older one would remove it."""

    def program(comm):
        training = Training(comm, folder_of(comm)).save(3, 4)
        failing = {"manifest.json": "read_manifest", "rank-0.safetensors": "read_tensors"}[what]
        if comm.rank == 0:
            monkeypatch.setattr(checkpoint, failing, stale)
        comm.barrier()
        error = raised(training.at(5).checkpoints.load)
        training.check(5)
        comm.barrier()
        monkeypatch.undo()
        return error

    def stale(*_):
        raise OSError(116, "Stale file handle")

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    assert message.startswith("[rank 0] ")
    assert "step-00000004 cannot be read now: [Errno 116] Stale file handle" in message


def test_a_load_that_failed_allows_no_save(ranks, folder_of):
    def program(comm):
        Training(comm, folder_of(comm), other=mg.Parameter(np.zeros(2), "other")).save(3)
        training = Training(comm, folder_of(comm)).at(1)
        assert raised(training.checkpoints.load)[0] is CheckpointError
        with pytest.raises(RuntimeError, match="holds step-00000003 already"):
            training.checkpoints.save(1)

    ranks.run(program)


STATES = {"no mapping": 5, "an array": {"x": np.zeros(2)}, "a set": {"x": {1}}, "itself": {}, "bytes": {"x": b""}}
STATES |= {"infinity": {"best loss": np.inf}}
STATES["itself"]["x"] = STATES["itself"]


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_json_cannot_say_is_refused(ranks, folder_of, case):
    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        return raised(training.checkpoints.save, 1, STATES[case] if comm.rank == comm.size - 1 else {})

    kind, message = same_everywhere(ranks.run(program))
    assert kind is TypeError
    assert message.startswith(f"[rank {ranks.size - 1}] the state of a checkpoint must be what JSON can say: ")


@pytest.mark.parametrize("step", [-1, 1.5])
def test_what_is_no_step_is_refused(ranks, folder_of, step):
    def program(comm):
        return raised(Training(comm, folder_of(comm)).checkpoints.save, step)

    kind, message = same_everywhere(ranks.run(program))
    assert kind is ValueError
    assert f"all ranks must save one step, at least 0; (step, optimizer.num_steps) by rank: [({step}, 0)" in message


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("differs", ["step", "num_steps"])
def test_ranks_at_different_steps_are_refused_and_may_save_again(ranks, folder_of, differs):
    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        off = int(comm.rank == comm.size - 1)
        training.optimizer.num_steps += off * (differs == "num_steps")
        error = raised(training.checkpoints.save, 1 + off * (differs == "step"))
        training.save(2)
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is ValueError
    assert "all ranks must save one step" in message


# What cannot be read


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "manifest deleted": (lambda newest, older: (newest / "manifest.json").unlink(), r"no manifest\.json"),
    "manifest empty": (lambda newest, older: os.truncate(newest / "manifest.json", 0), "cannot be read"),
    "part deleted": (lambda newest, older: (newest / "rank-0.safetensors").unlink(), r"rank-0\.safetensors is missing"),
    "part torn": (lambda newest, older: os.truncate(newest / "rank-0.safetensors", 99), "cannot be read"),
    "bit flipped": (lambda newest, older: flip_last_bit(newest / "rank-0.safetensors"), "has changed since"),
    "part of another": (
        lambda newest, older: shutil.copy(older / "rank-0.safetensors", newest / "rank-0.safetensors"),
        r"rank-0\.safetensors is of another checkpoint",
    ),
    "empty folder": (lambda newest, older: [path.unlink() for path in newest.iterdir()], r"no manifest\.json"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_the_last_good_one_is_loaded(ranks, folder_of, case):
    damage, reason = DAMAGE[case]

    def program(comm):
        folder = folder_of(comm)
        Training(comm, folder).save(1, 2)
        newest, older = folder / "step-00000002", folder / "step-00000001"
        on_rank_0(comm, lambda: damage(newest, older))
        training = Training(comm, folder).at(7)
        assert raised(training.checkpoints.load, newest)[0] is CheckpointError
        training.check(7)
        loaded = training.checkpoints.load()
        assert (loaded.step, loaded.path) == (1, older)
        training.check(1)
        training.save(2)  # the run goes on, and the damaged one is gone
        training.at(0).checkpoints.load()
        training.check(2)
        comm.barrier()
        assert len(names(folder)) == 3
        return loaded.refused

    (refused,) = same_everywhere(ranks.run(program))
    assert "step-00000002: [rank " in refused
    assert re.search(reason, refused)


def test_with_no_good_one_every_reason_is_told_and_nothing_is_changed(ranks, folder_of):
    def program(comm):
        folder = folder_of(comm)
        Training(comm, folder).save(1, 2, 3)
        on_rank_0(comm, lambda: [(path / "rank-0.safetensors").unlink() for path in complete(folder)[:2]])
        on_rank_0(comm, lambda: (folder / "step-00000001" / "manifest.json").write_text("{}"))
        training = Training(comm, folder).at(7)
        error = raised(training.checkpoints.load)
        training.check(7)
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    head, newest, middle, oldest = message.splitlines()
    assert re.fullmatch(r"no checkpoint in .*checkpoints can be loaded:", head)
    assert "step-00000003: [rank " in newest
    assert newest.endswith("rank-0.safetensors is missing")
    assert "step-00000002: [rank " in middle
    assert oldest.endswith("step-00000001: [rank 0] manifest.json is not of a minigrad checkpoint")


@pytest.mark.ranks(2, 3, 4)
def test_what_one_rank_alone_cannot_read_no_rank_loads(ranks, folder_of):
    def program(comm):
        folder, last = folder_of(comm), comm.size - 1
        Training(comm, folder).save(1)
        on_rank_0(comm, lambda: flip_last_bit(folder / "step-00000001" / f"rank-{last}.safetensors"))
        # What lies last in a file of this rank is its own: only this rank reads it.
        training = Training(comm, folder).at(7)
        error = raised(training.checkpoints.load)
        training.check(7)
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    assert "has changed since it was saved" in message


OTHER_MODELS = {
    "more": (
        {"bias": mg.Parameter(np.zeros(2), "bias")},
        "it lacks optimizer/m/bias, it lacks optimizer/v/bias, it lacks parameter/bias$",
    ),
    "shape": ({"scale": mg.Parameter(np.zeros(1), "scale")}, r"parameter/scale is float64\[\] in it and float64\[1\]"),
    "dtype": ({"mean": Buffer(np.zeros(3, "f4"), "mean")}, r"buffer/mean is float64\[3\] in it and float32\[3\] here"),
    "rule": ({"rule": SGD(0.1, momentum=0.9)}, "it lacks optimizer/velocity/shared, .*, and [0-9]+ more$"),
    "less": ({"scale": None}, "it has optimizer/m/scale, it has optimizer/v/scale, it has parameter/scale$"),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused(ranks, folder_of, case):
    extra, reason = OTHER_MODELS[case]

    def program(comm):
        Training(comm, folder_of(comm)).save(1)
        training = Training(comm, folder_of(comm), **copied(extra)).at(7)
        error = raised(training.checkpoints.load)
        training.check(7)
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    assert re.search(f"of another model or optimizer: .*{reason}", message)


def copied(extra):
    """Make the tensors of one rank: threads must not share them."""
    kinds = (mg.Parameter, Buffer)
    return {name: type(x)(x.data.copy(), x.name) if isinstance(x, kinds) else x for name, x in extra.items()}


@pytest.mark.parametrize("call", ["load", "save"])
def test_a_folder_that_rank_0_cannot_list_is_an_error_on_all(ranks, folder_of, monkeypatch, call):
    """Only rank 0 looks, and the others wait for what it finds."""
    unreadable = threading.Event()

    def listed(folder):
        if unreadable.is_set():
            raise PermissionError(13, "Permission denied", "checkpoints")
        return complete(folder)

    monkeypatch.setattr(checkpoint, "complete", listed)

    def program(comm):
        training = Training(comm, folder_of(comm)).at(1)
        on_rank_0(comm, unreadable.set)
        error = raised(training.checkpoints.load if call == "load" else lambda: training.checkpoints.save(1))
        on_rank_0(comm, unreadable.clear)
        training.save(2)
        assert training.checkpoints.load().step == 2
        return error

    kind, message = same_everywhere(ranks.run(program))
    assert kind is CheckpointError
    assert message == "[rank 0] PermissionError: [Errno 13] Permission denied: 'checkpoints'"


def test_without_an_optimizer_the_model_alone_is_loaded_and_nothing_is_written(tmp_path):
    folder = tmp_path / "run"
    Training(SoloCommunicator(), folder).save(2)
    before = sorted(tmp_path.rglob("*"))
    model = Weights(0)
    checkpoints = Checkpointer(folder, SoloCommunicator(), model, None)
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.step == 2
    for tensor in [*model.parameters(), *model.buffers()]:
        np.testing.assert_array_equal(tensor.data, Training.expected(2, tensor.name, tensor.data))
    with pytest.raises(RuntimeError, match="a Checkpointer without an optimizer loads only"):
        checkpoints.save(3)
    assert sorted(tmp_path.rglob("*")) == before
    assert Checkpointer(tmp_path / "nowhere", SoloCommunicator(), model, None).load() is None
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CheckpointError, match="it has parameter/own 0"):
        Checkpointer(folder, SoloCommunicator(), Weights(0, own=mg.Parameter(np.zeros(2), "other")), None).load()
