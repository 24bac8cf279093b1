"""Text that a GPT writes: one token at a time, each drawn from what the model expects after all before it.

Keys and values of what was read are kept, so a token costs one position's forward and not the whole window's. Positions
count from the window's start, so once the text is longer than the context each new token moves all of them: from there
on the window is read anew for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigrad.arguments import as_int, check_sizes
from minigrad.autodiff.mode import no_grad
from minigrad.backend import Array, to_host, xp_of
from minigrad.models.gpt import GPT, GPTEmbedding, GPTHead
from minigrad.nn import KeyValueCache
from minigrad.tensor import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen among those that the model expects.

    Attributes:
        temperature: below 1 prefers what is likely, above 1 evens out; 0 always takes the likeliest.
        top_k: only the k likeliest, None for all.
        top_p: only the likeliest that together have this probability, from above 0 to 1.
        seed: start of the random numbers; the n-th token of a seed draws the same one in every run.
    Raises:
        ValueError: a value is out of its range.
    Source: top-p: Holtzman et al. 2020, The curious case of neural text degeneration.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None:
            check_sizes("Sampling", top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {self.seed}")

    def choose(self, logits: Array, number: int) -> int:
        """Choose a token.

        Args:
            logits: (vocab_size,) on the host.
            number: of this token in the text; it keys the random number.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        p = self.probabilities(logits)
        draw = np.random.Generator(np.random.Philox(key=[self.seed, number])).random()
        return int(min(np.searchsorted(p.cumsum(), draw, side="right"), np.flatnonzero(p)[-1]))

    def probabilities(self, logits: Array) -> Array:
        """Return what each token is drawn with, (vocab_size,) float64.

        The temperature must be above 0.
        """
        scores = logits.astype(np.float64)
        p = np.exp((scores - scores.max()) / self.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")  # likeliest first
        before = np.concatenate([[0.0], p[order].cumsum()[:-1]])  # of all that are likelier
        keep = before < self.top_p
        if self.top_k is not None:
            keep[self.top_k :] = False
        p[order[~keep]] = 0
        return p / p.sum()


def generate(
    model: GPT, prompt: Sequence[int] | Array, *, sampling: Sampling | None = None, use_cache: bool = True
) -> Iterator[int]:
    """Yield the tokens that the model writes after `prompt`.

    There is no end: take as many as you want.

        text = list(itertools.islice(generate(model, prompt), 100))

    Args:
        model: as a whole on this process; it is asked without dropout, and left as it was.
        prompt: token ids, at least one; of a longer one the last `context` are read.
        use_cache: False reads the whole window for each token; gives the same text, up to rounding.
    Raises:
        ValueError: the prompt is empty.
        IndexError: a token of it is not in the vocabulary.
    """
    reader = Reader(model.layers, model.config.context)
    read = reader.read if use_cache else lambda tokens: Reader(model.layers, model.config.context).read(tokens)
    return go_on(read, prompt, sampling or Sampling())


def go_on(read: Callable[[Sequence[int]], Array], prompt: Sequence[int] | Array, sampling: Sampling) -> Iterator[int]:
    """Yield tokens after `prompt` without end.

    Each is drawn from what `read` expects after all before it.

    Args:
        read: tokens -> logits (vocab_size,), on the host; each call has one token more.
    Raises:
        ValueError: the prompt is empty.
        TypeError: it is neither bytes nor integers.
    """
    if isinstance(prompt, str) or any(as_int(token) is None for token in prompt):
        raise TypeError(f"a prompt is bytes, as text.encode() gives, or the numbers of tokens, got {prompt!r}")
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ValueError("a prompt needs at least one token, got none")
    for number in range(2**63):
        token = sampling.choose(read(tokens), number)
        yield token
        tokens.append(token)


class Reader:
    """Layers of a GPT that read a growing text, with what they have kept of it.

    Args:
        layers: embedding, blocks and head, in order.
        context: of the model.
    Attributes:
        caches: one for each layer but embedding and head; their memory is 2 * blocks * context * width numbers.
    """

    def __init__(self, layers: Iterable[Any], context: int) -> None:
        layers = list(layers)
        self._layers, self._context = layers, context
        self._length = 0  # of the text that the caches are of
        self._blocks = [layer for layer in layers if not isinstance(layer, (GPTEmbedding, GPTHead))]
        self._modules = [module for layer in layers for module in layer.modules()]  # once: it takes as long as a block
        self.caches: list[KeyValueCache] = []

    def read(self, tokens: Sequence[int]) -> Array:
        """Return the logits of what follows `tokens`, (vocab_size,) on the host.

        The tokens begin with those of the last call.
        """
        start = self._length if len(tokens) <= self._context else 0
        if start == 0:
            self.caches = [KeyValueCache(self._context) for _ in self._blocks]
        window = np.asarray([tokens[max(start, len(tokens) - self._context) :]])
        in_training = [module for module in self._modules if module.training]
        for module in in_training:
            module.training = False
        try:
            with no_grad():
                logits = self._logits(window, start)
        finally:
            for module in in_training:
                module.training = True
        self._length = len(tokens) if len(tokens) <= self._context else 0
        return logits

    def through(self, layers: Iterable[Any], x: Any, start: int) -> Tensor:
        """Return what some of the layers make of `x`.

        Args:
            layers: consecutive ones of the model.
            x: token ids, (1, T), or activations, (1, T, width).
            start: place of the first of them in the text.
        """
        caches = dict(zip(self._blocks, self.caches, strict=True))
        for layer in layers:
            if isinstance(layer, GPTEmbedding):
                x = layer(xp_of(layer.position.data).asarray(x), start)
            elif isinstance(layer, GPTHead):
                x = layer(x[:, -1:])
            else:
                x = layer(x, caches[layer])
        return x

    def _logits(self, window: Array, start: int) -> Array:
        return to_host(self.through(self._layers, window, start).data[0, 0])
