"""The features of a text's first tokens and of its most recent ones, from which a head can read its window again."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeptFeatures:
    """Fused features of the tokens of each row: those of the first tokens stay, those of the most recent ones are in a ring.

    Zeros everywhere mean that none are known.

    Attributes:
        hidden: the features, those of the `sinks` first tokens before the ring.
        origin: the token that counts as the first: 0, unless features of earlier ones were not known.
        since: from this token on the features of all are known, as far as the ring holds them.
        until: the number of tokens up to the last one whose features are known.
        sinks: how many of the first tokens stay.
    """

    hidden: Float[Array, "B W D"]
    origin: Int[Array, "B"]
    since: Int[Array, "B"]
    until: Int[Array, "B"]
    sinks: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def none(cls, batch: int, size: int, channels: int, dtype: jnp.dtype, *, sinks: int) -> Self:
        """No features, with room for those of `size` tokens, the first ones included."""
        zero = jnp.zeros(batch, jnp.int32)
        return cls(jnp.zeros((batch, size, channels), dtype), zero, zero, zero, sinks)

    @property
    def recent(self) -> Int[Array, "B"]:
        """The token after the first ones from which on features are held, up to `until`."""
        return jnp.maximum(jnp.maximum(self.origin + self.sinks, self.since), self.until - self._ring)

    def of(self, positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The features of these tokens; they mean nothing where they are not held."""
        return jnp.take_along_axis(self.hidden, self._places(positions)[..., None], 1)

    def put(
        self,
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        begin: Int[Array, "B"],
        start: Int[Array, "B"],
        until: Int[Array, "B"],
    ) -> Self:
        """With the features of the tokens begin[b] to until[b] - 1, after which nothing is known. A row without such tokens stays.

        Args:
            hidden: features.
            positions: of their tokens; those before begin[b] and from until[b] on are left out.
            begin, until: see above.
            start: from this token on the features of all are given, of which the ring has room for all; before it those of first tokens.
        """
        origin = self.origin
        # Where features before `begin` are missing, or those of first tokens after it, the text counts from `start` on.
        whole = (start == begin) | (origin == 0) | (begin >= origin + self.sinks)
        joins = (origin <= begin) & (begin <= self.until) & whole
        since = jnp.where(joins & (start == begin), jnp.minimum(begin, self.recent), start)
        after = dataclasses.replace(self, origin=jnp.where(joins, origin, start), since=since, until=until)
        given = (positions >= jnp.maximum(begin, after.origin)[:, None]) & (positions < until[:, None])
        places = jnp.where(given, after._places(positions), self.hidden.shape[1])
        written = jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))(self.hidden, hidden.astype(self.hidden.dtype), places)
        origin, since, until = (
            jnp.where(until > begin, getattr(after, name), getattr(self, name)) for name in ("origin", "since", "until")
        )
        return KeptFeatures(written, origin, since, until, self.sinks)

    @property
    def _ring(self) -> int:
        return self.hidden.shape[1] - self.sinks

    def _places(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Where the features of tokens are in `hidden`."""
        number = jnp.maximum(positions - self.origin[:, None], 0)
        return jnp.where(number < self.sinks, number, self.sinks + (number - self.sinks) % self._ring)
