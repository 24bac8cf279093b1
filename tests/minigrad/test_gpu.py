"""The engine on a GPU: the same code, the same numbers. Run with `make test-gpu` on a machine with CuPy and a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_table import Row
from test_ops import ROWS, row_id

import minigrad as mg
from minigrad import rng
from minigrad.backend import to_device, to_host, xp_of
from minigrad.flat import FlatBuffer
from minigrad.models import GPT, MLP, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer, Rule, clip_by_global_norm

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs CuPy")

CONFIG = GPTConfig(vocab_size=17, context=6, num_layers=2, num_heads=2, width=8, dropout=0.1)
IDS = np.random.default_rng(0).integers(0, 17, (4, 7))
each_row = pytest.mark.parametrize("row", ROWS, ids=row_id)


def on_gpu(value: Any) -> Any:
    """Move arrays, also those in containers, to the GPU."""
    if isinstance(value, (list, tuple)):
        return type(value)(on_gpu(item) for item in value)
    if isinstance(value, dict):
        return {name: on_gpu(item) for name, item in value.items()}
    return to_device(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def gradients(row: Row, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    tensors = [mg.Tensor(x, requires_grad=True) if getattr(x, "dtype", np.dtype(int)).kind == "f" else x for x in args]
    y = row.op(*tensors, **kwargs)
    if y.requires_grad:
        cotangent = np.asarray(np.random.default_rng(8).standard_normal(y.shape), y.dtype)
        mg.backward_with_grad(y, xp_of(y.data).asarray(cotangent))
    return y, [x.grad for x in tensors if isinstance(x, mg.Tensor) and x.grad is not None]


def test_arithmetic_with_an_array_on_the_left_is_ours() -> None:
    a, x = to_device(np.full((2, 2), 3.0)), mg.Tensor(to_device(np.arange(1.0, 5.0).reshape(2, 2)), requires_grad=True)
    for y, expected in [
        (a + x, a + x.data),
        (a - x, a - x.data),
        (a * x, a * x.data),
        (a / x, a / x.data),
        (a**x, a**x.data),
        (a @ x, a @ x.data),
    ]:
        assert y.node is not None
        np.testing.assert_allclose(to_host(y.data), to_host(expected))
    assert to_host(a > x).tolist() == [[True, True], [False, False]]


@each_row
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_value_and_gradients_are_the_cpus(row: Row, dtype: Any) -> None:
    args = row.sample(dtype)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == np.float64 else {"rtol": 1e-4, "atol": 1e-5}
    expected, expected_grads = gradients(row, args, row.kwargs)
    y, grads = gradients(row, on_gpu(args), on_gpu(row.kwargs))
    assert xp_of(y.data) is cupy
    assert y.dtype == expected.dtype
    np.testing.assert_allclose(to_host(y.data), expected.data, **tolerance)
    for g, expected_g in zip(grads, expected_grads, strict=True):
        assert xp_of(g) is cupy
        assert g.dtype == expected_g.dtype
        np.testing.assert_allclose(to_host(g), expected_g, **tolerance)


@each_row
def test_vjp_is_the_derivative(row: Row) -> None:
    mg.check_vjp(row.op, *on_gpu(row.sample()), **on_gpu(row.kwargs))


def trained(device: str, rule: Rule, *, recomputed: bool = False, dtype: Any = np.float64) -> dict[str, Any]:
    model = GPT(CONFIG, dtype=dtype, device=device)
    optimizer = Optimizer(model.parameters(), rule)
    x, y = (to_device(a) if device == "cuda" else a for a in (IDS[:, :-1], IDS[:, 1:]))
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        with rng.scope(seed=1, step=step):
            h = model.layers[0](x)
            for layer in model.layers[1:]:
                h = mg.recompute(layer, h) if recomputed else layer(h)
            loss = mg.cross_entropy(h, y)
        mg.backward(loss)
        clip_by_global_norm(optimizer.params, 0.5)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": np.array(losses), **{name: to_host(value) for name, value in model.state_dict().items()}}


@pytest.mark.parametrize("rule", [SGD(0.1, momentum=0.9), AdamW(1e-2, eps=1e-3)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "recomputed"])
def test_a_gpt_trains_to_the_cpus_parameters(rule: Rule, recomputed: bool) -> None:
    expected, found = trained("cpu", rule), trained("cuda", rule, recomputed=recomputed)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-8, atol=1e-10, err_msg=name)


def test_float32_stays_float32_and_learns() -> None:
    found = trained("cuda", AdamW(1e-2), dtype=np.float32)
    assert all(value.dtype == np.float32 for name, value in found.items() if name != "losses")
    assert found["losses"][-1] < found["losses"][0]


def test_flat_memory_is_on_the_gpu_and_views_follow() -> None:
    model = MLP([3, 4, 2], dtype=np.float64, device="cuda")
    (part,) = FlatBuffer.adopt(model.parameters())
    assert xp_of(part.data) is cupy
    mg.backward(mg.mean(model(to_device(np.ones((2, 3))))))
    np.testing.assert_array_equal(
        to_host(part.grad), np.concatenate([to_host(p.grad).reshape(-1) for p in part.params])
    )


def test_an_in_place_change_is_noticed() -> None:
    w = mg.Parameter(to_device(np.ones(2)), "w")
    x = mg.Tensor(to_device(np.ones(2)), requires_grad=True)
    y = mg.sum(x * w)
    w.data = to_device(np.zeros(2))
    with pytest.raises(RuntimeError, match="mul needs 'w' as it was in the forward"):
        mg.backward(y)


def test_a_change_of_a_flipped_array_is_noticed() -> None:
    flipped = mg.Tensor(to_device(np.arange(4.0))[::-1])
    loss = mg.sum(mg.mul(mg.Tensor(to_device(np.ones(4)), requires_grad=True), flipped))
    flipped.data = to_device(np.zeros(4))
    with pytest.raises(RuntimeError, match="changed in place"):
        mg.backward(loss)


def test_watches_work() -> None:
    x = mg.Tensor(to_device(np.ones(2)), requires_grad=True)
    with mg.profile() as profile:
        mg.backward(mg.sum(mg.tanh(x)))
    assert profile.ops["tanh"].calls == 1
    with mg.detect_anomaly(), pytest.raises(FloatingPointError, match="the forward of log made the first NaN"):
        mg.log(x - 2)
