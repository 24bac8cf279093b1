"""ArraySpec: what travels in a header reads back as what it was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.runtime.boundary import SPEC_COLUMNS, ArraySpec

DTYPES = ["?", "i1", "u2", "i8", "f2", "f4", "f8", ">f4", "c16"]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**40), max_size=8))
def test_a_spec_reads_back(dtype, shape):
    spec = ArraySpec(tuple(shape), np.dtype(dtype))
    row = spec.encode()
    assert row.shape == (SPEC_COLUMNS,)
    assert row.dtype == np.int64
    assert ArraySpec.decode(row) == spec


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=8, max_side=2)))
def test_a_spec_is_that_of_an_array(array):
    spec = ArraySpec.of(array)
    assert spec == (array.shape, array.dtype)
    assert ArraySpec.decode(spec.encode()).shape == array.shape


@pytest.mark.parametrize(
    ("dtype", "is_float"), [("f2", True), ("f8", True), ("i8", False), ("u1", False), ("?", False)]
)
def test_gradients_travel_for_floats_only(dtype, is_float):
    assert ArraySpec((1,), np.dtype(dtype)).is_float is is_float


def test_a_spec_prints_as_dtype_and_shape():
    assert str(ArraySpec((2, 3), np.dtype("f4"))) == "float32[2, 3]"


def test_too_many_axes_are_refused():
    with pytest.raises(ValueError, match=r"at most 8 axes, got shape \(1, 1, 1, 1, 1, 1, 1, 1, 1\)"):
        ArraySpec((1,) * 9, np.dtype("f4")).encode()


@pytest.mark.parametrize("dtype", [np.dtype("U1000000"), np.dtype("M8[100ns]"), np.dtype([("a", "f4"), ("b", "i4")])])
def test_a_dtype_that_its_name_does_not_tell_is_refused(dtype):
    with pytest.raises(ValueError, match="needs a plain dtype, with a name of at most 8 letters, got "):
        ArraySpec((1,), dtype).encode()
