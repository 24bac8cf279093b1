"""minigrad: tape-based automatic differentiation over NumPy or CuPy arrays.

In reading order: `tensor` (what is on the tape), `tape` (how ops record), `backward` (how gradients and hooks flow),
`ops`, `nn`, `models`; `flat` (where parameters live), `optim`, `rng`.
"""

from . import lr_schedule, models, nn, optim, rng
from .backward import (
    DeferredGrads,
    Hooks,
    backward,
    backward_input,
    backward_weight,
    backward_with_grad,
    backward_with_hooks,
    reached_parameters,
)
from .flat import FlatBuffer, FlatRange, GradState
from .gradcheck import check_vjp
from .ops import *  # noqa: F403  # the op table's __all__
from .ops import __all__ as _op_names
from .tape import Joint, Tape, no_grad, op
from .tensor import Parameter, Tensor

__all__ = [
    "DeferredGrads",
    "FlatBuffer",
    "FlatRange",
    "GradState",
    "Hooks",
    "Joint",
    "Parameter",
    "Tape",
    "Tensor",
    "backward",
    "backward_input",
    "backward_weight",
    "backward_with_grad",
    "backward_with_hooks",
    "check_vjp",
    "lr_schedule",
    "models",
    "nn",
    "no_grad",
    "op",
    "optim",
    "reached_parameters",
    "rng",
    *_op_names,
]
