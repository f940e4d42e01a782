"""`PrefillByRow`: the state after prompts that are read one by one is that after the same prompts together."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts
from tiers import in_system

from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.keys import stacked
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import Prefill
from qspec_jax.decoding.prefill_by_row import PrefillByRow
from qspec_jax.decoding.prepare import prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.sampling import make_sampler, prompt_keys

PROMPTS = random_prompts([40, 150, 70])  # of two padded lengths
SETTINGS = {
    "none": dict(draft="none", repetition_penalty=1.3, min_new_tokens=3, banned_token_ids=(3,), logit_bias={5: 1.0}),
    "quantspec": dict(draft="quantspec", adaptive=True, top_logprobs=2),
    "prompt-lookup": dict(draft="prompt-lookup", stop_token_ids=((1, 2),)),
    "sparse": dict(draft="sparse:budget=0.5"),  # takes queries of prompts, and observes
}


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    return random_model(jnp.float64)


@pytest.mark.parametrize("name", ["sparse", *in_system(*(name for name in SETTINGS if name != "sparse"))])
def test_rows_read_one_by_one_are_those_read_together(model, name):
    config = GenerationConfig(cache="int8", group_size=16, max_new_tokens=20, ignore_eos=True, **SETTINGS[name])
    prepared = prepare(model, PROMPTS, config=config, key=jax.random.key(0))
    keys, sampler, limits = (
        stacked([each.key for each in prepared.requests]),
        make_sampler(*prepared.configs),
        make_limits(model, *prepared.configs),
    )
    found = []
    for by_row in (False, True):
        engine = prepared.engine()
        engine._fixed_order = by_row
        prefill = engine.prefill_of(PROMPTS, sampler, keys, limits)
        assert type(prefill) is (PrefillByRow if by_row else Prefill)
        engine.compile_prefills([prefill], rounds_after=prefill)
        state = engine.prepare_prefill(prefill)()
        assert jax.tree.map(lambda x: (x.shape, x.dtype), prefill.shapes()) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        *parts, in_parts = engine.prefill_in_parts(prefill)
        assert all(isinstance(part, jax.Array) for part in parts)
        read = engine.read(*PROMPTS).logits
        end = engine.rounds(in_parts, sampler, limits)
        found.append((state.pending, read, end.tokens, end.emitted, state.logprobs, end.logprobs))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9), *found)


@pytest.mark.parametrize("draft", ["prompt-lookup", *in_system("quantspec")])
def test_batches_of_exact_bits_go_as_on_a_gpu(model, monkeypatch, draft):
    """All but the kernels: rows that have no room for a group alone, slots that are refilled, and log-probabilities."""
    monkeypatch.setattr("qspec_jax.decoding.engine.dispatch", types.SimpleNamespace(platform=lambda: "gpu"))
    config = GenerationConfig(
        draft=draft,
        cache="int8",
        group_size=128,
        max_new_tokens=24,
        ignore_eos=True,
        exact="bits",
        top_logprobs=1,
        stop_token_ids=((1, 2),),
    )
    prompts = random_prompts([40, 30, 50, 20, 300])
    keys = prompt_keys(jax.random.key(0), len(prompts))
    alone = [generate(model, [prompt], config=dataclasses.replace(config, draft="none")).token_ids[0] for prompt in prompts]
    assert generate(model, prompts, config=config).token_ids == alone
    for count in (4, 5):  # all rows short, and beside a long one
        requests = [Request(prompt, config, key) for prompt, key in zip(prompts[:count], keys)]
        found = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2)}
        assert [found[b] for b in range(count)] == alone[:count]
