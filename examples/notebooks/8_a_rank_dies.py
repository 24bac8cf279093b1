# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. A rank dies
#
# A step is a pure function of the weights, the optimizer's state, its number and its samples. So ranks that live can do
# a step again that one of them died in.
#
# **Does the loss tell that a rank was killed?**

# %%
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt

plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}

# %% [markdown]
# ## A loop whose ranks may die
#
# Four things differ from an ordinary loop. The world survives a death. What depends on the ranks is made by `build`,
# again after each death. The loop goes over attempts: one that meets a death ends, and the step is attempted again. And
# the optimizer steps in `commit`, once all ranks have agreed that everything the step needs of others is done.
#
# A rank tells each thing in a line of JSON. What recovery has to `say` is told by one of those that live, as soon as a
# death is seen, and once more when all have healed. A rank that is to be killed tells its process number in the midst
# of a step, its gradients under way to the other one, and waits for the kill.

# %%
TRAIN = """
import json, os, sys, time
from types import SimpleNamespace
import numpy as np
import minigrad as mg
from distributed import DistributedDataParallel, world
from distributed.data import Sampler
from distributed.recovery import recovering
from minigrad.models import MLP
from minigrad.optim import AdamW, Optimizer

random = np.random.default_rng(0)
x = random.normal(size=(600, 2))
y = (x[:, 0] * x[:, 1] > 0).astype(int)


def build(comm):
    model = MLP([2, 32, 2])
    return SimpleNamespace(
        model=model,
        ddp=DistributedDataParallel(model, comm),
        optimizer=Optimizer(model.parameters(), AdamW(lr=1e-2)),
        data=Sampler(len(x), batch_size=60, seed=0, rank=comm.rank, size=comm.size),
    )


def tell(**what):
    print(json.dumps(what), flush=True)


def wait_for_the_kill(step, rank):
    mark = f"step {step} rank {rank}"
    if [step, rank] in json.loads(sys.argv[1]) and not os.path.exists(mark):  # else this one has taken its place
        open(mark, "w").close()
        tell(pid=os.getpid())
        time.sleep(60)


comm = world(survive=True, deterministic=True)
for attempt in recovering(comm, build, num_steps=300, say=lambda line: tell(said=line)):
    if attempt.recovery is not None and attempt.comm.rank == 0:
        tell(said=str(attempt.recovery))
    with attempt as training:
        chosen = training.data.next()
        training.optimizer.zero_grad()
        loss = mg.cross_entropy(training.model(x[chosen]), y[chosen])
        mg.backward_with_hooks(loss, training.ddp.hooks(num_samples=len(chosen)))
        wait_for_the_kill(attempt.step, attempt.comm.rank)
        training.ddp.wait()
        mean = training.ddp.mean(loss.item())
        attempt.commit()
    if attempt.committed and attempt.comm.rank == 0:
        tell(step=attempt.step, loss=mean)
"""
folder = Path(mkdtemp())

# %% [markdown]
# ## Train, and kill
#
# `python -m distributed.recovery` is `mpirun` with what surviving needs. This cell kills by `kill -9`: rank 1 in step
# 40, and rank 0 in step 90.

# %%
(folder / "train.py").write_text(TRAIN)
environ = os.environ | {"OMPI_MCA_osc": "^ucx"}  # a part of Open MPI that complains where there is no network card
KILLS = [(40, 1), (90, 0)]  # step, rank


def train(kills):
    """Return the losses by step."""
    command = [sys.executable, "-m", "distributed.recovery", "-n", "2", "train.py", json.dumps(kills)]
    losses = {}
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            said = json.loads(line.replace("\0", ""))
            if "pid" in said:
                os.kill(said["pid"], signal.SIGKILL)
            elif "said" in said:
                print(said["said"])
            else:
                assert said["step"] not in losses, "each step is done once"
                losses[said["step"]] = said["loss"]
    assert job.returncode == 0, "mpirun is needed: `make setup` brings one"
    return dict(sorted(losses.items()))  # each rank has a terminal of its own, and lines may pass each other


undisturbed = train(kills=[])
disturbed = train(kills=KILLS)

# %% [markdown]
# ## The loss goes on as if nothing had happened

# %%
plt.figure(figsize=(7.5, 2.8), layout="constrained")
plt.plot(undisturbed.keys(), undisturbed.values(), linewidth=4, color="0.8", label="nobody is killed")
plt.plot(disturbed.keys(), disturbed.values(), linewidth=1, color="black", label="two ranks are")
for step, rank in KILLS:
    plt.axvline(step, color="crimson", linestyle=":")
    plt.text(step + 1, 0.62, f"kill -9 rank {rank}", color="crimson")
plt.xlabel("step")
plt.ylabel("loss")
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# Not about as well: to the last bit. Sums are taken in rank order (`deterministic=True`), and a new process takes the
# place of the dead one, so every step adds up the same numbers in the same order.

# %%
assert disturbed == undisturbed
print(f"{len(disturbed)} losses, all equal")
shutil.rmtree(folder)

# %% [markdown]
# ## Things to try
#
# - Kill both ranks in one step: the launcher starts the job again, from the beginning, as there is no checkpoint here.
#   The losses are the same, but some steps are done twice, so take the check of `train` out.
# - `recovering(..., heal=Heal.SHRINK)`: one rank goes on alone. Its sums have another order: how large is the
#   difference?
# - Start three ranks with `heal=Heal.SPARES, num_spares=1`: the third waits, and steps in within milliseconds.
