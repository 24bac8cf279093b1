"""Whole models. Each also gives itself as a list of (name, factory), for pipelines."""

from .gpt import GPT, GPTConfig
from .mlp import MLP

__all__ = ["GPT", "MLP", "GPTConfig"]
