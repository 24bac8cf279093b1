"""PipelineStage: one stage's layers, and forward and backward of one micro-batch through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distributed.agreement import agree
from distributed.comm.communicator import Communicator
from minigrad.backend import Array, xp_of
from minigrad.backprop import (
    backward_input,
    backward_weight,
    backward_with_grad,
    reached_parameters,
)
from minigrad.halves import DeferredGrads
from minigrad.hooks import Hooks
from minigrad.nn import Buffer, LayerFactory, ParamGetter, Sequential
from minigrad.parameter import Parameter
from minigrad.tensor import Tensor
from pipeline.runtime.boundary import ArraySpec, Bundle
from pipeline.runtime.partition import StageSpec, cut
from pipeline.schedules.schedule import Schedule


class PipelineStage(Sequential):
    """The layers of one stage. It holds the tape of every micro-batch that is forwarded and not yet backwarded.

    Attributes:
        spec: which part of the model this is; also reached as `stage_id`, `block_start`, `block_end`, `num_blocks`,
            `has_embedding`, `has_lm_head`, `is_first`, `is_last`.
    """

    def __init__(self, spec: StageSpec, layers: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(layers)
        self.spec = spec
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
        """Build this rank's stages of a model, one for each chunk of the schedule. Collective.

        Args:
            layers: the whole model as (name, factory); only this rank's factories are called.
            comm: the ranks of the pipeline.
            specs: how the layers are cut into stages, from `partition`; by count of blocks by default.
            seed, dtype, device: of the parameters; see `ParamGetter`.
        Raises:
            ValueError: there are more stages than layers, not as many specs as stages, or a layer cannot be made; the
                same message on every rank.
        """
        num_stages = schedule.num_stages(comm.size)
        param = ParamGetter(seed, dtype, device)
        specs = cut([name for name, _ in layers], num_stages) if specs is None else specs
        if len(specs) != num_stages or specs[-1].layer_stop != len(layers):
            raise ValueError(
                f"{schedule.name} needs {num_stages} stages of {len(layers)} layers in all, "
                f"got specs of {len(specs)} stages and {specs[-1].layer_stop if specs else 0} layers"
            )
        mine = [spec for spec in specs if schedule.rank_of(spec.stage_id, comm.size) == comm.rank]
        stages: list[PipelineStage] = []

        def build() -> Array:
            for spec in mine:
                stages.append(
                    PipelineStage(spec, [make(param) for _, make in layers[spec.layer_start : spec.layer_stop]])
                )
            return np.empty(0, np.int64)

        agree(comm, build, num_columns=0)
        return LocalStages(stages, comm, shared=param.made.keys() - param.claimed)

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
        x: Bundle,
        *,
        finish: Callable[[Any], Tensor] | None = None,
        keep_tape: bool = True,
    ) -> tuple[Bundle, list[Parameter]]:
        """Run one micro-batch forward.

        Args:
            x: the stage's input; `returns` says for which arrays the backward is to give the gradient.
            finish: on the last stage, from its output to what the backward starts from: the loss.
            keep_tape: whether a backward will follow.
        Returns:
            The output, and the parameters that the backward will reach.
        Raises:
            TypeError: the last layer gave something else than tensors and arrays.
        """
        # A leaf only where a gradient comes back, so that ids reach an embedding as the plain integers they are.
        leaves = [
            Tensor(array, requires_grad=True) if comes_back else array
            for array, comes_back in zip(x.arrays, x.returns, strict=True)
        ]
        y = self(tuple(leaves) if x.is_tuple else leaves[0])
        if finish is not None:
            y = finish(y)
        is_tuple = isinstance(y, (tuple, list))
        parts = tuple(y) if is_tuple else (y,)
        for part in parts:
            if not hasattr(part, "dtype"):
                raise TypeError(f"stage {self.stage_id} must give tensors or arrays, got {type(part).__name__}")
        if not is_tuple and not isinstance(y, Tensor):
            parts = (Tensor(y),)  # alone it may be a tensor the next time; in a tuple a plain array is data
        roots = [part for part in parts if isinstance(part, Tensor) and part.dtype.kind not in "iub"]
        arrays = tuple(part.data if isinstance(part, Tensor) else part for part in parts)
        output = Bundle(arrays, tuple(any(part is root for root in roots) for part in parts), is_tuple)
        if not keep_tape:
            return output, []
        for root in roots:
            if root.node is not None:
                root.drop_data()  # once sent, nobody needs it; what backward needs, the tape keeps
        reached = reached_parameters(roots)
        self._tapes[microbatch] = _Tape([leaf for leaf in leaves if isinstance(leaf, Tensor)], roots, reached)
        return output, reached

    def backward(self, microbatch: int, cotangents: Sequence[Any], hooks: Hooks) -> tuple[Array, ...]:
        """Run one micro-batch backward, both halves, and free its tape.

        Args:
            cotangents: of the outputs that gradients come back for.
        Returns:
            The gradients of the inputs that were to have one, zeros where nothing came back.
        """
        tape = self._tapes.pop(microbatch)
        roots, grads = tape.start(cotangents)
        if roots:
            backward_with_grad(roots, grads, hooks=hooks)
        return tape.input_grads()

    def backward_input(self, microbatch: int, cotangents: Sequence[Any], hooks: Hooks) -> tuple[Array, ...]:
        """Run the input half of a backward, and keep what the weight half needs."""
        tape = self._tapes.pop(microbatch)
        roots, grads = tape.start(cotangents)
        if roots:
            self._deferred[microbatch] = backward_input(roots, grads, hooks=hooks), tape.reached
        return tape.input_grads()

    def backward_weight(self, microbatches: Sequence[int], hooks: Hooks) -> None:
        """Run the weight halves of some backwards side by side: each parameter is ready as early as can be.

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

    leaves: list[Tensor]
    roots: list[Tensor]
    reached: list[Parameter]

    def start(self, cotangents: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
        """Return where a backward starts: outputs that nothing trainable is behind get their cotangents in vain."""
        pairs = [(root, g) for root, g in zip(self.roots, cotangents, strict=True) if root.requires_grad]
        return [root for root, _ in pairs], [g for _, g in pairs]

    def input_grads(self) -> tuple[Array, ...]:
        return tuple(xp_of(leaf.data).zeros_like(leaf.data) if leaf.grad is None else leaf.grad for leaf in self.leaves)


class LocalStages:
    """This rank's stages. Making one is collective.

    Args:
        shared: names that this rank's layers asked for with a tie. Of the ranks that hold a parameter of one name, all
            but one must have it here.

    Attributes:
        comm: the ranks of the pipeline.
        tied: parameters that another rank holds a copy of (the same name), in one order on all ranks. The copies
            start with the values of the first rank that holds one.
        tied_groups: the ranks that hold copies of the same parameters, in the order in which they sum their gradients.
    Raises:
        ValueError: two ranks give a parameter of one name different shapes or dtypes, or share it without a tie; the
            same message on every rank.
    """

    def __init__(self, stages: Sequence[PipelineStage], comm: Communicator, *, shared: Set[str] = frozenset()) -> None:
        self._stages = tuple(stages)
        self.comm = comm
        own = {p.name: p for p in self._distinct() if p.name}
        held = {name: (ArraySpec.of(p.data), name in shared) for name, p in own.items()}
        holders = _holders(comm.gather_objects(held))
        self._shared = tuple(holders)
        self.tied = [own[name] for name in holders if name in own]
        # Squares of a gradient norm count a tied parameter once: on the first rank that holds it.
        self._counted_elsewhere = {own[n] for n, ranks in holders.items() if n in own and ranks[0] != comm.rank}
        self._groups: list[tuple[Communicator, list[Parameter]]] = []
        self.tied_groups = tuple(sorted({tuple(ranks) for ranks in holders.values()}))
        for ranks in self.tied_groups:
            group = comm.split(color=0 if comm.rank in ranks else 1)
            if comm.rank in ranks:
                copies = [own[name] for name in holders if tuple(holders[name]) == ranks]
                for p in copies:
                    p.data = group.broadcast(p.data.copy()).wait()
                self._groups.append((group, copies))
        if comm.size > 1:
            for p in self.parameters():
                p.part_of = (
                    f"a pipeline on {comm.size} ranks, and its gradient norm is that of all of them: "
                    "distributed.clip_by_global_norm(stages, max_norm)"
                )

    def __iter__(self) -> Iterator[PipelineStage]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def parameters(self) -> list[Parameter]:
        """Return all parameters, each once; tied ones first, so that in launch order they come last."""
        return list(dict.fromkeys([*self.tied, *self._distinct()]))

    def buffers(self) -> list[Buffer]:
        """Return all buffers, each once."""
        return list(dict.fromkeys(buffer for stage in self._stages for buffer in stage.buffers()))

    def counted_parameters(self) -> list[Parameter]:
        """Return the parameters that this rank counts in a sum over the whole model: tied ones on one rank only."""
        return [p for p in self.parameters() if p not in self._counted_elsewhere]

    def train(self, training: bool = True) -> None:
        """Turn random layers on."""
        for stage in self._stages:
            stage.train(training)

    def eval(self) -> None:
        """Turn random layers off."""
        self.train(False)

    def tied_states(self) -> dict[str, bool | None]:
        """Tell of each parameter that is tied on any rank whether it is trained here; None where it is not here."""
        own = {p.name: p.requires_grad for p in self.tied}
        return {name: own.get(name) for name in self._shared}

    def set_tied_aside(self) -> list[tuple[Parameter, Array]]:
        """Take the gradients of tied parameters off them: they are sums over ranks already, unlike those to come."""
        before = [(p, p.grad.copy()) for p in self._trainable_tied() if p.has_grad and p.grad is not None]
        for p, _ in before:
            p.grad = None
        return before

    def sum_tied(self, before: Sequence[tuple[Parameter, Array]]) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them. Collective.

        Args:
            before: from `set_tied_aside`; added afterwards.
        """
        for group, params in self._groups:
            for p in params:
                if p.requires_grad:
                    p.fill_missing_grad()
                    group.allreduce(p.grad_view()).wait()
        for p, grad in before:
            view = p.grad_view()
            view += grad

    def _trainable_tied(self) -> list[Parameter]:
        return [p for p in self.tied if p.requires_grad]

    def _distinct(self) -> list[Parameter]:
        return list(dict.fromkeys(p for stage in self._stages for p in stage.parameters()))


def _holders(held_by: Sequence[dict[str, tuple[ArraySpec, bool]]]) -> dict[str, list[int]]:
    """Return the names that more than one rank holds, sorted, with those ranks.

    Args:
        held_by: what each rank holds: name -> (shape and dtype, whether its layers asked for a tie).
    """
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(held_by):
        for name, (spec, _) in held.items():
            first = holders.setdefault(name, [rank])[0]
            if spec != held_by[first][name][0]:
                raise ValueError(
                    "copies of a tied parameter must have the same shape and dtype, but "
                    f"{name!r} is {held_by[first][name][0]} on rank {first} and {spec} on rank {rank}"
                )
            if rank != first:
                holders[name].append(rank)
    shared = {name: ranks for name, ranks in sorted(holders.items()) if len(ranks) > 1}
    for name, ranks in shared.items():
        makers = [rank for rank in ranks if not held_by[rank][name][1]]
        if len(makers) > 1:
            raise ValueError(
                f"layers on ranks {makers[0]} and {makers[1]} both have a parameter {name!r}: give each a name of its "
                "own, param.at(name), or ask with param.tied to share it (in a loop, a lambda sees the last value of "
                "the loop's variable)"
            )
    return shared
