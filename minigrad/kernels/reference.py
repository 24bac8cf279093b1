"""Every kernel in NumPy's words, for NumPy and CuPy alike: what the others are held against.

Unless it is said otherwise: `x` and `g`, a cotangent, are (m, n), rows side by side; results have the dtype of `x`;
half precision is computed in float32 and rounded once; nan and infinity give what the formula's limit is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, is_half, scatter_add_rows, widened, xp_of

__all__ = [
    "adamw",
    "adamw_step",
    "add",
    "attention_dscores",
    "attention_weights",
    "causal_attention",
    "checked_ids",
    "column_sum",
    "cross_entropy",
    "cross_entropy_dlogits",
    "embedding",
    "embedding_dtable",
    "gelu",
    "gelu_dx",
    "layer_norm",
    "layer_norm_back",
    "layer_norm_dgain",
    "layer_norm_dx",
    "leaky_relu",
    "linear",
    "log_softmax",
    "log_softmax_dx",
    "multiply",
    "product",
    "relu",
    "rms_norm",
    "rms_norm_dgain",
    "rms_norm_dx",
    "scale",
    "scores_are_small",
    "select",
    "sgd",
    "sigmoid",
    "sigmoid_dx",
    "silu",
    "softmax",
    "softmax_dx",
    "softplus",
    "square_sum",
    "sum_parts",
]

_SAFE_SCORE = 30.0  # exp(30) is 1e13: its sums, products and inverses stay far inside float32
_BLOCK = 1 << 16  # elements: a chain of ufuncs stays in the cache from here on; smaller blocks cost calls


def _half_in_float32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel whose arrays are all of one half dtype compute in float32."""

    @functools.wraps(kernel)
    def wide(*args: Any) -> Any:
        dtype = args[0].dtype
        if not is_half(dtype):
            return kernel(*args)
        result = kernel(*[x.astype(np.float32) if getattr(x, "dtype", None) == dtype else x for x in args])
        return tuple([x.astype(dtype) for x in result]) if isinstance(result, tuple) else result.astype(dtype)

    return wide


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    """Return x scale where `keep` holds, else 0, whatever stands there. Any shape.

    By bits: a product with the mask would make nan of inf and 0, and NumPy's `where` is seven times slower
    where the mask changes at random.
    """
    if scale != 1.0:
        x = x * xp_of(x).asarray(scale, x.dtype)
    bits = np.dtype(f"i{x.itemsize}")
    return (x.view(bits) & -keep.astype(bits)).view(x.dtype)


# Products, and sums of two. An `out` of another dtype than the operands gets what would have been rounded to theirs.


def product(a: Array, b: Array, out: Array | None = None, add: bool = False) -> Array:
    """Return a b, of matrices or stacks of them, written or added into `out` if there is one.

    Half precision goes through float32 on the CPU, where NumPy is much faster at that; so do stacks of bfloat16 on a
    GPU, since CuPy has no product for them.
    """
    half = a.dtype == b.dtype and is_half(a.dtype)
    if out is None:
        if half and (xp_of(a) is np or (a.dtype.kind == "V" and (a.ndim > 2 or b.ndim > 2))):
            return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)
        return a @ b
    if not add and a.dtype == b.dtype == out.dtype and not half:
        return xp_of(a).matmul(a, b, out=out)
    return _put(widened(a) @ widened(b), out, add)


def linear(x: Array, w: Array, b: Array) -> Array:
    """Return x w + b; w (n, k), b (k,)."""
    y = product(x, w)
    if b.dtype != y.dtype:
        return y + b
    y += b
    return y


def column_sum(g: Array, out: Array | None = None, add: bool = False) -> Array:
    """Return the sum of g over rows, (n,), written or added into `out` if there is one. In float32 at least."""
    g = widened(g)
    total = xp_of(g).ones(len(g), g.dtype) @ g  # a GEMV is faster than sum(0)
    return total if out is None else _put(total, out, add)


def _put(c: Array, out: Array, add: bool) -> Array:
    """Write c into `out`, or add it."""
    if add and out.dtype == c.dtype:
        out += c
    else:
        out[...] = out + c if add else c
    return out


def add(x: Array, y: Array) -> Array:
    """Return x + y, of one shape and dtype."""
    return x + y


def multiply(x: Array, y: Array) -> Array:
    """Return x y, of one shape and dtype."""
    return x * y


# Functions of one number. Any shape.


def relu(x: Array) -> tuple[Array, Array]:
    """Return max(x, 0), and where the derivative is 1: booleans."""
    return xp_of(x).maximum(x, 0), x > 0


@_half_in_float32
def leaky_relu(x: Array, slope: float) -> tuple[Array, Array]:
    """Return x where it is positive, else slope x, and the derivative."""
    xp = xp_of(x)
    d = xp.where(x > 0, xp.asarray(1, x.dtype), xp.asarray(slope, x.dtype))
    return x * d, d


@_half_in_float32
def sigmoid(x: Array) -> Array:
    """Return s = 1 / (1 + exp(-x)), for x < 0 as exp(x) / (1 + exp(x)): no exponential overflows."""
    xp = xp_of(x)
    return xp.exp(xp.minimum(x, 0)) / (1 + xp.exp(-xp.abs(x)))


@_half_in_float32
def sigmoid_dx(g: Array, y: Array) -> Array:
    """Return g y (1 - y)."""
    return g * (y * (1 - y))


@_half_in_float32
def silu(x: Array) -> tuple[Array, Array]:
    """Return y = x s, s the logistic function, and the derivative, s + y (1 - s)."""
    xp, s = xp_of(x), sigmoid(x)
    limits = np.finfo(x.dtype)
    y = xp.maximum(x, limits.min) * s  # -inf times 0 would be nan
    return y, s + xp.minimum(y, limits.max) * (1 - s)


@_half_in_float32
def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)), whose derivative is `sigmoid`."""
    xp = xp_of(x)
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


# erfc(z) exp(z^2) for z >= 0 as a polynomial, constant first, in t - c, where t = 1 / (1 + p z): (p, c, coefficients).
# Abramowitz and Stegun, 7.1.26: error of erfc below 1.5e-7.
ERFC_SINGLE = (0.3275911, 0.0, (0.0, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
# Interpolated at the 24 Chebyshev nodes of 2t - 1, with 60 digits: error of erfc below 1e-15, in units of 2t - 1.
ERFC_DOUBLE = (0.4, 0.5, tuple(a * 2.0**i for i, a in enumerate((
    0.21080636406114361, 0.3717367339489734, 0.2517131932174405, 0.12503305237882445, 0.03992253907601487,
    0.003993701166097981, -0.0026423659728157, -0.0008759154549173785, 0.0002283804735335644, 0.00012887722225933806,
    -3.418296435405689e-05, -1.8614769447322862e-05, 7.5569151054483105e-06, 2.298998814223108e-06,
    -1.8211381937552404e-06, -7.644460357192798e-08, 3.974085857289782e-07, -8.657454542271736e-08,
    -6.834134137787255e-08, 3.695299404295727e-08, 7.617005034691897e-09, -8.31437456466365e-09,
    -3.521238327269033e-10, 8.899248713184815e-10,
))))  # fmt: skip
GELU_FLAT = 40.0  # from here on, on both sides, GELU is x or 0 and its derivative 1 or 0, in float64 too


def gelu_dx(g: Array, kept: Array, exact: bool) -> Array:
    """Return g times the derivative, from what `gelu` of the same table keeps for it."""
    return g * kept


@_half_in_float32
def gelu(x: Array, exact: bool) -> tuple[Array, Array]:
    """Return the GELU, y = x P(x), P the normal distribution function or its tanh form, and what `gelu_dx` needs.

    Here that is the derivative. On a GPU, where memory is slow and arithmetic is not, it is x.
    """
    xp = xp_of(x)
    y, d = xp.empty_like(x, order="C"), xp.empty_like(x, order="C")
    flat_x, flat_y, flat_d = xp.ravel(x), y.reshape(-1), d.reshape(-1)
    block = _BLOCK if xp is np else max(1, x.size)
    form = _gelu_exact if exact else _gelu_tanh
    with np.errstate(over="ignore", under="ignore"):  # far from 0 the exponentials are 0 or inf, as they should be
        for i in range(0, x.size, block):
            part = xp.maximum(flat_x[i : i + block], -GELU_FLAT)  # y at -inf is not -inf times 0
            inner = xp.minimum(part, GELU_FLAT)  # nor its derivative at inf inf times 0
            form(xp, part, inner, flat_y[i : i + block], flat_d[i : i + block])
    return y, d


def _gelu_tanh(xp: Any, x: Array, inner: Array, y: Array, d: Array) -> None:
    """Write y = x s, s the logistic function of 2u = a x + b x^3, and d = s + x s (1 - s) 2u'."""
    a = 2 * math.sqrt(2 / math.pi)
    b = a * 0.044715
    x2 = inner * inner
    s = x2 * -b
    s -= a
    s *= inner
    xp.exp(s, s)
    s += 1
    xp.reciprocal(s, s)
    xp.multiply(x, s, y)
    x2 *= 3 * b  # 2u' = a + 3b x^2
    x2 += a
    xp.subtract(1, s, d)
    d *= s
    d *= inner
    d *= x2
    d += s


def _gelu_exact(xp: Any, x: Array, inner: Array, y: Array, d: Array) -> None:
    """Write y = x P and d = P + x p, p the normal density; one exponential, exp(-x^2 / 2), serves both."""
    p, center, coefficients = ERFC_SINGLE if x.dtype == np.float32 else ERFC_DOUBLE
    z = xp.abs(inner)
    z *= math.sqrt(0.5)
    e = z * z
    xp.negative(e, e)
    xp.exp(e, e)
    z *= p
    z += 1
    xp.reciprocal(z, z)
    z -= center
    tail = xp.full_like(z, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        tail *= z
        tail += coefficient
    tail *= e
    tail *= 0.5  # P(-|x|) = erfc(|x| / sqrt(2)) / 2
    xp.subtract(0.5, tail, tail)
    xp.copysign(tail, x, tail)
    tail += 0.5  # P(x)
    xp.multiply(x, tail, y)
    xp.multiply(inner, e, d)
    d *= 1 / math.sqrt(2 * math.pi)
    d += tail


# Functions of a row.


@_half_in_float32
def softmax(x: Array) -> Array:
    """Return exp(x) over its sum in each row, with the row's maximum taken off first."""
    xp = xp_of(x)
    y = xp.exp(x - x.max(axis=1, keepdims=True))
    y /= y.sum(axis=1, keepdims=True)
    return y


@_half_in_float32
def softmax_dx(g: Array, y: Array) -> Array:
    """Return y (g - sum(g y))."""
    dx = g * y
    dx -= y * dx.sum(axis=1, keepdims=True)
    return dx


@_half_in_float32
def log_softmax(x: Array) -> Array:
    """Return x - log(sum(exp(x))), with the row's maximum taken off first."""
    xp = xp_of(x)
    y = x - x.max(axis=1, keepdims=True)
    y -= xp.log(xp.exp(y).sum(axis=1, keepdims=True))
    return y


@_half_in_float32
def log_softmax_dx(g: Array, y: Array) -> Array:
    """Return g - exp(y) sum(g)."""
    return g - xp_of(y).exp(y) * g.sum(axis=1, keepdims=True)


def cross_entropy(logits: Array, targets: Array, smoothing: float, weight: float) -> tuple[Array, Array]:
    """Return the loss of each row, -sum(q log p), and weight (p - q): its gradient, weighted.

    p = softmax(logits), q = (1 - smoothing) onehot(target) + smoothing / n.

    Args:
        targets: (m,) integers in [0, n), or negative: a row that does not count, whatever its logits are.
    Returns:
        (m,) and (m, n), both in float32 where the logits are of half precision.
    """
    xp, num_classes = xp_of(logits), logits.shape[1]
    rows, smooth = xp.arange(len(targets)), smoothing / num_classes
    p = widened(logits)
    p = p - p.max(axis=1, keepdims=True)
    losses = (smoothing - 1) * p[rows, targets]
    if smooth:
        losses -= smooth * p.sum(axis=1)
    total = xp.exp(p, p).sum(axis=1)
    losses += xp.log(total)
    p *= (weight / total)[:, None]
    if smooth:
        p -= weight * smooth
    p[rows, targets] -= weight * (1 - smoothing)
    ignored = targets < 0
    losses[ignored], p[ignored] = 0, 0  # selected, not multiplied by 0: their logits may be infinite
    return losses, p


def cross_entropy_dlogits(dlogits: Array, g: Array, dtype: Any) -> Array:
    """Return what `cross_entropy` gave times the cotangent g of the loss, a scalar, in the dtype of the logits.

    Called once: it may be in the memory of `dlogits`.
    """
    return (dlogits * g).astype(dtype, copy=False)


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return y = h gain + bias, h = (x - mean) / sqrt(var + eps), with the mean and 1 / sqrt(var + eps) of each row.

    Args:
        gain, bias: (n,).
    Returns:
        (m, n) in the dtype in which all three meet, and two columns (m, 1).
    """
    dtype = xp_of(x).result_type(x, gain, bias)
    x = widened(x)
    mean = x @ _average(x)
    h = x - mean
    inverse = _inverse_rms(h, eps)
    h *= inverse
    y = h * gain
    y += bias
    return y.astype(dtype, copy=False), mean, inverse


def layer_norm_dx(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    """Return (t - mean(t) - h mean(t h)) inverse, t = g gain."""
    t = widened(g) * gain
    t -= t @ _average(t)
    return _through_rms(t, (widened(x) - mean) * inverse, inverse).astype(x.dtype, copy=False)


def layer_norm_back(
    g: Array, x: Array, mean: Array, inverse: Array, gain: Array
) -> tuple[Array, Array | None, Array | None]:
    """Return dx, and where one pass gives them too parts of dgain and of dbias, for `sum_parts`; else None."""
    return layer_norm_dx(g, x, mean, inverse, gain), None, None


def sum_parts(parts: Array, out: Array, add: bool) -> None:
    """Write the sum of the rows of `parts` into `out`, or add it."""
    _put(parts.sum(axis=0), out, add)


def layer_norm_dgain(g: Array, x: Array, mean: Array, inverse: Array) -> Array:
    """Return the sum of g h over all rows, (n,), in float32 where x is of half precision."""
    return xp_of(g).einsum("ij,ij->j", widened(g), (widened(x) - mean) * inverse)


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    """Return y = h gain, h = x / sqrt(mean(x^2) + eps), with 1 / sqrt(mean(x^2) + eps) of each row.

    Args:
        gain: (n,).
    Returns:
        (m, n) in the dtype in which both meet, and a column (m, 1).
    """
    dtype = xp_of(x).result_type(x, gain)
    x = widened(x)
    inverse = _inverse_rms(x, eps)
    return (x * inverse * gain).astype(dtype, copy=False), inverse


def rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array) -> Array:
    """Return (t - h mean(t h)) inverse, t = g gain."""
    return _through_rms(widened(g) * gain, widened(x) * inverse, inverse).astype(x.dtype, copy=False)


def rms_norm_dgain(g: Array, x: Array, inverse: Array) -> Array:
    """Return the sum of g h over all rows, (n,), in float32 where x is of half precision."""
    return xp_of(g).einsum("ij,ij->j", widened(g), widened(x) * inverse)


def _average(x: Array) -> Array:
    """Return the column that takes the means of rows as a GEMV: faster than mean(axis=1)."""
    n = x.shape[1]
    return xp_of(x).full((n, 1), 1 / max(1, n), x.dtype)


def _inverse_rms(rows: Array, eps: float) -> Array:
    """Return 1 / sqrt(mean of squares + eps) of each row, as a column."""
    xp = xp_of(rows)
    return 1 / xp.sqrt(xp.einsum("ij,ij->i", rows, rows)[:, None] / rows.shape[1] + eps)


def _through_rms(t: Array, h: Array, inverse: Array) -> Array:
    """Turn t, the gradient by h = rows inverse, into the gradient by the rows, in place."""
    t -= h * (xp_of(t).einsum("ij,ij->i", t, h)[:, None] / h.shape[1])
    t *= inverse
    return t


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]] | None:
    """Return causal attention of packed queries, keys and values, and its vjp, in one piece; None: compose it.

    Args:
        qkv: (B, T, 3 C), C divisible by num_heads.
    Returns:
        (B, T, C), and the function from its cotangent to that of qkv.
    """
    return None


# Attention: between its two products, a block of queries at a time. Scores are (..., r, s) for r queries and s keys.


def scores_are_small(q: Array, k: Array, scale: float) -> bool:
    """Return whether exp(s) needs no maximum taken off first: |s| <= scale |q| |k|, a bound that costs no T x T pass.

    The answer may be no wherever asking costs more than the maximum: a GPU would have to be waited for.
    """
    if q.size == 0 or k.size == 0:
        return True
    xp = xp_of(q)
    if xp is not np:
        return False
    longest_q, longest_k = (float(xp.einsum("...d,...d->...", x, x).max()) ** 0.5 for x in (q, k))
    return longest_q * longest_k * scale <= _SAFE_SCORE


def attention_weights(scores: Array, first: int | None, mask: Array | None, small: bool) -> tuple[Array, Array]:
    """Return e = exp(scores) and one over its row sums, (..., r, 1); it may write into the scores.

    What a query may not see gives e = 0, and a query that sees nothing a factor of 1.

    Args:
        first: query i sees the keys up to first + i only; None: it sees all of them.
        mask: booleans of the shape of the scores, True where a query may see a key; or None.
        small: no score is so large that its exponential overflows, so that no row's maximum must be taken off first.
    """
    xp = xp_of(scores)
    if first is not None:
        diagonal = scores[..., first:]
        xp.copyto(diagonal, -np.inf, where=~xp.tri(*diagonal.shape[-2:], dtype=bool))
    if mask is not None:
        xp.copyto(scores, -np.inf, where=~mask)
    if not small:
        top = scores.max(axis=-1, keepdims=True)
        scores -= xp.where(top == -np.inf, 0, top)
    e = xp.exp(scores, scores)
    total = e @ xp.ones((e.shape[-1], 1), e.dtype)  # a GEMV is faster than sum(-1)
    total[total == 0] = 1
    return e, 1 / total


def attention_dscores(dp: Array, e: Array, gr: Array, y: Array) -> Array:
    """Return e (dp - sum(gr y)); it may write into dp.

    Args:
        dp, e: (..., r, s): gr v^T, and the weights before division by their sums.
        gr, y: (..., r, d): the cotangent over those sums, and attention's output.
    """
    dp -= xp_of(dp).einsum("...d,...d->...", gr, y)[..., None]
    dp *= e
    return dp


def checked_ids(what: str, ids: Array, num_rows: int) -> Array:
    """Return (m,) ids for the kernels that take some.

    Raises:
        IndexError: an id is not in [0, num_rows). A GPU cannot be asked in the middle of a step: there whatever is
            looked up with such an id is nan, and so is the loss.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= num_rows):
        raise IndexError(f"{what} must be in [0, {num_rows}), got {ids.min()} to {ids.max()}")
    return ids


def embedding(table: Array, ids: Array) -> Array:
    """Return rows of the table, (m, n), in the order of checked ids."""
    return table.take(ids, axis=0)


def embedding_dtable(g: Array, ids: Array, out: Array, add: bool) -> None:
    """Write into row v of `out` the sum of g[i] where ids[i] == v, or add it.

    Args:
        g: (m, n), ids: (m,) checked, out: (V, n).
    """
    g = widened(g)  # a row may be the sum of thousands
    if out.dtype == g.dtype:
        if not add:
            out[...] = 0
        scatter_add_rows(out, ids, g)
    else:
        dtable: Array = xp_of(g).zeros(out.shape, g.dtype)
        scatter_add_rows(dtable, ids, g)
        _put(dtable, out, add)


# Flat arrays (n,) of an optimizer. State of half precision parameters is float32; see `optim.py`.


def sgd(w: Array, g: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float) -> None:
    """Do v = momentum v + g + weight_decay w; w -= lr v, in place; without a velocity v is g + weight_decay w."""
    step = widened(g)
    if weight_decay:
        step = step + weight_decay * widened(w)
    if velocity is not None:
        velocity *= momentum
        velocity += step
        step = velocity
    w[...] = widened(w) - lr * step


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    """Do m += (1 - beta1)(g - m); v += (1 - beta2)(g^2 - v); w = keep w - rate m / (sqrt(v) + eps), in place."""
    xp = xp_of(w)
    block = _BLOCK if xp is np else max(1, w.size)  # a GPU wants few, large kernels
    scratch = xp.empty_like(m[:block])
    for start in range(0, w.size, block):
        part = slice(start, start + block)
        own_w, own_g, own_m, own_v = widened(w[part]), widened(g[part]), m[part], v[part]
        t = scratch[: own_w.size]
        xp.subtract(own_g, own_m, t)
        t *= 1 - beta1
        own_m += t
        xp.multiply(own_g, own_g, t)
        t -= own_v
        t *= 1 - beta2
        own_v += t
        xp.sqrt(own_v, t)
        t += eps
        xp.divide(own_m, t, t)
        t *= rate
        if keep != 1.0:
            own_w *= keep
        own_w -= t
        if own_w.dtype != w.dtype:
            w[part] = own_w


def adamw_step(betas: tuple[float, float], eps: float, weight_decay: float, max_norm: float | None) -> Any:
    """Return what does a whole step, clipping included, without a question to the device; None: `adamw` by parts.

    Of a GPU, an object with two methods: `advance(lr, step)` tells the device the numbers of the next step, and
    `apply(parts)` updates (w, g, m, v, copy, kinds) each, where `kinds` lists (number of elements, kind) of the runs
    of w, and kind 1 has weight decay, 0 none, 2 is frozen. `norm()` asks for the norm before clipping.
    """
    return None


def square_sum(g: Array) -> float:
    """Return the sum of squares, added up in float64, a block at a time: squares of float32 reach 1e77."""
    xp, total = xp_of(g), 0.0
    block = _BLOCK if xp is np else max(1, g.size)
    for start in range(0, g.size, block):
        part = g[start : start + block].astype(np.float64, copy=False)
        total += float(xp.vdot(part, part))
    return total


def scale(g: Array, factor: float) -> None:
    """Multiply in place; half precision in float32, where a factor of 1e-9 is not 0."""
    g[...] = widened(g) * factor
