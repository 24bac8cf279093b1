"""Checkpoints: what a run needs to go on, after a kill at any moment and in any other layout.

A tensor is saved once, under its own name, by one of the ranks that hold it, or in slices, where each rank holds only
one (ZeRO). Which rank that was makes no difference to who loads it: a checkpoint has no layout, so every layout loads
it. `contents.py` says what of it each rank has, `files.py` what lies on the disk.

    checkpoints = Checkpointer("run/checkpoints", comm, model, optimizer)
    loaded = checkpoints.load()                       # None at first
    for step in range(loaded.step if loaded else 0, num_steps):
        ...
        checkpoints.save(step + 1, {"data": batches.state_dict()})
    checkpoints.wait()
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from distributed.agreement import first_failure, of_rank_0
from distributed.checkpoint.contents import Contents, same_memories, weights
from distributed.checkpoint.files import (
    POLL_SECONDS,
    SEEN_SECONDS,
    UNFINISHED,
    CheckpointError,
    Manifest,
    Saving,
    complete,
    not_finite,
    read_manifest,
    read_tensors,
)
from distributed.checkpoint.plan import Stored, divide
from distributed.comm.communicator import Array, Communicator
from distributed.protocols import HasTensors
from minigrad.arguments import as_int
from minigrad.optim import Optimizer

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded.

    Attributes:
        step: number of steps that were done when it was saved.
        state: what the caller gave to `save`.
        path: its folder.
        refused: others that came first and could not be read, each with the reason.
        forgets: what a comm hook keeps between steps began anew, or was left out: it was saved in another layout.
    """

    step: int
    state: dict[str, Any]
    path: Path
    refused: tuple[str, ...] = ()
    forgets: bool = False


class Checkpointer:
    """Saves and loads a model and its optimizer in a folder that all ranks see.

    Making one is collective. Costs a copy of what this rank saves, in host memory, for as long as this object lives.

    Buffers are saved as one of the ranks that hold them has them: where training changes them, call
    `ddp.sync_buffers()` first.

    Args:
        folder: made if it is not there. One run at a time saves in it.
        comm: all ranks of the run, whatever part of the model each holds.
        model: tensors are told apart by name: the same name on two ranks is the same tensor. Its memories, if it has
            any, are loaded where a checkpoint has the same ones, and begin anew elsewhere: see `WithState`.
        optimizer: of the model; None loads the model alone, to evaluate it or to let it write: then nothing is
            written in the folder, and only `load` can be called.
        keep_last: how many checkpoints stay; others are removed once a newer one is complete.
    Raises:
        ValueError: a tensor has no name, or two have the same; a file cannot hold its dtype; the optimizer updates what
            is not in the model; ranks disagree on a tensor's shape or dtype; keep_last is below 1; or some rank does
            not see the folder. The same message on every rank.
    """

    def __init__(
        self,
        folder: str | Path,
        comm: Communicator,
        model: HasTensors,
        optimizer: Optimizer | None,
        *,
        keep_last: int = 3,
    ) -> None:
        self.folder = Path(folder)
        self._comm = comm.duplicate()
        self._keep_last = keep_last
        self._optimizer = optimizer
        self._contents = Contents(model, optimizer)
        self._plan = self._agree()
        self._copies: dict[str, Array] = {}  # what this rank saves, as it is called in its file
        self._saved_here: dict[str, str] = {}  # the tensor's name -> that
        for name, stored in self._plan.items():
            for part in stored.parts:
                if part.rank == self._comm.rank and optimizer is not None:
                    key = self._saved_here[name] = stored.key(name, part)
                    shape = (part.stop - part.start,) if stored.slices else stored.shape
                    self._copies[key] = np.empty(shape, stored.dtype)
        self._saving: Saving | None = None
        self._knows_folder = False  # until what is in it was loaded, or there was nothing, or somebody says so
        if optimizer is not None:
            self._check_folder()

    def save(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Save in the background. Collective.

        On return this rank's part is copied, and training may go on. Where the last save is still being written, this
        waits for it first. Checkpoints of later steps are removed with the oldest: whoever saves step 200 after step
        300 went back.

        Args:
            step: number of steps that are done.
            state: what else the run needs to go on, as JSON can say it; rank 0's is kept.
        Raises:
            CheckpointError: the last save failed, or a weight is infinite or nan: whoever went on from that could only
                fail. The same message on every rank.
            TypeError: state holds what JSON cannot say, such as infinity; the same message on every rank.
            ValueError: step is no integer from 0, or ranks are not at the same step; the same message on every rank.
            RuntimeError: the folder holds a run that was not loaded, and that nobody called this run's own: saving
                would replace it. Or there is no optimizer, and nobody could go on from what was saved.
        """
        if self._optimizer is None:
            raise RuntimeError("a Checkpointer without an optimizer loads only: nobody could go on from what it saved")
        said, failure = _as_json(state or {})
        failure = first_failure(self._comm, failure)
        if failure is not None:
            raise TypeError(failure)
        num_updates = self._optimizer.num_steps
        counts = self._comm.gather_objects((step, num_updates))
        steps = [as_int(each) for each, _ in counts]
        if len(set(counts)) > 1 or any(each is None or each < 0 for each in steps):
            raise ValueError(f"all ranks must save one step, at least 0; (step, optimizer.num_steps) by rank: {counts}")
        self.wait()
        if not self._knows_folder:
            found = self._of_rank_0(lambda: complete(self.folder))
            if found:
                raise RuntimeError(f"{self.folder} holds {found[0].name} already: call load() first, or save elsewhere")
            self._knows_folder = True
        self._contents.copy(self._saved_here, self._copies)
        wrong = not_finite(weights(self._copies))
        failure = first_failure(self._comm, wrong and f"{wrong} is not finite, so step {step} is not saved")
        if failure is not None:
            raise CheckpointError(failure)
        save = self._of_rank_0(lambda: secrets.token_hex(8))
        manifest = Manifest(int(step), num_updates, save, self._plan, said)
        self._saving = Saving(self.folder, self._comm.rank, self._copies, manifest, keep_last=self._keep_last)

    def wait(self) -> None:
        """Block until the last save is complete. Collective; call it before the run ends.

        Raises:
            CheckpointError: a rank could not write; the same message on every rank. Older checkpoints are still there.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        # Rank 0 commits once the parts of all ranks are there. If one failed it would wait for ever.
        error = first_failure(self._comm, saving.wait_for_part()) or first_failure(self._comm, saving.wait())
        if error is not None:
            saving.cancel()
            raise CheckpointError(error)

    def own_folder(self) -> None:
        """Take the checkpoints that there are for this run's own.

        It is for a run that loaded none, as it has its state from elsewhere: from ranks that live, after a death. Not
        collective, but all ranks call it.
        """
        self._knows_folder = True

    def abandon(self) -> None:
        """Give up the save that is under way, where ranks that took part have died.

        Not collective.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.cancel()

    def load(self, path: str | Path | None = None) -> Checkpoint | None:
        """Load into the model and the optimizer, all or nothing. Collective.

        Args:
            path: one checkpoint, of this folder or another. By default the one that `latest` names, or else the newest
                that can be read.
        Returns:
            What else was saved. None where there is no checkpoint, and no path was given.
        Raises:
            CheckpointError: `path`, or every one that there is, is torn, changed, of a newer version, or of another
                model; says of each what is wrong. Or the disk fails: then no older one is tried, since a good one may
                be readable again a moment later. The same message on every rank.
        """
        self.wait()
        refused: list[str] = []
        candidates = self._of_rank_0(lambda: complete(self.folder) if path is None else [Path(path)])
        for candidate in candidates:
            manifest, values, error, failure = self._read(candidate)
            failure = first_failure(self._comm, failure)
            if failure is not None:
                raise CheckpointError(failure)
            error = first_failure(self._comm, error)
            if error is not None:
                refused.append(f"{candidate}: {error}")
                continue
            assert manifest is not None
            has_memories = same_memories(manifest.tensors, self._plan)
            self._contents.fill(values, manifest.num_updates, memories=has_memories)
            self._knows_folder |= candidate.resolve().parent == self.folder.resolve()
            return Checkpoint(manifest.step, manifest.state, candidate, tuple(refused), forgets=not has_memories)
        if refused:
            head = f"no checkpoint in {self.folder} can be loaded:\n" if path is None else ""
            raise CheckpointError(head + "\n".join(refused))
        return None

    def _agree(self) -> dict[str, Stored]:
        """Agree on what there is and on who saves it."""
        fault = self._contents.fault()
        if self._keep_last < 1:
            fault = f"keep_last must be at least 1, got {self._keep_last}"
        failure = first_failure(self._comm, fault)
        if failure is not None:
            raise ValueError(failure)
        return divide(self._comm.gather_objects(self._contents.held()))

    def _check_folder(self) -> None:
        """Check that all ranks see one folder: parts in a folder of each host would never become a checkpoint."""
        mark = self.folder / self._of_rank_0(lambda: f"{UNFINISHED}{secrets.token_hex(8)}")
        failure = None
        if self._comm.rank == 0:
            try:
                mark.mkdir(parents=True)
            except OSError as error:
                failure = f"checkpoints cannot be saved in {self.folder}: {error}"
        failure = first_failure(self._comm, failure)
        if failure is None:
            unseen = f"all ranks must see the folder of checkpoints, but what rank 0 makes in {self.folder} is not seen"
            failure = first_failure(self._comm, None if _is_seen(mark) else unseen)
        if self._comm.rank == 0:
            shutil.rmtree(mark, ignore_errors=True)
        if failure is not None:
            raise ValueError(failure)

    def _read(self, checkpoint: Path) -> tuple[Manifest | None, dict[str, Array], str | None, str | None]:
        """Read this rank's tensors; return them, or what is wrong with the checkpoint, or with the disk."""
        try:
            manifest = read_manifest(checkpoint)
            self._contents.check(manifest.tensors, self._plan)
            names = self._contents.names(memories=same_memories(manifest.tensors, self._plan))
            values = read_tensors(checkpoint, manifest, names, self._contents.slices())
            wrong = not_finite(weights(values))
            return manifest, values, wrong and f"{wrong} is not finite in it", None
        except CheckpointError as error:
            return None, {}, str(error), None
        except OSError as error:
            return None, {}, None, f"{checkpoint} cannot be read now: {error}"

    def _of_rank_0(self, make: Callable[[], T]) -> T:
        """Return what rank 0 makes, on every rank, or raise the same CheckpointError on all."""
        return of_rank_0(self._comm, make, failing=CheckpointError)


def _is_seen(folder: Path) -> bool:
    """Wait until a folder that another rank made is there, and give up when it would long be."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not os.path.isdir(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _as_json(state: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a state as it will be when it is loaded, or what is wrong with it."""
    try:
        return json.loads(json.dumps(dict(state), allow_nan=False)), None
    except (TypeError, ValueError, RecursionError) as error:
        return {}, f"the state of a checkpoint must be what JSON can say: {error}"
