"""Groups of parameters: each steps as under an optimizer of its own, whatever cuts the memory."""

import numpy as np
import pytest

import minigrad as mg
from minigrad.lr_schedule import scaled
from minigrad.models import GPT, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.optim.muon import Muon, is_hidden_matrix
from minigrad.optim.param_groups import Group, Groups

CONFIG = GPTConfig(vocab_size=11, context=5, num_layers=2, num_heads=2, width=4)


def step_twice(params, *optimizers):
    for _ in range(2):
        for p in params:
            p.grad = np.random.default_rng(p.size).standard_normal(p.shape).astype(p.dtype)
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()


def in_head(p):
    return p.name.startswith("head.")


@pytest.mark.parametrize("others", [AdamW(0.01), SGD(0.1), Muon(0.02, others=AdamW(0.01))])
def test_a_group_steps_as_under_an_optimizer_of_its_own(others):
    model, expected = GPT(CONFIG), GPT(CONFIG)
    own = AdamW(scaled(lambda step: 1 / (1 + step), 0.1), weight_decay=0.5)
    biases = SGD(0.3, momentum=0.9)

    def is_bias(p):
        return p.name.endswith(".bias") and not in_head(p)

    rule = Groups(others, Group([p for p in model.parameters() if in_head(p)], own), Group(is_bias, biases))
    optimizer = Optimizer(model.parameters(), rule)
    step_twice(list(model.parameters()), optimizer)

    params = list(expected.parameters())
    rest = [p for p in params if not in_head(p) and not is_bias(p)]
    alone = [
        Optimizer(params, SGD(0.0)),  # owns the memory of all, so that zero_grad is one
        Optimizer(rest, others),
        Optimizer([p for p in params if in_head(p)], own),
        Optimizer([p for p in params if is_bias(p)], biases),
    ]
    step_twice(params, *alone)
    for p, q in zip(model.parameters(), params, strict=True):
        np.testing.assert_array_equal(p.data, q.data, err_msg=p.name)
    found = {name for name, _ in optimizer.state_arrays()}
    assert found == {name for each in alone for name, _ in each.state_arrays()}


def test_the_optimizers_learning_rate_is_that_of_what_is_in_no_group():
    w = mg.Parameter(np.zeros(3), "w")
    optimizer = Optimizer([w], Groups(SGD(lambda step: 0.5**step), Group([w], SGD(3.0))))
    step_twice([w], optimizer)
    assert optimizer.lr == 0.25
    assert optimizer.rule.lr(0) == 1


def test_decay_is_the_groups_and_what_decays_is_the_optimizers_choice():
    matrix, other, bias = (mg.Parameter(np.ones(shape), f"p{i}") for i, shape in enumerate([(2, 2), (2, 2), (2,)]))
    Optimizer([matrix, other, bias], Groups(SGD(1.0, weight_decay=0.5), Group([other], SGD(1.0)))).step()
    assert [p.data.flat[0] for p in (matrix, other, bias)] == [0.5, 1.0, 1.0]


def test_half_of_a_parameter_is_of_its_group_too():
    """A shard may begin in the middle of one."""
    whole, halves = (mg.Parameter(np.arange(8.0), "w") for _ in range(2))
    rule = Groups(SGD(5.0), Group(lambda p: p.name == "w", SGD(0.5, momentum=0.9)))
    step_twice([whole], Optimizer([whole], rule))
    (part,) = mg.FlatBuffer.adopt([halves])
    optimizer = Optimizer([halves], rule, parts=[part.cut(0, 3), part.cut(3, 8)])
    step_twice([halves], optimizer)
    np.testing.assert_array_equal(whole.data, halves.data)


@pytest.mark.parametrize(("lr", "step", "expected"), [(0.1, 7, 0.05), (lambda step: 2.0**-step, 3, 0.0625)])
def test_a_learning_rate_is_scaled_as_number_and_as_function(lr, step, expected):
    found = scaled(lr, 0.5)
    assert (found(step) if callable(found) else found) == expected


def test_what_is_no_group_or_in_two_is_refused():
    a, b, c = (mg.Parameter(np.ones((2, 2)), name) for name in "abc")
    d = mg.Parameter(np.ones(3), "d")
    with pytest.raises(ValueError, match=r"a parameter must be in one group, .*'b'.* is in groups \[0, 1\]"):
        Optimizer([a, b], Groups(SGD(1.0), Group([b], SGD(0.1)), Group(is_hidden_matrix, SGD(0.2))))
    with pytest.raises(ValueError, match=r"group 0 lists .*'c'.*, which this optimizer does not have"):
        Optimizer([a, b], Groups(SGD(1.0), Group([a, c], SGD(0.1))))
    with pytest.raises(ValueError, match=r"Muon trains matrices, but .*'d'.* has shape \(3,\)"):
        Optimizer([a, d], Groups(SGD(1.0), Group([d], Muon(0.1, chooses=lambda p: True))))
    with pytest.raises(TypeError, match=r"Groups takes a rule and then Group\(params, rule\) each, got dict"):
        Groups(SGD(1.0), {"params": [a], "lr": 0.1})
    with pytest.raises(TypeError, match=r"got a dict; groups are the rule's: write minigrad\.optim\.Groups\("):
        Optimizer([{"params": [a]}, {"params": [b], "lr": 0.1}], SGD(1.0))
    with pytest.raises(TypeError, match=r"AdamW takes a learning rate, .*: write minigrad\.optim\.Groups\("):
        AdamW([{"params": [a]}])
    with pytest.raises(TypeError, match="give it to an Optimizer"):
        Groups(SGD(1.0)).init(a.data)
    nested = Groups(SGD(1.0), Group([a], Groups(SGD(0.1), Group([b], SGD(0.2)))))
    with pytest.raises(ValueError, match=r"group 0 lists .*'b'"):
        Optimizer([a, b], nested)
