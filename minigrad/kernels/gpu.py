"""The kernels for CuPy arrays of float32, bfloat16 and float16: gpu.cu, cuBLASLt's products, cuDNN's attention.

Nothing here asks the device anything, so a step may be captured in a CUDA graph; `square_sum` and
`exact_square_sums` alone return numbers.
"""

# ruff: noqa: F403  # a table of contents: the names are those of each family's __all__

from minigrad.kernels.activations.gpu import *
from minigrad.kernels.attention.gpu import *
from minigrad.kernels.embedding.gpu import *
from minigrad.kernels.losses.gpu import *
from minigrad.kernels.norms.gpu import *
from minigrad.kernels.products.gpu import *
from minigrad.kernels.quantization.gpu import *
from minigrad.kernels.softmax.gpu import *
from minigrad.kernels.updates.gpu import *
