"""Rows of the op table: neural networks and losses."""

from __future__ import annotations

import numpy as np
from op_table import ids, normal, row

from minigrad.backend import Array

KEEP = np.array([[True, False, True], [False, True, True]])


def plain_layer_norm(x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gain + bias


def plain_attention(qkv: Array, num_heads: int) -> Array:
    batch, time, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    head = width // num_heads
    y = np.zeros((batch, time, width), qkv.dtype)
    for b in range(batch):
        for h in range(num_heads):
            q, k, v = (qkv[b, :, i * width + h * head : i * width + (h + 1) * head] for i in range(3))
            for t in range(time):
                scores = np.exp(k[: t + 1] @ q[t] / np.sqrt(head))
                y[b, t, h * head : (h + 1) * head] = scores / scores.sum() @ v[: t + 1]
    return y


def plain_cross_entropy(logits: Array, targets: Array) -> Array:
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(p, targets[..., None], -1)).mean()


ROWS = [
    row("layer_norm", plain_layer_norm, normal(4, 5), normal(5), normal(5)),
    row("layer_norm", plain_layer_norm, normal(2, 3, 5), normal(5), normal(5), eps=0.1),
    row("layer_norm", plain_layer_norm, normal(0, 5), normal(5), normal(5)),
    row("embedding", lambda table, i: table[i], normal(5, 3), ids(5, 2, 4)),
    row("embedding", lambda table, i: table[i], normal(300, 3), ids(300, 2, 400)),  # many rows: scattered
    row("embedding", lambda table, i: table[i], normal(5, 3), ids(5, 0)),
    row("embedding", lambda table, i: table[i], normal(300, 3), ids(300, 0)),
    row("dropout", lambda x, keep, rate: x * keep / (1 - rate), normal(2, 3), keep=KEEP, rate=0.2),
    row("dropout", lambda x, keep, rate: x, normal(0, 3), keep=np.ones((0, 3), bool), rate=0.2),
    row("causal_attention", plain_attention, normal(2, 5, 12), num_heads=2),
    row("causal_attention", plain_attention, normal(1, 130, 6), num_heads=1),  # three blocks of queries
    row("causal_attention", plain_attention, normal(0, 5, 12), num_heads=2),
    row("cross_entropy", plain_cross_entropy, normal(4, 5), ids(5, 4)),
    row("cross_entropy", plain_cross_entropy, normal(2, 3, 5), ids(5, 2, 3)),
    row("mse", lambda x, t: np.mean((x - t) ** 2), normal(2, 3), normal(2, 3)),
]
