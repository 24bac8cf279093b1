"""The kernels that numba compiles for float32 and float64 on a CPU: plain loops, one pass over the data each."""

# ruff: noqa: F403  # a table of contents: the names are those of each family's __all__

from minigrad.kernels.activations.cpu import *
from minigrad.kernels.attention.cpu import *
from minigrad.kernels.decoding.cpu import *
from minigrad.kernels.embedding.cpu import *
from minigrad.kernels.losses.cpu import *
from minigrad.kernels.norms.cpu import *
from minigrad.kernels.products.cpu import *
from minigrad.kernels.quantization.cpu import *
from minigrad.kernels.softmax.cpu import *
from minigrad.kernels.updates.cpu import *
