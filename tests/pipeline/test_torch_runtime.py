"""Schedules of ours in PyTorch: its checks accept them, and its runtime trains by them; its names are private."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy_pipeline import check_against_one_process, dense

from distributed import LocalWorld
from pipeline import SCHEDULES, dump, from_text
from pipeline.schedules.action import Kind
from pipeline.schedules.problem import Problem
from pipeline.schedules.schedule import Schedule, v_shape
from pipeline.schedules.search import search
from pipeline.schedules.torch_csv import dump_torch, parse_torch
from pipeline.schedules.whole_step import Replica, check_whole_step

pytestmark = pytest.mark.peers

FOUND = search(Problem.of(num_ranks=2, num_microbatches=4, rank_of=v_shape, num_stages=4, latency=0.3), num_tries=50)
ALL = [*SCHEDULES.values(), FOUND.schedule]
PRIVATE = ("_Action", "_validate_schedule", "_add_send_recv", "_simulate_comms_compute", "_PipelineScheduleRuntime")
OWN_ORDER = "_calculate_single_rank_operations"  # of PyTorch's schedule classes


def theirs() -> Any:
    """Return PyTorch's module of schedules, or skip where it has no such names."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    missing = [name for name in PRIVATE if not hasattr(schedules, name)]
    if missing:
        pytest.skip(f"torch.distributed.pipelining.schedules has no {', '.join(missing)} any more")
    return schedules


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_its_checks_accept_it(schedule: Schedule) -> None:
    torch = theirs()
    num_stages = schedule.num_stages(2)
    rows = dump_torch(schedule.orders(2, 4)).splitlines()
    actions = {rank: [torch._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}
    mapping = torch._validate_schedule(actions, 2, num_stages, 4)
    assert mapping == {stage: schedule.rank_of(stage, 2) for stage in range(num_stages)}
    assert parse_torch("\n".join(",".join(map(str, row)) for row in actions.values())) == schedule.orders(2, 4)
    with_messages = torch._add_send_recv(actions, lambda stage: mapping[stage], num_stages)
    if any(action.kind is Kind.PAIR for order in schedule.orders(2, 4) for action in order):
        return  # its simulator knows no OVERLAP_F_B; its runtime does
    torch._simulate_comms_compute(with_messages, lambda stage: mapping[stage], num_stages)


STEP = """
import sys
import torch
from torch import distributed as dist, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

rank, folder, owners = int(sys.argv[1]), sys.argv[2], [int(owner) for owner in sys.argv[3]]
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{folder}/start", rank=rank, world_size=2)
layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in owners]
x, y = torch.randn(8, 5).double(), torch.randn(8, 5).double()
whole = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
wanted = torch.autograd.grad(whole, [p for layer in layers for p in layer.parameters()])
mine = [s for s, owner in enumerate(owners) if owner == rank]
stages = [PipelineStage(layers[s], s, len(owners), torch.device("cpu")) for s in mine]
schedule = _PipelineScheduleRuntime(stages, 4, loss_fn=nn.functional.mse_loss, scale_grads=True)
schedule._load_csv(f"{folder}/schedule.csv")
arguments = [x] if 0 in mine else []
target = {"target": y} if len(owners) - 1 in mine else {}
schedule.step(*arguments, **target)
for s in mine:
    for p, grad in zip(layers[s].parameters(), wanted[2 * s : 2 * s + 2], strict=True):
        assert torch.allclose(p.grad, grad, rtol=1e-6, atol=1e-12), (s, p.grad, grad)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_its_runtime_trains_by_it_as_one_process(schedule: Schedule, tmp_path: Path) -> None:
    theirs()
    (tmp_path / "schedule.csv").write_text(dump_torch(schedule.orders(2, 4)))
    (tmp_path / "step.py").write_text(STEP)
    owners = "".join(str(schedule.rank_of(stage, 2)) for stage in range(schedule.num_stages(2)))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "step.py"), str(rank), str(tmp_path), owners],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)


def test_its_dualpipev_is_ours_and_is_proved_and_runs_here(tmp_path: Path) -> None:
    """The order that its class makes for 4 ranks and 10 micro-batches, which is that of the file in its tests."""
    made_for = SimpleNamespace(pp_group_size=4, _n_microbatches=10)
    order = getattr(getattr(theirs(), "ScheduleDualPipeV", None), OWN_ORDER, None)
    if order is None:
        pytest.skip(f"torch.distributed.pipelining.schedules has no ScheduleDualPipeV.{OWN_ORDER} any more")
    text = "\n".join(",".join(map(str, order(made_for, rank))) for rank in range(4))
    assert "OVERLAP_F_B" in text
    orders = parse_torch(text)
    assert orders == SCHEDULES["dualpipev_overlap"].orders(4, 10)
    schedule = from_text(dump(orders), "theirs")
    check_whole_step([Replica.by_stage(orders)] * 2, rank_of=schedule.rank_of, num_stages=8)
    layers = [dense(f"fc{i}", 4, 4) for i in range(7)] + [dense("fc7", 4, 2)]
    parts = [np.full((2, 4), 0.1 * i) for i in range(10)], [np.full((2, 2), 0.2 * i) for i in range(10)]
    check_against_one_process(LocalWorld(4), layers, *parts, schedule=schedule, rtol=1e-6)
