"""Properties of the ops of arithmetic, reduction, shape and linear algebra, over drawn shapes, axes and dtypes.

What the op table asks for a few shapes is asked here for many: the value is NumPy's, the vjp is the derivative, dtypes
stay what they were. A few examples of each property run always, the same in every run; thousands of new
ones run with the marker soak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import op_rows_math
import pytest
from cases import case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from op_table import Row, is_float, read_only

import minigrad as mg
from minigrad import ops
from minigrad.backend import Array

Draw = Callable[[st.SearchStrategy[Any]], Any]


def values(draw: Draw, shape: tuple[int, ...], *, positive: bool = False) -> Array:
    """Draw distinct values off 0, about 1 in size: off the kinks of relu, abs and max, off the poles of a division."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = 0.5 + generator.permutation(math.prod(shape)).reshape(shape) / (math.prod(shape) + 1)
    return read_only(np.asarray(size if positive else size * generator.choice([-1.0, 1.0], shape)))


def shapes(**limits: int) -> st.SearchStrategy[tuple[int, ...]]:
    return hnp.array_shapes(**{"min_dims": 0, "max_dims": 4, "min_side": 0, "max_side": 4, **limits})


def holds(op: Callable[..., mg.Tensor], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Assert that an op has NumPy's value, and the derivative as its vjp."""
    y, expected = op(*args, **kwargs), plain(*args, **kwargs)
    assert y.shape == np.shape(expected)
    np.testing.assert_allclose(y.data, expected, rtol=1e-10, atol=1e-12)
    if any(is_float(x) for x in args):
        mg.check_vjp(op, *args, **kwargs)


UNARY: dict[str, Callable[[Array], Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "expm1": np.expm1,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "sigmoid": op_rows_math.plain_logistic,
    "silu": lambda x: x * op_rows_math.plain_logistic(x),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "gelu": op_rows_math.plain_gelu,
}
OF_POSITIVES = {"log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "prod": np.prod,
    "norm": op_rows_math.plain_norm,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "logsumexp": op_rows_math.plain_logsumexp,
    "var": np.var,
    "std": np.std,
}
OF_NOTHING = {"sum", "prod", "norm"}  # the others need at least one element


def unary_ops(draw: Draw) -> None:
    name = draw(st.sampled_from([*UNARY, *OF_POSITIVES]))
    x = values(draw, draw(shapes()), positive=name in OF_POSITIVES)
    holds(getattr(ops, name), {**UNARY, **OF_POSITIVES}[name], x)


def binary_ops_broadcast(draw: Draw) -> None:
    name = draw(st.sampled_from(sorted(BINARY)))
    drawn = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=3))
    # Of one permutation for both: no two elements are equal, where maximum has its kink.
    both = values(draw, (sum(map(math.prod, drawn.input_shapes)),), positive=name == "pow")
    sizes = [math.prod(shape) for shape in drawn.input_shapes]
    a, b = (part.reshape(shape) for part, shape in zip(np.split(both, sizes[:1]), drawn.input_shapes, strict=True))
    holds(getattr(ops, name), BINARY[name], read_only(a), read_only(b))


def where_broadcasts(draw: Draw) -> None:
    drawn = draw(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=3))
    first, *others = drawn.input_shapes
    condition = draw(hnp.arrays(bool, first))
    holds(ops.where, np.where, condition, *(values(draw, shape) for shape in others))


def reductions_over_any_axes(draw: Draw) -> None:
    name = draw(st.sampled_from(sorted(REDUCTIONS)))
    shape = draw(shapes(max_side=3, min_side=0 if name in OF_NOTHING else 1))
    axis = draw(st.none() | hnp.valid_tuple_axes(len(shape)) | st.sampled_from([*range(-len(shape), len(shape)), None]))
    axes = range(len(shape)) if axis is None else np.atleast_1d(np.array(axis, int))
    count = math.prod(shape[i] for i in axes)
    kwargs: dict[str, Any] = {"axis": axis, "keepdims": draw(st.booleans())}
    if name in ("var", "std"):
        kwargs["ddof"] = draw(st.integers(0, 1)) if count > 1 else 0
    x = values(draw, shape)
    if name == "prod" and x.size and draw(st.booleans()):
        x = read_only(np.where(np.arange(x.size).reshape(shape) % 5 == 0, 0, x))
    if name == "std" and count == 1:
        np.testing.assert_array_equal(ops.std(x, **kwargs).data, 0)  # not differentiable: see the policies
    else:
        holds(getattr(ops, name), REDUCTIONS[name], x, **kwargs)


def running_sums(draw: Draw) -> None:
    shape = draw(shapes(min_dims=1))
    holds(ops.cumsum, np.cumsum, values(draw, shape), axis=draw(st.integers(-len(shape), len(shape) - 1)))


def axes_move(draw: Draw) -> None:
    shape = draw(shapes(min_dims=1))
    x, one_axis = values(draw, shape), st.integers(-len(shape), len(shape) - 1)
    order = draw(st.permutations(range(len(shape))))
    holds(ops.transpose, np.transpose, x, axes=tuple(i - len(shape) * draw(st.booleans()) for i in order))
    holds(ops.swapaxes, np.swapaxes, x, axis1=draw(one_axis), axis2=draw(one_axis))
    holds(ops.flip, np.flip, x, axis=draw(st.none() | hnp.valid_tuple_axes(len(shape), min_size=1)))
    source = draw(hnp.valid_tuple_axes(len(shape)))
    places = draw(hnp.valid_tuple_axes(len(shape), min_size=len(source), max_size=len(source)))
    holds(ops.moveaxis, np.moveaxis, x, source=source, destination=places)


def axes_come_and_go(draw: Draw) -> None:
    x = values(draw, draw(shapes(max_dims=3)))
    axis = draw(hnp.valid_tuple_axes(x.ndim + 1, min_size=1, max_size=1))
    holds(ops.expand_dims, np.expand_dims, x, axis=axis)
    holds(ops.squeeze, np.squeeze, read_only(np.expand_dims(x, axis)), axis=axis)
    holds(ops.reshape, lambda x, shape: x.reshape(shape), x, shape=tuple(sorted(x.shape)))
    stretched = [draw(st.integers(0, 3)) if n == 1 else n for n in x.shape]
    holds(ops.broadcast_to, np.broadcast_to, x, shape=(*draw(shapes(max_dims=1)), *stretched))
    widths = [tuple(draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))) for _ in x.shape]
    if x.ndim:
        holds(ops.pad, op_rows_math.plain_pad, x, widths=widths, value=0.5)


def arrays_join_and_part(draw: Draw) -> None:
    shape = draw(shapes(min_dims=1, max_dims=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    parts = [values(draw, tuple(n if i != axis % len(shape) else k for i, n in enumerate(shape))) for k in lengths]
    holds(ops.concatenate, lambda *x, axis: np.concatenate(x, axis), *parts, axis=axis)
    same = [values(draw, shape) for _ in lengths]
    holds(ops.stack, lambda *x, axis: np.stack(x, axis), *same, axis=draw(st.integers(-len(shape) - 1, len(shape))))
    whole = mg.Tensor(np.concatenate(parts, axis), requires_grad=True)
    pieces = whole.split(lengths, axis=axis)
    for piece, part in zip(pieces, parts, strict=True):
        np.testing.assert_array_equal(piece.data, part)
    mg.backward(sum((i + 1) * piece.sum() for i, piece in enumerate(pieces)))
    np.testing.assert_array_equal(whole.grad, np.concatenate([0 * x + i + 1 for i, x in enumerate(parts)], axis))


def elements_are_selected(draw: Draw) -> None:
    x = values(draw, draw(shapes(min_dims=1, max_dims=3, min_side=1)))
    basic = hnp.basic_indices(x.shape, allow_newaxis=True, allow_ellipsis=True)
    fancy = hnp.integer_array_indices(x.shape)
    rows = hnp.arrays(np.int64, shapes(max_dims=2), elements=st.integers(-x.shape[0], x.shape[0] - 1))
    holds(ops.getitem, lambda x, index: x[index], x, index=draw(basic | fancy | rows | hnp.arrays(bool, x.shape)))


def matrices_multiply(draw: Draw) -> None:
    drawn = draw(hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, min_side=0, max_side=3))
    holds(ops.matmul, np.matmul, *(values(draw, shape) for shape in drawn.input_shapes))


def letters_are_summed(draw: Draw) -> None:
    lengths = dict(zip("abcd", draw(st.lists(st.integers(1, 3), min_size=4, max_size=4)), strict=True))
    inputs = draw(st.lists(st.text("abcd", max_size=3), min_size=1, max_size=3))
    present = sorted(set("".join(inputs)))
    output = "".join(draw(st.permutations(present)))[: draw(st.integers(0, len(present)))]
    arrays = [values(draw, tuple(lengths[c] for c in letters)) for letters in inputs]
    holds(ops.einsum, op_rows_math.plain_einsum, *arrays, subscripts=f"{','.join(inputs)}->{output}")


def each_gradient_has_its_operands_dtype(draw: Draw) -> None:
    """Draw two floating dtypes, or one and integers: floats promote as NumPy's, integers never widen."""
    floats = [np.float16, np.float32, np.float64]
    dtypes = draw(st.tuples(st.sampled_from(floats), st.sampled_from([*floats, np.int64, np.int32, np.bool_])))
    a, b = (np.ones((3, 3), dtype) for dtype in (dtypes if draw(st.booleans()) else dtypes[::-1]))
    calls: dict[str, tuple[Any, ...]] = dict.fromkeys([*BINARY, "matmul", "stack", "concatenate", "einsum"], (a, b))
    calls |= {"where": (np.array(True), a, b), "outer": (a[0], b[0]), "linear": (a, a, b[0])}
    for name, args in calls.items():
        leaves = [mg.Tensor(x, requires_grad=True) if is_float(x) else x for x in args]
        y = getattr(ops, name)(*leaves, **({"subscripts": "ij,jk->ik"} if name == "einsum" else {}))
        wanted = [x for x in leaves if isinstance(x, mg.Tensor)]
        assert y.dtype == np.result_type(*(x.dtype for x in wanted)), name
        assert y.node is not None
        g = read_only(np.ones(y.shape, y.dtype))
        assert [vjp(g).dtype for vjp in y.node.vjps] == [x.dtype for x in wanted], name


PROPERTIES = [
    unary_ops,
    binary_ops_broadcast,
    where_broadcasts,
    reductions_over_any_axes,
    running_sums,
    axes_move,
    axes_come_and_go,
    arrays_join_and_part,
    elements_are_selected,
    matrices_multiply,
    letters_are_summed,
    each_gradient_has_its_operands_dtype,
]


def hold(property_of: Callable[[Draw], None], **how: Any) -> None:
    @settings(deadline=None, database=None, **how)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        property_of(data.draw)

    run()


@pytest.mark.parametrize("property_of", PROPERTIES)
def test_a_few_examples_hold(property_of: Callable[[Draw], None]) -> None:
    hold(property_of, max_examples=25, derandomize=True)


@pytest.mark.soak
@pytest.mark.parametrize("property_of", PROPERTIES)
def test_many_examples_hold(property_of: Callable[[Draw], None]) -> None:
    hold(property_of, max_examples=3000)


# -- half precision -----------------------------------------------------------------------


def test_bfloat16_stays_bfloat16() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for row in op_rows_math.ROWS:
        if row.name != "astype":
            with case(row.name, row.kwargs):
                check_half_precision(row, bfloat16)


def check_half_precision(row: Row, dtype: Any) -> None:
    exact = row.sample()
    args = [x.astype(dtype) if is_float(x) else x for x in exact]
    leaves = [mg.Tensor(x, requires_grad=True) if x.dtype == dtype else x for x in args if hasattr(x, "dtype")]
    tensors = iter(leaves)
    y = row.op(*[next(tensors) if hasattr(x, "dtype") else x for x in args], **row.kwargs)
    assert y.dtype == dtype
    expected = row.op(
        *[x.astype(np.float64) if is_float(e) else x for x, e in zip(args, exact, strict=True)], **row.kwargs
    )
    np.testing.assert_allclose(y.data.astype(np.float64), expected.data, rtol=0.02, atol=0.02)
    assert y.node is not None
    contributions = [vjp(read_only(np.ones(y.shape, dtype))) for vjp in y.node.vjps]
    assert [(c.shape, c.dtype) for c in contributions] == [(x.shape, dtype) for x in leaves if isinstance(x, mg.Tensor)]


@pytest.mark.parametrize("op", [ops.sum, ops.mean, ops.var, ops.norm, ops.logsumexp])
def test_half_precision_adds_up_in_float32(op: Callable[..., mg.Tensor]) -> None:
    # In float16 a sum along the first axis stops where the next term is below half a unit: of ones, at 2048.
    x = np.random.default_rng(0).uniform(0, 8, (8000, 2)).astype(np.float16)
    np.testing.assert_allclose(op(x, axis=0).data, op(x.astype(np.float64), axis=0).data, rtol=1e-3)
    spread = mg.Tensor(np.ones(2, np.float16), requires_grad=True)
    mg.backward((spread * np.ones((3000, 2), np.float16)).sum())
    np.testing.assert_array_equal(spread.grad, 3000)


# -- operators and methods ----------------------------------------------------------------


def test_methods_are_the_ops() -> None:
    array = values(lambda _: 0, (2, 1, 3))
    x = mg.Tensor(array, requires_grad=True)
    for got, expected in [
        (x**2, array**2),
        (2**x, 2**array),
        (np.abs(array) ** x, np.abs(array) ** array),
        (abs(x), np.abs(array)),
        (x.max(axis=0), array.max(0)),
        (x.min(axis=0), array.min(0)),
        (x.prod(axis=0), array.prod(0)),
        (x.var(axis=0), array.var(0)),
        (x.std(axis=0, ddof=1), array.std(0, ddof=1)),
        (x.cumsum(axis=0), array.cumsum(0)),
        (x.clip(low=0, high=1), array.clip(0, 1)),
        (x.squeeze(axis=1), array.squeeze(1)),
        (x.swapaxes(0, -1), array.swapaxes(0, -1)),
        (x.reshape((3, 2)), array.reshape(3, 2)),
        (x.reshape([-1]), array.ravel()),
        (x.reshape(6), array.ravel()),
        (x.transpose((2, 0, 1)), array.transpose(2, 0, 1)),
        (x.split(3, axis=-1)[2], array[..., 2:]),
    ]:
        assert isinstance(got, mg.Tensor)
        assert got.requires_grad
        np.testing.assert_allclose(got.data, expected, rtol=1e-15)


def test_comparisons_give_plain_booleans() -> None:
    array = np.array([1.0, 2.0, 3.0])
    x, two = mg.Tensor(array, requires_grad=True), mg.Tensor(np.array(2.0))
    for other in (2, two, np.full(3, 2.0)):
        for got, expected in [(x < other, array < 2), (x <= other, array <= 2), (x > other, array > 2)]:
            assert type(got) is np.ndarray
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(x >= other, array >= 2)
    np.testing.assert_array_equal(np.full(3, 2.0) < x, [False, False, True])
    assert x == x  # identity: tensors are keys of dicts
    assert {x: 1}[x] == 1


# -- what ops refuse ----------------------------------------------------------------------

X23, X4 = np.ones((2, 3)), np.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *[
            (lambda name=name: getattr(ops, name)(X23, X4), ValueError,
             rf"{name}: shapes must be equal or broadcast, got \(2, 3\) and \(4,\)")
            for name in BINARY
        ],
        (lambda: ops.where(X23 > 0, X4, 1.0), ValueError, r"where: shapes must .* broadcast, got \(2, 3\) and \(4,\)"),
        (lambda: ops.where(X23, X23, X23), TypeError, "where: the condition must be an array of booleans, got float64"),
        (lambda: ops.where(1, X23, X23), TypeError, "where: the condition must be an array of booleans, got int"),
        (lambda: ops.clip(X4), ValueError, "clip needs low or high, and low <= high, got None and None"),
        (lambda: ops.clip(X4, low=2, high=1), ValueError, "clip needs low or high, and low <= high, got 2 and 1"),
        *[
            (lambda name=name: getattr(ops, name)(X23, axis=2), ValueError,
             rf"{name}: axes must be distinct and exist, got 2 for shape \(2, 3\)")
            for name in [*REDUCTIONS, "cumsum", "flip", "squeeze", "concatenate"]
        ],
        (lambda: ops.sum(X23, axis=(0, -2)), ValueError, r"sum: axes must be distinct and exist, got \(0, -2\)"),
        (lambda: ops.swapaxes(X23, axis1=0, axis2=-3), ValueError, "swapaxes: axes must be distinct and exist, got -3"),
        *[
            (lambda name=name: getattr(ops, name)(np.ones((2, 0)), axis=1), ValueError,
             rf"{name} needs at least one element, got shape \(2, 0\) over axis 1")
            for name in ["mean", "max", "min", "logsumexp"]
        ],
        (lambda: ops.var(np.ones(0)), ValueError, r"var needs more than 0 elements, got shape \(0,\) over axis None"),
        (lambda: ops.std(np.ones(1), ddof=1), ValueError, r"std needs more than 1 elements, got shape \(1,\)"),
        (lambda: ops.transpose(X23, axes=(0,)), ValueError,
         r"transpose: axes must name each axis once, got \(0,\) for shape \(2, 3\)"),
        (lambda: ops.moveaxis(X23, source=(0, 1), destination=0), ValueError,
         r"moveaxis: source and destination must be as many, got \(0, 1\) and 0"),
        (lambda: ops.squeeze(X23, axis=0), ValueError, r"squeeze: axes must have length 1, got 0 for shape \(2, 3\)"),
        (lambda: ops.concatenate(X23, X4), ValueError,
         r"concatenate: shapes must agree in all axes but 0, got \[\(2, 3\), \(4,\)\]"),
        (lambda: ops.concatenate(), ValueError, r"concatenate: shapes must agree in all axes but 0, got \[\]"),
        (lambda: ops.broadcast_to(X23, shape=(4, 3)), ValueError,
         r"broadcast_to: only axes of length 1 can be repeated, got \(2, 3\) for \(4, 3\)"),
        (lambda: ops.stack(X23, X4), ValueError, r"stack: shapes must be equal, got \[\(2, 3\), \(4,\)\]"),
        (lambda: ops.pad(X23, widths=[(1, 1)]), ValueError,
         r"pad: widths must be a pair >= 0 for each axis, got \[\(1, 1\)\] for shape \(2, 3\)"),
        (lambda: ops.pad(X4, widths=[(1, -1)]), ValueError, "pad: widths must be a pair >= 0 for each axis"),
        (lambda: mg.Tensor(X23).split(2, axis=1), ValueError,
         "split: the parts of an axis of 3 must be equal, or lengths that add up to it, got 2"),
        (lambda: mg.Tensor(X4).split([1, 2]), ValueError, r"split: the parts of an axis of 4 .* got \[1, 2\]"),
        (lambda: mg.Tensor(X4).split(0), ValueError, "split: the parts of an axis of 4 .* got 0"),
        (lambda: ops.matmul(X23, X4), ValueError,
         r"matmul: \(\.\.\., n, k\) and \(\.\.\., k, m\) do not fit, got \(2, 3\) and \(4,\)"),
        (lambda: ops.matmul(X23, np.ones(())), ValueError, r"matmul: .* do not fit, got \(2, 3\) and \(\)"),
        (lambda: ops.linear(X23, X4, X4), ValueError, r"linear: .* got \(2, 3\), \(4,\) and \(4,\)"),
        (lambda: ops.outer(X23, X4), ValueError, r"outer: both operands must be 1-D, got \(2, 3\) and \(4,\)"),
        (lambda: ops.einsum(X23, subscripts="ij"), ValueError,
         "einsum: subscripts must be letters, commas and one '->', got 'ij'"),
        (lambda: ops.einsum(X23, subscripts="...j->j"), ValueError, "einsum: subscripts must be letters"),
        (lambda: ops.einsum(X23, subscripts="i->i"), ValueError,
         r"einsum: each operand needs one letter for each axis, got 'i->i' for shapes \[\(2, 3\)\]"),
        (lambda: ops.einsum(X23, X4, subscripts="ij->j"), ValueError, "einsum: each operand needs one letter"),
        (lambda: ops.einsum(X4, subscripts="i->ii"), ValueError,
         "einsum: the output must have letters of the operands, each once, got 'i->ii'"),
        (lambda: ops.einsum(X4, subscripts="i->j"), ValueError, "einsum: the output must have letters of the operands"),
        (lambda: ops.einsum(X23, X4, subscripts="ij,j->i"), ValueError,
         "einsum: a letter must have one length, got 3 and 4 for 'j'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
