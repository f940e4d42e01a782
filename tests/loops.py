"""The compiled decode loop, and whether it copies, converts or transposes anything of the cache's size."""

import math
import re

import jax
import jax.numpy as jnp
from runs import random_model

from qspec_jax.cache import FullCache, empty_cache
from qspec_jax.config import GenerationConfig
from qspec_jax.decode import CachedModel, DecodeState, decode, start
from qspec_jax.drafts import quantspec
from qspec_jax.generate import make_limits
from qspec_jax.sampling import make_sampler, prompt_keys

CAPACITY = 1 << 16
BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\w+\[[\d,]*\]\S*) ([\w\-]+)\((.*)$")
# These name memory that there is already, and those write part of their first operand in place (where XLA cannot, it puts a copy
# before them, which is found). What a kernel makes besides counts among the temporaries.
NOTHING_NEW = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier"}
IN_PLACE = {"dynamic-update-slice", "scatter", "custom-call"}


def large_operations(hlo: str, least: int) -> list[str]:
    """Operations inside the loops of a compiled module that make an array of at least so many bytes."""
    computations: dict[str, list[re.Match]] = {}
    entry = body = None
    for line in hlo.splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            body = computations.setdefault(opening[2], [])
            entry = opening[2] if opening[1] else entry
        elif found := INSTRUCTION.match(line):
            body.append(found)
    large, seen = [], set()

    def visit(name: str, in_loop: bool):
        if (name, in_loop) in seen:
            return
        seen.add((name, in_loop))
        for instruction in computations[name]:
            _, _, shape, operation, rest = instruction.groups()
            called = re.findall(r"(?:body|to_apply|calls|branch_computations|true_computation|false_computation)=\{?%?([\w.\-]+)", rest)
            if operation == "fusion":
                operation = next(inner[4] for inner in computations[called[0]] if inner[1])
            elif operation in ("while", "call", "conditional"):
                for each in called:
                    visit(each, in_loop or operation == "while")
            sizes = [
                math.prod(map(int, filter(None, d.split(",")))) * BITS.get(t, 0) // 8 for t, d in re.findall(r"(\w+)\[([\d,]*)\]", shape)
            ]
            if in_loop and max(sizes, default=0) >= least and operation not in NOTHING_NEW | IN_PLACE:
                large.append(f"{operation} {shape}")

    visit(entry, False)
    return large


def compiled_loop(
    kind: str,
    batch: int,
    gamma: int,
    *,
    dtype=jnp.float32,
    head_dim: int = 64,
    temperature: float = 0.0,
    donate: bool = True,
    place=lambda x: x,
    **model_settings: int,
) -> tuple[jax.stages.Compiled, DecodeState]:
    """The decode loop over a large cache, and the shapes of its state. place: what to make of each argument first."""
    # Heads of 64: where they are much smaller, the logits of attention are of the cache's size too.
    model = random_model(dtype, head_dim=head_dim, **model_settings)
    config = GenerationConfig(
        method="quantspec" if gamma else "autoregressive",
        cache=kind,
        num_speculative_tokens=gamma,
        group_size=head_dim,
        temperature=temperature,
    )
    sampler, limits, draft = make_sampler(config), make_limits(model, config, batch), quantspec(model) if gamma else None

    def begin():
        settings = dict(batch=batch, capacity=CAPACITY, num_speculative_tokens=gamma, dtype=model.dtype)
        cache = empty_cache(model.config, config.cache_config, **settings)
        return start(cache, jnp.zeros(batch, jnp.int32), prompt_keys(jax.random.key(0), batch), limits, max_new_tokens=256, gamma=gamma)

    # A function of its own, since jit remembers what it has traced and the tests plant errors. Shapes alone: nothing is allocated.
    afresh = lambda target, draft, sampler, state, limits, rounds: decode(target, draft, sampler, state, limits, rounds)
    loop = jax.jit(afresh, donate_argnums=3 if donate else ())
    state = jax.eval_shape(begin)
    args = jax.tree.map(place, (CachedModel(model, 2), draft, sampler, state, limits, jnp.int32(9)))
    return loop.lower(*args).compile(), state


def faults(kind: str, batch: int, gamma: int, **settings) -> list[str]:
    """What is wrong with the compiled decode loop over a large cache."""
    return faults_of(*compiled_loop(kind, batch, gamma, **settings))


def faults_of(compiled: jax.stages.Compiled, state: DecodeState) -> list[str]:
    size = state.cache.num_bytes
    parts = state.cache.layers if isinstance(state.cache, FullCache) else [(layer.keys, layer.values) for layer in state.cache.layers]
    found = large_operations(compiled.as_text(), min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts)))
    memory = compiled.memory_analysis()
    if memory.temp_size_in_bytes > size / 8:
        found.append(f"{memory.temp_size_in_bytes} bytes of temporaries beside a cache of {size}")
    if memory.alias_size_in_bytes < size:
        found.append(f"only {memory.alias_size_in_bytes} bytes are given back in place, of a cache of {size}")
    return found
