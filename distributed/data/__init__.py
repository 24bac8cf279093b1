"""Samples as a stream with a position, and the files of tokens that they come from."""

from distributed.data.batches import Sampler, TokenBatches, validation_batches
from distributed.data.token_files import Tokens, read_tokens, write_tokens

__all__ = ["Sampler", "TokenBatches", "Tokens", "read_tokens", "validation_batches", "write_tokens"]
