"""minigrad: tape-based automatic differentiation over NumPy or CuPy arrays.

In reading order: `tensor` and `parameter` (what is on the tape), `autodiff.tape` (how ops record), `autodiff.backprop`
(how gradients and hooks flow), `ops`, `nn`, `models`; `flat` (where parameters live), `optim`, `rng`.
"""

from typing import TYPE_CHECKING

from minigrad import habits as _habits
from minigrad import lr_schedule, models, nn, optim, rng
from minigrad.autodiff.anomaly import detect_anomaly
from minigrad.autodiff.backprop import (
    backward,
    backward_input,
    backward_weight,
    backward_with_grad,
    backward_with_hooks,
    reached_parameters,
)
from minigrad.autodiff.deferred import DeferredGrads
from minigrad.autodiff.functional import value_and_grad
from minigrad.autodiff.gradcheck import check_vjp
from minigrad.autodiff.hooks import Hooks
from minigrad.autodiff.mode import enable_grad, no_grad
from minigrad.autodiff.recomputation import recompute
from minigrad.autodiff.tape import op
from minigrad.autodiff.tape_listing import Tape
from minigrad.autodiff.vjps import Joint
from minigrad.flat import FlatBuffer
from minigrad.flat_range import FlatRange
from minigrad.ops import *  # noqa: F403  # the op table's __all__
from minigrad.ops import __all__ as _op_names
from minigrad.parameter import Hold, Parameter
from minigrad.profiling.profiler import Profile, profile
from minigrad.tensor import Tensor

if not TYPE_CHECKING:  # a type checker knows what is there
    __getattr__ = _habits.missing_name(__name__)

__all__ = [
    "DeferredGrads",
    "FlatBuffer",
    "FlatRange",
    "Hold",
    "Hooks",
    "Joint",
    "Parameter",
    "Profile",
    "Tape",
    "Tensor",
    "backward",
    "backward_input",
    "backward_weight",
    "backward_with_grad",
    "backward_with_hooks",
    "check_vjp",
    "detect_anomaly",
    "enable_grad",
    "lr_schedule",
    "models",
    "nn",
    "no_grad",
    "op",
    "optim",
    "profile",
    "reached_parameters",
    "recompute",
    "rng",
    "value_and_grad",
    *_op_names,
]
