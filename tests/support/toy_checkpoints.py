"""A model whose numbers say which step they are from, for tests of checkpoints."""

import numpy as np

import minigrad as mg
from distributed.checkpoint.checkpointer import Checkpointer
from minigrad.nn import Buffer, Module
from minigrad.optim import AdamW, Optimizer


class Weights(Module):
    """What a rank of a pipeline holds: parameters and a buffer of its own, and some that all ranks hold."""

    def __init__(self, rank, **extra):
        self.shared = mg.Parameter(np.zeros((4, 3)), "shared")
        self.scale = mg.Parameter(np.zeros(()), "scale")
        self.own = mg.Parameter(np.zeros((2, 5), np.float32), f"own {rank}")
        self.mean = Buffer(np.zeros(3), "mean")
        self.mask = Buffer(np.zeros(2, bool), f"mask {rank}")
        for name, value in extra.items():
            vars(self).pop(name, None)  # assigning to a buffer would copy into it
            setattr(self, name, value)

    def everything(self, optimizer):
        arrays = {tensor.name: tensor.data for tensor in [*self.parameters(), *self.buffers()]}
        return arrays | dict(optimizer.state_arrays()) | {"num_steps": np.array(optimizer.num_steps)}


class Training:
    """A rank's model, optimizer and checkpointer; `at(step)` puts every number to what that step would leave."""

    def __init__(self, comm, folder, *, rule=None, keep_last=3, **extra):
        self.comm = comm
        self.model = Weights(comm.rank, **extra)
        self.optimizer = Optimizer(self.model.parameters(), rule or AdamW(0.1))
        self.checkpoints = Checkpointer(folder, comm, self.model, self.optimizer, keep_last=keep_last)

    def at(self, step):
        """Set every element to a number that depends on the step, the tensor and the place."""
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            tensor.data = self.expected(step, tensor.name, tensor.data)
        for name, array in self.optimizer.state_arrays():
            array[...] = self.expected(step, name, array)
        self.optimizer.num_steps = 10 * step
        return self

    @staticmethod
    def expected(step, name, array):
        seed = [step, *name.encode()]
        return np.random.default_rng(seed).standard_normal(array.shape).astype(array.dtype)

    def check(self, step):
        """Check that every number is the one that `at(step)` sets."""
        arrays = self.model.everything(self.optimizer)
        assert arrays.pop("num_steps") == 10 * step
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, self.expected(step, name, array), err_msg=name)

    def save(self, *steps):
        """Save these steps, each with a state that says which it is."""
        for step in steps:
            self.at(step).checkpoints.save(step, {"step": step})
            self.checkpoints.wait()
        return self


def names(folder):
    return sorted(path.name for path in folder.iterdir())
