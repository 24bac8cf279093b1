"""docs/from-pytorch.md holds: PyTorch's line works here or its error names ours, and ours works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import ROOT

import distributed
import distributed.data
import minigrad as mg
import minigrad.cuda_graph
from minigrad import nn, optim
from minigrad.optim.param_groups import Group, Groups

PAGE = (ROOT / "docs" / "from-pytorch.md").read_text()
EVERYWHERE = {"mg", "np", "nn", "optim", "x", "y"}  # words that say nothing about the way


def rows(text: str) -> list[Any]:
    """Return the rows of all tables as (theirs, ours): the code in the first two cells."""
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    codes = [[re.findall(r"`([^`]+)`", cell) for cell in row[:2]] for row in cells]
    return [pytest.param(theirs, ours, id=theirs[0]) for theirs, ours in codes]


HABITS, OTHER_MEANINGS = map(rows, PAGE.split("## The same words for other things"))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the lines of the page take for granted."""
    monkeypatch.chdir(tmp_path)
    param = nn.ParamGetter()
    model = nn.Sequential([nn.Linear(param.at("fc1"), 3, 4), nn.ReLU(), nn.Linear(param.at("fc2"), 4, 2)])
    optimizer = optim.Optimizer(model.parameters(), optim.SGD(lr=0.1))
    inputs, targets = np.ones((2, 3), np.float32), np.array([0, 1])
    logits = model(inputs)
    x = mg.Tensor(np.arange(1.0, 7.0).reshape(2, 3), requires_grad=True)
    return {
        "F": mg,
        "Group": Group,
        "Groups": Groups,
        "comm": distributed.world(),
        "DistributedDataParallel": distributed.DistributedDataParallel,
        "ddp": distributed.DistributedDataParallel(nn.Linear(param.at("replica"), 3, 2), distributed.world()),
        "distributed": distributed,
        "ids": np.array([0, 2]),
        "inputs": inputs,
        "linear": model[0],
        "logits": logits,
        "loss": mg.cross_entropy(logits, targets),
        "mask": np.array([[True, False, False]] * 2),
        "mg": mg,
        "model": model,
        "nn": nn,
        "np": np,
        "optim": optim,
        "optimizer": optimizer,
        "param": param.at("more"),
        "targets": targets,
        "torch": mg,
        "x": x,
        "y": mg.Tensor(np.ones((2, 3))),
    }


def words(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*|@|==", code)) - EVERYWHERE


def complaint(line: str, names: dict[str, Any]) -> str | None:
    """Return what is said of a line that does not work."""
    try:
        exec(line, names)
    except (AttributeError, TypeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(("theirs", "ours"), HABITS)
def test_a_habit_works_or_its_error_names_the_way(theirs: list[str], ours: list[str], names: dict[str, Any]) -> None:
    (line,) = theirs
    message = complaint(line, names)
    if message is None:
        assert ours == [line.replace("torch.", "mg.")], "it works: there is nothing else to write"
    else:
        (advice,) = re.findall(r"\b(?:write|use) (.*)$", message)
        assert words(advice) & words(ours[0]), message


@pytest.mark.parametrize(("theirs", "ours"), HABITS + OTHER_MEANINGS)
def test_ours_works(theirs: list[str], ours: list[str], names: dict[str, Any]) -> None:
    for line in ours:
        exec(line, names)


def test_there_are_enough() -> None:
    assert len(HABITS) >= 60
