"""What caches share that forget tokens for good: they are lossy, and no draft can take tokens from them."""

from typing import ClassVar

from jaxtyping import Array, Int

from qspec_jax.caches.cache import Cache, Gives, KeysValues
from qspec_jax.errors import InputError


class EvictingCache(Cache):
    """A subclass is a frozen dataclass registered as a pytree. row_capacity: static; the most tokens of a row, forgotten or not. name: in
    the registry."""

    row_capacity: int

    name: ClassVar[str]
    gives: ClassVar[frozenset[Gives]] = frozenset()
    takes_group_size: ClassVar[bool] = False
    trims: ClassVar[bool] = False

    @property
    def capacity(self) -> int:
        return self.row_capacity

    def tokens(self, layer: int, positions: Int[Array, "#R #K T"], batch_rows: Int[Array, "R"] | None = None) -> KeysValues:
        """Raises InputError."""
        raise InputError(
            f"cache {self.name} forgets tokens, and this draft takes tokens from it; give a cache that keeps them, such as int8"
        )
