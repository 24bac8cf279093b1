"""What an attention layer has seen, for text that grows a token at a time: each position's key and value, once."""

from __future__ import annotations

from minigrad.backend import Array, xp_of


class KeyValueCache:
    """Keys and values of the positions seen so far. Its memory is taken at the first ones, for all there can be.

    Args:
        max_length: most positions that it has room for.
    Attributes:
        length: positions seen so far.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._keys_and_values: Array | None = None  # (2, B, heads, max_length, d)

    @property
    def nbytes(self) -> int:
        """Memory that it holds: 2 * B * max_length * width numbers."""
        return 0 if self._keys_and_values is None else int(self._keys_and_values.nbytes)

    def extend(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add the keys and values of T more positions, and return those of all, oldest first.

        Args:
            keys, values: (B, heads, T, d).
        Returns:
            Two views, (B, heads, length, d).
        Raises:
            ValueError: there is no room for so many.
        """
        start, end = self.length, self.length + keys.shape[-2]
        if end > self.max_length:
            raise ValueError(f"this cache has room for {self.max_length} positions, got {end}")
        if self._keys_and_values is None:
            *batch, _, width = keys.shape
            self._keys_and_values = xp_of(keys).empty((2, *batch, self.max_length, width), keys.dtype)
        self._keys_and_values[0, ..., start:end, :] = keys
        self._keys_and_values[1, ..., start:end, :] = values
        self.length = end
        return self._keys_and_values[0, ..., :end, :], self._keys_and_values[1, ..., :end, :]
