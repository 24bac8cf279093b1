"""Matrix products of NVIDIA's cuBLASLt, and stacks of them: transposed or not, float32 results of half operands.

CuPy's own products round to the operands' dtype, have no bfloat16 stacks, and cannot be captured in a graph. Here a
product writes, or adds, into an array of float32 that may be the gradient itself, and adds a bias or what passes it by
on the way.

cuBLASLt thinks in columns: a row-major matrix is the transpose of what it sees, so that y = a b is computed as
y^T = b^T a^T, with the operands in turn. What was found out about one kind of product is kept in a plan.

It has several algorithms for a product, and guesses which is the fastest. Where a product is large they are timed when
one of its kind is first wanted, and only those are taken that give the same bits as the guess: what is chosen by time
changes no number.

Source: NVIDIA, cuBLAS library documentation, "Using the cuBLASLt API"; numbers are those of its header's enums.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minigrad.backend import Array, address, cuda_library, cupy, outside_pools
from minigrad.kernels.gpu_launch import workspace
from minigrad.kernels.products.layouts import Arrays, Kind, Layout

_WORKSPACE_BYTES = 32 << 20
_FLOAT32, _COMPUTE_FLOAT32, _COMPUTE_TF32 = 0, 68, 77
_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # attributes of a product
_AUX_POINTER, _AUX_STRIDE = 11, 12
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # attributes of a layout
_MAX_WORKSPACE, _REDUCTIONS, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference
_REDUCE_IN_COMPUTE_TYPE, _REDUCE_IN_OUTPUT_TYPE = 2, 4  # parts of a long sum: never rounded to half first
_EPILOGUE_NONE, _EPILOGUE_BIAS, _EPILOGUE_GELU_AUX_BIAS, _EPILOGUE_DGELU = 1, 4, 164, 192
_ALGORITHM_WORDS = 12  # of 8 bytes: cublasLtMatmulHeuristicResult_t, which begins with the algorithm
_LARGE = 1 << 30  # multiplications: what takes about 5 us
_WORTH_IT = 0.98  # of the guess's time


class CublasLt:
    """Products on the current GPU.

    Args:
        tf32: float32 operands are rounded to 10 bits of fraction, which is several times as fast; sums stay float32.
        num_candidates: algorithms that are timed for a large product.
    """

    def __init__(self, *, tf32: bool = False, num_candidates: int = 8) -> None:
        self._cp = cupy()
        self._compute = {"float32": _COMPUTE_TF32} if tf32 else {}
        self._num_candidates = num_candidates
        self._library = cuda_library("cublasLt")
        self._handle = ctypes.c_void_p()
        _check(self._library.cublasLtCreate(ctypes.byref(self._handle)))
        self._product = self._library.cublasLtMatmul
        pointer = ctypes.c_void_p
        self._product.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]  # plain integers: half the time of a call
        self._library.cublasLtMatmulDescSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_size_t]
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._plans: dict[Kind, _Plan] = {}
        self._lock = threading.Lock()  # a plan is told where a bias lies before its product: no other thread between
        self._thread = threading.local()

    def __call__(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        add: bool = False,
        beside: Array | None = None,
        bias: Array | None = None,
        before_gelu: Array | None = None,
    ) -> None:
        """Do out = a b, or out += a b, plus what is given besides.

        Args:
            a: (m, k), b: (k, n): of one dtype, float32 or a half one; rows or columns contiguous, no length 0.
                Or stacks of as many of them, (s, m, k) and (s, k, n).
            out: (m, n), or (s, m, n), with contiguous rows, float32 or of the operands' dtype.
            beside: added instead of `out`: of its shape and dtype, with contiguous rows.
            bias: added to every row: (n,) contiguous, aligned to 16 bytes, of the dtype of `out`.
            before_gelu: (m, n) contiguous, of the dtype of `out`, a half one, n divisible by 8. With a bias a b + bias
                goes here, and its GELU, tanh form, into `out`. Without, out = a b gelu'(before_gelu).
        """
        epilogue = _EPILOGUE_NONE if bias is None else _EPILOGUE_BIAS
        if before_gelu is not None:
            epilogue = _EPILOGUE_DGELU if bias is None else _EPILOGUE_GELU_AUX_BIAS
        if not hasattr(self._thread, "has_context"):  # cuBLASLt fails in a new thread that has not called the runtime
            self._cp.cuda.Device().use()
            self._thread.has_context = True
        target = Layout.of(out)
        added, its_layout = (out, target) if beside is None else (beside, Layout.of(beside))
        kind = Kind(Layout.of(b), Layout.of(a), its_layout, target, epilogue)
        arrays = Arrays(b, a, added, out, bias, before_gelu)
        with self._lock:
            plan = self._plans.get(kind)
            if plan is None:
                plan = self._plans[kind] = self._new_plan(kind, arrays)
            self._launch(plan, arrays, add=add or beside is not None)

    def _launch(self, plan: _Plan, arrays: Arrays, *, add: bool) -> None:
        told = ((_BIAS_POINTER, plan.bias, arrays.bias), (_AUX_POINTER, plan.aux, arrays.before_gelu))
        for attribute, held, array in told:
            if array is not None:
                held.value = address(array)
                self._set(plan.product, attribute, held)
        first_at, second_at, added_at, target_at = plan.layouts
        _check(
            self._product(
                self._handle.value,
                plan.product,
                ctypes.addressof(self._one),
                address(arrays.first),
                first_at,
                address(arrays.second),
                second_at,
                ctypes.addressof(self._one if add else self._zero),
                address(arrays.added),
                added_at,
                address(arrays.target),
                target_at,
                ctypes.addressof(plan.algorithm),
                address(workspace(_WORKSPACE_BYTES)),
                _WORKSPACE_BYTES,
                self._cp.cuda.get_current_stream().ptr,
            )
        )

    def _new_plan(self, kind: Kind, arrays: Arrays) -> _Plan:
        """Describe a kind of product to cuBLASLt, and choose an algorithm."""
        bias, before_gelu = arrays.bias, arrays.before_gelu
        compute, product = self._compute.get(kind.first.dtype, _COMPUTE_FLOAT32), ctypes.c_void_p()
        _check(self._library.cublasLtMatmulDescCreate(ctypes.byref(product), compute, _FLOAT32))
        bias_at, aux_at = (ctypes.c_uint64(0 if x is None else address(x)) for x in (bias, before_gelu))
        wishes: dict[int, Any] = {
            _TRANSPOSE_FIRST: ctypes.c_int32(kind.first.transposed),
            _TRANSPOSE_SECOND: ctypes.c_int32(kind.second.transposed),
            _EPILOGUE: ctypes.c_uint32(kind.epilogue),
        }
        if bias is not None:
            wishes[_BIAS_POINTER] = bias_at
        if before_gelu is not None:
            wishes |= {_AUX_POINTER: aux_at, _AUX_STRIDE: ctypes.c_int64(before_gelu.shape[1])}
        for attribute, value in wishes.items():
            self._set(product.value, attribute, value)
        matrices = (kind.first, kind.second, kind.added, kind.target)
        layouts, preference = [self._new_layout(matrix) for matrix in matrices], self._new_preference(matrices)
        is_timed = kind.num_multiplications >= _LARGE and not self._cp.cuda.get_current_stream().is_capturing()
        most, num_found = self._num_candidates if is_timed else 1, ctypes.c_int()
        found = (ctypes.c_uint64 * _ALGORITHM_WORDS * most)()
        _check(
            self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, product, *layouts, preference, most, ctypes.byref(found), ctypes.byref(num_found)
            )
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        if not num_found.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for {kind}")
        at = tuple([layout.value for layout in layouts])
        plans = [_Plan(product.value, at, found[i], bias_at, aux_at) for i in range(num_found.value)]
        return self._fastest(plans, kind, arrays) if len(plans) > 1 else plans[0]

    def _fastest(self, plans: Sequence[_Plan], kind: Kind, given: Arrays) -> _Plan:
        """Return, of the plans that give the bits of the first, the one that takes the least time.

        Random numbers are multiplied, in memory of their own: what is summed up in another order differs somewhere in
        so many results, and the caller's arrays may hold nothing yet, or a sum that must not be added to twice.
        """
        numbers = self._cp.asarray(np.random.default_rng(0).standard_normal(65537), np.float32)

        def like(array: Array, layout: Layout | None = None) -> Array:
            size = array.size if layout is None else layout.num_elements
            scratch = outside_pools(size, array.dtype)  # wanted only once
            scratch[: numbers.size] = numbers[:size]
            filled = numbers.size
            while filled < size:
                scratch[filled : 2 * filled] = scratch[: min(filled, size - filled)]
                filled *= 2
            return scratch

        try:
            first, second, added = (like(array, layout) for array, layout in zip(given[:3], kind[:3], strict=True))
            targets = [outside_pools(kind.target.num_elements, given.target.dtype) for _ in range(2)]
            for target in targets:
                target.fill(0)  # what lies between rows is compared too
            bias, before_gelu = (None if x is None else like(x) for x in (given.bias, given.before_gelu))
        except MemoryError:
            return plans[0]
        best, least = plans[0], np.inf
        for plan in plans:
            arrays = Arrays(first, second, added, targets[plan is not plans[0]], bias, before_gelu)
            try:
                seconds = self._seconds(plan, arrays, add=given.added is not given.target)
            except RuntimeError:  # it wants something that is not here
                continue
            same = plan is plans[0] or bool((targets[0].view(np.uint8) == targets[1].view(np.uint8)).all())
            if same and seconds < least:
                best, least = plan, seconds * (_WORTH_IT if plan is plans[0] else 1)
        return best

    def _seconds(self, plan: _Plan, arrays: Arrays, *, add: bool) -> float:
        """Return how long some products take, the quickest of some turns."""
        start, end = self._cp.cuda.Event(), self._cp.cuda.Event()
        found = []
        for _ in range(4):
            start.record()
            for _ in range(4):
                self._launch(plan, arrays, add=add)
            end.record()
            end.synchronize()
            found.append(self._cp.cuda.get_elapsed_time(start, end))
        return float(min(found))

    def _new_layout(self, matrix: Layout) -> ctypes.c_void_p:
        layout, columns, rows = ctypes.c_void_p(), ctypes.c_uint64(matrix.columns), ctypes.c_uint64(matrix.rows)
        dtype, stride = _DATA_TYPES[matrix.dtype], ctypes.c_int64(matrix.stride)
        _check(self._library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), dtype, columns, rows, stride))
        stack = {_BATCH_COUNT: ctypes.c_int32(matrix.num_stacked), _BATCH_STRIDE: ctypes.c_int64(matrix.stack_stride)}
        _set_all(self._library.cublasLtMatrixLayoutSetAttribute, layout, stack)
        return layout

    def _new_preference(self, matrices: tuple[Layout, ...]) -> ctypes.c_void_p:
        """Say what an algorithm may use and take for granted."""
        preference = ctypes.c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        in_output_type = _REDUCE_IN_OUTPUT_TYPE if matrices[-1].dtype == "float32" else 0
        wishes: dict[int, Any] = {
            _MAX_WORKSPACE: ctypes.c_uint64(_WORKSPACE_BYTES),
            _REDUCTIONS: ctypes.c_uint32(_REDUCE_IN_COMPUTE_TYPE | in_output_type),
        }
        for attribute, matrix in zip(_MIN_ALIGNMENTS, matrices, strict=True):
            wishes[attribute] = ctypes.c_uint32(matrix.alignment)
        _set_all(self._library.cublasLtMatmulPreferenceSetAttribute, preference, wishes)
        return preference

    def _set(self, product: int | None, attribute: int, value: Any) -> None:
        at, size = ctypes.addressof(value), ctypes.sizeof(value)
        _check(self._library.cublasLtMatmulDescSetAttribute(product, attribute, at, size))


class _Plan(NamedTuple):
    """Handles and the chosen algorithm of one kind of product; they live as long as the process."""

    product: Any
    layouts: tuple[Any, ...]
    algorithm: Any
    bias: Any
    aux: Any


def _set_all(setter: Any, handle: ctypes.c_void_p, values: Mapping[int, Any]) -> None:
    for attribute, value in values.items():
        _check(setter(handle, attribute, ctypes.byref(value), ctypes.sizeof(value)))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
