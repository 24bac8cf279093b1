"""What a stage keeps in bytes: measured once, by one micro-batch through the whole model in one process.

    kept = stage_bytes(layers, x, num_stages=4, loss_fn=lambda out: mg.cross_entropy(out, y), rule=AdamW(lr=1e-3))
    print(rank_bytes(kept, SCHEDULES["1f1b"], num_ranks=4, num_microbatches=8))

NumPy tells tracemalloc of each array, so what is counted is what is there, whatever ops keep. (Arrays of a GPU are not
seen.) Dropout masks, recomputation and casts are in it; the arrays of a data loader are not.
"""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from minigrad import rng
from minigrad.autodiff.hooks import Hooks
from minigrad.backend import Array
from minigrad.nn import LayerFactory, ParamGetter
from minigrad.optim import Optimizer
from minigrad.optim.update_rules import Rule
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from pipeline.runtime.boundary import Bundle
from pipeline.runtime.partition import StageSpec, cut
from pipeline.runtime.skips import stage_skips
from pipeline.runtime.stage import PipelineStage
from pipeline.schedules.action import Skips
from pipeline.schedules.held import Gift, StageBytes


def stage_bytes(
    layers: Sequence[tuple[str, LayerFactory]],
    x: Array,
    *,
    num_stages: int,
    loss_fn: Callable[[Any], Tensor],
    rule: Rule | None = None,
    specs: Sequence[StageSpec] | None = None,
    dtype: Any = np.float32,
) -> list[StageBytes]:
    """Measure what each stage of a model keeps for a micro-batch of the size of `x`.

    The whole model is made once, in this process; memory is traced meanwhile.

    Args:
        loss_fn: from the output of the last stage to the loss.
        rule: of the optimizer; None where there is none.
        specs: how the layers are cut; by count of blocks by default.
        dtype: of the parameters.
    """
    specs = cut([name for name, _ in layers], num_stages) if specs is None else specs
    param = ParamGetter(0, dtype)
    skips = stage_skips(layers, specs, lambda stage, _: stage, num_stages)
    stages = [PipelineStage(s, [make(param) for _, make in layers[s.layer_start : s.layer_stop]], skips) for s in specs]
    for p in (p for stage in stages for p in stage.parameters()):
        p.fill_missing_grad()
    with rng.scope(seed=0, step=0):  # the first time kernels are compiled, whose memory is no stage's
        _through(stages, tuple(skips), x, loss_fn, rule)
    with _traced(), rng.scope(seed=0, step=1):
        halves = _through(stages, tuple(skips), x, loss_fn, rule)
    with _traced(), rng.scope(seed=0, step=2):
        whole = _whole_backwards(stages, tuple(skips), x, loss_fn)
    return [replace(one, backward=most) for one, most in zip(halves, whole, strict=True)]


_Ends = tuple[int, int]


class _Messages:
    """What stages give each other, as if each were on a rank of its own."""

    def __init__(self, x: Array, skips: Skips) -> None:
        self._skips = skips
        self._forward: dict[_Ends, Bundle] = {(-1, 0): Bundle((x,), (False,), False)}
        self._backward: dict[_Ends, Sequence[Any]] = {}

    def inputs(self, stage: PipelineStage) -> list[Bundle]:
        """Return copies of what a stage gets.

        The originals live on, so that nothing is freed in a block that was made before it. The first stage's is a part
        of a batch, which is there anyway.
        """
        if stage.is_first:
            return [self._forward[-1, 0]]
        return [_copy(self._forward[ends]) for ends in self.into(stage)]

    def give(self, stage: PipelineStage, outputs: Sequence[Bundle]) -> None:
        """Keep what a stage made."""
        self._forward.update(zip(self.out_of(stage), outputs, strict=True))

    def cotangents(self, stage: PipelineStage) -> list[Any]:
        """Return what comes back to a stage."""
        if stage.is_last:
            return [1.0]
        return [g for ends in self.out_of(stage) for g in self._backward.pop(ends)]

    def give_back(self, stage: PipelineStage, grads: Sequence[Sequence[Any]]) -> None:
        """Keep the gradients of a stage's inputs."""
        self._backward.update(zip(self.into(stage), grads, strict=True))

    def into(self, stage: PipelineStage) -> list[_Ends]:
        """Return between which stages each message runs that a stage gets."""
        number = stage.stage_id
        return [(number - 1, number), *(_apart(ends) for ends in self._skips if ends[1] == number)]

    def out_of(self, stage: PipelineStage) -> list[_Ends]:
        """Return between which stages each message runs that a stage gives."""
        number = stage.stage_id
        return [(number, number + 1), *(_apart(ends) for ends in self._skips if ends[0] == number)]


def _apart(ends: _Ends) -> _Ends:
    """Tell a skip connection between neighbours from what they give each other anyway."""
    return -2 - ends[0], ends[1]


def _through(
    stages: Sequence[PipelineStage], skips: Skips, x: Array, loss_fn: Callable[[Any], Tensor], rule: Rule | None
) -> list[StageBytes]:
    messages = _Messages(x, skips)
    inputs, activations, forward = [], [], []
    given: dict[_Ends, _Kept] = {}  # on the stage that gives
    taken: dict[_Ends, _Kept] = {}  # on the one that takes

    def look(stage: PipelineStage) -> None:
        for kept in [taken[ends] for ends in messages.into(stage)] + [given[ends] for ends in messages.out_of(stage)]:
            kept.look()

    for stage in stages:
        with _Used() as used:
            arrived = messages.inputs(stage)
            outputs, _ = stage.forward(0, arrived, finish=loss_fn if stage.is_last else None)
            taken |= zip(messages.into(stage), map(_Kept, arrived), strict=True)
            given |= zip(messages.out_of(stage), map(_Kept, outputs), strict=True)
            outputs = [_copy(output) for output in outputs]  # what others get; here they are gone once they are sent
            inputs.append(0 if stage.is_first else _nbytes(arrived))
            del arrived
        messages.give(stage, outputs)
        activations.append(used.kept - _nbytes(outputs))
        forward.append(used.peak)
        look(stage)
    found = []
    for number, stage in reversed(list(enumerate(stages))):
        cotangents = messages.cotangents(stage)
        with _Used() as used:
            grads = stage.backward_input(0, [_copied(g) for g in cotangents], Hooks())
        messages.give_back(stage, grads)
        deferred = max(0, activations[number] + used.kept - sum(g.nbytes for own in grads for g in own))
        del grads
        look(stage)
        with _Used() as used_later:
            stage.backward_weight([0], Hooks())
        found.append(
            StageBytes(
                *_static(stage.parameters(), rule),
                activations[number],
                deferred,
                forward[number],
                used.peak,
                used_later.peak,
                0,  # of a whole backward, measured apart
                inputs[number],
                tuple(_gift(ends[1], given[ends], taken[ends]) for ends in messages.out_of(stage) if ends in taken),
            )
        )
    return found[::-1]


class _Kept:
    """What a stage keeps of the arrays of a bundle.

    Attributes:
        size: their bytes.
        alive: those that still lived, at each look.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.size = _nbytes([bundle])
        self.alive: list[int] = []
        self._owners = [(weakref.ref(_owner(array)), array.nbytes) for array in bundle.arrays]

    def look(self) -> None:
        """Note which arrays are still there."""
        self.alive.append(sum(nbytes for owner, nbytes in self._owners if owner() is not None))


def _gift(taker: int, given: _Kept, taken: _Kept) -> Gift:
    """Return a gift, looked at after F and after B on both of its stages."""
    (kept, kept_later), (used, used_later) = given.alive, taken.alive
    return Gift(taker, given.size, kept, used, kept_later, used_later)


def _owner(array: Any) -> Any:
    """Return the array whose memory this one shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _whole_backwards(
    stages: Sequence[PipelineStage], skips: Skips, x: Array, loss_fn: Callable[[Any], Tensor]
) -> list[int]:
    """Return the most that a backward of each stage needs that is not cut in halves: it frees its tape as it goes."""
    messages = _Messages(x, skips)
    for stage in stages:
        outputs, _ = stage.forward(0, messages.inputs(stage), finish=loss_fn if stage.is_last else None)
        messages.give(stage, [_copy(output) for output in outputs])
    peaks = []
    for stage in reversed(stages):
        cotangents = messages.cotangents(stage)
        with _Used() as used:
            grads = stage.backward(0, [_copied(g) for g in cotangents], Hooks())
        messages.give_back(stage, grads)
        peaks.append(used.peak)
    return peaks[::-1]


def _static(params: Sequence[Parameter], rule: Rule | None) -> tuple[int, int, int]:
    """Return the bytes of parameters, of their gradients, and of the optimizer's state."""
    weights = sum(p.data.nbytes for p in params)
    trained = [p for p in params if p.requires_grad]
    gradients = sum(p.grad_view().nbytes for p in trained)
    state = 0 if rule is None else sum(array.nbytes for _, array in Optimizer(trained, rule).state_arrays())
    return weights, gradients, state


def _nbytes(bundles: Sequence[Bundle]) -> int:
    return sum(array.nbytes for bundle in bundles for array in bundle.arrays)


def _copied(cotangent: Any) -> Any:
    """Return a gradient as it arrives from another rank, in memory of its own; the last stage's is a number."""
    return cotangent.copy() if isinstance(cotangent, np.ndarray) else cotangent


def _copy(bundle: Bundle) -> Bundle:
    return bundle._replace(arrays=tuple(array.copy() for array in bundle.arrays))


@contextmanager
def _traced() -> Iterator[None]:
    before = tracemalloc.is_tracing()
    if not before:
        tracemalloc.start()
    try:
        yield
    finally:
        if not before:
            tracemalloc.stop()


class _Used:
    """Counts the bytes that are kept after a block, and the most that were used in it."""

    def __enter__(self) -> _Used:
        gc.collect()
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *_: object) -> None:
        now, most = tracemalloc.get_traced_memory()
        self.kept, self.peak = now - self._before, most - self._before
