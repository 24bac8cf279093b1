"""Local steps: ranks train on their own for some steps, and only then tell each other what they have learned (DiLoCo).

    step      1   2   3   4   5   6   7   8   9        every=6, two fragments, delay=1
    part 0        s---a                       s---a    s: what it has learned sets out; a: all have moved
    part 1                    s---a

Each rank steps its own optimizer, on its own samples, with no gradient on any wire. After `every` steps the ranks
average how far they have come from where they last agreed, and take that as the gradient of an outer rule, as a rule
SGD with Nesterov momentum. So a slow link carries one model in `every` steps. In fragments it carries a part at a time,
with a delay while the next steps compute, and with a comm hook in few bits. The momentum is for many agreements: in
hundreds of steps the plain mean, `SGD(1.0)`, every few of them loses less (docs/performance.md has how much).

What a rank learns during the delay goes on from what was agreed on, so that the mean of all ranks misses no update. The
paper mixes instead, by an alpha, and with alpha 0 drops it:

    alpha=None   own = agreed + (own - own when the sum set out)
    alpha        own = agreed + alpha (own - agreed)

Between two agreements ranks have other weights. A checkpoint has as the model's what was last agreed on, and beside it
what is each rank's own: its weights, its inner optimizer's state, and the sums that are under way. So a run may be
saved, and end, after any step, and on as many ranks it goes on bit by bit:

    checkpoints = Checkpointer(folder, comm, WithState(model, local), optimizer)

Source: Douillard et al. 2023 (arXiv 2311.08105), algorithm 1; fragments, delay and alpha: Douillard et al. 2025
(arXiv 2501.18512), algorithm 2; alpha=None: Shen et al. 2019 (arXiv 1906.12043), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distributed.comm.communicator import Array, Communicator, ReduceOp, Work
from distributed.comm.work import CompletedWork
from distributed.data_parallel.comm_hooks import CommHook, allreduce
from distributed.data_parallel.compression.feedback import FeedbackHook, allreduce_bytes
from distributed.data_parallel.replicas import broadcast_params, check_layout
from minigrad.autodiff.hooks import Hooks
from minigrad.flat import FlatBuffer
from minigrad.flat_range import FlatRange
from minigrad.nn import Buffer
from minigrad.optim import Optimizer
from minigrad.optim.update_rules import LearningRate, Rule, check_rates
from minigrad.parameter import Parameter
from minigrad.words import counted


@dataclass(frozen=True)
class Nesterov:
    """The outer rule of DiLoCo, Nesterov's momentum without weight decay.

    v = momentum v + g; w -= lr (g + momentum v).

    Source: Sutskever et al. 2013, in the form of PyTorch's SGD(nesterov=True).
    Raises:
        ValueError: the learning rate is negative or not finite, or momentum is not from 0 to below 1.
    """

    lr: LearningRate = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_rates(self, momentum=self.momentum)

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
        own: where the weights of this rank are saved from.
        moved: (n,) how far this rank has come, then all of them: what travels.
        sum: where what is under way is saved from; None where nothing can be between two steps.
        departed: the weights of this rank when the sum set out, where what it learns since is carried on.
        work: the sum of how far the ranks have come, while it is under way.
    """

    part: FlatRange
    agreed: Array
    state: dict[str, Buffer]
    own: Buffer
    moved: Array
    sum: Buffer | None
    departed: Buffer | None
    work: Work | None = None


class LocalSteps:
    """Lets replicas step on their own, and agree from time to time.

    Making one is collective.

        local = LocalSteps(model.parameters(), comm, Nesterov(0.7, momentum=0.9), every=100, inner=optimizer)
        for x, y in batches:
            optimizer.zero_grad()
            backward_with_hooks(loss_fn(model(x), y), local.hooks())
            optimizer.step()
            local.step()

    Args:
        params: of the model, equal on all ranks from here on; rank 0's count.
        rule: the outer one; `Nesterov` is the paper's, SGD(1.0) takes the mean.
        every: steps from one agreement on a parameter to the next.
        num_fragments: parts of the model that are agreed on one after the other, evenly over `every` steps.
        delay: steps that a sum may take: it is applied so many steps after it set out.
        alpha: how much of its own weights a rank keeps where a fragment is agreed on: 0 takes what was agreed on. None:
            that, and besides all that this rank has learned during the delay.
        comm_hook: how it travels how far the ranks have come; `ErrorFeedback("int8")` sends a quarter of the bytes.
        inner: the optimizer of these ranks, to be saved as each of them has it, by a copy of its state; None: as one of
            them has it.

    Attributes:
        num_steps: so far.
        num_agreements: outer steps of each fragment so far.
        sent_bytes, plain_bytes: what this rank has sent so far, and what allreduces of the gradients would have. A
            hook with a memory counts what this process has sent.

    Raises:
        ValueError: every is no multiple of num_fragments or not above the delay, alpha is not in 0 .. 1, ranks have
            other parameters, or the world survives failures: see docs/recovery.md.
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
        alpha: float | None = None,
        comm_hook: CommHook = allreduce,
        inner: Optimizer | None = None,
    ) -> None:
        params = list(dict.fromkeys(params))
        if comm.survives:
            raise ValueError(
                "local steps give ranks different weights under one name, which a world that survives failures "
                f"(survive=True) cannot give to another rank; got rank {comm.rank} of {comm.size} of such a world"
            )
        if num_fragments < 1 or every < 1 or every % num_fragments:
            raise ValueError(f"every must be a multiple of num_fragments, got {every} and {num_fragments}")
        if num_fragments > len(params):
            raise ValueError(f"{num_fragments} fragments need as many parameters, got {len(params)}")
        if not 0 <= delay < every // num_fragments:
            apart = counted(every // num_fragments, "step")
            raise ValueError(f"delay must be at least 0 and below the {apart} between two fragments, got {delay}")
        if alpha is not None and not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1, got {alpha}")
        self.comm = comm.duplicate()
        check_layout("parameter", params, self.comm)
        broadcast_params(params, self.comm)
        FlatBuffer.adopt(params)
        self._rule = rule
        self._every, self._delay, self._alpha = every, delay, alpha or 0.0
        self._carries = alpha is None and delay > 0
        # The name has what decides which sums are under way: a checkpoint of other settings has other memories.
        counts = np.zeros(1 + num_fragments, np.int64)
        how = f"every_{every}_delay_{delay}" + ("_carried" if self._carries else "")
        self._counts = Buffer(counts, f"local_steps.counts_{how}")
        self._whose = f"{comm.rank}_of_{comm.size}"
        self._fragments = [
            [self._piece(part) for part in FlatBuffer.ranges_of(group)] for group in _cut(params, num_fragments)
        ]
        slices = inner.state_slices() if inner is not None else ()
        self._hook = comm_hook
        if isinstance(comm_hook, FeedbackHook):
            comm_hook.attach_to([(piece.moved, piece.part) for piece in self._pieces()], self.comm)
        self._inner = [(held.array, self._own(held.array, name)) for name, held in slices]

    @property
    def num_steps(self) -> int:
        return int(self._counts.data[0])

    @property
    def num_agreements(self) -> list[int]:
        return [int(count) for count in self._counts.data[1:]]

    @property
    def sent_bytes(self) -> int:
        if isinstance(self._hook, FeedbackHook):
            return self._hook.sent_bytes
        sums = [count + self._is_under_way(number) for number, count in enumerate(self.num_agreements)]
        return sum(count * self._bytes_of(fragment) for count, fragment in zip(sums, self._fragments, strict=True))

    @property
    def plain_bytes(self) -> int:
        return self.num_steps * sum(map(self._bytes_of, self._fragments))

    @property
    def in_step(self) -> bool:
        """Whether all ranks have the same weights now."""
        whole = len(self._fragments) == 1 and not self._alpha and not self._carries
        return not self.num_steps or (whole and self.num_steps % self._every == 0)

    def hooks(self) -> Hooks:
        """Return hooks for a backward, between whose ops sums move on.

        With MPI they move nowhere else but in calls of a communicator.
        """
        return Hooks(between_ops=self.comm.progress)

    def step(self) -> None:
        """Count a step; where a fragment is due, send it or take what was agreed on.

        Collective in the steps in which a fragment arrives. Call it after each `optimizer.step()`.
        """
        self._counts.data[0] += 1
        for number, fragment in enumerate(self._fragments):
            if self._steps_until(number) == self._delay:
                self._launch(fragment)
            if self._steps_until(number) == 0:
                self._arrive(number, fragment)
        self.comm.progress()

    def mean(self, value: float) -> float:
        """Return the mean over ranks of a number that each has, such as its loss.

        Collective.
        """
        return float(self.comm.allreduce(np.array([value]), op=ReduceOp.MEAN).wait()[0])

    def buffers(self) -> list[Buffer]:
        """Return what a checkpoint has beside what was agreed on.

        It is there after `pack`; see `WithState`.
        """
        buffers = [self._counts, *(buffer for _, buffer in self._inner)]
        for piece in self._pieces():
            buffers += [piece.own, *piece.state.values()]
            buffers += [buffer for buffer in (piece.sum, piece.departed) if buffer is not None]
        return buffers + self._kept()

    def pack(self) -> None:
        """Let the model have what was last agreed on. Collective.

        `buffers` then have what is this rank's own.
        """
        for piece in self._pieces():
            if piece.sum is not None:
                piece.sum.data = np.zeros_like(piece.sum.data) if piece.work is None else piece.work.wait()
            data: Array = piece.part.data
            piece.own.data = data
            data[...] = piece.agreed
            piece.part.note_change("local steps")
        for array, buffer in self._inner:
            buffer.data = array

    def unpack(self) -> None:
        """Let the model have this rank's own weights again. Collective.

        It is for after a `pack`, and after a load.
        """
        kept = self._kept()
        what_is_kept = [buffer.data.copy() for buffer in kept]  # which a sum that comes to its end would change
        self._drop_sums()
        for buffer, values in zip(kept, what_is_kept, strict=True):
            buffer.data = values
        for number, fragment in enumerate(self._fragments):
            for piece in fragment:
                if piece.sum is not None and self._is_under_way(number):
                    piece.work = CompletedWork(piece.sum.data)
                data: Array = piece.part.data
                piece.agreed[...] = data
                data[...] = piece.own.data
                piece.part.note_change("local steps")
        for array, buffer in self._inner:
            array[...] = buffer.data

    def forget(self) -> None:
        """Begin anew from the weights that there are now. Collective.

        They must be the same on all ranks.
        """
        self._counts.data[:] = 0
        self._drop_sums()
        for piece in self._pieces():
            piece.agreed[...] = piece.part.data
            for key, array in self._rule.init(piece.agreed).items():
                piece.state[key].data = array
        if isinstance(self._hook, FeedbackHook):
            self._hook.forget()

    def _pieces(self) -> Iterator[_Piece]:
        return (piece for fragment in self._fragments for piece in fragment)

    def _kept(self) -> list[Buffer]:
        """Return what the hook keeps, which is saved too."""
        return self._hook.buffers() if isinstance(self._hook, FeedbackHook) else []

    def _drop_sums(self) -> None:
        for piece in self._pieces():
            if piece.work is not None:
                piece.work.wait()
                piece.work = None

    def _steps_until(self, number: int) -> int:
        """Return in how many steps a fragment is agreed on next; 0: in the one that is just done."""
        apart = self._every // len(self._fragments)
        return ((number + 1) * apart - self.num_steps) % self._every

    def _is_under_way(self, number: int) -> bool:
        return 0 < self._steps_until(number) <= self._delay

    def _bytes_of(self, fragment: Sequence[_Piece]) -> int:
        return sum(allreduce_bytes(piece.part.data.nbytes, self.comm.size) for piece in fragment)

    def _launch(self, fragment: Sequence[_Piece]) -> None:
        for piece in fragment:
            own: Array = piece.part.data
            if piece.departed is not None:
                piece.departed.data = own
            piece.moved[...] = piece.agreed - own
            piece.work = self._hook(piece.moved, self.comm)

    def _arrive(self, number: int, fragment: Sequence[_Piece]) -> None:
        lr, step = self._rule.lr, self.num_agreements[number]
        rate = lr(step) if callable(lr) else lr
        for piece in fragment:
            assert piece.work is not None
            with self.comm.waiting_for(f"the agreement on {piece.part.params[0].name} ..."):
                gradient = piece.work.wait() / self.comm.size
            piece.work = None
            state = {key: buffer.data for key, buffer in piece.state.items()}
            self._rule.update(piece.agreed, gradient, state, lr=rate, step=step, decay=False)
            own: Array = piece.part.data
            if piece.departed is not None:
                own += piece.agreed - piece.departed.data
            else:
                own[...] = piece.agreed + self._alpha * (own - piece.agreed) if self._alpha else piece.agreed
            piece.part.note_change("local steps")
        self._counts.data[1 + number] += 1

    def _piece(self, part: FlatRange) -> _Piece:
        first, agreed = part.params[0].name, part.data.copy()
        state = {key: Buffer(array, f"{first}.outer_{key}") for key, array in self._rule.init(agreed).items()}
        under_way = Buffer(agreed, f"{first}.sum_under_way") if self._delay else None
        departed = self._own(agreed, f"{first}.departed") if self._carries else None
        return _Piece(part, agreed, state, self._own(part.data, first), agreed.copy(), under_way, departed)

    def _own(self, array: Array, name: str) -> Buffer:
        """Return where an array is saved from that each rank has another one of."""
        return Buffer(array, f"{name}.own_{self._whose}")


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
