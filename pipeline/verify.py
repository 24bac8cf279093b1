"""Does this model, in this layout, train as it does in one process? And if not, where is the first difference?

`verify` trains a model a few steps twice, in one process and spread over ranks, and compares losses, every gradient
and the norm after each step. The first parameter that differs is named, with rank, stage, and the micro-batch whose
part of the gradient is wrong. An application: it knows all three packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from distributed.agreement import first_failure
from distributed.comm.communicator import Communicator
from distributed.comm.local import LocalWorld
from distributed.comm.mesh import Mesh
from distributed.data_parallel.ddp import DistributedDataParallel
from minigrad import rng
from minigrad.autodiff.backprop import Steps, backward, backward_with_grad, to_the_end
from minigrad.autodiff.hooks import Hooks
from minigrad.backend import Array
from minigrad.nn import LayerFactory, ParamGetter, Sequential
from minigrad.optim import Optimizer
from minigrad.optim.clipping import grad_norm, scale_to_norm
from minigrad.optim.update_rules import SGD, Rule
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from minigrad.words import counted
from pipeline.runtime import microbatch
from pipeline.runtime.executor import PipelineExecutor
from pipeline.runtime.stage import PipelineStage
from pipeline.schedules.schedule import SCHEDULES, Schedule

LossFn = Callable[[Any, Array], Tensor]


_ROUNDINGS = 100  # of the size of a sum, that its value may be off by


class MismatchError(AssertionError):
    """The two runs differ."""


@dataclass(frozen=True)
class Case:
    """A model, its data, and how it is trained.

    Attributes:
        layers: the model as (name, factory).
        batches: (x, y) of each step, over all replicas; at least one sample for each replica and micro-batch.
        loss_fn: (output, y) -> the mean loss over the samples.
        rule: of the optimizer. SGD shows a wrong scale of the gradient at once; Adam's rules hide it.
        max_norm: gradients are clipped to this.
        seed, dtype: of the parameters, and of dropout.
        rtol: relative to the largest element of each gradient.
    """

    layers: Sequence[tuple[str, LayerFactory]]
    batches: Sequence[tuple[Array, Array]]
    loss_fn: LossFn
    rule: Rule = field(default_factory=lambda: SGD(lr=0.1, momentum=0.9))
    max_norm: float = float("inf")
    seed: int = 0
    dtype: Any = np.float64
    rtol: float = 1e-10

    def __post_init__(self) -> None:
        """Refuse what is no model or no data.

        Raises:
            TypeError: layers or batches are not pairs.
        """
        for what, pairs, of_what, is_one in (
            ("layers", self.layers, "(name, factory)", _is_layer),
            ("batches", self.batches, "(x, y)", _is_pair),
        ):
            wrong = pairs if not isinstance(pairs, Sequence) else next((p for p in pairs if not is_one(p)), None)
            if wrong is not None:
                raise TypeError(f"a case's {what} must be a list of {of_what}, got {short_repr(wrong)}")

    def loss(self, output: Any, y: Array) -> Tensor:
        """Return what loss_fn does.

        Raises:
            ValueError: that is no tensor, or it has axes.
        """
        loss = self.loss_fn(output, y)
        if not isinstance(loss, Tensor) or loss.shape:
            got = f"one of shape {loss.shape}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"a case's loss_fn must return a Tensor without axes, the mean loss, got {got}")
        return loss


@dataclass(frozen=True)
class Report:
    """What was compared, and the largest difference.

    It is relative to the largest element of its gradient.
    """

    dp: int
    pp: int
    schedule: str
    num_microbatches: int
    zero: int
    num_steps: int
    num_parameters: int
    largest_difference: float

    def __str__(self) -> str:
        sharded = f" zero={self.zero}" if self.zero else ""
        return (
            f"dp={self.dp} pp={self.pp} {self.schedule} micro-batches={self.num_microbatches}{sharded}: "
            f"{counted(self.num_steps, 'step')}, {counted(self.num_parameters, 'gradient')} each, "
            f"equal to one process within {self.largest_difference:.1e}"
        )


@dataclass(frozen=True)
class _Step:
    """One step in one process: what it started from and what it gave."""

    values: dict[str, Array]
    loss: float
    grads: dict[str, Array]
    norm: float


def verify(
    case: Case,
    *,
    dp: int = 1,
    pp: int = 1,
    schedule: str | Schedule = "1f1b",
    num_microbatches: int = 4,
    zero: int = 0,
    comm: Communicator | None = None,
) -> Report:
    """Train `case` spread over dp * pp ranks and compare it with one process.

    Args:
        zero: what replicas share out among them; see `DistributedDataParallel`.
        comm: collective over these dp * pp ranks; by default ranks are threads of this process.
    Raises:
        MismatchError: the first difference: step, parameter, rank, stage and micro-batch; on every rank.
        ValueError: the case has no batch, or its loss or gradient is not finite in one process.
    """
    if not case.batches:
        raise ValueError("a case must have a batch to train on, got none")
    chosen = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    expected = _train_alone(case)

    def program(comm: Communicator) -> Report:
        return _SpreadRun(case, Mesh(comm, dp=dp, pp=pp), chosen, num_microbatches, zero).compare(expected)

    if comm is not None:
        return program(comm)
    report: Report = LocalWorld(dp * pp).run(program)[0]
    return report


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _is_layer(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], str) and callable(value[1])


def _build(case: Case, dtype: Any = None) -> Sequential:
    param = ParamGetter(case.seed, dtype or case.dtype)
    return Sequential(factory(param) for _, factory in case.layers)


def _train_alone(case: Case) -> list[_Step]:
    model = _build(case)
    params = model.parameters()
    optimizer = Optimizer(params, case.rule)
    steps = []
    for number, (x, y) in enumerate(case.batches):
        values = model.state_dict()
        optimizer.zero_grad()
        with rng.scope(seed=case.seed, step=number):
            loss = case.loss(model(x), y)
        backward(loss)
        norm = grad_norm(params)
        if not np.isfinite((loss.item(), norm)).all():
            raise ValueError(f"step {number + 1} in one process: loss {loss.item():g}, norm of the gradient {norm:g}")
        steps.append(_Step(values, loss.item(), _grads(params), norm))
        scale_to_norm(params, norm, case.max_norm)
        optimizer.step()
    return steps


class _SpreadRun:
    """One rank's part of the run that is spread over ranks."""

    def __init__(self, case: Case, mesh: Mesh, schedule: Schedule, num_microbatches: int, zero: int) -> None:
        self.case = case
        self.mesh = mesh
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.zero = zero
        self.stages = PipelineStage.of(case.layers, mesh.pp, schedule, seed=case.seed, dtype=case.dtype)
        self.params = self.stages.parameters()
        self._tied = {p.name for p in self.stages.tied}
        self.parts: dict[tuple[str, int], Array] = {}  # (parameter, micro-batch) -> its part of this rank's gradient
        self.final: dict[str, Array] = {}  # gradients as they were when ready, before their reduction over replicas
        for stage in self.stages:
            self._record_parts(stage)

    def compare(self, expected: Sequence[_Step]) -> Report:
        """Train, compare each step, and report."""
        case, mesh, stages = self.case, self.mesh, self.stages
        ddp = DistributedDataParallel(stages, mesh.dp, zero=self.zero)
        optimizer = ddp.optimizer(case.rule)
        pipe = PipelineExecutor(
            stages, mesh.pp, self.schedule, num_microbatches=self.num_microbatches, loss_fn=case.loss
        )
        pipe.check_deadlock_free(ddp)
        largest = 0.0
        for number, ((x, y), step) in enumerate(zip(case.batches, expected, strict=True)):
            rows = _cut(np.arange(len(x)), mesh.dp.size)[mesh.dp.rank]
            self.parts.clear()
            self.final.clear()
            optimizer.zero_grad()
            hooks = ddp.hooks(num_samples=len(rows))
            with rng.scope(seed=case.seed, step=number, first_sample=ddp.first_sample):
                loss = pipe.step(x[rows], y[rows], hooks=Hooks(on_grad_ready=self._record_final) + hooks)
            ddp.wait()
            norm = ddp.grad_norm()
            own = ddp.buckets.whole_grads()
            differences = self._differences(own, step, ddp.mean(loss), norm)
            for name in self._rounding(own, differences, step, number, x, y):
                del differences[name]
            wrong = next((name for name, difference in differences.items() if not difference <= case.rtol), None)
            self._raise_everywhere(
                wrong and f"step {number + 1}: {self._describe(wrong, differences[wrong], step, number, x, y, rows)}"
            )
            largest = max(largest, *differences.values())  # the loss and the norm are always there
            ddp.buckets.scale_to_norm(self.params, norm, case.max_norm)
            optimizer.step()
        layout = (mesh.dp.size, mesh.pp.size, self.schedule.name, self.num_microbatches, self.zero)
        return Report(*layout, len(expected), len(expected[0].grads), largest)

    def _differences(self, own: Mapping[str, Array], step: _Step, loss: float, norm: float) -> dict[str, float]:
        """Return the relative difference of all that this rank can compare, tied parameters after the others."""
        names = sorted((name for name in step.grads if name in own), key=self._tied.__contains__)
        differences = {name: _difference(own[name], step.grads[name]) for name in names}
        pairs = {"the loss": (loss, step.loss), "the norm of the gradient": (norm, step.norm)}
        return differences | {name: _difference(np.array(a), np.array(b)) for name, (a, b) in pairs.items()}

    def _rounding(
        self, own: Mapping[str, Array], differences: Mapping[str, float], step: _Step, number: int, x: Array, y: Array
    ) -> list[str]:
        """Return the gradients whose difference is no more than rounding of the sums that they come out of.

        A gradient may be zero but for rounding, as that of a bias of attention's keys is: relative to itself any
        difference is large. How large the sums were that cancelled shows in another precision: there the gradient is
        off by about their size times that precision's unit.
        """
        suspects = [name for name, difference in differences.items() if not difference <= self.case.rtol]
        suspects = [name for name in suspects if name in step.grads]
        if not suspects:
            return []
        dtype = np.dtype(self.case.dtype)
        other = np.dtype(np.float32 if dtype == np.float64 else np.float64)
        coarse = np.finfo(max(dtype, other, key=lambda dtype: np.finfo(dtype).eps)).eps
        again = self._part_alone(step, number, x, y, np.arange(len(x)), 1.0, dtype=other)

        def allowed(name: str) -> float:
            size_of_sums = np.abs(again[name] - step.grads[name]).max() / coarse
            return float(_ROUNDINGS * np.finfo(dtype).eps * size_of_sums)

        return [name for name in suspects if np.abs(own[name] - step.grads[name]).max() <= allowed(name)]

    def _describe(self, name: str, difference: float, step: _Step, number: int, x: Array, y: Array, rows: Array) -> str:
        """Say where a difference is; of a gradient, also which micro-batch's part of it is the first wrong one."""
        if name not in step.grads:
            return f"{name} differs by {difference:.1e}"
        stage = next(stage.stage_id for stage in self.stages if name in dict(stage.named_parameters()))
        text = f"the gradient of {name!r} differs by {difference:.1e}, on stage {stage}"
        if name in self._tied:
            return f"{text}, where it is one of several copies"
        for i, own_rows in enumerate(_cut(rows, self.num_microbatches)):
            expected = self._part_alone(step, number, x, y, own_rows, len(own_rows) / len(rows))[name]
            own = self.parts.get((name, i), np.zeros_like(expected))
            if not _difference(own, expected) <= 1e3 * self.case.rtol:  # a part comes out of a sum, and is less exact
                return f"{text}; the part of micro-batch {i} is the first wrong one"
        cut = [part for own in _cut(np.arange(len(x)), self.mesh.dp.size) for part in _cut(own, self.num_microbatches)]
        alone = [self._part_alone(step, number, x, y, part, len(part) / len(x))[name] for part in cut]
        if not _difference(np.sum(alone, axis=0), step.grads[name]) <= 1e3 * self.case.rtol:
            return (
                f"{text}, and in one process too micro-batches do not add up to it: the loss must be a mean of samples"
            )
        return f"{text}; the parts of all micro-batches are right, so their reduction over ranks is not"

    def _part_alone(
        self, step: _Step, number: int, x: Array, y: Array, rows: Array, weight: float, *, dtype: Any = None
    ) -> dict[str, Array]:
        """Return what some samples add to each gradient, computed in one process, in another precision if asked to."""
        model = _build(self.case, dtype)
        values = step.values
        if dtype is not None:
            x, y = (part.astype(dtype) if part.dtype.kind == "f" else part for part in (x, y))
            values = {name: v.astype(dtype) if v.dtype == self.case.dtype else v for name, v in values.items()}
        model.load_state_dict(values)
        with rng.scope(seed=self.case.seed, step=number, first_sample=int(rows[0])):
            loss = self.case.loss(model(x[rows]), y[rows])
        backward_with_grad(loss, weight)
        return _grads(model.parameters())

    def _record_parts(self, stage: PipelineStage) -> None:
        """Note what each backward of a micro-batch adds to the gradients of a stage."""

        def recorded(run: Callable[..., Steps[Any]]) -> Callable[..., Steps[Any]]:
            def wrapped(microbatch: int, *args: Any) -> Steps[Any]:
                before = _grads(stage.parameters(), keep_fresh=True)
                result = yield from run(microbatch, *args)
                for name, after in _grads(stage.parameters(), keep_fresh=True).items():
                    part = self.final.get(name, after) - before[name]
                    self.parts[name, microbatch] = self.parts.get((name, microbatch), 0) + part
                return result

            return wrapped

        weight_half = stage.backward_weight

        def half(i: int, hooks: Hooks) -> Steps[None]:
            yield
            weight_half([i], hooks)

        recorded_half = recorded(half)

        def one_by_one(microbatches: Sequence[int], hooks: Hooks) -> None:
            """The same bits as side by side, and the part of each can be told."""
            for i in microbatches:
                to_the_end(recorded_half(i, hooks))

        vars(stage).update(backward_steps=recorded(stage.backward_steps), backward_weight=one_by_one)

    def _record_final(self, parameter: Parameter) -> None:
        assert parameter.grad is not None
        self.final[parameter.name] = parameter.grad.copy()

    def _raise_everywhere(self, found: str | None) -> None:
        """Raise the first rank's finding on every rank."""
        place = f"dp {self.mesh.dp.rank}, pp {self.mesh.pp.rank}"
        first = first_failure(self.mesh.comm, found and f"{place}: {found}")
        if first is not None:
            raise MismatchError(first)


def _cut(rows: Array, num_parts: int) -> list[Array]:
    """Return the samples of each part: of a replica, or of a micro-batch."""
    parts: list[Array] = np.split(rows, np.cumsum(microbatch.sizes(len(rows), num_parts))[:-1])
    return parts


def _grads(params: Sequence[Parameter], *, keep_fresh: bool = False) -> dict[str, Array]:
    """Return copies of the gradients by name; zeros where there is none, which then counts as one unless kept fresh."""
    if not keep_fresh:
        for p in params:
            p.fill_missing_grad()
    return {p.name: np.zeros_like(p.data) if p.grad is None else p.grad.copy() for p in params}


def _difference(a: Array, b: Array) -> float:
    """Return the largest difference relative to the largest element; infinite if something is not finite."""
    if not a.size:
        return 0.0
    difference = float(np.abs(a - b).max())
    return difference / max(float(np.abs(b).max()), 1e-300) if difference else difference
