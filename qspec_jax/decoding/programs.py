"""The compiled programs of decoding after prefill: rounds, and the rows of a batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.round import decode
from qspec_jax.decoding.state import LENGTH, DecodeState, Logprobs, replace_rows


def _repeated(rows: DecodeState, batch: int, pages: int | None) -> DecodeState:
    """A batch of copies of the first of these rows, all ended. pages: the size of the pool that they share, without cached tokens."""
    row = jax.tree.map(lambda x: x[:1], rows)
    cache = _rows_like(row.cache, batch) if pages is None else row.cache.pooled(batch, pages)
    rows = _rows_like(dataclasses.replace(row, cache=None), batch)
    return dataclasses.replace(rows, cache=cache, status=jnp.full(batch, LENGTH, jnp.int32))


def _forked(row: DecodeState, keys: Key[Array, "B"]) -> DecodeState:
    """A batch of rows that continue this one, each with its own key."""
    return dataclasses.replace(_rows_like(row, keys.shape[0]), keys=keys)


def _rows_like(row: Any, batch: int) -> Any:
    return jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), row)


def _window(tokens: Array, logprobs: Logprobs | None, starts: Int[Array, "B"], width: int) -> tuple[Array, Logprobs | None]:
    """`width` columns of each row, from starts[b]."""
    take = jax.vmap(functools.partial(lax.dynamic_slice_in_dim, slice_size=width, axis=0))
    return jax.tree.map(lambda x: take(x, starts), (tokens, logprobs))


DECODE = Compiled(decode, passes=True, static_argnames=("one_round",), donate_argnames=("state",))
REPEAT = Compiled(_repeated, static_argnames=("batch", "pages"))
FORK = Compiled(_forked)
REPLACE = Compiled(replace_rows, donate_argnames=("state",))
WINDOW = Compiled(_window, static_argnames=("width",))
