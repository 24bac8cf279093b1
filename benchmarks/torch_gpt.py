"""The GPT of `minigrad.models` in PyTorch, as it is ordinarily written: the peer of benchmarks and tests.

It imports nothing of minigrad, which would set the allocator of a process that is here to measure PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that everybody gives it


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = (batch, time, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, gelu: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class TorchGPT(nn.Module):
    """Token ids (B, T) -> logits (B, T, vocab_size); the sizes are called as in `GPTConfig`.

    Args:
        gelu: "tanh", as minigrad has it, or "none" for the exact one.
    """

    def __init__(
        self, *, vocab_size: int, context: int, num_layers: int, num_heads: int, width: int, gelu: str = "tanh"
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, num_heads, gelu) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the predictions."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def adamw(self, *, lr: float, fused: bool | None = None) -> torch.optim.AdamW:
        """Return AdamW with the settings of minigrad's, which decays only what has two or more axes."""
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.01},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=fused)

    def by_minigrad_name(self, value_of: Callable[[Tensor], Any] = lambda p: p.data) -> dict[str, Any]:
        """Return `value_of` each parameter under its name in minigrad, a view in minigrad's layout."""
        named = {"embed.token.weight": value_of(self.token.weight), "embed.position": value_of(self.position)}
        tops = {f"block{i}": block for i, block in enumerate(self.blocks)} | {"head.norm": self.norm}
        for top, tree in tops.items():
            for path, module in tree.named_modules(prefix=top):
                for name, p in module.named_parameters(recurse=False):
                    if isinstance(module, nn.LayerNorm) and name == "weight":
                        named[f"{path}.gain"] = value_of(p)
                    else:  # minigrad's weights are (num_in, num_out)
                        named[f"{path}.{name}"] = value_of(p).T if p.ndim == 2 else value_of(p)
        return named

    def load(self, values: Mapping[str, Any]) -> None:
        """Copy the values of minigrad's `state_dict`.

        Raises:
            ValueError: it is of a GPT with other parameters.
        """
        named = self.by_minigrad_name()
        if named.keys() != values.keys():
            raise ValueError(f"the models differ: {sorted(named.keys() ^ values.keys())}")
        for name, value in named.items():
            value.copy_(torch.from_numpy(values[name]))
