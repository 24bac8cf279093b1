"""A copy of a model trains like the model, whoever owned the model's memory when it was copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from distributed import DistributedDataParallel, SoloCommunicator
from minigrad import nn, optim
from minigrad.models import GPT, GPTConfig
from minigrad.precision import use_precision

X, Y = np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 2.0]]), np.array([[1.0], [2.0]])


class Net(nn.Module):
    """A tied weight, a frozen one, a buffer."""

    def __init__(self) -> None:
        param = nn.ParamGetter(dtype=np.float64)
        self.first = nn.Linear(param.at("first"), 3, 3)
        self.second = self.first
        self.last = nn.Linear(param.at("last"), 3, 1)
        self.last.bias.requires_grad = False
        self.shift = nn.Buffer(np.array([0.5, 1.0, 1.5]), "shift")

    def __call__(self, x: Any) -> mg.Tensor:
        return self.last(self.second(mg.tanh(self.first(x))) + self.shift)


def owned_by_nobody(model: nn.Module) -> None:
    pass


def owned_by_an_optimizer(model: nn.Module) -> None:
    step(model, optim.Optimizer(model.parameters(), optim.AdamW(lr=0.1)))


def owned_by_ddp(model: nn.Module) -> None:
    ddp = DistributedDataParallel(model, SoloCommunicator())
    mg.backward_with_hooks(mg.mse(model(X), Y), ddp.hooks(num_samples=2))
    ddp.wait()


def step(model: nn.Module, optimizer: optim.Optimizer) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = mg.mse(model(X), Y)
    mg.backward(loss)
    norm = optim.clip_by_global_norm(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm


by_pickle = pytest.param(lambda x: pickle.loads(pickle.dumps(x)), id="pickle")
copied = pytest.mark.parametrize("duplicate", [pytest.param(copy.deepcopy, id="deepcopy"), by_pickle])
owned = pytest.mark.parametrize("own", [owned_by_nobody, owned_by_an_optimizer, owned_by_ddp])


@copied
@owned
def test_a_copy_trains_like_the_model_and_apart_from_it(
    own: Callable[[nn.Module], None], duplicate: Callable[[Any], Any]
) -> None:
    # Parameters are views of a flat. A copy took views and flat apart: an optimizer on it stepped on memory that nobody
    # read, so the loss stayed where it was. pytorch#82070, skorch#317
    model = Net()
    own(model)
    other = duplicate(model)
    first = other.state_dict()
    rule = optim.AdamW(lr=0.1)
    optimizer = optim.Optimizer(other.parameters(), rule)
    seen = [step(other, optimizer) for _ in range(3)]
    assert seen[0][0] > seen[1][0] > seen[2][0]
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(values, first[name])
    optimizer = optim.Optimizer(model.parameters(), rule)
    assert [step(model, optimizer) for _ in range(3)] == seen


@copied
def test_one_step_of_a_copy_by_hand(duplicate: Callable[[Any], Any]) -> None:
    model = nn.Linear(nn.ParamGetter(dtype=np.float64), 3, 1)
    optim.Optimizer(model.parameters(), optim.SGD(lr=0.1))
    other = duplicate(model)
    w, b = other.weight.data.copy(), other.bias.data.copy()
    g = 2 * (X @ w + b - Y) / 2
    optimizer = optim.Optimizer(other.parameters(), optim.SGD(lr=0.1))
    mg.backward(mg.mse(other(X), Y))
    norm = np.sqrt(np.square(X.T @ g).sum() + np.square(g.sum()))
    assert optim.clip_by_global_norm(other.parameters(), 1e9) == pytest.approx(norm, rel=1e-12)
    optimizer.step()
    np.testing.assert_allclose(other.weight.data, w - 0.1 * X.T @ g, rtol=1e-12)
    np.testing.assert_allclose(other.bias.data, b - 0.1 * g.sum(axis=0), rtol=1e-12)


@copied
def test_a_model_and_its_optimizer_go_on_together(duplicate: Callable[[Any], Any]) -> None:
    model = Net()
    optimizer = optim.Optimizer(model.parameters(), optim.AdamW(lr=0.1))
    step(model, optimizer)
    other, its_optimizer = duplicate((model, optimizer))
    assert its_optimizer.num_steps == 1
    assert [step(other, its_optimizer) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(p.data, q.data)
        assert not np.shares_memory(p.data, q.data)


@copied
def test_a_model_and_its_optimizer_go_on_in_their_precision(duplicate: Callable[[Any], Any]) -> None:
    model = GPT(GPTConfig(vocab_size=7, context=4, num_layers=1, num_heads=1, width=4))
    optimizer = optim.Optimizer(model.parameters(), optim.AdamW(lr=0.1))
    use_precision(model.parameters(), "float16")
    other, its_optimizer = duplicate((model, optimizer))
    ids = np.array([[1, 2, 3]])
    for m, o in ((model, optimizer), (other, its_optimizer)):
        for _ in range(2):
            o.zero_grad()
            mg.backward(mg.cross_entropy(m(ids), ids))
            o.step()
    assert (other(ids).dtype, other.parameters()[0].dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(other(ids).data, model(ids).data)


@copied
def test_a_copy_keeps_what_it_is_and_not_where_it_lay(duplicate: Callable[[Any], Any]) -> None:
    model = Net()
    owned_by_ddp(model)
    other = duplicate(model)
    assert other.first is other.second
    assert dict(other.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (q.name, q.requires_grad, q.weight_side) == (p.name, p.requires_grad, True)
        assert (q.flat, q.hold) == (None, None)
        np.testing.assert_array_equal(q.grad, p.grad)
    (shift,) = other.buffers()
    assert (shift.name, shift.weight_side) == ("shift", None)
    assert not np.shares_memory(shift.data, model.shift.data)


@copied
def test_a_table_tied_to_the_head_stays_tied(duplicate: Callable[[Any], Any]) -> None:
    model = GPT(GPTConfig(vocab_size=7, context=4, num_layers=1, num_heads=1, width=4))
    optim.Optimizer(model.parameters(), optim.SGD(lr=0.1))
    other = duplicate(model)
    assert other.layers[0].token.weight is other.layers[-1].token


def test_a_shallow_copy_of_a_parameter_is_a_parameter_of_its_own() -> None:
    (w,) = params = [mg.Parameter(np.ones(2), "w")]
    optim.Optimizer(params, optim.SGD(lr=1.0))
    other = copy.copy(w)
    assert not np.shares_memory(other.data, w.data)
    mg.backward(other.sum())
    optim.Optimizer([other], optim.SGD(lr=1.0)).step()
    np.testing.assert_array_equal(other.data, [0, 0])
    np.testing.assert_array_equal(w.data, [1, 1])
    assert w.grad is None


def test_a_shallow_copy_of_a_model_shares_its_parameters() -> None:
    model = Net()
    owned_by_an_optimizer(model)
    other = copy.copy(model)
    loss, _ = step(other, optim.Optimizer(other.parameters(), optim.SGD(lr=0.1)))
    assert mg.mse(model(X), Y).item() < loss


def test_a_change_of_a_copy_is_none_of_the_model() -> None:
    w, x = mg.Parameter(np.ones(2), "w"), mg.Tensor(np.ones(2), requires_grad=True)
    y = (w * x).sum()
    copy.deepcopy(w).data = np.zeros(2)
    mg.backward(y)
    np.testing.assert_array_equal(x.grad, [1, 1])


def test_what_cannot_be_copied_says_so() -> None:
    w = mg.Parameter(np.ones(2), "w")
    with pytest.raises(TypeError, match=r"made cannot be copied: its tape would be lost; copy tensor\.detach\(\)"):
        copy.deepcopy(w * 2)
    (part,) = mg.FlatBuffer.adopt([w])
    with pytest.raises(TypeError, match="a FlatBuffer is the one owner of its parameters' memory: copy it with them"):
        copy.copy(part.flat)
    w.hold = mg.Hold("its grad is being counted; call done() first")
    with pytest.raises(RuntimeError, match=r"^a copy of 'w': its grad is being counted; call done\(\) first$"):
        copy.deepcopy(w)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_of_a_parameter_whose_values_are_on_their_way_waits_for_them(copied: Callable[[Any], Any]) -> None:
    p = mg.Parameter(np.zeros(3), "p")

    def arrive() -> None:
        p.restore()
        p.data = np.arange(3.0)

    p.defer(arrive)
    assert (p.name, p.requires_grad) == ("p", True)  # which wait for nothing
    with pytest.raises(AttributeError):
        p.no_such_name  # noqa: B018
    again = copied(p)
    np.testing.assert_array_equal(again.data, [0, 1, 2])
    assert type(again) is type(p) is mg.Parameter


class Noted(mg.Parameter):
    """A parameter of a user's own, with attributes of its own."""

    def __init__(self, data: Any, note: str) -> None:
        super().__init__(data, "noted")
        self.note = note


def test_a_parameter_of_a_class_of_its_own_may_have_its_values_on_their_way() -> None:
    p = Noted(np.zeros(3), "frozen soon")
    p.defer(p.restore)
    assert (p.note, isinstance(p, Noted)) == ("frozen soon", True)
    np.testing.assert_array_equal(p.data, np.zeros(3))
    assert type(p) is Noted
