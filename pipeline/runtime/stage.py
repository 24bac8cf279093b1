"""PipelineStage: one stage's layers, and forward and backward of one micro-batch through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Communicator
from minigrad.autodiff.backprop import (
    Steps,
    backward_input_steps,
    backward_steps,
    backward_weight,
    reached_parameters,
    to_the_end,
)
from minigrad.autodiff.deferred import DeferredGrads
from minigrad.autodiff.hooks import Hooks
from minigrad.backend import Array, xp_of
from minigrad.nn import LayerFactory, ParamGetter, Sequential
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from minigrad.words import counted
from pipeline.runtime.boundary import Bundle
from pipeline.runtime.local_stages import LocalStages
from pipeline.runtime.partition import StageSpec, check_layers, check_specs, cut
from pipeline.runtime.skips import StageSkips, stage_skips
from pipeline.schedules.schedule import Schedule, check_schedule

Grads = list[tuple[Array, ...]]
"""Of each of a stage's inputs, for its arrays that were to have one."""


class PipelineStage(Sequential):
    """The layers of one stage.

    It holds the tape of every micro-batch that is forwarded and not yet backwarded.

    Attributes:
        spec: which part of the model this is; also reached as `stage_id`, `block_start`, `block_end`, `num_blocks`,
            `has_embedding`, `has_lm_head`, `is_first`, `is_last`.
    """

    def __init__(
        self, spec: StageSpec, layers: Sequence[Callable[[Any], Any]], skips: StageSkips | None = None
    ) -> None:
        super().__init__(layers)
        self.spec = spec
        between = (skips or {}).items()
        self._taken = [names for (_, taker), names in between if taker == spec.stage_id]  # in the order of arrivals
        self._given = [names for (giver, _), names in between if giver == spec.stage_id]  # in that of departures
        self._tapes: dict[int, _Tape] = {}  # by micro-batch
        self._deferred: dict[int, tuple[DeferredGrads, list[Parameter]]] = {}  # and what it will reach

    @staticmethod
    def of(
        layers: Sequence[tuple[str, LayerFactory]],
        comm: Communicator,
        schedule: Schedule,
        *,
        specs: Sequence[StageSpec] | None = None,
        seed: int = 0,
        dtype: Any = np.float32,
        device: str = "cpu",
    ) -> LocalStages:
        """Build this rank's stages of a model, one for each chunk. Collective.

        Args:
            layers: the whole model as (name, factory); only this rank's factories are called.
            comm: the ranks of the pipeline.
            specs: how the layers are cut into stages, from `partition`; by count of blocks by default.
            seed, dtype, device: of the parameters; see `ParamGetter`.
        Raises:
            ValueError: there are more stages than layers, not as many specs as stages, or a layer cannot be made; the
                same message on every rank.
            TypeError: the layers are no pairs, or specs, comm or schedule are something else.
        """
        check_schedule(schedule)
        if not isinstance(comm, Communicator):
            raise TypeError(f"PipelineStage.of takes a communicator, such as world(), got {type(comm).__name__}")
        check_layers(layers)
        num_stages = schedule.num_stages(comm.size)
        param = ParamGetter(seed, dtype, device)
        specs = cut([name for name, _ in layers], num_stages) if specs is None else specs
        check_specs(specs)
        if len(specs) != num_stages or specs[-1].layer_stop != len(layers):
            raise ValueError(
                f"{schedule.name} needs {counted(num_stages, 'stage')} of {counted(len(layers), 'layer')} in all, "
                f"got specs of {len(specs)} and {specs[-1].layer_stop if specs else 0}"
            )
        skips: StageSkips = {}
        mine = [spec for spec in specs if schedule.rank_of(spec.stage_id, comm.size) == comm.rank]
        stages: list[PipelineStage] = []

        def build() -> Array:
            nonlocal skips
            skips = stage_skips(layers, specs, schedule.rank_of, comm.size)
            for spec in mine:
                own = [_made(name, make(param)) for name, make in layers[spec.layer_start : spec.layer_stop]]
                stages.append(PipelineStage(spec, own, skips))
            return np.empty(0, np.int64)

        agree(comm, build, num_columns=0)
        return LocalStages(stages, comm, shared=param.made.keys() - param.claimed, skips=tuple(skips))

    @property
    def stage_id(self) -> int:
        return self.spec.stage_id

    @property
    def block_start(self) -> int:
        return self.spec.block_start

    @property
    def block_end(self) -> int:
        return self.spec.block_end

    @property
    def num_blocks(self) -> int:
        return self.spec.num_blocks

    @property
    def has_embedding(self) -> bool:
        return self.spec.has_embedding

    @property
    def has_lm_head(self) -> bool:
        return self.spec.has_lm_head

    @property
    def is_first(self) -> bool:
        return self.spec.is_first

    @property
    def is_last(self) -> bool:
        return self.spec.is_last

    @property
    def num_in_flight(self) -> int:
        """How many micro-batches hold activations here."""
        return len(self._tapes)

    def drop_tapes(self) -> None:
        """Forget every micro-batch whose backward has not been done."""
        self._tapes.clear()
        self._deferred.clear()

    def param_grads(self) -> dict[str, Array]:
        """Return the gradients by parameter name; zeros where no backward reached."""
        for p in self.parameters():
            p.fill_missing_grad()
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}

    def forward(
        self,
        microbatch: int,
        inputs: Sequence[Bundle],
        *,
        finish: Callable[[Any], Tensor] | None = None,
        keep_tape: bool = True,
    ) -> tuple[list[Bundle], list[Parameter]]:
        """Run one micro-batch forward.

        Args:
            inputs: what the stage before gave, then what skip connections bring, by the stage that they come from;
                `returns` says for which arrays the backward is to give the gradient.
            finish: on the last stage, from its output to what the backward starts from: the loss.
            keep_tape: whether a backward will follow.
        Returns:
            The output and what skip connections take, by the stage that they go to; and the parameters that the
            backward will reach.
        Raises:
            TypeError: the last layer, or one that gives a skip connection, gave something else than tensors and arrays.
        """
        # A leaf only where a gradient comes back, so that ids reach an embedding as the plain integers they are.
        leaves = [
            [Tensor(a, requires_grad=True) if back else a for a, back in zip(x.arrays, x.returns, strict=True)]
            for x in inputs
        ]
        given = {
            name: leaf
            for names, own in zip(self._taken, leaves[1:], strict=True)
            for name, leaf in zip(names, own, strict=True)
        }
        y = self(tuple(leaves[0]) if inputs[0].is_tuple else leaves[0][0], given)
        if finish is not None:
            y = finish(y)
        ends = [self._end(y), *(self._end(tuple(given[name] for name in names)) for names in self._given)]
        outputs, roots = [output for output, _ in ends], [root for _, own in ends for root in own]
        if not keep_tape:
            return outputs, []
        for root in roots:
            if root.node is not None:
                root.drop_data()  # once sent, nobody needs it; what backward needs, the tape keeps
        reached = reached_parameters(roots)
        tensors = [[leaf for leaf in own if isinstance(leaf, Tensor)] for own in leaves]
        self._tapes[microbatch] = _Tape(tensors, roots, reached)
        return outputs, reached

    def _end(self, y: Any) -> tuple[Bundle, list[Tensor]]:
        """Return what goes to another stage, and those tensors of it that a gradient comes back for."""
        is_tuple = isinstance(y, (tuple, list))
        parts = tuple(y) if is_tuple else (y,)
        for part in parts:
            if not hasattr(part, "dtype"):
                raise TypeError(f"stage {self.stage_id} must give tensors or arrays, got {type(part).__name__}")
        if not is_tuple and not isinstance(y, Tensor):
            parts = (Tensor(y),)  # alone it may be a tensor the next time; in a tuple a plain array is data
        roots = [part for part in parts if isinstance(part, Tensor) and part.dtype.kind not in "iub"]
        arrays = tuple(part.data if isinstance(part, Tensor) else part for part in parts)
        return Bundle(arrays, tuple(any(part is root for root in roots) for part in parts), is_tuple), roots

    def backward(self, microbatch: int, cotangents: Sequence[Any], hooks: Hooks) -> Grads:
        """Run one micro-batch backward, both halves, and free its tape.

        Args:
            cotangents: of the outputs that gradients come back for, in their order.
        Returns:
            The gradients of the inputs that were to have one, zeros where nothing came back.
        """
        return to_the_end(self.backward_steps(microbatch, cotangents, hooks))

    def backward_steps(self, microbatch: int, cotangents: Sequence[Any], hooks: Hooks) -> Steps[Grads]:
        """Run `backward` one op at a time.

        Args:
            microbatch: its number.
            cotangents: of the outputs that gradients come back for.
        """
        tape = self._tapes.pop(microbatch)
        roots, grads = tape.start(cotangents)
        if roots:
            yield from backward_steps(roots, grads, hooks=hooks)
        return tape.input_grads()

    def backward_input(self, microbatch: int, cotangents: Sequence[Any], hooks: Hooks) -> Grads:
        """Run the input half of a backward; keep what the weight half needs.

        Args:
            cotangents: of the outputs that gradients come back for.
        """
        return to_the_end(self.backward_input_steps(microbatch, cotangents, hooks))

    def backward_input_steps(self, microbatch: int, cotangents: Sequence[Any], hooks: Hooks) -> Steps[Grads]:
        """Run `backward_input` one op at a time.

        Args:
            microbatch, cotangents: see `backward_steps`.
        """
        tape = self._tapes.pop(microbatch)
        roots, grads = tape.start(cotangents)
        if roots:
            deferred = yield from backward_input_steps(roots, grads, hooks=hooks)
            self._deferred[microbatch] = deferred, tape.reached
        return tape.input_grads()

    def backward_weight(self, microbatches: Sequence[int], hooks: Hooks) -> None:
        """Run the weight halves of some backwards side by side.

        So each parameter is ready as early as can be.

        Args:
            hooks: `on_grad_ready` is called once for each micro-batch that reaches the parameter, when all are done.
        """
        halves = [self._deferred.pop(i) for i in microbatches if i in self._deferred]
        tapes = Counter(p for _, reached in halves for p in reached)

        def all_ready(p: Parameter) -> None:
            if hooks.on_grad_ready is not None:
                for _ in range(tapes[p]):
                    hooks.on_grad_ready(p)

        if halves:
            backward_weight([deferred for deferred, _ in halves], hooks=replace(hooks, on_grad_ready=all_ready))


@dataclass(frozen=True)
class _Tape:
    """Both ends of one micro-batch's tape on one stage: the inputs that want a gradient, the outputs that get one.

    Attributes:
        reached: the parameters in between.
    """

    leaves: list[list[Tensor]]
    roots: list[Tensor]
    reached: list[Parameter]

    def start(self, cotangents: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
        """Return where a backward starts.

        Outputs that nothing trainable is behind get their cotangents in vain. What goes furthest comes first: in one
        process its contributions would be the first.
        """
        pairs = [(root, g) for root, g in zip(self.roots, cotangents, strict=True) if root.requires_grad][::-1]
        return [root for root, _ in pairs], [g for _, g in pairs]

    def input_grads(self) -> Grads:
        return [
            tuple(xp_of(leaf.data).zeros_like(leaf.data) if leaf.grad is None else leaf.grad for leaf in own)
            for own in self.leaves
        ]


def _made(name: str, layer: Any) -> Any:
    if not callable(layer):
        raise TypeError(f"the factory of layer {name!r} must return a layer, which can be called, got {layer!r}")
    return layer
