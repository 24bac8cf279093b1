"""What Linux has and other systems lack is done without: glibc's allocator, a process's cores, /dev/shm."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, pathlib, sys
import numpy as np

sys.platform = "darwin"  # from here on; NumPy is told nothing
del os.sched_getaffinity
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path: not str(path).startswith(("/proc", "/dev/shm")) and exists(path)
ctypes.CDLL = None

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, describe, world
from minigrad.models import MLP
from minigrad.optim import AdamW, Optimizer

print(describe(world()))

def program(comm):
    model = MLP([4, 8, 2])
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), AdamW(lr=0.1))
    for _ in range(20):
        optimizer.zero_grad()
        x = np.random.default_rng(comm.rank).standard_normal((8, 4)).astype(np.float32)
        loss = mg.cross_entropy(model(x), (x[:, 0] > 0).astype(np.int64))
        mg.backward_with_hooks(loss, ddp.hooks(num_samples=8))
        ddp.wait()
        optimizer.step()
    return ddp.mean(loss.item())

assert LocalWorld(2).run(program)[0] < 0.3
"""


def test_a_training_step_needs_nothing_that_linux_alone_has() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 rank, no MPI, 1 thread, cpu"), result.stdout
