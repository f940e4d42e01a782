"""The text of each row, prompt and emitted tokens, as part of a draft's state."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from qspec_jax.drafts.draft import Prompt, RoundResult


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The rows' tokens: n[b] before the pending token, which is at n[b]; later columns are scratch."""

    tokens: Int[Array, "B R"]
    n: Int[Array, "B"]

    @classmethod
    def begin(cls, prompt: Prompt) -> Self:
        """The history after prefill. The pending token is written into it by the first round."""
        more = prompt.capacity - prompt.tokens.shape[1]
        return cls(jnp.pad(prompt.tokens, ((0, 0), (0, more))), prompt.n)

    def written(self, offset: int, tokens: Int[Array, "B T"], count: Int[Array, "B"] | int | None = None) -> Self:
        """The history with the first count[b] of these tokens, by default all of them, from n[b] + offset on, as far as there is room."""
        column = jnp.arange(tokens.shape[1])
        at = self.n[:, None] + offset + column
        if count is not None:
            at = jnp.where(column < count[:, None], at, self.tokens.shape[1])
        put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
        return dataclasses.replace(self, tokens=put(self.tokens, at, tokens))

    def read(self, start: Int[Array, "B"], width: int) -> Int[Array, "B T"]:
        """The tokens from start[b] on; beyond the last column, the last one's."""
        at = jnp.minimum(start[:, None] + jnp.arange(width), self.tokens.shape[1] - 1)
        return jnp.take_along_axis(self.tokens, at, 1)

    def after(self, result: RoundResult) -> Self:
        """The history after a round has emitted its tokens, of which the last one is pending."""
        written = self.written(1, result.tokens, result.count)
        return dataclasses.replace(written, n=self.n + result.count)
