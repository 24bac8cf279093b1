"""What an attention layer has seen, for text that grows a token at a time: each position's key and value, once."""

from __future__ import annotations

from minigrad.backend import Array, xp_of


class KeyValueCache:
    """Keys and values of the positions seen so far.

    Their memory is taken at the first ones, for all there can be.

    Args:
        max_length: most positions that it has room for.
    Attributes:
        length: positions seen so far.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._memory: Array | None = None  # (2, B, heads, max_length, d)

    @property
    def nbytes(self) -> int:
        """Memory that it holds: 2 * B * max_length * width numbers."""
        return 0 if self._memory is None else int(self._memory.nbytes)

    def extend(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add the keys and values of T more positions, and return those of all, the oldest first.

        Args:
            keys, values: (B, heads, T, d).
        Returns:
            Two views, (B, heads, length, d).
        Raises:
            ValueError: there is no room for so many.
        """
        if self._memory is None:
            *batch, _, width = keys.shape
            self._memory = xp_of(keys).empty((2, *batch, self.max_length, width), keys.dtype)
        memory, start = self.room(keys.shape[-2])
        self.length = end = start + keys.shape[-2]
        memory[0, ..., start:end, :] = keys
        memory[1, ..., start:end, :] = values
        return memory[0, ..., :end, :], memory[1, ..., :end, :]

    def room(self, count: int) -> tuple[Array, int]:
        """Return the memory, and where in it the next positions go.

        It is (2, B, heads, max_length, d), once there are some. Who writes them there counts them in `length`.

        Raises:
            ValueError: there is no room for so many.
        """
        assert self._memory is not None
        if self.length + count > self.max_length:
            raise ValueError(f"this cache has room for {self.max_length} positions, got {self.length + count}")
        return self._memory, self.length
