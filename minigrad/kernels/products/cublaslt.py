"""Matrix products of NVIDIA's cuBLASLt, and stacks of them: transposed or not, float32 results of half operands.

CuPy's own products round to the operands' dtype, have no bfloat16 stacks, and cannot be captured in a graph. Here a
product writes, or adds, into an array of float32 that may be the gradient itself, and adds a bias on the way.

cuBLASLt thinks in columns: a row-major matrix is the transpose of what it sees, so that y = a b is computed as
y^T = b^T a^T, with the operands in turn. What was found out about one kind of product is kept in a plan.

Source: NVIDIA, cuBLAS library documentation, "Using the cuBLASLt API"; numbers are those of its header's enums.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, address, cuda_library, cupy

_WORKSPACE_BYTES = 32 << 20
_FLOAT32, _COMPUTE_FLOAT32, _COMPUTE_TF32 = 0, 68, 77
_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # attributes of a product
_AUX_POINTER, _AUX_STRIDE = 11, 12
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # attributes of a layout
_MAX_WORKSPACE, _REDUCTIONS, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference
_REDUCE_IN_COMPUTE_TYPE, _REDUCE_IN_OUTPUT_TYPE = 2, 4  # parts of a long sum: never rounded to half first
_EPILOGUE_NONE, _EPILOGUE_BIAS, _EPILOGUE_GELU_AUX_BIAS, _EPILOGUE_DGELU = 1, 4, 164, 192
_ALIGNMENT_BYTES = 256  # more than this no algorithm asks for


class _Matrix(NamedTuple):
    """How cuBLASLt sees an array."""

    pointer: int
    dtype: str
    rows: int  # of the array whose rows lie one after the other, which is the transpose where `transposed`
    columns: int
    stride: int
    transposed: bool
    num_stacked: int
    stack_stride: int

    @property
    def alignment(self) -> int:
        return min(_ALIGNMENT_BYTES, self.pointer & -self.pointer)


class CublasLt:
    """Products on the current GPU.

    Args:
        tf32: float32 operands are rounded to 10 bits of fraction, which is several times as fast; sums stay float32.
    """

    def __init__(self, *, tf32: bool = False) -> None:
        self._cp = cupy()
        self._compute = {"float32": _COMPUTE_TF32} if tf32 else {}
        self._library = cuda_library("cublasLt")
        self._handle = ctypes.c_void_p()
        _check(self._library.cublasLtCreate(ctypes.byref(self._handle)))
        self._product = self._library.cublasLtMatmul
        pointer = ctypes.c_void_p
        self._product.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]  # plain integers: half the time of a call
        self._set = self._library.cublasLtMatmulDescSetAttribute
        self._set.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_size_t]
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._plans: dict[Any, _Plan] = {}
        self._workspaces: dict[int, Array] = {}  # by stream: two streams must not share one
        self._lock = threading.Lock()  # a plan is told where a bias lies before its product: no other thread between
        self._thread = threading.local()

    def __call__(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        add: bool = False,
        bias: Array | None = None,
        before_gelu: Array | None = None,
    ) -> None:
        """Do out = a b, or out += a b, plus a bias on every row.

        Args:
            a: (m, k), b: (k, n): of one dtype, float32 or a half one; rows or columns contiguous, no length 0.
                Or stacks of as many of them, (s, m, k) and (s, k, n).
            out: (m, n), or (s, m, n), with contiguous rows, float32 or of the operands' dtype.
            bias: (n,) contiguous, aligned to 16 bytes, of the dtype of `out`.
            before_gelu: (m, n) contiguous, of the dtype of `out`, a half one, n divisible by 8. With a bias a b + bias
                goes here, and its GELU, tanh form, into `out`. Without, out = a b gelu'(before_gelu).
        """
        epilogue = _EPILOGUE_NONE if bias is None else _EPILOGUE_BIAS
        if before_gelu is not None:
            epilogue = _EPILOGUE_DGELU if bias is None else _EPILOGUE_GELU_AUX_BIAS
        if not hasattr(self._thread, "has_context"):  # cuBLASLt fails in a new thread that has not called the runtime
            self._cp.cuda.Device().use()
            self._thread.has_context = True
        with self._lock:
            self._run(_matrix(b), _matrix(a), _matrix(out), epilogue, bias, before_gelu, add=add)

    def _run(
        self,
        first: _Matrix,
        second: _Matrix,
        target: _Matrix,
        epilogue: int,
        bias: Array | None,
        before_gelu: Array | None,
        *,
        add: bool,
    ) -> None:
        key = (*first[1:], first.alignment, *second[1:], second.alignment, *target[1:], target.alignment, epilogue)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(first, second, target, epilogue, bias, before_gelu)
        if bias is not None:
            plan.bias.value = address(bias)
            _check(self._set(plan.product, _BIAS_POINTER, ctypes.addressof(plan.bias), 8))
        if before_gelu is not None:
            plan.aux.value = address(before_gelu)
            _check(self._set(plan.product, _AUX_POINTER, ctypes.addressof(plan.aux), 8))
        stream = self._cp.cuda.get_current_stream().ptr
        workspace = self._workspaces.get(stream)
        if workspace is None:
            workspace = self._workspaces[stream] = self._new_workspace()
        _check(
            self._product(
                self._handle.value,
                plan.product,
                ctypes.addressof(self._one),
                first.pointer,
                plan.first,
                second.pointer,
                plan.second,
                ctypes.addressof(self._one if add else self._zero),
                target.pointer,
                plan.target,
                target.pointer,
                plan.target,
                ctypes.addressof(plan.algorithm),
                address(workspace),
                _WORKSPACE_BYTES,
                stream,
            )
        )

    def _new_workspace(self) -> Array:
        with self._cp.cuda.using_allocator(None):  # of no pool: it outlives every graph
            return self._cp.empty(_WORKSPACE_BYTES, np.uint8)

    def _plan(
        self,
        first: _Matrix,
        second: _Matrix,
        target: _Matrix,
        epilogue: int,
        bias: Array | None,
        before_gelu: Array | None,
    ) -> _Plan:
        product, preference = ctypes.c_void_p(), ctypes.c_void_p()
        compute = self._compute.get(first.dtype, _COMPUTE_FLOAT32)
        _check(self._library.cublasLtMatmulDescCreate(ctypes.byref(product), compute, _FLOAT32))
        self._set_number(product, _TRANSPOSE_FIRST, ctypes.c_int32(first.transposed))
        self._set_number(product, _TRANSPOSE_SECOND, ctypes.c_int32(second.transposed))
        pointer, aux = (ctypes.c_uint64(0 if x is None else address(x)) for x in (bias, before_gelu))
        self._set_number(product, _EPILOGUE, ctypes.c_uint32(epilogue))
        if bias is not None:
            self._set_number(product, _BIAS_POINTER, pointer)
        if before_gelu is not None:
            self._set_number(product, _AUX_POINTER, aux)
            self._set_number(product, _AUX_STRIDE, ctypes.c_int64(before_gelu.shape[1]))
        layouts = [self._layout(matrix) for matrix in (first, second, target)]
        _check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        in_output_type = _REDUCE_IN_OUTPUT_TYPE if target.dtype == "float32" else 0
        wishes: dict[int, Any] = {
            _MAX_WORKSPACE: ctypes.c_uint64(_WORKSPACE_BYTES),
            _REDUCTIONS: ctypes.c_uint32(_REDUCE_IN_COMPUTE_TYPE | in_output_type),
        }
        for attribute, matrix in zip(_MIN_ALIGNMENTS, (first, second, target, target), strict=True):
            wishes[attribute] = ctypes.c_uint32(matrix.alignment)
        for attribute, value in wishes.items():
            _check(
                self._library.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
                )
            )
        algorithm, num_found = (ctypes.c_uint64 * 12)(), ctypes.c_int()  # cublasLtMatmulHeuristicResult_t: 96 bytes
        _check(
            self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle,
                product,
                *layouts,
                layouts[-1],
                preference,
                1,
                ctypes.byref(algorithm),
                ctypes.byref(num_found),
            )
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        if not num_found.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for {first}, {second} and {target}")
        first_at, second_at, target_at = (layout.value for layout in layouts)
        return _Plan(product.value, first_at, second_at, target_at, algorithm, pointer, aux)

    def _layout(self, matrix: _Matrix) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        _check(
            self._library.cublasLtMatrixLayoutCreate(
                ctypes.byref(layout),
                _DATA_TYPES[matrix.dtype],
                ctypes.c_uint64(matrix.columns),
                ctypes.c_uint64(matrix.rows),
                ctypes.c_int64(matrix.stride),
            )
        )
        stack = {_BATCH_COUNT: ctypes.c_int32(matrix.num_stacked), _BATCH_STRIDE: ctypes.c_int64(matrix.stack_stride)}
        for attribute, value in stack.items():
            _check(
                self._library.cublasLtMatrixLayoutSetAttribute(
                    layout, attribute, ctypes.byref(value), ctypes.sizeof(value)
                )
            )
        return layout

    def _set_number(self, product: ctypes.c_void_p, attribute: int, value: Any) -> None:
        _check(self._set(product.value, attribute, ctypes.addressof(value), ctypes.sizeof(value)))


class _Plan(NamedTuple):
    """Handles and the chosen algorithm of one kind of product; they live as long as the process."""

    product: Any
    first: Any
    second: Any
    target: Any
    algorithm: Any
    bias: Any
    aux: Any


def lines_up(x: Array) -> bool:
    """Return whether matrices have contiguous rows or columns that do not overlap, as cuBLASLt needs them."""
    (rows, columns), (by_row, by_column), size = x.shape[-2:], x.strides[-2:], x.itemsize
    by_rows = (by_column == size or columns == 1) and (by_row >= columns * size or rows == 1)
    by_columns = (by_row == size or rows == 1) and (by_column >= rows * size or columns == 1)
    return bool((by_rows or by_columns) and all(stride % size == 0 for stride in x.strides))


def _matrix(x: Array) -> _Matrix:
    (rows, columns), (by_row, by_column), size = x.shape[-2:], x.strides[-2:], x.itemsize
    pointer, dtype = address(x), x.dtype.name
    stack = (1, 0) if x.ndim == 2 else (len(x), x.strides[0] // size)
    if (by_column == size or columns == 1) and (by_row >= columns * size or rows == 1):
        stride = max(columns, by_row // size) if rows > 1 else columns
        return _Matrix(pointer, dtype, rows, columns, stride, False, *stack)
    return _Matrix(pointer, dtype, columns, rows, max(rows, by_column // size) if columns > 1 else rows, True, *stack)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
