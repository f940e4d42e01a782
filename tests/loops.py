"""The compiled decode loop, and whether it copies, converts or transposes anything of the cache's size; prefill, and what it keeps."""

import dataclasses

import jax
import jax.numpy as jnp
from runs import random_model

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.bench.hlo import large_operations
from qspec_jax.caches.full import FullCache
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.round import decode
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.decoding.state import DecodeState, start
from qspec_jax.drafts import make_draft
from qspec_jax.drafts.draft import Prompt
from qspec_jax.models.viewed import ViewedModel

CAPACITY = 1 << 16


def compiled_loop(
    kind: str,
    batch: int,
    gamma: int,
    *,
    dtype=jnp.float32,
    head_dim: int = 64,
    temperature: float = 0.0,
    draft: str = "quantspec",
    donate: bool = True,
    place=lambda x: x,
    paged: bool = False,
    in_loop=lambda draft: draft,
    **model_settings: int,
) -> tuple[jax.stages.Compiled, DecodeState]:
    """The decode loop over a large cache, and the shapes of its state.

    paged: whether the rows share a pool of pages. place: what to make of each argument first. in_loop: what to make of the draft, before
    that.
    """
    # Heads of 64: where they are much smaller, the logits of attention are of the cache's size too.
    model = random_model(dtype, head_dim=head_dim, max_position_embeddings=CAPACITY, **model_settings)
    config = GenerationConfig(
        draft=draft if gamma else "none",
        cache=kind,
        num_speculative_tokens=gamma,
        group_size=head_dim,
        temperature=temperature,
    )
    sampler, limits = make_sampler(config), make_limits(model, *[config] * batch)
    made = jax.eval_shape(lambda model: in_loop(make_draft(config.draft, model)), model) if gamma else None
    sizes = dict(batch=batch, capacity=CAPACITY, num_speculative_tokens=gamma, dtype=model.dtype)

    def begin_draft(cache):
        if not gamma:
            return ()
        tokens, n = jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)
        queries = jnp.zeros((batch, made.prompt_queries, model.config.num_heads, head_dim), dtype)
        queries = (queries,) * model.config.num_layers if made.prompt_queries else ()
        return made.begin(Prompt(tokens, n, cache, queries, capacity=CAPACITY, gamma=gamma))

    def begin():
        cache = config.cache_config.empty(model.config, **sizes)
        return start(
            cache.pooled(batch, 1 + batch * cache.groups) if paged else cache,
            jnp.zeros(batch, jnp.int32),
            prompt_keys(jax.random.key(0), batch),
            limits,
            max_new_tokens=256,
            gamma=gamma,
            draft=begin_draft(cache),
        )

    # A function of its own, since jit remembers what it has traced and the tests plant errors. Shapes alone: nothing is allocated.
    afresh = lambda target, draft, sampler, state, limits, rounds: decode(target, draft, sampler, state, limits, rounds)
    loop = jax.jit(afresh, donate_argnums=3 if donate else ())
    state = jax.eval_shape(begin)
    args = jax.tree.map(place, (ViewedModel(model, BOTH_PLANES), made, sampler, state, limits, jnp.int32(9)))
    return loop.lower(*args).compile(), state


def faults(kind: str, batch: int, gamma: int, **settings) -> list[str]:
    """What is wrong with the compiled decode loop over a large cache."""
    return faults_of(*compiled_loop(kind, batch, gamma, **settings))


def faults_of(compiled: jax.stages.Compiled, state: DecodeState) -> list[str]:
    """Also where a GPU would stand still before each draft, until the host has read whether there is to be one."""
    size = state.cache.num_bytes
    parts = state.cache.layers if isinstance(state.cache, FullCache) else [(layer.keys, layer.values) for layer in state.cache.layers]
    found = large_operations(compiled.as_text(), min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts)))
    memory = compiled.memory_analysis()
    if memory.temp_size_in_bytes > size / 8:
        found.append(f"{memory.temp_size_in_bytes} bytes of temporaries beside a cache of {size}")
    if memory.alias_size_in_bytes < size:
        found.append(f"only {memory.alias_size_in_bytes} bytes are given back in place, of a cache of {size}")
    if state.gamma and f'"known_trip_count":{{"n":"{state.gamma}"}}' not in compiled.as_text():
        found.append(f"no loop of {state.gamma} trips")
    return found


def prefill_temporaries(kind: str, layers: int, *, place, tokens: int = 1 << 14) -> int:
    """Bytes that prefill of a model in bfloat16 with this number of layers takes beside its weights and the cache."""
    model = random_model(jnp.bfloat16, head_dim=64, num_hidden_layers=layers)
    config = GenerationConfig(
        draft="quantspec" if kind == "int8" else "none", cache=kind, num_speculative_tokens=4, group_size=64, max_new_tokens=256
    )
    engine = Engine.for_configs(model, None, [config], prompt_tokens=tokens)
    prefill = engine.prefill_of([[0] * tokens], make_sampler(config), prompt_keys(jax.random.key(0), 1), make_limits(model, config))
    call = prefill.first  # the only one
    executable, _ = dataclasses.replace(call, args=jax.tree.map(place, call.args)).compile()
    return executable.memory_analysis().temp_size_in_bytes
