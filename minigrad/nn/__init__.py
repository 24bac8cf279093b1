"""Modules: what owns parameters, and how they are named and first filled."""

from typing import TYPE_CHECKING

from minigrad import habits
from minigrad.nn.buffer import Buffer
from minigrad.nn.init import LayerFactory, ParamGetter, normal, ones, zeros
from minigrad.nn.key_value_cache import KeyValueCache
from minigrad.nn.layers import Conv2d, Dropout, Embedding, Linear, MultiHeadAttention
from minigrad.nn.module import Module, Sequential
from minigrad.nn.norms import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from minigrad.nn.recomputed import Recomputed
from minigrad.nn.skips import gives, takes
from minigrad.nn.stateless import (
    GELU,
    AvgPool2d,
    Flatten,
    LeakyReLU,
    MaxPool2d,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
)

if not TYPE_CHECKING:  # a type checker knows what is there
    __getattr__ = habits.missing_name(__name__)

__all__ = [
    "GELU",
    "AvgPool2d",
    "BatchNorm",
    "Buffer",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "KeyValueCache",
    "LayerFactory",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "Module",
    "MultiHeadAttention",
    "ParamGetter",
    "RMSNorm",
    "ReLU",
    "Recomputed",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "gives",
    "normal",
    "ones",
    "takes",
    "zeros",
]
