"""Whole models: against plain NumPy, and as the sum of the layers that different ranks build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minigrad as mg
from minigrad import models, nn, rng
from minigrad.backend import Array
from minigrad.models import GPT, MLP, GPTConfig, gpt, mlp

CONFIG = GPTConfig(vocab_size=11, context=8, num_layers=2, num_heads=2, width=6)
IDS = np.random.default_rng(0).integers(11, size=(3, 7))


def model_of(config: GPTConfig = CONFIG, dtype: Any = np.float64) -> GPT:
    """A GPT none of whose parameters is zero or one."""
    model = GPT(config, dtype=dtype)
    generator = np.random.default_rng(1)
    for p in model.parameters():
        p.data += 0.3 * generator.standard_normal(p.shape)
    return model


def plain_gpt(w: dict[str, Array], ids: Array, num_layers: int, num_heads: int) -> Array:
    def linear(name: str, x: Array) -> Array:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name: str, x: Array) -> Array:
        h = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return h * w[f"{name}.gain"] + w[f"{name}.bias"]

    def attention(name: str, x: Array) -> Array:
        time, width = x.shape[1:]
        q, k, v = (a.reshape(*x.shape[:2], num_heads, -1) for a in np.split(linear(f"{name}.qkv", x), 3, -1))
        scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(width / num_heads)
        p = np.exp(scores) * np.tril(np.ones((time, time)))
        p /= p.sum(-1, keepdims=True)
        return linear(f"{name}.out", np.einsum("bhts,bshd->bthd", p, v).reshape(x.shape))

    def gelu(x: Array) -> Array:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = w["embed.token.weight"][ids] + w["embed.position"][: ids.shape[1]]
    for i in range(num_layers):
        block = f"block{i}"
        x = x + attention(f"{block}.attention", norm(f"{block}.norm1", x))
        x = x + linear(f"{block}.down", gelu(linear(f"{block}.up", norm(f"{block}.norm2", x))))
    return norm("head.norm", x) @ w["embed.token.weight"].T


def test_gpt_is_plain_numpys() -> None:
    model = model_of()
    expected = plain_gpt(model.state_dict(), IDS, CONFIG.num_layers, CONFIG.num_heads)
    np.testing.assert_allclose(model(IDS).data, expected, rtol=1e-10)


def test_gradients_of_gpt_are_those_of_finite_differences() -> None:
    model = model_of()
    params = model.parameters()

    def loss() -> mg.Tensor:
        return mg.cross_entropy(model(IDS[:, :-1]), IDS[:, 1:])

    mg.backward(loss())
    generator = np.random.default_rng(2)
    for p in params:
        direction = generator.standard_normal(p.shape)
        losses = []
        for distance in (1e-6, -2e-6):
            p.data += distance * direction
            losses.append(loss().item())
        p.data += 1e-6 * direction
        assert p.grad is not None
        assert float(np.vdot(p.grad, direction)) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept_from_end_to_end(dtype: Any) -> None:
    model = model_of(dtype=dtype)
    loss = mg.cross_entropy(model(IDS[:, :-1]), IDS[:, 1:])
    assert {entry.dtype for entry in mg.Tape.of(loss).entries} == {np.dtype(dtype)}
    mg.backward(loss)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {np.dtype(dtype)}


def build_from(factories: list[tuple[str, Callable[[nn.ParamGetter], Any]]], chosen: list[str]) -> dict[str, Array]:
    """Build only these layers, as a rank would; return their parameters by name."""
    getter = nn.ParamGetter(seed=5)
    for name, factory in factories:
        if name in chosen:
            factory(getter)
    return {name: p.data for name, p in getter.made.items()}


def test_the_layers_of_a_gpt_make_the_gpt() -> None:
    getter = nn.ParamGetter(seed=5)
    layers = [factory(getter) for _, factory in gpt.layers(CONFIG)]
    assert [name for name, _ in gpt.layers(CONFIG)] == ["embed", "block0", "block1", "head"]
    model = GPT(CONFIG, seed=5)
    assert set(getter.made) == set(dict(model.named_parameters()))
    x: Any = IDS
    for layer in layers:
        x = layer(x)
    np.testing.assert_array_equal(x.data, model(IDS).data)


@pytest.mark.parametrize("chosen", [["embed"], ["block1"], ["head"], ["block0", "head"]])
def test_a_rank_that_builds_its_own_layers_gets_the_values_of_the_whole(chosen: list[str]) -> None:
    whole = GPT(CONFIG, seed=5).state_dict()
    part = build_from(gpt.layers(CONFIG), chosen)
    assert part
    for name, values in part.items():
        np.testing.assert_array_equal(values, whole[name])


def test_the_head_is_tied_to_the_embedding() -> None:
    model = model_of()
    embedding, head = model.layers[0], model.layers[-1]
    assert isinstance(embedding, gpt.GPTEmbedding)
    assert isinstance(head, gpt.GPTHead)
    assert head.token is embedding.token.weight
    assert [p.name for p in model.parameters()].count("embed.token.weight") == 1
    calls: list[str] = []
    mg.backward_with_hooks(mg.cross_entropy(model(IDS), IDS), on_grad_ready=lambda p: calls.append(p.name))
    assert sorted(calls) == sorted(p.name for p in model.parameters())
    assert calls[-1] == "embed.token.weight"  # its last use is the embedding


def test_gpt_sees_no_later_token() -> None:
    model = model_of()
    later = IDS.copy()
    later[:, 4:] = (later[:, 4:] + 1) % 11
    np.testing.assert_array_equal(model(IDS).data[:, :4], model(later).data[:, :4])


def test_initial_values_are_those_of_gpt2() -> None:
    model = GPT(GPTConfig(num_layers=8))
    params = dict(model.named_parameters())
    assert params["embed.token.weight"].data.std() == pytest.approx(0.02, rel=0.02)
    assert params["block7.up.weight"].data.std() == pytest.approx(0.02, rel=0.02)
    assert params["block7.down.weight"].data.std() == pytest.approx(0.005, rel=0.02)
    assert params["block7.attention.out.weight"].data.std() == pytest.approx(0.005, rel=0.02)
    with mg.no_grad():
        loss = mg.cross_entropy(model(IDS), IDS + 100).item()  # no token repeats its input
    assert loss == pytest.approx(np.log(256), rel=0.02)


def test_a_gpt_drops_in_training_only() -> None:
    model = model_of(GPTConfig(vocab_size=11, context=8, num_layers=2, num_heads=2, width=6, dropout=0.5))
    with pytest.raises(RuntimeError, match=r"dropout 'embed\.drop' draws keyed random numbers"):
        model(IDS)
    outputs = []
    for step in (0, 0, 1):
        with rng.scope(seed=0, step=step):
            outputs.append(model(IDS).data)
            used = rng.current_scope()
            assert used is not None
            assert used.used == {"embed.drop", *(f"block{i}.drop{k}" for i in (0, 1) for k in (1, 2))}
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert (outputs[0] != outputs[2]).any()
    model.eval()
    np.testing.assert_allclose(model(IDS).data, plain_gpt(model.state_dict(), IDS, 2, 2), rtol=1e-10)


def test_micro_batches_with_dropout_make_the_batch() -> None:
    model = model_of(GPTConfig(vocab_size=11, context=8, num_layers=1, num_heads=2, width=6, dropout=0.3))
    with rng.scope(seed=0, step=0):
        whole = model(IDS).data
    with rng.scope(seed=0, step=0):
        parts = []
        for start in (0, 1, 2):
            with rng.offset(start):
                parts.append(model(IDS[start : start + 1]).data)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-12)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence must be at most as long as the context, got 9 and 8"):
        model_of()(np.zeros((1, 9), int))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 6, "num_heads": 4}, "width must be divisible by num_heads, got 6 and 4"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, got -1"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)


def test_mlp_is_plain_numpys() -> None:
    model = MLP((3, 5, 4, 2), dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((6, 3))
    h = x
    for i in range(3):
        p = dict(model.named_parameters())
        h = h @ p[f"fc{i}.weight"].data + p[f"fc{i}.bias"].data
        h = np.maximum(h, 0) if i < 2 else h
    np.testing.assert_allclose(model(mg.Tensor(x)).data, h, rtol=1e-12)
    assert (h < 0).any()  # no relu after the last layer


def test_the_layers_of_an_mlp_make_the_mlp() -> None:
    whole = MLP((3, 5, 2), seed=5).state_dict()
    assert [name for name, _ in mlp.layers((3, 5, 2))] == ["fc0", "fc1"]
    part = build_from(mlp.layers((3, 5, 2)), ["fc1"])
    assert set(part) == {"fc1.weight", "fc1.bias"}
    np.testing.assert_array_equal(part["fc1.weight"], whole["fc1.weight"])


def test_an_mlp_drops_after_every_layer_but_the_last() -> None:
    model = MLP((3, 5, 4, 2), dropout=0.5)
    with rng.scope(seed=0, step=0):
        model(mg.Tensor(np.ones((2, 3), np.float32)))
        scope = rng.current_scope()
    assert scope is not None
    assert scope.used == {"fc0.drop", "fc1.drop"}


@pytest.mark.parametrize("widths", [[], [3]])
def test_an_mlp_needs_two_widths(widths: list[int]) -> None:
    with pytest.raises(
        ValueError, match=rf"an MLP needs an input and an output width, got \[{'3' if widths else ''}\]"
    ):
        MLP(widths)


def test_a_gpt_learns() -> None:
    """All parts together: a sequence is learnt by heart."""
    model = models.GPT(CONFIG)
    optimizer = mg.optim.Optimizer(model.parameters(), mg.optim.AdamW(lr=1e-2))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = mg.cross_entropy(model(IDS[:1, :-1]), IDS[:1, 1:])
        mg.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert losses[-1] < 0.2


def test_token_ids_may_be_a_list() -> None:
    model = model_of()
    np.testing.assert_array_equal(model(IDS.tolist()).data, model(IDS).data)
    for wrong in (IDS[0], IDS[0].tolist(), 3):
        with pytest.raises(ValueError, match=r"token ids must be \(B, T\), got shape"):
            model(wrong)
