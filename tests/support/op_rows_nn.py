"""Rows of the op table: neural networks and losses."""

from __future__ import annotations

import numpy as np
from op_table import Sampler, ids, normal, row

from minigrad.backend import Array

KEEP = np.array([[True, False, True], [False, True, True]])


def share(*shape: int) -> Sampler:
    return lambda generator: np.asarray(generator.uniform(size=shape))


def plain_layer_norm(x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gain + bias


def plain_batch_norm(x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
    y = np.empty_like(x)
    for channel in range(x.shape[1]):
        one = x[:, channel]
        y[:, channel] = (one - one.mean()) / np.sqrt(one.var() + eps) * gain[channel] + bias[channel]
    return y


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


def plain_scaled_dot_product_attention(
    q: Array, k: Array, v: Array, causal: bool = False, mask: Array | bool = True
) -> Array:
    """One query at a time, with the keys that it sees picked out."""
    y = np.zeros((*q.shape[:-1], v.shape[-1]))
    masks = np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))
    for where in np.ndindex(*q.shape[:-1]):
        *stack, t = where
        seen = [s for s in range(k.shape[-2]) if masks[where][s] and (s <= t or not causal)]
        if seen:
            scores = np.exp(k[tuple(stack)][seen] @ q[where] / np.sqrt(q.shape[-1]))
            y[where] = scores / scores.sum() @ v[tuple(stack)][seen]
    return y


def plain_softmax(x: Array, axis: int = -1) -> Array:
    return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


def plain_rms_norm(x: Array, gain: Array, eps: float = 1e-5) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def plain_cross_entropy(
    logits: Array, targets: Array, reduction: str = "mean", ignore_index: int = -1, label_smoothing: float = 0.0
) -> Array:
    """The sum over classes of -q log p, for one prediction at a time."""
    losses = []
    for where in np.ndindex(*targets.shape):
        if targets[where] != ignore_index:
            q = np.full(logits.shape[-1], label_smoothing / logits.shape[-1])
            q[targets[where]] += 1 - label_smoothing
            losses.append(-q @ np.log(plain_softmax(logits[where])))
    return np.asarray(np.mean(losses) if reduction == "mean" else np.sum(losses))


def plain_bce(x: Array, t: Array) -> Array:
    p = 1 / (1 + np.exp(-x))
    return -np.mean(t * np.log(p) + (1 - t) * np.log(1 - p))


def plain_windows(x: Array, kernel: tuple[int, int], stride: tuple[int, int]) -> Array:
    """(B, C, H, W) -> (B, C, H', W', h, w), cut out one by one."""
    down, across = (range(0, n - k + 1, s) for n, k, s in zip(x.shape[2:], kernel, stride, strict=True))
    cut = [[x[:, :, i : i + kernel[0], j : j + kernel[1]] for j in across] for i in down]
    return np.array(cut).transpose(2, 3, 0, 1, 4, 5)


def plain_conv2d(
    x: Array, w: Array, b: Array, stride: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0)
) -> Array:
    (batch, channels, height, width), (top, left) = x.shape, padding
    padded = np.zeros((batch, channels, height + 2 * top, width + 2 * left))
    padded[:, :, top : top + height, left : left + width] = x
    return np.einsum("bchwij,ocij->bohw", plain_windows(padded, w.shape[2:], stride), w) + b[:, None, None]


PADDED = np.array([[True, True, False, True], [True, False, False, False]])  # which keys of each sample are real
BLIND = np.tri(5, 4, k=-1, dtype=bool)  # the first query sees no key

ROWS = [
    row("softmax", plain_softmax, normal(3, 4)),
    row("softmax", plain_softmax, normal(2, 3, 4), axis=1),
    row("softmax", plain_softmax, normal(0, 3)),
    row("log_softmax", lambda x: np.log(plain_softmax(x)), normal(3, 4)),
    row("log_softmax", lambda x, axis: np.log(plain_softmax(x, axis)), normal(2, 3, 4), axis=0),
    row("log_softmax", lambda x: x, normal(0, 3)),
    row("rms_norm", plain_rms_norm, normal(4, 5), normal(5)),
    row("rms_norm", plain_rms_norm, normal(2, 3, 5), normal(5), eps=0.1),
    row("rms_norm", plain_rms_norm, normal(0, 5), normal(5)),
    row("batch_norm", plain_batch_norm, normal(6, 3), normal(3), normal(3)),
    row("batch_norm", plain_batch_norm, normal(3, 2, 4, 2), normal(2), normal(2), eps=0.1),
    row("layer_norm", plain_layer_norm, normal(4, 5), normal(5), normal(5)),
    row("layer_norm", plain_layer_norm, normal(2, 3, 5), normal(5), normal(5), eps=0.1),
    row("layer_norm", plain_layer_norm, normal(0, 5), normal(5), normal(5)),
    row("embedding", lambda table, i: table[i], normal(5, 3), ids(5, 2, 4)),
    row("embedding", lambda table, i: table[i], normal(300, 3), ids(300, 2, 400)),  # many rows: scattered
    row("embedding", lambda table, i: table[i], normal(5, 3), ids(5, 0)),
    row("embedding", lambda table, i: table[i], normal(300, 3), ids(300, 0)),
    row("dropout", lambda x, keep, rate: x * keep / (1 - rate), normal(2, 3), keep=KEEP, rate=0.2),
    row("dropout", lambda x, keep, rate: x, normal(0, 3), keep=np.ones((0, 3), bool), rate=0.2),
    row(
        "add_dropout",
        lambda x, y, keep, rate: x + y * keep / (1 - rate),
        *(normal(2, 3), normal(2, 3)),
        keep=KEEP,
        rate=0.2,
    ),
    row("add_dropout", lambda x, y, keep, rate: x, *(normal(0, 3),) * 2, keep=np.ones((0, 3), bool), rate=0.2),
    row("causal_attention", plain_attention, normal(2, 5, 12), num_heads=2),
    row("causal_attention", plain_attention, normal(1, 130, 6), num_heads=1),  # three blocks of queries
    row("causal_attention", plain_attention, normal(0, 5, 12), num_heads=2),
    row("scaled_dot_product_attention", plain_scaled_dot_product_attention, normal(5, 3), normal(4, 3), normal(4, 2)),
    row(
        "scaled_dot_product_attention",
        plain_scaled_dot_product_attention,
        *(normal(2, 2, 5, 3),) * 3,
        causal=True,
    ),
    row(
        "scaled_dot_product_attention",
        plain_scaled_dot_product_attention,
        *(normal(1, 130, 3),) * 3,  # three blocks of queries
        causal=True,
        mask=np.arange(130) % 3 > 0,  # the first query sees no key
    ),
    row(
        "scaled_dot_product_attention",
        plain_scaled_dot_product_attention,
        *(normal(2, 3, 4, 2),) * 3,
        mask=PADDED[:, None, None],
    ),
    row(
        "scaled_dot_product_attention",
        plain_scaled_dot_product_attention,
        normal(2, 2, 260, 2),  # two blocks of queries: samples take turns
        *(normal(2, 2, 4, 2),) * 2,
        mask=PADDED[:, None, None],
    ),
    row(
        "scaled_dot_product_attention",
        plain_scaled_dot_product_attention,
        normal(2, 5, 3),
        normal(2, 4, 3),
        normal(2, 4, 3),
        mask=BLIND,
    ),
    *(
        row(
            "scaled_dot_product_attention",
            plain_scaled_dot_product_attention,
            normal(2, num_queries, 3),
            *(normal(2, num_keys, 3),) * 2,
            causal=causal,
        )
        for num_queries, num_keys, causal in [(0, 4, False), (4, 0, False), (0, 0, True)]
    ),
    row("conv2d", plain_conv2d, normal(2, 3, 5, 6), normal(4, 3, 2, 3), normal(4)),
    row("conv2d", plain_conv2d, normal(2, 1, 5, 6), normal(2, 1, 3, 3), normal(2), stride=(2, 3), padding=(1, 2)),
    row("conv2d", plain_conv2d, normal(1, 2, 2, 3), normal(1, 2, 2, 3), normal(1)),
    row("conv2d", lambda x, w, b: np.zeros((0, 4, 4, 4)), normal(0, 3, 5, 6), normal(4, 3, 2, 3), normal(4)),
    row("max_pool2d", lambda x, size: plain_windows(x, (2, 2), (2, 2)).max((4, 5)), normal(2, 3, 5, 4), size=2),
    row(
        "max_pool2d",
        lambda x, size, stride: plain_windows(x, size, stride).max((4, 5)),
        normal(2, 1, 5, 6),
        size=(3, 2),
        stride=(1, 3),
    ),
    row("max_pool2d", lambda x, size: np.zeros((0, 3, 2, 2)), normal(0, 3, 5, 4), size=2),
    row("avg_pool2d", lambda x, size: plain_windows(x, (2, 2), (2, 2)).mean((4, 5)), normal(2, 3, 5, 4), size=2),
    row(
        "avg_pool2d",
        lambda x, size, stride: plain_windows(x, size, stride).mean((4, 5)),
        normal(2, 1, 5, 6),
        size=(3, 2),
        stride=(1, 3),
    ),
    row("avg_pool2d", lambda x, size: np.zeros((0, 3, 2, 2)), normal(0, 3, 5, 4), size=2),
    row("cross_entropy", plain_cross_entropy, normal(4, 5), ids(5, 4)),
    row("cross_entropy", plain_cross_entropy, normal(4, 5), ids(5, 4), reduction="sum"),
    row("cross_entropy", plain_cross_entropy, normal(9, 5), ids(5, 9), ignore_index=2),
    row("cross_entropy", plain_cross_entropy, normal(4, 5), ids(5, 4), label_smoothing=0.1),
    row(
        "cross_entropy",
        plain_cross_entropy,
        normal(3, 4, 5),
        ids(5, 3, 4),
        reduction="sum",
        ignore_index=2,
        label_smoothing=0.1,
    ),
    row("cross_entropy", plain_cross_entropy, normal(0, 5), ids(5, 0), reduction="sum"),
    row("cross_entropy", plain_cross_entropy, normal(2, 3, 5), ids(5, 2, 3)),
    row("binary_cross_entropy_with_logits", plain_bce, normal(2, 3), share(2, 3)),
    row("binary_cross_entropy_with_logits", plain_bce, normal(7), ids(2, 7)),
    row("mse", lambda x, t: np.mean((x - t) ** 2), normal(2, 3), normal(2, 3)),
]
