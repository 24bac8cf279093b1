"""LocalStages: all stages of one rank, and the parameters that other ranks hold copies of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

from distributed.comm.communicator import Communicator
from minigrad.backend import Array
from minigrad.nn import Buffer
from minigrad.parameter import Parameter
from pipeline.runtime.boundary import ArraySpec
from pipeline.schedules.action import Skips

if TYPE_CHECKING:
    from pipeline.runtime.stage import PipelineStage


class LocalStages:
    """This rank's stages. Making one is collective.

    Args:
        shared: names that this rank's layers asked for with a tie. Of the ranks that hold a parameter of one name, all
            but one must have it here.

    Attributes:
        comm: the ranks of the pipeline.
        tied: parameters that another rank holds a copy of (the same name), in one order on all ranks. The copies
            start with the values of the first rank that holds one.
        skips: the skip connections between stages, of all ranks.
        tied_groups: the ranks that hold copies of the same parameters, in the order in which they sum their gradients.
    Raises:
        ValueError: two ranks give a parameter of one name different shapes or dtypes, or share it without a tie; the
            same message on every rank.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        comm: Communicator,
        *,
        shared: Set[str] = frozenset(),
        skips: Skips = (),
    ) -> None:
        self._stages = tuple(stages)
        self.skips = skips
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
        """Return all parameters, each once.

        Tied ones come first, so that in launch order they come last.
        """
        return list(dict.fromkeys([*self.tied, *self._distinct()]))

    def buffers(self) -> list[Buffer]:
        """Return all buffers, each once."""
        return list(dict.fromkeys(buffer for stage in self._stages for buffer in stage.buffers()))

    def counted_parameters(self) -> list[Parameter]:
        """Return the parameters that this rank counts in a sum over the whole model.

        Tied ones count on one rank only.
        """
        return [p for p in self.parameters() if p not in self._counted_elsewhere]

    def train(self, training: bool = True) -> None:
        """Turn random layers on."""
        for stage in self._stages:
            stage.train(training)

    def eval(self) -> None:
        """Turn random layers off."""
        self.train(False)

    def tied_states(self) -> dict[str, bool | None]:
        """Tell of each parameter tied on any rank whether it is trained here.

        None where it is not here.
        """
        own = {p.name: p.requires_grad for p in self.tied}
        return {name: own.get(name) for name in self._shared}

    def set_tied_aside(self) -> list[tuple[Parameter, Array]]:
        """Take the gradients of tied parameters off them.

        They are sums over ranks already, unlike those to come.
        """
        before = [(p, p.grad.copy()) for p in self._trainable_tied() if p.has_grad and p.grad is not None]
        for p, _ in before:
            p.grad = None
        return before

    def sum_tied(self, before: Sequence[tuple[Parameter, Array]]) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them.

        Collective.

        Args:
            before: from `set_tied_aside`; added afterwards.
        """
        for group, params in self._groups:
            for p in params:
                if p.requires_grad:
                    group.allreduce(p.sum_view()).wait()
        for p, grad in before:
            total = p.sum_view()
            total += grad

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
