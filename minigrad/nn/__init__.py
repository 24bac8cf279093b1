"""Modules: what owns parameters, and how they are named and first filled."""

from .buffer import Buffer
from .init import ParamGetter, normal, ones, zeros
from .layers import Conv2d, Dropout, Embedding, LayerNorm, Linear, MultiHeadAttention, RMSNorm
from .module import Module, Sequential

__all__ = [
    "Buffer",
    "Conv2d",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "MultiHeadAttention",
    "ParamGetter",
    "RMSNorm",
    "Sequential",
    "normal",
    "ones",
    "zeros",
]
