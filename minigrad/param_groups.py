"""Groups of parameters under the address that errors name; they live in `optim/param_groups.py`."""

from minigrad.optim.param_groups import Group, Groups

__all__ = ["Group", "Groups"]
