"""Pipelines of models on a GPU, for every schedule: two ranks that share one card, or have one each.

python -m pytest -m gpu tests                                  threads on one card, messages by way of the host
mpirun -n 2 python -m pytest -m "mpi and gpu" tests            processes
mpirun -n 2 python -m pytest -m "mpi and gpu" --nccl tests     processes with a card each, messages through NCCL
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_pipeline import unet

import minigrad as mg
from distributed import NormOverRanks, SoloCommunicator
from minigrad.backend import place, to_device, to_host
from minigrad.cuda_graph import CapturedStep
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import use_precision
from pipeline import SCHEDULES, PipelineExecutor, PipelineStage, cut_by_sizes

cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]

CONFIG = gpt.GPTConfig(vocab_size=32, context=16, num_layers=6, num_heads=2, width=32)
IDS = np.random.default_rng(0).integers(0, 32, (5, 8, 17))
NUM_MICROBATCHES = 4


class Training:
    """A pipeline on the GPU, or on the CPU in one process.

    Args:
        sizes: layers a stage, of blocks in halves; by default as many whole blocks as another.
    """

    def __init__(
        self, comm: Any, schedule: str, precision: str, device: str = "cuda", sizes: list[int] | None = None
    ) -> None:
        order, layers = SCHEDULES[schedule], gpt.layers(CONFIG, half_blocks=sizes is not None)
        specs = cut_by_sizes([name for name, _ in layers], sizes) if sizes is not None else None
        self.stages = PipelineStage.of(layers, comm, order, specs=specs, device=device)
        self.pipe = PipelineExecutor(
            self.stages, comm, order, num_microbatches=NUM_MICROBATCHES, loss_fn=mg.cross_entropy
        )
        self.optimizer = Optimizer(
            self.stages.parameters(), AdamW(1e-2, eps=1e-4), max_norm=0.5, norm_over=NormOverRanks(self.stages)
        )
        use_precision(self.stages.parameters(), precision)

    def step(self, x: Any, y: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.pipe.step_on_device(x, y)
        self.optimizer.step()
        return loss

    def values(self) -> dict[str, Any]:
        return {p.name: to_host(p.data) for p in self.stages.parameters()}

    def run(self, step: Any, place: Any = to_device) -> tuple[list[float], dict[str, Any]]:
        losses = [float(step(place(ids[:, :-1].copy()), place(ids[:, 1:].copy()))) for ids in IDS]
        return losses, self.values()


@pytest.mark.parametrize("sizes", [None, [6, 8]], ids=["between blocks", "within a block"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_cut_into_stages_shows_in_no_bit(ranks: Any, precision: str, sizes: list[int] | None) -> None:
    def gradients(comm: Any, sizes: list[int] | None = None) -> dict[str, bytes]:
        training = Training(comm, "1f1b", precision, sizes=sizes)
        training.pipe.step_on_device(to_device(IDS[0][:, :-1].copy()), to_device(IDS[0][:, 1:].copy()))
        return {p.name: to_host(p.grad).tobytes() for p in training.stages.parameters()}

    whole = gradients(SoloCommunicator())
    cut = {name: grad for part in ranks.run(gradients, sizes) for name, grad in part.items()}
    tied = "embed.token.weight"  # is added up over stages, in another order
    assert cut | {tied: b""} == whole | {tied: b""}


@pytest.mark.parametrize(
    ("schedule", "precision"),
    [(schedule, "float32") for schedule in SCHEDULES] + [(s, "bfloat16") for s in ("1f1b", "zero_bubble_h1", "zbv")],
)
def test_a_pipeline_on_a_gpu_trains_as_one_process_on_a_cpu(ranks: Any, schedule: str, precision: str) -> None:
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    alone = Training(SoloCommunicator(), "1f1b", "float32", "cpu")
    losses, values = alone.run(alone.step, place=lambda x: x)
    loss_tolerance, tolerance = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 5e-2)}[precision]

    def program(comm: Any) -> None:
        own = Training(comm, schedule, precision)
        found, own_values = own.run(own.step)
        np.testing.assert_allclose(found, losses, rtol=loss_tolerance)
        for name, value in own_values.items():
            np.testing.assert_allclose(value, values[name], rtol=tolerance, atol=tolerance, err_msg=name)

    ranks.run(program)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skip_connections_on_a_gpu_train_as_one_process_on_a_cpu(ranks: Any, schedule: str) -> None:
    """What goes over stages goes there on the GPU too, its gradient comes back, and forwards beside backwards run."""

    def trained(comm: Any, schedule: str, device: str) -> tuple[list[float], dict[str, Any]]:
        generator, order = np.random.default_rng(0), SCHEDULES[schedule]
        stages = PipelineStage.of(unet(), comm, order, device=device)
        pipe = PipelineExecutor(stages, comm, order, num_microbatches=NUM_MICROBATCHES, loss_fn=mg.mse)
        optimizer, losses = Optimizer(stages.parameters(), AdamW(1e-2, eps=1e-4)), []
        for _ in range(4):
            x, y = (place(generator.standard_normal((9, n)).astype(np.float32), device) for n in (4, 5))
            optimizer.zero_grad()
            losses.append(float(pipe.step_on_device(x, y)))
            optimizer.step()
        return losses, {p.name: to_host(p.data) for p in stages.parameters()}

    losses, values = trained(SoloCommunicator(), "1f1b", "cpu")

    def program(comm: Any) -> None:
        found, own_values = trained(comm, schedule, "cuda")
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, value in own_values.items():
            np.testing.assert_allclose(value, values[name], rtol=1e-4, atol=1e-4, err_msg=name)

    ranks.run(program)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_captured_step_of_a_pipeline_is_the_step(ranks: Any, schedule: str) -> None:
    """Bit for bit, messages inside: where these go through NCCL."""

    def program(comm: Any) -> None:
        if "NCCL" not in comm.library:
            return
        eager, graph = (Training(comm, schedule, "bfloat16") for _ in range(2))
        captured = CapturedStep(graph.step, graph.optimizer, gather=comm.gather_objects)
        losses, values = eager.run(eager.step)
        graph_losses, graph_values = graph.run(captured)
        assert losses == graph_losses
        for name, value in values.items():
            np.testing.assert_array_equal(graph_values[name], value, err_msg=name)
        captured.clear()

    ranks.run(program)
