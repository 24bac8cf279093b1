"""How long each layer of a model takes, for a cut into stages by measured time.

    layers = gpt.layers(config)
    seconds = layer_seconds(layers, x, comm)
    specs = cut_by_weights([name for name, _ in layers], seconds, num_stages)
    stages = PipelineStage.of(layers, comm, schedule, specs=specs)

One micro-batch goes through the whole model: each layer gets what those before it have made of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distributed.agreement import of_rank_0
from distributed.comm.communicator import Communicator
from minigrad import rng
from minigrad.autodiff.backprop import backward_with_grad
from minigrad.backend import Array, synchronize, xp_of
from minigrad.nn import LayerFactory, ParamGetter
from minigrad.nn.module import SkipLayer
from minigrad.tensor import Tensor
from pipeline.runtime.partition import check_layers


def layer_seconds(
    layers: Sequence[tuple[str, LayerFactory]],
    x: Array,
    comm: Communicator,
    *,
    num_runs: int = 3,
    dtype: Any = np.float32,
    device: str = "cpu",
) -> list[float]:
    """Time forward and backward of each layer on one micro-batch.

    Collective: rank 0 measures, with the whole model in its memory, and all ranks get its numbers, since ranks that cut
    by their own would cut differently.

    Args:
        x: a micro-batch, on every rank or on rank 0 alone.
        num_runs: of each layer; the quickest counts.
        dtype, device: of the parameters; see `ParamGetter`.
    Returns:
        Seconds, one for each layer.
    Raises:
        RuntimeError: rank 0 could not build or run a layer; the same message on every rank.
        TypeError: the layers are no pairs, or comm is something else.
        ValueError: num_runs is below 1.
    """
    check_layers(layers)
    if not isinstance(comm, Communicator):
        raise TypeError(f"layer_seconds takes a communicator, such as world(), got {type(comm).__name__}")
    if num_runs < 1:
        raise ValueError(f"num_runs must be at least 1, got {num_runs}")

    def measure() -> list[float]:
        if not hasattr(x, "dtype"):
            raise TypeError(f"x must be an array, got {type(x).__name__}")
        param, seconds, outputs = ParamGetter(0, dtype, device), [], x
        given: dict[str, Array] = {}
        for _, factory in layers:
            layer = factory(param)
            runs = [_run(layer, outputs, given) for _ in range(num_runs)]
            seconds.append(min(duration for duration, _ in runs))
            outputs = runs[-1][1]
            if isinstance(layer, SkipLayer):
                given.update(dict.fromkeys(layer.gives, outputs))
        return seconds

    return of_rank_0(comm, measure)


def _run(layer: Any, x: Array, given: Mapping[str, Array]) -> tuple[float, Array]:
    """Return how long a layer takes, and its output.

    Args:
        given: what skip connections may bring.
    """

    def leaf_of(array: Array) -> Any:
        return Tensor(array, requires_grad=True) if array.dtype.kind not in "iub" else array

    leaf, leaves = leaf_of(x), {name: leaf_of(array) for name, array in given.items()}
    start = time.perf_counter()
    with rng.scope(seed=0, step=0):
        y = layer(leaf, leaves) if isinstance(layer, SkipLayer) else layer(leaf)
    output = y.data if isinstance(y, Tensor) else y
    if isinstance(y, Tensor) and y.requires_grad:
        backward_with_grad(y, xp_of(output).ones_like(output))
    synchronize(output)
    return time.perf_counter() - start, output
