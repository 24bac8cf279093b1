"""Compare Muon with AdamW on the text that comes with Python: on the same batches, each at its best learning rate.

    make bench-muon

A GPT of 2 layers of width 64 in one process, with the warmup and the decay of `train_gpt.py`, at three learning rates
each. All runs take turns step by step, so that their times can be compared. Muon takes the hidden matrices, at
`train_gpt.py`'s multiple of the learning rate, and AdamW what is left. `benchmarks/results/muon.json` has the curves,
and `make drawings` makes a picture of it.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy reads it when it loads
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from results_file import FOLDER

from common.text import load_tokens, split
from distributed.data.batches import TokenBatches, validation_batches
from minigrad import backward, cross_entropy, no_grad
from minigrad.lr_schedule import scaled, warmup_cosine
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.optim.clipping import clip_by_global_norm
from minigrad.optim.muon import Muon
from minigrad.optim.update_rules import Rule
from train_gpt import MUON_RATE

RESULTS = FOLDER / "muon.json"
CONFIG = GPTConfig(vocab_size=256, context=64, num_layers=2, num_heads=4, width=64)
BATCH, MAX_NORM, FLOOR = 12, 1.0, 0.1
NUM_STEPS = 400
STEPS_A_POINT = 10  # of a curve: the mean loss of so many steps
LEARNING_RATES = 1e-3, 3e-3, 1e-2


@dataclass
class Run:
    """A model in training by one rule and learning rate."""

    rule: str
    lr: float
    num_steps: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = GPT(CONFIG, seed=0)
        rate = warmup_cosine(
            self.lr, num_steps=self.num_steps, num_warmup_steps=self.num_steps // 10, floor=FLOOR * self.lr
        )
        rule: Rule = AdamW(rate, betas=(0.9, 0.99), weight_decay=0.1)
        if self.rule == "muon":
            rule = Muon(scaled(rate, MUON_RATE), others=rule)
        self._optimizer = Optimizer(self._model.parameters(), rule)

    def step(self, x: Any, y: Any) -> None:
        start = time.perf_counter()
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(x), y)
        backward(loss)
        clip_by_global_norm(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def curve(self) -> list[float]:
        points = range(0, self.num_steps, STEPS_A_POINT)
        return [round(mean(self.losses[i : i + STEPS_A_POINT]), 4) for i in points]

    def validation_loss(self, tokens: Any) -> float:
        total = num_windows = 0.0
        with no_grad():
            for x, y in validation_batches(tokens, batch_size=BATCH, context=CONFIG.context, rank=0, size=1):
                total += len(x) * cross_entropy(self._model(x), y).item()
                num_windows += len(x)
        return round(total / num_windows, 4)


def measured(num_steps: int) -> list[dict[str, Any]]:
    """Train all runs side by side, and return what is known of each."""
    tokens, validation = split(load_tokens(None), context=CONFIG.context)
    batches = TokenBatches(tokens, batch_size=BATCH, context=CONFIG.context, seed=0, rank=0, size=1)
    runs = [Run(rule, lr, num_steps) for rule in ("adamw", "muon") for lr in LEARNING_RATES]
    for _ in range(num_steps):
        x, y = batches.next()
        for run in runs:
            run.step(x, y)
    return [
        {
            "rule": run.rule,
            "lr": run.lr,
            "validation_loss": run.validation_loss(validation),
            "step_ms": round(median(run.seconds) * 1e3, 2),
            "curve": run.curve(),
        }
        for run in runs
    ]


def best_of(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the run of each rule that ends with the lowest validation loss."""
    best: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run["validation_loss"]):
        best.setdefault(run["rule"], run)
    return best


def table(runs: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'rule':<8}{'lr':>8}{'loss, held back':>18}{'ms a step':>12}"
    for run in runs:
        yield f"{run['rule']:<8}{run['lr']:>8g}{run['validation_loss']:>18.3f}{run['step_ms']:>12.1f}"
    adamw, muon = best_of(runs)["adamw"], best_of(runs)["muon"]
    steps = next((i + 1 for i, loss in enumerate(muon["curve"]) if loss <= adamw["curve"][-1]), None)
    when = "never" if steps is None else f"after {steps * STEPS_A_POINT} of {len(muon['curve']) * STEPS_A_POINT} steps"
    yield f"Muon's best has the training loss that AdamW's best ends with: {when}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="(default: %(default)s)")
    args = parser.parse_args()
    runs = measured(args.steps)
    print("\n".join(table(runs)))
    if args.steps == NUM_STEPS:
        RESULTS.write_text(json.dumps({"steps_a_point": STEPS_A_POINT, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
