"""bfloat16 in every layout: masters and gradients in float32, activations between stages in bfloat16."""

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, LocalWorld, Mesh
from minigrad.models import gpt
from minigrad.optim import SGD, Optimizer
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage
from pipeline.runtime.boundary import ArraySpec

ml_dtypes = pytest.importorskip("ml_dtypes")

CONFIG = gpt.GPTConfig(vocab_size=17, context=6, num_layers=4, num_heads=2, width=16)
IDS = np.random.default_rng(0).integers(0, 17, (8, 7))


def trained(comm, schedule="1f1b", *, dp=1, pp=1, microbatches=1):
    """Return the losses of three steps and this rank's parameters after them."""
    mesh = Mesh(comm, dp=dp, pp=pp)
    schedule = SCHEDULES[schedule]
    stages = PipelineStage.of(gpt.layers(CONFIG), mesh.pp, schedule)
    ddp = DistributedDataParallel(stages, mesh.dp)
    optimizer = Optimizer(stages.parameters(), SGD(0.1))
    use_precision(stages.parameters(), "bfloat16")
    pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=microbatches, loss_fn=mg.cross_entropy)
    own = np.array_split(IDS, dp)[mesh.dp.rank]
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = pipe.step(own[:, :-1], own[:, 1:], hooks=ddp.hooks(num_samples=len(own)))
        ddp.wait()
        optimizer.step()
        losses.append(ddp.mean(loss))
    assert all(p.data.dtype == p.grad.dtype == np.float32 for p in stages.parameters())
    return losses, {p.name: p.data.copy() for p in stages.parameters()}


@pytest.mark.parametrize(
    ("schedule", "dp", "pp", "microbatches"),
    [("1f1b", 2, 1, 1), ("1f1b", 1, 2, 4), ("zbv", 1, 2, 4), ("gpipe", 2, 2, 2)],
)
def test_a_layout_trains_as_one_process_does(schedule, dp, pp, microbatches):
    ((expected, values),) = LocalWorld(1).run(trained)
    layout = LocalWorld(dp * pp).run(lambda comm: trained(comm, schedule, dp=dp, pp=pp, microbatches=microbatches))
    for losses, own in layout:
        np.testing.assert_allclose(losses, expected, rtol=2e-3)
        for name, value in own.items():
            np.testing.assert_allclose(value, values[name], rtol=0.02, atol=2e-3, err_msg=name)


def test_a_spec_of_bfloat16_travels():
    spec = ArraySpec((2, 3), np.dtype(ml_dtypes.bfloat16))
    assert ArraySpec.decode(spec.encode()) == spec
