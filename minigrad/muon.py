"""Muon under the address of before there was a room of optimizers; it lives in `optim/muon.py`."""

from minigrad.optim.muon import Muon, is_hidden_matrix

__all__ = ["Muon", "is_hidden_matrix"]
