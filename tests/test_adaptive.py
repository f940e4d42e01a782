"""What adaptive speculation costs on real text, against every fixed number of drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qspec_jax import GenerationConfig, demo, load
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.sampling import Greedy, prompt_keys
from qspec_jax.drafts import quantspec
from qspec_jax.evaluate.walk import WALK
from qspec_jax.training import corpus

pytestmark = [pytest.mark.optimized, pytest.mark.system]

# Milliseconds of a draft over those of verifying, on an H100 (docs/measurements/2026-11.md): Llama-2-7B at 4k, Llama-3.1-8B at 128k.
COSTS = (1.90 / 6.11, 3.59 / 9.27)
FIXED, MOST = (1, 2, 3, 4, 6), 6
TEXTS, PROMPT, NEW = 1, 64, 96


def test_near_the_best_fixed_number_of_drafts():
    """Every text is walked by every policy, each in a row of one batch: what is drafted and accepted, along the real tokens."""
    model, tokenizer = load(demo.MODEL, dtype="float32")
    ids = (tokenizer(path.read_text(encoding="utf-8"))["input_ids"][: PROMPT + NEW] for path in corpus.held_out_files())
    texts = [text for text in ids if len(text) == PROMPT + NEW][:TEXTS]
    settings = dict(draft="quantspec", max_new_tokens=NEW, ignore_eos=True)
    policies = [GenerationConfig(num_speculative_tokens=gamma, **settings) for gamma in FIXED]
    policies += [GenerationConfig(num_speculative_tokens=MOST, adaptive=True, draft_cost=cost, **settings) for cost in COSTS]
    rows = [text for text in texts for _ in policies]
    limits = make_limits(model, *policies * TEXTS)
    real = jnp.asarray(np.pad(np.array(rows)[:, PROMPT:], ((0, 0), (0, MOST + 1))), jnp.int32)
    sizes = dict(gamma=MOST, prompt_tokens=PROMPT, max_new_tokens=NEW)
    engine = Engine(model, quantspec(model), cache=policies[0].cache_config, **sizes)
    state = engine.prefill([row[:PROMPT] for row in rows], Greedy(), prompt_keys(jax.random.key(0), len(rows)), limits)
    state = dataclasses.replace(state, pending=real[:, 0])
    walk = engine.call(WALK, state, Greedy(), limits, real)
    counts = jax.device_get(walk.compile()[0](*walk.args)[0].counts)
    rounds, drafted = (x.reshape(TEXTS, len(policies)).sum(0) for x in (counts.rounds, counts.drafted))
    for i, cost in enumerate(COSTS):
        total = rounds + cost * drafted
        fixed, adaptive = total[: len(FIXED)], total[len(FIXED) + i]
        print(f"cost {cost:.3f}: fixed {dict(zip(FIXED, (fixed / fixed.min()).round(3)))}, adaptive {adaptive / fixed.min():.3f}")
        assert adaptive <= 1.03 * fixed.min() and adaptive < 0.9 * fixed.max()
