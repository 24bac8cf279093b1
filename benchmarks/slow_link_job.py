"""A job of `slow_link.py`: replicas that tell each other as little as a method lets them. Rank 0 prints a line of JSON.

mpirun -n 2 python benchmarks/slow_link_job.py loss --methods plain --steps 600
benchmarks/two_hosts --rate 100mbit mpirun -n 2 python benchmarks/slow_link_job.py speed --methods plain int8

Every method trains the same model on the same samples, with the learning rate and the clipping of `train_gpt.py`.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from engine_jobs import BATCH, SIZES

from common.text import load_tokens, split
from distributed import Communicator, DistributedDataParallel, SoloCommunicator, world
from distributed.data.batches import TokenBatches, validation_batches
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.compression import ErrorFeedback
from distributed.data_parallel.feedback import FeedbackHook, allreduce_bytes
from distributed.data_parallel.local_steps import LocalSteps, Nesterov
from distributed.data_parallel.low_rank import PowerSGD
from distributed.data_parallel.top_k import TopK
from minigrad import backward, backward_with_hooks, cross_entropy, no_grad
from minigrad.clipping import clip_by_global_norm
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer

CONFIG = GPTConfig(**(SIZES["nano-cpu"] | {"vocab_size": 256}))  # bytes
BATCH_OF_A_RANK = BATCH["nano-cpu"]
LEARNING_RATE, FLOOR, MAX_NORM = 3e-3, 0.1, 1.0
STEPS_A_ROUND = 30  # of each method; a multiple of every `every`, so that a round has all that travels

Tokens = np.ndarray


@dataclass(frozen=True)
class Method:
    """What replicas tell each other.

    Attributes:
        hook: makes how gradients travel in each step; None: as they are.
        every, fragments, delay, alpha, outer_lr, outer_momentum: of local steps, where every is above 0.
        alone: nothing travels, and replicas drift apart.
    """

    hook: Callable[[], FeedbackHook] | None = None
    every: int = 0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    alone: bool = False


METHODS = {
    "alone": Method(alone=True),
    "plain": Method(),
    "bfloat16": Method(lambda: ErrorFeedback("bfloat16")),
    "int8": Method(lambda: ErrorFeedback("int8")),
    "float8_e4m3fn": Method(lambda: ErrorFeedback("float8_e4m3fn")),
    "powersgd": Method(PowerSGD),
    "topk": Method(TopK),
    "local_10": Method(every=10),
    "local_30": Method(every=30),
    "streaming_30": Method(every=30, fragments=3, delay=4, alpha=0.5),
}


class Training:
    """A model in training by one method.

    Args:
        num_steps: of the run, for the learning rate.
    """

    def __init__(self, method: Method, comm: Communicator, num_steps: int) -> None:
        self._comm = comm
        tokens, self._validation = split(load_tokens(None), context=CONFIG.context)
        self._data = TokenBatches(
            tokens,
            batch_size=comm.size * BATCH_OF_A_RANK,
            context=CONFIG.context,
            seed=0,
            rank=comm.rank,
            size=comm.size,
        )
        self._model = GPT(CONFIG, seed=0)
        floor = FLOOR * LEARNING_RATE
        rate = warmup_cosine(LEARNING_RATE, num_steps=num_steps, num_warmup_steps=num_steps // 10, floor=floor)
        rule = AdamW(rate, betas=(0.9, 0.99), weight_decay=0.1)
        self._hook = method.hook() if method.hook is not None else None
        self._local: LocalSteps | None = None
        self._num_steps = 0
        if method.every:
            self._optimizer = Optimizer(self._model.parameters(), rule)
            self._local = LocalSteps(
                self._model.parameters(),
                comm,
                Nesterov(method.outer_lr, method.outer_momentum),
                every=method.every,
                num_fragments=method.fragments,
                delay=method.delay,
                alpha=method.alpha,
                inner=self._optimizer,
            )
            return
        ranks = SoloCommunicator() if method.alone else comm
        self._ddp = DistributedDataParallel(self._model, ranks, comm_hook=self._hook or allreduce)
        if self._hook is not None:
            self._hook.attach(self._ddp.buckets)
        self._optimizer = self._ddp.optimizer(rule)

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
            backward(loss)
            clip_by_global_norm(self._model.parameters(), MAX_NORM)
            self._optimizer.step()
            self._local.step()
        else:
            backward_with_hooks(loss, self._ddp.hooks(num_samples=len(x)))
            self._ddp.wait()
            self._ddp.clip_by_global_norm(MAX_NORM)
            self._optimizer.step()
        self._num_steps += 1

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


def losses(comm: Communicator, methods: dict[str, Method], num_steps: int) -> dict[str, Any]:
    """Train by each method, and return the validation losses."""
    result = {}
    for name, method in methods.items():
        training = Training(method, comm, num_steps)
        for _ in range(num_steps):
            training.step()
        result[name] = training.validation_loss()
    return {"losses": result}


def speeds(comm: Communicator, methods: dict[str, Method], num_rounds: int) -> dict[str, Any]:
    """Let the methods take turns, and return the tokens a second of all ranks, round by round."""
    num_steps = (1 + num_rounds) * STEPS_A_ROUND
    trainings = {name: Training(method, comm, num_steps) for name, method in methods.items()}
    result: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(1 + num_rounds):
        for name, training in trainings.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                training.step()
            comm.barrier()
            if number:  # the first one compiles kernels
                tokens = comm.size * BATCH_OF_A_RANK * CONFIG.context * STEPS_A_ROUND
                result[name].append(tokens / (time.perf_counter() - start))
    return {"speeds": result, "bytes": {name: training.bytes_a_step for name, training in trainings.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["loss", "speed"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=600, help="of a loss (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of a speed (default: %(default)s)")
    args = parser.parse_args()
    comm = world()
    methods = {name: METHODS[name] for name in args.methods}
    result = losses(comm, methods, args.steps) if args.what == "loss" else speeds(comm, methods, args.rounds)
    if comm.rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
