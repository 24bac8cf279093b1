"""What goes on with a run beside tensors: a float16 run resumed is the run that nothing broke, its loss scale too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from distributed import SoloCommunicator
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.data.batches import TokenBatches
from distributed.run import JoinedState
from minigrad.models import GPT, GPTConfig
from minigrad.optim import AdamW, Optimizer
from minigrad.precision import LossScale, use_precision

TOKENS = np.random.default_rng(0).integers(0, 17, 400)


class Training:
    def __init__(self, folder: Path, precision: str = "float16") -> None:
        self.model = GPT(GPTConfig(vocab_size=17, context=6, num_layers=1, num_heads=2, width=16))
        use_precision(self.model.parameters(), precision)
        self.scale = LossScale(value=2.0**24, growth_steps=3) if precision == "float16" else None
        self.optimizer = Optimizer(self.model.parameters(), AdamW(1e-2), max_norm=1.0, loss_scale=self.scale)
        self.batches = TokenBatches(TOKENS, batch_size=4, context=6, seed=0)
        self.data = JoinedState(self.batches, loss_scale=self.scale)
        self.checkpoints = Checkpointer(folder, SoloCommunicator(), self.model, self.optimizer)

    def run(self, first: int, last: int) -> Training:
        for _ in range(first, last):
            x, y = self.batches.next()
            self.optimizer.zero_grad()
            loss = mg.cross_entropy(self.model(x), y)
            mg.backward(loss if self.scale is None else loss * self.scale.factor)
            self.optimizer.step()
        return self

    def save(self, step: int) -> None:
        self.checkpoints.save(step, {"data": self.data.state_dict()})
        self.checkpoints.wait()

    def load(self) -> Training:
        loaded = self.checkpoints.load()
        assert loaded is not None
        self.data.load_state_dict(loaded.state["data"])
        return self

    def values(self) -> dict[str, Any]:
        return self.model.state_dict() | dict(self.optimizer.state_arrays())


@pytest.mark.parametrize("last", [5, 14], ids=["while the factor falls", "while it grows"])
def test_a_resumed_float16_run_is_the_unbroken_one(tmp_path: Path, last: int) -> None:
    pytest.importorskip("ml_dtypes")
    with np.errstate(over="ignore", invalid="ignore"):
        unbroken = Training(tmp_path / "unbroken").run(0, 20)
        Training(tmp_path / "broken").run(0, last).save(last)
        resumed = Training(tmp_path / "broken").load().run(last, 20)
    assert unbroken.scale is not None
    assert resumed.scale is not None
    assert unbroken.scale.num_skipped > 0
    assert resumed.scale.state_dict() == unbroken.scale.state_dict()
    for name, value in unbroken.values().items():
        np.testing.assert_array_equal(resumed.values()[name], value, err_msg=name)


def test_a_run_may_change_its_precision_where_it_goes_on(tmp_path: Path) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        Training(tmp_path).run(0, 2).save(2)
        other = Training(tmp_path, "float32").load().run(2, 4)
        assert other.batches.sampler.position == 16
        other.save(4)
        again = Training(tmp_path).load()
    assert again.batches.sampler.position == 16
    assert again.scale is not None
    assert again.scale.value == 2.0**24  # as new: the float32 run had none
