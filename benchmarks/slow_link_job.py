"""A job of `slow_link.py`: replicas that tell each other as little as a method lets them. It prints a line of JSON.

python benchmarks/slow_link_job.py loss plain --steps 600 --seed 1 --folder runs/slow_link --seconds 90
benchmarks/two_hosts --rate 100mbit mpirun -n 2 python benchmarks/slow_link_job.py speed plain int8

Every method trains the same model on the same samples, with the learning rate and the clipping of `train_gpt.py`. A
loss may be had in several calls: each goes on where the last one saved. Its ranks are threads of one process, which
give the bits that processes give.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine_jobs import BATCH, SIZES
from rank_jobs import NUM_RANKS

from common.text import load_tokens, split
from distributed import Communicator, DistributedDataParallel, LocalWorld, SoloCommunicator, world
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.data.batches import TokenBatches, validation_batches
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.compression.feedback import FeedbackHook, WithState, allreduce_bytes
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.compression.low_rank import PowerSGD
from distributed.data_parallel.compression.top_k import TopK
from distributed.data_parallel.local_steps import LocalSteps, Nesterov
from minigrad import backward_with_hooks, cross_entropy, no_grad
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import GPT, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.optim.clipping import clip_by_global_norm
from minigrad.optim.update_rules import Rule

CONFIG = GPTConfig(**(SIZES["nano-cpu"] | {"vocab_size": 256}))  # bytes
BATCH_OF_A_RANK = BATCH["nano-cpu"]
BUCKET_BYTES = 260 << 10  # a large matrix and its bias: with two in a bucket the link waits for the second
LEARNING_RATE, FLOOR, MAX_NORM = 3e-3, 0.1, 1.0
STEPS_A_ROUND = 30  # of each method; a multiple of every `every`, so that a round has all that travels
STEPS_BETWEEN = 10  # that send nothing, between two methods
LONGEST_WAIT_SECONDS = 600.0  # of a rank that has to share a core
STEPS_A_LOOK = 10  # from one look at the clock to the next

Tokens = np.ndarray


@dataclass(frozen=True)
class Method:
    """What replicas tell each other.

    Attributes:
        hook: makes how gradients travel in each step, or what local steps have learned; None: as they are.
        every, fragments, delay, alpha, outer: of local steps, where every is above 0.
        alone: nothing travels, and replicas drift apart.
    """

    hook: Callable[[], FeedbackHook] | None = None
    every: int = 0
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    outer: Rule = field(default_factory=Nesterov)
    alone: bool = False


def int8() -> FeedbackHook:
    return ErrorFeedback("int8")


METHODS = {
    "alone": Method(alone=True),
    "plain": Method(),
    "bfloat16": Method(lambda: ErrorFeedback("bfloat16")),
    "int8": Method(int8),
    "int4": Method(lambda: ErrorFeedback("int4")),
    "float4": Method(lambda: ErrorFeedback("float4_e2m1fn")),
    "powersgd": Method(PowerSGD),
    "topk": Method(TopK),
    "diloco": Method(every=30),
    "streaming": Method(every=30, fragments=3, delay=4, alpha=0.5),
    "mean": Method(every=5, outer=SGD(1.0)),
    "mean_carried": Method(int8, every=5, delay=2, outer=SGD(1.0)),
}


class Training:
    """A model in training by one method.

    Args:
        num_steps: of the run, for the learning rate.
        seed: of the weights and of the samples.
    """

    def __init__(self, method: Method, comm: Communicator, num_steps: int, seed: int = 0) -> None:
        self._comm = comm
        tokens, self._validation = split(load_tokens(None), context=CONFIG.context)
        self._data = TokenBatches(
            tokens,
            batch_size=comm.size * BATCH_OF_A_RANK,
            context=CONFIG.context,
            seed=seed,
            rank=comm.rank,
            size=comm.size,
        )
        self._model = GPT(CONFIG, seed=seed)
        floor = FLOOR * LEARNING_RATE
        rate = warmup_cosine(LEARNING_RATE, num_steps=num_steps, num_warmup_steps=num_steps // 10, floor=floor)
        rule = AdamW(rate, betas=(0.9, 0.99), weight_decay=0.1)
        self._hook = method.hook() if method.hook is not None else None
        self._comm_hook = self._hook or allreduce
        self._local: LocalSteps | None = None
        self._num_steps = 0
        self.warm_up_steps = method.every or 2
        if method.every:
            self._optimizer = Optimizer(self._model.parameters(), rule)
            self._local = LocalSteps(
                self._model.parameters(),
                comm,
                method.outer,
                every=method.every,
                num_fragments=method.fragments,
                delay=method.delay,
                alpha=method.alpha,
                comm_hook=self._comm_hook,
                inner=self._optimizer,
            )
            return
        ranks = SoloCommunicator() if method.alone else comm
        self._ddp = DistributedDataParallel(self._model, ranks, bucket_bytes=BUCKET_BYTES, comm_hook=self._comm_hook)
        if self._hook is not None:
            self._hook.attach(self._ddp.buckets)
        self._optimizer = self._ddp.optimizer(rule)

    def checkpoints(self, folder: Path) -> Checkpointer:
        """Return what saves this training there. Collective."""
        memory = self._local or self._hook
        model = self._model if memory is None else WithState(self._model, memory)
        return Checkpointer(folder, self._comm, model, self._optimizer, keep_last=1)

    @property
    def data(self) -> TokenBatches:
        return self._data

    @property
    def bytes_a_step(self) -> float:
        """What this rank has sent of gradients or weights, a step."""
        if self._local is not None:
            sent = self._local.sent_bytes
        elif self._hook is not None:
            sent = self._hook.sent_bytes
        else:
            size = self._ddp.comm.size
            sent = self._num_steps * allreduce_bytes(sum(p.data.nbytes for p in self._model.parameters()), size)
        return sent / self._num_steps

    def step(self) -> None:
        x, y = self._data.next()
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(x), y)
        if self._local is not None:
            backward_with_hooks(loss, self._local.hooks())
            clip_by_global_norm(self._model.parameters(), MAX_NORM)
            self._optimizer.step()
            self._local.step()
        else:
            backward_with_hooks(loss, self._ddp.hooks(num_samples=len(x)))
            self._ddp.wait()
            self._ddp.clip_by_global_norm(MAX_NORM)
            self._optimizer.step()
        self._num_steps += 1

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def validation_loss(self) -> float:
        """Return the mean loss over the text that is held back, of the weights that all ranks agree on. Collective."""
        if self._local is not None:
            self._local.pack()
        total, num_windows = 0.0, 0
        with no_grad():
            for x, y in validation_batches(
                self._validation,
                batch_size=BATCH_OF_A_RANK,
                context=CONFIG.context,
                rank=self._comm.rank,
                size=self._comm.size,
            ):
                total += len(x) * cross_entropy(self._model(x), y).item()
                num_windows += len(x)
        total, num_windows = self._comm.allreduce(np.array([total, num_windows], np.float64)).wait()
        return float(total / num_windows)


def loss(comm: Communicator, name: str, num_steps: int, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Train by a method for at most so long, and save; return the step, and at the end the validation loss."""
    start = time.perf_counter()
    training = Training(METHODS[name], comm, num_steps, seed)
    checkpoints = training.checkpoints(folder / f"{name}_{seed}")
    loaded = checkpoints.load()
    step = loaded.step if loaded is not None else 0
    if loaded is not None:
        training.data.load_state_dict(loaded.state)
    while step < num_steps:
        training.step()
        step += 1
        if step % STEPS_A_LOOK == 0 and comm.broadcast_object(time.perf_counter() - start > seconds):
            break
    checkpoints.save(step, training.data.state_dict())
    checkpoints.wait()
    return {"step": step, "loss": training.validation_loss() if step == num_steps else None}


def speeds(comm: Communicator, names: Sequence[str]) -> dict[str, Any]:
    """Let the methods take a turn each; return tokens a second of all ranks, and the bytes that each sends a step.

    A turn begins and ends where local steps have nothing under way. With each method's speed comes that of steps that
    send nothing, just before it and just after: the machine is not always as fast.
    """
    trainings = {name: Training(METHODS[name], comm, num_steps=600) for name in names}
    for training in trainings.values():  # kernels are compiled, and what is kept is made
        training.run(training.warm_up_steps)
    alone = Training(METHODS["alone"], comm, num_steps=600)
    found: dict[str, tuple[float, float]] = {}
    before = _speed(comm, alone, STEPS_BETWEEN)
    for name, training in trainings.items():
        speed = _speed(comm, training, STEPS_A_ROUND)
        after = _speed(comm, alone, STEPS_BETWEEN)
        found[name] = speed, (before + after) / 2
        before = after
    return {"speeds": found, "bytes": {name: training.bytes_a_step for name, training in trainings.items()}}


def _speed(comm: Communicator, training: Training, num_steps: int) -> float:
    """Return the tokens a second of all ranks in some steps."""
    comm.barrier()
    start = time.perf_counter()
    training.run(num_steps)
    comm.barrier()
    return comm.size * BATCH_OF_A_RANK * CONFIG.context * num_steps / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    of_loss = jobs.add_parser("loss")
    of_loss.add_argument("method", choices=METHODS)
    of_loss.add_argument("--steps", type=int, default=600, help="(default: %(default)s)")
    of_loss.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    of_loss.add_argument("--folder", type=Path, required=True, help="what is saved there is gone on with")
    of_loss.add_argument(
        "--seconds", type=float, default=math.inf, help="then save and end (default: at the last step)"
    )
    of_speed = jobs.add_parser("speed")
    of_speed.add_argument("methods", nargs="+", choices=METHODS)
    args = parser.parse_args()
    if args.job == "loss":
        ranks = LocalWorld(NUM_RANKS, timeout_seconds=LONGEST_WAIT_SECONDS)
        result, *_ = ranks.run(loss, args.method, args.steps, args.seed, args.folder, args.seconds)
        print(json.dumps(result))
        return
    comm = world()
    result = speeds(comm, args.methods)
    if comm.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
