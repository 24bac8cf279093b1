"""Modules: what owns parameters, and how they are named and first filled."""

from .init import ParamGetter, normal, ones, zeros
from .layers import Dropout, Embedding, LayerNorm, Linear, MultiHeadAttention
from .module import Module, Sequential

__all__ = [
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "MultiHeadAttention",
    "ParamGetter",
    "Sequential",
    "normal",
    "ones",
    "zeros",
]
