"""Causal attention in one piece, by NVIDIA's cuDNN: it never writes T x T numbers.

It reads queries, keys and values out of the packed (B, T, 3, H, d) array by strides, and writes their gradients into
one: nothing is moved. Needs the package nvidia-cudnn-frontend and a recent cuDNN; without them, and for shapes that
cuDNN does not take, attention is composed of products, as on a CPU.

Source: Dao et al. 2022 (FlashAttention); NVIDIA, cuDNN frontend documentation, "Attention".
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend import Array, address, cupy
from minigrad.kernels.gpu_launch import workspace

_LARGEST_HEAD = 128
_ALIGNMENT_BYTES = 16
SUMS = ("ordered", "any")  # MINIGRAD_ATTENTION_SUMS
_OLDEST_CUDNN = 91900  # 9.19; inside a captured graph 9.14 was seen to end in an illegal address


@functools.cache
def why_not() -> str:
    """Return why no attention is cuDNN's: the package is missing, or finds no cuDNN or an older one than was tried.

    Else it is nothing.
    """
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    try:
        import cudnn

        version = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError) as error:  # it loads the library when it is asked
        return f"nvidia-cudnn-frontend finds no cuDNN: {error}"
    return "" if version >= _OLDEST_CUDNN else f"cuDNN {version} is older than {_OLDEST_CUDNN}"


def takes(shape: tuple[int, ...], num_heads: int) -> bool:
    """Return whether cuDNN computes attention of half precision in this shape."""
    batch, time, width3 = shape
    head = width3 // (3 * num_heads)
    return batch > 0 and time > 1 and head % 8 == 0 and 0 < head <= _LARGEST_HEAD and not why_not()


def causal_attention(qkv: Array, num_heads: int) -> tuple[Array, Callable[[Array], Array]]:
    """See `reference.causal_attention`; only where `takes` says so."""
    cp = cupy()
    if not qkv.flags.c_contiguous or address(qkv) % _ALIGNMENT_BYTES:
        qkv = qkv.copy(order="C")
    batch, time, width3 = qkv.shape
    width = width3 // 3
    head, device = width // num_heads, cp.cuda.Device().id
    plan = _plan(batch, time, num_heads, head, qkv.dtype.name, device, sums_are_ordered())
    y = cp.empty((batch, time, width), qkv.dtype)
    stats = cp.empty((batch, num_heads, time, 1), np.float32)
    plan.forward(qkv, y, stats)

    def vjp(g: Array) -> Array:
        if not g.flags.c_contiguous or address(g) % _ALIGNMENT_BYTES:
            g = g.copy(order="C")
        dqkv = cp.empty_like(qkv)
        plan.backward(qkv, y, g, stats, dqkv)
        return dqkv

    return y, vjp


def sums_are_ordered() -> bool:
    """Return whether the backward adds up in one order, in every run; MINIGRAD_ATTENTION_SUMS=any is some 2% faster.

    Raises:
        ValueError: the variable is neither ordered nor any.
    """
    choice = os.environ.get("MINIGRAD_ATTENTION_SUMS", "ordered")
    if choice not in SUMS:
        raise ValueError(f"MINIGRAD_ATTENTION_SUMS must be ordered or any, got {choice!r}")
    return choice == "ordered"


@functools.cache
def _plan(batch: int, time: int, num_heads: int, head: int, dtype: str, device: int, ordered: bool) -> _Plan:
    """Return the plan for one shape on one GPU: making one takes 0.15 s."""
    return _Plan(batch, time, num_heads, head, dtype, ordered)


class _Plan:
    """cuDNN's graphs of one shape, forward and backward.

    Args:
        ordered: the backward adds up in one order, in every run.
    """

    def __init__(self, batch: int, time: int, num_heads: int, head: int, dtype: str, ordered: bool) -> None:
        import cudnn

        self._cudnn = cudnn
        self._cp = cupy()
        self._handle = cudnn.create_handle()
        kind = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[dtype]
        width = num_heads * head
        dim = [batch, num_heads, time, head]
        packed, plain = [time * 3 * width, head, 3 * width, 1], [time * width, head, width, 1]
        settings = {"attn_scale": head**-0.5, "use_causal_mask": True}

        def new_graph() -> Any:
            wide = cudnn.data_type.FLOAT
            return cudnn.pygraph(
                io_data_type=kind, intermediate_data_type=wide, compute_data_type=wide, handle=self._handle
            )

        def inputs(graph: Any, names: str, stride: list[int]) -> list[Any]:
            return [graph.tensor(name=name, dim=dim, stride=stride, data_type=kind) for name in names]

        self._forward = new_graph()
        q, k, v = inputs(self._forward, "qkv", packed)
        y, stats = self._forward.sdpa(name="attention", q=q, k=k, v=v, is_inference=False, **settings)
        y.set_output(True).set_dim(dim).set_stride(plain).set_data_type(kind)
        stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
        workspace_bytes = self._build(self._forward)  # which numbers the tensors
        self._forward_ids = [tensor.get_uid() for tensor in (q, k, v, y, stats)]

        self._backward = new_graph()
        q, k, v = inputs(self._backward, "qkv", packed)
        y, g = inputs(self._backward, "yg", plain)
        stats = self._backward.tensor(
            name="stats",
            dim=[batch, num_heads, time, 1],
            stride=[num_heads * time, time, 1, 1],
            data_type=cudnn.data_type.FLOAT,
        )
        grads = self._backward.sdpa_backward(
            name="gradients", q=q, k=k, v=v, o=y, dO=g, stats=stats, use_deterministic_algorithm=ordered, **settings
        )
        for grad in grads:
            grad.set_output(True).set_dim(dim).set_stride(packed).set_data_type(kind)
        self._workspace_bytes = max(workspace_bytes, self._build(self._backward), 1)
        self._backward_ids = [tensor.get_uid() for tensor in (q, k, v, y, g, stats, *grads)]
        self._lock = threading.Lock()  # the handle is told its stream before a launch: no other thread between
        self._part_bytes = width * 2

    def _build(self, graph: Any) -> int:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return int(graph.get_workspace_size())

    def forward(self, qkv: Array, y: Array, stats: Array) -> None:
        """Write attention into y, and what the backward needs into stats."""
        pointers = [*self._parts(qkv), address(y), address(stats)]
        self._run(self._forward, dict(zip(self._forward_ids, pointers, strict=True)))

    def backward(self, qkv: Array, y: Array, g: Array, stats: Array, dqkv: Array) -> None:
        """Write the gradients of queries, keys and values into dqkv."""
        pointers = [*self._parts(qkv), address(y), address(g), address(stats), *self._parts(dqkv)]
        self._run(self._backward, dict(zip(self._backward_ids, pointers, strict=True)))

    def _parts(self, packed: Array) -> list[int]:
        return [address(packed) + i * self._part_bytes for i in range(3)]

    def _run(self, graph: Any, pointers: dict[int, int]) -> None:
        with self._lock:
            self._cudnn.set_stream(handle=self._handle, stream=self._cp.cuda.get_current_stream().ptr)
            graph.execute(pointers, address(workspace(self._workspace_bytes)), handle=self._handle)
