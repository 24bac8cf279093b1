"""Local steps: ranks train on their own for some steps, and only then tell each other what they have learned (DiLoCo).

    step      1   2   3   4   5   6   7   8   9        every=6, two fragments, delay=1
    part 0        s---a                       s---a    s: what it has learned sets out; a: all have moved
    part 1                    s---a

Each rank steps its own optimizer, on its own samples, with no gradient on any wire. After `every` steps the ranks
average how far they have come from where they last agreed, and take that as the gradient of an outer rule, as a rule
SGD with Nesterov momentum. So a slow link carries one model in `every` steps. In fragments it carries a part at a time,
and with a delay while the next steps compute.

Between two agreements ranks have other weights, and so has a checkpoint, which saves one rank's: save where `in_step`.
The inner optimizer's state is each rank's own at all times, and a checkpoint has that of one.

Source: Douillard et al. 2023 (arXiv 2311.08105), algorithm 1; fragments, delay and alpha: Douillard et al. 2025
(arXiv 2501.18512), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distributed.comm.communicator import Array, Communicator, Work
from distributed.data_parallel.replicas import broadcast_params, check_layout
from minigrad.flat import FlatBuffer, FlatRange
from minigrad.nn import Buffer
from minigrad.parameter import Parameter
from minigrad.update_rules import LearningRate, Rule


@dataclass(frozen=True)
class Nesterov:
    """The outer rule of DiLoCo: v = momentum v + g; w -= lr (g + momentum v). No weight decay.

    Source: Sutskever et al. 2013, in the form of PyTorch's SGD(nesterov=True).
    """

    lr: LearningRate = 0.7
    momentum: float = 0.9

    def init(self, data: Array) -> dict[str, Array]:
        return {"velocity": np.zeros_like(data)}

    def update(self, data: Array, grad: Array, state: dict[str, Array], *, lr: float, step: int, decay: bool) -> None:
        velocity = state["velocity"]
        velocity *= self.momentum
        velocity += grad
        data -= lr * (grad + self.momentum * velocity)


@dataclass
class _Piece:
    """A contiguous part of a fragment.

    Attributes:
        part: where the weights of this rank lie.
        agreed: (n,) the weights that all ranks have agreed on.
        state: of the outer rule.
        work: the sum of how far the ranks have come, while it is under way.
    """

    part: FlatRange
    agreed: Buffer
    state: dict[str, Buffer]
    work: Work | None = None


class LocalSteps:
    """Lets replicas step on their own, and agree from time to time. Making one is collective.

        local = LocalSteps(model.parameters(), comm, Nesterov(0.7, momentum=0.9), every=100)
        for x, y in batches:
            optimizer.zero_grad()
            backward(loss_fn(model(x), y))
            optimizer.step()
            local.step()

    Args:
        params: of the model, equal on all ranks from here on; rank 0's count.
        rule: the outer one; `Nesterov` is the paper's.
        every: steps from one agreement on a parameter to the next.
        num_fragments: parts of the model that are agreed on one after the other, evenly over `every` steps.
        delay: steps that a sum may take: it is applied so many steps after it set out.
        alpha: how much of its own weights a rank keeps where a fragment is agreed on: 0 takes what was agreed on.

    Attributes:
        num_steps: so far.
        num_agreements: outer steps of each fragment so far.
        sent_bytes: what this rank has given to sums so far.

    Raises:
        ValueError: every is no multiple of num_fragments or not above the delay, alpha is not in 0 .. 1, or ranks have
            other parameters.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        comm: Communicator,
        rule: Rule,
        *,
        every: int,
        num_fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        params = list(dict.fromkeys(params))
        if num_fragments < 1 or every < 1 or every % num_fragments:
            raise ValueError(f"every must be a multiple of num_fragments, got {every} and {num_fragments}")
        if num_fragments > len(params):
            raise ValueError(f"there are {len(params)} parameters, too few for {num_fragments} fragments")
        if not 0 <= delay < every // num_fragments:
            apart = every // num_fragments
            raise ValueError(f"delay must be at least 0 and below the {apart} steps between two fragments, got {delay}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1, got {alpha}")
        self.comm = comm.duplicate()
        check_layout("parameter", params, self.comm)
        broadcast_params(params, self.comm)
        FlatBuffer.adopt(params)
        self._rule = rule
        self._every, self._delay, self._alpha = every, delay, alpha
        self._counts = Buffer(np.zeros(1 + num_fragments, np.int64), "local_steps.counts")
        self._fragments = [
            [_piece(part, rule) for part in FlatBuffer.ranges_of(group)] for group in _cut(params, num_fragments)
        ]
        self.sent_bytes = 0

    @property
    def num_steps(self) -> int:
        return int(self._counts.data[0])

    @property
    def num_agreements(self) -> list[int]:
        return [int(count) for count in self._counts.data[1:]]

    @property
    def in_step(self) -> bool:
        """Whether all ranks have the same weights now."""
        whole = len(self._fragments) == 1 and not self._alpha
        return not self.num_steps or (whole and self.num_steps % self._every == 0)

    def step(self) -> None:
        """Count a step of the optimizer; where it is a fragment's turn, send it off or take what was agreed on.

        Collective in the steps in which a fragment arrives. Call it after each `optimizer.step()`.
        """
        self._counts.data[0] += 1
        apart = self._every // len(self._fragments)
        for number, fragment in enumerate(self._fragments):
            arrives = (number + 1) * apart  # the first time
            if self.num_steps + self._delay >= arrives and (self.num_steps + self._delay - arrives) % self._every == 0:
                self._launch(fragment)
            if self.num_steps >= arrives and (self.num_steps - arrives) % self._every == 0:
                self._arrive(number, fragment)

    def buffers(self) -> list[Buffer]:
        """Return what was agreed on and the outer rule's state, for a checkpoint: see `WithState`.

        Raises:
            RuntimeError: ranks have other weights now, and a checkpoint would have those of one.
        """
        if not self.in_step:
            raise RuntimeError(
                f"ranks have other weights after {self.num_steps} steps, and a checkpoint would have those of one: "
                f"save after every {self._every} of them (and with one fragment and alpha 0)"
            )
        pieces = [piece for fragment in self._fragments for piece in fragment]
        return [self._counts, *(buffer for piece in pieces for buffer in (piece.agreed, *piece.state.values()))]

    def forget(self) -> None:
        """Begin anew from the weights that there are now, which all ranks have agreed on."""
        self._counts.data[:] = 0
        for piece in (piece for fragment in self._fragments for piece in fragment):
            piece.agreed.data = piece.part.data.copy()
            for key, array in self._rule.init(piece.agreed.data).items():
                piece.state[key].data = array

    def _launch(self, fragment: Sequence[_Piece]) -> None:
        for piece in fragment:
            moved = piece.agreed.data - piece.part.data
            self.sent_bytes += moved.nbytes
            piece.work = self.comm.allreduce(moved)

    def _arrive(self, number: int, fragment: Sequence[_Piece]) -> None:
        lr, step = self._rule.lr, self.num_agreements[number]
        rate = lr(step) if callable(lr) else lr
        for piece in fragment:
            assert piece.work is not None
            with self.comm.waiting_for(f"the agreement on {piece.part.params[0].name} ..."):
                gradient = piece.work.wait() / self.comm.size
            piece.work = None
            state = {key: buffer.data for key, buffer in piece.state.items()}
            self._rule.update(piece.agreed.data, gradient, state, lr=rate, step=step, decay=False)
            own: Array = piece.part.data
            own[...] = piece.agreed.data + self._alpha * (own - piece.agreed.data) if self._alpha else piece.agreed.data
            piece.part.note_change("local steps")
        self._counts.data[1 + number] += 1


def _piece(part: FlatRange, rule: Rule) -> _Piece:
    first = part.params[0].name
    agreed = Buffer(part.data.copy(), f"{first}.agreed")
    state = {key: Buffer(array, f"{first}.outer_{key}") for key, array in rule.init(agreed.data).items()}
    return _Piece(part, agreed, state)


def _cut(params: Sequence[Parameter], num_fragments: int) -> list[list[Parameter]]:
    """Cut a model into parts of about the same size, each of at least one parameter."""
    groups: list[list[Parameter]] = [[] for _ in range(num_fragments)]
    size, done = sum(p.size for p in params), 0
    number = 0
    for i, p in enumerate(params):
        left = len(params) - i
        if groups[number] and (done >= size * (number + 1) / num_fragments or left <= num_fragments - number - 1):
            number += 1
        groups[number].append(p)
        done += p.size
    return groups
