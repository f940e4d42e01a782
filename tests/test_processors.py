"""Processors, the schedule of drafts, and log-probabilities: against the target written down a second way, and without speculation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import DRAFTS, TABLE, WRONG, V, counted, filtered, p_value
from models import target_logits
from runs import random_model, random_prompts, run_rounds, with_draft
from scipy.special import log_softmax
from tiers import in_system

from pallas_kernels.formats.views import UPPER_PLANE
from qspec_jax.caches.cache import Reads
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding import logits_processors, round
from qspec_jax.decoding.adaptive import PROBE_ROUNDS, Adaptive
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts import quantspec
from qspec_jax.drafts.quantspec import QuantSpecDraft
from qspec_jax.errors import InputError
from qspec_jax.evaluate.scoring import token_logprobs
from qspec_jax.models.viewed import ViewedModel

EOS = 5
PROCESSORS = {
    "repetition penalty": dict(repetition_penalty=1.9, ignore_eos=True),
    "bias and ban": dict(logit_bias={2: 1.5, 4: -2.0, 3: -np.inf}, banned_token_ids=(1,), ignore_eos=True),
    "minimum": dict(min_new_tokens=2, eos_token_ids=(EOS,)),  # of the two tokens that are looked at only the second may be EOS
}
EVERYTHING = dict(repetition_penalty=0.6, logit_bias={2: 1.5}, banned_token_ids=(1,), min_new_tokens=2, eos_token_ids=(EOS,), min_p=0.1)
SCHEDULES = {
    "adaptive": dict(adaptive=True, draft_cost=0.3),
    "confidence": dict(min_draft_confidence=0.45),
    "both": dict(adaptive=True, draft_cost=0.1, min_draft_confidence=0.35),
}


def processed(logits, before, new: int, config: GenerationConfig):
    """Logits [V] after the tokens `before`, of which the last `new` are new, as transformers' processors would have them."""
    logits = np.array(logits, np.float64)
    for token, bias in config.logit_bias.items():
        logits[token] += bias
    seen = sorted(set(before))
    logits[seen] = np.where(logits[seen] < 0, logits[seen] * config.repetition_penalty, logits[seen] / config.repetition_penalty)
    logits[list(config.banned_token_ids)] = -np.inf
    if new < config.min_new_tokens:
        logits[list(config.eos_token_ids or ())] = -np.inf
    return logits


def joint(config: GenerationConfig):
    """Probabilities [V, V] of the two tokens emitted after token 0."""
    chances = np.zeros([V, V])
    for text in itertools.product(range(V), repeat=2):
        chances[text] = 1.0
        for i, token in enumerate(text):
            before = [0, *text[:i]]
            chances[text] *= filtered(processed(TABLE[before[-1]], before, len(before), config), min_p=config.min_p)[token]
    return chances


@pytest.mark.parametrize("options", [EVERYTHING | SCHEDULES["both"], *in_system(*PROCESSORS.values())], ids=str)
def test_tokens_have_the_targets_distribution(options):
    config = GenerationConfig(temperature=1.0, **options)
    counts = counted(TABLE, DRAFTS["zero where the target is likely"], make_sampler(config), settings=config)
    assert p_value(counts, joint(config)) > 1e-3


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    SCHEDULES.values(),
    ids=str,
)
def test_schedules_keep_the_distribution(options):
    """Counts the tokens after several rounds, whose lengths depended on what was accepted."""
    config = GenerationConfig(temperature=1.0, ignore_eos=True, **options)
    counts = counted(TABLE, DRAFTS["another table"], make_sampler(config), settings=config, at=5, length=3)
    p = filtered(TABLE)
    expected = np.linalg.matrix_power(p, 5)[0][:, None, None] * p[:, :, None] * p
    assert p_value(counts, expected) > 1e-3


def test_a_token_seen_too_late_is_noticed(monkeypatch):
    config = GenerationConfig(temperature=1.0, ignore_eos=True, repetition_penalty=1.9)
    right = logits_processors.seen_since
    monkeypatch.setattr(round, "seen_since", lambda seen, tokens: right(seen, tokens) + 1)
    counts = counted(TABLE, DRAFTS["another table"], make_sampler(config), settings=config, loop=WRONG)
    assert p_value(counts, joint(config)) < 1e-6


# A model with a cache ---------------------------------------------------------------------------------------------------

G, NEW = 4, 24
CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=NEW, group_size=G, ignore_eos=True, num_speculative_tokens=3)
MINIMUM = 8
OF_MODEL = dict(repetition_penalty=1.4, logit_bias={7: 3.0, 9: -1.0}, banned_token_ids=(11, 12), min_new_tokens=MINIMUM, ignore_eos=False)
PROMPTS = random_prompts([3, 9, 22])


@pytest.fixture(scope="module")
def model(float64):
    return random_model(jnp.float64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def draft(model):
    return quantspec(model)


@pytest.mark.parametrize("name", ["quantspec", pytest.param("none", marks=pytest.mark.system)])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OF_MODEL, id="processors"),
        pytest.param(SCHEDULES["both"] | {"repetition_penalty": 1.4}, id="schedules", marks=pytest.mark.system),
    ],
)
def test_greedy_tokens_are_the_targets(options, name, model, draft):
    config, draft = dataclasses.replace(CONFIG, draft=name, cache="int8", **options), None if name == "none" else draft
    if config.min_new_tokens:
        free = dataclasses.replace(config, min_new_tokens=0, ignore_eos=True)
        likely = generate(model, PROMPTS, config=with_draft(free, draft)).token_ids
        config = dataclasses.replace(config, eos_token_ids=(likely[0][2], likely[2][12]))
    out = generate(model, PROMPTS, config=with_draft(config, draft))
    logits = target_logits(model, PROMPTS, out.token_ids, group_size=G, scheme="int8_first")
    for prompt, tokens, rows in zip(PROMPTS, out.token_ids, logits):
        ends = [i for i, token in enumerate(tokens, 1) if token in (config.eos_token_ids or ())]
        assert ends == ([len(tokens)] if len(tokens) < NEW else ends[:1]) and min(ends, default=NEW) > config.min_new_tokens
        assert tokens == [int(processed(row, prompt + tokens[:i], i, config).argmax()) for i, row in enumerate(rows)]
        assert tokens != rows.argmax(-1).tolist()


@pytest.mark.system
@pytest.mark.parametrize("settings", [{"temperature": 0.9, "repetition_penalty": 1.4, "top_k": 9}, {"draft": "none"}])
def test_logprobs_are_the_targets_own(settings, model, draft):
    config = dataclasses.replace(CONFIG, cache="int8", top_logprobs=3, **settings)
    draft = draft if config.speculative else None
    out = generate(model, PROMPTS, config=with_draft(config, draft), key=jax.random.key(4))
    logits = target_logits(model, PROMPTS, out.token_ids, group_size=G, scheme="int8_first")
    for tokens, rows, chances, top in zip(out.token_ids, logits, out.logprobs, out.top_logprobs):
        expected = log_softmax(rows, -1)
        np.testing.assert_allclose(chances, expected[np.arange(NEW), tokens], atol=1e-9)
        ids = np.argsort(-expected, axis=-1)[:, :3]
        assert [[token for token, _ in place] for place in top] == ids.tolist()
        np.testing.assert_allclose([[chance for _, chance in place] for place in top], np.take_along_axis(expected, ids, 1), atol=1e-9)
    alone = generate(model, PROMPTS, config=with_draft(dataclasses.replace(config, top_logprobs=0), draft), key=jax.random.key(4))
    assert alone.token_ids == out.token_ids and alone.logprobs is None and alone.top_logprobs is None


# In float64: test_logprobs_are_the_targets_own.
@pytest.mark.system
@pytest.mark.parametrize("group_size", [4, 16])
def test_logprobs_in_float32_are_those_of_a_teacher_forced_pass(group_size):
    """That prefills the prompts and decodes through the INT8 cache, in blocks of as many tokens as a round verifies."""
    model = random_model(jnp.float32, num_hidden_layers=1)
    config = dataclasses.replace(CONFIG, max_new_tokens=50, group_size=group_size, output_logprobs=True, temperature=1.0)
    out = generate(model, PROMPTS, config=config, key=jax.random.key(0))
    width = config.num_speculative_tokens + 1
    expected = token_logprobs(model, PROMPTS, out.token_ids, config.cache_config, width=width)
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-5, rtol=0)
    draft = token_logprobs(model, PROMPTS, out.token_ids, config.cache_config, width=width, view=UPPER_PLANE)
    assert np.abs(draft - expected).max() > 1e-2  # they are no other view's


# Schedules ---------------------------------------------------------------------------------------------------------------


def test_as_many_drafts_as_pay():
    chance, most = np.linspace(0, 1, 41), 8
    adaptive = Adaptive(jnp.asarray(1e6 * chance), jnp.full(41, 1e6), jnp.zeros(41, jnp.int32))
    for cost in (0.01, 0.3, 0.9):
        drafts = np.arange(most + 1)
        gain = np.array([[(r ** np.arange(g + 1)).sum() / (1 + cost * g) for g in drafts] for r in chance])
        chosen = np.asarray(adaptive.drafts(jnp.full(41, cost), most))
        np.testing.assert_allclose(gain[np.arange(41), chosen], gain.max(1), rtol=1e-4)
        assert (chosen[chance < cost - 0.03] == 0).all() and chosen[-1] == most
    assert (np.asarray(adaptive.drafts(jnp.zeros(41), most)) == most).all()


@pytest.mark.system
def test_a_draft_that_is_always_wrong_is_left_alone(model):
    """After some rounds it drafts one token now and then, and no more."""
    config = dataclasses.replace(CONFIG, max_new_tokens=80, adaptive=True)
    run = run_rounds(
        model, PROMPTS, config, draft=QuantSpecDraft(ViewedModel(random_model(jnp.float64, num_hidden_layers=1, seed=5), UPPER_PLANE))
    )
    assert run.tokens == run_rounds(model, PROMPTS, dataclasses.replace(config, draft="none", cache="int8")).tokens
    drafted = np.diff([state.drafted for state in run.rounds], axis=0)
    assert drafted[0].max() > 1
    for row in drafted[25:].T:
        probes = np.flatnonzero(row)
        assert len(probes) and row.max() == 1 and (np.diff(probes) > PROBE_ROUNDS).all()


def test_a_draft_that_is_always_right_is_followed(model):
    config = dataclasses.replace(CONFIG, max_new_tokens=60, adaptive=True, num_speculative_tokens=6, cache="full")
    run = run_rounds(model, PROMPTS, config, draft=quantspec(model, weight_bits=16, cache="int8"))
    drafted = np.diff([state.drafted for state in run.rounds], axis=0)
    assert (drafted[3:-2] == 6).all() and (run.rounds[-1].accepted == run.rounds[-1].drafted).all()


def test_an_unsure_draft_drafts_no_further(model, draft):
    runs = {}
    for least in (0.0, 0.1, 1.0):
        run = run_rounds(model, PROMPTS, dataclasses.replace(CONFIG, min_draft_confidence=least), draft=draft)
        runs[least] = np.diff([state.drafted for state in run.rounds], axis=0)[:4].ravel().tolist(), run.tokens
    assert runs[0.0][1] == runs[0.1][1] == runs[1.0][1]
    assert max(runs[1.0][0]) == 1 and max(runs[0.0][0]) == 3 and sum(runs[1.0][0]) < sum(runs[0.1][0]) < sum(runs[0.0][0])


@pytest.mark.system
def test_sensitive_layers(float64):
    model = random_model(jnp.float64, num_hidden_layers=3)
    config = dataclasses.replace(CONFIG, num_speculative_tokens=4)
    drafts = [quantspec(model, sensitive_layers=layers) for layers in (0, 1, 2)]
    cache = CacheConfig(group_size=8).outline(model.config, 81)
    for draft, planes in zip(drafts, ((1, 1, 1), (2, 1, 2), (2, 2, 2))):
        assert [draft.reads(i, cache, 81) for i in range(3)] == [Reads(n, 72, 9) for n in planes]
    some, every = (generate(model, PROMPTS, config=with_draft(config, draft)) for draft in drafts[1:])
    assert some.token_ids == every.token_ids and some.stats.draft_acceptance_rate < every.stats.draft_acceptance_rate == 1
    with pytest.raises(InputError, match="from 0 to the model's 3 layers"):
        quantspec(model, sensitive_layers=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_p": 1.1}, "min_p 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty 0"),
        ({"repetition_penalty": 1e-30}, "from 0.01"),
        ({"logit_bias": {1: 1e39}}, "token 1"),
        ({"min_new_tokens": 300}, "at most max_new_tokens, 256"),
        ({"logit_bias": {1: np.nan}}, "token 1"),
        ({"logit_bias": {1: np.inf}}, "token 1"),
        ({"stop": ("",)}, "stop string"),
        ({"stop_token_ids": ((),)}, "stop sequence"),
        ({"top_logprobs": -1}, "top_logprobs -1"),
        ({"draft_cost": 0.0}, "draft_cost"),
        ({"min_draft_confidence": 2.0}, "min_draft_confidence"),
        ({"banned_token_ids": (64,)}, "token id 64"),
        ({"banned_token_ids": tuple(range(64))}, "no token is left"),
        ({"banned_token_ids": tuple(range(1, 64)), "min_new_tokens": 1, "eos_token_ids": (0,)}, "no token is left"),
        ({"stop_token_ids": ((1, -1),)}, "token id -1"),
        ({"eos_token_ids": (10**12,)}, "token id 1000000000000"),
        ({"top_logprobs": 65}, "vocabulary of 64"),
        ({"stop": ("x",)}, "tokenizer"),
    ],
)
def test_bad_settings(settings, words, model):
    with pytest.raises(InputError, match=words):
        generate(model, PROMPTS, config=GenerationConfig(**settings))
