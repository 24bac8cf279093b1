"""PyTorch's numbers: every op, and a GPT in training. Run by `make test-peers`, as PyTorch is a large download.

PyTorch is loaded by the tests that need it, never while tests are collected.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import op_rows_math
import op_rows_nn
import pytest
from op_table import Row, is_array, is_float

import minigrad as mg
from minigrad import ops
from minigrad.lr_schedule import scaled
from minigrad.models import GPT, GPTConfig
from minigrad.optim import SGD, AdamW, Optimizer
from minigrad.optim.muon import Muon
from minigrad.optim.param_groups import Group, Groups

pytestmark = pytest.mark.peers

ROWS = op_rows_math.ROWS + op_rows_nn.ROWS
SIZES = {"vocab_size": 65, "context": 64, "num_layers": 2, "num_heads": 4, "width": 128}
BATCH = 6


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def peers(torch: ModuleType) -> ModuleType:
    import torch_counterparts

    return torch_counterparts


def to_torch(torch: ModuleType, x: Any) -> Any:
    """Return a tensor with a copy of the array, a leaf if it is floating point; numbers stay."""
    return torch.tensor(x, requires_grad=is_float(x)) if is_array(x) else x


def random_text() -> tuple[Any, Any]:
    text = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (BATCH, SIZES["context"] + 1))
    return text[:, :-1].copy(), text[:, 1:].copy()


def same_gpts(torch: ModuleType, dtype: Any) -> tuple[GPT, Any]:
    """Return a GPT and its peer with the same weights."""
    from torch_gpt import TorchGPT

    model = GPT(GPTConfig(**SIZES), dtype=dtype)
    peer = TorchGPT(**SIZES).to(torch.from_numpy(np.empty(0, dtype)).dtype)
    peer.load(model.state_dict())
    return model, peer


def test_every_op_has_a_counterpart_or_a_reason(peers: ModuleType) -> None:
    assert set(peers.COUNTERPARTS) | set(peers.WITHOUT) == set(ops.__all__)
    assert not set(peers.COUNTERPARTS) & set(peers.WITHOUT)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.name}-{i}" for i, row in enumerate(ROWS)])
def test_value_and_gradients_of_an_op_are_torchs(row: Row, torch: ModuleType, peers: ModuleType) -> None:
    if row.name in peers.WITHOUT:
        pytest.skip(f"PyTorch has no {row.name}: {peers.WITHOUT[row.name]}")
    if row.name not in peers.COUNTERPARTS:
        pytest.fail(f"torch_counterparts.py says nothing of {row.name}")
    args = row.sample()
    tensors = [mg.Tensor(x, requires_grad=True) if is_float(x) else x for x in args]
    theirs = [to_torch(torch, x) for x in args]
    y, expected = row.op(*tensors, **row.kwargs), peers.COUNTERPARTS[row.name](*theirs, **row.kwargs)
    np.testing.assert_allclose(y.data, expected.detach().numpy(), rtol=1e-9, atol=1e-12)

    cotangent = np.asarray(np.random.default_rng(8).standard_normal(y.shape))
    mg.backward_with_grad(y, cotangent)
    expected.backward(torch.from_numpy(cotangent))
    for i, x in enumerate(args):
        if is_float(x):
            np.testing.assert_allclose(
                tensors[i].grad, theirs[i].grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=f"gradient of argument {i}"
            )


def test_gradients_of_a_gpt_are_torchs(torch: ModuleType) -> None:
    model, peer = same_gpts(torch, np.float64)
    x, y = random_text()
    loss, expected = mg.cross_entropy(model(x), y), peer.loss(torch.from_numpy(x), torch.from_numpy(y))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    mg.backward(loss)
    expected.backward()
    peer_grads = peer.by_minigrad_name(lambda p: p.grad)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.grad, peer_grads[name].numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    # At the higher rate AdamW makes 1e-4 of float32's rounding, in PyTorch as much as here, and 1e-11 of float64's.
    ("dtype", "lr", "tolerance"),
    [(np.float32, 1e-4, 1e-5), (np.float64, 1e-3, 1e-9)],
)
def test_a_gpt_learns_as_torchs(torch: ModuleType, dtype: Any, lr: float, tolerance: float) -> None:
    model, peer = same_gpts(torch, dtype)
    optimizer, peer_optimizer = Optimizer(model.parameters(), AdamW(lr)), peer.adamw(lr=lr)
    x, y = random_text()
    losses, expected = [], []
    for _ in range(50):
        optimizer.zero_grad()
        loss = mg.cross_entropy(model(x), y)
        mg.backward(loss)
        optimizer.step()
        losses.append(loss.item())

        peer_optimizer.zero_grad()
        peer_loss = peer.loss(torch.from_numpy(x), torch.from_numpy(y))
        peer_loss.backward()
        peer_optimizer.step()
        expected.append(peer_loss.item())
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=tolerance)


def test_a_peer_of_another_size_is_refused(torch: ModuleType) -> None:
    _, peer = same_gpts(torch, np.float32)
    deeper = GPT(GPTConfig(**{**SIZES, "num_layers": 3}))
    with pytest.raises(ValueError, match=r"the models differ: \['block2.attention.out.bias', "):
        peer.load(deeper.state_dict())


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_muon_steps_as_pytorchs(torch: ModuleType, shape: tuple[int, int]) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with PyTorch 2.9")
    generator = np.random.default_rng(0)
    w = mg.Parameter(generator.standard_normal(shape).astype(np.float32), "w")
    peer = torch.nn.Parameter(torch.tensor(w.data.T.copy()))  # PyTorch's weights are (outputs, inputs)
    optimizer = Optimizer([w], Muon(0.1, weight_decay=0.1))
    peer_optimizer = torch.optim.Muon([peer], lr=0.1, weight_decay=0.1)
    for _ in range(4):
        w.grad = generator.standard_normal(shape).astype(np.float32)
        peer.grad = torch.tensor(w.grad.T.copy())
        optimizer.step()
        peer_optimizer.step()
        # PyTorch makes its products in bfloat16: 3 digits of a change of about 0.1 / sqrt(16).
        np.testing.assert_allclose(w.data, peer.detach().numpy().T, atol=3e-3)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_groups_step_as_pytorchs(torch: ModuleType, name: str) -> None:
    """Each group has its own learning rate and weight decay, and one schedule scales them all."""
    model, _ = same_gpts(torch, np.float64)
    own_names = dict(model.named_parameters())
    kinds = {"SGD": (SGD, {"momentum": 0.9}), "AdamW": (AdamW, {"betas": (0.8, 0.95)})}
    kind, options = kinds[name]
    lr = 0.01

    def decay(step: int) -> float:
        return 0.5**step

    rule = Groups(
        kind(scaled(decay, lr), weight_decay=0.1, **options),
        Group(model.layers[0].parameters(), kind(scaled(decay, 10 * lr), weight_decay=0.0, **options)),
        Group(lambda p: p.ndim < 2, kind(scaled(decay, 0.1 * lr), weight_decay=0.3, **options)),
    )
    optimizer = Optimizer(model.parameters(), rule, decays=lambda p: True)
    theirs = {key: torch.nn.Parameter(torch.tensor(p.data.copy())) for key, p in own_names.items()}
    embed = [p for key, p in theirs.items() if key.startswith("embed.")]
    small = [p for key, p in theirs.items() if not key.startswith("embed.") and p.ndim < 2]
    rest = [p for key, p in theirs.items() if not key.startswith("embed.") and p.ndim >= 2]
    assert embed
    assert small
    assert rest
    peer_optimizer = getattr(torch.optim, name)(
        [
            {"params": rest, "lr": lr, "weight_decay": 0.1},
            {"params": embed, "lr": 10 * lr, "weight_decay": 0.0},
            {"params": small, "lr": 0.1 * lr, "weight_decay": 0.3},
        ],
        **({"lr": lr} | options),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(peer_optimizer, decay)
    generator = np.random.default_rng(0)
    for _ in range(5):
        for key, p in own_names.items():
            p.grad = generator.standard_normal(p.shape)
            theirs[key].grad = torch.tensor(np.array(p.grad))
        optimizer.step()
        optimizer.zero_grad()
        peer_optimizer.step()
        schedule.step()
    for key, p in own_names.items():
        np.testing.assert_allclose(p.data, theirs[key].detach().numpy(), rtol=1e-12, atol=1e-14, err_msg=key)
