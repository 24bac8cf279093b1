"""Small layers, schedules and batches for tests of pipelines, and the gradients that one process has."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import minigrad as mg
from distributed import Communicator
from minigrad import Hooks, nn
from minigrad.backend import Array
from minigrad.nn import LayerFactory, Module, ParamGetter
from pipeline import BW, SCHEDULES, Action, B, F, PipelineExecutor, PipelineStage, Schedule, W
from pipeline.schedules.action import Placement

Layer = tuple[str, LayerFactory]
LossFn = Callable[[mg.Tensor, Array], mg.Tensor]

X = np.random.default_rng(0).standard_normal((7, 4))
Y = np.random.default_rng(1).standard_normal((7, 2))


def constant(value: float) -> nn.init.Init:
    return lambda generator, shape: np.full(shape, float(value))


class _Dense(Module):
    def __init__(self, param: ParamGetter, num_in: int, num_out: int) -> None:
        self.linear = nn.Linear(param, num_in, num_out)

    def __call__(self, x: Any) -> mg.Tensor:
        return mg.tanh(self.linear(x))


class _Scale(Module):
    def __init__(self, param: ParamGetter, name: str, shape: tuple[int, ...], value: float) -> None:
        self.scale = param(name, shape, constant(value))

    def __call__(self, x: Any) -> mg.Tensor:
        return x * self.scale


class _ScalePositive(_Scale):
    def __call__(self, x: Any) -> Any:
        data = x.data if isinstance(x, mg.Tensor) else x
        return x * self.scale if data.sum() > 0 else x


class _Holds(Module):
    """Holds a parameter that it does not use."""

    def __init__(self, param: ParamGetter, name: str, shape: tuple[int, ...]) -> None:
        self.unused = param(name, shape, constant(1))

    def __call__(self, x: Any) -> Any:
        return x


def dense(name: str, num_in: int, num_out: int) -> Layer:
    """tanh(x @ w + b)."""
    return name, lambda param: _Dense(param.at(name), num_in, num_out)


def scale(name: str, value: float = 2.0, *, shape: tuple[int, ...] = (), shared: str | None = None) -> Layer:
    """x * w, with the parameter called `shared` where it is tied."""
    return name, lambda param: _Scale(param.tied if shared else param, shared or name, shape, value)


def scale_positive(name: str, value: float = 2.0) -> Layer:
    """x * w for micro-batches with a positive sum; the others pass through."""
    return name, lambda param: _ScalePositive(param, name, (), value)


def holds(name: str, shared: str, shape: tuple[int, ...] = ()) -> Layer:
    """x, beside a tied parameter that this layer does not use."""
    return name, lambda param: _Holds(param.tied, shared, shape)


def apply(name: str, function: Callable[[Any], Any]) -> Layer:
    """function(x), without a parameter."""
    return name, lambda param: function


class _Join(Module):
    def __init__(self, param: ParamGetter, num_in: int, num_out: int, num_skips: int) -> None:
        self.linear = nn.Linear(param, num_in, num_out)
        self.scales = [param(f"scale{i}", (num_out,), constant(0.5 + i)) for i in range(num_skips)]

    def __call__(self, x: Any, *skips: Any) -> mg.Tensor:
        y = self.linear(x)
        for skip, factor in zip(skips, self.scales, strict=True):
            y = y + skip * factor
        return mg.tanh(y)


def join(name: str, num_in: int, num_out: int, *names: str) -> Layer:
    """tanh(x @ w + b + skip * v + ...), with skip connections of these names."""
    return name, nn.takes(lambda param: _Join(param.at(name), num_in, num_out, len(names)), *names)


def giving(layer: Layer, name: str) -> Layer:
    """Return a layer whose output later layers can take."""
    return layer[0], nn.gives(layer[1], name)


def unet() -> list[Layer]:
    """Eight layers from 4 to 5 values a sample; one output is taken twice, one once, one by the next layer."""
    return [
        giving(dense("down0", 4, 5), "a"),
        giving(dense("down1", 5, 6), "b"),
        giving(dense("mid0", 6, 6), "c"),
        join("mid1", 6, 6, "c"),
        join("up1", 6, 5, "a"),
        dense("up2", 5, 6),
        join("up3", 6, 6, "b"),
        join("up4", 6, 5, "a"),
    ]


def mean(output: mg.Tensor, y: Array) -> mg.Tensor:
    """A loss that ignores its targets."""
    return output.mean()


def gradients_in_one_process(
    layers: Sequence[Layer], x_parts: Sequence[Array], y_parts: Sequence[Array], loss_fn: LossFn
) -> tuple[float, dict[str, Array]]:
    """Return loss and gradients of the whole model, micro-batch after micro-batch, weighted by samples."""
    param = ParamGetter(0, np.float64)
    model = nn.Sequential([factory(param) for _, factory in layers])
    num_samples = sum(len(x) for x in x_parts)
    loss = 0.0
    for x, y in zip(x_parts, y_parts, strict=True):
        part = loss_fn(model(x), y)
        loss += part.item() * len(x) / num_samples
        if part.requires_grad:
            mg.backward_with_grad(part, len(x) / num_samples)
    grads: dict[str, Array] = {}
    for name, p in model.named_parameters():
        p.fill_missing_grad()
        grads[name] = p.grad_view()
    return loss, grads


# Pipelines of them


def four_layers() -> list[Layer]:
    """From 4 to 2 values a sample, as X and Y have."""
    return [dense("fc0", 4, 6), dense("fc1", 6, 5), dense("fc2", 5, 3), dense("fc3", 3, 2)]


PLACEMENTS: dict[str, tuple[Placement, int]] = {  # name -> rank_of and number of chunks
    "loop": (lambda stage, size: stage % size, 2),
    "v": (lambda stage, size: min(stage, 2 * size - 1 - stage), 2),
    "all on the last rank": (lambda stage, size: size - 1, 1),
}


def chunked(rank_of: Placement, num_chunks: int, *, halves: bool = False) -> Schedule:
    """Run all forwards, then all backwards, stage after stage; in two halves, every B before the first W."""

    def order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
        mine = [stage for stage in range(num_ranks * num_chunks) if rank_of(stage, num_ranks) == rank]
        numbers = range(num_microbatches)
        actions = [F(stage, i) for stage in mine for i in numbers]
        for stage in reversed(mine):
            actions += [(B if halves else BW)(stage, i) for i in numbers]
        if halves:
            actions += [W(stage, i) for stage in mine for i in reversed(numbers)]
        return actions

    return Schedule("chunked", order, num_chunks=num_chunks, rank_of=rank_of)


def connect(
    comm: Communicator,
    layers: Sequence[Layer],
    *,
    schedule: str | Schedule = "1f1b",
    num_microbatches: int = 3,
    loss_fn: LossFn | None = mg.mse,
    dtype: Any = np.float64,
) -> PipelineExecutor:
    """Make this rank's stages, and the executor that trains them."""
    schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    stages = PipelineStage.of(layers, comm, schedule, dtype=dtype)
    return PipelineExecutor(stages, comm, schedule, num_microbatches=num_microbatches, loss_fn=loss_fn)


def grads_of(pipe: PipelineExecutor) -> dict[str, Array]:
    """Copy this rank's gradients."""
    return {name: grad.copy() for stage in pipe.stages for name, grad in stage.param_grads().items()}


def check_grads(pipe: PipelineExecutor, grads: dict[str, Array], *, rtol: float = 1e-12) -> None:
    """Check this rank's gradients against those of one process."""
    for name, grad in grads_of(pipe).items():
        np.testing.assert_allclose(grad, grads[name], rtol=rtol, atol=1e-16, err_msg=name)


def check_against_one_process(
    ranks: Any,
    layers: Sequence[Layer],
    x_parts: Sequence[Array],
    y_parts: Sequence[Array],
    *,
    loss_fn: LossFn = mg.mse,
    schedule: str | Schedule = "1f1b",
    num_steps: int = 1,
    rtol: float = 1e-12,
) -> None:
    """Run a list of micro-batches on `ranks`, some times over, and compare loss and gradients with one process."""
    loss, grads = gradients_in_one_process(layers, x_parts, y_parts, loss_fn)

    def program(comm: Communicator) -> None:
        pipe = connect(comm, layers, schedule=schedule, num_microbatches=len(x_parts), loss_fn=loss_fn)
        for _ in range(num_steps):
            mg.flat.zero_grad(pipe.stages.parameters())
            np.testing.assert_allclose(pipe.step(list(x_parts), list(y_parts)), loss, rtol=rtol)
            check_grads(pipe, grads, rtol=rtol)

    ranks.run(program)


def step_with_hooks(pipe: PipelineExecutor, x: Array | None, y: Array) -> list[tuple[str, Any]]:
    """Return what happened, in order: ("start", names), ("op", None), (name of a ready parameter, its grad)."""
    events: list[tuple[str, Any]] = []
    hooks = Hooks(
        on_start=lambda reached: events.append(("start", sorted(p.name for p in reached))),
        on_grad_ready=lambda p: events.append((p.name, np.array(p.grad))),
        between_ops=lambda: events.append(("op", None)),
    )
    pipe.step(x, y, hooks=hooks)
    return events
