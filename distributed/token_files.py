"""The former address of `distributed.data.token_files`, which published pages name."""

from distributed.data.token_files import Tokens, read_tokens, write_tokens

__all__ = ["Tokens", "read_tokens", "write_tokens"]
