"""The pipeline's benchmark: its report out of what jobs give, and its job of minigrad on a tiny model."""

from __future__ import annotations

import pytest
from ddp import Line, compare
from pipeline_bench import bubbles, memory, speeds
from pipeline_minigrad import Training, idle_share, peaks

from distributed import Communicator, LocalWorld
from pipeline import SCHEDULES, simulate


def lines(report: object) -> dict[str, list[str]]:
    """Return the words that follow each line's subject."""
    return {line.what: str(line).removeprefix(line.what).split() for line in report}  # type: ignore[attr-defined]


def test_a_limit_is_met_from_below() -> None:
    assert str(Line("off", [2.9, 1.0, 3.5], "points", limit=3.0)).split()[-4:] == ["<=", "3.0", "points", "met"]
    assert str(Line("off", [3.1], "points", limit=3.0)).split()[-1] == "missed"


def test_the_ideal_is_two_processes_less_the_bubble() -> None:
    # 2048 tokens: 2 x 1024 tokens/s x 8/9 is the ideal, 1706.7 tokens/s is 94% of it
    ours = {"1f1b": [1.2], "zero_bubble_h1": [1.0], "alone": [2.0], "alone, micro-batches": [2.4]}
    result = {"seconds": ours, "makespan": {"1f1b": 9.0, "zero_bubble_h1": 8.1}}
    report = lines(speeds([result], [{"seconds": {"torch": [1.5]}}]))
    assert report["minigrad / PyTorch, 1F1B"] == ["1.25", "x", "[1.25", "1.25]", ">=", "1.25", "x", "met"]
    ideal = "1F1B, share of the ideal: m / (m + 1) of two processes"
    assert report[ideal] == ["94", "%", "[94", "94]", ">=", "92", "%", "met"]
    assert report[f"{ideal} in micro-batches"][:2] == ["112", "%"]
    assert report["zero-bubble H1 / 1F1B"][0] == "1.20"
    assert report["zero-bubble H1 / 1F1B, simulated"][0] == "1.11"


def test_bubbles_are_compared_round_by_round() -> None:
    rounds = [{"idle": {"1f1b": {"predicted": p, "measured": m}}} for p, m in ((0.1, 0.14), (0.2, 0.22), (0.3, 0.29))]
    report = lines(bubbles(rounds))
    assert report["1f1b: bubble, predicted"][0] == "20.0"
    assert report["1f1b: bubble, off"] == ["2.0", "points", "[1.0", "4.0]", "<=", "3.0", "points", "met"]


@pytest.mark.parametrize(
    ("peak", "left", "verdict"), [([2, 1], [0, 0], "met"), ([2, 2], [0, 0], "missed"), ([2, 1], [1, 0], "missed")]
)
def test_memory_is_right_where_peaks_are_the_schedules_and_nothing_is_left(
    peak: list[int], left: list[int], verdict: str
) -> None:
    (line,) = memory({"peaks": {"1f1b": {"peak": peak, "left": left, "simulated": [2, 1]}}})
    assert line.split()[-1] == verdict


def test_the_idle_share_of_1f1b_is_one_of_m_plus_one() -> None:
    assert idle_share(simulate(SCHEDULES["1f1b"].orders(2, 8), num_stages=2)) == pytest.approx(1 / 9)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_a_recorded_step_shows_the_schedules_order(schedule: str) -> None:
    def program(comm: Communicator) -> tuple[list[list[str]], list[int]]:
        training = Training(comm, "nano-cpu", schedule, 2)
        training.step()
        orders = [[str(action) for action, _, _ in row] for row in training.recorded().rows]
        return orders, [stage.num_blocks for stage in training.stages]

    expected = [[str(action) for action in order] for order in SCHEDULES[schedule].orders(2, 2)]
    assert LocalWorld(2).run(program) == [(expected, [2]), (expected, [2])]


def test_peaks_of_every_schedule_are_its_simulations() -> None:
    for found in LocalWorld(2).run(lambda comm: peaks(comm, 4)):
        assert found.keys() == SCHEDULES.keys()
        for counts in found.values():
            assert counts["peak"] == counts["simulated"]
            assert set(counts["left"]) == {0}


@pytest.mark.peers
def test_the_two_stages_of_pytorch_are_its_gpt() -> None:
    torch = pytest.importorskip("torch")
    from pipeline_torch import FirstStage, LastStage
    from torch_gpt import TorchGPT

    model = TorchGPT(vocab_size=11, context=4, num_layers=3, num_heads=2, width=8)
    ids = torch.arange(8).reshape(2, 4)
    torch.testing.assert_close(LastStage(model, 2)(FirstStage(model, 2)(ids)), model(ids))


def test_the_best_size_of_a_peers_buckets_counts() -> None:
    ours = [{"seconds": {"plain": [0.5]}}] * 2
    theirs = [{"seconds": {"25 MiB": [2.0], "1 MiB": [seconds]}} for seconds in (1.0, 0.9)]
    report = lines(compare("nano-cpu", ours, theirs, 1.25))
    assert report["nano-cpu: minigrad / PyTorch DDP with 1 MiB"][:4] == ["1.90", "x", "[1.80", "2.00]"]
