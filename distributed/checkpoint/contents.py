"""What this rank has of a model and its optimizer, each tensor under the name that it has in a checkpoint.

parameter/fc0.weight            where it is trained in half precision, the float32 values that its optimizer keeps
buffer/norm.running_mean
optimizer/fc0.weight/...        the state of its rule; a slice where ranks share it out
memory/...                      what belongs to a layout, and begins anew in another one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from distributed.checkpoint.files import DTYPES, CheckpointError
from distributed.checkpoint.plan import Held, Stored, show
from distributed.comm.communicator import Array
from distributed.protocols import HasMemories, HasTensors
from minigrad.backend import beside, to_host
from minigrad.flat_range import TensorSlice
from minigrad.nn import Buffer
from minigrad.optim import Optimizer
from minigrad.parameter import Parameter

OPTIMIZER = "optimizer/"
MEMORY = "memory/"
_SHOWN_FAULTS = 5


class Contents:
    """The tensors of a model, and of its optimizer if there is one.

    Args:
        model, optimizer: see `Checkpointer`.
    """

    def __init__(self, model: HasTensors, optimizer: Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._tensors: list[Parameter | Buffer] = [*dict.fromkeys(model.parameters()), *dict.fromkeys(model.buffers())]
        self._memories = {f"{MEMORY}{b.name}": b for b in (model.memories() if isinstance(model, HasMemories) else ())}

    def fault(self) -> str | None:
        """Say what of it no checkpoint can hold, if there is anything."""
        times = Counter(_name(tensor) for tensor in self._tensors)
        for tensor in self._tensors:
            if not tensor.name or times[_name(tensor)] > 1:
                return f"every tensor of a checkpoint needs a name of its own, {tensor.label} has none"
        for name, part in self._parts().items():
            if str(part.array.dtype) not in DTYPES:
                return f"a checkpoint holds numbers of {', '.join(sorted(DTYPES))}, {name} is {part.array.dtype}"
        own = set(self._tensors)
        for p in self._optimizer.params if self._optimizer is not None else ():
            if p not in own:
                return f"the optimizer must update parameters of the model, {p.label} is not among them"
        return None

    def held(self) -> dict[str, Held]:
        """Return what there is here to save, by name."""
        return {
            name: Held(part.shape, str(part.array.dtype), part.array.nbytes, part.start, part.stop)
            for name, part in self._parts().items()
        }

    def copy(self, keys: Mapping[str, str], copies: Mapping[str, Array]) -> None:
        """Copy tensors to host memory. Collective where the model has memories.

        Args:
            keys: name -> what its copy is called.
            copies: written into.
        """
        packs = self._model if isinstance(self._model, HasMemories) else None
        if packs is not None:
            packs.pack()
        try:
            parts = self._parts()
            for name, key in keys.items():
                copies[key][...] = to_host(parts[name].array)
        finally:
            if packs is not None:
                packs.unpack()  # or the model would go on from what was packed, and the other ranks wait here

    def names(self, *, memories: bool) -> list[str]:
        """Return the names of what `fill` needs, with memories or without."""
        return [*map(_name, self._tensors), *(self._memories if memories else ()), *self._state()]

    def slices(self) -> dict[str, tuple[int, int]]:
        """Return start and stop, in elements, of what is here only as a slice, by name."""
        return {name: (part.start, part.stop) for name, part in self._state().items() if part.array.shape != part.shape}

    def fill(self, values: Mapping[str, Array], num_updates: int, *, memories: bool) -> None:
        """Overwrite all of it. Collective where the model has memories.

        Args:
            values: by the names of `names`.
            num_updates: that the optimizer has made.
            memories: whether `values` has the model's; else they begin anew.
        """
        for tensor in self._tensors:
            tensor.data = beside(tensor.data, values[_name(tensor)])
        if self._optimizer is not None:
            for p, part in self._optimizer.master_slices():
                master = values[_name(p)].reshape(-1)[part.start : part.stop]
                part.array[...] = beside(part.array, master.reshape(part.array.shape))
            for name, part in self._state().items():
                part.array[...] = beside(part.array, values[name].reshape(part.array.shape))
            self._optimizer.num_steps = num_updates
        if not isinstance(self._model, HasMemories):
            return
        if not memories:
            self._model.forget()
            return
        for name, memory in self._memories.items():
            memory.data = beside(memory.data, values[name])
        self._model.unpack()

    def check(self, saved: Mapping[str, Stored], plan: Mapping[str, Stored]) -> None:
        """Check that a checkpoint is of this model and this kind of optimizer.

        Args:
            saved: what is in it, by name.
            plan: what all ranks have.
        Raises:
            CheckpointError: names what is missing, what is too much, and what has another shape or dtype.
        """
        apart = (MEMORY,) if self._optimizer is not None else (MEMORY, OPTIMIZER)
        found, own = (
            {name: show(stored) for name, stored in tensors.items() if not name.startswith(apart)}
            for tensors in (saved, plan)
        )
        faults = [f"it lacks {name}" for name in own if name not in found]
        faults += [f"it has {name}" for name in found if name not in own]
        faults += [
            f"{name} is {found[name]} in it and {own[name]} here"
            for name in own
            if name in found and found[name] != own[name]
        ]
        if faults:
            more = f", and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
            raise CheckpointError(f"it is of another model or optimizer: {', '.join(faults[:_SHOWN_FAULTS])}{more}")

    def _parts(self) -> dict[str, TensorSlice]:
        """Return all that there is here to save, by name."""
        optimizer = self._optimizer
        masters = dict(optimizer.master_slices()) if optimizer is not None else {}
        parts = {}
        for tensor in self._tensors:
            if isinstance(tensor, Buffer) or optimizer is None or optimizer.master_dtype(tensor) is None:
                parts[_name(tensor)] = TensorSlice.whole(tensor.data)
            elif tensor in masters:
                parts[_name(tensor)] = masters[tensor]
        parts |= {name: TensorSlice.whole(memory.data) for name, memory in self._memories.items()}
        return parts | self._state()

    def _state(self) -> dict[str, TensorSlice]:
        """Return likewise what there is here of the optimizer's state."""
        slices = self._optimizer.state_slices() if self._optimizer is not None else ()
        return {OPTIMIZER + name: part for name, part in slices}


def same_memories(saved: Mapping[str, Stored], plan: Mapping[str, Stored]) -> bool:
    """Return whether a checkpoint has just the memories that the ranks of this layout have together.

    Args:
        saved: what is in the checkpoint, by name.
        plan: what all ranks have.
    """
    return _memories(saved) == _memories(plan)


def weights(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters.

    A buffer may be infinite, as masks are; the optimizer's averages follow these.
    """
    return {name: array for name, array in values.items() if name.startswith("parameter/")}


def _memories(tensors: Mapping[str, Stored]) -> dict[str, str]:
    return {name: show(stored) for name, stored in tensors.items() if name.startswith(MEMORY)}


def _name(tensor: Parameter | Buffer) -> str:
    return f"{'parameter' if isinstance(tensor, Parameter) else 'buffer'}/{tensor.name}"
