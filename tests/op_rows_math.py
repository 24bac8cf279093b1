"""Rows of the op table: elementwise, linear algebra, reductions, shapes."""

from __future__ import annotations

import numpy as np
from op_table import normal, off_zero, positive, row

from minigrad.backend import Array

KEEP = np.array([[True, False, True], [False, True, True]])


def plain_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ROWS = [
    row("add", np.add, normal(2, 3), normal(2, 3)),
    row("add", np.add, normal(2, 3), normal(3)),
    row("add", np.add, normal(2, 1), normal(4, 1, 3)),
    row("add", np.add, normal(), normal(2, 3)),
    row("add", np.add, normal(2, 3), 2),
    row("add", np.add, normal(0, 3), normal(3)),
    row("sub", np.subtract, normal(2, 3), normal(2, 3)),
    row("sub", np.subtract, normal(2, 1), normal(1, 3)),
    row("sub", np.subtract, 2.5, normal(2, 3)),
    row("sub", np.subtract, normal(0, 3), normal(3)),
    row("mul", np.multiply, normal(2, 3), normal(2, 3)),
    row("mul", np.multiply, normal(2, 1), normal(1, 3)),
    row("mul", np.multiply, normal(), normal(2, 3)),
    row("mul", np.multiply, -2, normal(2, 3)),
    row("mul", np.multiply, normal(0, 3), normal(3)),
    row("div", np.divide, normal(2, 3), off_zero(2, 3)),
    row("div", np.divide, normal(2, 1), off_zero(1, 3)),
    row("div", np.divide, normal(2, 3), off_zero()),
    row("div", np.divide, 2, off_zero(2, 3)),
    row("div", np.divide, normal(0, 3), off_zero(3)),
    row("neg", np.negative, normal(2, 3)),
    row("neg", np.negative, normal(0)),
    row("exp", np.exp, normal(2, 3)),
    row("exp", np.exp, normal(0)),
    row("log", np.log, positive(2, 3)),
    row("log", np.log, positive(0)),
    row("tanh", np.tanh, normal(2, 3)),
    row("tanh", np.tanh, normal(0)),
    row("relu", lambda x: np.maximum(x, 0), off_zero(2, 3)),
    row("relu", lambda x: np.maximum(x, 0), off_zero(0)),
    row("gelu", plain_gelu, normal(2, 3)),
    row("gelu", plain_gelu, normal()),
    row("gelu", plain_gelu, normal(0, 3)),
    row("gelu", plain_gelu, normal(300, 250)),  # more than one block
    row("astype", lambda x, dtype: x.astype(dtype), normal(2, 3), dtype=np.float64),
    row("matmul", np.matmul, normal(2, 3), normal(3, 4)),
    row("matmul", np.matmul, normal(3), normal(3)),
    row("matmul", np.matmul, normal(2, 3), normal(3)),
    row("matmul", np.matmul, normal(3), normal(3, 4)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(3, 2)),
    row("matmul", np.matmul, normal(4, 3), normal(2, 3, 5)),
    row("matmul", np.matmul, normal(2, 1, 4, 3), normal(5, 3, 2)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(2, 3, 5)),
    row("matmul", np.matmul, normal(2, 4, 3), normal(3)),
    row("matmul", np.matmul, normal(3), normal(2, 3, 4)),
    row("matmul", np.matmul, normal(0, 3), normal(3, 4)),
    row("matmul", np.matmul, normal(2, 0), normal(0, 4)),
    row("linear", lambda x, w, b: x @ w + b, normal(4, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(2, 4, 3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(3), normal(3, 2), normal(2)),
    row("linear", lambda x, w, b: x @ w + b, normal(0, 3), normal(3, 2), normal(2)),
    row("sum", np.sum, normal(2, 3, 4)),
    row("sum", np.sum, normal(2, 3, 4), axis=1),
    row("sum", np.sum, normal(2, 3, 4), axis=(-1, 0)),
    row("sum", np.sum, normal(2, 3, 4), axis=-2, keepdims=True),
    row("sum", np.sum, normal(0, 3), axis=0),
    row("mean", np.mean, normal(2, 3, 4)),
    row("mean", np.mean, normal(2, 3, 4), axis=(0, 2)),
    row("mean", np.mean, normal(2, 3, 4), axis=-1, keepdims=True),
    row("mean", np.mean, normal(0, 3), axis=1),
    row("reshape", lambda x, shape: x.reshape(shape), normal(2, 6), shape=(3, -1)),
    row("reshape", lambda x, shape: x.reshape(shape), normal(0, 3), shape=(3, 0)),
    row("transpose", np.transpose, normal(2, 3, 4)),
    row("transpose", np.transpose, normal(2, 3, 4), axes=(1, 2, 0)),
    row("transpose", np.transpose, normal(2, 3, 4), axes=(-1, 0, 1)),
    row("transpose", np.transpose, normal(0, 3)),
    row("concatenate", lambda *x, axis: np.concatenate(x, axis), normal(2, 3), normal(1, 3), normal(0, 3), axis=0),
    row("concatenate", lambda *x, axis: np.concatenate(x, axis), normal(2, 1, 3), normal(2, 1, 2), axis=-1),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=slice(1, 3)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=(..., None, -1)),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=np.array([0, -4, 2, 0])),
    row("getitem", lambda x, index: x[index], normal(2, 3), index=KEEP),
    row("getitem", lambda x, index: x[index], normal(4, 3), index=slice(2, 2)),
]
