"""Optimizers: what applies an update rule to a model's parameters, the rules, and clipping by the norm of gradients."""

from typing import TYPE_CHECKING

from minigrad import habits
from minigrad.optim.clipping import clip_by_global_norm, grad_norm, grad_square_sum, scale_to_norm
from minigrad.optim.muon import Muon
from minigrad.optim.optimizer import Optimizer, Piece, is_matrix
from minigrad.optim.param_groups import Group, Groups
from minigrad.optim.update_rules import SGD, Adam, AdamW, DividingRule, LearningRate, Rule

if not TYPE_CHECKING:  # a type checker knows what is there
    __getattr__ = habits.missing_name(__name__)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "DividingRule",
    "Group",
    "Groups",
    "LearningRate",
    "Muon",
    "Optimizer",
    "Piece",
    "Rule",
    "clip_by_global_norm",
    "grad_norm",
    "grad_square_sum",
    "is_matrix",
    "scale_to_norm",
]
