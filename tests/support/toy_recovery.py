"""A small GPT in any layout, trained by a loop that goes on when ranks die; and what it must end with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from distributed import Communicator, DistributedDataParallel, Mesh
from distributed.comm.local import Killed
from distributed.data import TokenBatches
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.compression.feedback import FeedbackHook, WithState
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.recovery import recovering
from minigrad import Hooks, cross_entropy, rng
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer
from minigrad.optim.muon import Muon, is_hidden_matrix
from minigrad.precision import use_precision
from pipeline import SCHEDULES, LocalStages, PipelineExecutor, PipelineStage

CONFIG = gpt.GPTConfig(vocab_size=11, context=4, num_layers=2, num_heads=1, width=4, dropout=0.2)
TOKENS = np.random.default_rng(5).integers(0, 11, 400)
BATCH = 12


@dataclass
class Toy:
    model: LocalStages | WithState
    optimizer: Optimizer
    data: TokenBatches
    ddp: DistributedDataParallel
    pipe: PipelineExecutor


def builder(
    pp: int = 1,
    schedule: str = "1f1b",
    lr: Any = 1e-2,
    *,
    zero: int = 0,
    step_early: bool = False,
    muon: bool = False,
    max_norm: float | None = None,
    precision: str = "",
    exact: bool = False,
    compress: str = "",
    hook: Callable[[], FeedbackHook] | None = None,
) -> Callable[[Communicator], Toy]:
    """Return what builds a toy for a communicator: pipelines of `pp` ranks, as many as fit; one of all ranks for 0.

    Exact sums have the same micro-batches, so the same bits, in every layout.
    """

    def build(comm: Communicator) -> Toy:
        num_stages = min(pp or comm.size, comm.size)
        config = replace(CONFIG, num_layers=max(2, SCHEDULES[schedule].num_stages(pp or 4)))
        mesh = Mesh(comm, dp=comm.size // num_stages, pp=num_stages)
        dtype = np.float32 if precision or exact else np.float64
        stages = PipelineStage.of(gpt.layers(config), mesh.pp, SCHEDULES[schedule], seed=1, dtype=dtype)
        data = TokenBatches(TOKENS, batch_size=BATCH, context=4, seed=2, rank=mesh.dp.rank, size=mesh.dp.size)
        comm_hook = ErrorFeedback(compress) if compress else hook() if hook is not None else None
        whole = is_hidden_matrix if muon else None
        how: dict[str, Any] = {"zero": zero, "step_early": step_early, "whole": whole}
        how["sums"] = "exact" if exact else "plain"
        num_microbatches = BATCH // mesh.dp.size if exact else 2
        ddp = DistributedDataParallel(stages, mesh.dp, comm_hook=comm_hook or allreduce, **how)
        if precision:
            use_precision(stages.parameters(), precision)
        optimizer = ddp.optimizer(Muon(lr, others=AdamW(lr)) if muon else AdamW(lr), max_norm=max_norm)
        model: Any = stages
        if comm_hook is not None:
            comm_hook.attach(ddp.buckets)
            model = WithState(stages, comm_hook)
        pipe = PipelineExecutor(
            stages, mesh.pp, SCHEDULES[schedule], num_microbatches=num_microbatches, loss_fn=cross_entropy
        )
        return Toy(model, optimizer, data, ddp, pipe)

    return build


PHASES = ("begin", "hook", "reduced", "committed")
"""Moments of a step: before anything, inside the backward, when the gradients are reduced, after the optimizer."""


def train(
    comm: Communicator,
    build: Callable[[Communicator], Toy],
    *,
    num_steps: int = 4,
    dies: Mapping[int, tuple[int, str]] | None = None,
    die: Callable[[], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    **how: Any,
) -> Any:
    """Train, and return the parameters of this rank by name, the losses by step, and the recoveries.

    Args:
        dies: rank of the first world -> the step and the phase in which it dies.
        die: ends this rank; by default as a rank of a LocalWorld dies.
        on_step: called after each step.
    """
    moment = None if comm.is_newcomer else (dies or {}).get(comm.rank)

    def reach(step: int, phase: str) -> None:
        if (step, phase) == moment:
            die() if die is not None else kill()

    losses: dict[int, list[float]] = {}
    recoveries = []
    parameters = {}
    for attempt in recovering(comm, build, num_steps=num_steps, **how):
        step = attempt.step
        recoveries += [attempt.recovery] if attempt.recovery else []
        with attempt as toy:
            reach(step, "begin")
            x, y = toy.data.next()
            toy.optimizer.zero_grad()
            hooks = toy.ddp.hooks(num_samples=len(x)) + Hooks(on_grad_ready=lambda _, step=step: reach(step, "hook"))
            with rng.scope(seed=3, step=step, first_sample=toy.ddp.first_sample):
                loss = toy.pipe.step(x, y, hooks=hooks)
            toy.ddp.wait()
            loss = toy.ddp.mean(loss)
            reach(step, "reduced")
            attempt.commit()
            reach(step, "committed")
            parameters = {p.name: p.data.copy() for p in toy.model.parameters()}
        if attempt.committed:
            losses.setdefault(step, []).append(loss)
            if on_step is not None:
                on_step(step)
    return parameters, losses, recoveries


def digest(parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Return the first name and a hash of all values."""
    names = sorted(parameters)
    return names[0], sha256(b"".join(parameters[name].tobytes() for name in names)).hexdigest()


def kill() -> None:
    raise Killed
