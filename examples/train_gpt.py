# mpirun -n 2 python -m mpi4py examples/train_gpt.py --dp 2
"""Train a byte-level GPT on real English text: on one process, data parallel, in a pipeline, or both.

python examples/train_gpt.py                                                    one process
mpirun -n 2 python -m mpi4py examples/train_gpt.py --dp 2                       two replicas
mpirun -n 2 python -m mpi4py examples/train_gpt.py --pp 2 --schedule 1f1b       one pipeline of two stages
mpirun -n 4 python -m mpi4py examples/train_gpt.py --dp 2 --pp 2                two pipelines
mpirun -n 2 python -m mpi4py examples/train_gpt.py --dp 2 --zero 2              replicas share out state and gradients
python -m distributed.recovery -n 2 examples/train_gpt.py --dp 2 --heal replace     whose ranks may be killed

The same flags besides --dp and --pp give the same model, up to rounding, in every layout; with --exact to the last bit,
where dp * microbatches is the same. A run that was ended, by `kill -TERM`, by `kill -9` or by a power cut, goes on with
--resume auto, in any layout.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import numpy as np

from common.init_from import load_weights
from common.text import load_tokens, split, trigram_nats
from common.train_gpt_settings import TrainSettings
from distributed import (
    Communicator,
    DistributedDataParallel,
    Mesh,
    NormOverRanks,
    SoloCommunicator,
    local_rank,
    weights_sha256,
    world,
)
from distributed.data.batches import TokenBatches, validation_batches
from distributed.data.prefetch import Prefetched
from distributed.data.tokenizer import TOKENIZER, Tokenizer
from distributed.data_parallel.bucket_size import choose_bucket_bytes
from distributed.data_parallel.comm_hooks import allreduce
from distributed.data_parallel.compression.feedback import FeedbackHook, WithState
from distributed.data_parallel.compression.few_bits import ErrorFeedback
from distributed.data_parallel.compression.low_rank import PowerSGD
from distributed.data_parallel.compression.top_k import TopK
from distributed.recovery import Heal
from distributed.run import JoinedState, Run, read_settings, run_script
from minigrad import cross_entropy, rng
from minigrad.backend import Array, place, synchronize, use_gpu
from minigrad.cuda_graph import CapturedStep
from minigrad.lr_schedule import scaled, warmup_cosine
from minigrad.models import gpt
from minigrad.models.generation import Sampling
from minigrad.optim import AdamW, Optimizer, Rule
from minigrad.optim.muon import Muon, is_hidden_matrix
from minigrad.optim.param_groups import Group, Groups
from minigrad.parameter import Parameter
from minigrad.precision import LossScale, use_precision
from minigrad.step_guard import StepGuard
from minigrad.tensor import Tensor
from pipeline import SCHEDULES, LocalStages, PipelineExecutor, PipelineStage, Schedule
from pipeline.generation import generate

MUON_RATE = 6.0
SAMPLE_TOKENS = 300
SAMPLE_SECONDS = 20.0
SAMPLE_TEMPERATURE = 0.8


def main() -> None:
    settings = read_settings(TrainSettings, __doc__)
    tokens = load_tokens(settings.text, vocab_size=settings.vocab)
    train, validation = split(tokens, context=settings.context, num_windows=settings.num_microbatches)
    if settings.device == "cuda":
        use_gpu(local_rank())
    comm = world(survive=settings.heal != "none", gpus=settings.device == "cuda" and settings.heal == "none")
    run = Run(settings, comm, samples="tokens", size=settings.context, device=settings.device, loss_unit="nats a token")
    is_bytes = settings.vocab == 256
    tokenizer = Tokenizer.beside(settings.text) if settings.text is not None and not is_bytes else None
    if tokenizer is not None:
        run.keep(Path(settings.text or "").parent / TOKENIZER)
    bytes_a_token = tokenizer.bytes_a_token(validation) if tokenizer is not None else 1.0 if is_bytes else None
    config = gpt.GPTConfig(
        vocab_size=settings.vocab,
        context=settings.context,
        num_layers=settings.layers,
        num_heads=settings.heads,
        width=settings.width,
        dropout=settings.dropout,
    )
    scale = LossScale() if settings.computed_in == "float16" else None
    guard = StepGuard() if scale is None else scale

    attempts = run.attempts(
        lambda ranks: Training(settings, config, train, ranks, scale, run.say),
        heal=None if settings.heal == "none" else Heal(settings.heal),
        num_spares=settings.spares,
        buddy_every=settings.buddy_every,
        usable=None if settings.heal in ("none", "replace") else lambda size: math.prod(settings.layout(size)[:2]),
        rehearse=lambda: rehearse(settings, config, train),
    )
    for attempt in attempts:
        with attempt as training:
            ddp, pipe, optimizer = training.ddp, training.pipe, training.optimizer
            if training.captured is not None:  # a step with its optimizer's, which decides on the GPU whether it may
                on_device = training.captured(*training.batches.next())
                training.batches.prefetch()  # while the GPU computes
                loss = ddp.mean(float(on_device))
                if scale is None:
                    guard.allows(optimizer.grad_norm)
                optimizer.was_taken()
                attempt.commit(loss, take=False, grad_norm=optimizer.grad_norm)
            else:
                x, y = training.batches.next()
                optimizer.zero_grad()
                hooks = ddp.hooks(num_samples=len(x))
                with (
                    run.recorded(pipe, attempt.step, training.ddp),
                    rng.scope(seed=settings.seed, step=attempt.step, first_sample=ddp.first_sample),
                ):
                    loss = pipe.step(x, y, hooks=hooks)
                    ddp.wait()
                if scale is not None:
                    loss /= scale.value
                    scale.unscale(ddp.params)
                grad_norm = ddp.clip_by_global_norm(settings.clip or math.inf)
                # Whether it is allowed is the same on every rank, as the number is.
                attempt.commit(ddp.mean(loss), take=guard.allows(grad_norm), grad_norm=grad_norm)
            if settings.eval_every and (attempt.step + 1) % settings.eval_every == 0:
                with run.aside():
                    run.note(**figures(training.validation_loss(validation), bytes_a_token))
    training = run.training
    if training is not None and training.captured is not None and training.captured.num_launches:
        run.say(f"a step is one CUDA graph of {training.captured.num_launches} launches")
    if training is not None and settings.exact:
        run.say(f"weights {weights_sha256(training.stages, training.optimizer)}")
    if run.stopped:
        return
    hook = training.hook
    if hook is not None:
        run.say(f"a rank sent {hook.sent_bytes:,} bytes of gradients, {hook.plain_bytes:,} without --compress")

    loss = training.validation_loss(validation)
    training.stages.eval()
    noted = figures(loss, bytes_a_token)
    run.end(**noted)
    run.say(f"validation loss {loss:.3f} nats a token")
    prompt = validation[: max(1, settings.context // 2)]  # the rest is room: what is read is kept
    can_print = not settings.quiet and (tokenizer is not None or is_bytes)
    writes = can_print and training.mesh.dp.rank == 0
    sample = write(training.stages, training.schedule, prompt, settings) if writes else prompt
    if tokenizer is not None:
        run.say(f"{noted['validation_nats_per_byte']:.3f} nats a byte")
        before, written = ("".join(tokenizer.decode(ids)) for ids in (prompt, sample))
        run.say(f"after this text:\n{before}\nthe model writes:\n{written}")
    elif is_bytes:
        run.say(f"a trigram table gets {trigram_nats(train, validation):.3f}")
        run.say(f"after this text:\n{as_text(prompt)}\nthe model writes:\n{as_text(sample)}")


def figures(loss: float, bytes_a_token: float | None) -> dict[str, float]:
    """Return what is noted of a validation loss: also by the byte, which compares models of different tokens."""
    by_byte = {} if bytes_a_token is None else {"validation_nats_per_byte": loss / bytes_a_token}
    return {"validation_loss": loss} | by_byte


class Training:
    """What is made for the ranks that there are: of all of them, or of those that are left. Collective."""

    def __init__(
        self,
        settings: TrainSettings,
        config: gpt.GPTConfig,
        tokens: Array,
        comm: Communicator,
        scale: LossScale | None,
        say: Callable[[str], None],
    ) -> None:
        dp, pp, num_microbatches = settings.layout(comm.size)
        self.settings = settings
        self.mesh = Mesh(comm, dp=dp, pp=pp)
        self.schedule = SCHEDULES[settings.schedule]
        self.stages = PipelineStage.of(
            gpt.layers(config, recompute=settings.recompute, half_blocks=settings.half_blocks),
            self.mesh.pp,
            self.schedule,
            seed=settings.seed,
            dtype=settings.dtype,
            device=settings.device,
        )
        self.scale = scale
        if scale is not None:
            scale.move_to(self.stages.parameters()[0].data)
        if settings.init_from is not None:
            load_weights(self.stages.parameters(), config, settings.init_from)

        def loss_fn(logits: Tensor, targets: Array) -> Tensor:
            loss = cross_entropy(logits, targets)
            return loss if scale is None or not loss.requires_grad else loss * scale.factor

        self.pipe = PipelineExecutor(
            self.stages, self.mesh.pp, self.schedule, num_microbatches=num_microbatches, loss_fn=loss_fn
        )
        self.hook = comm_hook_of(settings)
        bucket_bytes = None if settings.bucket_mb is None else math.ceil(settings.bucket_mb * 2**20)
        if bucket_bytes == 0:
            seconds = self._backward_seconds(*self._batches(tokens).next(), num_microbatches)
            choice = choose_bucket_bytes(self.mesh.dp, self.stages.parameters(), seconds, self.hook or allreduce)
            bucket_bytes = choice.bucket_bytes
            say(str(choice))
        rule = rule_of(settings)
        self.ddp = DistributedDataParallel(
            self.stages,
            self.mesh.dp,
            bucket_bytes=bucket_bytes,
            comm_hook=self.hook or allreduce,
            zero=settings.zero,
            whole=is_hidden_matrix if settings.optimizer == "muon" else None,
            sums="exact" if settings.exact else "plain",
            check_every=settings.check_every,
            recorder=self.pipe.recorder,
        )
        self.pipe.check_deadlock_free(self.ddp)
        if settings.computed_in != "float32":
            use_precision(self.stages.parameters(), settings.computed_in)
        self.captured: CapturedStep | None = None
        if becomes_graph(settings, comm.size, comm.library):
            max_norm = settings.clip or math.inf
            if settings.zero:
                self.optimizer = self.ddp.optimizer(rule, max_norm=max_norm)
            else:
                whole = NormOverRanks(self.stages) if pp > 1 else None
                self.optimizer = Optimizer(self.ddp.params, rule, max_norm=max_norm, loss_scale=scale, norm_over=whole)
            self.captured = CapturedStep(self._step, self.optimizer, gather=comm.gather_objects)
        else:
            self.optimizer = self.ddp.optimizer(rule)
        if self.hook is not None:
            self.hook.attach(self.ddp.buckets)
        self.model = self.stages if self.hook is None else WithState(self.stages, self.hook)
        self.batches = Prefetched(self._batches(tokens), settings.device)
        self.data = JoinedState(self.batches, loss_scale=scale, sent=self.hook)

    def _batches(self, tokens: Array) -> TokenBatches:
        return TokenBatches(
            tokens,
            batch_size=self.settings.batch,
            context=self.settings.context,
            seed=self.settings.seed,
            rank=self.mesh.dp.rank,
            size=self.mesh.dp.size,
        )

    def _backward_seconds(self, x: Array, y: Array, num_microbatches: int) -> float:
        """Return about how long gradients take to become final: the last micro-batch's backward. Collective.

        A backward computes twice what a forward does. Weights stay as they are, and gradients as if this had not been.
        """
        x, y = place(x, self.settings.device), place(y, self.settings.device)
        params = self.stages.parameters()
        seconds = 0.0
        for _ in range(2):  # the first one loads and compiles kernels
            for p in params:
                p.grad = None
            start = time.perf_counter()
            with rng.scope(seed=self.settings.seed, step=0, first_sample=0):
                self.pipe.step(x, y)
            synchronize(params[0].data)
            seconds = time.perf_counter() - start
        for p in params:
            p.grad = None
        return seconds * 2 / 3 / num_microbatches

    def _step(self, x: Array, y: Array) -> Array:
        """Take a whole step, from a batch to new weights, without a question to the GPU."""
        self.optimizer.zero_grad()
        loss = self.pipe.step_on_device(x, y, hooks=self.ddp.hooks(num_samples=len(x)))
        self.ddp.wait()
        if self.scale is not None:
            loss = loss / self.scale.factor  # before the step changes it
        self.optimizer.step()
        return loss

    def validation_loss(self, tokens: Array) -> float:
        """Return the mean loss over all windows of `tokens`, without dropout. Collective."""
        settings, mesh = self.settings, self.mesh
        self.stages.eval()
        total = np.zeros(2)  # summed loss, number of windows
        batch_size = settings.batch // mesh.dp.size  # as in training, at least a window for each micro-batch
        for x, y in validation_batches(
            tokens, batch_size=batch_size, context=settings.context, rank=mesh.dp.rank, size=mesh.dp.size
        ):
            total += len(x) * self.pipe.evaluate(place(x, settings.device), place(y, settings.device)), len(x)
        mesh.dp.allreduce(total).wait()
        self.stages.train()
        return float(total[0] / total[1])


def becomes_graph(settings: TrainSettings, num_ranks: int, library: str) -> bool:
    """Return whether a step becomes one CUDA graph.

    Args:
        library: what carries messages between ranks.
    Raises:
        ValueError: it must, as --graph on says, and cannot.
    """
    if settings.graph == "off" or settings.why_no_graph:
        return False
    can_be = num_ranks == 1 or "NCCL" in library
    if settings.graph == "on" and not can_be:
        raise ValueError(
            f"--graph on of {num_ranks} ranks needs NCCL and a GPU for each of them, got messages by {library}"
        )
    return can_be


def rehearse(settings: TrainSettings, config: gpt.GPTConfig, tokens: Array) -> None:
    """Take a step of a block a stage by itself, so that a spare has loaded all that its first real step needs."""
    _, _, num_microbatches = settings.layout(1)
    config = replace(config, num_layers=SCHEDULES[settings.schedule].num_stages(1))
    settings = replace(settings, batch=num_microbatches, init_from=None, bucket_mb=None)
    scale = LossScale() if settings.computed_in == "float16" else None
    training = Training(settings, config, tokens, SoloCommunicator(), scale, lambda _: None)
    x, y = training.batches.next()
    training.optimizer.zero_grad()
    with rng.scope(seed=settings.seed, step=0, first_sample=0):
        training.pipe.step(x, y, hooks=training.ddp.hooks(num_samples=len(x)))
    training.ddp.wait()
    training.ddp.clip_by_global_norm(settings.clip or math.inf)
    training.optimizer.step()


def learning_rate(settings: TrainSettings) -> Callable[[int], float]:
    """Return the learning rate of each step: up during the warmup, then down to what is to be left."""
    return warmup_cosine(
        settings.lr,
        num_steps=settings.steps,
        num_warmup_steps=settings.num_warmup_steps,
        floor=settings.lr * settings.lr_end,
    )


def rule_of(settings: TrainSettings) -> Rule:
    """Return how weights change, those of each layer with its own learning rate."""
    rule = scaled_rule(settings, 1.0)
    groups = [Group(is_of(layer), scaled_rule(settings, scale)) for layer, scale in settings.lr_scales.items()]
    return Groups(rule, *groups) if groups else rule


def scaled_rule(settings: TrainSettings, scale: float) -> Rule:
    """Return the rule of some layers; Muon's learning rate follows that of AdamW, `MUON_RATE` times as high."""
    lr = scaled(learning_rate(settings), scale)
    adamw = AdamW(lr, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay)
    return adamw if settings.optimizer == "adamw" else Muon(scaled(lr, MUON_RATE), others=adamw)


def is_of(layer: str) -> Callable[[Parameter], bool]:
    """Return what says whether a parameter is one of a layer, by its name."""
    return lambda p: p.name.startswith(f"{layer}.")


def comm_hook_of(settings: TrainSettings) -> FeedbackHook | None:
    """Return what sends less than a gradient, if the flags ask for it."""
    match settings.compress:
        case "none":
            return None
        case "powersgd":
            return PowerSGD(seed=settings.seed)
        case "topk":
            return TopK()
        case dtype:
            return ErrorFeedback(dtype)


def write(stages: LocalStages, schedule: Schedule, prompt: Array, settings: TrainSettings) -> Array:
    """Let the model go on after `prompt`, for at most `SAMPLE_SECONDS`. Collective over a pipeline."""
    sampling = Sampling(SAMPLE_TEMPERATURE, seed=settings.seed)
    tokens, end = [], time.monotonic() + SAMPLE_SECONDS
    for token in islice(generate(stages, schedule, prompt, context=settings.context, sampling=sampling), SAMPLE_TOKENS):
        tokens.append(token)
        if stages.comm.broadcast_object(time.monotonic() > end):
            break
    return np.array(tokens)


def as_text(tokens: Array) -> str:
    """Decode bytes, and show what a terminal would obey or could not print as a box."""
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


if __name__ == "__main__":
    run_script(main)
