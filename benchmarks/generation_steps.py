"""Writing text with a KV cache, ours and PyTorch's: jobs of `engine_jobs.py` for `generation.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

PROMPT = list(range(8))  # token ids
Turn = Callable[[], Any]


def minigrad_text(sizes: dict[str, int], *, use_cache: bool = True) -> Turn:
    """Return what writes until the context is full, the likeliest token each time."""
    from minigrad.models import GPT, GPTConfig
    from minigrad.models.generation import Sampling, generate

    model = GPT(GPTConfig(**sizes))
    num_tokens = sizes["context"] - len(PROMPT)
    sampling = Sampling(temperature=0)
    return lambda: list(islice(generate(model, PROMPT, sampling=sampling, use_cache=use_cache), num_tokens))


def torch_text(sizes: dict[str, int], values: Mapping[str, Any] | None = None) -> Turn:
    """Return the same in PyTorch, with keys and values kept in memory that is there from the start.

    Args:
        values: of minigrad's `state_dict`, in place of random ones.
    """
    import torch
    from torch.nn import functional as F  # noqa: N812
    from torch_gpt import TorchGPT

    torch.set_num_threads(1)
    model = TorchGPT(**sizes).eval()
    if values is not None:
        model.load(values)
    context, num_heads = sizes["context"], sizes["num_heads"]
    head = sizes["width"] // num_heads

    def read(ids: Any, start: int, caches: list[Any]) -> Any:
        """Return the logits of what follows ids, which stand at `start`."""
        time, end = ids.shape[1], start + ids.shape[1]
        x = model.token(ids) + model.position[start:end]
        for block, (keys, values) in zip(model.blocks, caches, strict=True):
            q, k, v = block.attention.qkv(block.norm1(x)).view(1, time, 3, num_heads, head).permute(2, 0, 3, 1, 4)
            keys[:, :, start:end], values[:, :, start:end] = k, v
            y = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=start == 0)
            x = x + block.attention.out(y.transpose(1, 2).reshape(1, time, -1))
            x = x + block.down(F.gelu(block.up(block.norm2(x)), approximate=block.gelu))
        return F.linear(model.norm(x[:, -1:]), model.token.weight)[0, 0]

    @torch.inference_mode()
    def write() -> list[int]:
        caches = [tuple(torch.empty(2, 1, num_heads, context, head)) for _ in model.blocks]
        tokens = list(PROMPT)
        new = PROMPT
        while len(tokens) < context:
            logits = read(torch.tensor([new]), len(tokens) - len(new), caches)
            new = [int(logits.argmax())]
            tokens += new
        return tokens[len(PROMPT) :]

    return write


TEXTS: dict[str, Callable[[dict[str, int]], Turn]] = {
    "minigrad": minigrad_text,
    "minigrad-anew": lambda sizes: minigrad_text(sizes, use_cache=False),
    "torch": torch_text,
}
