# mpirun -n 2 python -m mpi4py examples/train_gpt.py --dp 2
"""Train a byte-level GPT on real English text: on one process, data parallel, in a pipeline, or both.

python examples/train_gpt.py                                                    one process
mpirun -n 2 python -m mpi4py examples/train_gpt.py --dp 2                       two replicas
mpirun -n 2 python -m mpi4py examples/train_gpt.py --pp 2 --schedule 1f1b       one pipeline of two stages
mpirun -n 4 python -m mpi4py examples/train_gpt.py --dp 2 --pp 2                two pipelines

The same flags besides --dp and --pp give the same model, up to rounding, in every layout.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one a rank; NumPy reads it when it loads

import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from common.progress import Progress
from common.settings import Settings, read_settings, read_text
from common.text import sample_batch, trigram_nats, validation_batches
from distributed import DistributedDataParallel, Mesh, describe, local_rank, world
from distributed.comm_hooks import allreduce
from minigrad import cross_entropy, rng
from minigrad.backend import place, to_host, use_gpu
from minigrad.lr_schedule import warmup_cosine
from minigrad.models import gpt
from minigrad.optim import AdamW, Optimizer, grad_square_sum, scale_to_norm
from pipeline import SCHEDULES, LocalStages, PipelineExecutor, PipelineStage, Schedule, perfetto

MAX_GRAD_NORM = 1.0
SAMPLE_BYTES = 300
SAMPLE_TEMPERATURE = 0.8


def main() -> None:
    settings = read_settings(__doc__)
    train, validation = read_text(settings)
    if settings.device == "cuda":
        use_gpu(local_rank())
    comm = world()
    mesh = Mesh(comm, dp=settings.dp, pp=settings.pp)
    speaks = comm.rank == 0
    start_line = describe(comm)
    if speaks:
        print(f"{start_line}: dp={settings.dp} pp={settings.pp}", flush=True)

    config = gpt.GPTConfig(
        context=settings.context,
        num_layers=settings.layers,
        num_heads=settings.heads,
        width=settings.width,
        dropout=settings.dropout,
    )
    schedule = SCHEDULES[settings.schedule]
    stages = PipelineStage.of(
        gpt.layers(config), mesh.pp, schedule, seed=settings.seed, dtype=settings.dtype, device=settings.device
    )
    warmup = min(100, settings.steps // 10)
    lr = warmup_cosine(settings.lr, num_steps=settings.steps, num_warmup_steps=warmup, floor=settings.lr / 10)
    optimizer = Optimizer(stages.parameters(), AdamW(lr, betas=(0.9, 0.99), weight_decay=0.1))
    pipe = PipelineExecutor(
        stages, mesh.pp, schedule, num_microbatches=settings.num_microbatches, loss_fn=cross_entropy
    )
    ddp = DistributedDataParallel(
        stages,
        mesh.dp,
        bucket_bytes=int(settings.bucket_mb * 2**20),
        comm_hook=pipe.recorder.comm_hook(allreduce),
    )

    start = time.perf_counter()
    with Progress(settings, visible=speaks) as progress:
        for step in range(settings.steps):
            x, y = sample_batch(train, batch=settings.batch, context=settings.context, seed=settings.seed, step=step)
            x, y = (place(part[settings.rows(mesh.dp.rank)], settings.device) for part in (x, y))
            optimizer.zero_grad()
            hooks = ddp.hooks(num_samples=len(x))
            recorded = pipe.recorder if settings.trace and step == settings.steps - 1 else nullcontext()
            with recorded, rng.scope(seed=settings.seed, step=step, first_sample=ddp.first_sample):
                loss = pipe.step(x, y, hooks=hooks)
                ddp.wait()
            clip(stages, mesh)
            optimizer.step()
            progress.update(ddp.mean(loss))
    seconds = time.perf_counter() - start
    if settings.trace:
        events = pipe.recorder.gather(comm)
        if speaks:
            Path(settings.trace).write_text(perfetto(events))

    stages.eval()
    loss = validation_loss(pipe, validation, settings, mesh)
    prompt = validation[: settings.context]
    sample = write(stages, schedule, prompt, settings, mesh) if mesh.dp.rank == 0 else b""
    if speaks:
        speed = settings.steps * settings.batch * settings.context / seconds
        print(f"trained {settings.steps} steps in {seconds:.0f} s, {speed:,.0f} tokens/s")
        print(f"validation loss {loss:.3f} nats a byte; a trigram table gets {trigram_nats(train, validation):.3f}")
        print(f"after {prompt.decode(errors='replace')!r} it writes:\n{sample.decode(errors='replace')}", flush=True)


def clip(stages: LocalStages, mesh: Mesh) -> None:
    """Clip by the gradient norm of the whole model: the stages' sums of squares add along the pipeline."""
    square_sum = np.array([grad_square_sum(stages.counted_parameters())])
    norm = float(mesh.pp.allreduce(square_sum).wait()[0]) ** 0.5
    scale_to_norm(stages.parameters(), norm, MAX_GRAD_NORM)


def validation_loss(pipe: PipelineExecutor, text: bytes, settings: Settings, mesh: Mesh) -> float:
    """Return the mean loss over all windows of `text`; replicas take batches in turn."""
    total = np.zeros(2)  # summed loss, number of windows
    batches = list(validation_batches(text, batch=settings.batch, context=settings.context))
    for x, y in batches[mesh.dp.rank :: mesh.dp.size]:
        total += len(x) * pipe.evaluate(place(x, settings.device), place(y, settings.device)), len(x)
    mesh.dp.allreduce(total).wait()
    return float(total[0] / total[1])


def write(stages: LocalStages, schedule: Schedule, prompt: bytes, settings: Settings, mesh: Mesh) -> bytes:
    """Let the model go on after `prompt`, one byte at a time. Collective over one pipeline."""
    pipe = PipelineExecutor(stages, mesh.pp, schedule, num_microbatches=1)
    generator = np.random.Generator(np.random.Philox(key=settings.seed))
    last_rank = schedule.rank_of(schedule.num_stages(mesh.pp.size) - 1, mesh.pp.size)
    text = list(prompt)
    for _ in range(SAMPLE_BYTES):
        outputs = pipe.predict(
            place(np.array([text[-settings.context :]]), settings.device)
        )  # logits (1, T, 256), on the last stage only
        byte = np.zeros(1, np.int64)
        if outputs:
            logits = to_host(outputs[0])[0, -1].astype(np.float64)
            p = np.exp((logits - logits.max()) / SAMPLE_TEMPERATURE)
            byte[0] = generator.choice(len(p), p=p / p.sum())
        mesh.pp.broadcast(byte, root=last_rank).wait()
        text.append(int(byte[0]))
    return bytes(text[len(prompt) :])


if __name__ == "__main__":
    main()
