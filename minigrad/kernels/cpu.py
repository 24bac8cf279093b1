"""The kernels for float32 and float64 on a CPU: plain loops, one pass over the data each, compiled by numba.

A kernel here is a loop, compiled at its first call, and a function around it that makes room for the result and brings
the arrays into the one layout that the loop takes: contiguous. What numba compiles is kept on disk, beside this file or
in the user's cache folder, so that it costs seconds once a machine and milliseconds a process.

Two things to know about numba: a number that stands in a loop is a float64, and widens all that it meets, so constants
are brought to the dtype of the data first (`T(0.5)`); and sums may be reordered only where that is allowed (`SUMS`).
No flag lets the compiler assume that there are no nan and no infinity.
"""

from __future__ import annotations

import fcntl
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# With colours for its errors, numba lets colorama (where that is installed) write codes to stdout as a program ends.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

import numba
import numpy as np
from numba.extending import overload

from minigrad.backend import Array
from minigrad.kernels import reference
from minigrad.kernels.reference import ERFC_SINGLE, GELU_FLAT

__all__ = [
    "adamw",
    "attention_dscores",
    "attention_weights",
    "cross_entropy",
    "embedding_dtable",
    "gelu",
    "layer_norm",
    "layer_norm_back",
    "layer_norm_dgain",
    "layer_norm_dx",
    "leaky_relu",
    "log_softmax",
    "log_softmax_dx",
    "relu",
    "rms_norm",
    "rms_norm_dgain",
    "rms_norm_dx",
    "scores_are_small",
    "select",
    "sgd",
    "sigmoid",
    "sigmoid_dx",
    "silu",
    "softmax",
    "softmax_dx",
    "square_sum",
]

EXACT: set[str] = set()  # each operation rounded by itself, as NumPy does
SUMS = {"reassoc", "contract"}  # sums in an order that vectors like, products and sums fused


# Compiling.


def _compiled(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Let numba compile a loop at its first call, or fetch what it compiled in an earlier process."""
    options: dict[str, Any] = {"fastmath": flags, "error_model": "numpy", "nogil": True}

    def decorate(loop: Callable[..., Any]) -> Callable[..., Any]:
        try:
            dispatcher: Any = numba.njit(cache=True, **options)(loop)
        except RuntimeError:  # no folder that can be written to
            _warn_of_no_cache()
            dispatcher = numba.njit(**options)(loop)
        compile_loop = dispatcher.compile

        def compile_in_turn(signature: Any) -> Any:
            with _turn(dispatcher.stats.cache_path):
                return compile_loop(signature)

        dispatcher.compile = compile_in_turn
        return dispatcher

    return decorate


def _warn_of_no_cache() -> None:
    warnings.warn(
        "numba finds no folder to keep compiled kernels in, so every process compiles them again: "
        "set NUMBA_CACHE_DIR, or MINIGRAD_KERNELS=numpy to do without",
        RuntimeWarning,
        stacklevel=1,
    )


@contextmanager
def _turn(folder: str | None) -> Iterator[None]:
    """Hold the lock of a cache folder: ranks that start together compile in turn, and the second finds it done.

    numba itself writes whole files only, but two processes may give two kernels the same file name.
    """
    try:
        lock = os.open(os.path.join(folder or "", "compiling.lock"), os.O_RDWR | os.O_CREAT) if folder else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


_inlined: Any = numba.njit(fastmath={"contract"}, error_model="numpy")


def _plain(x: Array) -> Array:
    """Return x, or a copy, in the layout that the loops are compiled for."""
    return x if x.flags.carray else np.array(x, order="C")


def _flat(x: Array) -> Array:
    return _plain(x).reshape(-1)


# Functions of one number that the loops use. In float64 the C library's, in float32 polynomials, which vectors like.


_OPTIONS: dict[str, Any] = {"jit_options": {"fastmath": {"contract"}, "error_model": "numpy"}, "strict": False}


def _exp(x: Any) -> Any:
    """Return exp(x) for x up to 80."""


def _exp_single(x: Any) -> Any:
    # exp(x) = 2^n exp(f), |f| <= log(2) / 2. Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    # The polynomial is that of Cephes, expf; its error is below 1.2e-7.
    shifted = x * np.float32(1.44269504) + np.float32(12582912)
    n = shifted - np.float32(12582912)
    f = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1)
    power = np.int32((np.float32(shifted).view(np.int32) + 127) << 23).view(np.float32)
    return np.float32(0) if x < np.float32(-87) else p * power


def _exp_double(x: Any) -> Any:
    return math.exp(x)


@overload(_exp, **_OPTIONS)
def _choose_exp(x: Any) -> Any:
    return _exp_single if x is numba.float32 else _exp_double


def _normal_tail(x: Any, e: Any) -> Any:
    """Return P(-x) for x >= 0, P the normal distribution function, given e = exp(-x^2 / 2)."""


# erfc(z) = (A1 t + ... + A5 t^5) exp(-z^2), t = 1 / (1 + P z), and the tail is erfc(x / sqrt(2)) / 2.
_P = np.float32(ERFC_SINGLE[0] * math.sqrt(0.5))
_A1, _A2, _A3, _A4, _A5 = (np.float32(a / 2) for a in ERFC_SINGLE[2][1:])


def _normal_tail_single(x: Any, e: Any) -> Any:
    t = np.float32(1) / (np.float32(1) + _P * x)
    return ((((_A5 * t + _A4) * t + _A3) * t + _A2) * t + _A1) * t * e


def _normal_tail_double(x: Any, e: Any) -> Any:
    return 0.5 * math.erfc(x * math.sqrt(0.5))


@overload(_normal_tail, **_OPTIONS)
def _choose_normal_tail(x: Any, e: Any) -> Any:
    return _normal_tail_single if x is numba.float32 else _normal_tail_double


@_inlined
def _logistic(x: Any, one: Any) -> Any:
    """Return s = 1 / (1 + exp(-x)) and 1 - s."""
    e = _exp(-abs(x))
    large = one / (one + e)
    small = e * large
    return (large, small) if x >= 0 else (small, large)


# Functions of one number, over flat arrays.


@_compiled(EXACT)
def _select(x: Array, keep: Array, scale: float, y: Array) -> None:
    T = x.dtype.type
    factor = T(scale)
    for i in range(x.size):
        y[i] = x[i] * factor if keep[i] else T(0)


def select(x: Array, keep: Array, scale: float = 1.0) -> Array:
    y = np.empty(x.shape, x.dtype)
    _select(_flat(x), _flat(keep), scale, y.reshape(-1))
    return y


@_compiled(EXACT)
def _relu(x: Array, y: Array, positive: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(x.size):
        v = x[i]
        positive[i] = v > zero
        y[i] = zero if v <= zero else v


def relu(x: Array) -> tuple[Array, Array]:
    y, positive = np.empty(x.shape, x.dtype), np.empty(x.shape, bool)
    _relu(_flat(x), y.reshape(-1), positive.reshape(-1))
    return y, positive


@_compiled(EXACT)
def _leaky_relu(x: Array, slope: float, y: Array, d: Array) -> None:
    T = x.dtype.type
    one, below = T(1), T(slope)
    for i in range(x.size):
        d[i] = one if x[i] > T(0) else below
        y[i] = x[i] * d[i]


def leaky_relu(x: Array, slope: float) -> tuple[Array, Array]:
    y, d = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    _leaky_relu(_flat(x), float(slope), y.reshape(-1), d.reshape(-1))
    return y, d


@_compiled(EXACT)
def _sigmoid(x: Array, y: Array) -> None:
    one = x.dtype.type(1)
    for i in range(x.size):
        y[i], _ = _logistic(x[i], one)


def sigmoid(x: Array) -> Array:
    y = np.empty(x.shape, x.dtype)
    _sigmoid(_flat(x), y.reshape(-1))
    return y


@_compiled(EXACT)
def _sigmoid_dx(g: Array, y: Array, dx: Array) -> None:
    one = y.dtype.type(1)
    for i in range(y.size):
        dx[i] = g[i] * (y[i] * (one - y[i]))


def sigmoid_dx(g: Array, y: Array) -> Array:
    dx = np.empty(y.shape, y.dtype)
    _sigmoid_dx(_flat(g), _flat(y), dx.reshape(-1))
    return dx


@_compiled(EXACT)
def _silu(x: Array, lowest: float, highest: float, y: Array, d: Array) -> None:
    T = x.dtype.type
    low, high, one = T(lowest), T(highest), T(1)
    for i in range(x.size):
        v = x[i]
        s, rest = _logistic(v, one)
        v = (low if v < low else v) * s
        y[i] = v
        d[i] = s + (high if v > high else v) * rest


def silu(x: Array) -> tuple[Array, Array]:
    y, d, limits = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype), np.finfo(x.dtype)
    _silu(_flat(x), float(limits.min), float(limits.max), y.reshape(-1), d.reshape(-1))
    return y, d


@_compiled({"contract"})
def _gelu_tanh(x: Array, y: Array, d: Array) -> None:
    T = x.dtype.type
    a, b = T(2 * math.sqrt(2 / math.pi)), T(2 * math.sqrt(2 / math.pi) * 0.044715)
    b3, one, flat = T(6 * math.sqrt(2 / math.pi) * 0.044715), T(1), T(GELU_FLAT)
    for i in range(x.size):
        v = -flat if x[i] < -flat else x[i]
        inner = flat if v > flat else v
        x2 = inner * inner
        s, rest = _logistic(inner * (a + b * x2), one)
        y[i] = v * s
        d[i] = s + inner * s * rest * (a + b3 * x2)


@_compiled({"contract"})
def _gelu_exact(x: Array, y: Array, d: Array) -> None:
    T = x.dtype.type
    half, one, flat, density = T(0.5), T(1), T(GELU_FLAT), T(1 / math.sqrt(2 * math.pi))
    for i in range(x.size):
        v = -flat if x[i] < -flat else x[i]
        inner = flat if v > flat else v
        e = _exp(-half * inner * inner)
        tail = _normal_tail(abs(inner), e)
        p = tail if inner < T(0) else one - tail
        y[i] = v * p
        d[i] = p + inner * e * density


def gelu(x: Array, exact: bool) -> tuple[Array, Array]:
    y, d = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    (_gelu_exact if exact else _gelu_tanh)(_flat(x), y.reshape(-1), d.reshape(-1))
    return y, d


# Functions of a row. Each row's sums are taken in one order, whatever rows stand beside it.


def _in_order(bits: Any) -> Any:
    """Return integers in the order of the floats whose bits are given; the same again gives the bits back."""


def _in_order_single(bits: Any) -> Any:
    return np.int32(bits ^ np.int32(np.int32(bits >> 31) & np.int32(0x7FFFFFFF)))


def _in_order_double(bits: Any) -> Any:
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@overload(_in_order, **_OPTIONS)
def _choose_in_order(bits: Any) -> Any:
    return _in_order_single if bits is numba.int32 else _in_order_double


def _as_float(bits: Any) -> Any:
    """Return the float of these bits."""


@overload(_as_float, **_OPTIONS)
def _choose_as_float(bits: Any) -> Any:
    if bits is numba.int32:
        return lambda bits: np.int32(bits).view(np.float32)
    return lambda bits: np.int64(bits).view(np.float64)


@_inlined
def _row_max(bits: Any) -> Any:
    """Return the largest number of a row, given its bits; with a nan among them, a nan or the largest of the others.

    A running maximum of floats depends on where a nan stands, so no vector can take it; one of integers does not.
    """
    largest = _in_order(bits[0])
    for j in range(1, bits.size):
        b = _in_order(bits[j])
        largest = b if b > largest else largest
    return _as_float(_in_order(largest))


def _bits(x: Array) -> Array:
    return x.view(np.int32 if x.dtype == np.float32 else np.int64)


@_compiled(SUMS)
def _softmax(x: Array, bits: Array, y: Array) -> None:
    m, n = x.shape
    one = x.dtype.type(1)
    for i in range(m):
        row, out = x[i], y[i]
        top, total = _row_max(bits[i]), x.dtype.type(0)
        for j in range(n):
            e = _exp(row[j] - top)
            out[j] = e
            total += e
        inverse = one / total
        for j in range(n):
            out[j] *= inverse


def softmax(x: Array) -> Array:
    x, y = _plain(x), np.empty(x.shape, x.dtype)
    if x.size:
        _softmax(x, _bits(x), y)
    return y


@_compiled(SUMS)
def _softmax_dx(g: Array, y: Array, dx: Array) -> None:
    m, n = y.shape
    for i in range(m):
        dot = y.dtype.type(0)
        for j in range(n):
            dot += g[i, j] * y[i, j]
        for j in range(n):
            dx[i, j] = y[i, j] * (g[i, j] - dot)


def softmax_dx(g: Array, y: Array) -> Array:
    dx = np.empty(y.shape, y.dtype)
    _softmax_dx(_plain(g), _plain(y), dx)
    return dx


@_compiled(SUMS)
def _log_softmax(x: Array, bits: Array, y: Array) -> None:
    m, n = x.shape
    for i in range(m):
        row, out = x[i], y[i]
        top, total = _row_max(bits[i]), x.dtype.type(0)
        for j in range(n):
            total += _exp(row[j] - top)
        log_total = np.log(total)
        for j in range(n):
            out[j] = (row[j] - top) - log_total


def log_softmax(x: Array) -> Array:
    x, y = _plain(x), np.empty(x.shape, x.dtype)
    if x.size:
        _log_softmax(x, _bits(x), y)
    return y


@_compiled(SUMS)
def _log_softmax_dx(g: Array, y: Array, dx: Array) -> None:
    m, n = y.shape
    for i in range(m):
        total = y.dtype.type(0)
        for j in range(n):
            total += g[i, j]
        for j in range(n):
            dx[i, j] = g[i, j] - _exp(y[i, j]) * total


def log_softmax_dx(g: Array, y: Array) -> Array:
    dx = np.empty(y.shape, y.dtype)
    _log_softmax_dx(_plain(g), _plain(y), dx)
    return dx


@_compiled(SUMS)
def _cross_entropy(
    x: Array,
    bits: Array,
    targets: Array,
    smoothing: float,
    smooth: float,
    weight: float,
    losses: Array,
    dx: Array,
) -> None:
    m, n = x.shape
    T = x.dtype.type
    hit, each, zero = T(1 - smoothing), T(smooth), T(0)
    factor, weighted_hit, weighted_each = T(weight), T(weight * (1 - smoothing)), T(weight * smooth)
    for i in range(m):
        target = targets[i]
        if target < 0:
            losses[i] = zero
            for j in range(n):
                dx[i, j] = zero
            continue
        row, out = x[i], dx[i]
        top, total, shifted = _row_max(bits[i]), zero, zero
        for j in range(n):
            e = _exp(row[j] - top)
            out[j] = e
            total += e
        if each > zero:
            for j in range(n):
                shifted += row[j] - top
        losses[i] = (
            np.log(total) - hit * (row[target] - top) - each * shifted
            if each > zero
            else np.log(total) - (row[target] - top)
        )
        share = factor / total
        for j in range(n):
            out[j] = out[j] * share - weighted_each
        out[target] -= weighted_hit


def cross_entropy(logits: Array, targets: Array, smoothing: float, weight: float) -> tuple[Array, Array]:
    losses, dx = np.empty(len(targets), logits.dtype), np.empty(logits.shape, logits.dtype)
    smooth = smoothing / max(1, logits.shape[1])
    targets = _plain(targets.astype(np.int64, copy=False))
    if logits.size:
        x = _plain(logits)
        _cross_entropy(x, _bits(x), targets, float(smoothing), smooth, float(weight), losses, dx)
    return losses, dx


@_compiled(SUMS)
def _layer_norm(x: Array, gain: Array, bias: Array, eps: float, y: Array, mean: Array, inverse: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, out = x[i], y[i]
        total, squares = T(0), T(0)
        for j in range(n):
            total += row[j]
        middle = total * share
        for j in range(n):
            h = row[j] - middle
            squares += h * h
        r = T(1) / np.sqrt(squares * share + T(eps))
        for j in range(n):
            out[j] = (row[j] - middle) * r * gain[j] + bias[j]
        mean[i, 0], inverse[i, 0] = middle, r


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    y, mean, inverse = np.empty(x.shape, x.dtype), np.empty((len(x), 1), x.dtype), np.empty((len(x), 1), x.dtype)
    _layer_norm(_plain(x), _plain(gain), _plain(bias), float(eps), y, mean, inverse)
    return y, mean, inverse


@_compiled(SUMS)
def _layer_norm_back(
    g: Array, x: Array, mean: Array, inverse: Array, gain: Array, dx: Array, dgain: Array, dbias: Array
) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, cotangent, out = x[i], g[i], dx[i]
        middle, r = mean[i, 0], inverse[i, 0]
        total, dot = T(0), T(0)
        for j in range(n):
            h, t = (row[j] - middle) * r, cotangent[j] * gain[j]
            total += t
            dot += t * h
            dgain[j] += cotangent[j] * h
            dbias[j] += cotangent[j]
        total *= share
        dot *= share
        for j in range(n):
            out[j] = (cotangent[j] * gain[j] - total - (row[j] - middle) * r * dot) * r


def layer_norm_back(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> tuple[Array, Array, Array]:
    n = x.shape[1]
    dx, parts = np.empty(x.shape, x.dtype), np.zeros((2, 1, n), x.dtype)
    _layer_norm_back(_plain(g), _plain(x), mean, inverse, _plain(gain), dx, parts[0, 0], parts[1, 0])
    return dx, parts[0], parts[1]


def layer_norm_dx(g: Array, x: Array, mean: Array, inverse: Array, gain: Array) -> Array:
    return layer_norm_back(g, x, mean, inverse, gain)[0]


@_compiled(SUMS)
def _norm_dgain(g: Array, x: Array, mean: Array, inverse: Array, dgain: Array) -> None:
    m, n = x.shape
    for i in range(m):
        middle, r = mean[i, 0], inverse[i, 0]
        for j in range(n):
            dgain[j] += g[i, j] * ((x[i, j] - middle) * r)


def layer_norm_dgain(g: Array, x: Array, mean: Array, inverse: Array) -> Array:
    dgain = np.zeros(x.shape[1], x.dtype)
    _norm_dgain(_plain(g), _plain(x), mean, inverse, dgain)
    return dgain


@_compiled(SUMS)
def _rms_norm(x: Array, gain: Array, eps: float, y: Array, inverse: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, out = x[i], y[i]
        squares = T(0)
        for j in range(n):
            squares += row[j] * row[j]
        r = T(1) / np.sqrt(squares * share + T(eps))
        for j in range(n):
            out[j] = row[j] * r * gain[j]
        inverse[i, 0] = r


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    y, inverse = np.empty(x.shape, x.dtype), np.empty((len(x), 1), x.dtype)
    _rms_norm(_plain(x), _plain(gain), float(eps), y, inverse)
    return y, inverse


@_compiled(SUMS)
def _rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array, dx: Array) -> None:
    m, n = x.shape
    T = x.dtype.type
    share = T(1 / max(1, n))
    for i in range(m):
        row, cotangent, out, r = x[i], g[i], dx[i], inverse[i, 0]
        dot = T(0)
        for j in range(n):
            dot += cotangent[j] * gain[j] * (row[j] * r)
        dot *= share
        for j in range(n):
            out[j] = (cotangent[j] * gain[j] - row[j] * r * dot) * r


def rms_norm_dx(g: Array, x: Array, inverse: Array, gain: Array) -> Array:
    dx = np.empty(x.shape, x.dtype)
    _rms_norm_dx(_plain(g), _plain(x), inverse, _plain(gain), dx)
    return dx


def rms_norm_dgain(g: Array, x: Array, inverse: Array) -> Array:
    return layer_norm_dgain(g, x, np.zeros_like(inverse), inverse)


# Attention and embedding.


def scores_are_small(q: Array, k: Array, scale: float) -> bool:
    return False  # the maximum costs less than the question


@_compiled(SUMS)
def _attention_weights(
    scores: Array,
    bits: Array,
    num_queries: int,
    first: int,
    mask: Array,
    has_mask: bool,
    small: bool,
    inverse: Array,
) -> None:
    m, n = scores.shape
    T = scores.dtype.type
    zero, one, hidden = T(0), T(1), T(-np.inf)
    for i in range(m):
        row = scores[i]
        end = min(n, first + i % num_queries + 1)
        stop = min(n, (end + 31) // 32 * 32)  # whole vectors, also where the query sees less
        for j in range(end, n):
            row[j] = hidden
        if has_mask:
            for j in range(end):
                row[j] = row[j] if mask[i, j] else hidden
        top, total = zero, zero
        if not small:
            top = _row_max(bits[i, :stop])
            top = zero if top == hidden else top
        for j in range(stop):
            e = _exp(row[j] - top)
            row[j] = e
            total += e
        for j in range(stop, n):
            row[j] = zero
        inverse[i] = one if total == zero else one / total


_NO_MASK = np.ones((1, 1), bool)


def attention_weights(scores: Array, first: int | None, mask: Array | None, small: bool) -> tuple[Array, Array]:
    scores = _plain(scores)
    num_queries, num_keys = scores.shape[-2:]
    inverse = np.ones((*scores.shape[:-1], 1), scores.dtype)
    if scores.size:
        rows = scores.reshape(-1, num_keys)
        seen = _NO_MASK if mask is None else _plain(mask).reshape(-1, num_keys)
        first = num_keys if first is None else first
        _attention_weights(rows, _bits(rows), num_queries, first, seen, mask is not None, small, inverse.reshape(-1))
    return scores, inverse


@_compiled(EXACT)
def _attention_dscores(dp: Array, e: Array, dot: Array) -> None:
    m, n = dp.shape
    for i in range(m):
        for j in range(n):
            dp[i, j] = (dp[i, j] - dot[i]) * e[i, j]


def attention_dscores(dp: Array, e: Array, gr: Array, y: Array) -> Array:
    dp, n = _plain(dp), dp.shape[-1]
    if dp.size:
        dot = np.vecdot(gr, y)
        _attention_dscores(dp.reshape(-1, n), _plain(e).reshape(-1, n), _flat(dot))
    return dp


@_compiled(EXACT)
def _add_rows(g: Array, ids: Array, dtable: Array) -> None:
    m, n = g.shape
    for i in range(m):
        row = dtable[ids[i]]
        for j in range(n):
            row[j] += g[i, j]


def embedding_dtable(g: Array, ids: Array, out: Array, add: bool) -> None:
    if out.dtype != g.dtype or not out.flags.carray:
        reference.embedding_dtable(g, ids, out, add)
        return
    if not add:
        out[...] = 0
    _add_rows(_plain(g), _plain(ids.astype(np.int64, copy=False)), out)


# Flat arrays of an optimizer. Each operation is rounded by itself: the bits are those of the reference.


@_compiled(EXACT)
def _sgd(w: Array, g: Array, velocity: Array, has_velocity: bool, lr: float, momentum: float, decay: float) -> None:
    T = w.dtype.type
    rate, share, shrink = T(lr), T(momentum), T(decay)
    for i in range(w.size):
        step = g[i] + shrink * w[i] if decay != 0 else g[i]
        if has_velocity:
            step += velocity[i] * share
            velocity[i] = step
        w[i] -= rate * step


def sgd(w: Array, g: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float) -> None:
    state = w if velocity is None else velocity
    _sgd(w, _plain(g), state, velocity is not None, float(lr), float(momentum), float(weight_decay))


@_compiled(EXACT)
def _adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    T = w.dtype.type
    share1, share2, size, tiny, kept = T(1 - beta1), T(1 - beta2), T(rate), T(eps), T(keep)
    for i in range(w.size):
        m[i] += (g[i] - m[i]) * share1
        v[i] += (g[i] * g[i] - v[i]) * share2
        w[i] = w[i] * kept - m[i] / (np.sqrt(v[i]) + tiny) * size


def adamw(
    w: Array, g: Array, m: Array, v: Array, beta1: float, beta2: float, rate: float, eps: float, keep: float
) -> None:
    _adamw(w, _plain(g), m, v, float(beta1), float(beta2), float(rate), float(eps), float(keep))


@_compiled(SUMS)
def _square_sum(g: Array) -> float:
    total = 0.0
    for i in range(g.size):
        v = np.float64(g[i])
        total += v * v
    return total


def square_sum(g: Array) -> float:
    return float(_square_sum(_plain(g)))
