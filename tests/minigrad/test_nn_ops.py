"""The ops of a neural network at their edges: large scores, masks, ties, float16, what they keep, what they refuse."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_modes import MODES, use_kernels
from op_rows_nn import plain_scaled_dot_product_attention

import minigrad as mg
from minigrad.backend import Array


@pytest.fixture(autouse=True, params=MODES)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of this file with each set of kernels."""
    use_kernels(request.param, monkeypatch)


def leaf(array: Any, dtype: Any = np.float64) -> mg.Tensor:
    return mg.Tensor(np.asarray(array, dtype), requires_grad=True)


def sample(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(3).standard_normal(shape))


def kept_bytes(y: mg.Tensor) -> int:
    return mg.Tape.of(y).kept_bytes


# -- attention ----------------------------------------------------------------------------


def test_causal_attention_is_the_general_one_of_its_parts() -> None:
    qkv, g = leaf(sample(2, 70, 18)), sample(2, 70, 6)
    parts = [leaf(x.reshape(2, 70, 3, 2).swapaxes(1, 2)) for x in np.split(qkv.data, 3, axis=-1)]  # (B, H, T, d)
    fused, general = mg.causal_attention(qkv, num_heads=3), mg.scaled_dot_product_attention(*parts, causal=True)

    def joined(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(2, 70, 6)

    def close(got: Any, expected: Array) -> None:  # the blocks of queries differ in size
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    close(fused.data, joined(general.data))
    mg.backward_with_grad(fused, g)
    mg.backward_with_grad(general, g.reshape(2, 70, 3, 2).swapaxes(1, 2))
    expected = [joined(x.grad) for x in parts if x.grad is not None]
    close(qkv.grad, np.concatenate(expected, -1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("largest", [10.0, 29.0, 31.0, 200.0])
def test_attention_is_right_for_scores_on_both_sides_of_the_safe_limit(largest: float, dtype: Any) -> None:
    # One query fits one key well, another as badly as can be, and the third scores are 0.
    root = np.sqrt(largest)
    q, k, v = (np.array(x, dtype) for x in ([[root], [-root], [0]], [[root], [0.1], [0]], [[1], [2], [3]]))
    y = mg.scaled_dot_product_attention(q, k, v).data
    expected = plain_scaled_dot_product_attention(*(x.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_allclose(y, expected, rtol=4e-3 if dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("size", [1.0, 100.0])  # without the row's maximum taken off, and with
def test_a_query_that_sees_no_key_gets_zeros_and_gives_no_gradient(size: float) -> None:
    mask = np.array([[True, False, True], [False, False, False]])
    q, k, v = leaf(size * sample(2, 4)), leaf(size * sample(3, 4)), leaf(sample(3, 4))
    y = mg.scaled_dot_product_attention(q, k, v, mask=mask)
    assert y.data[0].all()
    assert not y.data[1].any()
    mg.backward_with_grad(y, np.array([[0.0], [1.0]]) * np.ones((2, 4)))
    for x in (q, k, v):
        np.testing.assert_array_equal(x.grad, np.zeros(x.shape))


def test_a_key_that_is_masked_counts_for_nothing_however_well_it_fits() -> None:
    q, k = np.ones((1, 1)), np.array([[1.0], [1e4]])  # with its score among the maxima all others would be exp(-1e4)
    y = mg.scaled_dot_product_attention(q, k, np.array([[5.0], [7.0]]), mask=np.array([True, False]))
    assert y.data == 5


def test_attention_keeps_its_inputs_and_the_weights_of_one_block_of_queries() -> None:
    # and no second array of scores, nor its output; of several blocks it keeps no weights at all
    for time, num_weights in (64, 64 * 64), (65, 0):
        qkv = leaf(sample(2, time, 12))
        y = mg.causal_attention(qkv, num_heads=2)
        least = qkv.data.nbytes + 2 * 2 * 8 * num_weights
        assert least <= kept_bytes(y) <= least + 2 * 2 * 8 * 2 * 96  # and two numbers of each query


def test_attention_without_causal_has_larger_blocks_and_keeps_a_mask_to_compute_scores_again() -> None:
    k, mask = leaf(sample(3, 2, 4, 1)), np.ones((3, 1, 1, 4), bool)
    for time, num_weights, kept_mask in (256, 4, 0), (257, 0, mask.nbytes):
        q = leaf(sample(3, 2, time, 1))
        y = mg.scaled_dot_product_attention(q, k, k, mask=mask)
        arrays = q.data.nbytes + k.data.nbytes
        assert kept_bytes(y) == arrays + 3 * 2 * time * 8 * num_weights + kept_mask


def test_attention_over_several_blocks_never_has_all_scores_at_a_time() -> None:
    qkv = leaf(sample(4, 256, 24), np.float32)
    scores = 4 * 4 * 256 * 256 * 4

    def step() -> None:
        y = mg.causal_attention(qkv, num_heads=4)
        mg.backward_with_grad(y, y.data)

    step()  # the first one may compile kernels, which takes as much
    tracemalloc.start()
    step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < scores / 4


def test_attention_over_several_blocks_is_right_for_large_scores() -> None:
    data, g = 20 * sample(2, 130, 12), sample(2, 130, 4)
    exact, single = leaf(data), leaf(data, np.float32)
    for qkv in exact, single:
        mg.backward_with_grad(mg.causal_attention(qkv, num_heads=2), g.astype(qkv.dtype))
    largest = np.abs(exact.grad).max()
    np.testing.assert_allclose(single.grad, exact.grad, atol=1e-3 * largest)
    mg.check_vjp(mg.causal_attention, data / 4, num_heads=2)


def test_half_precision_gradients_of_several_blocks_are_rounded_once() -> None:
    data, g = sample(1, 300, 6).astype(np.float16), sample(1, 300, 2).astype(np.float16)
    half, single = leaf(data, np.float16), leaf(data, np.float32)
    for qkv in half, single:
        mg.backward_with_grad(mg.causal_attention(qkv, num_heads=1), g.astype(qkv.dtype))
    of_values = slice(4, 6)  # the only ones that do not depend on y, which is rounded too
    got, expected = half.grad[..., of_values], single.grad[..., of_values].astype(np.float16)
    np.testing.assert_allclose(got, expected, rtol=2**-10)
    assert np.mean(got != expected) < 0.01  # two kernels: a sum may lie on the other side of a tie; 0.2 rounded twice


# -- convolution and pooling --------------------------------------------------------------


def test_convolution_in_numbers() -> None:
    x = np.arange(9.0).reshape(1, 1, 3, 3)
    w = np.array([[[[1.0, 2.0], [3.0, 4.0]]]])
    y = mg.conv2d(x, w, np.array([100.0]))
    np.testing.assert_array_equal(y.data, [[[[127, 137], [157, 167]]]])


def test_convolution_keeps_no_columns() -> None:
    x, w, b = leaf(sample(2, 3, 8, 8)), leaf(sample(4, 3, 3, 3)), leaf(sample(4))
    assert kept_bytes(mg.conv2d(x, w, b, padding=1)) == x.data.nbytes + w.data.nbytes
    assert kept_bytes(mg.conv2d(x.data, w, b)) == x.data.nbytes
    assert kept_bytes(mg.conv2d(x, w.data, b)) == w.data.nbytes


def test_the_first_of_several_maxima_gets_the_gradient() -> None:
    x = leaf([[[[2.0, 2.0, 1.0], [2.0, 0.0, 2.0]]]])
    y = mg.max_pool2d(x, size=2, stride=1)
    np.testing.assert_array_equal(y.data, [[[[2, 2]]]])
    mg.backward_with_grad(y, np.array([[[[3.0, np.inf]]]]))  # an infinity stays where it belongs
    np.testing.assert_array_equal(x.grad, [[[[3, np.inf, 0], [0, 0, 0]]]])


def test_max_pooling_keeps_one_byte_a_window() -> None:
    assert kept_bytes(mg.max_pool2d(leaf(sample(2, 3, 8, 8)), size=2)) == 2 * 3 * 4 * 4


# -- losses -------------------------------------------------------------------------------


def test_ignored_predictions_count_for_nothing_whatever_their_logits() -> None:
    logits, targets = sample(4, 3), np.array([0, -100, 2, -100])
    logits[1] = [np.inf, np.nan, 0]
    x, kept = leaf(logits), leaf(logits[[0, 2]])
    with np.errstate(invalid="ignore"):
        loss = mg.cross_entropy(x, targets, ignore_index=-100)
    expected = mg.cross_entropy(kept, targets[[0, 2]])
    mg.backward(loss)
    mg.backward(expected)
    assert loss.item() == expected.item()
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad[[0, 2]], kept.grad)
    np.testing.assert_array_equal(x.grad[[1, 3]], np.zeros((2, 3)))


def test_a_sum_over_no_prediction_is_zero_and_a_mean_is_refused() -> None:
    # elsewhere the mean is NaN, and so are the weights after the next step: pytorch#75181, pytorch#116349
    x, targets = leaf(sample(2, 3)), np.array([7, 7])
    loss = mg.cross_entropy(x, targets, ignore_index=7, reduction="sum")
    mg.backward(loss)
    assert loss.item() == 0
    np.testing.assert_array_equal(x.grad, np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"needs at least one prediction, got .* \(2, 3\), targets ignored: 2"):
        mg.cross_entropy(x, targets, ignore_index=7)


def test_binary_cross_entropy_is_stable() -> None:
    x = leaf([1e3, -1e3, 1e3, -1e3])
    loss = mg.binary_cross_entropy_with_logits(x, np.array([True, False, False, True]))
    mg.backward(loss)
    assert loss.item() == 500
    np.testing.assert_array_equal(x.grad, [0, 0, 0.25, -0.25])


@pytest.mark.parametrize("loss", [mg.mse, mg.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("target_dtype", [np.int64, np.float64, np.float32])
def test_a_loss_has_the_dtype_of_its_predictions(loss: Callable[..., mg.Tensor], target_dtype: Any) -> None:
    # mse of float32 and integers was float64, and so was the gradient that it sent back
    x = leaf([0.5, 2.0], np.float32)
    y = loss(x, np.array([0, 1], target_dtype))
    assert y.dtype == np.float32
    assert y.node is not None
    assert y.node.vjps[0](np.ones((), np.float32)).dtype == np.float32
    wide = leaf([0, 1])
    mg.backward(loss(x, wide))
    assert wide.grad is not None
    assert wide.grad.dtype == np.float64


# -- float16: what is large inside though what goes in and comes out is not ---------------------


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (mg.layer_norm, [300 * sample(3, 100), np.ones(100), np.zeros(100)]),  # the sum of squares is 9e6
        (mg.rms_norm, [300 * sample(3, 100), np.ones(100)]),
        (mg.softmax, [np.zeros(70_000)]),  # the sum of exponentials is 70,000
        (mg.log_softmax, [np.zeros(70_000)]),
        (mg.mse, [np.append(300, np.zeros(99)), np.zeros(100)]),  # the square is 90,000
        (lambda x: mg.cross_entropy(x, np.zeros(3, int)), [np.zeros((3, 70_000))]),
        (lambda x: mg.cross_entropy(x, np.zeros(70_000, int)), [np.zeros((70_000, 2))]),  # so is the count
        (lambda x: mg.binary_cross_entropy_with_logits(x, np.ones(70_000)), [np.zeros(70_000)]),
    ],
)
def test_float16_sums_have_room_inside(function: Callable[..., mg.Tensor], arrays: list[Array]) -> None:
    def run(dtype: Any) -> list[Array]:
        leaves = [leaf(x, dtype) for x in arrays]
        y = function(*leaves)
        mg.backward_with_grad(y, np.linspace(1, 2, y.data.size).reshape(y.shape).astype(y.dtype))
        return [y.data.astype(dtype), *(x.grad for x in leaves if x.grad is not None)]

    for half, double in zip(run(np.float16), run(np.float64), strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, double, rtol=2e-2, atol=2e-2 * np.abs(double).max())  # subnormals are coarse


@pytest.mark.parametrize("num_rows", [2, 300])  # by a product, and scattered
def test_a_row_that_is_looked_up_often_gets_the_whole_sum_in_bfloat16(num_rows: int) -> None:
    # In bfloat16, added one by one, a sum of ones stops at 256.
    table = leaf(np.ones((num_rows, 3)), pytest.importorskip("ml_dtypes").bfloat16)
    y = mg.embedding(table, np.zeros(5000, int))
    mg.backward_with_grad(y, np.ones(y.shape, y.dtype))
    assert table.grad is not None
    np.testing.assert_allclose(table.grad[0].astype(np.float64), 5000, rtol=0.01)


def test_norms_give_each_argument_a_gradient_in_its_own_dtype() -> None:
    x, gain, bias = leaf(sample(3, 4), np.float16), leaf(np.ones(4), np.float32), leaf(np.zeros(4), np.float64)
    for y, leaves in [(mg.layer_norm(x, gain, bias), [x, gain, bias]), (mg.rms_norm(x, gain), [x, gain])]:
        assert y.node is not None
        assert y.dtype == leaves[-1].dtype
        assert [vjp(np.ones(y.shape, y.dtype)).dtype for vjp in y.node.vjps] == [t.dtype for t in leaves]


# -- what is refused ----------------------------------------------------------------------

IMAGE, KERNEL = np.ones((1, 2, 4, 4)), np.ones((3, 2, 2, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: mg.scaled_dot_product_attention(np.ones((2, 3)), np.ones((4, 2)), np.ones((4, 2))),
            ValueError,
            r"attention: q \(\.\.\., T, d\), .* do not fit, got \(2, 3\), \(4, 2\), \(4, 2\)",
        ),
        (
            lambda: mg.scaled_dot_product_attention(np.ones((2, 3)), np.ones((4, 3)), np.ones((5, 3))),
            ValueError,
            r"do not fit, got \(2, 3\), \(4, 3\), \(5, 3\)",
        ),
        (
            lambda: mg.scaled_dot_product_attention(np.ones((2, 2, 3)), np.ones((4, 3)), np.ones((4, 3))),
            ValueError,
            r"do not fit, got \(2, 2, 3\), \(4, 3\), \(4, 3\)",
        ),
        (
            lambda: mg.scaled_dot_product_attention(*(np.ones((n, 3)) for n in (2, 4, 4)), causal=True),
            ValueError,
            "causal attention needs as many queries as keys, got 2 and 4",
        ),
        (
            lambda: mg.scaled_dot_product_attention(*(np.ones((2, 3)),) * 3, mask=np.zeros((2, 2))),
            TypeError,
            "attention: the mask must be boolean, True where a query sees a key, got float64",
        ),
        (
            lambda: mg.conv2d(IMAGE, np.ones((3, 1, 2, 2)), np.ones(3)),
            ValueError,
            r"conv2d: .* do not fit, got \(1, 2, 4, 4\), \(3, 1, 2, 2\) and \(3,\)",
        ),
        (lambda: mg.conv2d(IMAGE, KERNEL, np.ones(2)), ValueError, r"conv2d: .* do not fit, got .* and \(2,\)"),
        (lambda: mg.conv2d(IMAGE[0], KERNEL, np.ones(3)), ValueError, r"conv2d: .* do not fit, got \(2, 4, 4\)"),
        (
            lambda: mg.conv2d(IMAGE, np.ones((3, 2, 5, 2)), np.ones(3)),
            ValueError,
            r"a window must fit into the \(padded\) image, got \(5, 2\) and \(4, 4\)",
        ),
        (
            lambda: mg.conv2d(IMAGE, KERNEL, np.ones(3), stride=(1, 0)),
            ValueError,
            r"stride must be at least 1, got \(1, 0\)",
        ),
        (lambda: mg.conv2d(IMAGE, KERNEL, np.ones(3), padding=-1), ValueError, "padding must be at least 0, got -1"),
        (lambda: mg.max_pool2d(IMAGE, size=0), ValueError, "size must be at least 1, got 0"),
        (lambda: mg.avg_pool2d(IMAGE, size=(2, 5)), ValueError, r"a window must fit .* got \(2, 5\) and \(4, 4\)"),
        (lambda: mg.max_pool2d(IMAGE[0], size=2), ValueError, r"max_pool2d: x must be \(B, C, H, W\), got \(2, 4, 4\)"),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([0, 1]), reduction="none"),
            ValueError,
            "cross_entropy: reduction must be 'mean' or 'sum', got 'none'",
        ),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([0, 1]), label_smoothing=1.0),
            ValueError,
            r"cross_entropy: label_smoothing must be in \[0, 1\), got 1.0",
        ),
        (
            lambda: mg.cross_entropy(np.ones((2, 3)), np.array([-1, -100]), ignore_index=-100),
            IndexError,
            r"cross_entropy: targets must be in \[0, 3\), got -1 to 0",
        ),
        (lambda: mg.mse(np.array([1, 2]), np.ones(2)), TypeError, "mse: predictions must be floating point, got int64"),
        (
            lambda: mg.binary_cross_entropy_with_logits(np.array([1, 0]), np.ones(2)),
            TypeError,
            "binary_cross_entropy_with_logits: predictions must be floating point, got int64",
        ),
        (
            lambda: mg.cross_entropy(np.array([[1, 0]]), np.array([0])),
            TypeError,
            "cross_entropy: predictions must be floating point, got int64",
        ),
        (
            lambda: mg.binary_cross_entropy_with_logits(np.ones((2, 3)), np.ones(3)),
            ValueError,
            r"binary_cross_entropy_with_logits: x and target must have the same .* got \(2, 3\) and \(3,\)",
        ),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], mg.Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
