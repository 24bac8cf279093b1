"""Batch normalisation: the one op whose output for a sample depends on the other samples.

Where these are not all at hand, because somebody else has a part of the batch, two small arrays have to be put
together: `gather` does that, and this file does not know how.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from minigrad.autodiff.tape import op
from minigrad.autodiff.vjps import Vjp, WeightVjp
from minigrad.backend import Array, widened, xp_of
from minigrad.kernels.common import put
from minigrad.ops.operands import in_floats

Gather = Callable[[Array], Array]  # (n,) -> (num_parts, n): that of each part of the batch, alike for all of them


def alone(own: Array) -> Array:
    """Take what is at hand for the whole batch."""
    return own[None]


@op
@in_floats
def batch_norm(
    x: Array,
    gain: Array,
    bias: Array,
    *,
    eps: float = 1e-5,
    gather: Gather = alone,
    weight: Callable[[], float] | None = None,
    note: Callable[[Array, Array, int], None] | None = None,
) -> tuple[Array, tuple[Vjp, Vjp, Vjp]]:
    """Normalise each channel over the batch: y = h gain + bias, h = (x - mean) / sqrt(var + eps).

    With t = g gain: dx = (t - mean(t) - h mean(t h)) / sqrt(var + eps); dgain = sum(g h), dbias = sum(g).

    Of a batch in parts, mean and var are those of the whole. Its loss is the sum of the parts' losses, each times its
    weight over all weights; this part's gradients come out as those of its own loss do, without that factor.

    Args:
        x: (B, C, ...), at least two values a channel in the whole batch; gain, bias: (C,).
        gather: collects an array of each part, called once in the forward and once in the backward into x.
        weight: gives that of this part's loss; the number of its values a channel by default.
        note: called with mean and var (without Bessel's correction), and how many values they are over.
    Raises:
        ValueError: the shapes do not fit, or the batch has less than two values a channel.
    Source: Ioffe and Szegedy 2015, algorithm 1. Parts: Chan et al. 1979, Updating formulae, equation 1.5.
    """
    xp = xp_of(x)
    if x.ndim < 2 or not x.shape[1:2] == gain.shape == bias.shape:
        raise ValueError(
            "batch_norm: x (B, C, ...), gain (C,) and bias (C,) do not fit, "
            f"got {x.shape}, {gain.shape} and {bias.shape}"
        )
    axes = (0, *range(2, x.ndim))
    along = (1, -1, *(1,) * (x.ndim - 2))  # the shape of what there is one of a channel
    own_count = math.prod(x.shape[axis] for axis in axes)
    wide = widened(x)

    own_mean = wide.sum(axes) / max(1, own_count)
    own_squares = xp.square(wide - own_mean.reshape(along)).sum(axes)
    told = gather(xp.concatenate([own_mean, own_squares, xp.full(1, own_count, own_mean.dtype)]))
    counts = told[:, -1:]
    means, squares = xp.split(told[:, :-1], 2, axis=1)
    count = int(counts.sum())
    if count < 2:
        raise ValueError(f"batch_norm needs at least 2 values a channel in the whole batch, got x of shape {x.shape}")
    mean = (counts * means).sum(0) / count
    var = (squares + counts * xp.square(means - mean)).sum(0) / count
    inverse = 1 / xp.sqrt(var + eps)
    if note is not None:
        note(mean, var, count)

    def normalised() -> Array:
        return (widened(x) - mean.reshape(along)) * inverse.reshape(along)

    def vjp_x(g: Array) -> Array:
        t, h = widened(g) * gain.reshape(along), normalised()
        own_weight = own_count if weight is None else weight()
        total = gather(own_weight * xp.concatenate([t.sum(axes), (t * h).sum(axes)])).sum(0)
        means_of_t, means_of_th = xp.split(total / (count * (own_weight or 1)), 2)
        dx = (t - means_of_t.reshape(along) - h * means_of_th.reshape(along)) * inverse.reshape(along)
        return dx.astype(x.dtype, copy=False)

    def write_dgain(g: Array, out: Array, add: bool) -> None:
        put((widened(g) * normalised()).sum(axes), out, add)

    def write_dbias(g: Array, out: Array, add: bool) -> None:
        put(widened(g).sum(axes), out, add)

    y = normalised() * gain.reshape(along) + bias.reshape(along)
    return y.astype(x.dtype, copy=False), (vjp_x, WeightVjp(gain, write_dgain), WeightVjp(bias, write_dbias))
