"""The arrays of states: their shapes, larger ones, and rows put together and taken apart. All of it also runs where a model is divided."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from qspec_jax.caches.cache import Cache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.drafts.draft import Draft, Prompt
from qspec_jax.models.sharding import divided_over, mesh_of
from qspec_jax.models.viewed import ViewedModel
from qspec_jax.states.pool import Groups, groups_of_layers, without_groups
from qspec_jax.states.state import Reader, Room


def shapes_of(reader: Reader, room: Room, groups: int) -> tuple[dict[str, Any], Any]:
    """Shapes of the own arrays of a state, by their names in `State`, and of its groups in the pool."""
    cache, draft, queries = BEGUN.shapes(reader.target, _in_prefill(reader), cache=reader.cache, room=room)
    pooled = None
    if reader.pool is not None:
        cache = without_groups(cache)
        pooled = jax.tree.map(lambda x: jax.ShapeDtypeStruct((groups, *x.shape[1:]), x.dtype, sharding=x.sharding), reader.pool.groups)
    dtype = jnp.promote_types(reader.model.dtype, jnp.float32)
    logits = jax.ShapeDtypeStruct((1, reader.model.checkpoint_config.vocab_size), dtype)
    return dict(cache=cache, draft=draft, logits=logits, queries=queries, adaptive=None), pooled


def enlarged(reader: Reader, room: Room, cache: Cache | None, draft: Any) -> tuple[Cache | None, Any, float]:
    """Cache, if given, and draft's state with room for more, in which what they hold comes first; and the seconds of compiling."""
    args = reader.target, _in_prefill(reader), cache, draft
    program, seconds = ENLARGE.compile(*args, choice=reader.cache, room=room)
    return *program(*args), seconds


def first_groups(model: ViewedModel, cache: CacheConfig) -> Groups:
    """The arrays of a pool without pages, for a cache that pools."""
    program, _ = POOL.compile(model, cache=cache)
    return program(model)


def concatenated(trees: Sequence[Any]) -> Any:
    """The rows of trees as those of one, in arrays of its own."""
    return divided_over(mesh_of(trees), _concatenated)(*trees)


def row_of(tree: Any, b: int, rows: int) -> Any:
    """Row b of a tree of `rows` rows, in arrays of its own; the tree itself if there is one row."""
    return tree if rows == 1 else divided_over(mesh_of(tree), _row)(tree, jnp.int32(b))


def _in_prefill(reader: Reader) -> Draft | None:
    return None if reader.begins is None else reader.begins.in_prefill()


def _empty(target: ViewedModel, cache: CacheConfig, room: Room) -> Cache:
    sizes = dict(batch=1, capacity=room.capacity, num_speculative_tokens=room.appended, dtype=target.model.dtype)
    return cache.empty(target.model.config, **sizes)


def _begun(
    target: ViewedModel, draft: Draft | None, *, cache: CacheConfig, room: Room
) -> tuple[Cache, Any, tuple[Float[Array, "1 Q N H"], ...]]:
    """Cache, draft's state and queries of a row, as they are after prefill, for their shapes."""
    empty, config = _empty(target, cache, room), target.model.config
    if draft is None:
        return empty, (), ()
    queries = jnp.zeros((1, draft.prompt_queries, config.num_heads, config.head_dim), target.model.dtype)
    queries = (queries,) * (config.num_layers if draft.prompt_queries else 0)
    text, n = jnp.zeros((1, room.text), jnp.int32), jnp.ones(1, jnp.int32)
    return empty, draft.begin(Prompt(text, n, empty, queries, capacity=room.capacity, gamma=room.gamma)), queries


def _enlarged(
    target: ViewedModel, draft: Draft | None, held: Cache | None, state: Any, *, choice: CacheConfig, room: Room
) -> tuple[Cache | None, Any]:
    if held is not None:
        held = jax.tree.map(lambda x, first: lax.dynamic_update_slice(x, first, (0,) * x.ndim), _empty(target, choice, room), held)
    shapes = jax.eval_shape(lambda: _begun(target, draft, cache=choice, room=room))[1]

    def put(shape: jax.ShapeDtypeStruct, x: Array) -> Array:
        return jnp.pad(x, [(0, size - own) for size, own in zip(shape.shape, x.shape, strict=True)])

    return held, jax.tree.unflatten(jax.tree.structure(shapes), map(put, jax.tree.leaves(shapes), jax.tree.leaves(state)))


def _first_groups(target: ViewedModel, *, cache: CacheConfig) -> Groups:
    return groups_of_layers(_empty(target, cache, Room(0, 1, 0, 0)).pooled(1, 1))


BEGUN = Compiled(_begun, static_argnames=("cache", "room"))
ENLARGE = Compiled(_enlarged, static_argnames=("choice", "room"))
POOL = Compiled(_first_groups, static_argnames=("cache",))


@jax.jit
def _concatenated(*trees: Any) -> Any:
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *trees)


@jax.jit
def _row(tree: Any, b: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, b, 1), tree)
