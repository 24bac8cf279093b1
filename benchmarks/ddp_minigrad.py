"""A job of `ddp.py`: minigrad, data parallel. Rank 0 prints what was measured as one line of JSON.

mpirun -n 2 python benchmarks/ddp_minigrad.py nano-cpu --batch 12 --turns 3 --variants inside after
mpirun -n 2 python benchmarks/ddp_minigrad.py mlp --batch 64 --turns 100
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from engine_jobs import LEARNING_RATE, SIZES
from interleave import STEPS_A_TURN, Turnstile, take_turns

from distributed import (
    BucketedTrainer,
    Communicator,
    DistributedDataParallel,
    DistributedTrainer,
    SoloCommunicator,
    TrainingConfig,
    Work,
    world,
)
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.compression.feedback import FeedbackHook
from distributed.data_parallel.trainer import Trainer
from minigrad import Parameter, backward, backward_with_hooks, cross_entropy
from minigrad.models import GPT, MLP, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer

MLP_WIDTHS = [784, 128, 127, 126, 125, 124, 123, 10]  # of ShallowSpeed, which trains it with SGD
POLL_SECONDS = 200e-6  # of a process that sleeps while messages travel
TRAINING = TrainingConfig(learning_rate=LEARNING_RATE)

Step = Callable[[], None]


class GPTSteps:
    """The variants of a GPT's step, each with a model of its own.

    Args:
        batch: sequences a rank.

    Attributes:
        ready: of each step `alone`, when each bucket would be launched, in seconds from the start of the backward.
        transfers: of each step `apart`, the seconds of each bucket.
        cpu: of each step `asleep`, the CPU seconds.
        bytes: of parameters, gradients and AdamW's state on this rank, between two steps, of each loop.
    """

    def __init__(self, comm: Communicator, size: str, batch: int) -> None:
        self.comm = comm
        self.config = GPTConfig(**SIZES[size])
        shape = (batch, self.config.context + 1)
        rows = np.random.default_rng(comm.rank).integers(0, self.config.vocab_size, shape)
        self.x, self.y = rows[:, :-1].copy(), rows[:, 1:].copy()
        self.ready: list[list[float]] = []
        self.transfers: list[list[float]] = []
        self.cpu: list[float] = []
        self.bytes: dict[str, int] = {}

    def inside(self) -> Step:
        """Reduce inside the backward."""
        model = GPT(self.config)
        return self._training(model, BucketedTrainer(model, self.comm, TRAINING))

    def after(self) -> Step:
        """Reduce after the backward."""
        model = GPT(self.config)
        return self._training(model, DistributedTrainer(model, self.comm, TRAINING))

    def alone(self) -> Step:
        """Reduce nothing."""

        def note(grad: Any, comm: Communicator) -> Work:
            self.ready[-1].append(time.perf_counter() - self._backward_start)
            return allreduce(grad, comm)

        model = GPT(self.config)
        train = self._training(model, BucketedTrainer(model, SoloCommunicator(), TRAINING, comm_hook=note))

        def step() -> None:
            self.ready.append([])
            train()

        return step

    def plain(self) -> Step:
        """Reduce inside the backward, and take no norm: what the next three are measured against."""
        return self._loop()

    def hooked(self, hook: FeedbackHook | None, bucket_bytes: int) -> tuple[Step, DistributedDataParallel]:
        """Likewise, in buckets of some size, through a comm hook."""
        model = GPT(self.config)
        ddp = DistributedDataParallel(model, self.comm, bucket_bytes=bucket_bytes, comm_hook=hook or allreduce)
        if hook is not None:
            hook.attach(ddp.buckets)
        return self._loop_of(model, ddp, ddp.optimizer(AdamW(LEARNING_RATE))), ddp

    def backward_seconds(self) -> float:
        """Return how long a backward takes alone."""
        model = GPT(self.config)
        seconds = []
        for _ in range(5):
            loss = cross_entropy(model(self.x), self.y)
            start = time.perf_counter()
            backward(loss)
            seconds.append(time.perf_counter() - start)
        return median(seconds[1:])

    def parameters(self) -> list[Parameter]:
        """Return those of such a model."""
        return list(GPT(self.config).parameters())

    def early(self) -> Step:
        """Begin the step before all buckets are there."""
        return self._loop(step_early=True)

    def zero1(self) -> Step:
        """Share out the optimizer's state."""
        return self._loop(zero=1)

    def zero2(self) -> Step:
        """Share out gradients too."""
        return self._loop(zero=2)

    def clipped(self) -> Step:
        """Take a norm too: what exact sums are measured against."""
        return self._loop(max_norm=1.0)

    def exact(self) -> Step:
        """Likewise, with sums and a norm that show no layout."""
        return self._loop(max_norm=1.0, sums="exact")

    def joined(self) -> Step:
        """Ask in each step whether other ranks have batches left."""
        return self._joined(has_batches=True)

    def uneven(self) -> Step:
        """Likewise, where rank 0 alone has some."""
        return self._joined(has_batches=self.comm.rank == 0)

    def _joined(self, *, has_batches: bool) -> Step:
        model = GPT(self.config)
        ddp = DistributedDataParallel(model, self.comm)
        optimizer = ddp.optimizer(AdamW(LEARNING_RATE))
        batches = ddp.join(repeat((self.x, self.y)) if has_batches else ())

        def step() -> None:
            batch = next(batches)
            optimizer.zero_grad()
            if batch is None:
                ddp.reduce_no_samples()
            else:
                x, y = batch
                backward_with_hooks(cross_entropy(model(x), y), ddp.hooks(num_samples=len(x)))
            ddp.wait()
            optimizer.step()

        return step

    def _loop(self, max_norm: float | None = None, **options: Any) -> Step:
        """Return a step without a trainer."""
        model = GPT(self.config)
        ddp = DistributedDataParallel(model, self.comm, **options)
        optimizer = ddp.optimizer(AdamW(LEARNING_RATE))
        held = sum(p.data.nbytes for p in model.parameters()) + ddp.buckets.grad_bytes
        held += sum(state.array.nbytes for _, state in optimizer.state_slices())
        plain = options.get("sums", "plain")
        kind = "early" if "step_early" in options else f"zero{options['zero']}" if "zero" in options else plain
        self.bytes[kind] = held
        return self._loop_of(model, ddp, optimizer, max_norm)

    def _loop_of(
        self, model: GPT, ddp: DistributedDataParallel, optimizer: Optimizer, max_norm: float | None = None
    ) -> Step:
        def step() -> None:
            optimizer.zero_grad()
            loss = cross_entropy(model(self.x), self.y)
            backward_with_hooks(loss, ddp.hooks(num_samples=len(self.x)))
            ddp.wait()
            if max_norm is not None:
                ddp.clip_by_global_norm(max_norm)
            optimizer.step()

        return step

    def messages(self) -> Step:
        """Reduce, and do nothing else."""
        ddp = self._ddp()

        def step() -> None:
            for work in launch_all(ddp):
                work.wait()

        return step

    def apart(self) -> Step:
        """Likewise, one bucket after the other."""
        ddp = self._ddp()

        def step() -> None:
            marks = [time.perf_counter()]
            for bucket in ddp.buckets.buckets:
                ddp.comm.allreduce(bucket.range.grad).wait()
                marks.append(time.perf_counter())
            self.transfers.append(np.diff(marks).tolist())

        return step

    def asleep(self) -> Step:
        """Likewise, asleep but for a look now and then."""
        ddp = self._ddp()

        def step() -> None:
            start = time.process_time()
            works = launch_all(ddp)
            while not all(work.test() for work in works):
                time.sleep(POLL_SECONDS)
            self.cpu.append(time.process_time() - start)

        return step

    def _ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(GPT(self.config), self.comm)

    def _training(self, model: GPT, trainer: Trainer) -> Step:
        def step() -> None:
            loss = cross_entropy(model(self.x), self.y)
            self._backward_start = time.perf_counter()
            trainer.backward_and_step(loss, num_samples=len(self.x))

        return step


def launch_all(ddp: DistributedDataParallel) -> list[Work]:
    return [ddp.comm.allreduce(bucket.range.grad) for bucket in ddp.buckets.buckets]


def mlp(comm: Communicator, batch: int) -> Step:
    """Prepare a step of ShallowSpeed's MLP; `batch` is of one rank."""
    generator = np.random.default_rng(comm.rank)
    x = generator.standard_normal((batch, MLP_WIDTHS[0]), np.float32)
    y = generator.integers(0, MLP_WIDTHS[-1], batch)
    model = MLP(MLP_WIDTHS)
    ddp = DistributedDataParallel(model, comm)
    optimizer = Optimizer(model.parameters(), SGD(LEARNING_RATE))

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        backward_with_hooks(loss, ddp.hooks(num_samples=batch))
        ddp.wait()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=["mlp", *SIZES])
    parser.add_argument("--batch", type=int, required=True, help="samples a rank")
    parser.add_argument("--turns", type=int, required=True, help="of each variant, a few steps each")
    parser.add_argument("--steps", type=int, default=STEPS_A_TURN, help="of a turn (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", default=["inside"], help="of a GPT")
    parser.add_argument("--turnstile", nargs=2, metavar=("FILE", "NAME"), help="take turns with other jobs")
    args = parser.parse_args()
    turnstile = Turnstile(Path(args.turnstile[0]), args.turnstile[1]) if args.turnstile else None
    comm = world()
    notes = {}
    if args.size == "mlp":
        variants = {"inside": mlp(comm, args.batch)}
    else:
        steps = GPTSteps(comm, args.size, args.batch)
        variants = {name: getattr(steps, name)() for name in args.variants}
        notes = {"ready": steps.ready, "transfers": steps.transfers, "cpu": steps.cpu, "bytes": steps.bytes}
    result = take_turns(
        variants,
        args.turns,
        barrier=comm.barrier,
        gather=comm.gather_objects,
        steps_a_turn=args.steps,
        turnstile=turnstile,
    )
    if comm.rank == 0:
        print(json.dumps(result | notes))


if __name__ == "__main__":
    main()
