"""The CUDA code compiles, for every dtype and kind of row, on any machine that has NVRTC; no GPU is needed."""

from __future__ import annotations

import pytest
from nvrtc import CompileError, compile_for, library

from minigrad.kernels.gpu_launch import MACROS, SOURCE, WIDEST_ROW, compile_options


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        library()
    except (ImportError, OSError) as error:
        pytest.skip(f"NVRTC is not installed (pip install cuda-pathfinder nvidia-cuda-nvrtc): {error}")


@pytest.mark.parametrize("dtype", MACROS)
@pytest.mark.parametrize("width", [None, 65, 768, WIDEST_ROW])
@pytest.mark.parametrize("vectors", [False, True])
def test_it_compiles_without_a_warning(dtype: str, width: int | None, vectors: bool) -> None:
    code = compile_for("sm_90", SOURCE.read_text(), compile_options(dtype, width, vectors))
    assert code[:4] == b"\x7fELF"


def test_an_error_would_be_seen() -> None:
    with pytest.raises(CompileError, match="nothing"):
        compile_for("sm_90", "__global__ void f() { nothing(); }", ())
