"""What caches share that forget tokens for good: they are lossy, and no draft can take tokens from them."""

from typing import ClassVar

from qspec_jax.caches.cache import Cache
from qspec_jax.errors import InputError

MOST_TOKENS = 1 << 16  # that are ever kept of one sort


class EvictingCache(Cache):
    """A subclass is a frozen dataclass registered as a pytree. row_capacity: static; the most tokens of a row, forgotten or not. name: in
    the registry."""

    row_capacity: int

    name: ClassVar[str]

    @property
    def capacity(self):
        return self.row_capacity

    def tokens(self, layer, positions, batch_rows=None):
        """Raises InputError."""
        raise InputError(f"cache {self.name} forgets tokens, and this draft takes tokens from it; give --draft none, or quantspec")


def check_tokens(what: str, tokens: int, least: int = 1) -> None:
    """Raises InputError for a number of tokens that is out of range. what: its name, for the message."""
    if not least <= tokens <= MOST_TOKENS:
        raise InputError(f"cache {what} {tokens} should be from {least} to {MOST_TOKENS} tokens")
