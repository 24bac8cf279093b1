"""Layers against plain NumPy; parameters by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import nn, rng
from minigrad.backend import Array


def param(dtype: Any = np.float64, seed: int = 0) -> nn.ParamGetter:
    return nn.ParamGetter(seed, dtype)


def sample(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(2).standard_normal(shape))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def randomize(module: nn.Module) -> None:
    """Give every parameter other values, so that none hides behind its initial zeros or ones."""
    generator = np.random.default_rng(9)
    for p in module.parameters():
        p.data = generator.standard_normal(p.shape)


# -- forwards -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3)])
def test_linear(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(param(), 3, 2)
    randomize(layer)
    x = sample(*shape)
    expected = x @ layer.weight.data + layer.bias.data
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, expected, rtol=1e-13)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
def test_linear_without_a_bias(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(param(), 3, 2, bias=False)
    assert layer.bias is None
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    x = np.random.default_rng(0).standard_normal(shape)
    y = layer(mg.Tensor(x))
    np.testing.assert_allclose(y.data, x @ layer.weight.data, rtol=1e-12)
    mg.backward(y.sum())
    np.testing.assert_allclose(layer.weight.grad, np.outer(x.reshape(-1, 3).sum(axis=0), [1, 1]), rtol=1e-12)


def test_layer_norm() -> None:
    layer = nn.LayerNorm(param(), 5)
    randomize(layer)
    x = sample(2, 3, 5)
    h = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, h * layer.gain.data + layer.bias.data, rtol=1e-12)


def test_rms_norm() -> None:
    layer = nn.RMSNorm(param(), 5)
    assert (layer.gain.data == 1).all()
    randomize(layer)
    x = sample(2, 3, 5)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * layer.gain.data
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, expected, rtol=1e-12)


def test_conv2d() -> None:
    layer = nn.Conv2d(param(), 2, 3, (2, 3), stride=2, padding=(0, 1))
    randomize(layer)
    x = sample(2, 2, 4, 5)
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 1)))
    y = layer(mg.Tensor(x)).data
    assert y.shape == (2, 3, 2, 3)
    for i, j in np.ndindex(2, 3):
        window = padded[:, None, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 3]
        expected = (window * layer.weight.data).sum((2, 3, 4)) + layer.bias.data
        np.testing.assert_allclose(y[:, :, i, j], expected, rtol=1e-12)
    square = nn.Conv2d(param(), 4, 50, 3)
    assert square.weight.shape == (50, 4, 3, 3)
    assert square.weight.data.std() == pytest.approx(1 / 6, rel=0.05)
    assert nn.Conv2d(param().at("b"), 4, 50, 3, std=0.5).weight.data.std() == pytest.approx(0.5, rel=0.05)


def test_embedding() -> None:
    layer = nn.Embedding(param(), 7, 3)
    ids = np.array([[1, 6], [0, 1]])
    np.testing.assert_array_equal(layer(ids).data, layer.weight.data[ids])


def test_multi_head_attention() -> None:
    layer = nn.MultiHeadAttention(param(), 6, 2, std=0.5, out_std=0.5)
    randomize(layer)
    x = sample(2, 5, 6)
    q, k, v = np.split(x @ layer.qkv.weight.data + layer.qkv.bias.data, 3, axis=-1)
    heads = []
    for h in (slice(0, 3), slice(3, 6)):
        scores = q[..., h] @ k[..., h].swapaxes(1, 2) / np.sqrt(3)
        scores[:, np.triu(np.ones((5, 5), bool), 1)] = -np.inf
        heads.append(softmax(scores) @ v[..., h])
    expected = np.concatenate(heads, -1) @ layer.out.weight.data + layer.out.bias.data
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, expected, rtol=1e-11)


def test_attention_needs_a_width_that_its_heads_divide() -> None:
    with pytest.raises(ValueError, match="width must be divisible by num_heads, got 4 and 3"):
        nn.MultiHeadAttention(param(), 4, 3, std=1, out_std=1)


def test_dropout_scales_what_it_keeps() -> None:
    layer, x = nn.Dropout("drop", 0.25), mg.Tensor(sample(4, 6), requires_grad=True)
    with rng.scope(seed=0, step=0):
        y = layer(x)
    with rng.scope(seed=0, step=0):
        keep = rng.keep_mask("drop", (4, 6), 0.25)
    assert 0 < keep.sum() < keep.size
    np.testing.assert_allclose(y.data, x.data * keep / 0.75)
    mg.backward(y.sum())
    np.testing.assert_allclose(x.grad, keep / 0.75)


def test_dropout_that_joins_a_branch_to_what_passes_it_by_has_the_bits_of_a_sum() -> None:
    def branch(x: Any, *, beside: Any = None) -> Any:
        return x if beside is None else beside + x

    layer, x, beside = nn.Dropout("drop", 0.25), sample(64, 65).astype(np.float32), sample(64, 65).astype(np.float32)
    leaves = [mg.Tensor(array, requires_grad=True) for array in (x, beside, x, beside)]
    with rng.scope(seed=0, step=0):
        fused = layer.join(leaves[1], partial(branch, leaves[0]))
    with rng.scope(seed=0, step=0):
        plain = leaves[3] + layer(leaves[2])
    np.testing.assert_array_equal(fused.data, plain.data)
    for y in (fused, plain):
        mg.backward((y * y).sum())
    for a, b in zip(leaves[:2], leaves[2:], strict=True):
        np.testing.assert_array_equal(a.grad, b.grad)
    layer.eval()
    joined = layer.join(mg.Tensor(beside), partial(branch, mg.Tensor(x)))
    np.testing.assert_array_equal(joined.data, beside + x)
    with pytest.raises(ValueError, match=r"add_dropout: x and y must have the same shape, got \(2,\) and \(3,\)"):
        mg.add_dropout(np.ones(2), np.ones(3), keep=np.ones(3, bool), rate=0.5)


def test_dropout_is_off_in_eval_and_at_rate_zero() -> None:
    x = mg.Tensor(sample(4, 6))
    model = nn.Sequential([nn.Sequential([nn.Dropout("drop", 0.5)])])
    model.eval()
    assert model(x) is x  # and needs no scope
    assert nn.Dropout("drop", 0.0)(x) is x
    model.train()
    with pytest.raises(RuntimeError, match="dropout 'drop' draws keyed random numbers"):
        model(x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, np.nan])
def test_a_dropout_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"the dropout rate must be in \[0, 1\), got {rate}"):
        nn.Dropout("drop", rate)


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 2, 3)])
@pytest.mark.parametrize("num_groups", [1, 3, 6])
def test_group_norm(shape: tuple[int, ...], num_groups: int) -> None:
    layer = nn.GroupNorm(param(), num_groups, 6)
    randomize(layer)
    x = sample(*shape)
    groups = x.reshape(4, num_groups, -1)
    h = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    gain, bias = (v.data.reshape(6, *[1] * (x.ndim - 2)) for v in (layer.gain, layer.bias))
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, h.reshape(shape) * gain + bias, rtol=1e-10)
    mg.check_vjp(lambda t: (layer(t) ** 2).sum(), x)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (2, 3, 2, 2)])
def test_batch_norm(shape: tuple[int, ...]) -> None:
    layer = nn.BatchNorm(param(), 3, momentum=0.25)
    randomize(layer)
    x, others, n = sample(*shape), (0, *range(2, len(shape))), np.prod(shape) // 3
    gain, bias = (v.data.reshape(3, *[1] * (x.ndim - 2)) for v in (layer.gain, layer.bias))
    centred = x - x.mean(others, keepdims=True)
    expected = centred / np.sqrt(x.var(others, keepdims=True) + 1e-5) * gain + bias
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, expected, rtol=1e-10)
    np.testing.assert_allclose(layer.running_mean.data, 0.25 * x.mean(others), rtol=1e-12)
    np.testing.assert_allclose(layer.running_var.data, 0.75 + 0.25 * x.var(others) * n / (n - 1), rtol=1e-12)
    mg.check_vjp(lambda t: (layer(t) ** 2).sum(), x)
    before = layer.eval().state_dict()
    assert {"running_mean", "running_var"} < before.keys()
    scaled = (x - layer.running_mean.data.reshape(gain.shape)) / np.sqrt(
        layer.running_var.data.reshape(gain.shape) + 1e-5
    )
    np.testing.assert_allclose(layer(mg.Tensor(x)).data, scaled * gain + bias, rtol=1e-10)
    np.testing.assert_array_equal(layer.running_mean.data, before["running_mean"])


def test_a_recomputed_batch_norm_counts_a_batch_once() -> None:
    plain, again = (nn.BatchNorm(param(), 3) for _ in range(2))
    x = mg.Tensor(sample(5, 3), requires_grad=True)
    mg.backward((plain(x) ** 3).sum())
    grad, x.grad = x.grad, None
    mg.backward((mg.recompute(again, x) ** 3).sum())
    np.testing.assert_array_equal(again.running_mean.data, plain.running_mean.data)
    np.testing.assert_array_equal(again.running_var.data, plain.running_var.data)
    np.testing.assert_array_equal(x.grad, grad)


def test_norms_of_channels_say_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="GroupNorm: num_groups must divide the width, got 4 and 6"):
        nn.GroupNorm(param(), 4, 6)
    for layer in (nn.GroupNorm(param(), 2, 6), nn.BatchNorm(param(), 6)):
        for shape in ((4,), (4, 5), (6, 4, 6)):
            with pytest.raises(
                ValueError, match=rf"^{type(layer).__name__}: x must be \(B, 6, ...\), got \({shape[0]},"
            ):
                layer(mg.Tensor(sample(*shape)))
    with pytest.raises(ValueError, match=r"batch_norm needs at least 2 values a channel .*, got .* \(1, 6\)"):
        nn.BatchNorm(param(), 6)(mg.Tensor(sample(1, 6)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_norms_of_channels_keep_the_dtype(dtype: Any) -> None:
    for layer in (nn.GroupNorm(param(dtype), 2, 4), nn.BatchNorm(param(dtype), 4)):
        y = layer(mg.Tensor(sample(3, 4, 2).astype(dtype)))
        assert y.dtype == dtype
        assert layer.eval()(mg.Tensor(sample(3, 4, 2).astype(dtype))).dtype == dtype


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (nn.ReLU(), mg.relu),
        (nn.LeakyReLU(0.2), lambda x: mg.leaky_relu(x, slope=0.2)),
        (nn.GELU(), mg.gelu),
        (nn.GELU(exact=True), lambda x: mg.gelu(x, exact=True)),
        (nn.SiLU(), mg.silu),
        (nn.Sigmoid(), mg.sigmoid),
        (nn.Tanh(), mg.tanh),
        (nn.Softplus(), mg.softplus),
        (nn.Flatten(), lambda x: mg.reshape(x, (2, 48))),
        (nn.MaxPool2d(2), lambda x: mg.max_pool2d(x, size=2)),
        (nn.MaxPool2d((2, 3), stride=1), lambda x: mg.max_pool2d(x, size=(2, 3), stride=1)),
        (nn.AvgPool2d(2, stride=1), lambda x: mg.avg_pool2d(x, size=2, stride=1)),
    ],
)
def test_a_module_of_an_op_is_the_op(module: nn.Module, op: Any) -> None:
    x = mg.Tensor(sample(2, 3, 4, 4))
    np.testing.assert_array_equal(module(x).data, op(x).data)
    assert module.parameters() == []


# -- parameters by name -------------------------------------------------------------------


def test_values_depend_on_seed_and_name_alone() -> None:
    def value(getter: nn.ParamGetter, name: str) -> Array:
        return getter(name, (3, 2), nn.normal(1.0)).data

    getter = param()
    first, second = value(getter, "first"), value(getter, "second")
    np.testing.assert_array_equal(value(param(), "second"), second)  # though nobody asked for "first"
    assert (first != second).all()
    assert (value(param(seed=1), "first") != first).all()
    assert (value(param().at("a"), "first") != value(param().at("b"), "first")).all()
    np.testing.assert_array_equal(value(param(np.float32), "first"), first.astype(np.float32))


def test_a_tie_gives_the_same_parameter() -> None:
    for first, second in [("claimed", "tied"), ("tied", "claimed"), ("tied", "tied")]:
        getter = param()
        asks = {"claimed": getter.at("fc").at("a"), "tied": getter.tied.at("fc.a")}
        w = asks[first]("weight", (3, 2), nn.zeros)
        assert w.name == "fc.a.weight"
        assert asks[second]("weight", (3, 2), nn.ones) is w
        assert asks["tied"]("weight", (3, 2), nn.ones) is w
        assert list(getter.made) == ["fc.a.weight"]
        with pytest.raises(ValueError, match=r"parameter 'fc\.a\.weight' has shape \(3, 2\), but \(2, 3\) was asked"):
            getter.tied("fc.a.weight", (2, 3), nn.zeros)


def test_two_layers_do_not_share_a_name_by_mistake() -> None:
    # Two layers of one getter had the same weights, silently, and so did the layers of a loop whose lambda saw the last
    # value of the loop's variable: four layers became one.
    getter = param()
    nn.Linear(getter, 2, 2)
    with pytest.raises(ValueError, match=r"^two layers ask for the parameter 'weight': give each a name of its own"):
        nn.Linear(getter, 2, 2)
    layers = [lambda getter: nn.Linear(getter.at(f"fc{i}"), 2, 2) for i in range(4)]  # noqa: B023
    with pytest.raises(ValueError, match=r"'fc3\.weight'.*a lambda sees the last value of the loop's variable"):
        nn.Sequential([layer(param()) for layer in layers[:1]] + [layer(getter) for layer in layers])


def test_initial_values() -> None:
    generator = np.random.default_rng(0)
    assert nn.normal(0.5)(generator, (100, 100)).std() == pytest.approx(0.5, rel=0.05)
    layer = nn.Linear(param(), 400, 50)
    assert layer.weight.data.std() == pytest.approx(1 / 20, rel=0.05)
    assert not layer.bias.data.any()
    norm = nn.LayerNorm(param(), 3)
    assert (norm.gain.data == 1).all()
    assert not norm.bias.data.any()


# -- modules ------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, getter: nn.ParamGetter) -> None:
        self.layers = [nn.Linear(getter.at("a"), 2, 2), nn.Linear(getter.at("b"), 2, 2)]
        self.tied = self.layers[0].weight
        self.scale = getter("scale", (), nn.ones)
        self.offset = nn.Buffer([1, 2], "offset")
        self.num_units = 2


class Nested(nn.Module):
    """Members of every kind, wherever an attribute can hold them."""

    def __init__(self, getter: nn.ParamGetter) -> None:
        self.first = getter("first", (1,), nn.zeros)
        self.heads = {"in": nn.Linear(getter.at("in"), 1, 1), "out": (getter("out", (2,), nn.zeros),)}
        self.second = getter("second", (1,), nn.zeros)
        self.grid = [[nn.RMSNorm(getter.at("norm"), 3)], [nn.Buffer(np.zeros(4), "table")]]


def test_parameters_come_in_order_of_declaration_and_tied_ones_once() -> None:
    # Those of a module itself came before those of the modules that it declares first.
    model = Pair(param())
    assert [p.name for p in model.parameters()] == ["a.weight", "a.bias", "b.weight", "b.bias", "scale"]
    assert list(model.named_parameters()) == [(p.name, p) for p in model.parameters()]
    assert [type(m).__name__ for m in model.modules()] == ["Pair", "Linear", "Linear"]


def test_members_are_found_in_lists_tuples_and_dicts() -> None:
    model = Nested(param())
    assert [p.name for p in model.parameters()] == ["first", "in.weight", "in.bias", "out", "second", "norm.gain"]
    assert model.buffers() == [model.grid[1][0]]
    assert [path for path, _ in model.named_modules()] == ["Nested", "Nested.heads['in']", "Nested.grid[0][0]"]
    assert [name for name, _ in model.members()] == [
        "first",
        "heads['in']",
        "heads['out'][0]",
        "second",
        "grid[0][0]",
        "grid[1][0]",
    ]
    assert set(model.state_dict()) == {p.name for p in model.parameters()} | {"table"}


def test_names_tell_parameters_apart() -> None:
    model = nn.Sequential([nn.Linear(param().at("a"), 2, 2), nn.Linear(param().at("a"), 2, 2)])
    with pytest.raises(ValueError, match=r"names must be unique, got 'a\.weight' twice: shapes \(2, 2\) and \(2, 2\)"):
        model.named_parameters()
    pair = Pair(param())
    pair.offset.name = "scale"
    assert list(pair.named_parameters())[-1] == ("scale", pair.scale)
    with pytest.raises(ValueError, match=r"names must be unique, got 'scale' twice: shapes \(\) and \(2,\)"):
        pair.state_dict()


def test_a_buffer_is_state_without_a_gradient() -> None:
    model = Pair(param())
    assert model.buffers() == [model.offset]
    assert model.offset not in model.parameters()
    assert not model.offset.requires_grad
    y = model.tied * model.offset
    mg.backward(y.sum())
    assert model.offset.grad is None
    np.testing.assert_array_equal(model.tied.grad, [[1, 2], [1, 2]])


def test_a_buffer_is_neither_weight_nor_data() -> None:
    model = Pair(param())
    assert model.offset.weight_side is None
    assert (model.tied * model.offset).weight_side is True  # a masked weight is still a weight
    assert (mg.Tensor(sample(2, 2)) * model.offset).weight_side is False


def test_a_buffer_owns_its_memory_and_says_when_it_changed_too_early() -> None:
    values = np.ones(2)
    buffer = nn.Buffer(values, "running.mean")
    values += 1
    np.testing.assert_array_equal(buffer.data, [1, 1])
    w = mg.Parameter(np.ones(2), "w")
    loss = (w * buffer).sum()
    buffer.data = values
    with pytest.raises(RuntimeError, match=r"'running\.mean'"):
        mg.backward(loss)


def test_the_summary_is_a_table() -> None:
    model = Pair(param())
    model.layers[1].bias.requires_grad = False
    assert model.summary().splitlines() == [
        "module          class    parameters  shapes",
        "Pair            Pair              5  tied (2, 2), scale (), buffer offset (2,)",
        "Pair.layers[0]  Linear            2  weight (2, 2) (tied), bias (2,)",
        "Pair.layers[1]  Linear            6  weight (2, 2), bias (2,)",
        "total                            13  2 of them frozen",
    ]


def test_state_is_copied_out_and_in() -> None:
    model, other = Pair(param()), Pair(param(seed=1))
    randomize(model)
    state = model.state_dict()
    memory = [p.data for p in other.parameters()]
    other.load_state_dict(state)
    for p, q, array in zip(model.parameters(), other.parameters(), memory, strict=True):
        np.testing.assert_array_equal(p.data, q.data)
        assert q.data is array
    state["scale"] += 1
    assert model.scale.data != state["scale"]
    assert other.scale.data != state["scale"]


def test_buffers_are_saved_and_loaded() -> None:
    model = Pair(param())
    memory = model.offset.data
    state = model.state_dict()
    np.testing.assert_array_equal(state["offset"], [1, 2])
    model.load_state_dict(state | {"offset": np.array([3, 4])})
    np.testing.assert_array_equal(model.offset.data, [3, 4])
    assert model.offset.data is memory
    assert memory.dtype.kind == "i"
    np.testing.assert_array_equal(state["offset"], [1, 2])


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("scale", {}, r"missing \['scale'\], unexpected \[\], wrong shape \[\]"),
        ("", {"c": np.ones(1)}, r"missing \[\], unexpected \['c'\], wrong shape \[\]"),
        ("", {"b.weight": np.ones((2, 3))}, r"wrong shape \['b\.weight: expected \(2, 2\), got \(2, 3\)'\]"),
        (
            "scale",
            {"c": np.ones(1), "offset": np.ones(3)},
            r"missing \['scale'\], unexpected \['c'\], wrong shape \['offset: expected \(2,\), got \(3,\)'\]",
        ),
    ],
)
def test_loading_is_all_or_nothing(removed: str, added: dict[str, Array], message: str) -> None:
    model = Pair(param())
    before = model.state_dict()
    state = {name: array + 1 for name, array in before.items() if name != removed} | added
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(state)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_train_and_eval_reach_every_module() -> None:
    model = nn.Sequential([Pair(param()), nn.Sequential((nn.Dropout("d", 0.5),))])
    model.eval()
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())
    assert nn.Module.training


def test_a_module_without_a_call_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Pair defines no __call__"):
        Pair(param())(1)
