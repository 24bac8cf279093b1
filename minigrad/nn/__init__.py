"""Modules: what owns parameters, and how they are named and first filled."""

from minigrad.nn.buffer import Buffer
from minigrad.nn.init import LayerFactory, ParamGetter, normal, ones, zeros
from minigrad.nn.key_value_cache import KeyValueCache
from minigrad.nn.layers import Conv2d, Dropout, Embedding, LayerNorm, Linear, MultiHeadAttention, RMSNorm
from minigrad.nn.module import Module, Sequential

__all__ = [
    "Buffer",
    "Conv2d",
    "Dropout",
    "Embedding",
    "KeyValueCache",
    "LayerFactory",
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
