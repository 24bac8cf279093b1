"""Where a name or an option is not ours: who answers, and what stays as Python has it. The habits: from-pytorch.md."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import distributed.checkpoint
import distributed.data
import minigrad as mg
import minigrad.cuda_graph
import minigrad.precision
from minigrad import habits, nn, optim


def leaf(*shape: int) -> mg.Tensor:
    return mg.Tensor(np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape), requires_grad=True)


# -- names ----------------------------------------------------------------------------------


def test_every_name_of_a_table_is_foreign_to_what_it_is_for() -> None:
    # A name that is ours by now must leave the table: its advice would never be read again.
    x, model = leaf(2), nn.Sequential([])
    assert not [name for name in habits.TENSOR if hasattr(x, name)]
    assert not [name for name in habits.MODULE if hasattr(model, name)]
    assert not [name for name in habits.OPTIMIZER if hasattr(optim.Optimizer([], optim.SGD(0.1)), name)]
    for package, table in habits.PACKAGES.items():
        module = {"minigrad": mg, "minigrad.nn": nn, "minigrad.optim": optim}[package]
        assert not [name for name in table if hasattr(module, name)]
        with pytest.raises(AttributeError, match=rf"^{package} has no '{next(iter(table))}': write "):
            getattr(module, next(iter(table)))


def test_what_advice_names_is_there() -> None:
    text = "\n".join(
        [
            *habits.TENSOR.values(),
            *habits.MODULE.values(),
            *habits.OPTIMIZER.values(),
            *habits.NUMPY.values(),
            *habits.OPTIONS.values(),
        ]
    )
    text += "\n".join(advice for table in habits.PACKAGES.values() for advice in table.values())
    roots = {"minigrad": minigrad, "nn": nn, "optim": optim, "numpy": np, "distributed": distributed}
    for path in set(re.findall(r"\b(?:minigrad|nn|optim|numpy|distributed)(?:\.\w+)+", text)):
        root, *names = path.split(".")
        found: Any = roots[root]
        for name in names:
            found = getattr(found, name)


def test_a_parameter_has_the_habits_of_a_tensor() -> None:
    p = mg.Parameter(np.ones(2), "p")
    for owned in (False, True):
        if owned:
            optim.Optimizer([p], optim.SGD(0.1))
        with pytest.raises(AttributeError, match=r"^Parameter has no 'numel': write x\.size$"):
            p.numel()


@pytest.mark.parametrize("make", [lambda: leaf(2), lambda: mg.Parameter(np.ones(2), "p"), lambda: nn.Sequential([])])
def test_a_name_that_nobody_has_is_pythons_error(make: Callable[[], Any]) -> None:
    with pytest.raises(AttributeError, match=r"^'\w+' object has no attribute 'nonsense'$"):
        make().nonsense  # noqa: B018
    assert not set(dir(make())) & {"backward", "cuda"}  # nobody is offered what is not there
    assert "parameters" in dir(nn.Sequential([]))
    with pytest.raises(AttributeError, match=r"^minigrad has no 'nonsense'$"):
        mg.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_a_class_of_ones_own_may_have_any_name() -> None:
    class Net(nn.Module):
        def __init__(self, param: nn.ParamGetter, dim: int, *, p: float) -> None:
            self.device = "cpu"
            self.fc = nn.Linear(param, dim, dim)

        def to(self, device: str) -> str:
            return device

        def __call__(self, x: Any, *, scale: float = 1.0) -> mg.Tensor:
            return self.fc(x) * scale

    net = Net(nn.ParamGetter(dtype=np.float64), 2, p=0.5)
    assert (net.to("there"), net.device) == ("there", "cpu")
    np.testing.assert_array_equal(net(np.ones((1, 2)), scale=2.0).data, 2 * net(np.ones((1, 2))).data)
    with mg.profile():
        net(np.ones((1, 2)), scale=2.0)  # through a hook too
    for other in (copy.deepcopy(net.fc), pickle.loads(pickle.dumps(net.fc))):
        np.testing.assert_array_equal(other.weight.data, net.fc.weight.data)


def test_a_forward_is_named_call() -> None:
    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    with pytest.raises(NotImplementedError, match=r"^Net defines no __call__: give its `forward` that name$"):
        Net()(1)
    with pytest.raises(NotImplementedError, match=r"^Module defines no __call__$"):
        nn.Module()(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Linear(4, 16),
            r"^Linear takes a getter of parameters first: write Linear\(param\.at\('fc'\), 4, 16\)",
        ),
        (lambda: nn.Linear(4, 16, bias=False), r"^Linear takes a getter"),
        (lambda: nn.GroupNorm(2, 4), "^GroupNorm takes a getter"),
        (lambda: nn.Dropout(0.5), r"^Dropout takes a name first, .*: write Dropout\('drop', 0\.5\)$"),
        (lambda: nn.MaxPool2d(kernel_size=2), r"^MaxPool2d\(\) has no option 'kernel_size': write size=$"),
        (
            lambda: nn.Sequential(nn.ReLU(), nn.ReLU()),
            r"^Sequential takes its layers as one list: write Sequential\(\[",
        ),
        (lambda: nn.Sequential(nn.ReLU()), "^Sequential takes its layers as one list"),
    ],
)
def test_a_layer_made_as_in_pytorch_says_how_it_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


# -- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: mg.sum(x, dim=0), r"^sum\(\) has no option 'dim': write axis=$"),
        (lambda x: x.mean(0, keepdim=True), r"^mean\(\) has no option 'keepdim': write keepdims=$"),
        (lambda x: mg.softmax(x, keepdim=True), r"^softmax\(\) has no option 'keepdim': it has axis$"),
        (lambda x: mg.concatenate([x, x], dim=1), r"^concatenate\(\) has no option 'dim': write axis=$"),
        (lambda x: x.split(2, dim=1), r"^split\(\) has no option 'dim': write axis=$"),
        (lambda x: mg.cross_entropy(input=x, target=0), r"'input': write the array in its place, by position$"),
        (lambda x: mg.tanh(x, inplace=True), r"^tanh\(\) has no option 'inplace': write nothing: an op returns a new"),
        (lambda x: mg.exp(x, base=2), r"^exp\(\) has no option 'base': it has none$"),
        (
            lambda x: mg.backward(x.sum(), retain_graph=True),
            r"^backward\(\) has no option 'retain_graph': write nothing",
        ),
        (
            lambda x: mg.sum(x, 0, True),
            r"^sum\(\) takes 1 array, then by position or by keyword axis, got 3 positional",
        ),
        (lambda x: mg.sum(x, 0, axis=0), r"^sum\(\) takes 1 array, then .* got 2 positional arguments and \['axis'\]$"),
        (lambda x: mg.norm(x, 2), "takes 1 positional argument"),
        (lambda x: mg.clip(x, x.mean(), 9.0), "^clip: an option has no gradient, got a Tensor that requires one"),
    ],
)
def test_an_option_that_is_none_says_what_to_write(call: Callable[[mg.Tensor], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(leaf(2, 2))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        *(
            (lambda x, f=f: getattr(mg, f)(x, 1), lambda x, f=f: getattr(np, f)(x, 1))
            for f in ("sum", "mean", "max", "min")
        ),
        *(
            (lambda x, f=f: getattr(mg, f)(x, 1), lambda x, f=f: getattr(np, f)(x, 1))
            for f in ("prod", "var", "std", "flip")
        ),
        (lambda x: mg.cumsum(x, 1), lambda x: np.cumsum(x, 1)),
        (lambda x: mg.reshape(x, (3, 2)), lambda x: x.reshape(3, 2)),
        (lambda x: mg.transpose(x, (1, 0)), lambda x: x.T),
        (lambda x: mg.swapaxes(x, 0, 1), lambda x: x.T),
        (lambda x: mg.moveaxis(x, 0, 1), lambda x: x.T),
        (lambda x: mg.expand_dims(x, 1), lambda x: x[:, None]),
        (lambda x: mg.squeeze(mg.expand_dims(x, 1), 1), lambda x: x),
        (lambda x: mg.broadcast_to(x, (4, 2, 3)), lambda x: np.broadcast_to(x, (4, 2, 3))),
        (lambda x: mg.clip(x, 2, 3), lambda x: x.clip(2, 3)),
        (lambda x: mg.pad(x, 1), lambda x: np.pad(x, 1)),
        (lambda x: mg.concatenate([x, x], 1), lambda x: np.concatenate([x, x], 1)),
        (lambda x: mg.stack((x, x), -1), lambda x: np.stack([x, x], -1)),
    ],
)
def test_an_option_may_be_positional_where_numpys_is(
    call: Callable[[Any], Any], expected: Callable[[Any], Any]
) -> None:
    x = leaf(2, 3)
    y = call(x)
    np.testing.assert_allclose(y.data, expected(x.data), rtol=1e-12)
    mg.backward(y.sum())
    assert x.grad is not None


def test_an_op_of_ones_own_declares_its_options_in_the_same_way() -> None:
    @mg.op
    def scale(x: Any, /, by: float = 2.0, *, shift: float = 0.0) -> Any:
        return x * by + shift, (lambda g: g * by,)

    @mg.op
    def anything(x: Any, **options: Any) -> Any:
        return x + len(options), (lambda g: g,)

    x = leaf(2)
    np.testing.assert_array_equal(scale(x, 3.0, shift=1.0).data, x.data * 3 + 1)
    np.testing.assert_array_equal(scale(x, by=4.0).data, x.data * 4)
    np.testing.assert_array_equal(anything(x, dim=1, keepdim=2).data, x.data + 2)


# -- NumPy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda x: np.exp(x), "numpy.exp of a Tensor would lose its gradient: use minigrad.exp$"),
        (lambda x: np.tanh(x, where=True), "use minigrad.tanh$"),
        (lambda x: np.square(x), r"use x \*\* 2$"),
        (lambda x: np.negative(x), "use -x$"),
        (lambda x: np.maximum(0, x), "use minigrad.maximum$"),
        (lambda x: np.arctan(x), r"use x\.data where no gradient is meant$"),
        (lambda x: np.add.reduce(x), r"^numpy\.add\.reduce of a Tensor would lose its gradient: use minigrad's ops$"),
        (lambda x: np.vstack([x, x]), "use minigrad.concatenate$"),
        (
            lambda x: np.add(x.data, x, out=x.data),
            r"an array cannot take a Tensor in place \(numpy\.add\): write a = a \+ x",
        ),
        (lambda x: x.data.__iadd__(x), "an array cannot take a Tensor in place"),
        (lambda x: x.data == x, "== of tensors is identity"),
    ],
)
def test_a_function_of_single_numbers_says_which_op_to_use(call: Callable[[mg.Tensor], Any], advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        call(leaf(2, 3))


def test_arithmetic_with_arrays_on_the_left_is_ours() -> None:
    x, a = leaf(2, 3), np.full((2, 3), 3.0)
    for y, expected in [
        (a + x, a + x.data),
        (a - x, a - x.data),
        (a * x, a * x.data),
        (a / x, a / x.data),
        (a**x, a**x.data),
        (a.T @ x, a.T @ x.data),
        (np.float64(2) - x, 2 - x.data),
        (np.add(a, x), a + x.data),
        (np.subtract(x, a), x.data - a),
    ]:
        np.testing.assert_allclose(y.data, expected, rtol=1e-12)
        assert y.node is not None
    for mask, bools in [(a < x, a < x.data), (a <= x, a <= x.data), (a > x, a > x.data), (a >= x, a >= x.data)]:
        assert isinstance(mask, np.ndarray)
        np.testing.assert_array_equal(mask, bools)


def test_a_scalar_is_formatted_as_a_number() -> None:
    assert f"{mg.Tensor(2.5):.2f} {int(mg.Tensor(2.5))}" == "2.50 2"
    assert f"{mg.Tensor(2.5)}" == "Tensor(array(2.5))"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{leaf(2):.2f}"


# -- what a model looks like ----------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, param: nn.ParamGetter) -> None:
        self.blocks = [nn.Linear(param.at(f"b{i}"), 2, 2) for i in range(3)]
        self.heads = {"a": [nn.Dropout("drop", 0.1), mg.tanh], "b": None}
        self.scale = param("scale", (), nn.ones)
        self.stride = (1, 2)
        self._hidden = 3
        self.note = "text"


def test_a_model_is_shown_as_a_tree() -> None:
    model = nn.Sequential([Model(nn.ParamGetter()), nn.ReLU()]).eval()
    assert (
        repr(model)
        == """\
Sequential(
  (layers[0]): Model(stride=(1, 2), scale[]
    (blocks[0:3]): 3 x Linear(weight[2, 2], bias[2])
    (heads['a'][0]): Dropout(rate=0.1)
    (heads['a'][1]): tanh
  )
  (layers[1]): ReLU()
)"""
    )


def test_layers_of_a_sequential_are_its_items() -> None:
    first, second = nn.ReLU(), nn.Tanh()
    model = nn.Sequential(layer for layer in (first, second))
    assert (len(model), model[1], list(model)) == (2, second, [first, second])


# -- Adam -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_the_papers_with_decay_in_the_gradient(weight_decay: float) -> None:
    w = mg.Parameter(np.array([[0.5, -2.0, 3.0]]), "w")
    rule = optim.Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=weight_decay)
    optimizer = optim.Optimizer([w], rule)
    expected, m, v = w.data.copy(), np.zeros(3), np.zeros(3)
    for t in range(1, 5):
        optimizer.zero_grad()
        mg.backward((w**3).sum())
        optimizer.step()
        g = 3 * expected**2 + weight_decay * expected
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        expected = expected - 0.1 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        np.testing.assert_allclose(w.data, expected, rtol=1e-12)
