"""The engine's benchmark: its report, its workers, and its jobs on a tiny model."""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest
from engine import Line, ratio
from engine_jobs import BATCH, SIZES, STEPS, matrix_products, products_by_op, status_bytes
from generation_steps import PROMPT, TEXTS
from pinned_workers import KEEP_FREED_MEMORY, Worker, environment, interleave, once
from step_profile import profiled

from minigrad.models import GPT, GPTConfig

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
WITHOUT_TORCH = [name for name in STEPS if "torch" not in name]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIGRAD_KERNELS", "numpy")  # to load numba takes each worker a second


@pytest.mark.parametrize(("measured", "verdict"), [(0.9, "met"), (0.91, "missed")])
def test_a_line_says_whether_its_target_is_met(measured: float, verdict: str) -> None:
    assert str(Line("a / b", measured, "x", 0.9)).split()[-4:] == ["<=", "0.90", "x", verdict]


def test_a_line_without_a_target_is_only_measured() -> None:
    assert str(Line("a step", 1234.56, "ms")).split() == ["a", "step", "1,234.6", "ms"]


def test_a_ratio_is_that_of_pairs() -> None:
    line = ratio("a / b", [1, 20, 3], [2, 10, 3])  # neighbours: 0.5, 2, 1
    assert line.measured == 1
    assert line.spread == pytest.approx((0.6, 1.8))


def test_a_worker_has_one_thread_and_the_kernels_that_the_library_chooses() -> None:
    outside = {"PATH": "/bin", "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "8"}
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    assert environment(outside) == {"PATH": "/bin", **threads, **KEEP_FREED_MEMORY}


def test_a_job_that_ends_says_which(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the job 'chain nothing' ended with exit code 1"):
        Worker(["chain", "nothing"]).prepared()
    assert "KeyError: 'nothing'" in capfd.readouterr().err


def test_jobs_take_turns_in_every_round() -> None:
    seconds = interleave({"bare": ("chain", "numpy"), "ours": ("chain", "minigrad")}, num_rounds=2, num_turns=2)
    assert {name: len(values) for name, values in seconds.items()} == {"bare": 4, "ours": 4}
    assert 0 < min(seconds["bare"]) < min(seconds["ours"])  # of a turn that nobody disturbed


@pytest.mark.parametrize("engine", WITHOUT_TORCH)
def test_a_step_takes_time(engine: str) -> None:
    assert once(["step", engine, "tiny"]) > 0


@pytest.mark.peers
@pytest.mark.parametrize("engine", sorted(set(STEPS) - set(WITHOUT_TORCH)))
def test_a_step_of_torchs_takes_time(engine: str) -> None:
    pytest.importorskip("torch")
    assert once(["step", engine, "tiny"]) > 0


@needs_proc
def test_memory_counts_what_a_step_needs() -> None:
    parameters = 4 * 800_000  # bytes of the smaller GPT: with gradients and AdamW's moments four times that
    assert 4 * parameters < once(["memory", "minigrad", "nano-cpu"]) < 2**28


@needs_proc
def test_an_unknown_memory_field_is_refused() -> None:
    with pytest.raises(ValueError, match="/proc/self/status has no field VmNothing"):
        status_bytes("VmNothing")


def test_import_of_minigrad_loads_no_mpi() -> None:
    answer = once(["import"])
    assert answer["seconds"] > 0
    assert answer["mpi"] == 0


def test_the_matrix_products_are_those_of_a_step() -> None:
    s, rows = SIZES["nano-cpu"], BATCH["nano-cpu"] * SIZES["nano-cpu"]["context"]
    linear = s["num_layers"] * 12 * s["width"] ** 2 + s["vocab_size"] * s["width"]
    attention = s["num_layers"] * s["context"] * s["width"]  # of each query, for one of six products
    multiplications = sum(a.size * b.shape[-1] for a, b, _ in matrix_products("nano-cpu"))
    assert multiplications == rows * (3 * linear + 6 * attention)


def test_texts_are_written_until_the_context_is_full() -> None:
    with_cache, anew = (TEXTS[writer](SIZES["tiny"])() for writer in ("minigrad", "minigrad-anew"))
    assert with_cache == anew
    assert len(with_cache) == SIZES["tiny"]["context"] - len(PROMPT)
    assert once(["text", "minigrad", "tiny"]) > 0


@pytest.mark.peers
def test_torch_writes_the_same_text() -> None:
    pytest.importorskip("torch")
    sizes = SIZES["tiny"]
    assert TEXTS["torch"](sizes, GPT(GPTConfig(**sizes)).state_dict())() == TEXTS["minigrad"](sizes)()


def test_the_profile_of_a_step_has_the_products_that_are_measured_alone() -> None:
    noted = Counter(dict.fromkeys(products_by_op("tiny"), 0))
    for (op, left, right), count in profiled("tiny", num_steps=2).products.items():
        noted[op] += count * left.shape[-2] * left.shape[-1] * right.shape[-1] * math.prod(left.shape[:-2])
    alone = {
        op: 2 * sum(a.size * b.shape[-1] for a, b, _ in products) for op, products in products_by_op("tiny").items()
    }
    assert noted == alone
