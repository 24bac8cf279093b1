"""Checkpoints: what a run needs to go on, after a kill at any moment and in any other layout.

A tensor is saved once, under its own name, by one of the ranks that hold it, or in slices, where each rank holds only
one (ZeRO). Which rank that was makes no difference to who loads it: a checkpoint has no layout, so every layout loads
it. `files.py` says what lies on the disk.

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
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from distributed.agreement import first_failure, of_rank_0
from distributed.checkpoint.files import (
    DTYPES,
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
from distributed.checkpoint.plan import Held, Stored, divide, show
from distributed.comm.communicator import Array, Communicator
from distributed.protocols import HasMemories, HasTensors
from minigrad.backend import place, to_host, xp_of
from minigrad.flat import TensorSlice
from minigrad.nn import Buffer
from minigrad.optim import Optimizer
from minigrad.parameter import Parameter

T = TypeVar("T")

OPTIMIZER = "optimizer/"  # before the names of its state
_SHOWN_FAULTS = 5
_MEMORY = "memory/"  # how the names of what belongs to a layout begin


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
    """Saves and loads a model and its optimizer in a folder that all ranks see. Making one is collective.

    Costs a copy of what this rank saves, in host memory, for as long as this object lives.

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
        self._tensors: list[Parameter | Buffer] = [*dict.fromkeys(model.parameters()), *dict.fromkeys(model.buffers())]
        self._model = model
        self._memories = {f"{_MEMORY}{b.name}": b for b in (model.memories() if isinstance(model, HasMemories) else ())}
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
        """Save in the background: on return this rank's part is copied, and training may go on. Collective.

        Where the last save is still being written, this waits for it first. Checkpoints of later steps are removed with
        the oldest: whoever saves step 200 after step 300 went back.

        Args:
            step: number of steps that are done.
            state: what else the run needs to go on, as JSON can say it; rank 0's is kept.
        Raises:
            CheckpointError: the last save failed, or a weight is infinite or nan: whoever went on from that could only
                fail. The same message on every rank.
            TypeError: state holds what JSON cannot say, such as infinity; the same message on every rank.
            ValueError: step is negative, or ranks are not at the same step; the same message on every rank.
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
        if step < 0 or len(set(counts)) > 1:
            raise ValueError(f"all ranks must save one step, at least 0; (step, optimizer.num_steps) by rank: {counts}")
        self.wait()
        if not self._knows_folder:
            found = self._of_rank_0(lambda: complete(self.folder))
            if found:
                raise RuntimeError(f"{self.folder} holds {found[0].name} already: call load() first, or save elsewhere")
            self._knows_folder = True
        self._copy()
        wrong = not_finite(_weights(self._copies))
        failure = first_failure(self._comm, wrong and f"{wrong} is not finite, so step {step} is not saved")
        if failure is not None:
            raise CheckpointError(failure)
        save = self._of_rank_0(lambda: secrets.token_hex(8))
        manifest = Manifest(int(step), num_updates, save, self._plan, said)
        self._saving = Saving(self.folder, self._comm.rank, self._copies, manifest, keep_last=self._keep_last)

    def _copy(self) -> None:
        """Copy what this rank saves."""
        packs = self._model if isinstance(self._model, HasMemories) else None
        if packs is not None:
            packs.pack()
        held = self._held()
        for name, key in self._saved_here.items():
            self._copies[key][...] = to_host(held[name].array)
        if packs is not None:
            packs.unpack()

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
        """Take the checkpoints that there are for this run's own, though none was loaded. Not collective; on all ranks.

        For a run that has its state from elsewhere: from ranks that live, after a death.
        """
        self._knows_folder = True

    def abandon(self) -> None:
        """Give up the save that is under way, where ranks have died that took part in it. Not collective."""
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
            self._fill(manifest, values)
            self._knows_folder |= candidate.resolve().parent == self.folder.resolve()
            forgets = not self._has_memories(manifest)
            return Checkpoint(manifest.step, manifest.state, candidate, tuple(refused), forgets)
        if refused:
            head = f"no checkpoint in {self.folder} can be loaded:\n" if path is None else ""
            raise CheckpointError(head + "\n".join(refused))
        return None

    def _held(self) -> dict[str, TensorSlice]:
        """Return all that this rank has to save, by the name that it has in a checkpoint."""
        optimizer = self._optimizer
        masters = dict(optimizer.master_slices()) if optimizer is not None else {}
        held = {}
        for tensor in self._tensors:
            if isinstance(tensor, Buffer) or optimizer is None or not optimizer.has_master(tensor):
                held[_name(tensor)] = TensorSlice.whole(tensor.data)
            elif tensor in masters:
                held[_name(tensor)] = masters[tensor]
        held |= {name: TensorSlice.whole(memory.data) for name, memory in self._memories.items()}
        return held | self._state()

    def _state(self) -> dict[str, TensorSlice]:
        """Return likewise what there is here of the optimizer's state."""
        slices = self._optimizer.state_slices() if self._optimizer is not None else ()
        return {OPTIMIZER + name: part for name, part in slices}

    def _agree(self) -> dict[str, Stored]:
        """Agree on what there is and on who saves it."""
        failure = first_failure(self._comm, self._fault())
        if failure is not None:
            raise ValueError(failure)
        held = {
            name: Held(part.shape, str(part.array.dtype), part.array.nbytes, part.start, part.stop)
            for name, part in self._held().items()
        }
        return divide(self._comm.gather_objects(held))

    def _fault(self) -> str | None:
        """Say what is wrong with what this rank was given."""
        if self._keep_last < 1:
            return f"keep_last must be at least 1, got {self._keep_last}"
        times = Counter(_name(tensor) for tensor in self._tensors)
        for tensor in self._tensors:
            if not tensor.name or times[_name(tensor)] > 1:
                return f"every tensor of a checkpoint needs a name of its own, {tensor.label} has none"
        for name, held in self._held().items():
            if str(held.array.dtype) not in DTYPES:
                return f"a checkpoint holds numbers of {', '.join(sorted(DTYPES))}, {name} is {held.array.dtype}"
        own = set(self._tensors)
        for p in self._optimizer.params if self._optimizer is not None else ():
            if p not in own:
                return f"the optimizer must update parameters of the model, {p.label} is not among them"
        return None

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
            self._check_model(manifest)
            state = self._state()
            slices = {name: (part.start, part.stop) for name, part in state.items() if part.array.shape != part.shape}
            memories = self._memories if self._has_memories(manifest) else ()
            values = read_tensors(checkpoint, manifest, [*map(_name, self._tensors), *memories, *state], slices)
            wrong = not_finite(_weights(values))
            return manifest, values, wrong and f"{wrong} is not finite in it", None
        except CheckpointError as error:
            return None, {}, str(error), None
        except OSError as error:
            return None, {}, None, f"{checkpoint} cannot be read now: {error}"

    def _has_memories(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint has the memories of this layout, of all ranks, and no others."""
        saved, own = (
            {name: show(stored) for name, stored in tensors.items() if name.startswith(_MEMORY)}
            for tensors in (manifest.tensors, self._plan)
        )
        return saved == own

    def _check_model(self, manifest: Manifest) -> None:
        """Check that a checkpoint is of this model and this kind of optimizer."""
        apart = (_MEMORY,) if self._optimizer is not None else (_MEMORY, OPTIMIZER)
        saved, own = (
            {name: stored for name, stored in tensors.items() if not name.startswith(apart)}
            for tensors in (manifest.tensors, self._plan)
        )
        faults = [f"it lacks {name}" for name in own if name not in saved]
        faults += [f"it has {name}" for name in saved if name not in own]
        faults += [
            f"{name} is {show(saved[name])} in it and {show(own[name])} here"
            for name in own
            if name in saved and show(saved[name]) != show(own[name])
        ]
        if faults:
            more = f", and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
            raise CheckpointError(f"it is of another model or optimizer: {', '.join(faults[:_SHOWN_FAULTS])}{more}")

    def _fill(self, manifest: Manifest, values: Mapping[str, Array]) -> None:
        for tensor in self._tensors:
            tensor.data = _beside(tensor.data, values[_name(tensor)])
        if self._optimizer is not None:
            self._fill_optimizer(self._optimizer, manifest, values)
        if not isinstance(self._model, HasMemories):
            return
        if not self._has_memories(manifest):
            self._model.forget()
            return
        for name, memory in self._memories.items():
            memory.data = _beside(memory.data, values[name])
        self._model.unpack()

    def _fill_optimizer(self, optimizer: Optimizer, manifest: Manifest, values: Mapping[str, Array]) -> None:
        for p, held in optimizer.master_slices():
            master = values[_name(p)].reshape(-1)[held.start : held.stop]
            held.array[...] = _beside(held.array, master.reshape(held.array.shape))
        for name, held in self._state().items():
            held.array[...] = _beside(held.array, values[name].reshape(held.array.shape))
        optimizer.num_steps = manifest.num_updates

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


def _weights(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters. A buffer may be infinite, as masks are; the optimizer's averages follow these."""
    return {name: array for name, array in values.items() if name.startswith("parameter/")}


def _name(tensor: Parameter | Buffer) -> str:
    return f"{'parameter' if isinstance(tensor, Parameter) else 'buffer'}/{tensor.name}"


def _beside(place_of: Array, values: Array) -> Array:
    """Return values where an array is: on its GPU or on the host."""
    return place(values, "cpu" if xp_of(place_of) is np else "cuda")
