"""Whole models. Each also gives itself as a list of (name, factory), for pipelines."""

from minigrad.models.gpt import GPT, GPTConfig
from minigrad.models.mlp import MLP

__all__ = ["GPT", "MLP", "GPTConfig"]
