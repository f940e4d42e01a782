"""SpeCache: what a pass reads in full precision, and how that is chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import random_model, random_prompts, run_rounds
from scipy.special import logsumexp

from pallas_kernels.attention.reference import attend_replaced
from pallas_kernels.formats.kv_cache import FullLayer, Lengths
from pallas_kernels.formats.low_bits import LowBits
from pallas_kernels.formats.token_codes import Replaced, TokenCodesLayer
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.drafts import make_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.perplexity import token_logprobs

FULL = GenerationConfig(max_new_tokens=6, draft="none", cache="full", group_size=4, ignore_eos=True, num_speculative_tokens=0)
PROMPTS = random_prompts([41, 50, 35])  # with a residual of 16 no flush comes within 6 tokens


def specache(**settings) -> GenerationConfig:
    """Over 1 bit. settings: of the cache."""
    text = ",".join(f"{name}={value}" for name, value in ({"bits": 1, "residual": 16} | settings).items())
    return dataclasses.replace(FULL, draft="specache", cache=f"specache:{text}", num_speculative_tokens=1)


def without_guess(config: GenerationConfig) -> GenerationConfig:
    return dataclasses.replace(config, draft="none", num_speculative_tokens=0)


def test_attention_by_hand():
    """Codes, but for the tokens that are replaced; and the share of each quantized token in the last query's attention."""
    with jax.enable_x64(True):
        r = np.random.default_rng(0)
        keys, values = r.standard_normal((2, 1, 2, 12, 8))
        q, recent = r.standard_normal((1, 2, 4, 8)), r.standard_normal((2, 1, 2, 5, 8))
        coded = [LowBits.of(jnp.asarray(x), bits=1, tokens=t, channels=c, rule="centred") for x, t, c in ((keys, 4, 1), (values, 1, 4))]
        layer = TokenCodesLayer(*coded, FullLayer(*map(jnp.asarray, recent)))
        positions = np.array([[[3, 7, -1], [0, 3, 11]]])
        lengths = Lengths(jnp.array([8]), jnp.array([4]))  # position 11 is not there: only the caller's choice would put it there
        replaced = Replaced(
            jnp.asarray(positions), *(jnp.asarray(np.take_along_axis(x, np.maximum(positions, 0)[..., None], 2)) for x in (keys, values))
        )
        found, share = attend_replaced(jnp.asarray(q), layer, lengths, replaced)
        read = [np.array(codes.dequantized(jnp.float64))[0] for codes in coded]
        for head in range(2):
            there = np.arange(12) < 8
            for at in positions[0, head]:
                if at >= 0:
                    read[0][head, at], read[1][head, at], there[at] = keys[0, head, at], values[0, head, at], True
            whole = [np.concatenate([x[head], y[0, head]]) for x, y in zip(read, recent)]
            for token in range(2):
                seen = np.concatenate([there, np.arange(5) < 3 + token])
                for group in range(2):
                    query = q[0, token, 2 * head + group]
                    logits = np.where(seen, whole[0] @ query * 8**-0.5, -np.inf)
                    weights = np.exp(logits - logsumexp(logits))
                    np.testing.assert_allclose(found[0, token, 2 * head + group], weights @ whole[1], atol=1e-12)
            with np.errstate(divide="ignore"):
                queries = q[0, 1, 2 * head : 2 * head + 2]
                logits = np.where(np.concatenate([there, np.arange(5) < 4]), queries @ whole[0].T * 8**-0.5, -np.inf)
                expected = logsumexp(logits - logsumexp(logits, 1, keepdims=True), 0)[:12]
            np.testing.assert_allclose(share[0, head], expected, atol=1e-12)


def test_everything_fetched_is_the_full_cache():
    """One pass before the first round, and from then on the guess chooses; without either, the first pass reads codes alone."""
    with jax.enable_x64(True):
        model = random_model("float64")
        full = run_rounds(model, PROMPTS, FULL).tokens
        assert run_rounds(model, PROMPTS, specache(k=64)).tokens == full
        assert run_rounds(model, PROMPTS, without_guess(specache(k=64, fetch="now"))).tokens == full
        assert run_rounds(model, PROMPTS, without_guess(specache(k=64))).tokens != full
        assert run_rounds(model, PROMPTS, specache(k=1)).tokens != full
        # Over flushes too, where a pass chooses for itself.
        long = dict(max_new_tokens=40)
        config = dataclasses.replace(without_guess(specache(k=128, fetch="now")), **long)
        assert run_rounds(model, PROMPTS, config).tokens == run_rounds(model, PROMPTS, dataclasses.replace(FULL, **long)).tokens


def test_scores_of_real_text_go_by_guesses_too():
    """With everything fetched they are the full cache's; with little they are not, and depend on the guess."""
    with jax.enable_x64(True):
        model, continuations = random_model("float64"), random_prompts([6, 5, 4], seed=2)
        scores = lambda text: token_logprobs(model, PROMPTS, continuations, CacheConfig.parse(text, 4))
        full = scores("full")
        np.testing.assert_allclose(scores("specache:bits=1,residual=16,k=64"), full, atol=1e-11)
        little = scores("specache:bits=1,residual=16,k=4")
        assert np.nanmax(np.abs(little - full)) > 1e-4
        assert np.nanmax(np.abs(little - scores("specache:bits=1,residual=16,k=4,fetch=now"))) > 1e-6


def test_one_token_a_round_and_no_draft_of_it():
    model = random_model("float32")
    run = run_rounds(model, PROMPTS, specache(k=8))
    assert [len(row) for row in run.tokens] == [6] * 3
    assert all((each.drafted == 0).all() for each in run.rounds) and len(run.rounds) == 6  # the first is prefill's


def test_a_row_depends_on_nothing_but_itself():
    """Slots that are refilled: a row that begins among others gets its pass before the first round, and theirs stay."""
    with jax.enable_x64(True):
        model, prompts = random_model("float64"), random_prompts([41, 20, 50, 35, 60])
        config = dataclasses.replace(specache(k=8), temperature=0.7)
        requests = [
            Request(prompt, dataclasses.replace(config, max_new_tokens=5 + 9 * i), jax.random.key(i)) for i, prompt in enumerate(prompts)
        ]
        draft = make_draft("specache", model)
        together = {result.index: result.token_ids for result in run_batch(model, requests, batch_size=2, draft=draft)}
        for i, request in enumerate(requests):
            (alone,) = run_batch(model, [request], batch_size=1, draft=draft)
            assert together[i] == alone.token_ids


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(cache="specache:k=0"), "specache k 0 should be at least 1"),
        (dict(cache="specache:fetch=later"), "specache fetch 'later' should be ahead or now"),
        (dict(draft="specache", cache="int8"), "draft specache goes with cache specache, not int8"),
        (dict(draft="specache", num_speculative_tokens=4), "makes one guess a round"),
    ],
)
def test_wrong_settings(settings, words):
    with pytest.raises(InputError, match=words):
        GenerationConfig(**settings)


def test_by_its_name(run, directory):
    code, _, err = run(
        "generate", "--model", directory, "--prompt", "def f(x):\n" * 20, "--draft", "specache", "--max-new-tokens", 8, "--json"
    )
    assert (code, GenerationConfig(draft="specache").cache) == (0, "specache"), err
