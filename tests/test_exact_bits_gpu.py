"""`exact="bits"` on a GPU: the bits of greedy decoding do not depend on drafts, gamma, the batch, or its other rows."""

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpus import needs_gpu
from runs import random_model

from qspec_jax import demo, load
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import prompt_keys
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.weights import nest_linears, quantize_linears

pytestmark = [pytest.mark.gpu, needs_gpu]

G = 128
SHAPES = {  # two layers
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8),
    "7B": dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32),
}
# As checkpoints of such weights are loaded: what a model is of, and its weights.
CODED = {"8B, INT4": ({"int4_weights": True}, quantize_linears), "8B, nested": ({"nested_weights": True}, nest_linears)}
# Of rows, around what a flush and a chunk of the buffer end with; the last 16 tokens stay within a span of a full cache.
LENGTHS = G - 1, 2 * G - 16, 2 * G + 5, 5 * G, 9 * G - 16, 41 * G + 77


def lengths_of(batch: int) -> tuple[int, ...]:
    """The lengths that rows of a batch have in turn: a large one has no long rows, for which there would be too little memory."""
    return LENGTHS if batch <= 17 else LENGTHS[:-1]


@functools.cache
def layers(shape: str) -> Llama:
    sizes = SHAPES[shape.split(",")[0]] | dict(head_dim=128, num_hidden_layers=2, max_position_embeddings=8192)
    model = random_model(jnp.bfloat16, vocab_size=4096, spread=0.02, tie_word_embeddings=False, **sizes)
    if shape not in CODED:
        return model
    settings, coded = CODED[shape]
    weights = coded(model).weights()
    return Llama(dataclasses.replace(model.checkpoint_config, **settings), lambda path, shape: weights[path])


def target_of(model: Llama, cache: str):
    config = GenerationConfig(draft="none", cache=cache, exact="bits", ignore_eos=True)
    return prepare(model, [[1, 2, 3]], config=config).engine().target


@functools.lru_cache(maxsize=1)  # a 7B's are gigabytes
def rows(shape: str, cache: str, batch: int):
    """A cache of rows of all lengths in turn, with random contents that depend on the row's number modulo the lengths alone."""
    model, every = layers(shape), lengths_of(batch)
    choice, capacity = CacheConfig.parse(cache), (max(every) // G + 3) * G
    empty = choice.empty(model.config, batch=len(every), capacity=capacity, num_speculative_tokens=16, dtype=model.dtype)
    # The contents of a token do not depend on the capacity.
    found = [contents(model.config.num_kv_heads, i, length) for i, length in enumerate(every)]
    keys, values = (jnp.stack([jnp.pad(x[part], ((0, 0), (0, capacity - x.shape[2]), (0, 0))) for x in found]) for part in (0, 1))
    numbers = np.arange(batch) % len(every)
    return jax.tree.map(lambda x: x[numbers], filled(empty, keys, values, jnp.array(every, jnp.int32))), np.array(every)[numbers]


def contents(kv_heads: int, number: int, length: int) -> jax.Array:
    """Keys and values [2 K S H] of the row with this number."""
    return jax.random.normal(jax.random.key(number), (2, kv_heads, length, 128), jnp.bfloat16)


@jax.jit
def filled(cache, keys, values, lengths):
    """The cache with the same keys and values in both layers."""
    return cache.filled(tuple(cache.fill(i, keys, values, lengths) for i in range(2)), lengths)


def passed(step, target, cache, lengths, tokens) -> np.ndarray:
    positions = jnp.asarray(lengths[:, None] + np.arange(tokens.shape[1]))
    return step(target, jnp.asarray(tokens), positions, cache)


@pytest.mark.parametrize(("shape", "cache"), [*itertools.product(SHAPES, ("int8", "full")), ("8B, INT4", "int8"), ("8B, nested", "int8")])
def test_a_token_has_the_same_logits_in_every_pass(shape, cache):
    """Passes have 1 to 16 tokens and batches 1 to 64 rows; a token is at every place in a pass."""
    target, step = target_of(layers(shape), cache), jax.jit(lambda target, *args: target(*args))
    text = np.random.default_rng(0).integers(0, 4096, (len(LENGTHS), 16))
    grown, lengths = rows(shape, cache, len(LENGTHS))
    by_one = []
    for i in range(16):
        logits, grown = passed(step, target, grown, lengths + i, text[:, i : i + 1])
        by_one.append(np.asarray(logits))
    by_one = np.concatenate(by_one, 1)
    assert np.isfinite(by_one).all()
    for T, batch in [(16, 6), (16, 1), (13, 3), (8, 8), (8, 64), (5, 17), (4, 1), (2, 64), (1, 64), (1, 1)]:
        held, lengths = rows(shape, cache, batch)
        for at in range(0, 16, T):
            numbers = np.arange(batch) % len(lengths_of(batch))
            tokens = text[numbers, at : at + T]
            logits, held = passed(step, target, held, lengths + at, tokens)
            expected = by_one[numbers, at : at + T]
            np.testing.assert_array_equal(np.asarray(logits), expected, err_msg=f"{T} tokens from {at}, {batch} rows")
            if at + 2 * T > 16:
                break


def test_another_order_is_seen(monkeypatch):
    """Runs of attention that are twice as long."""
    from pallas_kernels.attention import mosaic_plan, mosaic_runs

    model, text = layers("8B"), np.random.default_rng(0).integers(0, 4096, (len(LENGTHS), 4))
    held, lengths = rows("8B", "int8", len(LENGTHS))

    def logits():
        step = jax.jit(lambda target, *args: target(*args)[0])
        return np.asarray(passed(step, target_of(model, "int8"), held, lengths, text))

    first = logits()
    np.testing.assert_array_equal(logits(), first)
    for module in (mosaic_plan, mosaic_runs):
        monkeypatch.setattr(module, "MIN_UNITS", 2 * mosaic_plan.MIN_UNITS)
    jax.clear_caches()
    assert (logits() != first).any()
    jax.clear_caches()


@pytest.fixture(scope="module")
def embedded():
    return load(demo.MODEL)


def prompts_of(tokenizer, count: int) -> list[list[int]]:
    """Parts of a real source file, of several lengths."""
    ids = tokenizer(Path(argparse.__file__).read_text())["input_ids"]
    return [ids[i * 700 : i * 700 + 400 + 53 * i] for i in range(count)]


@pytest.mark.parametrize(("draft", "cache"), [("quantspec", "int8"), ("sparse:budget=0.1", "int8"), ("prompt-lookup", "full")])
def test_a_batch_and_its_refilled_slots_emit_what_one_by_one_decoding_does(embedded, draft, cache):
    model, tokenizer = embedded
    prompts = prompts_of(tokenizer, 5)
    settings = dict(exact="bits", cache=cache, ignore_eos=True, max_new_tokens=96)
    alone = [generate(model, [prompt], config=GenerationConfig(draft="none", **settings)).token_ids[0] for prompt in prompts]
    config = GenerationConfig(draft=draft, num_speculative_tokens=5, **settings)
    assert generate(model, prompts, config=config).token_ids == alone
    requests = [Request(prompt, config, key) for prompt, key in zip(prompts, prompt_keys(jax.random.key(0), len(prompts)), strict=True)]
    found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=3)}
    assert [found[b] for b in range(len(prompts))] == alone


@pytest.mark.parametrize("draft", ["none", "quantspec", "sparse:budget=0.1", "combine:prompt-lookup+quantspec"])
def test_samples_of_a_batch_are_those_alone_in_every_run(embedded, draft):
    model, tokenizer = embedded
    config = GenerationConfig(draft=draft, exact="bits", cache="int8", ignore_eos=True, max_new_tokens=96, temperature=0.8, top_p=0.95)
    keys = prompt_keys(jax.random.key(0), 3)
    requests = [Request(prompt, config, key) for prompt, key in zip(prompts_of(tokenizer, 3), keys, strict=True)]
    found = [{result.index: result.token_ids for result in run_batch(model, requests, batch_size=3)} for _ in range(2)]
    assert found[0] == found[1]
    assert [generate(model, prepare(model, [request])).token_ids[0] for request in requests] == [found[0][b] for b in range(3)]


@pytest.mark.parametrize("cache", ["int8", "full"])
def test_short_rows_do_not_depend_on_the_room_that_longer_ones_need(embedded, cache):
    """Alone, such a row has no room for a group of codes."""
    model, tokenizer = embedded
    long = prompts_of(tokenizer, 1)[0]
    prompts = [long[:50], long, long[100:160]]
    config = GenerationConfig(draft="none", exact="bits", cache=cache, ignore_eos=True, max_new_tokens=128)
    alone = [generate(model, [prompt], config=config).token_ids[0] for prompt in prompts]
    assert generate(model, prompts, config=config).token_ids == alone


def test_logits_of_short_rows_do_not_depend_on_capacity():
    target, step = target_of(layers("8B"), "int8"), jax.jit(lambda target, *args: target(*args))
    config, text, found = target.model.config, np.random.default_rng(0).integers(0, 4096, (1, 8)), []
    keys, values = jax.random.normal(jax.random.key(0), (2, 1, config.num_kv_heads, 2 * G, 128), jnp.bfloat16)
    for capacity in (2 * G, 40 * G):
        empty = CacheConfig.parse("int8").empty(config, batch=1, capacity=capacity, num_speculative_tokens=16, dtype=jnp.bfloat16)
        held = filled(empty, keys, values, jnp.array([200]))
        found.append(np.asarray(passed(step, target, held, np.array([200]), text)[0]))
    np.testing.assert_array_equal(*found)
