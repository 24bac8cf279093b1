"""NVRTC, NVIDIA's compiler as a library: it compiles for a GPU on machines that have none."""

from __future__ import annotations

import ctypes


class CompileError(Exception):
    """What the compiler says."""


def library() -> ctypes.CDLL:
    """Return NVRTC, from the package nvidia-cuda-nvrtc or the machine's CUDA.

    Raises:
        ModuleNotFoundError: cuda-pathfinder, which looks for it, is not installed.
        OSError: it is not there.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        return ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except DynamicLibNotFoundError as error:
        raise OSError(str(error)) from error


def compile_for(arch: str, source: str, options: tuple[str, ...]) -> bytes:
    """Return the machine code (cubin) of CUDA C++ for an architecture such as `sm_90`.

    Raises:
        CompileError: the source has an error, or a warning.
    """
    nvrtc = library()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gpu.cu", 0, None, None)
    flags = [f"--gpu-architecture={arch}", *options]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status or b"warning" in log.value:
        raise CompileError(log.value.decode())
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    return code.raw
