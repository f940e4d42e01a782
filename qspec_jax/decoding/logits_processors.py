"""Logits processors: changes of the logits before a token is chosen. Draft and target have the same ones.

Each depends only on the logits and on the tokens before them, so a round that verifies several tokens gives the result of decoding them one
by one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qspec_jax.decoding.compiled import rounded_up
from qspec_jax.decoding.config import GenerationConfig

NOWHERE = np.iinfo(np.int32).max  # an id outside any vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processors:
    """Settings of each row, in the order in which they are applied, which is Hugging Face's; None if no row has one.

    Attributes:
        bias_ids: the ids to whose logits `bias` is added.
        bias: -inf forbids a token.
        repetition_penalty: divides the positive logits of tokens that occur in the prompt or in new tokens, and multiplies the negative
            ones (CTRL, arXiv 1909.05858, section 4.1).
        min_new_tokens: the number of new tokens before which EOS is forbidden.
    """

    bias_ids: Int[Array, "B K"] | None
    bias: Float[Array, "B K"] | None
    repetition_penalty: Float[Array, "B"] | None
    min_new_tokens: Int[Array, "B"] | None

    def __call__(
        self, logits: Float[Array, "B T V"], new: Int[Array, "B"], since: Int[Array, "B V"] | None, eos_token_ids: Int[Array, "E"]
    ) -> Float[Array, "B T V"]:
        """The processed logits of T tokens.

        Args:
            logits: by the model.
            new: the number of new tokens before the first of the T.
            since: since[b, v] is the first column before which id v occurs; needed for a repetition penalty.
            eos_token_ids: -1 is no id.
        """
        column = jnp.arange(logits.shape[1])
        if self.bias is not None:
            add = jax.vmap(lambda row, ids, bias: row.at[:, ids].add(bias.astype(row.dtype), mode="drop"))
            logits = add(logits, self.bias_ids, self.bias)
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty[:, None, None].astype(logits.dtype)
            seen = since[:, None] <= column[:, None]
            logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self.min_new_tokens is not None:
            early = new[:, None] + column < self.min_new_tokens[:, None]
            ends = jnp.zeros(logits.shape[-1], bool).at[jnp.where(eos_token_ids < 0, NOWHERE, eos_token_ids)].set(True, mode="drop")
            logits = jnp.where(early[..., None] & ends, -jnp.inf, logits)
        return logits


def make_processors(*configs: GenerationConfig) -> Processors | None:
    """The processors of rows with these configs, one for each row; None if no config asks for any."""
    biases = [config.logit_bias | dict.fromkeys(config.banned_token_ids, -np.inf) for config in configs]
    width = rounded_up(max(map(len, biases)))
    ids = np.full((len(configs), width), NOWHERE, np.int32)
    values = np.zeros((len(configs), width), np.float32)
    for row, bias in enumerate(biases):
        ids[row, : len(bias)], values[row, : len(bias)] = list(bias), list(bias.values())
    penalty = np.array([config.repetition_penalty for config in configs], np.float32)
    minimum = np.array([config.min_new_tokens for config in configs], np.int32)
    parts = (
        *((ids, values) if width else (None, None)),
        penalty if (penalty != 1).any() else None,
        minimum if minimum.any() else None,
    )
    return None if all(part is None for part in parts) else Processors(*jax.tree.map(jnp.asarray, parts))


def seen_in(tokens: Int[Array, "B S"], n: Int[Array, "B"], vocab_size: int) -> Bool[Array, "B V"]:
    """Which ids are among the first n[b] tokens of each row."""
    ids = jnp.where(jnp.arange(tokens.shape[1]) < n[:, None], tokens, NOWHERE)
    return jax.vmap(lambda row: jnp.zeros(vocab_size, bool).at[row].set(True, mode="drop"))(ids)


def seen_since(seen: Bool[Array, "B V"], tokens: Int[Array, "B T"]) -> Int[Array, "B V"]:
    """The first column before which each id occurs, with tokens[b, i] before column i + 1; `NOWHERE` for an id that does not."""
    column = jnp.arange(1, tokens.shape[1] + 1)
    first = jnp.where(seen, 0, NOWHERE)
    return jax.vmap(lambda row, ids: row.at[ids].min(column))(first, tokens)
