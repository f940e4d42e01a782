"""The limits of each row of a batch, on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qspec_jax.checkpoints.tokenizers import padding_from
from qspec_jax.decoding.compiled import rounded_up
from qspec_jax.decoding.config import GenerationConfig, beside_draft
from qspec_jax.decoding.logits_processors import Processors, make_processors
from qspec_jax.models.llama import Llama

# Cost of a draft step relative to verification, if not given or stored; 0.31 to 0.39 on an H100 (docs/measurements/2026-11.md).
DRAFT_COST = 0.35


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of B rows. None where no row has a setting.

    Attributes:
        max_new_tokens: the maximum number of new tokens.
        num_speculative_tokens: the maximum number of drafts in a round.
        eos_token_ids: the ids that end every row; -1 matches none.
        stop: sequences of new tokens that end a row, each right-aligned in L columns, and padded with -1; one of -1 alone matches none.
        processors: changes of the logits.
        min_confidence: a draft whose most likely token has less probability is the row's last in the round.
        draft_cost: see adaptive.py.
        padding_from: the first id that is padding of the vocabulary, and never drafted or generated; None if there is none.
    """

    max_new_tokens: Int[Array, "B"]
    num_speculative_tokens: Int[Array, "B"]
    eos_token_ids: Int[Array, "E"]
    stop: Int[Array, "B K L"] | None = None
    processors: Processors | None = None
    min_confidence: Float[Array, "B"] | None = None
    draft_cost: Float[Array, "B"] | None = None
    padding_from: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def asks_what_was_seen(self) -> bool:
        return self.processors is not None and self.processors.repetition_penalty is not None

    def of_rows(self, rows: slice | Int[np.ndarray, "rows"]) -> Self:
        """The limits of some of the rows."""
        taken = jax.tree.map(lambda x: x[rows], dataclasses.replace(self, eos_token_ids=None))
        return dataclasses.replace(taken, eos_token_ids=self.eos_token_ids)

    def processed(self, logits: Float[Array, "B T V"], new: Int[Array, "B"], since: Int[Array, "B V"] | None) -> Float[Array, "B T V"]:
        """The logits that tokens are chosen from: without padding of the vocabulary, except EOS ids; and see `Processors`."""
        if self.padding_from is not None:
            ids = jnp.arange(logits.shape[-1])
            logits = jnp.where((ids < self.padding_from) | (ids[:, None] == self.eos_token_ids).any(1), logits, -jnp.inf)
        return logits if self.processors is None else self.processors(logits, new, since, self.eos_token_ids)


def make_limits(model: Llama, *configs: GenerationConfig, tokenizer: Any = None) -> Limits:
    """The limits of rows with these configs, one for each row.

    Args:
        model: the target.
        configs: they share their EOS ids. A `draft_cost` that is not given is `DRAFT_COST`.
        tokenizer: only its ids are generated; None: all of the vocabulary are.
    """
    configs = tuple(map(beside_draft, configs))  # an open setting is as for a draft that is given
    eos = () if configs[0].ignore_eos else eos_ids(model, configs[0])

    def column(name: str, dtype: Any) -> Array:
        return jnp.array([getattr(config, name) for config in configs], dtype)

    costs = [(DRAFT_COST if config.draft_cost is None else config.draft_cost) if config.adaptive else 0.0 for config in configs]
    return Limits(
        column("max_new_tokens", jnp.int32),
        column("num_speculative_tokens", jnp.int32),
        jnp.array(eos + (-1,) * (rounded_up(max(1, len(eos))) - len(eos)), jnp.int32),
        _stop_sequences(configs),
        make_processors(*configs),
        column("min_draft_confidence", jnp.float32) if any(config.min_draft_confidence for config in configs) else None,
        jnp.array(costs, jnp.float32) if any(costs) else None,
        None if tokenizer is None else padding_from(tokenizer, model.config.vocab_size),
    )


def eos_ids(model: Llama, config: GenerationConfig) -> tuple[int, ...]:
    """The end-of-sequence ids: the config's own, or the checkpoint's."""
    return model.config.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids


def _stop_sequences(configs: Sequence[GenerationConfig]) -> Int[Array, "B K L"] | None:
    """Stop sequences in the form of `Limits.stop`; None if no row has any."""
    sequences = [config.stop_token_ids for config in configs]
    lengths = [len(sequence) for of_row in sequences for sequence in of_row]
    if not lengths:
        return None
    stop = np.full((len(configs), rounded_up(max(map(len, sequences))), rounded_up(max(lengths))), -1, np.int32)
    for row, of_row in zip(stop, sequences):
        for columns, sequence in zip(row, of_row):
            columns[len(columns) - len(sequence) :] = sequence
    return jnp.asarray(stop)
