"""What compiles once, and that the compiled decode loop copies, converts and transposes nothing of the cache's size."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import random_model, random_prompts

from qspec_jax.cache import FullCache, HierarchicalCache, empty_cache
from qspec_jax.config import GenerationConfig
from qspec_jax.decode import CachedModel, decode, start
from qspec_jax.drafts import quantspec
from qspec_jax.generate import DECODE, PREPARE, generate, make_limits
from qspec_jax.prefill import CHUNK_TOKENS, bucket
from qspec_jax.sampling import make_sampler, prompt_keys

# Buckets ---------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 24))
def test_a_bucket_wastes_little(tokens):
    size = bucket(tokens)
    assert size % 64 == 0
    assert 0 <= size - tokens <= tokens // 4 + 63
    assert bucket(size) == size
    assert bucket(tokens + 1) >= size


@pytest.mark.parametrize("tokens", [64, 100, 4096, 5000, 1 << 20])
def test_few_buckets_to_an_octave(tokens):
    sizes = {bucket(n) for n in range(tokens + 1, 2 * tokens + 1, max(1, tokens // 4096))}
    assert len(sizes) <= 5
    # Prefill works in chunks of the largest power of two that divides the bucket.
    assert all(min(CHUNK_TOKENS, size & -size) >= 64 for size in sizes)


# Executables -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations():
    """Everything that XLA compiles from here on, by the seconds it took."""
    seen = []

    def listen(event: str, seconds: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_prompts_of_a_bucket_compile_once(compilations):
    model = random_model(jnp.float32, vocab_size=61, num_hidden_layers=1)  # shapes that no other test has
    draft = quantspec(model)

    def run(length: int, key: int = 0, **settings):
        config = GenerationConfig(**({"max_new_tokens": 5, "group_size": 4, "eos_token_ids": (3,), "temperature": 1.0} | settings))
        before = len(PREPARE.executables), len(DECODE.executables), len(compilations)
        out = generate(model, random_prompts([length], 61), config=config, draft=draft, key=jax.random.key(key))
        grown = len(PREPARE.executables) - before[0], len(DECODE.executables) - before[1]
        return grown, out.stats.compile_s, len(compilations) - before[2]

    grown, seconds, compiled = run(7)
    assert grown == (1, 1) and seconds > 0 and compiled >= 2
    for length in (1, 2, 63, 64):
        for settings in ({}, {"max_new_tokens": 64}, {"max_new_tokens": 1}, {"temperature": 0.3}, {"eos_token_ids": (5,)}):
            assert run(length, length, **settings) == ((0, 0), 0.0, 0), (length, settings)
    assert run(65)[0] == run(64, max_new_tokens=65)[0] == (1, 1)


# The loop --------------------------------------------------------------------------------------------------------------

CAPACITY = 1 << 16
BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\w+\[[\d,]*\]\S*) ([\w\-]+)\((.*)$")
# These name memory that there is already, and those write part of their first operand in place (where XLA cannot, it puts a copy
# before them, which is found).
NOTHING_NEW = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier"}
IN_PLACE = {"dynamic-update-slice", "scatter"}


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


def faults(kind: str, batch: int, gamma: int, *, temperature: float = 0.0, donate: bool = True) -> list[str]:
    """What is wrong with the compiled decode loop over a large cache."""
    # Heads of 64: where they are much smaller, the logits of attention are of the cache's size too.
    model = random_model(jnp.float32, head_dim=64)
    config = GenerationConfig(
        method="quantspec" if gamma else "autoregressive", cache=kind, num_speculative_tokens=gamma, group_size=64, temperature=temperature
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
    compiled = loop.lower(CachedModel(model, 2), draft, sampler, state, limits, jnp.int32(9)).compile()

    size = state.cache.num_bytes
    parts = state.cache.layers if kind == "full" else [(layer.keys, layer.values) for layer in state.cache.layers]
    found = large_operations(compiled.as_text(), min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts)))
    memory = compiled.memory_analysis()
    if memory.temp_size_in_bytes > size / 8:
        found.append(f"{memory.temp_size_in_bytes} bytes of temporaries beside a cache of {size}")
    if memory.alias_size_in_bytes < size:
        found.append(f"only {memory.alias_size_in_bytes} bytes are given back in place, of a cache of {size}")
    return found


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["int8", "full"])
def test_the_loop_makes_nothing_of_cache_size(kind, batch, gamma):
    assert faults(kind, batch, gamma) == []


def test_nor_does_it_when_it_samples():
    assert faults("int8", 1, 4, temperature=1.0) == []


def test_a_cache_that_is_not_donated_is_seen():
    assert any("given back" in fault for fault in faults("int8", 1, 4, donate=False))


@pytest.mark.parametrize(("kind", "cache"), [("int8", HierarchicalCache), ("full", FullCache)])
def test_a_cache_that_is_moved_is_seen(monkeypatch, kind, cache):
    """Planted: every round moves all that is cached by one place."""
    flush = cache.flush
    roll = lambda layers: jax.tree.map(lambda x: jnp.roll(x, 1, 2), layers)
    monkeypatch.setattr(cache, "flush", lambda self: flush(dataclasses.replace(self, layers=roll(self.layers))))
    assert faults(kind, 1, 0)
