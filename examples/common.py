"""What the example scripts share: a text to learn, a command line, and a view of the run as it goes on.

Nothing here trains: an example's own file shows the whole training loop. A script sets OPENBLAS_NUM_THREADS before
its first import, as NumPy reads it once, when it loads.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from distributed.world import launcher_rank
from pipeline.schedules import SCHEDULES

Tokens = NDArray[np.int64]
T = TypeVar("T")

GRACE_SECONDS = 3.0  # more than ranks that start together differ by, on a busy machine

# ---- the text -------------------------------------------------------------------------------------------------------


def load_text(path: str | None) -> bytes:
    """Read the text to learn, by default the one that comes with Python.

    Args:
        path: a file, taken as bytes whatever its encoding. None: the language reference behind Python's `help()`,
            about 470,000 bytes of English (a little more in each new version of Python), the same on every machine.
    Raises:
        ValueError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--text must be a file that can be read, got {path}: {error.strerror}") from error


def split(text: bytes, *, context: int, validation_fraction: float = 0.1) -> tuple[bytes, bytes]:
    """Cut off the end of a text, for validation on what was never trained on.

    Raises:
        ValueError: one of the parts has no window of `context` bytes and the byte after it.
    """
    start = len(text) - int(len(text) * validation_fraction)
    train, validation = text[:start], text[start:]
    if min(len(train), len(validation)) <= context:
        raise ValueError(
            f"the text must give more than context bytes to training and to validation, "
            f"got {len(train)} and {len(validation)} bytes and context={context}"
        )
    return train, validation


def sample_batch(text: bytes, *, batch: int, context: int, seed: int, step: int) -> tuple[Tokens, Tokens]:
    """Draw the batch of one step: windows of the text, and the same windows one byte later.

    A function of its arguments alone: however many ranks there are, each draws the whole batch and takes its own rows.

    Returns:
        x, y: (batch, context) each; y[i, t] is the byte that follows x[i, t].
    """
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, step], np.uint64)))
    return _windows(text, rng.integers(len(text) - context, size=batch), context)


def validation_batches(text: bytes, *, batch: int, context: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield all windows of a text that do not overlap, in order, in batches of nearly equal size, at least `batch`."""
    starts = np.arange(0, len(text) - context, context)
    for part in np.array_split(starts, max(1, len(starts) // batch)):
        yield _windows(text, part, context)


def _windows(text: bytes, starts: Tokens, context: int) -> tuple[Tokens, Tokens]:
    windows = np.frombuffer(text, np.uint8)[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def trigram_nats(train: bytes, validation: bytes) -> float:
    """Measure what counting can do: nats a byte of a table that predicts a byte from the two before it.

    A model is worth training if it does better. The table is a strong one: interpolated Kneser-Ney smoothing with the
    usual discount, 0.75 (on Python 3.11's text 1.70 nats; add-one smoothing gives 1.99, a bigram table 2.3).

    Source: Chen and Goodman 1998, section 2.7 (Kneser-Ney) and 4.1.3 (interpolated).
    """
    # Bytes renumbered without gaps, for small tables. The smoothing still reserves a share for all 256.
    symbols, tokens = np.unique(np.frombuffer(train + validation, np.uint8), return_inverse=True)
    num_symbols = len(symbols)
    codes = (tokens[:-2] * num_symbols + tokens[1:-1]) * num_symbols + tokens[2:]  # one number a trigram
    trigrams = np.bincount(codes[: len(train) - 2], minlength=num_symbols**3).reshape([num_symbols] * 3)
    # A shorter context counts what it was seen after, not how often: `Francisco` is frequent, but only after `San`.
    bigrams = np.count_nonzero(trigrams, axis=0)
    unigrams = np.count_nonzero(bigrams, axis=0)
    uniform = np.full(num_symbols, 1 / 256)
    probability = _discounted(trigrams, _discounted(bigrams, _discounted(unigrams, uniform)))
    return float(-np.log(probability.reshape(-1)[codes[len(train) :]]).mean())


def _discounted(counts: NDArray[np.int64], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn counts (..., symbol) into probabilities; what each seen symbol gives up goes where `shorter` says."""
    discount = 0.75
    total = counts.sum(axis=-1, keepdims=True)
    given_up = np.where(total > 0, discount * np.count_nonzero(counts, axis=-1, keepdims=True), 1.0)
    return (np.maximum(counts - discount, 0) + given_up * shorter) / np.maximum(total, 1)


# ---- the command line -----------------------------------------------------------------------------------------------


def flag(default: T, help: str, metavar: str | None = None) -> T:
    """Declare a field of Settings together with its command-line flag."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class Settings:
    """What can be chosen on the command line: each field is a flag, `bucket_mb` is --bucket-mb."""

    dp: int = flag(1, "data-parallel replicas: each trains on its own sequences, gradients are averaged")
    pp: int = flag(1, "pipeline stages that the layers of each replica are cut into; dp * pp is the number of ranks")
    schedule: str = flag("1f1b", "order of a pipeline's forwards and backwards", "{" + ",".join(SCHEDULES) + "}")
    microbatches: int = flag(4, "parts that a pipeline cuts its batch into; more of them, a smaller bubble")
    steps: int = flag(600, "optimizer steps")
    batch: int = flag(48, "sequences in a step, over all replicas: the same batch trains the same model in any layout")
    layers: int = flag(4, "transformer blocks")
    heads: int = flag(4, "attention heads in each block")
    width: int = flag(128, "features of each token; a multiple of --heads")
    context: int = flag(64, "bytes that the model sees at a time")
    dropout: float = flag(0.0, "share of activations dropped in training, from 0 to below 1", "P")
    lr: float = flag(1e-3, "peak learning rate", "RATE")
    seed: int = flag(0, "start of all random numbers; the same seed gives the same run")
    text: str | None = flag(
        None, "file to learn, as bytes (default: the reference text that comes with Python)", "FILE"
    )
    dtype: str = flag("float32", "of parameters and activations", "{float32,float64}")
    bucket_mb: float = flag(25.0, "MiB of gradients that are reduced together, while the backward goes on", "MIB")
    progress: str = flag("auto", "auto is a bar where stderr is a terminal; mpirun hides terminals", "{auto,bar,lines}")

    @property
    def num_microbatches(self) -> int:
        """Parts of a replica's batch: without a pipeline there is nothing to gain from cutting it."""
        return self.microbatches if self.pp > 1 else 1

    def rows(self, dp_rank: int) -> slice:
        """Rows of the batch that belong to one replica: consecutive, as equal in number as can be."""
        return slice(dp_rank * self.batch // self.dp, (dp_rank + 1) * self.batch // self.dp)


COUNTS = ("dp", "pp", "microbatches", "steps", "batch", "layers", "heads", "width", "context")
CHOICES = {"schedule": tuple(SCHEDULES), "dtype": ("float32", "float64"), "progress": ("auto", "bar", "lines")}


def check(settings: Settings, world_size: int) -> None:
    """Check that the settings fit each other and the number of ranks.

    Raises:
        ValueError: the first rule that is broken, with the values that break it.
    """
    s = settings
    for name in COUNTS:
        if getattr(s, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(s, name)}")
    for name, choices in CHOICES.items():
        if getattr(s, name) not in choices:
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {getattr(s, name)}")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    rules = [
        (s.dp * s.pp == world_size, f"dp * pp must equal the number of ranks, got dp={s.dp}, pp={s.pp} and {ranks}"),
        (s.pp <= s.layers, f"--pp must be at most --layers, got {s.pp} and {s.layers}"),
        (
            s.dp * s.num_microbatches <= s.batch,
            f"--batch must hold a sequence for each of the dp * microbatches parts, "
            f"got {s.batch} for {s.dp} * {s.num_microbatches}",
        ),
        (s.width % s.heads == 0, f"--width must be a multiple of --heads, got {s.width} and {s.heads}"),
        (0 <= s.dropout < 1, f"--dropout must be at least 0 and below 1, got {s.dropout}"),
        (0 < s.lr < math.inf, f"--lr must be above 0 and finite, got {s.lr}"),
        (0 <= s.seed < 2**64, f"--seed must be from 0 to 2**64 - 1, got {s.seed}"),
        (0 < s.bucket_mb < math.inf, f"--bucket-mb must be above 0 and finite, got {s.bucket_mb}"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ValueError(rule)


def launcher_size(environ: Mapping[str, str] = os.environ) -> int:
    """Tell how many ranks the launcher started, before MPI is loaded: 1 without a launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):  # Open MPI; MPICH and Intel MPI; srun
        if name in environ:
            return int(environ[name])
    return 1


def read_settings(description: str, argv: Sequence[str] | None = None) -> Settings:
    """Read and check the command line; end the run with one line and exit code 2 if something is wrong with it."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Settings):
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            type=str if f.default is None else type(f.default),
            default=f.default,
            metavar=f.metadata["metavar"] or "N",
            help=f.metadata["help"] + ("" if f.default is None else " (default: %(default)s)"),
        )
    settings = Settings(**vars(parser.parse_args(argv)))
    try:
        check(settings, launcher_size())
    except ValueError as error:
        fail(str(error))
    return settings


def read_text(settings: Settings) -> tuple[bytes, bytes]:
    """Load the text and split it into training and validation; end the run with one line if that cannot be done."""
    try:
        return split(load_text(settings.text), context=settings.context)
    except ValueError as error:
        fail(str(error), everywhere=False)


def fail(message: str, *, everywhere: bool = True) -> NoReturn:
    """End the run with one line on stderr and exit code 2.

    Rank 0 speaks for all. A launcher ends a job, unread output included, when its first process fails, so the others
    wait to be ended and leave by themselves only where the launcher lets them.

    Args:
        everywhere: all ranks are known to fail alike. False: a rank that is still there after its wait may be
            the only one that fails (a file that only its host lacks), and says so itself.
    """
    rank = launcher_rank()
    line = f"{Path(sys.argv[0]).name}: {message}"
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_SECONDS)
        if not everywhere:
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """Says things once, though every rank reads the same command line."""

    def print_help(self, file: Any = None) -> None:
        if launcher_rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        fail(message)


# ---- the view -------------------------------------------------------------------------------------------------------


class Progress:
    """Show step, loss, tokens a second and the time left: as a bar or as at most 20 lines, on one rank only.

    with Progress(settings, visible=comm.rank == 0) as progress:
        for step in range(settings.steps):
            ...
            progress.update(loss)
    """

    def __init__(self, settings: Settings, *, visible: bool, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._visible = visible
        self._num_steps = settings.steps
        self._tokens_per_step = settings.batch * settings.context
        self._step = 0
        self._start = time.perf_counter()
        terminal = self._stream.isatty()
        self._bar = tqdm(
            total=settings.steps,
            file=self._stream,
            disable=not visible or settings.progress == "lines" or (settings.progress == "auto" and not terminal),
            bar_format="step {n}/{total} |{bar}| {remaining} left{postfix}",
            ncols=None if terminal else 80,  # behind mpirun's pipe there is a terminal, but nobody to ask its width
        )

    def update(self, loss: float) -> None:
        """Count one step more, of which `loss` is the loss."""
        self._step += 1
        elapsed = time.perf_counter() - self._start
        speed = f"loss {loss:.3f}, {self._step * self._tokens_per_step / elapsed:,.0f} tokens/s"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update()
        line_is_due = self._step * 20 // self._num_steps > (self._step - 1) * 20 // self._num_steps
        if self._visible and self._bar.disable and line_is_due:
            left = tqdm.format_interval(elapsed / self._step * (self._num_steps - self._step))
            print(f"step {self._step}/{self._num_steps}, {left} left, {speed}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
