"""Precision: ops see half, float32 is trained. All in plain NumPy, so no GPU is needed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad.autodiff.vjps import WeightVjp
from minigrad.flat import FlatBuffer
from minigrad.models import GPT, MLP, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer, clip_by_global_norm
from minigrad.precision import MAX_SCALE, PRECISIONS, LossScale, dtype_of, use_precision

pytest.importorskip("ml_dtypes")

CONFIG = GPTConfig(vocab_size=17, context=6, num_layers=2, num_heads=2, width=16)
HALVES = ["bfloat16", "float16"]
each_half = pytest.mark.parametrize("precision", HALVES)


def batch(seed: int = 0, size: int = 8) -> tuple[Any, Any]:
    ids = np.random.default_rng(seed).integers(0, 17, (size, 7))
    return ids[:, :-1], ids[:, 1:]


def model_in(precision: str) -> GPT:
    model = GPT(CONFIG)
    use_precision(model.parameters(), precision)
    return model


def gradients(model: GPT, x: Any, y: Any) -> dict[str, Any]:
    for p in model.parameters():
        p.grad = None
    mg.backward(mg.cross_entropy(model(x), y))
    return {p.name: p.grad.copy() for p in model.parameters() if p.grad is not None}


@each_half
def test_activations_are_half_and_all_that_is_trained_is_float32(precision: str) -> None:
    model = model_in(precision)
    optimizer = Optimizer(model.parameters(), AdamW(1e-2))
    x, y = batch()
    logits = model(x)
    loss = mg.cross_entropy(logits, y)
    assert logits.dtype == dtype_of(precision)
    assert loss.dtype == np.float32
    mg.backward(loss)
    optimizer.step()
    for p in model.parameters():
        assert p.data.dtype == p.dtype == p.grad.dtype == np.float32
    assert all(array.dtype == np.float32 for _, array in optimizer.state_arrays())


@each_half
def test_ops_see_what_the_optimizer_an_assignment_or_a_load_wrote(precision: str) -> None:
    model = model_in(precision)
    optimizer = Optimizer(model.parameters(), SGD(0.1))
    x, y = batch()

    def check() -> None:
        other = GPT(CONFIG)
        other.load_state_dict(model.state_dict())
        use_precision(other.parameters(), precision)
        np.testing.assert_array_equal(model(x).data, other(x).data)

    mg.backward(mg.cross_entropy(model(x), y))
    before = model(x).data.copy()
    optimizer.step()
    assert (model(x).data != before).any()
    check()
    p = model.parameters()[0]
    p.data = p.data * 2
    check()
    model.load_state_dict(GPT(CONFIG, seed=5).state_dict())
    check()


@each_half
def test_small_updates_add_up_in_what_is_trained(precision: str) -> None:
    """In bfloat16 itself 1 - 1e-3 is 1: nothing would ever change."""
    p = mg.Parameter(np.ones(4, np.float32), "w")
    optimizer = Optimizer([p], SGD(1e-3))
    use_precision([p], precision)
    for _ in range(100):
        optimizer.zero_grad()
        mg.backward(mg.sum(p * np.ones(4, dtype_of(precision)), axis=None))
        optimizer.step()
    np.testing.assert_allclose(p.data, 0.9, rtol=1e-5)


@each_half
def test_gradients_are_those_of_float32_up_to_rounding_of_activations(precision: str) -> None:
    x, y = batch()
    expected, found = gradients(GPT(CONFIG), x, y), gradients(model_in(precision), x, y)
    assert expected.keys() == found.keys()
    tolerance = 0.03 if precision == "bfloat16" else 0.004
    for name, g in expected.items():
        assert np.linalg.norm(found[name] - g) <= tolerance * np.linalg.norm(g), name


@each_half
def test_gradients_of_weights_are_not_rounded_to_half(precision: str) -> None:
    """Neither one contribution nor a sum of many, as over micro-batches."""
    model = model_in(precision)
    x, y = batch()
    once = gradients(model, x, y)
    for name in ("embed.token.weight", "block0.up.weight", "block1.qkv.bias", "head.norm.gain"):
        matching = [g for key, g in once.items() if key.endswith(name.split(".", 1)[1])]
        assert any((g != g.astype(dtype_of(precision)).astype(np.float32)).any() for g in matching), name
    mg.backward(mg.cross_entropy(model(x), y))  # adds to what is there
    for p in model.parameters():
        np.testing.assert_allclose(p.grad, 2 * once[p.name], rtol=1e-6, atol=1e-9)


def test_whole_equals_b_then_w_in_bfloat16() -> None:
    x, y = batch()
    model = model_in("bfloat16")
    expected = gradients(model, x, y)
    for p in model.parameters():
        p.grad = None
    mg.backward_weight(mg.backward_input(mg.cross_entropy(model(x), y)))
    for p in model.parameters():
        np.testing.assert_array_equal(p.grad, expected[p.name])


@pytest.mark.parametrize("name", ["linear", "unembed", "layer_norm", "rms_norm", "embedding"])
@each_half
def test_vjps_of_weights_write_and_add_in_float32(name: str, precision: str) -> None:
    generator, half = np.random.default_rng(1), dtype_of(precision)

    def draw(*shape: int) -> Any:
        return generator.standard_normal(shape).astype(half)

    args = {
        "linear": (draw(50, 4), draw(4, 3), draw(3)),
        "unembed": (draw(50, 4), draw(9, 4)),
        "layer_norm": (draw(50, 4), draw(4), draw(4)),
        "rms_norm": (draw(50, 4), draw(4)),
        "embedding": (draw(300, 4), generator.integers(0, 300, 50)),
    }[name]
    tensors = [mg.Tensor(a, requires_grad=True) if a.dtype == half else a for a in args]
    y = getattr(mg, name)(*tensors)
    wide = [mg.Tensor(a.astype(np.float64), requires_grad=True) if a.dtype == half else a for a in args]
    g = draw(*y.shape)
    mg.backward_with_grad(getattr(mg, name)(*wide), g.astype(np.float64))
    tested = 0
    for vjp, exact in zip(y.node.vjps, wide, strict=False):
        if isinstance(vjp, WeightVjp):
            out = np.full(exact.shape, np.nan, np.float32)
            vjp.write(g, out, False)
            np.testing.assert_allclose(out, exact.grad, rtol=1e-4, atol=1e-4)
            vjp.write(g, out, True)
            np.testing.assert_allclose(out, 2 * exact.grad, rtol=1e-4, atol=1e-4)
            assert vjp(g).dtype == half
            tested += 1
    assert tested == len([t for t in wide if isinstance(t, mg.Tensor)]) - (name != "embedding")


def test_bfloat16_learns_what_float32_learns() -> None:
    def losses(precision: str) -> list[float]:
        model = model_in(precision)
        optimizer = Optimizer(model.parameters(), AdamW(1e-2))
        found = []
        for step in range(40):
            x = (np.arange(6) * 3 + np.arange(16)[:, None] + step) % 17
            optimizer.zero_grad()
            loss = mg.cross_entropy(model(x), (x + 3) % 17)
            mg.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    exact, half = losses("float32"), losses("bfloat16")
    assert exact[-1] < exact[0] / 2
    np.testing.assert_allclose(half[-1], exact[-1], atol=0.05)


def test_a_run_may_change_its_precision_and_back() -> None:
    model = model_in("bfloat16")
    x, _ = batch()
    exact = GPT(CONFIG)(x).data
    assert (model(x).data != exact).any()
    use_precision(model.parameters(), "float32")
    np.testing.assert_array_equal(model(x).data, exact)
    assert all(part.copy is None for part in FlatBuffer.adopt(model.parameters()))


def test_the_tape_notices_a_change_of_what_it_sees() -> None:
    w = mg.Parameter(np.ones(2, np.float32), "w")
    use_precision([w], "bfloat16")
    x = mg.Tensor(np.ones(2, dtype_of("bfloat16")), requires_grad=True)
    y = mg.sum(x * w)
    w.data = np.zeros(2)
    with pytest.raises(RuntimeError, match="mul needs 'w' as it was in the forward"):
        mg.backward(y)


def test_move_grad_keeps_the_copy() -> None:
    model = MLP([3, 4, 2])
    use_precision(model.parameters(), "bfloat16")
    (part,) = FlatBuffer.adopt(model.parameters())
    part.flat.move_grad(np.zeros_like(part.flat.grad))
    assert model(np.ones((1, 3), dtype_of("bfloat16"))).dtype == dtype_of("bfloat16")
    assert model.parameters()[0].data.dtype == np.float32


@pytest.mark.parametrize(
    ("params", "precision", "message"),
    [
        ([mg.Parameter(np.ones(2, np.float32), "w")], "fp8", "must be one of float32, bfloat16, float16, got 'fp8'"),
        ([mg.Parameter(np.ones(2), "w")], "bfloat16", "for float32 parameters, but 'w' is float64"),
    ],
)
def test_bad_input_is_refused(params: Any, precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use_precision(params, precision)
    assert params[0].flat is None  # nothing was moved
    assert "float32" in PRECISIONS


def test_part_of_a_flat_is_refused() -> None:
    params = MLP([3, 2]).parameters()
    FlatBuffer.adopt(params)
    with pytest.raises(ValueError, match=r"one flat buffer have one precision, but .* is left out"):
        use_precision(params[:1], "bfloat16")


# -- float16's range ----------------------------------------------------------------------


def test_a_loss_scale_keeps_gradients_that_float16_would_lose() -> None:
    w = mg.Parameter(np.full(4, 1.0, np.float32), "w")
    use_precision([w], "float16")

    def grad(scale: float) -> Any:
        w.grad = None
        x = mg.Tensor(np.full(4, 1e-4, np.float16), requires_grad=True)
        mg.backward(mg.mse(x * w, np.zeros(4, np.float16)) * scale)  # d/dw = 2 x^2 / 4 = 5e-9: 0 in float16
        return w.grad.copy()

    assert (grad(1.0) == 0).all()
    scale = LossScale()
    grad(scale.value)
    scale.unscale([w])
    np.testing.assert_allclose(w.grad, 5e-9, rtol=5e-3)


def test_steps_with_gradients_that_are_not_finite_are_skipped_and_counted() -> None:
    scale = LossScale(value=4.0, growth_steps=3)
    assert [scale.update(norm) for norm in (1.0, np.inf, 1.0, 1.0, np.nan)] == [True, False, True, True, False]
    assert (scale.num_skipped, scale.value) == (2, 1.0)
    assert [scale.update(1.0) for _ in range(3)] == [True] * 3
    assert scale.value == 2.0
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert (other.value, other.num_skipped) == (2.0, 2)


def test_a_loss_scale_grows_on_where_a_run_goes_on_with_fewer_growth_steps() -> None:
    # It compared for equality: with more good steps behind it than it wants it would never have doubled again.
    scale = LossScale(growth_steps=4)
    assert scale.update(1.0)
    assert scale.update(1.0)
    other = LossScale(growth_steps=2)
    other.load_state_dict(scale.state_dict())
    assert other.update(1.0)
    assert other.value == 2 * scale.value


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0, 3.0, 2 * MAX_SCALE, np.inf, np.nan])
def test_a_loss_scale_is_a_power_of_two(value: float) -> None:
    with pytest.raises(ValueError, match=r"the factor of a loss must be a power of two from 1 to 2\*\*24, got"):
        LossScale(value)
    with pytest.raises(ValueError, match="growth_steps must be at least 1, got 0"):
        LossScale(growth_steps=0)


def test_a_loss_scale_ends_a_run_that_no_factor_can_save() -> None:
    """It halved 1 to 1 for ever, and a run whose weights were nan went on skipping steps to its end."""
    scale = LossScale(value=MAX_SCALE)
    for _ in range(24 + 10):
        assert not scale.update(np.nan)
    assert scale.value == 1
    with pytest.raises(FloatingPointError, match="no more than 34 steps in a row are skipped"):
        scale.update(np.nan)
    scale = LossScale(max_in_a_row=0)
    assert scale.allows(1.0, 2.0)
    with pytest.raises(FloatingPointError, match=r"no more than 0 steps in a row .* got 1\.0 and inf"):
        scale.allows(1.0, np.inf)


def test_a_float16_gpt_trains_with_a_loss_scale_that_starts_too_high() -> None:
    model = model_in("float16")
    optimizer, scale = Optimizer(model.parameters(), AdamW(1e-2)), LossScale(value=2.0**24)
    x, y = batch()
    losses = []
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(30):
            optimizer.zero_grad()
            loss = mg.cross_entropy(model(x), y)
            mg.backward(loss * scale.value)
            scale.unscale(optimizer.params)
            if scale.update(clip_by_global_norm(optimizer.params, 1.0)):
                optimizer.step()
            losses.append(loss.item())
    assert 0 < scale.num_skipped < 15
    assert losses[-1] < losses[0] / 2
    assert all(np.isfinite(p.data).all() for p in model.parameters())


def test_an_optimizer_with_a_loss_scale_does_what_is_done_by_hand() -> None:
    """Steps that are skipped at first, a factor that grows; the same bits, and the same counts."""

    def trained(*, by_hand: bool) -> tuple[list[Any], dict[str, float], int]:
        model, scale = model_in("float16"), LossScale(value=MAX_SCALE, growth_steps=4)
        own = {} if by_hand else {"max_norm": 1.0, "loss_scale": scale}
        optimizer = Optimizer(model.parameters(), AdamW(1e-2), **own)
        for step in range(16):
            optimizer.zero_grad()
            mg.backward(mg.cross_entropy(model(batch(step)[0]), batch(step)[1]) * scale.factor)
            if by_hand:
                scale.unscale(optimizer.params)
                norm = clip_by_global_norm(optimizer.params, 1.0)
                taken = scale.update(norm)
            if not by_hand or taken:
                optimizer.step()
            if not by_hand:
                assert optimizer.was_taken() == np.isfinite(optimizer.grad_norm)
        return [p.data for p in optimizer.params], scale.state_dict(), optimizer.num_steps

    with np.errstate(over="ignore", invalid="ignore"):
        (values, state, num_steps), (expected, of_hand, num_by_hand) = trained(by_hand=False), trained(by_hand=True)
    assert state == of_hand
    assert num_steps == num_by_hand == 16 - state["num_skipped"] > 4
    for value, want in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, want)


def test_a_loss_scale_needs_a_norm_and_a_state_of_its_own_kind() -> None:
    w = mg.Parameter(np.ones(2, np.float32), "w")
    with pytest.raises(ValueError, match="a loss_scale needs max_norm"):
        Optimizer([w], AdamW(0.1), loss_scale=LossScale())
    with pytest.raises(ValueError, match="a state of a loss scale must have value, num_good"):
        LossScale().load_state_dict({"value": 1.0})
    optimizer = Optimizer([w], AdamW(0.1), max_norm=np.inf, loss_scale=LossScale(max_in_a_row=1))
    w.grad = np.full(2, np.nan, np.float32)
    optimizer.step()
    with pytest.raises(FloatingPointError, match="no more than 1 step in a row"):
        optimizer.step()


def test_a_copy_of_a_model_is_float32_and_has_the_values_that_are_trained() -> None:
    model = model_in("bfloat16")
    x, _ = batch()
    np.testing.assert_array_equal(deepcopy(model)(x).data, GPT(CONFIG)(x).data)


def test_half_precision_on_an_old_gpu_is_refused_before_a_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC would say that a conversion needs another target."""
    params = [mg.Parameter(np.ones(3, np.float32), "w")]
    monkeypatch.setattr("minigrad.precision.xp_of", lambda array: "cupy")
    monkeypatch.setattr("minigrad.precision.gpu_capability", lambda: (7, 5))
    with pytest.raises(
        ValueError, match=r"float16 needs a GPU of compute capability 8\.0 or newer, got 7\.5: take float"
    ):
        use_precision(params, "float16")
    use_precision(params, "float32")
    monkeypatch.setattr("minigrad.precision.gpu_capability", lambda: (12, 0))
    use_precision(params, "float16")
