"""Every kernel in NumPy's words, for NumPy and CuPy alike: what the others are held against, and the contract.

Unless it is said otherwise: `x` and `g`, a cotangent, are (m, n), rows side by side; results have the dtype of `x`;
half precision is computed in float32 and rounded once; nan and infinity give what the formula's limit is.
"""

# ruff: noqa: F403  # a table of contents: the names are those of each family's __all__

from minigrad.kernels.activations.reference import *
from minigrad.kernels.attention.reference import *
from minigrad.kernels.decoding.reference import *
from minigrad.kernels.embedding.reference import *
from minigrad.kernels.losses.reference import *
from minigrad.kernels.norms.reference import *
from minigrad.kernels.products.reference import *
from minigrad.kernels.quantization.reference import *
from minigrad.kernels.softmax.reference import *
from minigrad.kernels.updates.reference import *
